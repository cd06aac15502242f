"""Arguments in, a checked :class:`Call` out: what runs, on which shard, with which options.

The part that training repeats at every step, the :class:`Plan`, is made once and cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.in_place import OVERWRITTEN, check_not_overwritten
from vocab_parallel_ce.kinds import Kinds
from vocab_parallel_ce.layout import compute_dtype, constant
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.one_pass import begins_at_a_boundary, bind
from vocab_parallel_ce.options import Known, Settings, known, shard_of_rank
from vocab_parallel_ce.program import Programs, directly
from vocab_parallel_ce.selection import select
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import TokenOutputs
from vocab_parallel_ce.summed import check_summed
from vocab_parallel_ce.targets import Tokens, are_prepared, check, check_memory, prepare

# A private function: None in a PyTorch without it. Then "auto" overwrites nothing.
top_saved_tensor_hooks: Callable[[bool], object] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


IN_PLACE = ("in_forward", "in_backward")  # modes that overwrite the logits, whoever can see them


class Plan(NamedTuple):
    """What runs, except the tensors and the group."""

    loss: Loss
    launchers: Launchers
    rank: int
    n_ranks: int
    shard: VocabShard
    options: Any  # of the mathematics: hashable
    row_shape: tuple[int, ...]  # of a row's loss
    reduction: str
    gradient: str  # "auto" if backward decides
    dtype: torch.dtype  # of the arithmetic, the statistics and the loss
    other_outputs: dict[str, torch.dtype]  # fields of TokenOutputs alongside the loss that are asked for, in order
    constants: tuple[str, ...]  # of the other outputs: those without a gradient
    mean_over: str  # "rows" that are not ignored, or their labels' class "weights"; "" if it is no mean
    stored_rows: int  # the most whose outputs the launch of the statistics stores: of one rank's unreduced loss
    n_outputs: int  # fields of TokenOutputs that are returned: up to the last that is asked for
    launch: ModuleType | None  # of kernels; None: plain PyTorch runs
    is_prepared: bool = False  # whether targets need neither check_memory nor prepare
    # (key, function, tensors, *others): returns function(*others, *tensors), in later calls of one kind by a program.
    run: Callable[..., tuple[Any, ...]] = directly


class Call(NamedTuple):
    """One checked call."""

    plan: Plan
    group: Any
    divisor: Tensor | None  # [1], of the losses of a sum


class PlanKey(NamedTuple):
    """What a plan depends on besides the loss and its :class:`Settings`."""

    dtype: torch.dtype
    n_columns: int
    device: torch.device
    rank: int
    n_ranks: int
    gradient: str
    class_weight: bool = False  # whether there is one
    extras: tuple[str, ...] = ()  # what else calls with in_forward have or need that one_pass lacks


# Of calls over logits that were checked: a Call each, without group and divisor. Those of other shapes share what
# `_cached_plan` has made.
_kinds = Kinds()


def plan_call(
    loss: Loss, logits: Tensor, targets: Any, settings: Settings, group: Any, num_items: float | Tensor | None = None
) -> tuple[Call, Any]:
    """Check the arguments of a loss over logits, and return its call and the targets as launchers take them.

    What was checked is not checked again in a call that differs in values and memory alone. Changes nothing.
    """
    if checks.in_transform() or getattr(forward_ad, "_current_level", 0) >= 0:
        checks.check_no_transforms(logits, *targets, num_items)
    position = (0, 1) if group is None else group_position(group)
    in_memory: Any = None
    try:
        if settings.gradient == "auto":
            # Whether autograd sees every reader of the memory's owner. It does not for a leaf, or a view of one: the
            # memory belongs to a parameter, or to a tensor outside the graph (a DTensor's local one). Nor for a
            # subclass, which may wrap a tensor that somebody holds. Nor under saved-tensor hooks: autograd compares no
            # version of what went through them.
            owner = logits if logits._base is None else logits._base
            in_memory = type(owner) is Tensor and not owner.is_leaf
            in_memory = in_memory and top_saved_tensor_hooks is not None and not top_saved_tensor_hooks(True)
        elif settings.gradient == "in_forward":
            in_memory = begins_at_a_boundary(logits), is_view_in_graph(logits)
        of_settings = settings if type(settings) is Known else known(settings)
        facts = loss, of_settings, position, torch.is_grad_enabled(), in_memory
        kind = _kinds.find(facts, (logits, *targets))
    except (AttributeError, RuntimeError, TypeError):  # no tensor, no strides, or no hash: the checks name it
        kind = None
    call: Call | None = None if kind is None else kind.made
    if call is None:
        plan = checked_plan(loss, logits, targets, settings, position, in_memory is True)
        call = Call(plan, None, None)
        if kind is not None:
            is_flat = all(t is None or (t.is_contiguous() and not t.is_neg()) for t in (logits, *targets))
            kind.made = call = Call(plan_of_one_kind(plan), None, None) if is_flat else call
    plan = call.plan
    if getattr(logits.untyped_storage(), OVERWRITTEN, None) is not None:
        check_not_overwritten(logits)
    if plan.gradient in IN_PLACE:  # of each call: hooks come and go
        check_no_hooks(plan.gradient, logits)
    prepared = targets
    if not plan.is_prepared:
        tokens = Tokens(logits, "logits", logits.shape[:-1])
        check_memory(targets, tokens, settings)
        prepared = prepare(targets, tokens, settings, plan)
    if group is not None or num_items is not None:
        divisor = None if num_items is None else checked_divisor(num_items, settings.reduction, logits)
        call = Call(plan, group, divisor)
    if verify.pending.get() is not None:
        check_summed(logits)
        verify.compare_call({"logits": logits}, targets, plan.shard, comparable(settings, num_items))
    return call, prepared


def plan_of_one_kind(plan: Plan) -> Plan:
    """Return the plan for calls whose tensors are as the caller's are here, except in values and memory."""
    return plan if plan.launch is None else plan._replace(run=Programs(plan.launch).run)


