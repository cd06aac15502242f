"""The most probable tokens of sharded logits, with their log-probabilities of the whole vocabulary.

Each rank finds the k largest logits of its columns, and the sum of its exponentials. They are communicated together:

    sum [N], x [N, k] of the arithmetic's dtype, ids [N, k] int32 -- packed, all_gather --> the same of every rank

The k largest of the R * k are those of the vocabulary. The sums of all ranks are added in the order of the ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import public
from vocab_parallel_ce.collectives import gathered, group_position
from vocab_parallel_ce.largest import has_kernels, largest_columns, n_compared
from vocab_parallel_ce.layout import compute_dtype, walkable
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import Settings, loss_options, shard_of_rank
from vocab_parallel_ce.plan import kernels_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import IDENTITY, NEG_INF, RowStats, _finite_or_zero, sum_exp

MOST_ELEMENTS = 2**24  # that are compared at once: copies of them take 8 bytes each
Gather = Callable[[Tensor], Tensor]
NO_ID = 2**31 - 1  # where a rank has no column; another logit of -inf comes first


@public(lambda keywords: True)
def top_k(
    logits: Tensor, k: int, *, group: Any = None, vocab_size: int | VocabShard | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the ``k`` most probable tokens of each row of logits that are sharded over the vocabulary.

    They make a :class:`TopKTeacher` of a tensor-parallel teacher. Log-probabilities are ``log_softmax(x / T)`` over the
    whole vocabulary, with ``T = temperature``, in fp32. They have no gradient. Overwrites nothing.

    Collectives: one all_gather of ``8 * k + 4`` bytes per row from each rank. ``torch.compile`` breaks its graph.

    Args:
        logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        k: at least 1, at most the size of the vocabulary. It may be larger than ``C``.
        group, vocab_size: as in :func:`vocab_parallel_cross_entropy`.
        temperature: positive.

    Returns:
        Ids ``[..., k]`` int64 in the whole vocabulary, and log-probabilities ``[..., k]`` fp32, fp64 for fp64 logits,
        the largest first, of equal logits the smallest id; equal bit for bit on all ranks. A row with NaN or ``+inf``,
        without a finite logit, or whose ``x / T`` overflows, has log-probabilities NaN.

    Raises:
        TypeError, ValueError: a type, dtype or value does not fit.

    Example:
        >>> from vocab_parallel_ce import TopKTeacher, distillation_loss, top_k
        >>> ids, log_probs = top_k(torch.tensor([[1.0, 0.0, 1.0, -1.0]]), 2)
        >>> ids, round(log_probs[0, 0].item(), 4)
        (tensor([[0, 2]]), -0.9176)
        >>> round(distillation_loss(torch.zeros(1, 4), TopKTeacher(ids, log_probs, "bucket")).item(), 4)
        0.1913
    """
    rows, shard, gather = sharded_rows(logits, vocab_size, group)
    k = checks.checked_count("k", k)
    checks.check_number("temperature", temperature, positive=True)
    if k > shard.vocab_size:
        raise ValueError(f"k: must be at most the vocab_size {shard.vocab_size}, got {k}")
    if verify.pending.get() is not None:
        verify.compare_logits("top_k", logits, shard, vocab_size, k=k, temperature=float(temperature))
    with torch.no_grad():
        ids, log_probs = _top_k(rows, k, shard, float(temperature), gather)
    return ids.view(*logits.shape[:-1], k), log_probs.view(*logits.shape[:-1], k)


def checked_shard(logits: Tensor, vocab_size: int | VocabShard | None, group: Any) -> tuple[VocabShard, int, int]:
    """Check ``logits [..., C]``, and return this rank's shard, its rank and the number of ranks."""
    checks.check_tensor("logits", logits)
    is_empty = vocab_size is not None and logits.dim() > 1 and not logits.shape[-1]  # as a last rank may be
    checks.check_logits(F.pad(logits, (0, 1)) if is_empty else logits)
    checks.check_no_transforms(logits)
    checks.check_no_trace()
    rank, n_ranks = group_position(group)
    return shard_of_rank(Settings(vocab_size=vocab_size), logits.shape[-1], rank, n_ranks), rank, n_ranks


