"""Unreduced losses whose grad_output is known in the forward pass, except one factor.

Forward computes the gradients with the ``expected`` grad_output. Backward finds the factor between it and the real one
on the device, without waiting for it. If the two differ by more than one factor, the gradients become NaN, and a later
call warns.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.targets import Tokens

TOLERANCE = 2.0**-20  # relative: some roundings of fp32
MISFIT = (
    "expected_grad_output: the losses of a call were multiplied by something else, beyond one factor for all "
    "tokens, so its gradients are NaN; pass what multiplies the losses, or use gradient='in_backward'"
)
_misfits: deque[tuple[Tensor, Any]] = deque()  # flags on their way to the host, and the events of their arrival


def check_expected(factors: Any, tokens: Tokens, settings: Settings) -> None:
    """Raise unless ``factors`` is a tensor of one real number per token, with which forward may compute gradients."""
    name, device = "expected_grad_output", tokens.tensor.device
    if not isinstance(factors, Tensor) or factors.is_complex():
        got = getattr(factors, "dtype", type(factors).__name__)
        raise TypeError(f"{name}: expected a tensor of real numbers, got {got}; pass what multiplies the losses")
    checks.check_dense(name, factors)
    if factors.shape != tokens.shape or factors.device != device:
        expected, got = f"{tuple(tokens.shape)} on {device}", f"{tuple(factors.shape)} on {factors.device}"
        raise ValueError(f"{name}: expected shape {expected}, got {got}; pass one number for each label")
    if (settings.reduction, settings.gradient) != ("none", "in_forward"):
        got = f"reduction={settings.reduction!r} and gradient={settings.gradient!r}"
        raise ValueError(f"{name}: expected reduction='none' and gradient='in_forward', got {got}; pass those")


def factor_of(expected: Tensor, grad_output: Tensor, is_valid: Tensor) -> Tensor:
    """Return ``[1]`` fp32: ``grad_output [N]`` divided by the expected one; NaN if no factor fits all tokens.

    ``expected [N]`` is 0 where ``is_valid [N]`` is False.
    """
    if grad_output.shape[0] == 0:
        return grad_output.new_ones(1, dtype=torch.float32)
    real = torch.where(is_valid, grad_output.float(), 0.0)
    largest = expected.abs().argmax().reshape(1)
    divisor = expected.index_select(0, largest)
    factor = torch.where(divisor == 0, 0.0, real.index_select(0, largest) / divisor)
    product = factor * expected
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
        on_host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
        on_host.copy_(is_misfit, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        _misfits.append((on_host, event))
