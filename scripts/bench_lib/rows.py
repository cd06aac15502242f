"""The calls of this project that are measured alongside each other: every option, loss, output and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from bench_lib.adapters import Names
from bench_lib.cases import TOP, TOP_P, Case, Inputs

# What each loss takes after the tensors that get a gradient.
TAKES = {
    "cross_entropy": ("labels",),
    "log_probs": ("labels",),
    "distillation": ("teacher",),
    "top_k": ("ids", "log_probs"),
    "given_ids": ("ids", "log_probs"),
    "sampled": ("labels",),
    "objective": ("labels", "advantage", "old"),
}


class Row(NamedTuple):
    """A call: its loss, its numbers, and the tensors that it takes by name, as ``adapters`` and the oracle know them.

    ``is_unfused``: a head's logits are made first. On several ranks, a row of ``sequence_parallel`` gets its part of
    the hidden states.
    """

    loss: str
    options: dict[str, Any]
    given: tuple[str, ...] = ()
    is_unfused: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what is returned and has a gradient."""
        if self.loss != "log_probs":
            return ("loss",)
        asked = self.options.get("outputs", ())
        return ("log_probs", *(name for name in asked if name in ("entropy", "lse", "sum_sq_probs", "mean_logit")))

    @property
    def reduction(self) -> str:
        default: str = "none" if self.loss in ("log_probs", "given_ids", "sampled") else "mean"
        found: str = self.options.get("reduction", default)
        return found

    def is_known_to(self, package: Any) -> bool:
        """Whether a package of any commit has such a call."""
        is_new = self.loss == "given_ids" or self.loss == "top_k" and "divergence" in self.options
        is_new |= "keep_logits" in self.options
        if self.loss == "objective":
            return hasattr(package, "linear_objective")
        of_keys = hasattr(package, "sampling_threshold") or self.loss != "sampled"
        return of_keys and (hasattr(package, "TopKTeacher") or not is_new)

    def of_heads(self) -> Row:
        return self._replace(options={name: value for name, value in self.options.items() if name != "gradient"})


def called(row: Row, names: Names, inputs: Inputs, group: Any) -> tuple[Tensor, ...]:
    """What the functions of a commit return that has a gradient."""
    tensors, options = inputs.tensors, row.options
    values = [_tensor(name, inputs) for name in TAKES[row.loss]]
    if row.is_unfused:
        tensors = (functional.linear(*tensors),)
        values = [functional.linear(*value) if isinstance(value, tuple) else value for value in values]
    elif options.get("sequence_parallel"):
        own = tensors[0].chunk(torch.distributed.get_world_size(group))[torch.distributed.get_rank(group)]
        tensors = (own, *tensors[1:])
    given = {name: _tensor(name, inputs) for name in row.given}
    returned = getattr(names, row.loss)(tensors, *values, **given, **options, group=group)
    if isinstance(returned, Tensor):
        return (returned,)
    return tuple([out for out in tree_leaves(returned) if isinstance(out, Tensor) and out.requires_grad])


def _tensor(name: str, inputs: Inputs) -> Any:
    return inputs.labels if name == "labels" else inputs.alongside(name)


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
    f"distillation, top {TOP}": _row("top_k"),
    f"distillation, top {TOP}, reverse": _row("top_k", divergence="reverse"),
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
ALONE = {"two matmuls and distillation": Row("distillation", {}, is_unfused=True)}
OBJECTIVE, WITHOUT_ENTROPY = Row("objective", {}), Row("objective", {"has_entropy": False})
OBJECTIVE_ROWS = {
    "linear": Row("cross_entropy", {}),
    "linear, objective": OBJECTIVE,
    "linear, objective without entropy": WITHOUT_ENTROPY,
    "linear, log_probs and objective": Row("objective", {"in_two_steps": True}),
}
OBJECTIVE_ALONE = {
    "two matmuls, log_probs and objective": Row("objective", {"in_two_steps": True}, is_unfused=True),
}
# On several ranks the gradient of the hidden states of two matmuls would need an all_reduce too.
ON_RANKS = {"linear, sequence_parallel": Row("cross_entropy", {"sequence_parallel": True})}


def rows_of(case: Case) -> dict[str, Row]:
    """The rows of a case of the commands ``options``, ``losses``, ``objective`` and ``host``."""
    if case.kind == "objective":
        return OBJECTIVE_ROWS | (OBJECTIVE_ALONE if case.ranks == 1 else {})
    if case.is_head:
        return HEAD_ROWS | (ALONE if case.ranks == 1 else ON_RANKS)
    return {"options": OPTION_ROWS, "losses": LOSS_ROWS}.get(case.kind, OPTION_ROWS | LOSS_ROWS)
