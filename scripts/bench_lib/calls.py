"""The calls of this project that are measured, at this commit or at another.

Only this file knows the names of this project's functions. The tensors that get a gradient are ``(logits,)`` or
``(hidden, weight)``.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from bench_lib.cases import OURS, TOP, TOP_P, Case, Inputs

MOST_WEIGHT = 1.2  # of an objective's importance weights
Tensors = tuple[Tensor, ...]
Take = Callable[[str], Any]  # what a loss takes, by name


class Row(NamedTuple):
    """A call: its loss, its options, and the tensors that it takes by name, as `truth.outputs_fp64` does.

    ``is_unfused``: a head's logits are made first. On several ranks, a row of ``sequence_parallel`` gets its part of
    the hidden states.
    """

    loss: str
    options: dict[str, Any]
    given: tuple[str, ...] = ()
    is_unfused: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what log-probabilities return that has a gradient."""
        asked = self.options.get("outputs", ())
        return ("log_probs", *(name for name in asked if name in ("entropy", "lse")))

    @property
    def reduction(self) -> str:
        default = "none" if self.loss in ("log_probs", "given_ids", "sampled") else "mean"
        return str(self.options.get("reduction", default))


def of_head(package: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a head's call: its fields of HeadOptions in one, except for a commit that has no such record."""
    record: Any = getattr(package, "HeadOptions", None)
    names = () if record is None else {field.name for field in dataclasses.fields(record)} & {*options}
    others = {name: value for name, value in options.items() if name not in names}
    return others | {"options": record(**{name: options[name] for name in names})} if names else others


def cross_entropy(package: Any, tensors: Tensors, take: Take, **options: Any) -> Any:
    if len(tensors) == 2:
        return package.linear_cross_entropy(*tensors, take("labels"), **of_head(package, options))
    return package.vocab_parallel_cross_entropy(*tensors, take("labels"), **options)


def log_probs(package: Any, tensors: Tensors, take: Take, ids: str = "labels", **options: Any) -> Any:
    if len(tensors) == 2:
        return package.linear_token_log_probs(*tensors, take(ids), **of_head(package, options))
    return package.token_log_probs(*tensors, take(ids), **options)


def given_ids(package: Any, tensors: Tensors, take: Take, **options: Any) -> Any:
    return (log_probs(package, tensors, take, "ids", **options) * take("log_probs")).sum(-1)


def sampled(package: Any, tensors: Tensors, take: Take, **options: Any) -> Any:
    """The entropies alone: most labels are none that a sampler takes."""
    threshold = package.sampling_threshold(*tensors, top_k=TOP, top_p=TOP_P, group=options.get("group"))
    return log_probs(package, tensors, take, threshold=threshold, outputs=("entropy",), **options).entropy


def distillation(package: Any, tensors: Tensors, take: Take, **options: Any) -> Any:
    if len(tensors) == 2:
        heads = package.Head(*tensors), package.Head(*take("teacher"))
        return package.linear_distillation_loss(*heads, **of_head(package, options))
    return package.distillation_loss(*tensors, take("teacher"), **options)


def objective(package: Any, tensors: Tensors, take: Take, **options: Any) -> Any:
    """:func:`cispo` inside the head, or of log-probabilities that come first."""
    outputs = ("entropy",) if options.get("has_entropy", True) else ()
    tokens, asked = {name: take(name) for name in ("advantage", "old")}, {"outputs": outputs, "group": options["group"]}
    if options.get("in_two_steps"):
        found = log_probs(package, tensors, take, **asked)
        return cispo(found.log_probs, entropy=found.entropy, **tokens).mean()
    return package.linear_objective(*tensors, take("labels"), cispo, tokens=tokens, **asked)[0]


def teacher(package: Any, tensors: Tensors, take: Take, divergence: str, has_labels: bool, group: Any) -> Any:
    """The divergence from a teacher's head alone, or in :func:`opd`."""
    known = package.Teacher(*take("teacher"), divergence=divergence)
    labels = take("labels") if has_labels else None
    function, tokens = (opd, {"advantage": take("advantage")}) if has_labels else (lambda divergence: divergence, None)
    outputs = ("entropy",) if has_labels else ()
    return package.linear_objective(
        *tensors, labels, function, tokens=tokens, outputs=outputs, teacher=known, group=group
    )[0]


def opd(log_probs: Tensor, divergence: Tensor, entropy: Tensor, advantage: Tensor) -> Tensor:
    """That of docs/distillation.md."""
    return divergence - 0.01 * entropy - advantage * log_probs


def pairs(package: Any, tensors: Tensors, take: Take, in_two_steps: bool = False, **options: Any) -> Any:
    """:func:`simpo` of whole pairs inside the head, or of log-probabilities that come first."""
    pair, sign, reference = map(take, ("pair", "sign", "reference"))
    if in_two_steps:
        return simpo_of_tokens(log_probs(package, tensors, take, **options), pair, sign, reference)
    of_groups = {"together": pair, "tokens": {"sign": sign}, "numbers": {"reference": reference}}
    return package.linear_objective(*tensors, take("labels"), simpo, **of_groups, **of_head(package, options))[0]


def simpo(log_probs: Tensor, groups: Any, sign: Tensor, reference: Tensor) -> Tensor:
    """That of arXiv:2405.14734 of each pair, whose sequences have one length, with a margin of its own."""
    return -functional.logsigmoid(2 * (groups.mean(sign * log_probs) - groups.of(reference)))


def simpo_of_tokens(log_probs: Tensor, pair: Tensor, sign: Tensor, reference: Tensor) -> Tensor:
    """The mean of :func:`simpo` of all pairs."""
    of_tokens = (sign * log_probs, torch.ones_like(log_probs))
    sums, lengths = (torch.zeros_like(reference).index_add(0, pair, each) for each in of_tokens)
    return -functional.logsigmoid(2 * (sums / lengths - reference)).mean()


_losses = (cross_entropy, log_probs, given_ids, sampled, distillation, objective, teacher, pairs)
LOSSES = {each.__name__: each for each in _losses}


def cispo(log_probs: Tensor, advantage: Tensor, old: Tensor, entropy: Tensor | None = None) -> Tensor:
    """MiniMax-M1's objective (arXiv:2506.13585) of each token, with an entropy bonus if the entropies are known."""
    weight = (log_probs.detach() - old).exp().clamp(max=MOST_WEIGHT) * advantage
    loss = -weight * log_probs
    return loss if entropy is None else loss - 0.01 * entropy


def called(row: Row, package: Any, inputs: Inputs, group: Any) -> Tensors:
    """What the row's function of a package returns that has a gradient."""

    def take(name: str) -> Any:
        value = inputs.labels if name == "labels" else inputs.alongside(name)
        return functional.linear(*value) if row.is_unfused and isinstance(value, tuple) else value

    tensors = (functional.linear(*inputs.tensors),) if row.is_unfused else inputs.tensors
    if row.options.get("sequence_parallel"):
        tensors = (tensors[0].chunk(dist.get_world_size(group))[dist.get_rank(group)], *tensors[1:])
    given = {name: take(name) for name in row.given}
    returned = LOSSES[row.loss](package, tensors, take, **given, **row.options, group=group)
    return tuple(out for out in tree_leaves(returned) if isinstance(out, Tensor) and out.requires_grad)


@cache
def baseline_package(checkout: Path) -> Any:
    """The package of another checkout, imported under a name of its own."""
    name = f"baseline_{OURS}"
    parent = Path(tempfile.mkdtemp())
    shutil.copytree(checkout / OURS, parent / name, ignore=shutil.ignore_patterns("__pycache__"))
    for source in (parent / name).rglob("*.py"):
        source.write_text(source.read_text().replace(OURS, name))
    sys.path.insert(0, str(parent))
    return importlib.import_module(name)


def _row(loss: str, *given: str, gradient: str = "in_backward", **options: Any) -> Row:
    """In place by name: the benchmark itself has the logits, so that the default takes a new tensor."""
    return Row(loss, {"gradient": gradient} | options, given)


def _in_forward(*given: str, **options: Any) -> Row:
    return _row("cross_entropy", *given, gradient="in_forward", **options)


WIDE, ENTROPY = {"logits_dtype": torch.float32}, ("entropy",)
OUTPUTS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")
ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 30.0, "logit_scale": 0.0625}
METRICS: dict[str, Any] = {"outputs": ("predictions",)}
OPTION_ROWS = {
    "mean": _row("cross_entropy"),
    "mean, in_forward": _in_forward(),
    **{f"mean, {name}": _row("cross_entropy", **{name: value}) for name, value in ALL.items()},
    "mean, predictions": _row("cross_entropy", **METRICS),
    **{f"mean, in_forward, {name}": _in_forward(**{name: ALL[name]}) for name in ("label_smoothing", "softcap")},
    "mean, in_forward, predictions": _in_forward(**METRICS),
    "sum, num_items": _row("cross_entropy", reduction="sum", num_items=1000),
    "none": _row("cross_entropy", reduction="none"),
    "none, all options": _row("cross_entropy", reduction="none", **ALL, **METRICS),
    "token_log_probs": _row("log_probs"),
    "token_log_probs, entropy": _row("log_probs", outputs=ENTROPY, temperature=0.7),
}
LOSS_ROWS = {
    "mean": _row("cross_entropy"),
    "mean, class_weight": _row("cross_entropy", "class_weight"),
    "mean, label_smoothing": _row("cross_entropy", label_smoothing=0.1),
    "mean, class_weight and label_smoothing": _row("cross_entropy", "class_weight", label_smoothing=0.1),
    "mean, in_forward": _in_forward(),
    "mean, in_forward, class_weight": _in_forward("class_weight"),
    "mean, in_forward, class_weight and label_smoothing": _in_forward("class_weight", label_smoothing=0.1),
    **{f"distillation, {name}": _row("distillation", divergence=name) for name in ("forward", "reverse", "js")},
    "distillation, forward, hard_weight": _row("distillation", "labels", divergence="forward", hard_weight=0.5),
    f"token_log_probs, {TOP} given ids": _row("given_ids"),
    "token_log_probs": _row("log_probs"),
    **{f"token_log_probs, {name}": _row("log_probs", outputs=(name,)) for name in OUTPUTS},
    f"entropy, sampling of top_k={TOP} and top_p={TOP_P}": _row("sampled"),
    "token_log_probs, a temperature per token": _row("log_probs", "temperature"),
}
HEAD_ROWS = {
    "linear": Row("cross_entropy", {}),
    "linear, logits_dtype": Row("cross_entropy", WIDE),
    "linear, class_weight": Row("cross_entropy", {}, ("class_weight",)),
    "linear, distillation": Row("distillation", {}),
    "linear, log_probs": Row("log_probs", {}),
    "linear, log_probs, logits_dtype": Row("log_probs", WIDE),
    "linear, log_probs, entropy": Row("log_probs", {"outputs": ENTROPY}),
    "linear, log_probs, entropy, keep_logits": Row("log_probs", {"outputs": ENTROPY, "keep_logits": "all"}),
}
OBJECTIVE, WITHOUT_ENTROPY = Row("objective", {}), Row("objective", {"has_entropy": False})
OBJECTIVE_ROWS = {
    "linear": Row("cross_entropy", {}),
    "linear, objective": OBJECTIVE,
    "linear, objective without entropy": WITHOUT_ENTROPY,
    "linear, log_probs and objective": Row("objective", {"in_two_steps": True}),
}
REVERSE, JS = (Row("teacher", {"divergence": name, "has_labels": False}) for name in ("reverse", "js"))
TEACHER_ROWS = {
    "linear": Row("cross_entropy", {}),
    "teacher, reverse": REVERSE,
    "teacher, js": JS,
    "teacher, reverse in an objective": Row("teacher", {"divergence": "reverse", "has_labels": True}),
}
PAIR_ROWS = {
    "linear": Row("cross_entropy", {}),
    "linear, objective without entropy": WITHOUT_ENTROPY,
    "linear, pairs": Row("pairs", {}),
    "linear, pairs, keep_logits": Row("pairs", {"keep_logits": "all"}),
    "linear, log_probs and pairs": Row("pairs", {"in_two_steps": True}),
}
# Of one rank alone: the gradient of the hidden states of two matmuls would need an all_reduce too.
UNFUSED_ROWS = {
    "losses": {"two matmuls and distillation": Row("distillation", {}, is_unfused=True)},
    "teacher": {"two matmuls and reverse": Row("distillation", {"divergence": "reverse"}, is_unfused=True)},
    "objective": {"two matmuls, log_probs and objective": Row("objective", {"in_two_steps": True}, is_unfused=True)},
}
ON_RANKS = {"linear, sequence_parallel": Row("cross_entropy", {"sequence_parallel": True})}


def rows_of(case: Case) -> dict[str, Row]:
    """The rows of a case of the commands ``options``, ``losses`` and ``objective``."""
    if case.teacher_size:
        return TEACHER_ROWS | (UNFUSED_ROWS["teacher"] if case.ranks == 1 else {})
    if case.n_pairs:
        return PAIR_ROWS
    if case.kind == "objective":
        return OBJECTIVE_ROWS | (UNFUSED_ROWS["objective"] if case.ranks == 1 else {})
    if case.is_head:
        return HEAD_ROWS | (UNFUSED_ROWS["losses"] if case.ranks == 1 else ON_RANKS)
    return OPTION_ROWS if case.kind == "options" else LOSS_ROWS
