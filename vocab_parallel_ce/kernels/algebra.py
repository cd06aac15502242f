"""A loss as kernels take it: its jit functions, and the tensors that they read.

    dloss/dx_i = gradient(factors(merged statistics, grads / divisor), x_i)

``rows`` has the statistics of every loss, ``outputs`` what is made of those of all ranks.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import Block
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Launch, Rows, pair_arguments, row_arguments, walk_launch
from vocab_parallel_ce.kernels.walk import Sizes
from vocab_parallel_ce.shard import VocabShard


class Algebra(NamedTuple):
    """The mathematics of a loss's file in ``losses``, as jit functions; a ``tl.constexpr``.

    ``stats`` is the loss's record of statistics, ``lanes`` that of what each lane knows, of pairs ``stats`` too.
    ``second`` are the sums of the second exchange, or None. ``tile`` is a ``walk.Tile``, ``row`` a ``Row``.
    ``options`` is the argument ``loss_options``: those that are off are None.
    """

    # (place, label, shard_start, VECTOR): int32, what the walk of the statistics must know of the label: of labels the
    # begin of its vector, which the walk leaves out, of pairs its column; negative if it is not there
    label_at: Any
    empty: Any  # (row, place, LANES): lanes that have seen nothing
    tile: Any  # (lanes, tile, row): lanes with one more tile; None for the first one
    merge_lanes: Any  # (a, b, options): lanes of two sets of columns, those of b after those of a
    load_lanes: Any  # (pointers, mask, options, step): packed lanes, step apart
    store_lanes: Any  # (pointers, lanes, options, step): pack them
    finish: Any  # (lanes, row, place, label, shard_start, sizes, options, SHAPE): stats
    store: Any  # (pointers, stats, options, step): pack them
    load: Any  # (pointers, mask, options, step): packed stats; what mask excludes has no columns, None excludes nothing
    merge_pair: Any  # (a, b, options): the stats of two sets of columns, of each lane, unit or rank
    store_outputs: Any  # (outputs, rows, inside, stats, second, label, divisor, sizes, options): store; return losses
    # (stats, second, label, live, divisor, grads, strides, row, shard_start, sizes, options): what the gradients of a
    # row's columns share, finite if not live; whether the row is read; the label's column, -1 if it is elsewhere
    factors: Any
    gradient: Any  # (factors, tile, row): fp32 of each column; 0 for a row that is not live, whose logits are all -inf
    # Of a second exchange.
    second: Any = None  # (sums, tile, (row, stats)): each lane's two sums with one more tile; None for the first one
    merge_second: Any = None  # (sums): [UNITS, lanes] over axis 1

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk knows this by. By its ``str`` it would load what an edited function was."""
        return "-".join([function.cache_key for function in self if function is not None])

    def __hash__(self) -> int:
        """Hash the object: the functions' hashes take a lock each, at every launch."""
        return id(self)


class KernelLoss(NamedTuple):
    """What a launcher is bound to: an algebra, with a shard and options."""

    algebra: Algebra
    shard: VocabShard
    options: Any
    is_pair: bool = True  # a teacher's logit stands alongside each logit
    n_lane_fields: int = 0  # of labels: numbers that a lane stores of a part; of pairs 0: its statistics

    def read(self, logits: Tensor, targets: Any) -> tuple[tuple[Tensor | None, ...], Rows]:
        """Return what all kernels over logits read, in their order, and how the rows lie."""
        if self.is_pair:
            base, other, rows = pair_arguments(logits, targets[0])
        else:
            (base, rows), other = row_arguments(logits), None
        labels, class_weight = getattr(targets, "labels", None), getattr(targets, "class_weight", None)
        temperature, threshold = getattr(targets, "temperature", None), getattr(targets, "threshold", None)
        return (base, other, labels, temperature, threshold, class_weight), rows

    def launch(
        self,
        kernel: Any,
        rows: Rows,
        values: tuple[Any, ...],
        block: Block,
        constants: dict[str, Any],
        compiler: dict[str, Any] | None = None,
    ) -> Launch:
        """Return the Launch of a kernel that walks rows: both layouts come first, and LOSS before ``constants``."""
        rows = rows._replace(has_edges=block.has_edges(self.shard, rows.has_edges))
        constants = {"LOSS": self.algebra, **constants}
        values = (rows.other_layout, Sizes.of(self.shard), *values, self.options)
        return walk_launch(kernel, rows, values, block, compiler, **constants)


class Row(NamedTuple):
    """What the walk of a row passes to the functions of a loss. Kernels make it: no function may return its None."""

    logits: tl.tensor  # the base
    other: tl.tensor  # the base of what stands alongside the logits, or None
    class_weight: tl.tensor  # the pointer, or None
    label_at: tl.tensor  # int32, of the statistics what Algebra.label_at returns; of the gradient its column, or -1
    vocab_size: tl.tensor
    loss_options: tl.tuple
    temperature: tl.tensor  # the row's, or None
    threshold: tl.tensor  # the row's, or None
    grads: tl.tuple = None  # GradOutputs of pointers, of a gradient


@triton.jit
def merged_ranks(stats, rows, mask, n_rows, loss_options, LOSS: tl.constexpr, WIDTH: tl.constexpr, RANKS: tl.constexpr):
    """Return the statistics of a row or of a vector of rows, from ``stats [RANKS, n_rows, WIDTH]``."""
    step = n_rows.to(tl.int64) * WIDTH
    return ops.merge_ranks(stats + rows * WIDTH, step, mask, loss_options, LOSS.load, LOSS.merge_pair, RANKS)


@triton.jit
def summed_ranks(second, rows, mask, n_rows, RANKS: tl.constexpr):
    """Return the two sums of ``rows`` in the second exchange, over the ranks; None if ``second`` is."""
    sums = None
    if second is not None:
        step = n_rows.to(tl.int64) * 2
        sums = ops.merge_ranks(second + rows * 2, step, mask, None, load_sums, add_sums, RANKS)
    return sums


@triton.jit
def load_sums(pointers, mask, loss_options, step):
    """Return the two sums of a second exchange, ``step`` apart."""
    return ops.load(pointers, mask, 0.0), ops.load(pointers + step, mask, 0.0)


@triton.jit
def add_sums(a, b, loss_options):
    return a[0] + b[0], a[1] + b[1]


@triton.jit
def as_they_are(numbers):
    return numbers


@triton.jit
def in_units(lanes, UNITS: tl.constexpr):
    """Return the numbers of lanes, ``[LANES]`` each, as ``[n, LANES // n]``, of n units or of the row."""
    n: tl.constexpr = max(UNITS, 1)
    return [tl.reshape(x, [n, x.shape[0] // n]) for x in lanes]
