"""The arguments of a head and its loss: checked, and planned as a :class:`LinearCall` and a local :class:`Head`."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.collectives import all_gather_stats, group_position
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
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import REDUCTIONS, HeadSettings, Settings, shard_of_rank
from vocab_parallel_ce.plan import Call, Plan, PlanKey, cached_plan, checked_divisor, comparable, has_weights, types_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import label_weights
from vocab_parallel_ce.targets import Head, Tokens, check, check_can_be_saved, check_memory, local, passed, with_padding

GRADIENTS = ("auto", "in_forward", "in_backward")
MOST_KEPT = 0.9  # share of valid tokens above which it does not pay to leave out the ignored ones
WEIGHT = "weight: rows"  # what has a rank's columns, for messages


class Arguments(NamedTuple):
    """What a caller passes, except options."""

    head: Head
    targets: Any  # the loss's
    group: Any
    num_items: float | Tensor | None
    main_grad: Tensor | None = None
    expected_grad_output: Tensor | None = None


class HeadKey(NamedTuple):
    """What the plan of a head depends on besides the loss and the settings."""

    dtype: torch.dtype  # of the products
    n_columns: int
    n_features: int
    n_tokens: int
    device: torch.device
    rank: int
    n_ranks: int
    class_weight: bool  # whether there is one
    knows_grad_output: bool  # whether there is an expected_grad_output


class HeadPlan(NamedTuple):
    """What runs, except the tensors and the group."""

    plan: Plan  # of a chunk's logits: its reduction is sum or none
    dtype: torch.dtype  # of the products
    logits_dtype: torch.dtype  # that, or fp32
    chunk: int  # tokens
    keep_logits: str
    kept_bytes: int  # of a token's kept logits
    is_mean: bool
    recomputes: bool  # whether backward may compute the gradients: it needs statistics, hidden states and weight
    sequence_parallel: bool
    reduces: bool  # d_hidden, over several ranks


class LinearCall(NamedTuple):
    """One checked call: the loss of a chunk's logits, and how hidden states and weight take part."""

    head: HeadPlan
    call: Call
    shape: tuple[int, ...]  # of the tokens
    chunks: tuple[slice, ...]  # rows
    order: TokenOrder | None  # None: rows are tokens
    overflow: Tensor | None  # [] fp32: 1, or NaN if more than valid_tokens are valid
    main_grad: Tensor | None
    parameter: Tensor | None  # the caller's weight, if it wants to know that main_grad has its gradient
    expected: Expected | None  # of reduction "none", whose gradients forward computes
    n_kept: int  # number of rows whose logits are kept for backward

    @property
    def n_rows(self) -> int:
        """The number of rows of all chunks."""
        return self.chunks[-1].stop if self.chunks else 0


