"""Distillation over sharded logits: the public function."""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.cross_entropy import public
from vocab_parallel_ce.layout import compute_dtype, flat
from vocab_parallel_ce.options import Settings, check_names, divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.plan import comparable
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft import divergence_spec
from vocab_parallel_ce.soft.divergence_spec import DivergenceOptions
from vocab_parallel_ce.soft.pairs import PairCall, divisor_of, launchers_of, plan_pair, run
from vocab_parallel_ce.soft.topk import IGNORED, N_STATISTICS, TopK, TopKOptions, known_columns
from vocab_parallel_ce.spec import NEG_INF, is_ignored

LAUNCHERS = "divergence_reference", "distillation"
DIVERGENCES = ("forward", "reverse", "js")


class DistillationKeywords(TypedDict, total=False):
    """Keywords, as type checkers see them; :class:`Settings` has their defaults."""

    ignore_index: int
    temperature: float
    reduction: str
    gradient: str
    impl: str
    check_labels: bool
    vocab_size: int | None
    shard: VocabShard | None


KEYWORDS = keyword_defaults(DistillationKeywords)


@public(lambda keywords: True)
@checks.naming(logits="student_logits")
@with_keywords(KEYWORDS)
def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor | None = None,
    *,
    group: Any = None,
    teacher_ids: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    rest: str = "ignore",
    divergence: str = "forward",
    beta: float = 0.5,
    labels: Tensor | None = None,
    hard_weight: float = 0.0,
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
    ``hard_weight``; "js" has ``K = 4``, and a second all_gather of 8 bytes. Backward none. ``torch.compile`` breaks the
    graph here.

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
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``.
        impl: ``"triton"``, ``"reference"`` or ``"auto"``.
        others: as in :func:`vocab_parallel_cross_entropy`, of the student's logits.

    Returns:
        fp32 loss, fp64 for fp64 logits, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    check_names(keywords, KEYWORDS, distillation_loss)
    settings = divided_by(num_items, Settings(**keywords))
    checks.check_logits(student_logits)
    options = checked_options(divergence, beta, hard_weight, labels, settings)
    if teacher_ids is not None or teacher_log_probs is not None:
        if teacher_logits is not None:
            raise ValueError("teacher_logits: expected None with teacher_ids and teacher_log_probs, got a tensor")
        known = teacher_ids, teacher_log_probs, rest
        return _of_topk(student_logits, *known, labels, options, settings, group, num_items)
    checks.check_choice("rest (without teacher_ids)", rest, ("ignore",))
    _check_teacher(teacher_logits, student_logits)
    assert teacher_logits is not None
    plan = plan_pair(student_logits, teacher_logits, labels, "teacher_logits", settings, group)
    n_columns, subject = teacher_logits.shape[-1], "teacher_logits: last dimension"
    check_columns(n_columns, plan.shard, settings, *group_position(group), subject=subject)
    divisor = divisor_of(student_logits, labels, settings, num_items)
    if verify.open_calls:
        own = {**comparable(settings, num_items), **options._asdict(), "labels": labels is not None}
        of_all = torch.empty(0, dtype=torch.int64) if labels is None else labels
        verify.compare_call({"logits": student_logits}, of_all, plan.shard, own, beside="teacher_logits")
    n_statistics = len(divergence_spec.statistics(options))
    launchers, is_js = launchers_of(plan, *LAUNCHERS), options.divergence == "js"
    call = PairCall(plan, launchers, options, n_statistics, is_js, group, divisor)
    return run(call, student_logits, teacher_logits, None if labels is None else flat(labels))


def _of_topk(
    student: Tensor,
    ids: Any,
    log_probs: Any,
    rest: str,
    labels: Tensor | None,
    options: DivergenceOptions,
    settings: Settings,
    group: Any,
    num_items: float | Tensor | None,
) -> Tensor:
    """Compute the loss for a teacher that is known at k tokens."""
    known = checked_topk(ids, log_probs, rest, options, student, "student_logits")
    plan = plan_pair(student, log_probs, labels, "teacher_log_probs", settings, group)
    divisor = divisor_of(student, labels, settings, num_items)
    of_rows = checked_columns(ids, log_probs, labels, settings, plan.shard, compute_dtype(student.dtype))
    if verify.open_calls:
        own = {"labels": None if labels is None else verify.shown(labels), "teacher_log_probs": verify.shown(log_probs)}
        own |= {**comparable(settings, num_items), "rest": rest}
        verify.compare_call({"logits": student}, ids, plan.shard, own, beside="teacher_ids", subject="teacher_ids")
    call = PairCall(plan, TopK(plan.launchers), known, N_STATISTICS, False, group, divisor)
    return run(call, student, *of_rows)