def checked_plan(
    loss: Loss, logits: Tensor, targets: Any, settings: Settings, position: tuple[int, int], may_overwrite: bool
) -> Plan:
    """Check the arguments of a loss over logits, except their memory, and return the plan."""
    checks.check_logits(logits)
    tokens = Tokens(logits, "logits", logits.shape[:-1])
    check(targets, tokens)
    loss.check(targets, tokens, settings)
    plan = plan_of(loss, logits, targets, settings, *position, may_overwrite=may_overwrite)
    return plan._replace(is_prepared=are_prepared(targets, settings))


def checked_divisor(num_items: float | Tensor, reduction: str, tokens: Tensor) -> Tensor:
    """Return checked ``num_items`` as kernels take it: ``[1]`` on the device of ``tokens``."""
    checks.check_num_items(num_items, reduction, tokens)
    if isinstance(num_items, Tensor) and num_items.device == tokens.device:
        return constant(num_items.detach().resolve_neg().reshape(1), tokens)
    return tokens.new_full((1,), float(num_items), dtype=compute_dtype(tokens.dtype))


def has_weights(targets: Any) -> bool:
    return getattr(targets, "class_weight", None) is not None


def plan_of(
    loss: Loss,
    logits: Tensor,
    targets: Any,
    settings: Settings,
    rank: int,
    n_ranks: int,
    *,
    may_overwrite: bool = False,
) -> Plan:
    """Return the plan of a loss over checked ``logits``, which ``"auto"`` may overwrite or not."""
    mode = gradient_mode(settings.gradient, logits, may_overwrite)
    extras = () if mode != "in_forward" or begins_at_a_boundary(logits) else ("memory off a boundary of 16 bytes",)
    columns = logits.dtype, logits.shape[-1], checks.device_of_values(logits)
    return cached_plan(loss, settings, PlanKey(*columns, rank, n_ranks, mode, has_weights(targets), extras))


def cached_plan(loss: Loss, settings: Settings, key: PlanKey) -> Plan:
    """Return the plan of a loss, its settings and a key, checked and made once."""
    try:
        return _cached_plan(known(settings), loss, settings, key)
    except TypeError:  # refused, or cannot be hashed: make_plan says so by name
        pass
    return make_plan(loss, settings, key)


@functools.lru_cache(maxsize=1024)
def _cached_plan(known: object, loss: Loss, settings: Settings, key: PlanKey) -> Plan:
    return make_plan(loss, settings, key)


