"""Per-token outputs from the gathered statistics of all ranks: the loss of ``spec``, and what else is requested.

One program does 128 rows; with up to 1024 rows, one program does all and also writes the sum of the losses. It reads
4 K R bytes per row and writes 4 bytes per output (predictions 8). It does not read the logits.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels import labels as of_labels
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, cache_launches, can_overlap, dtypes_of
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions, TokenOutputs

LOSS_ROWS, SUMMED_ROWS = 128, 1024


@triton.jit(do_not_specialize=["n_rows"])
def loss_kernel(
    labels,  # [N] int64|int32
    stats,  # [R, N, K] fp32
    divisor,  # [1] integer or floating point, or None: 1
    loss,  # [N] fp32, out
    entropy,  # [N] fp32, out, or None
    lse,  # [N] fp32, out, or None
    sum_sq_probs,  # [N] fp32, out, or None
    mean_logit,  # [N] fp32, out, or None
    predictions,  # [N] int64, out, or None
    total,  # [] fp32, out: the sum of the losses of a single program; or None
    n_ranks,
    vocab_size,
    loss_options,  # option_arguments
    n_rows,
    RANKS: tl.constexpr,  # n_ranks rounded up to a power of two
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Example: two ranks with ``(3, 0.5032, 3)`` and ``(2, 1, -inf)``, label on the first: loss 0.6265."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    label = tl.load(labels + rows, inside, other=0).to(tl.int64)
    ops.let_next_begin(OVERLAPS)
    ops.wait_for_previous(OVERLAPS)
    ranks = tl.arange(0, RANKS)[:, None]
    pointers = of_labels.stats_of_row(stats, ranks.to(tl.int64) * n_rows + rows[None, :], loss_options)
    merged = of_labels.merge_ranks(pointers, (ranks < n_ranks) & inside[None, :], loss_options)
    outputs = TokenOutputs(loss, entropy, lse, sum_sq_probs, mean_logit, predictions)
    weight = 1.0
    if divisor is not None:
        weight = ops.divisor_weight(divisor, loss_options.class_weight)
    losses = of_labels.store_outputs(outputs, rows, inside, merged, label, weight, vocab_size, loss_options)
    if total is not None:
        tl.store(total, tl.sum(tl.where(inside, losses, 0.0)))


def token_outputs(
    stats: tuple[Tensor],
    beside: Labels,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``outputs``, contiguous, from ``stats[0] [R, N, K]``; ``divisor [1]`` divides the loss if given."""
    _fill(stats[0], beside, divisor, outputs, None, shard, options)


def summed_outputs(
    stats: tuple[Tensor],
    beside: Labels,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> Tensor:
    """Do what :func:`token_outputs` does, and return the sum of the losses; up to SUMMED_ROWS rows in one launch."""
    total = outputs.loss.new_empty(()) if 0 < stats[0].shape[1] <= SUMMED_ROWS else None
    _fill(stats[0], beside, divisor, outputs, total, shard, options)
    return outputs.loss.sum() if total is None else total


def _fill(
    stats: Tensor,
    beside: Labels,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    total: Tensor | None,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    n_ranks, n_rows, _ = stats.shape
    # The next power of two; triton.next_power_of_2 takes 3 us.
    block = LOSS_ROWS if total is None else max(LOSS_ROWS, 1 << (n_rows - 1).bit_length())
    tensors = (beside.labels, stats, divisor, *outputs, total)
    launch = _launch(dtypes_of(tensors), block, n_ranks, shard.vocab_size, options, can_overlap(stats.get_device()))
    launch(-(-n_rows // block), tensors, (n_rows,))


@cache_launches
def _launch(dtypes: Dtypes, block: int, n_ranks: int, vocab_size: int, options: LossOptions, overlaps: bool) -> Launch:
    constants = {"RANKS": triton.next_power_of_2(n_ranks), "ROWS": block, "OVERLAPS": overlaps}
    return Launch(loss_kernel, (n_ranks, vocab_size, options), constants, num_warps=block // 32, launch_pdl=overlaps)
