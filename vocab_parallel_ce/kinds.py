"""Kinds of calls: all that checks and launches depend on, except the values and the memory of tensors.

Two calls are of one kind if they have equal facts, and each tensor of one has the type, dtype, sizes, strides, device,
layout, ``requires_grad``, inference mode and negative bit of the other's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

MOST_KINDS = 1024  # that are known at a time
TENSOR_TYPES = (Tensor, torch.nn.Parameter)


class _Subclass(Tensor):
    pass


def _guards() -> Callable[..., Any] | None:
    """Return PyTorch's guard, which compares tensors in one call in C, if it refuses all that it must.

    It is private: without it kinds are found by a key of tuples.
    """
    try:
        guards: Callable[..., Any] = torch._C._dynamo.guards.TensorGuards
        with torch.inference_mode(False), torch.no_grad():
            usual = torch.zeros(2, 2, dtype=torch.float32, device="cpu")
            others = [
                *(usual.double(), usual[:1], usual.unsqueeze(0), usual.t(), usual[:1].expand(2, 2), usual.to("meta")),
                *(torch.nn.Parameter(usual, requires_grad=False), usual.as_subclass(_Subclass), usual.to_sparse()),
                *(usual.clone().requires_grad_(), torch._neg_view(usual)),
            ]
            with torch.inference_mode():
                others.append(usual.clone())
            fits = guards(usual, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check
            return guards if fits(usual.clone()) and not any(map(fits, others)) else None
    except Exception:  # whatever a private function raises that is not there, or has changed
        return None


_GUARDS = _guards()


class Kind:
    """A kind of call, and what was made for it. One object for all its calls."""

    def __init__(self, tensors: Sequence[Tensor] = ()) -> None:
        self.made: Any = None
        self.fits: Callable[..., bool] = lambda *tensors: False
        if _GUARDS is not None and tensors:
            self.fits = _GUARDS(*tensors, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check


class Kinds:
    """The kinds of calls that came."""

    def __init__(self, most: int = MOST_KINDS) -> None:
        self.most = most
        self.by_key: dict[Hashable, Kind] = {}
        self.last: dict[Hashable, Kind] = {}  # by facts, which tensors are given, and inference mode

    def find(self, facts: Hashable, tensors: Sequence[Any]) -> Kind | None:
        """Return the kind of a call of ``facts`` with ``tensors`` and None; None if one is of another type.

        Raises AttributeError for what is no tensor, and TypeError for facts without a hash.
        """
        given = [t for t in tensors if t is not None]
        is_given = tuple([t is not None for t in tensors])
        # In inference mode the guard takes an inference tensor and another for one kind.
        summary = facts, is_given, torch.is_inference_mode_enabled()
        kind = self.last.get(summary)
        if kind is not None and kind.fits(*given):  # never if a tensor is given twice
            return kind
        forms = [
            (type(t), t.dtype, t.shape, t.stride(), t.device, t.layout, t.requires_grad, t.is_inference(), t.is_neg())
            for t in given
        ]
        key = facts, is_given, *forms
        kind = self.by_key.get(key)
        if kind is None:
            if not all([type(t) in TENSOR_TYPES for t in given]):
                return None
            if len(self.by_key) >= self.most:
                self.forget()
            kind = self.by_key[key] = Kind(given)
        self.last[summary] = kind
        return kind

    def forget(self) -> None:
        self.by_key.clear()
        self.last.clear()