def plan_linear_call(
    loss: Loss, given: Arguments, settings: Settings, head: HeadSettings
) -> tuple[LinearCall, Head, Any]:
    """Check the arguments and plan the call; changes nothing. Also return the local head, and targets of its rows."""
    hidden, expected, (rank, n_ranks) = given.head.hidden, given.expected_grad_output, group_position(given.group)
    checks.check_hidden(hidden)
    checks.check_has_values(hidden)
    checks.check_no_transforms(*given.head, *given.targets)
    tokens = Tokens(hidden, "hidden", shape_of_tokens(hidden, n_ranks, head))
    check(given.targets, tokens, settings)
    loss.check(given.targets, tokens, settings)
    check_memory(given.targets, tokens, settings)
    bias = None if given.head.bias is None else local_rows("bias", given.head.bias, given.group)
    weight = local_rows("weight", given.head.weight, given.group)
    if is_dtensor(given.head.weight):
        settings = settings._replace(vocab_size=shard_of_dtensor(given, settings, rank, n_ranks))
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts else hidden.dtype
    checks.check_head(weight, bias, hidden, None if autocasts else dtype)
    weight, bias, given, settings = with_a_row(weight, bias, given, settings, rank, n_ranks)
    if expected is not None:
        warn_of_misfits()
        check_expected(expected, tokens)
    divisor = None if given.num_items is None else checked_divisor(given.num_items, settings.reduction, hidden)
    sizes = weight.shape[0], hidden.shape[-1], math.prod(tokens.shape)
    key = HeadKey(dtype, *sizes, hidden.device, rank, n_ranks, has_weights(given.targets), expected is not None)
    planned = cached_head_plan(loss, settings, head, key)
    if head.sequence_parallel and given.group is None:
        raise ValueError("sequence_parallel: expected the group whose ranks hold the parts, got group=None")
    plan = planned.plan
    targets = local(given.targets, tokens, settings, plan)
    ignored = loss.ignored(targets, plan.options)
    is_valid = hidden.new_ones(key.n_tokens, dtype=torch.bool) if ignored is None else ~ignored
    chunks, order = _chunks_and_order(is_valid, planned.chunk, n_ranks, head)
    targets = targets if order is None else loss.in_order(targets, order, settings)
    local_head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias)
    if planned.recomputes and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in local_head):
        for name, target, _ in passed(targets):
            check_can_be_saved(name, target)
    linear = LinearCall(
        head=planned,
        call=Call(plan, given.group, divisor),
        shape=tokens.shape,
        chunks=chunks,
        order=order,
        overflow=_overflow(is_valid, head.valid_tokens),
        main_grad=given.main_grad,
        parameter=given.head.weight if hasattr(given.head.weight, "grad_added_to_main_grad") else None,
        expected=None if expected is None else expected_of(expected, is_valid, order),
        n_kept=kept_rows(planned.keep_logits, chunks, planned.kept_bytes),
    )
    if verify.open_calls:
        _compare(linear, local_head, given, settings, head)
    if planned.is_mean:  # last: it may be a collective
        linear = linear._replace(
            call=Call(plan, given.group, _divisor_of_mean(planned, targets, is_valid, given.group))
        )
    return linear, local_head, targets


def shape_of_tokens(hidden: Tensor, n_ranks: int, head: HeadSettings) -> tuple[int, ...]:
    """Return the shape of the tokens, with sequence parallelism of all ranks'."""
    first, *others = hidden.shape[:-1]
    return (first * n_ranks if head.sequence_parallel else first, *others)


def cached_head_plan(loss: Loss, settings: Settings, head: HeadSettings, key: HeadKey) -> HeadPlan:
    """Return the plan of a head, checked and made once."""
    try:
        return _cached_head_plan(types_of(settings, *head), loss, settings, head, key)
    except TypeError:  # refused, or cannot be hashed: make_head_plan says so by name
        pass
    return make_head_plan(loss, settings, head, key)


@functools.lru_cache(maxsize=1024)
def _cached_head_plan(types: Any, loss: Loss, settings: Settings, head: HeadSettings, key: HeadKey) -> HeadPlan:
    return make_head_plan(loss, settings, head, key)


