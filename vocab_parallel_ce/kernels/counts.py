"""How many logits of each row are larger than some thresholds, or the sum of their exponentials.

    count_t = sum_i (x_i > threshold_t)                                  int32, a step of a sampler's search
    sum_t   = sum_i (x_i > threshold_t) exp(z_i - shift)                 fp32, z of ``spec``

One read of the shard. One program does one row. Regime: bound by memory. A threshold takes two instructions per logit,
a comparison and an addition, so 7 take about as long as the read of 16-bit logits. A row whose first and last threshold
are equal is not read.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import READ_SUMS, Block, choose_block
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.launch import Launch, Rows, cache_launches, row_arguments, walk_launch
from vocab_parallel_ce.kernels.walk import body_tile, locate, walk_edges
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, LossOptions


class Row(NamedTuple):
    """What the walk of a row passes on."""

    logits: tl.tensor  # the base
    thresholds: tl.tuple
    shift: tl.tensor  # None: count
    loss_options: tl.tuple


@triton.jit
def add_above(found, tile, own):
    """Return ``found [LANES, VECTOR]`` of each threshold with one more tile.

    An element has its own numbers: a select of what is added or not becomes one predicated instruction.
    """
    x = tl.load(own.logits + tile.offset, tile.inside, other=float("-inf"))
    term = 1.0
    if own.shift is not None:
        term = ops.exp_shifted(ops.transform(x, own.loss_options)[0], own.shift)
    x = x.to(tl.float32)
    sums = ()
    for i in tl.static_range(len(own.thresholds)):
        sums += (tl.where(x > own.thresholds[i], found[i] + term, found[i]),)
    return sums


@triton.jit(do_not_specialize=["n_rows"])
def sums_above_kernel(
    logits,  # [N, C] bf16|fp16|fp32
    thresholds,  # [N, T] fp32
    shift,  # [N] fp32, or None: count
    temperature,  # [N] fp32, or None: 1
    sums,  # [N, T] fp32, or int32 counts, out
    layout,  # RowLayout of logits
    n_columns,  # that are not padding
    loss_options,  # option_arguments
    n_rows,
    T: tl.constexpr,
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``x = [1, 3, 2]`` and thresholds ``1, 2.5`` give counts ``2, 1``; with shift 3 sums ``1.3679, 1``."""
    row = tl.program_id(0).to(tl.int64)
    own_thresholds, found = (), ()
    for i in tl.static_range(T):
        own_thresholds += (tl.load(thresholds + row * T + i),)  # type: ignore[assignment]
        found += (tl.zeros([LANES, VECTOR], tl.float32),)  # type: ignore[assignment]
    is_open = own_thresholds[0] != own_thresholds[T - 1]  # type: ignore[misc]
    own_shift = shift
    if shift is not None:
        own_shift = ops.finite_or_zero(tl.load(shift + row))
    if temperature is not None:
        t = ops.row_temperature(temperature, row, is_open)
        loss_options = LossOptions(*loss_options[:-2], t, loss_options[-1])  # type: ignore[call-arg]
    own = Row(logits, own_thresholds, own_shift, loss_options)
    place = locate(row, layout, None, tl.where(is_open, n_columns, 0), False, VECTOR)
    for begin in range(0, place.width, LANES * VECTOR):
        tile, _ = body_tile(place, begin, None, HAS_EDGES, LANES, VECTOR)
        found = add_above(found, tile, own)
    found = walk_edges(place, found, own, add_above, HAS_EDGES, LANES, VECTOR)
    for i in tl.static_range(T):
        tl.store(sums + row * T + i, tl.sum(found[i].to(sums.dtype.element_ty)))


def sums_above(
    logits: Tensor,
    thresholds: Tensor,
    shift: Tensor | None,
    temperature: Tensor | None,
    sums: Tensor,
    *,
    shard: VocabShard,
    options: LossOptions,
) -> None:
    """Fill ``sums [N, T]`` for ``logits [..., C]``, ``thresholds [N, T]``, ``shift [N]`` and ``temperature [N]``.

    All but the logits are fp32 and contiguous. Without ``shift`` the sums are int32 counts.
    """
    base, rows = row_arguments(logits)
    tensors = (base, thresholds, shift, temperature, sums)
    launch = _sums(rows, base.element_size(), sums.shape[-1], shard, of_sums(options))
    launch(sums.shape[0], tensors, (sums.shape[0],))


def of_sums(options: LossOptions) -> LossOptions:
    """Return the options that z depends on."""
    return PLAIN._replace(logit_scale=options.logit_scale, softcap=options.softcap)


@cache_launches
def _sums(rows: Rows, element_size: int, n_thresholds: int, shard: VocabShard, options: LossOptions) -> Launch:
    block = choose_block(READ_SUMS, shard.n_columns, element_size)
    rows = _valid_rows(rows, shard, block)
    return walk_launch(sums_above_kernel, rows, (shard.n_valid, options), block, T=n_thresholds)


def _valid_rows(rows: Rows, shard: VocabShard, block: Block) -> Rows:
    """Return rows that end where padding begins: in a vector, that is an edge."""
    layout, has_edges = rows
    return layout, has_edges or shard.n_valid % block.vector != 0
