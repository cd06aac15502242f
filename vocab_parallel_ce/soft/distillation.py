"""Distillation over sharded logits: the public function."""

from __future__ import annotations

from typing import Any, TypedDict

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import overwrites, public, run
from vocab_parallel_ce.losses.divergences import DIVERGENCE, Teacher
from vocab_parallel_ce.losses.known_tokens import KNOWN_TOKENS, Tokens
from vocab_parallel_ce.options import Settings, check_names, divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.shard import VocabShard


class DistillationKeywords(TypedDict, total=False):
    """Keywords, as type checkers see them; :class:`Settings` has their defaults."""

    rest: str
    divergence: str
    beta: float
    hard_weight: float
    ignore_index: int
    temperature: float
    reduction: str
    gradient: str
    impl: str
    check_labels: bool
    vocab_size: int | None
    shard: VocabShard | None


KEYWORDS = keyword_defaults(DistillationKeywords)


@public(overwrites)
@checks.naming(logits="student_logits")
@with_keywords(KEYWORDS)
def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    group: Any = None,
    teacher_ids: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    labels: Tensor | None = None,
    num_items: float | Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """Divergence of a student's distribution from a teacher's, over sharded logits of both.

    In fp32, with ``s`` and ``t`` the softmax of the student's and the teacher's logits divided by ``temperature``,
    over the whole vocabulary:

        "forward"   KL(t || s)
        "reverse"   KL(s || t)
        "js"        beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s
        loss        (1 - hard_weight) * divergence + hard_weight * cross_entropy(student_logits, labels)

    "forward" is Hinton et al.'s (arXiv:1503.02531), "js" GKD's (arXiv:2306.13649, equation 1). Nothing multiplies by
    ``temperature ** 2``, as Hinton et al. do: do it yourself. docs/distillation.md has more.

    With ``teacher_ids`` and ``teacher_log_probs`` instead of ``teacher_logits``, the teacher is known at ``k`` tokens:
    ``sum_k q_k (log q_k - log s_k)`` with ``q = exp(teacher_log_probs)``, "forward" only, without ``hard_weight``.

    Overwrites: by default nothing that anybody can still read, see ``gradient`` of the loss. The teacher's
    are never written, and get no gradient.

    Collectives: forward one all_gather of ``4 * K`` bytes per row from each rank, with ``K = 5``, 2 more with
    ``hard_weight``; "js" has ``K = 4``, and a second all_gather of 8 bytes. Backward none.

    Args:
        student_logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        teacher_logits: ``[..., C']`` bf16, fp16, fp32 or fp64, from the same column on. ``C'`` may differ from ``C`` by
            padding, if ``vocab_size`` or ``shard`` says what is. Must not require a gradient.
        teacher_ids: ``[..., k]`` int64 or int32 global ids, different in a row, the same on every rank.
        teacher_log_probs: ``[..., k]`` floating point, at this temperature, the same on every rank; -inf leaves an id
            out.
        rest: of a teacher known at ``k`` tokens. ``"ignore"``: nothing else counts. ``"bucket"``: all other tokens are
            one, of probability ``1 - sum_k q_k``.
        divergence, beta: as above; ``0 < beta < 1``, for "js" alone.
        labels: ``[...]`` int64 or int32 global ids, or None. Rows with ``ignore_index`` have loss and gradient 0.
        hard_weight: in [0, 1]; above 0 it needs ``labels``. The cross-entropy has temperature 1.
        reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or ``"none"``.
        gradient: as in :func:`vocab_parallel_cross_entropy`.
        impl: ``"triton"``, ``"reference"`` or ``"auto"``.
        others: as in :func:`vocab_parallel_cross_entropy`, of the student's logits.

    Returns:
        fp32 loss, fp64 for fp64 logits, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    check_names(keywords, KEYWORDS, distillation_loss)
    settings = divided_by(num_items, Settings(**keywords))
    if teacher_ids is None and teacher_log_probs is None:
        teacher = Teacher(teacher_logits, labels)  # type: ignore[arg-type]  # run checks it
        return run(DIVERGENCE, student_logits, teacher, settings, group=group, num_items=num_items)[0].loss
    if teacher_logits is not None:
        raise ValueError("teacher_logits: expected None with teacher_ids and teacher_log_probs, got a tensor")
    tokens = Tokens(teacher_log_probs, teacher_ids, labels)  # type: ignore[arg-type]  # run checks them
    return run(KNOWN_TOKENS, student_logits, tokens, settings, group=group, num_items=num_items)[0].loss
