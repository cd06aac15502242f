"""The arguments of a head and its loss: checked, and planned as a :class:`LinearCall` and its inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import agreement, checks
from vocab_parallel_ce.collectives import group_position, is_dtensor, local_rows
from vocab_parallel_ce.layout import VECTOR_BYTES, flat
from vocab_parallel_ce.linear.chunks import chunk_of, chunks_of
from vocab_parallel_ce.linear.hidden_states import TokenOrder, order_of_ranks, order_of_valid
from vocab_parallel_ce.options import REDUCTIONS, HeadSettings, Settings, shard_of_rank
from vocab_parallel_ce.plan import Call, Kind, as_divisor, cached_plan, common_facts
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import is_ignored

GRADIENTS = ("auto", "in_forward", "in_backward")
MOST_KEPT = 0.9  # share of valid tokens above which it does not pay to leave out the ignored ones


class Inputs(NamedTuple):
    """The tensors of a call; labels in row order, the others as the caller has them."""

    hidden: Tensor  # [N, D], with sequence parallelism [N / R, D]
    weight: Tensor  # [C, D]
    bias: Tensor | None  # [C]
    labels: Tensor  # [M]


class LinearCall(NamedTuple):
    """One checked call: the loss of a chunk's logits, and how hidden states and weight take part."""

    call: Call  # its reduction is sum or none; a mean is a sum divided by the number of valid tokens
    dtype: torch.dtype  # of the products and the logits
    chunks: tuple[tuple[int, int], ...]  # first row, and the one after the last
    order: TokenOrder | None  # None: rows are tokens
    overflow: Tensor | None  # [] fp32: 1, or NaN if more than valid_tokens are valid
    sequence_parallel: bool
    reduces: bool
    main_grad: Tensor | None
    parameter: Tensor | None  # the caller's weight, if it wants to know that main_grad has its gradient


def plan_linear_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    settings: Settings,
    head: HeadSettings,
    *,
    bias: Tensor | None,
    group: Any,
    num_items: int | Tensor | None,
    main_grad: Tensor | None,
) -> tuple[LinearCall, Inputs]:
    """Check the arguments and plan the call; changes nothing."""
    checks.check_hidden(hidden)
    checks.check_tensor("labels", labels)
    check_head_settings(settings, head)
    checks.check_no_transforms(hidden, *(t for t in (weight, bias) if isinstance(t, Tensor)))
    parameter = weight if hasattr(weight, "grad_added_to_main_grad") else None
    rank, n_ranks = group_position(group)
    weight, bias, sharded = _local_head(weight, bias, settings, rank, n_ranks, group)
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    checks.check_head(weight, bias, hidden, None if autocasts else hidden.dtype)
    if main_grad is not None:
        checks.check_main_grad(main_grad, weight)
    _check_tokens(hidden, labels, group, n_ranks, head)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts else hidden.dtype
    call = _call_of_logits(dtype, weight, hidden, labels, sharded, rank, n_ranks, group)
    if num_items is not None:
        checks.check_num_items(num_items, settings.reduction, hidden)
        num_items = as_divisor(num_items, hidden)
    # Each rank's chunks must be the same, whatever its own width.
    shard, options = call.plan.shard, call.plan.options
    width = -(-shard.vocab_size // n_ranks)
    chunk = chunk_of(
        head.chunk_tokens, head.memory_budget, labels.numel(), hidden.shape[-1], width, dtype.itemsize
    )
    if settings.check_labels:
        checks.check_label_range(labels, shard.vocab_size, options.ignore_index)
    rows = flat(labels)
    is_valid = ~is_ignored(rows, options)
    chunks, order = _chunks_and_order(is_valid, chunk, n_ranks, head)
    if settings.reduction == "mean":
        num_items = is_valid.sum().reshape(1)
    overflow = None
    if head.valid_tokens is not None:
        overflow = torch.where(is_valid.sum() > head.valid_tokens, float("nan"), 1.0)
    if order is not None:
        rows = order.to_rows(rows.long(), options.ignore_index)
    linear = LinearCall(
        call._replace(num_items=num_items),
        dtype,
        chunks,
        order,
        overflow,
        head.sequence_parallel and n_ranks > 1,
        head.reduce_hidden_grad,
        main_grad,
        parameter,
    )
    inputs = Inputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias, rows)
    if agreement.n_open and agreement.is_pending():
        _compare_ranks(linear, inputs, hidden, labels, is_valid, settings, head)
    return linear, inputs


def check_head_settings(settings: Settings, head: HeadSettings) -> None:
    """Check what can be checked without tensors."""
    checks.check_choice("reduction", settings.reduction, REDUCTIONS)
    checks.check_choice("gradient", settings.gradient, GRADIENTS)
    checks.check_bool("sequence_parallel", head.sequence_parallel)
    checks.check_bool("reduce_hidden_grad", head.reduce_hidden_grad)
    chunk_of(head.chunk_tokens, head.memory_budget, 1, 1, 1, 1)
    if settings.gradient == "in_forward" and settings.reduction == "none":
        raise ValueError(
            "gradient: 'in_forward' cannot know the grad_output of reduction 'none', got both; "
            "use 'in_backward'"
        )
    if head.sequence_parallel and not head.reduce_hidden_grad:
        raise ValueError(
            "reduce_hidden_grad: expected True with sequence_parallel, whose ranks hold parts, got False"
        )
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


