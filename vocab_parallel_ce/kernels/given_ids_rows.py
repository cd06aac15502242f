"""Jit functions over a row of k given ids, a lane each: where they are, what the ranks know, and log-probabilities."""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.losses.given_ids import IdsOptions, Known
from vocab_parallel_ce.shard import VocabShard


class IdsSizes(NamedTuple):
    """Numbers that are the same in every step, as kernels take them. What is off is None."""

    k: int  # ids of a row
    n_valid: int  # columns of the shard that are not padding
    vocab_size: int
    ignore_index: int

    @classmethod
    def of(cls, options: IdsOptions, shard: VocabShard) -> "IdsSizes":
        return cls(options.n_ids, shard.n_valid, shard.vocab_size, options.ignore_index)


class GivenColumns(NamedTuple):
    """The ids of a row, a lane each."""

    column: tl.tensor  # int32 of this shard, -1 if it has not got the id
    owned: tl.tensor
    outside: tl.tensor  # of the vocabulary
    left_out: tl.tensor


@triton.jit
def given_columns(ids, row, lane, sizes, shard_start):
    """Return the ``GivenColumns`` of a row; lanes past the last id are left out."""
    k = sizes.k
    value = tl.load(ids + row * k + lane, lane < k, other=0).to(tl.int64)
    left_out = (lane >= k) | (value == sizes.ignore_index)
    outside = ((value < 0) | (value >= sizes.vocab_size)) & (left_out == 0)
    column = value - shard_start
    owned = (column >= 0) & (column < sizes.n_valid) & (left_out == 0) & (outside == 0)
    return GivenColumns(tl.where(owned, column, -1).to(tl.int32), owned, outside, left_out)


@triton.jit
def load_given(logits, begin, column, owned, loss_options, temperature):
    """Return the z of each lane, -inf where it is not owned, and its derivative by the logit."""
    x = tl.load(logits + begin + column, owned, other=float("-inf"))
    z, slope = ops.transform(x, loss_options, temperature)
    return tl.where(owned, z, float("-inf")), slope


@triton.jit
def best_column(z, at, lane):
    """Return the column of the first lane with the largest z, -1 if none is owned, or all are NaN."""
    is_best = at.owned & (z == tl.max(z))
    place = tl.min(tl.where(is_best, lane, lane.shape[0]))
    return tl.max(tl.where(lane == place, at.column, -1))


@triton.jit
def merged_ids(stats, row, lane, sizes, n_ranks, n_rows):
    """Merge ``stats [R, N, 3 + k]`` of a row, in the order of the ranks."""
    row_max, best, best_rank = float("-inf"), float("-inf"), 0
    z = tl.full(lane.shape, float("-inf"), tl.float32)
    for rank in range(n_ranks):
        pointer = stats + (rank * n_rows + row) * (3 + sizes.k)
        rank_best = tl.load(pointer + 2)
        z = tl.maximum(z, tl.load(pointer + 3 + lane, lane < sizes.k, other=float("-inf")))
        row_max = tl.maximum(row_max, tl.load(pointer))
        best_rank = tl.where(rank_best > best, rank, best_rank)
        best = tl.maximum(best, rank_best)
    shift = ops.finite_or_zero(row_max)
    others = 0.0
    for rank in range(n_ranks):
        pointer = stats + (rank * n_rows + row) * (3 + sizes.k)
        rank_max, without_best, rank_best = tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2)
        decay = ops.exp_shifted(rank_max, shift)
        # One rank's best is the best of all: its term is not among the others'.
        others += without_best * decay + tl.where(rank == best_rank, 0.0, ops.exp_shifted(rank_best, shift))
    return Known(row_max, z, others, ops.exp_shifted(best, shift))


@triton.jit
def log_probs_at(known, at):
    """Return the log-probabilities of a row's lanes, NaN of ids outside, 0 where left out."""
    log_sum = ops.log1p(known.others + (known.best_term - 1.0))
    values = (known.z - known.row_max) - log_sum
    return tl.where(at.left_out, 0.0, tl.where(at.outside, float("nan"), values))
