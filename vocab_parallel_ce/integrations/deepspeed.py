"""DeepSpeed's losses on shards of the vocabulary, computed by this package: on request, and undoable.

The functions have the names, parameters, shapes and dtypes of DeepSpeed 0.19. :func:`install` makes it use them: the
loss of AutoTP's vocabulary-parallel head, ``VocabParallelCausalLMLoss``, calls the first. DeepSpeed's checks of the
shards, its sums over sequence parallelism and its gathering of losses stay its own. Shards need not be equal.

What differs: no tensor of the logits' size is kept for backward, and forward has one collective instead of three.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.api.distillation import distillation_loss
from vocab_parallel_ce.api.heads import linear_cross_entropy
from vocab_parallel_ce.api.logits import output_of, token_log_probs
from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy as cross_entropy
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.integrations.rebind import Switch
from vocab_parallel_ce.options import REDUCTIONS
from vocab_parallel_ce.shard import VocabShard

LOSS = "deepspeed.sequence.cross_entropy"
LINEAR = "deepspeed.sequence.linear_cross_entropy"
OPS = "deepspeed.sequence.vocab_parallel_ops"
LEFT = {
    "the logits of AutoTP's vocabulary-parallel head": "the model makes them; call vocab_parallel_linear_cross_entropy",
    "backend='liger'": "it names Liger's kernel, for equal shards",
    "log-probabilities of V or V / R ids per position": "this package takes them for one-hot labels",
    "a KL divergence with a gradient of the teacher": "this package has none",
    "chunked_cross_entropy": "it is of unsharded logits; call this package's loss",
}


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    gather_sequence_loss: bool = False,
    backend: str = "torch",
) -> Tensor:
    """Return DeepSpeed's fp32 loss of ``logits [..., C]``, this rank's columns, and ``target [...]``, global ids.

    Overwrites: backward writes the gradient over the logits if nobody else can see them.

    Collectives: one all_gather of 12 bytes per token over ``tp_group``; DeepSpeed's has three all_reduces. Without
    ``global_vocab_size`` also those with which DeepSpeed checks the shards.

    Raises:
        ValueError: the shards do not fit, or a target is outside of the vocabulary.

    Example:
        >>> from vocab_parallel_ce.integrations import deepspeed
        >>> logits, target = torch.zeros(2, 4), torch.tensor([1, 3])
        >>> bounds = {"vocab_start_index": 0, "vocab_end_index": 4, "global_vocab_size": 4}
        >>> deepspeed.vocab_parallel_cross_entropy(logits, target, **bounds)
        tensor(1.3863)
    """
    bounds = vocab_start_index, vocab_end_index, global_vocab_size
    if backend != "torch":
        original = _switch.original(f"{LOSS}:vocab_parallel_cross_entropy")
        arguments = vocab_parallel_logits, target, tp_group, sp_group, *bounds, ignore_index
        result: Tensor = original(*arguments, reduction, gather_sequence_loss, backend)
        return result
    checks.check_choice("reduction", reduction, REDUCTIONS)
    if gather_sequence_loss and (reduction != "none" or sp_group is None):
        raise ValueError(
            f"gather_sequence_loss: expected sp_group and reduction='none' with it, got {sp_group}, {reduction!r}"
        )
    shard = _shard(vocab_parallel_logits.shape[-1], bounds, tp_group, vocab_parallel_logits.device)

    def of(reduction: str, num_items: Tensor | None) -> Tensor:
        return cross_entropy(
            vocab_parallel_logits,
            target,
            group=tp_group,
            vocab_size=shard,
            ignore_index=ignore_index,
            reduction=reduction,
            num_items=num_items,
            check_labels=True,
        )

    loss = _over_sequence_parallelism(of, reduction, target != ignore_index, sp_group)
    if gather_sequence_loss:
        loss = importlib.import_module(LOSS)._GatherSequenceLoss.apply(loss, sp_group, True)
    return loss


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    tp_group: Any = None,
    sp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> Tensor:
    """Return the loss of ``hidden [..., D] @ weight.T + bias``, for ``weight [C, D]``, this rank's rows of the head.

    The logits of 16-bit products stay fp32, as DeepSpeed's do on GPUs. The gradient of ``weight`` is summed in fp32 and
    rounded once; that of ``hidden`` is the sum over the ranks. A mean or a sum of bf16 and fp32 computes the gradients
    in the forward pass: three matmuls instead of four.

    Raises:
        ValueError: as :func:`vocab_parallel_cross_entropy`.
    """
    shard = _shard(weight.shape[0], (vocab_start_index, vocab_end_index, None), tp_group, hidden.device)
    if not torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)

    def of(reduction: str, num_items: Tensor | None) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias=bias,
            group=tp_group,
            vocab_size=shard,
            ignore_index=ignore_index,
            reduction=reduction,
            num_items=num_items,
            check_labels=True,
            chunk_size="auto" if chunk_size is None else chunk_size,
            logits_dtype=torch.float32,
        )

    checks.check_choice("reduction", reduction, REDUCTIONS)
    return _over_sequence_parallelism(of, reduction, target != ignore_index, sp_group)


def vocab_parallel_logprobs(
    vocab_parallel_logits: Tensor,
    index: Tensor,
    tp_group: Any = None,
    vocab_start_index: int | None = None,
    vocab_end_index: int | None = None,
    global_vocab_size: int | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return fp32 log-probabilities of ``index [...]``, or of ``k`` ids per position, ``index [..., k]``.

    Those of ``V`` ids, or of ``V / R``, rounded up, on ``R`` ranks, are DeepSpeed's own. Overwrites nothing.

    Example:
        >>> from vocab_parallel_ce.integrations import deepspeed
        >>> bounds = {"vocab_start_index": 0, "vocab_end_index": 4, "global_vocab_size": 4}
        >>> deepspeed.vocab_parallel_logprobs(torch.zeros(2, 4), torch.tensor([1, 3]), **bounds)
        tensor([-1.3863, -1.3863])
    """
    bounds = vocab_start_index, vocab_end_index, global_vocab_size
    shape, n_ranks = vocab_parallel_logits.shape, group_position(tp_group)[1]
    shard = _shard(shape[-1], bounds, tp_group, vocab_parallel_logits.device)
    sizes = shard.vocab_size, -(-shard.vocab_size // n_ranks)
    if index.shape != shape[:-1] and (index.dim() != len(shape) or index.shape[-1] in sizes):
        original = _switch.original(f"{OPS}:vocab_parallel_logprobs")
        result: Tensor = original(vocab_parallel_logits, index, tp_group, *bounds, ignore_index)
        return result
    return token_log_probs(
        vocab_parallel_logits,
        index,
        group=tp_group,
        vocab_size=shard,
        ignore_index=ignore_index,
        check_labels=True,
        gradient="out_of_place",
    )


def vocab_parallel_entropy(vocab_parallel_logits: Tensor, tp_group: Any = None) -> Tensor:
    """Return the fp32 entropies ``[...]`` of ``logits [..., C]``. Overwrites nothing.

    Example:
        >>> from vocab_parallel_ce.integrations import deepspeed
        >>> deepspeed.vocab_parallel_entropy(torch.zeros(2, 4))
        tensor([1.3863, 1.3863])
    """
    return output_of("entropy", vocab_parallel_logits, tp_group)


def vocab_parallel_kl_div(
    student_logits: Tensor, teacher_logits: Tensor, reverse: bool = False, tp_group: Any = None
) -> Tensor:
    """Return ``[...]`` fp32 KL(teacher || student), or the reverse; DeepSpeed's own if the teacher needs a gradient.

    Overwrites nothing.

    Example:
        >>> from vocab_parallel_ce.integrations import deepspeed
        >>> deepspeed.vocab_parallel_kl_div(torch.zeros(2, 4), torch.tensor([[0.0, 0.0, 0.0, 9.0]]).expand(2, 4))
        tensor([1.3826, 1.3826])
    """
    if teacher_logits.requires_grad and torch.is_grad_enabled():
        original = _switch.original(f"{OPS}:vocab_parallel_kl_div")
        result: Tensor = original(student_logits, teacher_logits, reverse, tp_group)
        return result
    return distillation_loss(
        student_logits,
        teacher_logits.detach(),
        group=tp_group,
        divergence="reverse" if reverse else "forward",
        reduction="none",
        gradient="out_of_place",
    )


def _shard(n_columns: int, bounds: tuple[int | None, int | None, int | None], group: Any, device: Any) -> VocabShard:
    """Return this rank's columns, which DeepSpeed checks among the ranks unless it is told the vocabulary."""
    start, stop, vocab_size = bounds
    if vocab_size is None:
        resolve = importlib.import_module(LOSS)._resolve_vocab_metadata
        start, stop, vocab_size = resolve(n_columns, start, stop, group, device)
    if start is None or stop is None:
        raise ValueError(
            f"global_vocab_size: expected vocab_start_index and vocab_end_index with it, got {start}, {stop}"
        )
    return VocabShard(start, stop, vocab_size)


def _over_sequence_parallelism(
    of: Callable[[str, Tensor | None], Tensor], reduction: str, is_valid: Tensor, sp_group: Any
) -> Tensor:
    """Return the loss that ``of`` computes of this rank's tokens, summed or averaged over those of all ranks."""
    if reduction == "none" or sp_group is None or group_position(sp_group)[1] == 1:
        return of(reduction, None)
    num_items = None
    if reduction == "mean":
        num_items = is_valid.sum()
        dist.all_reduce(num_items, group=sp_group)
        num_items = num_items.clamp(min=1)
    loss: Tensor = importlib.import_module(LOSS)._global_sp_sum(of("sum", num_items), sp_group)
    return loss


_switch = Switch(
    "DeepSpeed 0.19",
    {
        f"{LOSS}:vocab_parallel_cross_entropy": vocab_parallel_cross_entropy,
        f"{LINEAR}:vocab_parallel_linear_cross_entropy": vocab_parallel_linear_cross_entropy,
        f"{OPS}:vocab_parallel_logprobs": vocab_parallel_logprobs,
        f"{OPS}:vocab_parallel_entropy": vocab_parallel_entropy,
        f"{OPS}:vocab_parallel_kl_div": vocab_parallel_kl_div,
    },
    LEFT,
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
