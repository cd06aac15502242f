"""Unreduced losses whose grad_output is known in forward, except one factor.

Forward computes the gradients with the ``expected`` grad_output. Backward finds the factor between it and the real one
on the device, without waiting for it. If the two differ by more than one factor, the gradients become NaN, and a later
call warns.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.head.chunks import TokenOrder
from vocab_parallel_ce.layout import flat
from vocab_parallel_ce.targets import Tokens

TOLERANCE = 2.0**-20  # relative: some roundings of fp32
MISFIT = (
    "expected_grad_output: the losses of a call were multiplied by something else, beyond one factor for all "
    "tokens, so its gradients are NaN; pass what multiplies the losses, or use gradient='in_backward'"
)
_misfits: deque[tuple[Tensor, Any]] = deque()  # flags on their way to the host, and the events of their arrival


class Expected(NamedTuple):
    """The expected grad_output, fp32."""

    of_tokens: Tensor  # [N], 0 for ignored tokens
    of_rows: Tensor  # [M]
    is_valid: Tensor  # [N] bool: not ignored


def check_expected(given: Any, tokens: Tokens) -> None:
    """Raise unless ``given`` is a tensor of one real number per token."""
    if not isinstance(given, Tensor) or given.is_complex():
        got = getattr(given, "dtype", type(given).__name__)
        raise TypeError(f"expected_grad_output: expected a tensor of real numbers, got {got}")
    if given.layout is not torch.strided:
        raise TypeError(f"expected_grad_output: expected a dense tensor, got layout {given.layout}")
    device = tokens.tensor.device
    if given.shape != tokens.shape or given.device != device:
        expected = f"shape {tuple(tokens.shape)} on {device}, as labels"
        raise ValueError(f"expected_grad_output: expected {expected}, got {tuple(given.shape)} on {given.device}")


def expected_of(given: Tensor, is_valid: Tensor, order: TokenOrder | None) -> Expected:
    """Return the checked ``given [...]`` as backward and the chunks need it."""
    of_tokens = torch.where(is_valid, flat(given.detach()).float(), 0.0)
    return Expected(of_tokens, of_tokens if order is None else order.to_rows(of_tokens, 0.0), is_valid)


def factor_of(expected: Expected, grad_output: Tensor) -> Tensor:
    """Return ``[1]`` fp32: ``grad_output [N]`` divided by the expected one; NaN if no factor fits all tokens."""
    if grad_output.shape[0] == 0:
        return grad_output.new_ones(1, dtype=torch.float32)
    real = torch.where(expected.is_valid, grad_output.float(), 0.0)
    largest = expected.of_tokens.abs().argmax().reshape(1)
    divisor = expected.of_tokens.index_select(0, largest)
    factor = torch.where(divisor == 0, 0.0, real.index_select(0, largest) / divisor)
    product = factor * expected.of_tokens
    fits = (real - product).abs() <= TOLERANCE * product.abs() + torch.finfo(torch.float32).tiny
    # An infinite grad_output is an overflow: the gradients are not finite then, and that is no misfit.
    _remember((~fits & real.isfinite() & factor.isfinite()).any())
    return torch.where(fits.all(), factor, math.nan)


def warn_of_misfits() -> None:
    """Warn if an earlier backward has found a misfit, as far as the host knows without waiting."""
    while _misfits:
        flag, event = _misfits[0]
        # While a CUDA graph is captured, no event may be asked.
        if event is not None and (torch.cuda.is_current_stream_capturing() or not event.query()):
            return
        _misfits.popleft()
        if flag:
            warnings.warn(MISFIT, RuntimeWarning, stacklevel=4)


def _remember(is_misfit: Tensor) -> None:
    """Begin to send a flag to the host; not while a CUDA graph is captured."""
    if not is_misfit.is_cuda:
        _misfits.append((is_misfit, None))
        warn_of_misfits()
    elif not torch.cuda.is_current_stream_capturing():
        on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
        on_host.copy_(is_misfit, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        _misfits.append((on_host, event))
