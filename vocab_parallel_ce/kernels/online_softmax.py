"""Statistics of every row of a vocabulary shard, in one read of it.

    row_max = max_i z_i,  others_sum = sum_{i != y} exp(z_i - row_max),  target_logit = z_y
    shifted_sum = sum_i (z_i - row_max),  n_columns                with label smoothing
    exp_shifted_sum = sum_i exp(z_i - row_max) (z_i - row_max)     with entropy
    argmax = the first i of row_max                            with predictions

where z are the scaled and capped logits.

One program a row. Each thread walks the row in 16-byte vectors with a maximum and sums of its own, rescaled
when its maximum grows; the threads' statistics are merged once, at the end of the row. The walk leaves out
the label's vector, which is read after it. So no sum of others holds the label's own term, next to which it
would lose digits. Regime: 1 K to 256 K columns, any number of rows, bound by memory: reads the shard once,
writes 4 K bytes a row. Rows that are ignored, and padding, are not read. If there is one rank, the kernel
also writes what ``loss`` would make of the statistics.
"""

import functools

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import READ, choose_block
from vocab_parallel_ce.kernels.launch import (
    MOST_LAUNCHES,
    Dtypes,
    Launch,
    dtypes_of,
    option_arguments,
    row_arguments,
)
from vocab_parallel_ce.kernels.primitives import (
    bounded,
    exp_shifted,
    finite_or_zero,
    loose_offsets,
    raised_by,
    row_begin,
    row_body,
    stats_of_row,
    store_outputs,
    transform,
)
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions, TokenOutputs

NO_OUTPUTS = (None, None, None, None)
LABELS_AT_ONCE = 512  # more than a narrow row's lanes, few enough for one warp's registers


@triton.jit
def exp_times_shifted(z, shift):
    """``exp(z - shift) * (z - shift)``, 0 in an excluded column."""
    return exp_shifted(z, shift) * bounded(z - shift)


