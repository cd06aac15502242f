"""Logits as training has them: no leaf, but what an operation of a model has made."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


class _Head(torch.autograd.Function):
    """Stands for the operation that makes logits; its backward is not part of the loss, and never runs."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, buffer: Tensor) -> Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[None, None]:
        raise AssertionError("benchmark: the gradient of logits went further than to the logits")


@functools.cache
def _leaf(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, requires_grad=True)


def as_produced(buffer: Tensor) -> Tensor:
    """Logits in the memory of ``buffer``, neither a leaf nor a view, with an autograd node of their own.

    Takes no memory and launches nothing. ``buffer`` and all logits of it share a version: autograd and the
    losses notice when it is written to.
    """
    logits: Tensor = _Head.apply(_leaf(buffer.device), buffer)
    return logits