def sharded_rows(logits: Tensor, vocab_size: int | VocabShard | None, group: Any) -> tuple[Tensor, VocabShard, Gather]:
    """Return the rows ``[N, n]`` of checked ``logits [..., C]``, without padding and gradient, the shard, and a gather.

    The gather returns ``[R, ...]`` of a tensor ``[...]`` of each rank.
    """
    shard, rank, n_ranks = checked_shard(logits, vocab_size, group)
    rows = logits.detach().reshape(logits.shape[:-1].numel(), shard.n_columns)[:, : shard.n_valid]
    return rows, shard, functools.partial(gathered, rank=rank, n_ranks=n_ranks, group=group)


def _top_k(rows: Tensor, k: int, shard: VocabShard, temperature: float, gather: Gather) -> tuple[Tensor, Tensor]:
    step = max(MOST_ELEMENTS // max(n_compared(shard.n_valid, k), 1), 1)
    parts = [_local_top_k(part, k, shard.start) for part in rows.split(step)]
    x, ids = (torch.cat(each) for each in zip(*parts, strict=True))
    sums = _local_sums(rows, ids[:, 0], shard, temperature)
    words = [each.flatten().view(torch.int32) for each in (sums, x, ids)]
    packed = gather(torch.cat(words)).split(list(map(len, words)), dim=1)
    likes = zip(packed, (sums, x, ids), strict=True)
    sums, x, ids = (part.flatten().view(like.dtype).view(len(part), *like.shape) for part, like in likes)
    rank_max = x[..., 0]
    row_max = _finite_or_zero(rank_max.amax(dim=0))
    total = torch.zeros_like(row_max)
    for rank_sum, its_max in zip(sums, rank_max, strict=True):
        total += rank_sum * ((its_max - row_max) / temperature).exp()
    x, ids = _in_order(*(each.transpose(0, 1).flatten(1) for each in (x, ids)))
    log_probs = (x[:, :k] - row_max.unsqueeze(-1)) / temperature - total.log().unsqueeze(-1)
    return ids[:, :k].long(), log_probs


def _local_sums(rows: Tensor, best: Tensor, shard: VocabShard, temperature: float) -> Tensor:
    """Return ``[N]`` sums of ``exp((x - max) / temperature)`` over this rank's columns; ``best [N]`` are ids of max."""
    if not shard.n_valid:
        return best.new_zeros(len(best), dtype=compute_dtype(rows.dtype))
    options = loss_options(Settings(temperature=temperature), shard.vocab_size)
    kernels = kernels_of("triton" if has_kernels(rows) else "reference")
    launchers = LABELS.launchers(options, shard._replace(stop=shard.start + shard.n_valid), kernels)
    stats = rows.new_empty(1, len(best), *launchers.widths, dtype=compute_dtype(rows.dtype))
    launchers.statistics(walkable(rows), Labels(best.contiguous()), (stats,), 0)
    return sum_exp(RowStats(*stats[0].unbind(-1), *IDENTITY[3:]))  # type: ignore[call-arg]


def _local_top_k(rows: Tensor, k: int, start: int) -> tuple[Tensor, Tensor]:
    """Return ``[n, k]``, the largest of ``rows [n, C]``, and their ids."""
    n_columns, dtype = rows.shape[-1], compute_dtype(rows.dtype)
    missing = max(k - n_columns, 0)
    columns = largest_columns(rows, k - missing)
    x, ids = _in_order(rows.gather(-1, columns).to(dtype), (columns + start).int())
    return F.pad(x, (0, missing), value=NEG_INF), F.pad(ids, (0, missing), value=NO_ID)


def _in_order(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ``[n, k]`` with the largest x first, of equal ones the smallest id."""
    ids, order = ids.sort(dim=-1)
    x, by_size = x.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return x, ids.gather(-1, by_size)