def make_plan(loss: Loss, settings: Settings, key: PlanKey) -> Plan:
    """Check ``settings`` against ``key``, and choose the implementation."""
    checks.check_no_trace()  # not cached: its sizes are tensors
    shard = shard_of_rank(settings, key.n_columns, key.rank, key.n_ranks)
    options = loss.options(settings, shard.vocab_size, class_weight=key.class_weight)
    impl = settings.impl
    if key.dtype == torch.float64:
        checks.check_choice("impl, of fp64 logits, for which there are no kernels", impl, ("auto", "reference"))
        impl = "reference"
    kernels = kernels_of(select(key.device.type, impl)[0])
    launchers = loss.launchers(options, shard, kernels)
    if kernels is not None:
        launchers = bind(launchers, loss, options, shard, key, settings)
    outputs, mean_over, dtype = loss.outputs(options), "", compute_dtype(key.dtype)
    if settings.reduction == "mean":
        mean_over = "weights" if key.class_weight else "rows"
    return Plan(
        loss=loss,
        launchers=launchers,
        rank=key.rank,
        n_ranks=key.n_ranks,
        shard=shard,
        options=options,
        row_shape=loss.row_shape(options),
        reduction=settings.reduction,
        gradient=key.gradient,
        dtype=dtype,
        other_outputs={name: torch.int64 if name == "predictions" else dtype for name in outputs},
        constants=tuple(name for name, has_gradient in outputs.items() if not has_gradient),
        mean_over=mean_over,
        stored_rows=launchers.stored_rows if key.n_ranks == 1 and settings.reduction == "none" else 0,
        launch=None if kernels is None else kernels.launch,
        n_outputs=1 + TokenOutputs._fields.index(next(reversed(outputs), "loss")),
    )


def kernels_of(implementation: str) -> ModuleType | None:
    """Import and return the kernels of an implementation, None for plain PyTorch."""
    if implementation == "reference":
        return None
    from vocab_parallel_ce import kernels

    return kernels


def gradient_mode(gradient: str, logits: Tensor, may_overwrite: bool) -> str:
    """Return the mode that runs; ``"auto"``, as a result, leaves to backward whether it writes over the logits.

    ``"in_forward"`` of a view in a graph is an error. A version raised in backward comes too late for a backward
    that runs before and uses a saved value. Raised in the forward pass, it would lose hooks: see
    :func:`is_view_in_graph`.
    """
    if gradient == "auto":
        return "auto" if may_overwrite else "out_of_place"
    if gradient == "in_forward" and torch.is_grad_enabled() and is_view_in_graph(logits):
        raise ValueError(
            "gradient: 'in_forward' overwrites logits during forward, which autograd allows for no view "
            "of another tensor in a graph, got logits that are one; pass the tensor itself, with any leading "
            "dimensions (no .view, no slice), or use 'in_backward'"
        )
    return gradient


def has_no_hooks() -> bool:
    """Whether there are surely no saved-tensor hooks."""
    return top_saved_tensor_hooks is not None and top_saved_tensor_hooks(True) is None


def check_no_hooks(gradient: str, logits: Tensor) -> None:
    """Raise ValueError for an explicit in-place mode under saved-tensor hooks, where others would read a gradient."""
    if top_saved_tensor_hooks is None or has_no_hooks():
        return
    if torch.is_grad_enabled() and logits.requires_grad:
        raise ValueError(
            f"gradient: {gradient!r} overwrites the logits, which is expected outside of saved-tensor hooks "
            "(checkpoint(use_reentrant=False), save_on_cpu), where autograd cannot see who else saved them, got a call "
            "inside; use gradient='auto' (TransformerEngine's overwrite_input=False)"
        )


def saved_as_it_is() -> AbstractContextManager[Any]:
    """Hide what is saved from the hooks of a checkpoint, which would run its forward again, and from offloading."""
    return nullcontext() if has_no_hooks() else saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def is_view_in_graph(tensor: Tensor) -> bool:
    """Whether autograd would rebuild the tensor's node if its version were raised.

    The gradient and hooks of the node in the graph, and of views between it and its base, would be lost.
    """
    return tensor._is_view() and tensor.grad_fn is not None


def comparable(settings: Settings, num_items: float | Tensor | None) -> dict[str, Any]:
    """Return what verification compares of the options, and what says which columns a rank has."""
    values = vars(settings.head) | settings._asdict() | {"num_items": None if num_items is None else float(num_items)}
    del values["head"]
    return values
