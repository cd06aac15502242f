"""The arguments of a head and its loss: checked, and settled as a :class:`LinearCall` and its inputs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.linear.chunks import chunk_of, chunks_of
from vocab_parallel_ce.linear.hidden_states import Order, order_of_ranks, order_of_valid
from vocab_parallel_ce.linear.pipeline import Inputs, LinearCall
from vocab_parallel_ce.pipeline import all_options, as_divisor, flat, settle, shard_of_logits
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import is_ignored

GRADIENTS = ("auto", "in_forward", "in_backward")
MOST_KEPT = 0.9  # share of tokens that are not ignored, above which leaving out the others does not pay


class HeadOptions(NamedTuple):
    """What a call says of the head, beside the options of the loss."""

    sequence_parallel: bool = False
    reduce_hidden_grad: bool = True
    main_grad: Tensor | None = None
    valid_tokens: int | None = None
    chunk_tokens: int | str = "auto"
    memory_budget: int | None = None


def prepare_linear_call(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    num_items: int | Tensor | None,
    head: HeadOptions,
    *,
    group: Any,
    reduction: str,
    gradient: str,
    impl: str,
    check_labels: bool,
    vocab_size: int | None,
    shard: VocabShard | None,
    **options: Any,
) -> tuple[LinearCall, Inputs]:
    """Check the arguments and settle what runs; nothing is changed by it."""
    checks.check_hidden(hidden)
    checks.check_tensor("labels", labels)
    check_modes(reduction, gradient, head)
    checks.check_no_transforms(hidden, *(t for t in (weight, bias) if isinstance(t, Tensor)))
    parameter = weight if hasattr(weight, "grad_added_to_main_grad") else None
    rank, n_ranks = group_position(group)
    local_bias = None if bias is None else local_rows("bias", bias, group)
    local_weight = local_rows("weight", weight, group)
    if is_dtensor(weight):
        shard, vocab_size = _shard_of_dtensor(weight, bias, rank, n_ranks, vocab_size, shard), None
    weight, bias = local_weight, local_bias
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    checks.check_head(weight, bias, hidden, None if autocasts else hidden.dtype)
    if head.main_grad is not None:
        checks.check_main_grad(head.main_grad, weight)
    if head.sequence_parallel and group is None:
        raise ValueError("sequence_parallel: expected the group whose ranks hold the parts, got group=None")
    _check_tokens(hidden, labels, n_ranks, head)
    n_columns, n_tokens = weight.shape[0], labels.numel()
    shard = _shard_of_rows(n_columns, rank, n_ranks, vocab_size, shard)
    dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts else hidden.dtype
    if gradient == "auto":
        # fp16 has no room for a gradient that the loss scale has not multiplied yet.
        gradient = "in_backward" if reduction == "none" or dtype == torch.float16 else "in_forward"
    whole_vectors = n_columns * dtype.itemsize % VECTOR_BYTES == 0
    values = (
        *(dtype, n_columns, torch.strided, hidden.device, labels.dtype, labels.device),
        *(rank, n_ranks, None, shard),
        *("none" if reduction == "none" else "sum", gradient, impl, check_labels, whole_vectors),
    )
    settled = settle(values, options)
    if num_items is not None:
        checks.check_num_items(num_items, reduction, hidden)
        num_items = as_divisor(num_items, hidden)
    # Every rank's chunks must be the same, whatever its own width.
    width = -(-shard.vocab_size // n_ranks)
    chunk = chunk_of(head.chunk_tokens, head.memory_budget, n_tokens, hidden.shape[-1], width, dtype.itemsize)
    row_options = settled(labels.shape, group, None).options
    if check_labels:
        checks.check_label_range(labels, shard.vocab_size, row_options.ignore_index)
    all_labels, labels = labels, flat(labels)
    is_valid = ~is_ignored(labels, row_options)
    chunks, order = _places(is_valid, chunk, n_ranks, head)
    divisor = _divisor(is_valid, reduction, num_items, head.valid_tokens)
    if order is not None:
        labels = order.take(labels.long(), row_options.ignore_index)
    linear = LinearCall(
        settled(labels.shape, group, divisor),
        dtype,
        chunks,
        order,
        head.sequence_parallel and n_ranks > 1,
        head.reduce_hidden_grad,
        head.main_grad,
        parameter,
    )
    inputs = Inputs(hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels)
    if verify.open_calls:
        others = {
            **{**head._asdict(), "main_grad": head.main_grad is not None},
            **{"reduction": reduction, "gradient": gradient, "impl": impl, "check_labels": check_labels},
            "num_items": None if num_items is None else float(num_items),
            "dtype of the products": dtype,
        }
        tensors = {"hidden": hidden, "weight": weight, "bias": bias}
        verify.compare_call(tensors, all_labels, shard, all_options(options) | others)
    return linear, inputs


def check_modes(reduction: object, gradient: object, head: HeadOptions) -> None:
    """What of the arguments can be judged without tensors."""
    checks.check_choice("reduction", reduction, checks.REDUCTIONS)
    checks.check_choice("gradient", gradient, GRADIENTS)
    checks.check_bool("sequence_parallel", head.sequence_parallel)
    checks.check_bool("reduce_hidden_grad", head.reduce_hidden_grad)
    chunk_of(head.chunk_tokens, head.memory_budget, 1, 1, 1, 1)
    if gradient == "in_forward" and reduction == "none":
        raise ValueError(
            "gradient: 'in_forward' cannot know the grad_outputs of reduction 'none', got both; "
            "use 'in_backward'"
        )
    if head.sequence_parallel and not head.reduce_hidden_grad:
        raise ValueError(
            "reduce_hidden_grad: expected True with sequence_parallel, whose ranks hold parts, got False"
        )
    if head.valid_tokens is not None:
        checks.check_integer("valid_tokens", head.valid_tokens)
        if head.valid_tokens < 0:
            raise ValueError(f"valid_tokens: must be at least 0, got {head.valid_tokens}")
        if head.sequence_parallel:
            raise ValueError(
                "valid_tokens: expected None with sequence_parallel, whose ranks hold parts that are cut "
                f"already, got {head.valid_tokens}"
            )


def _check_tokens(hidden: Tensor, labels: Tensor, n_ranks: int, head: HeadOptions) -> None:
    """That there is a label for each token."""
    expected = tuple(hidden.shape[:-1])
    if head.sequence_parallel:
        expected = (expected[0] * n_ranks, *expected[1:])
    if labels.device != hidden.device:
        raise ValueError(f"labels: device must be that of hidden, {hidden.device}, got {labels.device}")
    if tuple(labels.shape) != expected:
        of_all = ", that of all ranks' tokens" if head.sequence_parallel else ""
        raise ValueError(f"labels: expected shape {expected}{of_all}, got {tuple(labels.shape)}")


def _shard_of_dtensor(
    weight: Tensor, bias: Tensor | None, rank: int, n_ranks: int, vocab_size: int | None, shard: object
) -> VocabShard:
    """This rank's columns, from sizes that all ranks know, so that all of them raise or none."""
    n_rows = weight.shape[0]
    cut = VocabShard.of_rank(n_rows, rank, n_ranks)
    if shard is not None:
        raise ValueError(f"shard: expected None with a DTensor weight, which has its own, {cut}, got {shard}")
    if bias is not None and is_dtensor(bias) and bias.shape[0] != n_rows:
        raise ValueError(f"bias: expected shape ({n_rows},), got {tuple(bias.shape)}")
    if vocab_size is None:
        return cut
    checks.check_vocab_size(vocab_size)
    if vocab_size > n_rows:
        raise ValueError(f"vocab_size: must be at most {n_rows}, the rows of weight, got {vocab_size}")
    return cut._replace(vocab_size=int(vocab_size))


