"""Distillation of a head from a teacher's head, or its k tokens: logits are made in chunks of tokens.

For each chunk of tokens both products are made, the student's into the buffer of ``linear.pipeline``, and the gradient
replaces the student's logits there. Reduced losses compute their gradients in forward, with the products of
``linear_cross_entropy`` and one more for the teacher. Unreduced ones, and fp16, do it in backward, which makes the
logits again.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import public
from vocab_parallel_ce.linear.cross_entropy import run, split_keywords
from vocab_parallel_ce.linear.plan import Arguments
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.losses.divergences import DIVERGENCE, TeacherHead, check_hard_weight
from vocab_parallel_ce.losses.known_tokens import KNOWN_TOKENS, Tokens
from vocab_parallel_ce.options import divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.shard import VocabShard


class LinearDistillationKeywords(TypedDict, total=False):
    """Keywords, as type checkers see them; :class:`Settings` and :class:`HeadSettings` have their defaults."""

    rest: str
    divergence: str
    beta: float
    hard_weight: float
    ignore_index: int
    temperature: float
    reduction: str
    impl: str
    check_labels: bool
    vocab_size: int | None
    shard: VocabShard | None
    reduce_hidden_grad: bool
    chunk_tokens: int | str
    memory_budget: int | None


KEYWORDS = keyword_defaults(LinearDistillationKeywords)


@public()
@checks.naming(hidden="student_hidden", weight="student_weight", bias="student_bias")
@with_keywords(KEYWORDS)
def linear_distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    group: Any = None,
    teacher_ids: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    labels: Tensor | None = None,
    num_items: float | Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """:func:`distillation_loss` of ``hidden @ weight.T + bias`` of both models, which are made in chunks of tokens.

    Overwrites nothing. Forward computes the gradients of the student's tensors, and backward scales them, once. For
    ``"none"`` and fp16, backward makes the logits again and computes them, and may run again. The teacher's tensors get
    none.

    Collectives: those of :func:`linear_cross_entropy`, of the statistics of :func:`distillation_loss`. "js" has twice
    as many all_gathers of statistics, two per chunk where the others have one in all.

    Args:
        student_hidden: ``[..., D]`` bf16, fp16 or fp32, at least two dimensions, the same on every rank.
        student_weight: ``[C, D]``, this rank's rows of the head, of the dtype of ``student_hidden``, or a DTensor.
        teacher_hidden: ``[..., D']``, of the same leading dimensions. Must not require a gradient.
        teacher_weight: ``[C', D']``, of the dtype of ``teacher_hidden``, from the same column on.
        student_bias, teacher_bias: ``[C]`` and ``[C']``, or None.
        teacher_ids, teacher_log_probs, rest: as in :func:`distillation_loss`, instead of the teacher's head.
        chunk_tokens, memory_budget, reduce_hidden_grad: as in :func:`linear_cross_entropy`, of the student's logits.
        others: as in :func:`distillation_loss`.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError: as :func:`linear_cross_entropy`.
        RuntimeError: from backward, if it runs again over scaled gradients, or with ``create_graph``.
    """
    settings, head = split_keywords(keywords, KEYWORDS, linear_distillation_loss)
    settings = divided_by(num_items, settings)
    check_hard_weight(settings, labels)  # here, because labels of all tokens stand for None below
    checks.check_integer("ignore_index", settings.ignore_index)
    if labels is None:  # nothing is ignored
        settings = settings._replace(ignore_index=-100)
    checks.check_hidden(student_hidden)
    of_rows = student_hidden.new_zeros(student_hidden.shape[:-1], dtype=torch.int64) if labels is None else labels
    heads: tuple[Any, ...] = (teacher_hidden, teacher_weight, teacher_bias, labels)
    tokens: tuple[Any, ...] = (teacher_log_probs, teacher_ids, labels)
    loss: Loss = KNOWN_TOKENS
    beside: Any = Tokens(*tokens)
    if teacher_log_probs is None and teacher_ids is None:
        loss, beside = DIVERGENCE, TeacherHead(*heads)
    else:
        for name, tensor in zip(("teacher_hidden", "teacher_weight", "teacher_bias"), heads, strict=False):
            if tensor is not None:
                raise ValueError(f"{name}: expected None with teacher_ids and teacher_log_probs, got a tensor")
    given = Arguments(student_hidden, student_weight, student_bias, of_rows, beside, group, num_items)
    return run(loss, given, settings, head)[0].loss