def checked_topk(
    ids: Any, log_probs: Any, rest: str, options: DivergenceOptions, student: Tensor, subject: str
) -> TopKOptions:
    """Check that there are k ids and log-probabilities per row of ``student``, which is ``subject``."""
    checks.check_choice("rest", rest, ("ignore", "bucket"))
    if options.divergence != "forward" or options.hard_weight:
        asked = f"divergence={options.divergence!r} and hard_weight={options.hard_weight:g}"
        raise ValueError(f"teacher_ids: expected divergence='forward' and hard_weight=0, got {asked}")
    checks.check_tensor("teacher_ids", ids)
    checks.check_tensor("teacher_log_probs", log_probs)
    if ids.dtype not in checks.LABEL_DTYPES:
        raise TypeError(f"teacher_ids: dtype must be int64 or int32, got {ids.dtype}")
    if not log_probs.is_floating_point():
        raise TypeError(f"teacher_log_probs: dtype must be floating point, got {log_probs.dtype}")
    for name, tensor in {"teacher_ids": ids, "teacher_log_probs": log_probs}.items():
        if tensor.dim() == 0 or tensor.shape[:-1] != student.shape[:-1] or tensor.shape[-1] == 0:
            expected = f"{tuple(student.shape[:-1])} and k, for {subject} {tuple(student.shape)}"
            raise ValueError(f"{name}: shape must be {expected}, got {tuple(tensor.shape)}")
    if ids.shape != log_probs.shape:
        expected = f"that of teacher_log_probs, {tuple(log_probs.shape)}"
        raise ValueError(f"teacher_ids: shape must be {expected}, got {tuple(ids.shape)}")
    for name, tensor in {"teacher_ids": ids, "teacher_log_probs": log_probs}.items():
        if tensor.device != student.device:
            raise ValueError(f"{name}: device must be that of {subject}, {student.device}, got {tensor.device}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}")
    return TopKOptions(rest, options.temperature)


def checked_columns(
    ids: Tensor, log_probs: Tensor, labels: Tensor | None, settings: Settings, shard: VocabShard, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the :func:`known_columns`, their log-probabilities of ``dtype``; checks the ids with ``check_labels``."""
    if settings.check_labels:
        _check_ids(ids, log_probs, labels, settings.ignore_index, shard.vocab_size)
    return known_columns(ids, log_probs.detach().to(dtype), labels, shard, settings.ignore_index)


def _check_ids(ids: Tensor, log_probs: Tensor, labels: Tensor | None, ignore_index: int, vocab_size: int) -> None:
    """Wait for the device; raise ValueError for an id outside the vocabulary, or twice in a row."""
    known = torch.where(log_probs == NEG_INF, IGNORED, ids.long().clamp(min=IGNORED + 1))
    if labels is not None:
        known = torch.where(is_ignored(labels, ignore_index).unsqueeze(-1), IGNORED, known)
    known = known.reshape(-1, ids.shape[-1])
    checks.check_label_range(known, vocab_size, IGNORED, subject="teacher_ids")
    in_order = known.sort(dim=-1).values
    if bool(((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] != IGNORED)).any()):
        raise ValueError("teacher_ids: must be different in a row, got an id twice")


def checked_options(
    divergence: str, beta: float, hard_weight: float, labels: Tensor | None, settings: Settings
) -> DivergenceOptions:
    """Check what the mathematics takes."""
    checks.check_choice("divergence", divergence, DIVERGENCES)
    checks.check_number("beta", beta)
    if not 0 < beta < 1:
        raise ValueError(f"beta: must be above 0 and below 1, got {beta}; its limits are 'forward' and 'reverse'")
    if divergence != "js" and beta != 0.5:
        raise ValueError(f"beta: expected divergence='js' with it, got {divergence!r}")
    checks.check_number("hard_weight", hard_weight, at_most=1)
    if hard_weight and labels is None:
        raise ValueError(f"hard_weight: expected labels with it, got {hard_weight} and labels=None")
    checks.check_number("temperature", settings.temperature, positive=True)
    checks.check_number("1 / temperature", 1 / settings.temperature, positive=True)
    checks.check_integer("ignore_index", settings.ignore_index)
    numbers = float(settings.temperature), float(beta), float(hard_weight)
    return DivergenceOptions(divergence, *numbers, int(settings.ignore_index))


def _check_teacher(teacher: Any, student: Tensor) -> None:
    """Check that the teacher has a row per row of the student."""
    checks.check_tensor("teacher_logits", teacher)
    checks.check_dense("teacher_logits", teacher, checks.LOGITS_DTYPES)
    if teacher.shape[:-1] != student.shape[:-1] or teacher.dim() == 0:
        expected = f"that of student_logits up to the last dimension, {tuple(student.shape)}"
        raise ValueError(f"teacher_logits: shape must be {expected}, got {tuple(teacher.shape)}")


def check_columns(
    n_columns: int, shard: VocabShard, settings: Settings, rank: int, n_ranks: int, *, subject: str
) -> None:
    """Check that a teacher with ``n_columns``, which ``subject`` has, has the student's columns, except padding."""
    if n_columns == shard.n_columns:
        return
    if settings.vocab_size is None and settings.shard is None:
        raise ValueError(
            f"{subject} must be the student's, {shard.n_columns}, if neither vocab_size nor shard says what is "
            f"padding, got {n_columns}"
        )
    if settings.shard is None:
        own = VocabShard.of_rank(shard.vocab_size, rank, n_ranks, n_columns, subject=subject)
    else:
        own = VocabShard(shard.start, shard.start + n_columns, shard.vocab_size)
    if (own.start, own.n_valid) != (shard.start, shard.n_valid):
        columns = [f"[{each.start}, {each.start + each.n_valid})" for each in (shard, own)]
        raise ValueError(f"{subject} must give the student's columns {columns[0]}, got {columns[1]}")
