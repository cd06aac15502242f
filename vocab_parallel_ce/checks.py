"""Validation of the public contract: every message is the subject, what was expected, what was got."""

from __future__ import annotations

from numbers import Integral, Real

import torch
from torch import Tensor

LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LABEL_DTYPES = (torch.int64, torch.int32)
REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("auto", "in_forward", "in_backward", "out_of_place")


def check_logits(logits: object) -> None:
    """A plain tensor ``[..., C]`` of a supported dtype, with a row dimension and a column."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits: expected a torch.Tensor, got {type(logits).__name__}")
    if hasattr(logits, "placements"):
        raise TypeError(
            "logits: expected this rank's shard as a plain torch.Tensor, got a "
            f"{type(logits).__name__} of global shape {_shape(logits)}; pass its to_local()"
        )
    if logits.layout != torch.strided:
        raise TypeError(f"logits: expected a dense tensor, got layout {logits.layout}")
    if logits.dtype not in LOGITS_DTYPES:
        raise TypeError(f"logits: dtype must be {_names(LOGITS_DTYPES)}, got {logits.dtype}")
    if logits.dim() < 2:
        raise ValueError(f"logits: expected shape [..., C] with rows, got {_shape(logits)}")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits: last dimension must have columns, got {_shape(logits)}")


def check_labels(labels: object, logits: Tensor) -> None:
    """Integer ids, one for each row of ``logits``, on its device."""
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: expected a torch.Tensor, got {type(labels).__name__}")
    if labels.dtype not in LABEL_DTYPES:
        raise TypeError(f"labels: dtype must be {_names(LABEL_DTYPES)}, got {labels.dtype}")
    if labels.shape != logits.shape[:-1]:
        raise ValueError(
            "labels: shape must be that of logits without the last dimension, "
            f"{_shape(logits)[:-1]}, got {_shape(labels)}"
        )
    if labels.device != logits.device:
        raise ValueError(f"labels: device must be that of logits, {logits.device}, got {labels.device}")


def check_label_smoothing(label_smoothing: object) -> None:
    if isinstance(label_smoothing, bool) or not isinstance(label_smoothing, Real):
        raise TypeError(f"label_smoothing: expected a number, got {type(label_smoothing).__name__}")
    if not 0 <= float(label_smoothing) <= 1:
        raise ValueError(f"label_smoothing: must be in [0, 1], got {label_smoothing}")


def check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{name}: must fit in int64, got {value}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_vocab_size(vocab_size: int, n_columns: int, n_ranks: int) -> None:
    """The shards together are the vocabulary: catches whole logits passed with a group."""
    check_integer("vocab_size", vocab_size)
    if vocab_size != n_columns * n_ranks:
        raise ValueError(
            f"logits: last dimension times the ranks of the group must be vocab_size {vocab_size}, "
            f"got {n_columns} * {n_ranks} = {n_columns * n_ranks}"
        )


def check_label_range(labels: Tensor, vocab_size: int, ignore_index: int) -> None:
    """Raise ValueError for the first label outside ``[0, vocab_size)``. Waits for the device."""
    outside = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    count = int(outside.sum())
    if count:
        position = tuple(outside.nonzero()[0].tolist())
        raise ValueError(
            f"labels: must be in [0, {vocab_size}) or ignore_index {ignore_index}, got {count} "
            f"outside, the first at position {position}: {int(labels[position])}"
        )


def check_grad_output(grad_output: object, grad_logits: Tensor) -> None:
    """A floating-point factor: one for all rows of ``grad_logits [..., C]``, or one for each."""
    if not isinstance(grad_output, Tensor):
        raise TypeError(f"grad_output: expected a torch.Tensor, got {type(grad_output).__name__}")
    if not grad_output.is_floating_point():
        raise TypeError(f"grad_output: dtype must be floating point, got {grad_output.dtype}")
    rows = grad_logits.shape[:-1]
    if grad_output.numel() != 1 and grad_output.shape not in (rows, (rows.numel(),)):
        raise ValueError(
            f"grad_output: expected 1 element or one for each row, {tuple(rows)}, got shape "
            f"{_shape(grad_output)}"
        )
    if grad_output.device != grad_logits.device:
        raise ValueError(
            f"grad_output: device must be that of _input, {grad_logits.device}, got {grad_output.device}"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    *names, last = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"{', '.join(names)} or {last}"
