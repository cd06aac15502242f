"""The arguments of a head and its loss: checked, and planned as a :class:`LinearCall` and a local :class:`Head`."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.beside import checked_divisor, with_padding
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.head.chunks import (
    TokenOrder,
    chunk_of,
    chunks_of,
    kept_rows,
    most_kept,
    order_of_ranks,
    order_of_valid,
)
from vocab_parallel_ce.head.expected import Expected, check_expected, expected_of, warn_of_misfits
from vocab_parallel_ce.layout import flat
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import REDUCTIONS, HeadSettings, Settings, shard_of_rank
from vocab_parallel_ce.plan import Call, Plan, PlanKey, cached_plan, comparable
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import is_ignored

GRADIENTS = ("auto", "in_forward", "in_backward")
MOST_KEPT = 0.9  # share of valid tokens above which it does not pay to leave out the ignored ones
WEIGHT = "weight: rows"  # what has a rank's columns, for messages


class Head(NamedTuple):
    """What makes the logits ``hidden @ weight.T + bias`` of a shard.

    Example:
        >>> from vocab_parallel_ce import Head
        >>> teacher = Head(hidden=torch.ones(2, 3), weight=torch.zeros(4, 3))
        >>> teacher.bias is None
        True
    """

    hidden: Tensor  #: [..., D] bf16, fp16 or fp32, the same on every rank
    weight: Tensor  #: [C, D], this rank's rows; may be a DTensor, except a teacher's
    bias: Tensor | None = None  #: [C]


class Arguments(NamedTuple):
    """What a caller passes, except options."""

    head: Head
    labels: Tensor
    beside: Any  # the loss's record of what stands alongside the logits
    group: Any
    num_items: float | Tensor | None
    main_grad: Tensor | None = None
    expected_grad_output: Tensor | None = None


class LinearCall(NamedTuple):
    """One checked call: the loss of a chunk's logits, and how hidden states and weight take part."""

    call: Call  # its reduction is sum or none
    dtype: torch.dtype  # of the products
    logits_dtype: torch.dtype  # that, or fp32
    chunks: tuple[slice, ...]  # rows
    order: TokenOrder | None  # None: rows are tokens
    labels: Tensor  # [M]
    ignore_index: int
    overflow: Tensor | None  # [] fp32: 1, or NaN if more than valid_tokens are valid
    sequence_parallel: bool
    reduces: bool  # d_hidden, over several ranks
    main_grad: Tensor | None
    parameter: Tensor | None  # the caller's weight, if it wants to know that main_grad has its gradient
    expected: Expected | None  # of reduction "none", whose gradients forward computes
    n_kept: int  # number of rows whose logits are kept for backward
    recomputes: bool  # whether backward may compute the gradients: it needs statistics, hidden states and weight


def plan_linear_call(
    loss: Loss, given: Arguments, settings: Settings, head: HeadSettings
) -> tuple[LinearCall, Head, Any]:
    """Check the arguments and plan the call; changes nothing. Also return what stands alongside the rows' logits."""
    hidden, labels, expected = given.head.hidden, given.labels, given.expected_grad_output
    checks.check_hidden(hidden)
    checks.check_has_values(hidden)
    loss.check_head(given.beside, hidden, settings)
    checks.check_labels(labels, hidden, "hidden")
    check_head_settings(settings, head, knows_grad_output=expected is not None)
    checks.check_no_transforms(*(t for t in (*given.head, labels, *given.beside) if isinstance(t, Tensor)))
    rank, n_ranks = group_position(given.group)
    bias = None if given.head.bias is None else local_rows("bias", given.head.bias, given.group)
    weight = local_rows("weight", given.head.weight, given.group)
    if is_dtensor(given.head.weight):
        settings = settings._replace(vocab_size=shard_of_dtensor(given, settings, rank, n_ranks))
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts else hidden.dtype
    checks.check_head(weight, bias, hidden, None if autocasts else dtype)
    weight, bias, given, settings = with_a_row(weight, bias, given, settings, rank, n_ranks)
    _check_tokens(given, n_ranks, head)
    _check_expected(expected, labels, settings, dtype)
    logits_dtype = head.logits_dtype or dtype
    gradient = gradient_of(settings, head, dtype)
    recomputes = may_recompute(settings, gradient)
    plan = _plan_of_logits(
        loss, dtype, logits_dtype, weight.shape[0], given, settings, gradient, recomputes, rank, n_ranks
    )
    keeping = head if gradient == "in_backward" else head._replace(keep_logits="none")
    chunk, kept_bytes = _chunk_tokens(plan, keeping, labels, hidden, dtype, logits_dtype)
    if settings.check_labels:
        checks.check_label_range(labels, plan.shard.vocab_size, settings.ignore_index)
    rows, ignore_index = flat(labels), int(settings.ignore_index)
    is_valid = ~is_ignored(rows, ignore_index)
    chunks, order = _chunks_and_order(is_valid, chunk, n_ranks, head)
    weighs = settings.reduction == "mean" and given.beside.class_weight is not None
    rows = rows if order is None else order.to_rows(rows.long(), ignore_index)
    beside = loss.beside_head(given.beside, hidden, settings, plan, order, rows)
    if recomputes and torch.is_grad_enabled() and any(map(_needs_gradient, (hidden, weight, bias))):
        loss.check_can_be_saved(beside)
    linear = LinearCall(
        call=Call(plan, given.group, _divisor(given, settings, is_valid, weighs), weighs),
        dtype=dtype,
        logits_dtype=logits_dtype,
        chunks=chunks,
        order=order,
        labels=rows,
        ignore_index=ignore_index,
        overflow=_overflow(is_valid, head.valid_tokens),
        sequence_parallel=head.sequence_parallel and n_ranks > 1,
        reduces=head.reduce_hidden_grad and n_ranks > 1,
        main_grad=given.main_grad,
        parameter=given.head.weight if hasattr(given.head.weight, "grad_added_to_main_grad") else None,
        expected=None if expected is None else expected_of(expected, is_valid, order),
        n_kept=kept_rows(keeping.keep_logits, chunks, kept_bytes),
        recomputes=recomputes,
    )
    local = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    if verify.open_calls:
        _compare(linear, local, given, settings, head)
    return linear, local, beside


