"""The calls of this project that are measured, at this commit or at another, and what is right in fp64 by PyTorch.

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
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from bench_lib.cases import IGNORE_INDEX, OF_COLUMNS, OURS, TOP, TOP_P, Case, Inputs

MOST_WEIGHT = 1.2  # of an objective's importance weights
CHECKED_ROWS = 64
SUMS = 64 * 2.0**-23  # the error of sums in fp32
CHUNK_ELEMENTS = 2**27  # logits in fp64 that exist at a time: 1 GiB
Tensors = tuple[Tensor, ...]
Take = Callable[[str], Any]  # what a loss takes, by name


class Row(NamedTuple):
    """A call: its loss, its options, and the tensors that it takes by name, as :func:`outputs_fp64` does.

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


_losses = (cross_entropy, log_probs, given_ids, sampled, distillation, objective, teacher)
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
    if case.kind == "objective":
        return OBJECTIVE_ROWS | (UNFUSED_ROWS["objective"] if case.ranks == 1 else {})
    if case.is_head:
        return HEAD_ROWS | (UNFUSED_ROWS["losses"] if case.ranks == 1 else ON_RANKS)
    return OPTION_ROWS if case.kind == "options" else LOSS_ROWS


def of_all_ranks(shard: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' shards side by side."""
    if group is None:
        return shard
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def outputs_fp64(row: Row, logits: Tensor, given: Take) -> list[Tensor]:
    """The outputs of each token, by PyTorch's own functions; a mean's divisor is left to the caller."""
    options = row.options
    z = logits * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    if row.loss == "log_probs":
        temperature = given("temperature")[:, None] if "temperature" in row.given else options.get("temperature", 1.0)
        return _log_probs(row.outputs, z / temperature, given("labels"))
    if row.loss == "objective":
        log_probs, entropy = _log_probs(("log_probs", "entropy"), z, given("labels"))
        has_entropy = options.get("has_entropy", True)
        return [cispo(log_probs, given("advantage"), given("old"), entropy if has_entropy else None)]
    if row.loss == "sampled":
        log_p = z.masked_fill(~_sampled(z), -torch.inf).log_softmax(-1)
        return [-(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)]
    if row.loss == "given_ids":
        return [(z.log_softmax(-1).gather(1, given("ids")) * given("log_probs")).sum(-1)]
    if row.loss == "teacher":
        divergence = _divergence(options["divergence"], given("teacher"), z)
        if not options["has_labels"]:
            return [divergence]
        log_probs, entropy = _log_probs(("log_probs", "entropy"), z, given("labels"))
        return [opd(log_probs, divergence, entropy, given("advantage"))]
    if row.loss == "distillation":
        hard = options.get("hard_weight", 0.0)
        divergence = _divergence(options.get("divergence", "forward"), given("teacher"), z)
        of_labels = functional.cross_entropy(z, given("labels"), reduction="none") if hard else 0.0
        return [(1 - hard) * divergence + hard * of_labels]
    weight = given("class_weight") if "class_weight" in row.given else None
    smoothing = options.get("label_smoothing", 0.0)
    losses = functional.cross_entropy(z, given("labels"), weight, label_smoothing=smoothing, reduction="none")
    return [losses + options.get("z_loss", 0.0) * torch.logsumexp(z, -1).square()]


def _sampled(z: Tensor) -> Tensor:
    """Which logits a sampler of TOP and TOP_P keeps, with ties."""
    in_order = z.detach().sort(-1, descending=True).values
    in_order = in_order.masked_fill(in_order < in_order[:, min(TOP, z.shape[-1]) - 1, None], -torch.inf)
    last = (in_order.softmax(-1).cumsum(-1) < TOP_P).sum(-1, keepdim=True)
    return z >= in_order.gather(-1, last)


def _log_probs(outputs: tuple[str, ...], z: Tensor, labels: Tensor) -> list[Tensor]:
    log_p = z.log_softmax(-1)
    every = {
        "log_probs": lambda: log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0],
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "lse": lambda: torch.logsumexp(z, -1),
        "sum_sq_probs": lambda: log_p.exp().square().sum(-1),
        "mean_logit": lambda: z.mean(-1),
    }
    return [every[name]() for name in outputs]


def _divergence(name: str, teacher: Tensor, student: Tensor) -> Tensor:
    log_t, log_s = teacher.log_softmax(-1), student.log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if name == "js":  # of beta 0.5
        log_m = ((log_t.exp() + log_s.exp()) / 2).log()
        return (kl(log_t, log_m) + kl(log_s, log_m)) / 2
    return kl(log_t, log_s) if name == "forward" else kl(log_s, log_t)