def _local_head(
    weight: Tensor, bias: Tensor | None, settings: Settings, rank: int, n_ranks: int, group: Any
) -> tuple[Tensor, Tensor | None, Settings]:
    """Return this rank's weight and bias, and the settings with its shard if the weight is a DTensor."""
    local_bias = None if bias is None else local_rows("bias", bias, group)
    local_weight = local_rows("weight", weight, group)
    if is_dtensor(weight):
        shard = _shard_of_dtensor(weight, bias, rank, n_ranks, settings)
        settings = settings._replace(shard=shard, vocab_size=None)
    return local_weight, local_bias, settings


def _shard_of_dtensor(
    weight: Tensor, bias: Tensor | None, rank: int, n_ranks: int, settings: Settings
) -> VocabShard:
    """Return this rank's columns from sizes that all ranks know, so that all of them raise or none."""
    n_rows, vocab_size = weight.shape[0], settings.vocab_size
    cut = VocabShard.of_rank(n_rows, rank, n_ranks)
    if settings.shard is not None:
        raise ValueError(
            f"shard: expected None with a DTensor weight, which has its own, {cut}, got {settings.shard}"
        )
    if bias is not None and is_dtensor(bias) and bias.shape[0] != n_rows:
        raise ValueError(f"bias: expected shape ({n_rows},), got {tuple(bias.shape)}")
    if vocab_size is None:
        return cut
    checks.check_vocab_size(vocab_size)
    if vocab_size > n_rows:
        raise ValueError(f"vocab_size: must be at most {n_rows}, the rows of weight, got {vocab_size}")
    return cut._replace(vocab_size=int(vocab_size))


def _check_tokens(hidden: Tensor, labels: Tensor, group: Any, n_ranks: int, head: HeadSettings) -> None:
    """Check that there is a label per token."""
    expected, of_all = tuple(hidden.shape[:-1]), ""
    if head.sequence_parallel:
        if group is None:
            raise ValueError(
                "sequence_parallel: expected the group whose ranks hold the parts, got group=None"
            )
        expected, of_all = (expected[0] * n_ranks, *expected[1:]), ", that of all ranks' tokens"
    if labels.device != hidden.device:
        raise ValueError(f"labels: device must be that of hidden, {hidden.device}, got {labels.device}")
    if tuple(labels.shape) != expected:
        raise ValueError(f"labels: expected shape {expected}{of_all}, got {tuple(labels.shape)}")


def _call_of_logits(
    dtype: torch.dtype,
    weight: Tensor,
    hidden: Tensor,
    labels: Tensor,
    settings: Settings,
    rank: int,
    n_ranks: int,
    group: Any,
) -> Call:
    """Plan the loss of a chunk's logits."""
    n_columns, reduction, gradient = weight.shape[0], settings.reduction, settings.gradient
    shard = shard_of_rank(settings, n_columns, rank, n_ranks, subject="weight: rows")
    if gradient == "auto":
        # fp16 has no room for a gradient that the loss scale has not multiplied yet.
        gradient = "in_backward" if reduction == "none" or dtype == torch.float16 else "in_forward"
    own = settings._replace(
        vocab_size=None, shard=shard, reduction="none" if reduction == "none" else "sum", gradient=gradient
    )
    kind = Kind(
        dtype,
        n_columns,
        torch.strided,
        hidden.device,
        labels.dtype,
        labels.device,
        rank,
        n_ranks,
        gradient,
        n_columns * dtype.itemsize % VECTOR_BYTES == 0,
    )
    return Call(cached_plan(own, kind), group, None)


def _chunks_and_order(
    is_valid: Tensor, chunk: int, n_ranks: int, head: HeadSettings
) -> tuple[tuple[tuple[int, int], ...], TokenOrder | None]:
    """Return the chunks of rows, and the order of the tokens in them unless it is their own."""
    n_tokens = is_valid.shape[0]
    if head.sequence_parallel and n_ranks > 1:
        chunks = tuple(chunks_of(n_tokens, max(n_ranks, chunk // n_ranks * n_ranks)))
        if len(chunks) <= 1:
            return chunks, None
        return chunks, order_of_ranks(chunks, n_tokens, n_ranks, is_valid.device)
    n_rows = head.valid_tokens
    if n_rows is None and is_valid.device.type == "cpu":
        n_rows = int(is_valid.sum())
    if n_rows is None or n_tokens == 0 or n_rows > MOST_KEPT * n_tokens:
        return tuple(chunks_of(n_tokens, chunk)), None
    n_rows = max(1, n_rows)
    return tuple(chunks_of(n_rows, chunk)), order_of_valid(is_valid, n_rows)


def _compare_ranks(
    linear: LinearCall,
    inputs: Inputs,
    hidden: Tensor,
    labels: Tensor,
    is_valid: Tensor,
    settings: Settings,
    head: HeadSettings,
) -> None:
    plan, group = linear.call.plan, linear.call.group
    num_items = linear.call.num_items if settings.reduction == "sum" else None
    facts = common_facts("hidden", hidden, labels, settings, plan, num_items)
    own = {"main_grad": linear.main_grad is not None, "dtype of the products": linear.dtype}
    facts += agreement.option_facts(head._asdict() | own)
    facts += agreement.gradient_facts(hidden=hidden, weight=inputs.weight, bias=inputs.bias)
    states = None if linear.sequence_parallel else agreement.fingerprint(inputs.hidden, is_valid)
    digest = agreement.labels_digest(labels)
    report = agreement.Report("a linear loss", facts, plan.shard, digest, states)
    agreement.compare(group, report, labels)