def _chunk_tokens(
    plan: Plan, head: HeadSettings, labels: Tensor, hidden: Tensor, dtype: torch.dtype, logits_dtype: torch.dtype
) -> tuple[int, int]:
    """Return the tokens of a chunk, and the bytes of a token's kept logits."""
    width = -(-plan.shard.vocab_size // plan.n_ranks)  # of every rank, so that the chunks are the same
    kept_bytes = width * logits_dtype.itemsize
    of_chunk = sum(d.itemsize for d in {dtype, logits_dtype})
    return chunk_of(head, labels.numel(), hidden.shape[-1], width, of_chunk, kept_bytes), kept_bytes


def _divisor(given: Arguments, settings: Settings, is_valid: Tensor, weighs: bool) -> Tensor | None:
    """Return ``[1]``, what divides the sum: ``num_items`` or the valid tokens; None if only the statistics tell."""
    if given.num_items is not None:
        return checked_divisor(given.num_items, settings.reduction, given.head.hidden)
    return is_valid.sum().reshape(1) if settings.reduction == "mean" and not weighs else None


def _needs_gradient(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad


def _compare(linear: LinearCall, local: Head, given: Arguments, settings: Settings, head: HeadSettings) -> None:
    """Compare the ranks' arguments."""
    plan, tensors = linear.call.plan, {**local._asdict(), "hidden": given.head.hidden}
    compared = plan.loss.compared_head(given.beside)
    options = comparable(settings, given.num_items) | head._asdict()
    options |= {"main_grad": given.main_grad is not None, "dtype of the products": linear.dtype}
    options |= {"expected_grad_output": "None", **compared["options"]}
    expected = {} if linear.expected is None else {"expected_grad_output": linear.expected.of_tokens}
    verify.compare_call(tensors, given.labels, plan.shard, options, compared["values"] | expected)


def _overflow(is_valid: Tensor, valid_tokens: int | None) -> Tensor | None:
    """Return the factor of the loss ``[]``: NaN if more tokens are valid than the caller said."""
    if valid_tokens is None:
        return None
    factor = is_valid.new_ones((), dtype=torch.float32)
    return factor.masked_fill_(is_valid.sum() > valid_tokens, float("nan"))


def check_head_settings(settings: Settings, head: HeadSettings, *, knows_grad_output: bool = False) -> None:
    """Check what can be checked without tensors; ``knows_grad_output`` if there is an ``expected_grad_output``."""
    checks.check_choice("reduction", settings.reduction, REDUCTIONS)
    checks.check_choice("gradient", settings.gradient, GRADIENTS)
    if not isinstance(head.keep_logits, str):
        raise TypeError(f"keep_logits: expected 'none', 'all', or bytes as '2GiB', got {head.keep_logits!r}")
    most_kept(head.keep_logits, 1, 1)
    check_keeps(head, settings.gradient)
    checks.check_bool("sequence_parallel", head.sequence_parallel)
    checks.check_bool("reduce_hidden_grad", head.reduce_hidden_grad)
    if head.logits_dtype not in (None, torch.float32):
        raise ValueError(f"logits_dtype: expected None or torch.float32, got {head.logits_dtype!r}")
    chunk_of(head, 1, 1, 1, 1, 1)
    if settings.gradient == "in_forward" and settings.reduction == "none" and not knows_grad_output:
        raise ValueError(
            "gradient: 'in_forward' cannot know the grad_output of reduction 'none', got both; use 'in_backward', or "
            "pass expected_grad_output"
        )
    if head.sequence_parallel and not head.reduce_hidden_grad:
        raise ValueError("reduce_hidden_grad: expected True with sequence_parallel, whose ranks hold parts, got False")
    if head.valid_tokens is None:
        return
    checks.check_integer("valid_tokens", head.valid_tokens)
    if head.valid_tokens < 0:
        raise ValueError(f"valid_tokens: must be at least 0, got {head.valid_tokens}")
    if head.sequence_parallel:
        raise ValueError(
            "valid_tokens: expected None with sequence_parallel, whose ranks hold parts that are cut "
            f"already, got {head.valid_tokens}"
        )


def check_keeps(head: HeadSettings, gradient: str) -> None:
    """Check that a backward which is asked for by name reads logits if they are kept."""
    if head.keep_logits != "none" and gradient == "in_forward":
        raise ValueError(
            "keep_logits: expected 'none' with gradient='in_forward', because backward reads no logits then, "
            f"got {head.keep_logits!r}; pass another gradient, or leave it out"
        )


def _check_expected(expected: Any, labels: Tensor, settings: Settings, dtype: torch.dtype) -> None:
    """Check an expected grad_output, if there is one, and that forward may compute gradients with it."""
    if expected is None:
        return
    warn_of_misfits()
    check_expected(expected, labels)
    if (settings.reduction, settings.gradient) != ("none", "in_forward"):
        asked = f"reduction={settings.reduction!r} and gradient={settings.gradient!r}"
        raise ValueError(f"expected_grad_output: expected reduction='none' and gradient='in_forward', got {asked}")
    if dtype == torch.float16:
        raise ValueError(
            "expected_grad_output: expected bf16 or fp32, because small gradients of fp16 would underflow before the "
            "loss scale multiplies them, got fp16; use gradient='in_backward' without it"
        )


def shard_of_dtensor(given: Arguments, settings: Settings, rank: int, n_ranks: int) -> VocabShard:
    """Return this rank's columns from sizes that all ranks know, so that all of them raise or none."""
    n_rows, bias, vocab_size = given.head.weight.shape[0], given.head.bias, settings.vocab_size
    cut = VocabShard.of_rank(n_rows, rank, n_ranks)
    if isinstance(vocab_size, VocabShard):
        raise ValueError(
            f"vocab_size: expected a number or None with a DTensor weight, whose shard is {cut}, got {vocab_size}"
        )
    if bias is not None and is_dtensor(bias) and bias.shape[0] != n_rows:
        raise ValueError(f"bias: expected shape ({n_rows},), got {tuple(bias.shape)}")
    if vocab_size is None:
        return cut
    vocab_size = checks.checked_count("vocab_size", vocab_size)
    if vocab_size > n_rows:
        raise ValueError(f"vocab_size: must be at most {n_rows}, the rows of weight, got {vocab_size}")
    return cut._replace(vocab_size=vocab_size)


def with_a_row(
    weight: Tensor, bias: Tensor | None, given: Arguments, settings: Settings, rank: int, n_ranks: int
) -> tuple[Tensor, Tensor | None, Arguments, Settings]:
    """Check ``main_grad``, and return the arguments of this rank: without rows one of padding, with no gradient."""
    if given.main_grad is not None:
        checks.check_main_grad(given.main_grad, weight)
    if weight.shape[0]:
        return weight, bias, given, settings
    if settings.vocab_size is None:
        expected = f"[C, {weight.shape[1]}] with rows"
        raise ValueError(f"weight: expected shape {expected}, got {tuple(weight.shape)}; {checks.NO_COLUMNS}")
    beside, settings = with_padding(given.beside, settings, rank, n_ranks, WEIGHT)
    weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
    main_grad = None if given.main_grad is None else torch.zeros_like(weight, dtype=torch.float32)
    return weight, bias, given._replace(beside=beside, main_grad=main_grad), settings


def _check_tokens(given: Arguments, n_ranks: int, head: HeadSettings) -> None:
    """Check that there is a label per token."""
    hidden, labels = given.head.hidden, given.labels
    expected, of_all = tuple(hidden.shape[:-1]), ""
    if head.sequence_parallel:
        if given.group is None:
            raise ValueError("sequence_parallel: expected the group whose ranks hold the parts, got group=None")
        expected, of_all = (expected[0] * n_ranks, *expected[1:]), ", that of all ranks' tokens"
    if tuple(labels.shape) != expected:
        remedy = f"; {checks.NOT_ONE_HOT}" if labels.dim() == hidden.dim() else ""
        raise ValueError(f"labels: expected shape {expected}{of_all}, got {tuple(labels.shape)}{remedy}")


def _plan_of_logits(
    loss: Loss,
    dtype: torch.dtype,
    logits_dtype: torch.dtype,
    n_columns: int,
    given: Arguments,
    settings: Settings,
    gradient: str,
    recomputes: bool,
    rank: int,
    n_ranks: int,
) -> Plan:
    """Plan the loss of a chunk's logits; a mean is a sum that is divided by the number of valid tokens."""
    shard = shard_of_rank(settings, n_columns, rank, n_ranks, subject=WEIGHT)
    reduction = "none" if settings.reduction == "none" else "sum"
    if settings.impl == "one_pass" and logits_dtype != dtype:
        raise ValueError("impl: 'one_pass' writes no 16-bit gradient of fp32 logits, got logits_dtype; use 'auto'")
    if settings.impl == "one_pass" and gradient == "in_forward" and recomputes:
        raise ValueError(
            "impl: 'one_pass' keeps no statistics, which gradients of the outputs need, got gradient='auto'; use "
            "impl='auto', or gradient='in_forward', with which only the loss has a gradient"
        )
    # one_pass takes no grad_output, and its gradient has the dtype of the logits.
    fits_one_pass = given.expected_grad_output is None and logits_dtype == dtype and not recomputes
    key = PlanKey(
        dtype=logits_dtype,
        n_columns=n_columns,
        device=given.head.hidden.device,
        rank=rank,
        n_ranks=n_ranks,
        gradient=gradient,
        is_aligned=fits_one_pass,
        class_weight=given.beside.class_weight is not None,
    )
    settings = settings._replace(vocab_size=shard, reduction=reduction, gradient=gradient)
    return cached_plan(loss, settings, key)


def gradient_of(settings: Settings, head: HeadSettings, dtype: torch.dtype) -> str:
    """Return the mode that runs for products of ``dtype``."""
    if settings.gradient != "auto":
        return settings.gradient
    # fp16 has no room for a gradient that the loss scale has not multiplied yet.
    waits = settings.reduction == "none" or dtype == torch.float16
    # With kept logits, backward has three products too, and gradients of the outputs as well.
    waits = waits or (settings.asks_for_differentiable and head.keep_logits != "none")
    return "in_backward" if waits else "in_forward"


def may_recompute(settings: Settings, gradient: str) -> bool:
    """Return whether backward may compute the gradients in the mode that runs.

    If ``"auto"`` computes those of the loss in forward, an output may still get one: only backward knows.
    """
    return gradient == "in_backward" or (settings.gradient == "auto" and settings.asks_for_differentiable)


def in_backward(linear: LinearCall, labels: Tensor) -> LinearCall:
    """Return the call as backward recomputes it, with the ``labels`` that were saved."""
    plan = linear.call.plan._replace(gradient="in_backward")
    return linear._replace(labels=labels, call=linear.call._replace(plan=plan))


def _chunks_and_order(
    is_valid: Tensor, chunk: int, n_ranks: int, head: HeadSettings
) -> tuple[tuple[slice, ...], TokenOrder | None]:
    """Return the chunks of rows, and the order of the tokens in them unless it is their own."""
    n_tokens, n_rows = is_valid.shape[0], head.valid_tokens
    if head.sequence_parallel and n_ranks > 1:
        chunks = chunks_of(n_tokens, max(n_ranks, chunk // n_ranks * n_ranks))
        return chunks, None if len(chunks) <= 1 else order_of_ranks(chunks, n_tokens, n_ranks, is_valid.device)
    if n_rows is None and is_valid.device.type == "cpu":
        n_rows = int(is_valid.sum())
    if n_rows is None or n_tokens == 0 or n_rows > MOST_KEPT * n_tokens:
        return chunks_of(n_tokens, chunk), None
    n_rows = max(1, n_rows)
    return chunks_of(n_rows, chunk), order_of_valid(is_valid, n_rows)
