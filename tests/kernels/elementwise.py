"""Kernels that apply one jit function of ``primitives`` to every element. Import it inside a test only."""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels.launch import option_arguments
from vocab_parallel_ce.kernels.primitives import log1p, tanh, transform
from vocab_parallel_ce.spec import LossOptions

BLOCK = 1024


@triton.jit
def _tanh_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tanh(tl.load(x + at, at < n)), at < n)


@triton.jit
def _log1p_kernel(x, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, log1p(tl.load(x + at, at < n)), at < n)


@triton.jit
def _transform_kernel(x, out, slope, n, row_options, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    z, dz = transform(tl.load(x + at, at < n), row_options)
    tl.store(out + at, z, at < n)
    tl.store(slope + at, dz, at < n)


def tanh_of(x: Tensor) -> Tensor:
    """By the kernels' tanh, of fp32 ``x [n]``."""
    out = x.new_full(x.shape, float("nan"))
    _tanh_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def log1p_of(x: Tensor) -> Tensor:
    """By the kernels' log1p, of fp32 ``x [n]``."""
    out = x.new_full(x.shape, float("nan"))
    _log1p_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), BLOCK=BLOCK)
    return out


def transform_of(x: Tensor, options: LossOptions) -> tuple[Tensor, Tensor]:
    """``(z, dz/dx)`` by the kernels, of fp32 ``x [n]``."""
    z, slope = x.new_full(x.shape, float("nan")), x.new_full(x.shape, float("nan"))
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _transform_kernel[grid](x, z, slope, x.numel(), option_arguments(options), BLOCK=BLOCK)
    return z, slope
