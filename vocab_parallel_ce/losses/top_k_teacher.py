"""Divergences from a teacher that is known at k tokens, out of the student's log-probabilities at these ids.

    forward   sum_k q_k (log q_k - log s_k)
    reverse   sum_k s_k (log s_k - log q_k)
    js        sum_k beta q_k (log q_k - log m_k) + (1 - beta) s_k (log s_k - log m_k),  m = beta q + (1 - beta) s

With a rest, the other tokens are one more, of ``1 - sum_k s_k`` and ``1 - sum_k q_k``, which counts as at least half an
eps. A hard label is one more given id. An id of log-probability -inf is left out.
"""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.losses.divergences import check_hard_weight, divergence_options, log_ratios
from vocab_parallel_ce.losses.given_ids import IGNORED, GivenIdsLoss
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.spec import NAN, NEG_INF, LossOptions, is_ignored
from vocab_parallel_ce.targets import Role, Tokens

# Of the probabilities of a row. Log-probabilities of bf16 come to less than 1.03; probabilities in their place to k.
MOST_MASS = 1.125


class TopK(NamedTuple):
    """The targets: ids of a teacher's k tokens, and its log-probabilities there."""

    ids: Annotated[Tensor, Role("ids", ("rows", "k"), "teacher.ids", fill=IGNORED)]
    log_probs: Annotated[Tensor, Role("numbers", ("rows", "k"), "teacher.log_probs", fill=NEG_INF, checks_memory=True)]
    labels: Annotated[Tensor | None, Role("ids", ("rows",))] = None


class TopKOptions(NamedTuple):
    """What is computed of a row."""

    n_ids: int  # with that of a hard label
    n_known: int  # how many of the ids have a rest: the teacher's; 0: there is none
    ignore_index: int  # of labels
    softmax: LossOptions  # as of given ids
    divergence: str = "forward"
    beta: float = 0.5  # of js
    hard_weight: float = 0.0


class TopKLoss(GivenIdsLoss):
    """A divergence of the student's distribution from a teacher that is known at k tokens."""

    Targets = TopK

    def check(self, targets: TopK, tokens: Tokens, settings: Settings) -> None:
        check_hard_weight(settings, targets.labels)
        if targets.ids.shape != targets.log_probs.shape:
            expected = f"that of teacher.log_probs, {tuple(targets.log_probs.shape)}"
            raise ValueError(f"teacher.ids: shape must be {expected}, got {tuple(targets.ids.shape)}")
        if settings.hard_weight and settings.temperature != 1:
            raise ValueError(
                f"hard_weight: expected temperature=1 with a TopKTeacher, got {settings.temperature}; add "
                "vocab_parallel_cross_entropy yourself"
            )

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> TopKOptions:
        ids, divergence = super().options(settings, vocab_size, class_weight=class_weight), divergence_options(settings)
        others = {name: getattr(divergence, name) for name in ("divergence", "beta", "hard_weight")}
        return TopKOptions(**ids._asdict(), **others)

    def row_shape(self, options: TopKOptions) -> tuple[int, ...]:
        return ()

    def ignored(self, targets: TopK, options: TopKOptions) -> Tensor | None:
        return None if targets.labels is None else is_ignored(targets.labels, options.ignore_index)

    def ids(self, targets: TopK) -> Tensor:
        if targets.labels is None:
            return targets.ids
        return torch.cat([targets.ids.long(), targets.labels.long().unsqueeze(-1)], dim=-1)

    def left_out(self, targets: TopK, options: TopKOptions) -> Tensor:
        left_out = targets.log_probs == NEG_INF
        if targets.labels is None:
            return left_out
        ignored = is_ignored(targets.labels, options.ignore_index).unsqueeze(-1)
        return torch.cat([left_out | ignored, ignored], dim=-1)

    def row_losses(self, values: Tensor, targets: TopK, options: TopKOptions) -> Tensor:
        terms, _ = _terms(values, targets, self.left_out(targets, options), options)
        rows, h = terms.sum(dim=-1), options.hard_weight
        if targets.labels is None:
            return rows
        label_log_prob = values[:, targets.log_probs.shape[-1]]
        if h == 1:
            rows = rows.masked_fill(rows.isinf(), 0.0)  # times 0 it would be NaN
        if h:
            rows = (1 - h) * rows - h * label_log_prob
        return torch.where(label_log_prob.isnan(), NAN, rows)  # a label outside the vocabulary

    def value_grads(self, values: Tensor, targets: TopK, grad_losses: Tensor, options: TopKOptions) -> Tensor:
        _, grads = _terms(values, targets, self.left_out(targets, options), options)
        k, h, grad_losses = targets.log_probs.shape[-1], options.hard_weight, grad_losses.unsqueeze(-1)
        grads = (1 - h) * grads * grad_losses
        if targets.labels is None:
            return grads
        return torch.cat([grads[:, :k], (-h * grad_losses).expand(grads.shape[0], 1), grads[:, k:]], dim=-1)


TOP_K = TopKLoss()


def _terms(values: Tensor, targets: TopK, left_out: Tensor, options: TopKOptions) -> tuple[Tensor, Tensor]:
    """Return the terms of a divergence, of the k ids and of the rest, and their derivatives by the student's values.

    Both are 0 where an outcome is left out.
    """
    k = targets.log_probs.shape[-1]
    left_out = left_out[:, :k]
    log_q, log_s = targets.log_probs.masked_fill(left_out, NEG_INF), values[:, :k]
    mass = log_q.exp().sum(dim=-1, keepdim=True)
    log_q = log_q.masked_fill(mass > MOST_MASS, NAN)
    if options.n_known:
        log_r = (1 - mass).clamp(min=torch.finfo(log_q.dtype).eps / 2).log()
        log_q, log_s = torch.cat([log_q, log_r], dim=-1), torch.cat([log_s, values[:, -1:]], dim=-1)
        left_out = torch.cat([left_out, left_out.all(dim=-1, keepdim=True)], dim=-1)
    log_q, log_s = log_q.masked_fill(left_out, 0.0), log_s.masked_fill(left_out, 0.0)
    # An outcome that the student excludes, by a logit of -inf, must not make its gradient NaN.
    excluded = log_s == NEG_INF
    known = log_s.masked_fill(excluded, 0.0)
    q, s = log_q.exp(), known.exp().masked_fill(excluded, 0.0)
    if options.divergence == "forward":
        terms, grads = q * (log_q - log_s), -q
    elif options.divergence == "reverse":
        terms, grads = s * (known - log_q), s * (known - log_q + 1)
    else:
        # What the mixture adds to the derivatives of both terms cancels.
        student_ratio, teacher_ratio = log_ratios(known, log_q, options.beta)
        student_terms = (1 - options.beta) * s * student_ratio
        teacher_ratio = teacher_ratio.masked_fill(excluded, -math.log(options.beta))
        terms, grads = options.beta * q * teacher_ratio + student_terms, student_terms
    return terms.masked_fill(left_out, 0.0), grads.masked_fill(left_out, 0.0)