@triton.jit(do_not_specialize=["shard_start", "n_rows", "stats_start"])
def online_softmax_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    labels,  # [N] int64|int32
    stats,  # [R, N, K] fp32, out: this rank's rows
    valid_rows,  # [1] int32, out, or None
    loss,  # [N] fp32, out, or None: there are other ranks
    entropy,  # [N] fp32, out, or None
    lse,  # [N] fp32, out, or None
    predictions,  # [N] int64, out, or None
    divisor,  # [1] of loss, integer or floating point, or None: 1
    layout,  # RowLayout of logits
    n_columns,  # that are no padding
    vocab_size,
    row_options,  # option_arguments
    n_rows,
    shard_start,
    stats_start,  # this rank's first row in stats
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """One row: ``x = [1, 3, 2]``, label 1 at shard start 0 gives ``(3, 0.5032, 3)``.

    With smoothing also ``(-3, 3)``, with entropy ``-0.6386``, with predictions ``1``.
    """
    row = tl.program_id(0).to(tl.int64)
    if valid_rows is not None:
        # One program counts the labels while the others stream logits: no launch, no atomics.
        if row == 0:
            count = tl.zeros([COUNTED], tl.int32)
            for first_row in range(0, n_rows, COUNTED):
                rows = first_row + tl.arange(0, COUNTED)
                inside = rows < n_rows
                row_label = tl.load(labels + rows, inside, other=0).to(tl.int64)
                count += (inside & (row_label != row_options[0])).to(tl.int32)
            tl.store(valid_rows, tl.sum(count))
    _, smoothing, _, _, _, wants_entropy, wants_predictions = row_options
    label = tl.load(labels + row).to(tl.int64)
    # An ignored row is a row of no columns: nothing is read and the identity comes out.
    n_columns = tl.where(label == row_options[0], 0, n_columns)
    begin = row_begin(row, layout)
    first, width = row_body(begin, n_columns, VECTOR)
    column = label - shard_start
    owned = (column >= 0) & (column < n_columns)
    target = begin + column
    target_vector = (target - first) // VECTOR * VECTOR
    in_body = owned & (target >= first) & (target_vector < width)
    target_vector = tl.where(in_body, target_vector, -VECTOR).to(tl.int32)
    lane_vectors = tl.arange(0, LANES) * VECTOR
    lane_columns = lane_vectors[:, None] + tl.arange(0, VECTOR)[None, :]
    lane_max = tl.full([LANES], float("-inf"), tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    lane_shifted_sum = tl.zeros([LANES], tl.float32)
    lane_count = tl.zeros([LANES], tl.float32)
    lane_exp_shifted_sum = tl.zeros([LANES], tl.float32)
    lane_tile = tl.zeros([LANES], tl.int32)
    for tile in range(0, width, LANES * VECTOR):
        columns = tile + lane_columns
        inside = (columns < width) & (tile + lane_vectors != target_vector)[:, None]
        x = tl.load(logits + first + columns, inside, other=float("-inf")).to(tl.float32)
        z = transform(x, row_options)[0]
        tile_max = tl.max(z, axis=1)
        new_max = tl.maximum(lane_max, tile_max)
        shift = finite_or_zero(new_max)
        decay = exp_shifted(lane_max, shift)
        # What was summed relative to the old maximum is now relative to the new one.
        if smoothing is not None:
            lane_shifted_sum += lane_count * raised_by(lane_max, shift)
            lane_shifted_sum += tl.sum(tl.where(inside, z - shift[:, None], 0.0), axis=1)
            lane_count += tl.sum(inside.to(tl.float32), axis=1)
        if wants_entropy is not None:
            lane_exp_shifted_sum += lane_sum * bounded(raised_by(lane_max, shift))
            lane_exp_shifted_sum = lane_exp_shifted_sum * decay + tl.sum(
                exp_times_shifted(z, shift[:, None]), axis=1
            )
        if wants_predictions is not None:
            lane_tile = tl.where(tile_max > lane_max, tile, lane_tile)
        lane_sum *= decay
        lane_sum += tl.sum(exp_shifted(z, shift[:, None]), axis=1)
        lane_max = new_max
    offset, inside = loose_offsets(begin, n_columns, first, width, target_vector, VECTOR, HAS_EDGES)
    inside &= offset != target
    x = tl.load(logits + offset, inside, other=float("-inf")).to(tl.float32)
    loose = transform(x, row_options)[0]
    x = tl.load(logits + target, owned, other=float("-inf")).to(tl.float32)
    target_logit = transform(x, row_options)[0]
    row_max = tl.maximum(tl.maximum(tl.max(lane_max), tl.max(loose)), target_logit)
    shift = finite_or_zero(row_max)
    decay = exp_shifted(lane_max, shift)
    others_sum = tl.sum(lane_sum * decay) + tl.sum(exp_shifted(loose, shift))
    # A maximum may pass over a NaN.
    others_sum = tl.where(target_logit == target_logit, others_sum, float("nan"))
    shifted_sum = 0.0
    exp_shifted_sum = 0.0
    first_max = 0.0
    out = stats_of_row(stats, stats_start + row, row_options)
    tl.store(out, row_max)
    tl.store(out + 1, others_sum)
    tl.store(out + 2, target_logit)
    out += 3
    if smoothing is not None:
        shifted_sum = tl.sum(lane_shifted_sum + lane_count * raised_by(lane_max, shift))
        shifted_sum += tl.sum(tl.where(inside, loose - shift, 0.0))
        shifted_sum += tl.where(owned, target_logit - shift, 0.0)
        tl.store(out, shifted_sum)
        tl.store(out + 1, n_columns.to(tl.float32))
        out += 2
    if wants_entropy is not None:
        lane_shift = bounded(raised_by(lane_max, shift))
        exp_shifted_sum = tl.sum((lane_exp_shifted_sum + lane_sum * lane_shift) * decay)
        exp_shifted_sum += tl.sum(exp_times_shifted(loose, shift)) + exp_times_shifted(target_logit, shift)
        tl.store(out, exp_shifted_sum)
        out += 1
    if wants_predictions is not None:
        # Each lane knows the tile that raised its maximum last: its vector there is read once more.
        columns = lane_tile[:, None] + lane_columns
        is_read = (lane_max == row_max)[:, None] & (columns < width)
        x = tl.load(logits + first + columns, is_read, other=float("-inf")).to(tl.float32)
        z = transform(x, row_options)[0]
        columns = tl.where(z == tl.max(z), columns, 2147483647)
        argmax = tl.min(tl.where(is_read, columns, 2147483647)) + (first - begin)
        argmax = tl.minimum(argmax, tl.min(tl.where(loose == row_max, offset - begin, 2147483647)))
        argmax = tl.minimum(argmax, tl.where(owned & (target_logit == row_max), column, 2147483647))
        is_finite = tl.abs(row_max) < float("inf")
        first_max = tl.where(is_finite, (argmax + shard_start).to(tl.float32), float("inf"))
        tl.store(out, first_max)
    if loss is not None:
        merged = (row_max, others_sum, target_logit, shifted_sum, exp_shifted_sum, first_max)
        is_row = row < n_rows
        store_outputs(
            loss, entropy, lse, predictions, row, is_row, merged, label, divisor, vocab_size, row_options
        )


def online_softmax(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    rank: int,
    valid_rows: Tensor | None,
    outputs: TokenOutputs | None = None,
    divisor: Tensor | None = None,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``stats[rank]`` of ``stats [R, N, K]`` for ``logits [..., C]`` and contiguous ``labels [N]``.

    ``valid_rows [1]`` int32, where given, receives the number of labels that are not ignored.
    ``outputs``, where given, are filled as by ``token_outputs``: the rank must be the only one.
    """
    n_rows = labels.shape[0]
    if n_rows == 0:
        return
    base, layout, has_edges = row_arguments(logits)
    tensors = (base, labels, stats, valid_rows, *(outputs or NO_OUTPUTS), divisor)
    launch = _launch(dtypes_of(tensors), layout, has_edges, shard, options)
    launch(n_rows, tensors, (n_rows, shard.start, rank * n_rows))


@functools.lru_cache(maxsize=MOST_LAUNCHES)
def _launch(
    dtypes: Dtypes, layout: tuple[int, ...], has_edges: bool, shard: VocabShard, options: LossOptions
) -> Launch:
    block = choose_block(READ, shard.n_columns, dtypes[0].itemsize)
    return Launch(
        online_softmax_kernel,
        (layout, shard.n_valid, shard.vocab_size, option_arguments(options)),
        {
            "HAS_EDGES": has_edges or shard.n_valid % block.vector != 0,
            "LANES": block.lanes,
            "VECTOR": block.vector,
            "COUNTED": LABELS_AT_ONCE,
        },
        num_warps=block.num_warps,
    )
