"""The tensors that stand alongside logits, checked and in the form that launchers take."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.in_place import check_not_overwritten
from vocab_parallel_ce.layout import VECTOR_BYTES, compute_dtype, constant, flat, shares_storage
from vocab_parallel_ce.options import Settings, shard_of_rank
from vocab_parallel_ce.shard import LOGITS, VocabShard
from vocab_parallel_ce.spec import INF, NAN, LossOptions, count_labels


def checked_divisor(num_items: float | Tensor, reduction: str, logits: Tensor) -> Tensor:
    """Return checked ``num_items`` as kernels take it: ``[1]`` on the device of ``logits``."""
    checks.check_num_items(num_items, reduction, logits)
    if isinstance(num_items, Tensor) and num_items.device == logits.device:
        return constant(num_items.detach().reshape(1), logits)
    return logits.new_full((1,), float(num_items), dtype=compute_dtype(logits.dtype))


def rows_of_mean(labels: Tensor | None, logits: Tensor, settings: Settings) -> Tensor:
    """Return ``[1]``, the rows of a mean: all without labels, otherwise those that are not ignored."""
    if labels is None:
        return logits.new_full((1,), logits.shape[:-1].numel(), dtype=torch.int64)
    return count_labels(labels, settings.ignore_index).reshape(1)


def weights_of_columns(class_weight: Tensor, shard: VocabShard, logits: Tensor) -> Tensor:
    """Return checked class weights as kernels take them: of the arithmetic's dtype, of the shard's valid columns.

    ``logits`` or hidden states have its device. It is a view of the caller's if that has the dtype and a 16-byte
    boundary, and is a ``constant``.
    """
    checks.check_class_weight(class_weight)
    if class_weight.device != logits.device:
        raise ValueError(f"class_weight: device must be that of the logits, {logits.device}, got {class_weight.device}")
    shape, start, (whole, own) = tuple(class_weight.shape), 0, (shard.vocab_size, shard.n_columns)
    if shape == (whole,):
        start = shard.start
    elif shape != (own,):
        expected = f"({whole},)" if whole == own else f"({whole},), or ({own},) for this rank's columns"
        raise ValueError(f"class_weight: expected shape {expected}, got {shape}")
    columns = class_weight.detach()[start : start + shard.n_valid].to(compute_dtype(logits.dtype)).contiguous()
    return columns.clone() if columns.data_ptr() % VECTOR_BYTES else constant(columns, logits)


def with_padding(
    given: Any, settings: Settings, rank: int, n_ranks: int, subject: str = LOGITS
) -> tuple[Any, Settings]:
    """Return the arguments alongside logits or a weight of no columns, for the column of padding in their place.

    A rank without columns takes part in the collectives: as one that has padding alone.
    """
    for name in ("probs", "class_weight"):
        values = getattr(given, name, None)
        if isinstance(values, Tensor) and values.shape[-1:] == (0,):
            given = given._replace(**{name: F.pad(values, (0, 1))})
    size = shard_of_rank(settings, 0, rank, n_ranks, subject=subject).vocab_size
    return given, settings._replace(vocab_size=VocabShard(size, size + 1, size))


def temperature_of_rows(temperature: Tensor | None, labels: Tensor, logits: Tensor) -> Tensor | None:
    """Return a checked tensor temperature as kernels take it: contiguous ``[N]``, of the arithmetic's dtype.

    It is a view of the caller's if that is so already, and is a ``constant``. ``logits`` may be hidden states.
    """
    if temperature is None:
        return None
    checks.check_temperature(temperature, labels)
    values = flat(temperature.detach().to(compute_dtype(logits.dtype)))
    return constant(values.expand(labels.numel()).contiguous() if values.numel() == 1 else values, logits)


def check_beside(name: str, tensor: Tensor, logits: Tensor, settings: Settings) -> None:
    """Check a tensor that has numbers alongside each row of logits; it gets no gradient, and is never written."""
    check_no_gradient(name, tensor)
    needs_gradient = torch.is_grad_enabled() and logits.requires_grad
    if needs_gradient:
        check_can_be_saved(name, tensor)
    if tensor.device != logits.device:
        raise ValueError(f"{name}: device must be that of the logits, {logits.device}, got {tensor.device}")
    in_place = settings.gradient in ("in_backward", "in_forward")
    if in_place and needs_gradient and shares_storage(logits, tensor):
        raise ValueError(f"{name}: expected memory of its own, got the logits'; use gradient='out_of_place'")


def check_can_be_saved(name: str, tensor: Tensor) -> None:
    """Check that autograd can save a tensor for backward."""
    if tensor.is_inference():
        raise ValueError(f"{name}: expected no tensor made in torch.inference_mode(), got one; pass its clone()")


def check_labels_beside(labels: Tensor | None, logits: Tensor) -> None:
    """Check the labels, if there are any, of a loss that needs none."""
    if labels is not None:
        checks.check_labels(labels, logits)
        checks.check_rows(labels, logits)


def check_requires_no_gradient(**tensors: Tensor | None) -> None:
    """Check tensors, by their names, that get no gradient."""
    for name, tensor in tensors.items():
        if tensor is not None and torch.is_grad_enabled() and tensor.requires_grad:
            raise TypeError(
                f"{name}: expected a tensor that requires no gradient, got one that does; pass its detach()"
            )


def check_no_gradient(name: str, tensor: Tensor) -> None:
    """Check that a tensor requires no gradient, that no transform sees it, and that it holds none of another call."""
    checks.check_no_transforms(tensor)
    check_requires_no_gradient(**{name: tensor})
    check_not_overwritten(tensor, name)


def check_teacher(name: str, teacher: Any, subject: str, student: Tensor) -> None:
    """Check that the teacher has a row per row of the student."""
    checks.check_tensor(name, teacher)
    checks.check_dense(name, teacher, checks.LOGITS_DTYPES)
    if teacher.shape[:-1] != student.shape[:-1] or teacher.dim() == 0:
        expected = f"that of {subject} up to the last dimension, {tuple(student.shape)}"
        raise ValueError(f"{name}: shape must be {expected}, got {tuple(teacher.shape)}")


def check_teacher_head(hidden: Any, weight: Any, bias: Any, student: Tensor) -> None:
    """Check the tensors of a teacher's head alongside hidden states of the student."""
    tensors: dict[str, Any] = {"teacher.hidden": hidden, "teacher.weight": weight, "teacher.bias": bias}
    for name, tensor in tensors.items():
        if name == "teacher.bias" and tensor is None:
            continue
        checks.check_tensor(name, tensor)
        checks.check_parameter(name, tensor)
        check_no_gradient(name, tensor)
        if tensor.device != student.device or tensor.dtype != hidden.dtype:
            expected = f"{hidden.dtype} on {student.device} (autocast leaves the teacher as it is)"
            raise ValueError(f"{name}: expected {expected}, got {tensor.dtype} on {tensor.device}; convert it")
    if hidden.shape[:-1] != student.shape[:-1] or hidden.dim() < 2:
        expected = f"that of student.hidden up to the last dimension, {tuple(student.shape)}"
        raise ValueError(f"teacher.hidden: shape must be {expected}, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"teacher.weight: expected shape [C', {hidden.shape[-1]}], got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"teacher.bias: expected shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")


def check_columns(
    n_columns: int, shard: VocabShard, settings: Settings, rank: int, n_ranks: int, *, subject: str
) -> None:
    """Check that a teacher with ``n_columns``, which ``subject`` has, has the student's columns, except padding."""
    if n_columns == shard.n_columns:
        return
    if settings.vocab_size is None:
        raise ValueError(
            f"{subject} must be the student's, {shard.n_columns}, if vocab_size does not say what is padding, "
            f"got {n_columns}"
        )
    if isinstance(settings.vocab_size, VocabShard):
        own = VocabShard(shard.start, shard.start + n_columns, shard.vocab_size)
    else:
        own = VocabShard.of_rank(shard.vocab_size, rank, n_ranks, n_columns, subject=subject)
    if own.n_valid != shard.n_valid or (own.n_valid and own.start != shard.start):
        columns = [f"[{each.start}, {each.start + each.n_valid})" for each in (shard, own)]
        raise ValueError(f"{subject} must give the student's columns {columns[0]}, got {columns[1]}")


def at_rows(options: LossOptions, temperature: Tensor | None, threshold: Tensor | None = None) -> LossOptions:
    """Return the options of rows whose z is divided by ``temperature [N]``; NaN where it is not positive and finite.

    Logits below ``threshold [N]`` are excluded.
    """
    if threshold is not None:
        options = options._replace(threshold=threshold.unsqueeze(-1))
    if temperature is None:
        return options
    inverse = 1 / temperature
    known = torch.where((inverse > 0) & (inverse < INF), temperature, NAN)
    return options._replace(temperature=known.unsqueeze(-1))
