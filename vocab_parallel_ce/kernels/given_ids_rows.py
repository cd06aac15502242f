"""Jit functions over a row of k given ids, a lane each: where they are, what the ranks know, and log-probabilities."""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops


class IdsSizes(NamedTuple):
    """Numbers that are the same in every step, as kernels take them. What is off is None."""

    k: int  # ids of a row in memory
    n_ids: int  # with that of a hard label
    n_valid: int  # columns of the shard that are not padding
    vocab_size: int
    ignore_index: int
    rest: int | None = None  # 1: a teacher's k ids have a rest
    reverse: int | None = None  # 1: that divergence
    beta: float | None = None  # of js
    student_share: float | None = None  # 1 - beta, whose digits a kernel would lose, as those of its logarithm
    log_beta: float | None = None
    most: float | None = None  # of js: the largest log-ratio whose 1 is not rounded away
    hard_weight: float | None = None


class GivenColumns(NamedTuple):
    """The ids of a row, a lane each."""

    column: tl.tensor  # int32 of this shard, -1 if it has not got the id
    owned: tl.tensor
    outside: tl.tensor  # of the vocabulary
    left_out: tl.tensor
    log_q: tl.tensor  # a teacher's, -inf if there is none


class Known(NamedTuple):
    """What the statistics of all ranks come to."""

    row_max: tl.tensor
    z: tl.tensor  # of each lane
    others: tl.tensor  # sum of exp(z - row_max) without the best given logit
    best_term: tl.tensor  # exp(its z - row_max)
    outside: tl.tensor  # the sum over what is not among the first k ids


@triton.jit
def given_columns(ids, log_probs, labels, row, lane, sizes, shard_start):
    """Return the ``GivenColumns`` of a row; lanes past the last id are left out."""
    k = sizes.k
    ids += row * k
    value = tl.load(ids + lane, lane < k, other=0).to(tl.int64)
    left_out = lane >= k
    log_q = tl.full(lane.shape, float("-inf"), tl.float32)
    if log_probs is not None:
        log_q = tl.load(log_probs + row * k + lane, lane < k, other=float("-inf"))
        left_out = log_q == float("-inf")
        if labels is not None:
            label = ops.load_label(labels, row)
            value = tl.where(lane == k, label, value)
            left_out = tl.where(label == sizes.ignore_index, lane >= 0, left_out & (lane != k))
    else:
        left_out |= value == sizes.ignore_index
    outside = ((value < 0) | (value >= sizes.vocab_size)) & (left_out == 0)
    column = value - shard_start
    owned = (column >= 0) & (column < sizes.n_valid) & (left_out == 0) & (outside == 0)
    return GivenColumns(tl.where(owned, column, -1).to(tl.int32), owned, outside, left_out, log_q)


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
    """Merge ``stats [R, N, 3 + n_ids]`` of a row, in the order of the ranks."""
    row_max, best, best_rank = float("-inf"), float("-inf"), 0
    z = tl.full(lane.shape, float("-inf"), tl.float32)
    for rank in range(n_ranks):
        pointer = stats + (rank * n_rows + row) * (3 + sizes.n_ids)
        rank_best = tl.load(pointer + 2)
        z = tl.maximum(z, tl.load(pointer + 3 + lane, lane < sizes.n_ids, other=float("-inf")))
        row_max = tl.maximum(row_max, tl.load(pointer))
        best_rank = tl.where(rank_best > best, rank, best_rank)
        best = tl.maximum(best, rank_best)
    shift = ops.finite_or_zero(row_max)
    others, outside = 0.0, 0.0
    for rank in range(n_ranks):
        pointer = stats + (rank * n_rows + row) * (3 + sizes.n_ids)
        rank_max, without_best, rank_best = tl.load(pointer), tl.load(pointer + 1), tl.load(pointer + 2)
        decay = ops.exp_shifted(rank_max, shift)
        # One rank's best is the best of all: its term is not among the others'.
        others += without_best * decay + tl.where(rank == best_rank, 0.0, ops.exp_shifted(rank_best, shift))
        if sizes.rest is not None:
            rank_z = tl.load(pointer + 3 + lane, lane < sizes.n_ids, other=float("-inf"))
            outside += outside_of_rank(rank_z, rank_max, without_best, lane, sizes) * decay
    return Known(row_max, z, others, ops.exp_shifted(best, shift), outside)


@triton.jit
def outside_of_rank(rank_z, rank_max, without_best, lane, sizes):
    """Return the sum of exp(z - max) over a rank's columns that are not among the first k ids."""
    terms_of_rank = ops.exp_shifted(rank_z, ops.finite_or_zero(rank_max))
    place = tl.min(tl.where(rank_z == tl.max(rank_z), lane, lane.shape[0]))  # the first of equals, as in the sum
    is_others = (lane != place) & (lane < sizes.k)
    best_term = tl.sum(tl.where((lane == place) & (lane >= sizes.k), terms_of_rank, 0.0))
    all_others = without_best + best_term
    outside = all_others - tl.sum(tl.where(is_others, terms_of_rank, 0.0))
    least = all_others * 5.960464477539063e-08  # less is rounding
    outside = tl.where(outside < least, least, outside)
    lowest = 7.70371977754894e-34  # 2^-110
    return tl.where((rank_max != float("-inf")) & (outside < lowest), lowest, outside)


@triton.jit
def log_probs_at(known, at, lane):
    """Return the log-probabilities of a row's lanes and of its rest, NaN of ids outside, 0 where left out."""
    log_sum = ops.log1p(known.others + (known.best_term - 1.0))
    values = (known.z - known.row_max) - log_sum
    values = tl.where(at.left_out, 0.0, tl.where(at.outside, float("nan"), values))
    n_outside, n_live = tl.sum(at.outside.to(tl.int32)), tl.sum((at.left_out == 0).to(tl.int32))
    rest = tl.where(n_outside > 0, float("nan"), tl.log(known.outside) - log_sum)
    return values, tl.where(n_live == 0, 0.0, rest)