def _shard_of_rows(
    n_columns: int, rank: int, n_ranks: int, vocab_size: int | None, shard: VocabShard | None
) -> VocabShard:
    try:
        return shard_of_logits(n_columns, rank, n_ranks, vocab_size, shard)
    except ValueError as error:
        # Of columns there are as many as the weight has rows.
        message = str(error).replace("logits: last dimension must be", "weight: rows must be")
    raise ValueError(message)


def _places(
    is_valid: Tensor, chunk: int, n_ranks: int, head: HeadOptions
) -> tuple[tuple[tuple[int, int], ...], Order | None]:
    """The chunks, and the order in which tokens have places in them, where it is not their own."""
    n_tokens = is_valid.shape[0]
    if head.sequence_parallel and n_ranks > 1:
        chunks = tuple(chunks_of(n_tokens, max(n_ranks, chunk // n_ranks * n_ranks)))
        if len(chunks) <= 1:
            return chunks, None
        return chunks, order_of_ranks(chunks, n_tokens, n_ranks, is_valid.device)
    most = head.valid_tokens
    if most is None and is_valid.device.type == "cpu":
        most = int(is_valid.sum())
    if most is None or n_tokens == 0 or most > MOST_KEPT * n_tokens:
        return tuple(chunks_of(n_tokens, chunk)), None
    most = max(1, most)  # a place for the NaN of more than none
    return tuple(chunks_of(most, chunk)), order_of_valid(is_valid, most)


def _divisor(
    is_valid: Tensor, reduction: str, num_items: Tensor | None, valid_tokens: int | None
) -> Tensor | None:
    """``[1]``: what every loss is divided by, or None; NaN where more than ``valid_tokens`` are valid."""
    divisor = num_items
    n_valid = is_valid.sum().reshape(1) if reduction == "mean" or valid_tokens is not None else None
    if reduction == "mean":
        divisor = n_valid
    if valid_tokens is None:
        return divisor
    assert n_valid is not None
    one = torch.ones_like(n_valid, dtype=torch.float32) if divisor is None else divisor.float()
    return torch.where(n_valid > valid_tokens, float("nan"), one)
