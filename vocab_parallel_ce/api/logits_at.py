"""Logits at k given ids of each token, of logits that are sharded over the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import public
from vocab_parallel_ce.api.top_k import checked_shard
from vocab_parallel_ce.collectives import summed_over_ranks
from vocab_parallel_ce.in_place import check_not_overwritten
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.given_ids import Ids
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import NAN, NEG_INF
from vocab_parallel_ce.summed import check_summed, copied
from vocab_parallel_ce.targets import Role, Tokens, check_target

NO_ID = -1  # where a token has fewer


@public(lambda keywords: True)
def logits_at(logits: Tensor, ids: Tensor, *, group: Any = None, vocab_size: int | VocabShard | None = None) -> Tensor:
    """Return the logits at ``k`` given ids of each token, from the ranks that have them.

    Only these are read, and all others have gradient 0. ``log_softmax`` over them is the distribution of a sampler that
    kept these ids: docs/rl.md. Overwrites nothing.

    Collectives: on several ranks one all_reduce of ``4 * k`` bytes per token; backward none. ``torch.compile`` breaks
    its graph.

    Args:
        logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        ids: ``[..., k]`` int64 or int32 ids in the whole vocabulary, the same on every rank; -1 where a token has
            fewer. Gradients of an id that is given twice add up.
        group, vocab_size: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        ``[..., k]`` fp32, fp64 for fp64 logits, the same on all ranks: as they are in ``logits``, and ``-inf`` for an
        id of -1. Another id outside the vocabulary raises on a CPU, and gives NaN elsewhere.

    Raises:
        TypeError, ValueError: a type, dtype, shape or value does not fit.

    Example:
        >>> from vocab_parallel_ce import logits_at
        >>> logits_at(torch.tensor([[1.0, 0.0, 3.0]]), torch.tensor([[2, 0, -1]]))
        tensor([[3., 1., -inf]])
    """
    shard, _, n_ranks = checked_shard(logits, vocab_size, group)
    checks.check_no_transforms(ids)
    check_target("ids", ids, Role("ids", ("rows", "k")), Tokens(logits, "logits", logits.shape[:-1]))
    check_not_overwritten(logits)
    if checks.looks_at(ids, "auto"):
        checks.check_label_range(ids, shard.vocab_size, NO_ID, name="ids", names_ignored=False)
    if verify.pending.get() is not None:
        check_summed(logits)
        with checks.naming(labels="ids"):
            verify.compare_call({"logits": logits}, Ids(ids), shard, {"vocab_size": vocab_size})
    tensor = logits if logits.shape[-1] else F.pad(logits, (0, 1))
    values: Tensor = _LogitsAt.apply(tensor, ids.long(), shard, group if n_ranks > 1 else None)
    return values


class _LogitsAt(torch.autograd.Function):
    """Gather ``[..., k]`` columns of all ranks. It does not save the logits: a loss may overwrite them.

    Columns of other ranks are spread over the row, because all in one column would wait for each other's atomics.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, shard: VocabShard, group: Any) -> Tensor:
        columns = ids - shard.start
        is_anothers = (columns < 0) | (columns >= shard.n_valid)
        columns %= logits.shape[-1]
        ctx.save_for_backward(columns, is_anothers)
        ctx.shape, ctx.dtype, ctx.group = logits.shape, logits.dtype, group
        values = logits.gather(-1, columns).to(compute_dtype(logits.dtype)).masked_fill_(is_anothers, 0.0)
        values = values if group is None else summed_over_ranks(values, group)  # at most one rank's is not 0
        values.masked_fill_((ids < 0) | (ids >= shard.vocab_size), NAN)
        return values.masked_fill_(ids == NO_ID, NEG_INF)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        columns, is_anothers = ctx.saved_tensors
        grad = grad if ctx.group is None else copied(grad, ctx.group)
        values = grad.masked_fill(is_anothers, 0.0).to(ctx.dtype)
        return values.new_zeros(ctx.shape).scatter_add_(-1, columns, values), None, None, None