def expected(row: Row, inputs: Inputs, group: Any, n_tokens: int) -> list[Tensor]:
    """The outputs of a row for the first tokens, then the gradients of their sums, this rank's; tokens in chunks.

    Collectives: all_gathers.
    """
    *of_tokens, shard = (tensor.detach() for tensor in inputs.tensors)
    labels, is_head = inputs.labels[:n_tokens], bool(of_tokens)
    whole = of_all_ranks(shard, 0, group) if is_head else of_all_ranks(shard[:n_tokens], 1, group)
    weight: Any = whole.double().requires_grad_() if is_head else None
    divisor = _divisor(row, labels, partial(_given, inputs, group, slice(None)))
    outputs: list[list[Tensor]] = []
    gradients: list[Any] = []
    chunk = max(1, CHUNK_ELEMENTS // whole.shape[0 if is_head else 1])
    for start in range(0, n_tokens, chunk):
        rows = slice(start, min(start + chunk, n_tokens))
        leaf = (of_tokens[0] if is_head else whole)[rows].double().requires_grad_()
        found = outputs_fp64(row, leaf if weight is None else leaf @ weight.T, partial(_given, inputs, group, rows))
        upstream = 1.0 if inputs.upstreams is None else inputs.upstreams[torch.float32][rows].double()
        (sum((output * upstream).sum() for output in found) / divisor).backward()
        outputs.append([output.detach() for output in found])
        gradients.append(leaf.grad)
    together = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    if row.reduction != "none":
        together = [output.sum() / divisor for output in together]
    d_tokens, n_columns = torch.cat(gradients), shard.shape[0 if is_head else 1]
    first = n_columns * (0 if group is None else dist.get_rank(group))
    columns = slice(first, first + n_columns)
    return [*together, d_tokens[:, columns]] if weight is None else [*together, d_tokens, weight.grad[columns]]


def _divisor(row: Row, labels: Tensor, given: Take) -> Any:
    if row.reduction != "mean":
        return row.options.get("num_items", 1)
    counted = labels[labels != IGNORE_INDEX] if row.loss == "cross_entropy" else labels
    return given("class_weight")[counted].sum() if "class_weight" in row.given else len(counted)


def _given(inputs: Inputs, group: Any, rows: slice, name: str) -> Any:
    """What a loss takes of these tokens, of all ranks: ids as they are, numbers in fp64."""
    value = inputs.labels if name == "labels" else inputs.alongside(name)
    if isinstance(value, tuple):
        hidden, weight = value
        return hidden[rows].double() @ of_all_ranks(weight, 0, group).double().T
    if name in OF_COLUMNS:
        return of_all_ranks(value, 0, group).double()
    found = of_all_ranks(value[rows], 1, group) if name == "teacher" else value[rows]
    return found.double() if found.is_floating_point() else found


@torch.no_grad()
def errors_of(actual: tuple[Tensor, ...], right: list[Tensor], gradients: tuple[str, ...]) -> dict[str, float]:
    """Relative errors: of all losses as a whole, of each gradient the root mean square over its rows.

    Over rows, since a few rows of a weight's gradient, those of the labels, hold nearly all of its norm.
    """
    n_losses = len(right) - len(gradients)
    loss, right_loss = (torch.cat([t.reshape(-1).double() for t in ts[:n_losses]]) for ts in (actual, right))
    norm = torch.linalg.vector_norm
    errors = {"loss": float(norm(loss - right_loss) / norm(right_loss))}
    for name, grad, right_grad in zip(gradients, actual[n_losses:], right[n_losses:], strict=True):
        norms = norm(right_grad, dim=1)
        # A row that must be zero counts as one far smaller than the others. Where its terms cancel, fp64 leaves 1e-17.
        counted = norms[norms > norms.max() * 1e-12]
        smallest = float(counted.median()) * 1e-3 if len(counted) else 1e-30
        relative = norm(grad.reshape(right_grad.shape) - right_grad, dim=1) / norms.clamp(min=smallest)
        errors[name] = float(relative.square().mean().sqrt())
    return errors


def require(errors: dict[str, float], allowed: tuple[float, ...]) -> None:
    """Raise AssertionError if an error is larger than allowed, or NaN."""
    for (name, error), most in zip(errors.items(), allowed, strict=True):
        if not error <= most:
            raise AssertionError(f"{name}: relative error {error:.2g}, at most {most:.2g}")
