"""Outputs and gradient of every loss of two tensors: logits, and a number alongside each logit.

    outputs      merge the ranks, and write the losses; does not read the logits
    gradient     merge the ranks, walk a row of both shards, and write the gradient, over the logits or elsewhere

A loss is an ``Algebra`` of jit functions, in a file of its own: ``soft_labels``, ``divergences``. ``row_statistics``
has its statistics. One program of ``outputs`` does 128 rows. A row of a gradient has one program, or several if there
are few rows. Regime: bound by memory, five passes over a shard in all, of a loss with a second exchange seven; 1 K to
256 K columns. Rows with ``ignore_index`` are not read. ``grad_output`` and the divisor are one fp32 factor per row, so
the gradient is rounded once.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import ALL_TILES, READ_PAIRS, Block, gradient_shape
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.cross_entropy import LOSS_ROWS
from vocab_parallel_ce.kernels.launch import Launch, cache_launches
from vocab_parallel_ce.kernels.walk import (
    Algebra,
    PairRows,
    Row,
    Sizes,
    clear_padding,
    column_of,
    locate,
    pair_arguments,
    pair_launch,
    write,
)
from vocab_parallel_ce.reference import sum_losses
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs


class PairLoss(NamedTuple):
    """What launchers are bound to: a loss of two tensors as kernels take it."""

    algebra: Algebra
    shard: VocabShard
    options: Any

    def constants(self, n_ranks: int, width: int) -> dict[str, Any]:
        """Return the constants of a kernel that merges ``width`` statistics of each of ``n_ranks``."""
        return {"LOSS": self.algebra, "WIDTH": width, "RANKS": n_ranks}


@triton.jit
def merged_ranks(stats, rows, mask, n_rows, loss_options, LOSS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Return the statistics of a row or of a vector of rows, from ``stats [RANKS, n_rows, WIDTH]``."""
    step = n_rows.to(tl.int64) * WIDTH
    return ops.merge_ranks(stats + rows * WIDTH, step, mask, loss_options, LOSS.load, LOSS.merge_pair, RANKS)


@triton.jit
def load_sums(pointers, mask, loss_options, step):
    """Return the two sums of a second exchange, ``step`` apart."""
    return tl.load(pointers, mask, other=0.0), tl.load(pointers + step, mask, other=0.0)


@triton.jit
def add_sums(a, b, loss_options):
    """Return the two sums of two sets of columns."""
    return a[0] + b[0], a[1] + b[1]


@triton.jit
def summed_ranks(second, rows, mask, n_rows, RANKS: tl.constexpr):
    """Return the two sums of ``rows`` in the second exchange, over the ranks."""
    step = n_rows.to(tl.int64) * 2
    return ops.merge_ranks(second + rows * 2, step, mask, None, load_sums, add_sums, RANKS)


@triton.jit
def output(stats, second, label, divisor, sizes, loss_options, LOSS: tl.constexpr):
    """Return the loss of one row or of a vector of rows; ``label`` is None if there are no labels."""
    value = LOSS.loss(stats, second, loss_options)
    if label is not None:
        value = ops.at_the_edges(value, label, sizes.vocab_size, loss_options)
    if divisor is not None:
        value = ops.weighted(value, ops.divisor_weight(divisor))
    return value


