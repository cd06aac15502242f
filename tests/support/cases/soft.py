"""Divergences from a distribution per token, whole or known at k tokens, by PyTorch."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases.inputs import NEG_INF
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
    *,
    teacher_ids: Tensor,
    teacher_log_probs: Tensor,
    rest: str = "ignore",
    **options: Any,
) -> Tensor:
    """A call of the loss in the words of :func:`topk_losses`."""
    teacher = TopKTeacher(teacher_ids, teacher_log_probs, rest, options.get("temperature", 1.0))
    return distillation_loss(student, teacher, **options)
