"""Multiply a stored gradient by ``grad_output``, which overwrites it.

    grad_i *= grad_output(row)

A fixed number of programs walks the rows. The factor is read on the device, and a row with factor 1 is left
alone. So the usual ``loss.backward()`` of a reduced loss costs one short launch. Otherwise the shard is read
once and written once, and the gradient is rounded a second time. Regime: bound by memory.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.blocks import READ_AND_WRITE, READ_AND_WRITE_EDGES, choose_block
from vocab_parallel_ce.kernels.launch import Dtypes, Launch, Rows, cache_launches, dtypes_of, row_arguments, walk_launch
from vocab_parallel_ce.kernels.walk import locate, write

PROGRAMS = 512  # fills a GPU, and starts and ends in 2 us


@triton.jit
def scaled(factor, tile, grad_logits):
    """Return a tile times ``factor``, 0 where it is 0: an ignored row stays 0 under an infinite factor."""
    grad = tl.load(grad_logits + tile.offset, tile.inside).to(tl.float32)
    return tl.where(grad == 0, 0.0, grad * factor)


@triton.jit(do_not_specialize=["n_rows"])
def element_mul_kernel(
    grad_logits,  # [N, C] bf16|fp16|fp32, in and out
    grad_output,  # [N] fp32
    layout,  # RowLayout of grad_logits
    grad_output_stride,  # 0: one factor for all rows
    n_columns,
    n_rows,
    HAS_EDGES: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Example: ``[1, 2, 3]`` with grad_output 0.5 becomes ``[0.5, 1, 1.5]``."""
    row = tl.program_id(0).to(tl.int64)
    if grad_output_stride == 0:
        if tl.load(grad_output).to(tl.float32) == 1.0:
            n_rows *= 0
    while row < n_rows:
        factor = tl.load(grad_output + row * grad_output_stride).to(tl.float32)
        if factor != 1.0:
            place = locate(row, layout, None, n_columns, False, VECTOR)
            step: tl.constexpr = LANES * VECTOR
            write(place, factor, grad_logits, grad_logits, None, 0, step, scaled, HAS_EDGES, LANES, VECTOR)
        row += tl.num_programs(0)


def element_mul(grad_logits: Tensor, grad_output: Tensor) -> None:
    """Multiply, and overwrite, row r of ``grad_logits [..., C]`` by ``grad_output [N]``, of any stride."""
    n_rows = grad_output.shape[0]
    base, rows = row_arguments(grad_logits)
    tensors = (base, grad_output)
    launch = _launch(dtypes_of(tensors), rows, grad_logits.shape[-1], grad_output.stride(0))
    launch(min(n_rows, PROGRAMS), tensors, (n_rows,))


@cache_launches
def _launch(dtypes: Dtypes, rows: Rows, n_columns: int, stride: int) -> Launch:
    block = choose_block(READ_AND_WRITE_EDGES if rows[1] else READ_AND_WRITE, n_columns, dtypes[0].itemsize)
    return walk_launch(element_mul_kernel, rows, (stride, n_columns), block)