@triton.jit(do_not_specialize=["n_rows"])
def row_outputs_kernel(
    stats,  # [R, N, K] fp32
    second,  # [R, N, 2] fp32, or None
    labels,  # [N] int64|int32, or None
    divisor,  # [1], or None: 1
    loss,  # [N] fp32, out
    sizes,  # Sizes
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Example: targets, ranks with ``(3, 1.1353, 0.5, 0)`` and ``(2, 1, 0.5, 0)``: loss 0.9076."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    label = None
    if labels is not None:
        label = tl.load(labels + rows, inside, other=0).to(tl.int64)
    merged = merged_ranks(stats, rows, inside, n_rows, loss_options, LOSS, WIDTH, RANKS)
    sums = None
    if second is not None:
        sums = summed_ranks(second, rows, inside, n_rows, RANKS)
    tl.store(loss + rows, output(merged, sums, label, divisor, sizes, loss_options, LOSS), inside)


@triton.jit(do_not_specialize=["n_rows", "shard_start", "n_programs"])
def row_gradient_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    other,  # [N, C'], what stands alongside the logits
    labels,  # [N] int64|int32, or None
    class_weight,  # [sizes.n_valid] fp32, or None: all 1
    stats,  # [R, N, K] fp32
    second,  # [R, N, 2] fp32, or None
    divisor,  # [1], or None: 1
    grad_output,  # [N] fp32
    grad_logits,  # [N, C] logits' dtype, out; may be logits
    layout,  # RowLayout of logits and of grad_logits
    other_layout,
    grad_stride,  # of grad_output
    sizes,  # Sizes
    loss_options,  # option_arguments, or the loss's own
    n_rows,
    shard_start,
    n_programs,  # of a row; each writes every n_programs-th tile
    LOSS: tl.constexpr,  # Algebra
    WIDTH: tl.constexpr,  # K
    RANKS: tl.constexpr,
    IS_CUT: tl.constexpr,  # whether n_programs is not 1
    HAS_EDGES: tl.constexpr,
    ALIKE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: targets, ``x = [1, 3, 2]``, ``t = [0, 0.5, 0.5]``: ``[0.0900, 0.1652, -0.2553]``."""
    row, begin_tile, step = ops.tiles_of_program(n_rows, n_programs, IS_CUT, LANES * VECTOR)
    merged = merged_ranks(stats, row, True, n_rows, loss_options, LOSS, WIDTH, RANKS)
    sums = None
    if second is not None:
        sums = summed_ranks(second, row, True, n_rows, RANKS)
    weight = tl.load(grad_output + row * grad_stride)
    live = row >= 0
    if divisor is not None:
        share = ops.divisor_weight(divisor)
        weight *= share
        live &= share != 0
    target = tl.full((), -1, tl.int32)
    if labels is not None:
        label = tl.load(labels + row).to(tl.int64)
        live &= label != loss_options.ignore_index
        weight = tl.where((label < 0) | (label >= sizes.vocab_size), float("nan"), weight)
        target = column_of(label, shard_start, sizes.n_valid)
    factors = LOSS.factors(merged, sums, weight, live, loss_options)
    place = locate(row, layout, other_layout, sizes.n_valid, ALIKE, VECTOR)
    pair = Row(logits, other, class_weight, target, sizes.vocab_size, loss_options)
    write(place, factors, pair, grad_logits, live, begin_tile, step, LOSS.gradient, HAS_EDGES, LANES, VECTOR)
    clear_padding(grad_logits, place, sizes, begin_tile, LANES)


def outputs(
    loss: PairLoss,
    stats: tuple[Tensor, ...],
    targets: Any,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    total: Tensor | None = None,
) -> None:
    """Fill ``outputs``, contiguous, from the statistics of all ranks, and ``total []`` with the losses' sum if given.

    ``divisor [1]`` divides the loss if given.
    """
    n_ranks, n_rows, width = stats[0].shape
    tensors = (stats[0], second_of(stats), getattr(targets, "labels", None), divisor, outputs.loss)
    launch = _outputs(loss, n_ranks, width)
    launch(-(-n_rows // LOSS_ROWS), tensors, (n_rows,))
    if total is not None:
        sum_losses(outputs.loss, total)


def gradient(
    loss: PairLoss,
    logits: Tensor,
    targets: Any,
    stats: tuple[Tensor, ...],
    divisor: Tensor | None,
    grads: GradOutputs,
    grad_logits: Tensor,
) -> None:
    """Fill ``grad_logits``, laid out as ``logits [..., C]`` or it; ``grads.loss [N]`` multiplies it per row."""
    n_ranks, n_rows, width = stats[0].shape
    base, other_base, rows = pair_arguments(logits, targets[0])
    grad_base = base
    if grad_logits is not logits:
        grad_base, _, grad_rows = pair_arguments(grad_logits, targets[0])
        assert rows == grad_rows, "the gradient is laid out as the logits are"
    grad_output: Any = grads.loss
    if grad_output is None:
        grad_output = stats[0].new_ones(1, dtype=torch.float32).expand(n_rows)
    merged = (stats[0], second_of(stats), divisor)
    tensors = (
        base,
        other_base,
        getattr(targets, "labels", None),
        getattr(targets, "class_weight", None),
        *merged,
        grad_output,
        grad_base,
    )
    block, n_programs = gradient_shape(n_rows, loss.shard, base.element_size(), READ_PAIRS, ALL_TILES)
    launch = _gradient(loss, rows, block, n_programs > 1, grad_output.stride(0), n_ranks, width)
    launch(n_rows * n_programs, tensors, (n_rows, loss.shard.start, n_programs))


def second_of(stats: tuple[Tensor, ...]) -> Tensor | None:
    """Return the statistics of the second exchange, if there is one."""
    return stats[1] if len(stats) > 1 else None


@cache_launches
def _outputs(loss: PairLoss, n_ranks: int, width: int) -> Launch:
    constants = {**loss.constants(n_ranks, width), "ROWS": LOSS_ROWS}
    values = (Sizes.of(loss.shard), loss.options)
    return Launch(row_outputs_kernel, values, constants, num_warps=4)


@cache_launches
def _gradient(
    loss: PairLoss, rows: PairRows, block: Block, is_cut: bool, grad_stride: int, n_ranks: int, width: int
) -> Launch:
    values = (grad_stride, Sizes.of(loss.shard), loss.options)
    constants = {**loss.constants(n_ranks, width), "IS_CUT": is_cut}
    return pair_launch(row_gradient_kernel, rows, values, loss.shard, block, **constants)
