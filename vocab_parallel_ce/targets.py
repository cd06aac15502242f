"""Targets: the tensors that stand alongside logits. A role says which axes a tensor has; the rest follows.

A loss declares its targets as a NamedTuple whose fields are ``Annotated`` with a role: :class:`RowIds`,
:class:`RowNumbers`, :class:`Columns`, or :class:`Grid`; of another head, :class:`HeadStates` or :class:`HeadRows`. From
it follow what is checked, what launchers take, how the rows of a head are ordered and cut into chunks, what
``torch.compile`` is told, and what ranks compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.in_place import check_not_overwritten
from vocab_parallel_ce.layout import VECTOR_BYTES, compute_dtype, constant, cut, flat, savable, shares_storage, walkable
from vocab_parallel_ce.options import Settings, shard_of_rank
from vocab_parallel_ce.shard import LOGITS, VocabShard
from vocab_parallel_ce.spec import INF, NAN, LossOptions

Record = TypeVar("Record", bound=Any)  # a NamedTuple of targets


class Tokens(NamedTuple):
    """What targets stand alongside."""

    tensor: Tensor  # logits [..., C] or hidden states [..., D]
    subject: str  # the caller's name of it
    shape: tuple[int, ...]  # of the tokens, with sequence parallelism of all ranks' tokens


class Head(NamedTuple):
    """What makes the logits ``hidden @ weight.T + bias`` of a shard.

    Example:
        >>> from vocab_parallel_ce import Head
        >>> teacher = Head(hidden=torch.ones(2, 3), weight=torch.zeros(4, 3))
        >>> teacher.bias is None
        True
    """

    hidden: Tensor  #: [..., D] bf16, fp16 or fp32, the same on every rank
    weight: Tensor  #: [C, D], this rank's rows; may be a DTensor, except a teacher's
    bias: Tensor | None = None  #: [C]


class Role:
    """Which axes a target has: rows, columns, or both. ``name`` is the caller's, if the field has another."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        """Raise unless a target of the caller's fits the tokens and the settings.

        By its shape, dtype, device and layout alone: it is not asked again for another call that is alike.
        """
        raise NotImplementedError

    def check_memory(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        """Raise unless the memory of a target can be read where it lies, in backward too."""

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        """Return the checked target as launchers take it: flat rows, this rank's columns."""
        raise NotImplementedError

    def is_prepared(self, target: Tensor, settings: Settings) -> bool:
        """Return whether :meth:`prepare` returns the target itself, in all calls of its shape and layout.

        Never that of a target whose memory is checked.
        """
        return False

    def in_order(self, target: Tensor, order: Any, settings: Settings) -> Tensor:
        """Return a prepared target in the order of a head's rows, a ``TokenOrder``."""
        return target

    def at(self, target: Tensor, rows: slice) -> Tensor:
        """Return what some rows need of a prepared target."""
        return target


class RowIds(Role):
    """``[...]``, an id of each row."""

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        checks.check_labels(target, tokens.tensor, tokens.subject)
        if target.shape != tokens.shape:
            remedy = f"; {checks.NOT_ONE_HOT}" if target.dim() == len(tokens.shape) + 1 else ""
            is_of_logits = tokens.subject != "hidden" and target.dim() > 1
            if is_of_logits and target.shape == tokens.tensor.shape[:1] + tokens.tensor.shape[2:]:
                remedy = f"; the vocabulary is the last dimension: pass {tokens.subject}.movedim(1, -1)"
            elif 0 < target.numel() == math.prod(tokens.shape) and 1 in (target.dim(), len(tokens.shape)):
                remedy = f"; if they are in the order of the tokens, pass {name}.reshape({[*tokens.shape]})"
            expected = f"that of {tokens.subject} without the last dimension, {tuple(tokens.shape)}"
            if tokens.shape != tokens.tensor.shape[:-1]:  # sequence parallelism
                expected = f"that of all ranks' tokens, {tuple(tokens.shape)}"
            raise ValueError(f"{name}: shape must be {expected}, got {tuple(target.shape)}{remedy}")

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        if checks.looks_at(target, settings.check_labels):
            checks.check_label_range(target, plan.shard.vocab_size, settings.ignore_index)
        return savable(flat(target))

    def is_prepared(self, target: Tensor, settings: Settings) -> bool:
        can_be_saved = target.is_contiguous() and not target.is_inference() and not target.is_neg()
        return target.dim() == 1 and can_be_saved and not checks.may_look_at(target, settings.check_labels)

    def in_order(self, target: Tensor, order: Any, settings: Settings) -> Any:
        return order.to_rows(target.long(), int(settings.ignore_index))

    def at(self, target: Tensor, rows: slice) -> Tensor:
        return cut(target, rows)


