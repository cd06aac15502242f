"""Targets: the tensors that stand alongside logits. A role says what a tensor holds; the rest follows.

A loss declares its targets as a NamedTuple whose fields are ``Annotated`` with a :class:`Role`. From these follow what
is checked, what launchers take, how the rows of a head are ordered and cut into chunks, what ``torch.compile`` is told,
and what ranks compare.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.in_place import check_not_overwritten
from vocab_parallel_ce.layout import VECTOR_BYTES, compute_dtype, constant, cut, flat, shares_storage, walkable
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


class Teacher(NamedTuple):
    """A teacher's head, and the divergence of the student's distribution from the teacher's.

    Example:
        >>> from vocab_parallel_ce import Teacher
        >>> teacher = Teacher(hidden=torch.ones(2, 3), weight=torch.zeros(4, 3), divergence="reverse")
        >>> teacher.temperature
        1.0
    """

    hidden: Tensor  #: [..., D'] bf16, fp16 or fp32 of any width, the same on every rank; of all ranks' tokens
    weight: Tensor  #: [C, D'], this rank's rows; may be a DTensor
    bias: Tensor | None = None  #: [C]
    softcap: float | None = None  #: of the teacher's logits
    logit_scale: float = 1.0  #: of the teacher's logits
    temperature: float = 1.0  #: divides the logits of both, after softcap and scale
    divergence: str = "forward"  #: "forward", "reverse" or "js", as in :func:`distillation_loss`
    beta: float = 0.5  #: of "js"


class Role(NamedTuple):
    """What a target holds, and along which axes: the facts by which the functions below treat it.

    ``kind`` is ``"ids"``, integers; ``"numbers"`` of any floating-point dtype, which become that of the arithmetic;
    ``"logits"``, read in their own dtype; or ``"head"``, a tensor of another head. ``axes`` are in the order of the
    shape. Rows are put in the order of a head's, tokens stay in their own.
    """

    kind: Literal["ids", "numbers", "logits", "head"]
    axes: tuple[Literal["rows", "tokens", "columns", "features", "k"], ...]
    name: str = ""  # the caller's, if the field has another
    fill: float | None = None  # of numbers in rows that no token has; None, as of ids: ignore_index
    checks_memory: bool = False  # whether each call checks that its memory can be read where it lies


# Of each kind but ids, as `checks.expect` takes them; `check_parameter` knows those of a head.
DTYPES = {"numbers": (), "logits": checks.LOGITS_DTYPES, "head": None}

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
    """Yield the caller's name, the tensor and the role of each target that was passed; the others are None."""
    for (_, name, role, _), target in zip(ROLES[type(targets)], targets, strict=True):
        if target is not None:
            yield name, target, role


# Checks.


def check(targets: Any, tokens: Tokens) -> None:
    """Raise unless the caller's targets fit the tokens, and require no gradient.

    By dtypes, devices, shapes and layouts alone: it is not asked again for another call that is alike.
    """
    for (_, name, role, is_optional), target in zip(ROLES[type(targets)], targets, strict=True):
        if target is not None or not is_optional:
            check_target(name, target, role, tokens)
            if target.requires_grad:
                checks.check_requires_no_gradient(name, target)


def check_target(name: str, target: Tensor, role: Role, tokens: Tokens) -> None:
    """Raise unless a target of the caller's fits the tokens; its columns depend on the shard."""
    if role.kind == "ids":
        checks.check_labels(target, tokens.tensor, tokens.subject, name)
    else:
        checks.expect(name, target, DTYPES[role.kind], on=tokens.tensor, subject=tokens.subject)
    if role.kind == "head":
        checks.check_parameter(name, target)
    shape, of_tokens = tuple(target.shape), tuple(tokens.shape)
    if role.kind == "ids" and role.axes == ("rows",):
        check_shape_of_labels(name, target, tokens)
    elif role.axes == ("rows",):
        if shape != of_tokens and target.numel() != 1:
            raise ValueError(f"{name}: expected 1 element, or the shape of the labels, {of_tokens}, got shape {shape}")
    elif role.axes == ("rows", "k"):
        if shape[:-1] != of_tokens or not shape or shape[-1] == 0:
            one = "id" if role.kind == "ids" else "number"
            expected = f"[{', '.join(map(str, (*of_tokens, 'k')))}] with at least one {one} per token"
            remedy = f"; for one id pass {name}.unsqueeze(-1)" if shape == of_tokens else ""
            raise ValueError(f"{name}: shape must be {expected}, got {shape}{remedy}")
    elif role.axes[0] != "columns" and shape[:-1] != of_tokens:
        whose = tokens.subject if of_tokens == tokens.tensor.shape[:-1] else "all ranks' tokens"  # sequence parallelism
        expected = f"that of {whose} up to the last dimension, {of_tokens}"
        raise ValueError(f"{name}: shape must be {expected}, got {shape}")


