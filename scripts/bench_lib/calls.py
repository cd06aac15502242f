"""The calls of this project that are measured: every option, loss, output and head, at this commit or at another.

Only this file knows the names of the functions. ``TAKES`` has what each loss takes after the tensors that get a
gradient, which are ``(logits,)`` or ``(hidden, weight)``.
"""

from __future__ import annotations

import dataclasses
import importlib
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from bench_lib.cases import OURS, TOP, TOP_P, Case, Inputs

MOST_WEIGHT = 1.2  # of an objective's importance weights
Tensors = tuple[Tensor, ...]
TAKES = {
    "cross_entropy": ("labels",),
    "log_probs": ("labels",),
    "distillation": ("teacher",),
    "given_ids": ("ids", "log_probs"),
    "sampled": ("labels",),
    "objective": ("labels", "advantage", "old"),
}


class Row(NamedTuple):
    """A call: its loss, its options, and the tensors that it takes by name, as the oracle knows them too.

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
        return ("log_probs", *(name for name in asked if name in ("entropy", "lse", "sum_sq_probs", "mean_logit")))

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


class Names:
    """The calls of a package, by the names in ``TAKES``."""

    def __init__(self, package: Any) -> None:
        self.package = package

    def cross_entropy(self, tensors: Tensors, labels: Tensor, **options: Any) -> Any:
        if len(tensors) == 2:
            return self.package.linear_cross_entropy(*tensors, labels, **of_head(self.package, options))
        return self.package.vocab_parallel_cross_entropy(*tensors, labels, **options)

    def log_probs(self, tensors: Tensors, labels: Tensor, **options: Any) -> Any:
        if len(tensors) == 2:
            return self.package.linear_token_log_probs(*tensors, labels, **of_head(self.package, options))
        return self.package.token_log_probs(*tensors, labels, **options)

    def distillation(self, tensors: Tensors, teacher: Any, **options: Any) -> Any:
        if len(tensors) == 2:
            heads = self.package.Head(*tensors), self.package.Head(*teacher)
            return self.package.linear_distillation_loss(*heads, **of_head(self.package, options))
        return self.package.distillation_loss(*tensors, teacher, **options)

    def objective(self, tensors: Tensors, labels: Tensor, advantage: Tensor, old: Tensor, **options: Any) -> Tensor:
        """:func:`cispo` inside the head, or of log-probabilities that come first."""
        outputs = ("entropy",) if options.get("has_entropy", True) else ()
        tokens, asked = {"advantage": advantage, "old": old}, {"outputs": outputs, "group": options["group"]}
        if options.get("in_two_steps"):
            found = self.log_probs(tensors, labels, **asked)
            return cispo(found.log_probs, entropy=found.entropy, **tokens).mean()
        loss: Tensor = self.package.linear_objective(*tensors, labels, cispo, tokens=tokens, **asked)[0]
        return loss

    def given_ids(self, tensors: Tensors, ids: Tensor, log_probs: Tensor, **options: Any) -> Any:
        return (self.log_probs(tensors, ids, **options) * log_probs).sum(-1)

    def sampled(self, tensors: Tensors, labels: Tensor, **options: Any) -> Any:
        """The entropies alone: most labels are none that a sampler takes."""
        threshold = self.package.sampling_threshold(*tensors, top_k=TOP, top_p=TOP_P, group=options.get("group"))
        return self.log_probs(tensors, labels, threshold=threshold, outputs=("entropy",), **options).entropy


def cispo(log_probs: Tensor, advantage: Tensor, old: Tensor, entropy: Tensor | None = None) -> Tensor:
    """MiniMax-M1's objective (arXiv:2506.13585) of each token, with an entropy bonus if the entropies are known."""
    weight = (log_probs.detach() - old).exp().clamp(max=MOST_WEIGHT) * advantage
    loss = -weight * log_probs
    return loss if entropy is None else loss - 0.01 * entropy


def called(row: Row, package: Any, inputs: Inputs, group: Any) -> Tensors:
    """What the row's function of a package returns that has a gradient."""

    def tensor(name: str) -> Any:
        return inputs.labels if name == "labels" else inputs.alongside(name)

    tensors, values = inputs.tensors, [tensor(name) for name in TAKES[row.loss]]
    if row.is_unfused:
        tensors = (functional.linear(*tensors),)
        values = [functional.linear(*value) if isinstance(value, tuple) else value for value in values]
    elif row.options.get("sequence_parallel"):
        own = tensors[0].chunk(torch.distributed.get_world_size(group))[torch.distributed.get_rank(group)]
        tensors = (own, *tensors[1:])
    given = {name: tensor(name) for name in row.given}
    returned = getattr(Names(package), row.loss)(tensors, *values, **given, **row.options, group=group)
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
# Of one rank alone: the gradient of the hidden states of two matmuls would need an all_reduce too.
UNFUSED_ROWS = {
    "losses": {"two matmuls and distillation": Row("distillation", {}, is_unfused=True)},
    "objective": {"two matmuls, log_probs and objective": Row("objective", {"in_two_steps": True}, is_unfused=True)},
}
ON_RANKS = {"linear, sequence_parallel": Row("cross_entropy", {"sequence_parallel": True})}


def rows_of(case: Case) -> dict[str, Row]:
    """The rows of a case of the commands ``options``, ``losses``, ``objective`` and ``host``."""
    if case.kind == "objective":
        return OBJECTIVE_ROWS | (UNFUSED_ROWS["objective"] if case.ranks == 1 else {})
    if case.is_head:
        return HEAD_ROWS | (UNFUSED_ROWS["losses"] if case.ranks == 1 else ON_RANKS)
    return {"options": OPTION_ROWS, "losses": LOSS_ROWS}.get(case.kind, OPTION_ROWS | LOSS_ROWS)