def make_head_plan(loss: Loss, settings: Settings, head: HeadSettings, key: HeadKey) -> HeadPlan:
    """Check the settings against ``key``, and choose what runs."""
    check_head_settings(settings, head, knows_grad_output=key.knows_grad_output)
    if key.knows_grad_output:
        _check_expects(settings, key.dtype)
    logits_dtype, gradient = head.logits_dtype or key.dtype, gradient_of(settings, head, key.dtype)
    # If "auto" computes the gradient of the loss in forward, an output may still get one: only backward knows.
    recomputes = gradient == "in_backward" or (settings.gradient == "auto" and settings.asks_for_differentiable)
    plan = _plan_of_logits(loss, settings, key, logits_dtype, gradient, recomputes)
    keeping = head if gradient == "in_backward" else head._replace(keep_logits="none")
    width = -(-plan.shard.vocab_size // plan.n_ranks)  # of every rank, so that the chunks are the same
    kept_bytes, element_size = width * logits_dtype.itemsize, sum(d.itemsize for d in {key.dtype, logits_dtype})
    return HeadPlan(
        plan=plan,
        dtype=key.dtype,
        logits_dtype=logits_dtype,
        chunk=chunk_of(keeping, key.n_tokens, key.n_features, width, element_size, kept_bytes),
        keep_logits=keeping.keep_logits,
        kept_bytes=kept_bytes,
        is_mean=settings.reduction == "mean",
        recomputes=recomputes,
        sequence_parallel=head.sequence_parallel and key.n_ranks > 1,
        reduces=head.reduce_hidden_grad and key.n_ranks > 1,
    )


def _divisor_of_mean(planned: HeadPlan, targets: Any, is_valid: Tensor, group: Any) -> Tensor:
    """Return ``[1]``, how many tokens are valid, or the sum of their weights.

    Collectives: for weights on several ranks one all_gather of 4 bytes.
    """
    if not has_weights(targets):
        return is_valid.sum().reshape(1)
    plan = planned.plan
    shard, options = plan.shard, plan.options
    own = label_weights(targets.class_weight, targets.labels, shard.start, shard.vocab_size, options)
    sums = own.new_empty(plan.n_ranks, 1, 1)
    sums[plan.rank] = own.sum()
    all_gather_stats(sums, plan.rank, group)
    return sums.sum().reshape(1)


def _compare(linear: LinearCall, local_head: Head, given: Arguments, settings: Settings, head: HeadSettings) -> None:
    """Compare the ranks' arguments."""
    tensors = {**local_head._asdict(), "hidden": given.head.hidden}
    options = comparable(settings, given.num_items) | head._asdict()
    options |= {"main_grad": given.main_grad is not None, "dtype of the products": linear.head.dtype}
    options["expected_grad_output"] = None if linear.expected is None else verify.shown(linear.expected.of_tokens)
    verify.compare_call(tensors, given.targets, linear.call.plan.shard, options)


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


def _check_expects(settings: Settings, dtype: torch.dtype) -> None:
    """Check that forward may compute gradients with an expected grad_output."""
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
    cut = VocabShard.for_rank(n_rows, rank, n_ranks)
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
    targets, settings = with_padding(given.targets, settings, rank, n_ranks, WEIGHT)
    weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
    main_grad = None if given.main_grad is None else torch.zeros_like(weight, dtype=torch.float32)
    return weight, bias, given._replace(targets=targets, main_grad=main_grad), settings


def _plan_of_logits(
    loss: Loss, settings: Settings, key: HeadKey, logits_dtype: torch.dtype, gradient: str, recomputes: bool
) -> Plan:
    """Plan the loss of a chunk's logits; a mean is a sum that is divided by the number of valid tokens."""
    shard = shard_of_rank(settings, key.n_columns, key.rank, key.n_ranks, subject=WEIGHT)
    reduction = "none" if settings.reduction == "none" else "sum"
    if settings.impl == "one_pass" and logits_dtype != key.dtype:
        raise ValueError("impl: 'one_pass' writes no 16-bit gradient of fp32 logits, got logits_dtype; use 'auto'")
    if settings.impl == "one_pass" and gradient == "in_forward" and recomputes:
        raise ValueError(
            "impl: 'one_pass' keeps no statistics, which gradients of the outputs need, got gradient='auto'; use "
            "impl='auto', or gradient='in_forward', with which only the loss has a gradient"
        )
    of_logits = PlanKey(
        dtype=logits_dtype,
        n_columns=key.n_columns,
        device=key.device,
        rank=key.rank,
        n_ranks=key.n_ranks,
        gradient=gradient,
        # one_pass takes no grad_output, and its gradient has the dtype of the logits.
        is_aligned=not key.knows_grad_output and logits_dtype == key.dtype and not recomputes,
        class_weight=key.class_weight,
    )
    # Cached apart from the number of tokens, which may be another at each step.
    return cached_plan(loss, settings._replace(vocab_size=shard, reduction=reduction, gradient=gradient), of_logits)


def gradient_of(settings: Settings, head: HeadSettings, dtype: torch.dtype) -> str:
    """Return the mode that runs for products of ``dtype``."""
    if settings.gradient != "auto":
        return settings.gradient
    # fp16 has no room for a gradient that the loss scale has not multiplied yet.
    waits = settings.reduction == "none" or dtype == torch.float16
    # With kept logits, backward has three products too, and gradients of the outputs as well.
    waits = waits or (settings.asks_for_differentiable and head.keep_logits != "none")
    return "in_backward" if waits else "in_forward"


def in_backward(linear: LinearCall, divisor: Tensor | None) -> LinearCall:
    """Return the call as backward recomputes it, with the ``divisor`` that was saved."""
    plan = linear.call.plan._replace(gradient="in_backward")
    return linear._replace(call=linear.call._replace(plan=plan, divisor=divisor))


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
