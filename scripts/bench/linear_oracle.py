"""Is a linear cross-entropy right? All of its loss and gradients against fp64, before anything is timed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from bench.linear_cases import IGNORE_INDEX, LinearCase, LinearInputs
from bench.oracle import FP32_EPS

CHUNK_ELEMENTS = 2**28  # logits that exist at a time: 2 GiB in fp64


class LinearResult(NamedTuple):
    """What a provider returns, and in fp64 what it must come to."""

    loss: Tensor  # [] or [N]
    d_hidden: Tensor  # [N, D], of all ranks together
    d_weight: Tensor  # [C, D]


@torch.no_grad()
def expected(case: LinearCase, inputs: LinearInputs, rank: int, group: Any) -> LinearResult:
    """Collectives: three all-reduces for every chunk of tokens, and one."""
    first = rank * case.columns
    weight = inputs.weight.double()
    losses = torch.empty(case.tokens, dtype=torch.float64, device=weight.device)
    d_hidden = torch.empty_like(inputs.hidden, dtype=torch.float64)
    d_weight = torch.zeros_like(weight)
    n_valid = (inputs.labels != IGNORE_INDEX).sum().clamp(min=1)
    upstream = inputs.upstreams[torch.float32].double().expand(case.tokens)
    if case.reduction == "mean":
        upstream = upstream / n_valid
    chunk = max(1, CHUNK_ELEMENTS // case.columns)
    for start in range(0, case.tokens, chunk):
        tokens = slice(start, start + chunk)
        labels, hidden = inputs.labels[tokens], inputs.hidden[tokens].double()
        is_valid = labels != IGNORE_INDEX
        is_own = (labels >= first) & (labels < first + case.columns)
        place = (labels - first).clamp(0, case.columns - 1)[:, None]
        logits = hidden @ weight.T
        target = _of_all(torch.where(is_own, logits.gather(1, place)[:, 0], 0.0), "sum", group)
        largest = _of_all(logits.amax(1), "max", group)
        lse = largest + _of_all((logits - largest[:, None]).exp_().sum(1), "sum", group).log()
        losses[tokens] = torch.where(is_valid, lse - target, 0.0)
        grad = logits.sub_(lse[:, None]).exp_()
        grad.scatter_add_(1, place, -is_own.double()[:, None])
        grad.mul_((upstream[tokens] * is_valid)[:, None])
        d_hidden[tokens] = grad @ weight
        d_weight.addmm_(grad.T, hidden)
    loss = losses.sum() / n_valid if case.reduction == "mean" else losses
    return LinearResult(loss, _of_all(d_hidden, "sum", group), d_weight)


def _of_all(values: Tensor, operation: str, group: Any) -> Tensor:
    if group is not None:
        dist.all_reduce(values, {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[operation], group)
    return values


@torch.no_grad()
def errors(result: LinearResult, right: LinearResult) -> dict[str, float]:
    """Relative errors: of the loss as a whole, of the gradients the root mean square over their rows.

    Over rows, since few rows of a weight's gradient, those of the labels, hold nearly all of its norm.
    """
    of_loss = torch.linalg.vector_norm(result.loss - right.loss) / torch.linalg.vector_norm(right.loss)
    return {
        "loss": float(of_loss),
        "d_hidden": _over_rows(result.d_hidden, right.d_hidden),
        "d_weight": _over_rows(result.d_weight, right.d_weight),
    }


def _over_rows(actual: Tensor, right: Tensor) -> float:
    """A row that must be zero counts as one far smaller than the others."""
    norms = torch.linalg.vector_norm(right, dim=1)
    others = norms[norms > 0]
    smallest = 1e-3 * others.median() if others.numel() else torch.finfo(norms.dtype).tiny
    relative = torch.linalg.vector_norm(actual - right, dim=1) / norms.clamp(min=float(smallest))
    return float(relative.square().mean().sqrt())


def tolerances(case: LinearCase, is_ours: bool) -> dict[str, float]:
    """What the errors may be: for this project less than one rounding of an element to its dtype.

    Others may keep log-probabilities, or sum losses and gradients, in that dtype; a wrong formula is far off.
    """
    eps = torch.finfo(getattr(torch, case.dtype)).eps
    if is_ours:
        sums = 64 * FP32_EPS
        return {"loss": eps / 16 + sums, "d_hidden": eps + sums, "d_weight": eps + sums}
    return {"loss": 0.05, "d_hidden": 0.05, "d_weight": 0.1}


def fault(found: dict[str, float], allowed: dict[str, float]) -> str | None:
    """What is wrong, or None; NaN is."""
    wrong = [
        f"{name}: relative error {found[name]:.2g}, at most {most:.2g}"
        for name, most in allowed.items()
        if not found[name] <= most
    ]
    return "; ".join(wrong) or None