def check_shape_of_labels(name: str, target: Tensor, tokens: Tokens) -> None:
    """Raise unless there is a label of each token; say how to make labels of some other shapes fit."""
    if target.shape == tokens.shape:
        return
    remedy = f"; {checks.NOT_ONE_HOT}" if target.dim() == len(tokens.shape) + 1 else ""
    is_of_logits = tokens.subject != "hidden" and target.dim() > 1
    if is_of_logits and target.shape == tokens.tensor.shape[:1] + tokens.tensor.shape[2:]:
        remedy = f"; the vocabulary is the last dimension: pass {tokens.subject}.movedim(1, -1)"
    elif 0 < target.numel() == math.prod(tokens.shape) and 1 in (target.dim(), len(tokens.shape)):
        remedy = f"; if they are in the order of the tokens, pass {name}.reshape({[*tokens.shape]})"
    elif tokens.subject == "hidden" and not remedy:
        remedy = "; hidden [..., D] is the first argument, weight [C, D] the second"
    expected = f"that of {tokens.subject} without the last dimension, {tuple(tokens.shape)}"
    if tokens.shape != tokens.tensor.shape[:-1]:  # sequence parallelism
        expected = f"that of all ranks' tokens, {tuple(tokens.shape)}"
    raise ValueError(f"{name}: shape must be {expected}, got {tuple(target.shape)}{remedy}")


def check_memory(targets: Any, tokens: Tokens, settings: Settings) -> None:
    """Raise unless the memory of checked targets can be read where it lies, in backward too; it is never written."""
    is_saved = torch.is_grad_enabled() and tokens.tensor.requires_grad
    for name, target, role in present(targets):
        if not role.checks_memory:
            continue
        check_not_overwritten(target, name)
        if is_saved and role.kind != "head":  # a head's is checked where backward reads it
            check_can_be_saved(name, target)
            if settings.gradient in ("in_backward", "in_forward") and shares_storage(tokens.tensor, target):
                raise ValueError(f"{name}: expected memory of its own, got the logits'; use gradient='out_of_place'")


def check_can_be_saved(name: str, tensor: Tensor) -> None:
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


# What launchers take.


def are_prepared(targets: Any, settings: Settings) -> bool:
    """Return whether :func:`prepare` returns the caller's targets themselves, in all calls of their kind.

    Never if memory is checked: of all targets only ids need nothing.
    """
    return all(role.kind == "ids" and _is_ready(ids, len(role.axes), settings) for _, ids, role in present(targets))


def _is_ready(ids: Tensor, n_axes: int, settings: Settings) -> bool:
    can_be_saved = ids.is_contiguous() and not ids.is_inference() and not ids.is_neg()
    return ids.dim() == n_axes and can_be_saved and not checks.may_look_at(ids, settings.check_labels)


def prepare(targets: Record, tokens: Tokens, settings: Settings, plan: Any) -> Record:
    """Return checked targets as launchers take them: flat rows, this rank's columns."""
    zipped = zip(ROLES[type(targets)], targets, strict=True)
    values = [t if t is None else prepared(name, t, role, tokens, settings, plan) for (_, name, role, _), t in zipped]
    return type(targets)(*values)