class RowNumbers(Role):
    """``[...]``, a floating-point number of each row, or one of all. Rows that no token has get ``fill``."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        checks.check_floating(name, target, tokens.tensor, tokens.subject)
        if target.numel() != 1 and target.shape != tokens.shape:
            expected = f"1 element, or the shape of the labels, {tuple(tokens.shape)}"
            raise ValueError(f"{name}: expected {expected}, got shape {tuple(target.shape)}")

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        values = flat(target.detach().to(compute_dtype(tokens.tensor.dtype)))
        if values.numel() == 1:
            values = values.expand(torch.Size(tokens.shape).numel()).contiguous()
        return constant(values, tokens.tensor)

    def in_order(self, target: Tensor, order: Any, settings: Settings) -> Any:
        return order.to_rows(target, self.fill)

    def at(self, target: Tensor, rows: slice) -> Tensor:
        return cut(target, rows)


class Columns(Role):
    """``[V]``, a floating-point number of each column, or ``[C]`` of this rank's."""

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        checks.check_floating(name, target, tokens.tensor, tokens.subject)

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        """Return ``[n]`` of the valid columns, of the arithmetic's dtype, at a boundary of 16 bytes."""
        shard: VocabShard = plan.shard
        shape, start, (whole, width) = tuple(target.shape), 0, (shard.vocab_size, shard.n_columns)
        if shape == (whole,):
            start = shard.start
        elif shape != (width,):
            expected = f"({whole},)" if whole == width else f"({whole},), or ({width},) for this rank's columns"
            raise ValueError(f"{name}: expected shape {expected}, got {shape}")
        dtype = compute_dtype(tokens.tensor.dtype)
        columns = target.detach()[start : start + shard.n_valid].to(dtype).contiguous().resolve_neg()
        return columns.clone() if columns.data_ptr() % VECTOR_BYTES else constant(columns, tokens.tensor)


