"""Losses against a distribution per token: what they must return in fp64 and in PyTorch's fp32."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tests.support.cases.inputs import NEG_INF
from tests.support.cases.logits import Results, random_grad_output
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import transformed
from vocab_parallel_ce import TopKTeacher, distillation_loss


def kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """``[N]``: sums over outcomes whose p is not 0."""
    left_out = log_p == NEG_INF
    terms = log_p.exp() * (log_p.masked_fill(left_out, 0.0) - log_q.masked_fill(left_out, 0.0))
    return terms.masked_fill(left_out, 0.0).sum(-1)


def divergences(
    student: Tensor,
    teacher: Tensor,
    *,
    labels: Tensor | None = None,
    divergence: str = "forward",
    temperature: float = 1.0,
    beta: float = 0.5,
    hard_weight: float = 0.0,
    ignore_index: int = -100,
) -> Tensor:
    """Differentiable unreduced losses in the dtype of ``student [N, V]``."""
    student = student.masked_fill(student == NEG_INF, NEG_INF)
    log_s, log_t = ((z / temperature).log_softmax(dim=-1) for z in (student, teacher))
    if divergence == "js":
        # The sum of two -inf has no gradient.
        filled = (z.masked_fill((log_s == NEG_INF) & (log_t == NEG_INF), 0.0) for z in (log_t, log_s))
        log_m = torch.logaddexp(next(filled) + math.log(beta), next(filled) + math.log(1 - beta))
        losses = beta * kl(log_t, log_m) + (1 - beta) * kl(log_s, log_m)
    else:
        losses = kl(log_t, log_s) if divergence == "forward" else kl(log_s, log_t)
    if not hard_weight:
        return losses
    hard = F.cross_entropy(student, labels, ignore_index=ignore_index, reduction="none")
    return (1 - hard_weight) * losses + hard_weight * hard


def topk_losses(
    student: Tensor,
    ignored: Any,
    *,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    rest: str = "ignore",
    temperature: float = 1.0,
    divergence: str = "forward",
    beta: float = 0.5,
    hard_weight: float = 0.0,
    labels: Tensor | None = None,
) -> Tensor:
    """Differentiable unreduced losses in the dtype of ``student [N, V]``."""
    log_s = (student / temperature).log_softmax(-1)
    log_q = teacher_log_probs.to(student.dtype)
    own = log_s.gather(-1, teacher_ids)
    if rest == "bucket":
        r = (1 - log_q.exp().sum(-1, keepdim=True)).clamp(min=0)
        others = log_s.scatter(-1, teacher_ids, NEG_INF).logsumexp(-1, keepdim=True)
        own, log_q = torch.cat([own, others], -1), torch.cat([log_q, r.log()], -1)
    if divergence == "js":
        log_m = torch.logaddexp(log_q + math.log(beta), own + math.log(1 - beta))
        losses = beta * kl(log_q, log_m) + (1 - beta) * kl(own, log_m)
    else:
        losses = kl(log_q, own) if divergence == "forward" else kl(own, log_q)
    if not hard_weight:
        return losses
    return (1 - hard_weight) * losses + hard_weight * F.cross_entropy(student, labels, reduction="none")


def topk_loss(
    student: Tensor,
    ignored: Any,
    *,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    rest: str = "ignore",
    **options: Any,
) -> Tensor:
    """A call of the loss in the words of :func:`topk_losses`."""
    teacher = TopKTeacher(teacher_ids, teacher_log_probs, rest, options.get("temperature", 1.0))
    return distillation_loss(student, teacher, **options)


def subtracted(student: Tensor, teacher: Tensor, options: dict[str, Any]) -> tuple[float, float]:
    """Magnitudes of what a divergence subtracts: ``p * (|log s| + |log t|)``, of the worst row, and of one column."""
    log_s, log_t = ((z.double() / options.get("temperature", 1.0)).log_softmax(-1) for z in (student, teacher))
    terms = torch.maximum(log_s, log_t).exp() * (log_s.abs() + log_t.abs()).nan_to_num(0.0, 0.0, 0.0)
    terms = terms.nan_to_num(0.0, 0.0, 0.0)
    is_forward = options.get("divergence", "forward") == "forward"  # its gradient is s - t
    return float(terms.sum(-1).max()), 0.0 if is_forward else float(terms.max())


def subtracted_at_known(student: Tensor, options: dict[str, Any]) -> float:
    """Magnitude of what the loss of a top-k teacher subtracts: ``q * (|log s| + |log q|)`` of the worst row."""
    log_s = (student.double() / options.get("temperature", 1.0)).log_softmax(-1)
    log_q = options["teacher_log_probs"].double()
    own = log_s.gather(-1, options["teacher_ids"])
    if options.get("divergence", "forward") == "forward" and not options.get("hard_weight"):
        return float((log_q.exp() * (own.abs() + log_q.abs())).sum(-1).max())
    return float((torch.maximum(log_q, own).exp() * (own.abs() + log_q.abs())).sum(-1).max()) + 1.0


class Pair(NamedTuple):
    """Logits and a tensor alongside them, over the whole vocabulary, and the loss of both."""

    logits: Tensor  # [N, V]
    other: Tensor  # [N, V] the teacher's logits
    losses: Callable[..., Tensor]  # the oracle: unreduced, of both and options
    labels: Tensor | None = None  # [N]


WAYS = ("reduction", "gradient", "num_items")  # options that the oracle's losses do not know


def grad_output_of(options: dict[str, Any], rows: int) -> Tensor:
    if options.get("reduction") != "none":
        return torch.tensor(0.75)
    return random_grad_output(rows, seed=1)


def expected(pair: Pair, dtype: torch.dtype, grad_output: Tensor, **options: Any) -> Results:
    """In ``dtype``: fp64 is the truth, fp32 what PyTorch makes of it."""
    leaf = pair.logits.detach().to(dtype).requires_grad_()
    known = {name: value for name, value in options.items() if name not in WAYS}
    known |= {"labels": pair.labels} if options.get("hard_weight") else {}
    losses = pair.losses(leaf, pair.other.to(dtype), **known)
    counted = torch.ones_like(losses, dtype=torch.bool)
    if pair.labels is not None:
        counted = pair.labels != options.get("ignore_index", -100)
        losses = losses.where(counted, 0.0)
    reduction, num_items = options.get("reduction", "mean"), options.get("num_items")
    loss = losses if reduction == "none" else losses.sum()
    if num_items is not None or reduction == "mean":
        loss = loss / float(counted.sum() if num_items is None else num_items)
    (grad,) = torch.autograd.grad(loss, leaf, grad_output.to(leaf).expand(loss.shape))
    return Results((loss.detach(),), grad)


def in_exponents(logits: Tensor, options: dict[str, Any]) -> float:
    """Magnitude of what is subtracted in exponents: ``p * |z|`` of one column. The rounding of z is relative in p."""
    ways = {name: options[name] for name in ("logit_scale", "softcap") if name in options}
    z = transformed(logits.double(), **ways) / options.get("temperature", 1.0)
    return float((z.softmax(-1) * z.abs()).nan_to_num(0.0, 0.0, 0.0).max())


def assert_right(results: Results, pair: Pair, *grad_outputs: Tensor, **options: Any) -> None:
    """``results`` of the call with ``options`` are those of the oracle; a grad_output is that of the reduction."""
    (grad_output,) = grad_outputs or (grad_output_of(options, len(pair.logits)),)
    truth = expected(pair, torch.float64, grad_output, **options)
    there = tree_map_only(torch.Tensor, lambda t: t.to(results.grad.device), (pair, options))
    peer = expected(there[0], torch.float32, grad_output, **there[1])  # a GPU's exponential is less exact than a CPU's
    of_loss, of_grad = 0.0, in_exponents(pair.logits, options)
    if pair.losses is divergences:
        of_loss, of_terms = subtracted(pair.logits, pair.other, options)
        of_grad += of_terms  # the rounding of both
    if pair.losses is topk_losses:
        of_loss = subtracted_at_known(pair.logits, options)
    of_grad *= float(grad_output.abs().max()) / (1 if results.loss.dim() else len(pair.logits))
    assert_within_budget(results.loss, truth.loss, peer.loss, of_loss)
    roundings = 2 if options.get("gradient") == "in_forward" else 1  # backward multiplies what forward has written
    assert_within_budget(results.grad, truth.grad, peer.grad, of_grad, roundings)