def prepared(name: str, target: Tensor, role: Role, tokens: Tokens, settings: Settings, plan: Any) -> Tensor:
    """Return a checked target as launchers take it."""
    if role.kind == "ids":
        if checks.looks_at(target, settings.check_labels):
            checks.check_label_range(target, plan.shard.vocab_size, fill_of(role, settings), name=name)
        ids = flat(target, len(role.axes))
        return ids.clone() if ids.is_inference() and torch.is_grad_enabled() else ids  # autograd cannot save it
    if role.kind == "numbers" and "columns" in role.axes:
        return _columns(name, target, tokens, plan.shard)
    if role.kind == "numbers":
        values = flat(target.detach().to(compute_dtype(tokens.tensor.dtype)), len(role.axes))
        if values.shape == (1,):  # one of all rows
            values = values.expand(math.prod(tokens.shape)).contiguous()
        return constant(values, tokens.tensor)
    if role.kind == "logits":
        check_columns(target.shape[-1], settings, plan, subject=f"{name}: last dimension")
        return walkable(with_a_column(target.detach(), dim=-1))
    target = target.detach().resolve_neg()
    if "tokens" in role.axes:
        return target.reshape(-1, target.shape[-1])
    check_columns(target.shape[0], settings, plan, subject=f"{name}: rows")
    return with_a_column(target, dim=0)


def _columns(name: str, target: Tensor, tokens: Tokens, shard: VocabShard) -> Tensor:
    """Return ``[n]`` of the valid columns, of the arithmetic's dtype, at a boundary of 16 bytes.

    Of numbers ``[V]`` of all columns, or ``[C]`` of this rank's.
    """
    shape, start, (whole, width) = tuple(target.shape), 0, (shard.vocab_size, shard.n_columns)
    if shape == (whole,):
        start = shard.start
    elif shape != (width,):
        expected = f"({whole},)" if whole == width else f"({whole},), or ({width},) for this rank's columns"
        raise ValueError(f"{name}: expected shape {expected}, got {shape}")
    dtype = compute_dtype(tokens.tensor.dtype)
    columns = target.detach()[start : start + shard.n_valid].to(dtype).contiguous().resolve_neg()
    return columns.clone() if columns.data_ptr() % VECTOR_BYTES else constant(columns, tokens.tensor)


def fill_of(role: Role, settings: Settings) -> Any:
    """Return what stands for no id, and for rows that no token has."""
    return int(settings.ignore_index) if role.fill is None else role.fill


def in_order(targets: Record, order: Any, settings: Settings) -> Record:
    """Return prepared targets in the order of a head's rows, a ``TokenOrder``."""
    ordered = {}
    for field, target, role in _along("rows", targets):
        values = target.long() if role.kind == "ids" else target  # a fill may not fit in the caller's dtype
        ordered[field] = order.to_rows(values, fill_of(role, settings))
    return targets._replace(**ordered)


def at(targets: Record, rows: slice) -> Record:
    """Return the targets of some rows of a head."""
    zipped = zip(ROLES[type(targets)], targets, strict=True)
    values = [t if t is None or "rows" not in role.axes else cut(t, rows) for (_, _, role, _), t in zipped]
    return type(targets)(*values)


def at_columns(targets: Record, columns: slice) -> Record:
    """Return the targets of some columns of this rank, as launchers take them."""
    return targets._replace(**{field: target[..., columns] for field, target, _ in _along("columns", targets)})


def with_padding(
    targets: Record, settings: Settings, rank: int, n_ranks: int, subject: str = LOGITS
) -> tuple[Record, Settings]:
    """Replace an empty shard by one padded column: return its targets and settings.

    So a rank without columns takes part in the collectives.
    """
    padded = {field: with_a_column(target, dim=-1) for field, target, _ in _along("columns", targets)}
    size = shard_of_rank(settings, 0, rank, n_ranks, subject=subject).vocab_size
    return targets._replace(**padded), settings._replace(vocab_size=VocabShard(size, size + 1, size))


def _along(axis: str, targets: Any) -> Iterator[tuple[str, Tensor, Role]]:
    """Yield the field, the tensor and the role of each target with ``axis``, except those of another head."""
    for field, _, role, _ in ROLES[type(targets)]:
        target = getattr(targets, field)
        if isinstance(target, Tensor) and axis in role.axes and role.kind != "head":
            yield field, target, role


def with_a_column(tensor: Tensor, dim: int) -> Tensor:
    """Return ``tensor``, with zeros where its dimension ``dim`` is empty."""
    if tensor.dim() == 0 or tensor.shape[dim]:
        return tensor
    # Not new_zeros: whether the caller's tensor requires a gradient is checked later.
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1 - dim % tensor.dim()) + (0, 1))


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