class Grid(Role):
    """``[..., C]``, a number of each row and column, which is read where it lies.

    ``same_columns``: of exactly the columns of the logits, or of the same except padding.
    """

    def __init__(self, name: str, *, same_columns: bool) -> None:
        super().__init__(name)
        self.same_columns = same_columns

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        logits, subject = tokens.tensor, tokens.subject
        checks.check_tensor(name, target)
        checks.check_dense(name, target, checks.LOGITS_DTYPES)
        if self.same_columns and target.shape != logits.shape:
            expected, got = f"that of {subject}, {tuple(logits.shape)}", tuple(target.shape)
            raise ValueError(f"{name}: shape of probabilities must be {expected}, got {got}; ids are int64 or int32")
        check_leading(name, target, tokens)
        checks.check_device(name, target, logits, subject)

    def check_memory(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        check_alongside(name, target, tokens, settings)

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        check_columns(target.shape[-1], settings, plan, subject=f"{name}: last dimension")
        return walkable(with_a_column(target.detach(), dim=-1))

    def at(self, target: Tensor, rows: slice) -> Tensor:
        return cut(target, rows)


class HeadRows(Role):
    """``[C, ...]``, the weight or the bias of another head."""

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        checks.check_tensor(name, target)
        checks.check_parameter(name, target)
        checks.check_device(name, target, tokens.tensor, tokens.subject)

    def check_memory(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        check_not_overwritten(target, name)

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        check_columns(target.shape[0], settings, plan, subject=f"{name}: rows")
        return with_a_column(target.detach().resolve_neg(), dim=0)


class HeadStates(HeadRows):
    """``[..., D]``, hidden states of another head, in the order of the tokens."""

    def check(self, name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
        super().check(name, target, tokens, settings)
        check_leading(name, target, tokens)

    def prepare(self, name: str, target: Tensor, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
        return target.detach().resolve_neg().reshape(-1, target.shape[-1])


# What follows from the roles of a record. None stands for a target that was not passed.


# Of a kind of targets: of each field its name, the caller's name, its role, and whether it may be None.
ROLES: dict[Any, tuple[tuple[str, str, Role, bool], ...]] = {}


def register(kind: Any) -> None:
    """Find the roles of a NamedTuple of targets."""
    roles = []
    for field, hint in get_type_hints(kind, include_extras=True).items():
        role = next(each for each in get_args(hint) if isinstance(each, Role))
        roles.append((field, role.name or field, role, field in kind._field_defaults))
    ROLES[kind] = tuple(roles)


def present(targets: Any) -> Iterator[tuple[str, Tensor, Role]]:
    """Yield the caller's name, the tensor and the role of each target that was passed."""
    for (_, name, role, _), target in zip(ROLES[type(targets)], targets, strict=True):
        if target is not None:
            yield name, target, role


def check(targets: Any, tokens: Tokens, settings: Settings) -> None:
    """Raise unless the caller's targets fit the tokens and the settings, and require no gradient."""
    for (_, name, role, is_optional), target in zip(ROLES[type(targets)], targets, strict=True):
        if target is not None or not is_optional:
            role.check(name, target, tokens, settings)
            if target.requires_grad:
                checks.check_requires_no_gradient(name, target)


def check_memory(targets: Any, tokens: Tokens, settings: Settings) -> None:
    """Raise unless the memory of checked targets can be read where it lies."""
    for name, target, role in present(targets):
        role.check_memory(name, target, tokens, settings)


def are_prepared(targets: Any, settings: Settings) -> bool:
    """Return whether :func:`prepare` returns the caller's targets themselves."""
    return all(role.is_prepared(target, settings) for _, target, role in present(targets))


def prepare(targets: Record, tokens: Tokens, settings: Settings, plan: Any) -> Record:
    """Return checked targets as launchers take them."""
    zipped = zip(ROLES[type(targets)], targets, strict=True)
    values = [t if t is None else role.prepare(name, t, tokens, settings, plan) for (_, name, role, _), t in zipped]
    return type(targets)(*values)


def in_order(targets: Record, order: Any, settings: Settings) -> Record:
    """Return prepared targets in the order of a head's rows, a ``TokenOrder``."""
    zipped = zip(ROLES[type(targets)], targets, strict=True)
    return type(targets)(*[t if t is None else role.in_order(t, order, settings) for (_, _, role, _), t in zipped])


def at(targets: Record, rows: slice) -> Record:
    """Return the targets of some rows of a head."""
    zipped = zip(ROLES[type(targets)], targets, strict=True)
    return type(targets)(*[t if t is None else role.at(t, rows) for (_, _, role, _), t in zipped])


def at_columns(targets: Record, columns: slice) -> Record:
    """Return the targets of some columns of this rank, as launchers take them."""
    cut = {}
    for field, _, role, _ in ROLES[type(targets)]:
        target = getattr(targets, field)
        if target is not None and isinstance(role, Columns | Grid):
            cut[field] = target[..., columns]
    return targets._replace(**cut)


def with_padding(
    targets: Record, settings: Settings, rank: int, n_ranks: int, subject: str = LOGITS
) -> tuple[Record, Settings]:
    """Replace an empty shard by one padded column: return its targets and settings.

    So a rank without columns takes part in the collectives.
    """
    for field, _, role, _ in ROLES[type(targets)]:
        target = getattr(targets, field)
        if isinstance(target, Tensor) and isinstance(role, Columns | Grid):
            targets = targets._replace(**{field: with_a_column(target, dim=-1)})
    size = shard_of_rank(settings, 0, rank, n_ranks, subject=subject).vocab_size
    return targets, settings._replace(vocab_size=VocabShard(size, size + 1, size))


def with_a_column(tensor: Tensor, dim: int) -> Tensor:
    """Return ``tensor``, with zeros where its dimension ``dim`` is empty."""
    if tensor.dim() == 0 or tensor.shape[dim]:
        return tensor
    # Not new_zeros: whether the caller's tensor requires a gradient is checked later.
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim % tensor.dim()) + (0, 1))


# Checks.


def check_leading(name: str, target: Tensor, tokens: Tokens) -> None:
    """Check that all but the last dimension of a target are those of the tokens."""
    if target.shape[:-1] != tokens.shape:
        expected = f"that of {tokens.subject} up to the last dimension, {tuple(tokens.tensor.shape)}"
        raise ValueError(f"{name}: shape must be {expected}, got {tuple(target.shape)}")


def check_alongside(name: str, target: Tensor, tokens: Tokens, settings: Settings) -> None:
    """Check the memory of a tensor that is read alongside each logit, in backward too, and is never written."""
    check_not_overwritten(target, name)
    if not (torch.is_grad_enabled() and tokens.tensor.requires_grad):
        return
    check_can_be_saved(name, target)
    if settings.gradient in ("in_backward", "in_forward") and shares_storage(tokens.tensor, target):
        raise ValueError(f"{name}: expected memory of its own, got the logits'; use gradient='out_of_place'")


def check_can_be_saved(name: str, tensor: Tensor) -> None:
    """Check that autograd can save a tensor for backward."""
    if tensor.is_inference():
        raise ValueError(f"{name}: expected no tensor made in torch.inference_mode(), got one; pass its clone()")


def check_columns(n_columns: int, settings: Settings, plan: Any, *, subject: str) -> None:
    """Check that ``subject``, which has ``n_columns``, has the columns of the plan's shard, except padding."""
    shard: VocabShard = plan.shard
    if n_columns == shard.n_columns:
        return
    if settings.vocab_size is None:
        raise ValueError(
            f"{subject} must be the student's, {shard.n_columns}, without vocab_size, got {n_columns}; pass it if the "
            "rest is padding"
        )
    if isinstance(settings.vocab_size, VocabShard):
        other = VocabShard(shard.start, shard.start + n_columns, shard.vocab_size)
    else:
        other = VocabShard.for_rank(shard.vocab_size, plan.rank, plan.n_ranks, n_columns, subject=subject)
    if other.n_valid != shard.n_valid or (other.n_valid and other.start != shard.start):
        columns = [f"[{each.start}, {each.start + each.n_valid})" for each in (shard, other)]
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
