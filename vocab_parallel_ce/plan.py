"""Arguments in, a checked :class:`Call` out: what runs, on which shard, with which options.

The part that training repeats at every step, the :class:`Plan`, is made once and cached.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.blocks import one_pass_config
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.layout import VECTOR_BYTES, compute_dtype, constant, has_whole_vectors
from vocab_parallel_ce.options import Settings, loss_options, shard_of_rank
from vocab_parallel_ce.overwritten import check_not_overwritten
from vocab_parallel_ce.selection import Workload, gpu_of, select
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions, TokenOutputs
from vocab_parallel_ce.top import Top

# A private function: None in a PyTorch without it. Then "auto" overwrites nothing.
top_saved_tensor_hooks: Callable[[bool], object] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


class Plan(NamedTuple):
    """What runs, except the tensors and the group."""

    launchers: ModuleType
    one_pass: Callable[..., None] | None  # the launcher, if one launch does it all
    rank: int
    n_ranks: int
    shard: VocabShard
    options: LossOptions
    reduction: str
    gradient: str  # "auto" if backward decides
    dtype: torch.dtype  # of the arithmetic, the statistics and the loss
    other_outputs: dict[str, torch.dtype]  # those of TokenOutputs beside the loss that are asked for, in their order
    n_statistics: int  # K


class Call(NamedTuple):
    """One checked call."""

    plan: Plan
    group: Any
    num_items: Tensor | None  # [1], what a sum is divided by
    class_weight: Tensor | None = None  # fp32, of this rank's columns without padding
    divides_by_weights: bool = False  # by the sum of the labels' weights
    top: Top | None = None  # filled in forward
    temperature: Tensor | None = None  # [N] of fp32 or of fp64 logits' dtype, None: that of the options


class Kind(NamedTuple):
    """What of the logits and ranks a plan depends on."""

    dtype: torch.dtype
    n_columns: int
    device: torch.device
    rank: int
    n_ranks: int
    gradient: str
    whole_vectors: bool  # rows suit one_pass
    class_weight: bool = False  # whether there is one


def plan_call(
    logits: Tensor,
    labels: Tensor,
    settings: Settings,
    group: Any,
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
    top: Top | None = None,
    *,
    may_hold_gradient: bool = False,
) -> Call:
    """Check the arguments of a loss over logits and plan it; changes nothing.

    ``may_hold_gradient``: do not look whether an earlier call has overwritten the logits.
    """
    checks.check_logits(logits)
    checks.check_labels(labels, logits)
    checks.check_rows(labels, logits)
    checks.check_no_transforms(logits, class_weight, temperature)
    plan = plan_of(logits, settings, *group_position(group), class_weight is not None)
    if not may_hold_gradient:
        check_not_overwritten(logits)
    divisor = None if num_items is None else checked_divisor(num_items, settings.reduction, logits)
    weights = None if class_weight is None else weights_of_columns(class_weight, plan.shard, logits)
    of_rows = None if temperature is None else temperature_of_rows(temperature, labels, logits)
    if settings.check_labels:
        checks.check_label_range(labels, plan.shard.vocab_size, plan.options.ignore_index, shift=settings.shift)
    if verify.open_calls:
        options = comparable(settings, num_items, class_weight, temperature)
        verify.compare_call({"logits": logits}, labels, plan.shard, options)
    by_weights = weights is not None and settings.reduction == "mean"
    return Call(plan, group, divisor, weights, by_weights, top, of_rows)


def plan_of(logits: Tensor, settings: Settings, rank: int, n_ranks: int, class_weight: bool = False) -> Plan:
    """Return the plan of a loss over checked ``logits``."""
    mode = gradient_mode(settings.gradient, logits)
    whole_vectors = mode == "in_forward" and has_whole_vectors(logits)
    device = logits.device if type(logits) is Tensor else checks.device_of_values(logits)
    of_logits = logits.dtype, logits.shape[-1], device
    return cached_plan(settings, *of_logits, rank, n_ranks, mode, whole_vectors, class_weight)


def cached_plan(settings: Settings, *kind: Any) -> Plan:
    """Return the plan of settings and the fields of a :class:`Kind`, checked and made once."""
    try:
        return _plan_of_fields(*(() if settings.shard is None else settings.shard), *settings, *kind)
    except TypeError:  # refused, or cannot be hashed, or is no shard: make_plan says so by name
        pass
    return make_plan(settings, Kind(*kind))


@functools.lru_cache(maxsize=1024, typed=True)  # 1, 1.0 and True are equal
def _plan_of_fields(*fields: Any) -> Plan:
    """Make a plan of the fields of a shard, of :class:`Settings` and of a :class:`Kind`."""
    n = len(Kind._fields)
    return make_plan(Settings(*fields[-n - len(Settings._fields) : -n]), Kind(*fields[-n:]))


def make_plan(settings: Settings, kind: Kind) -> Plan:
    """Check ``settings`` against ``kind``, and choose the implementation."""
    checks.check_no_trace()  # not cached: its sizes are tensors
    shard = shard_of_rank(settings, kind.n_columns, kind.rank, kind.n_ranks)
    options = loss_options(settings, shard.vocab_size, class_weight=kind.class_weight)
    whole_vectors = kind.whole_vectors and shard.n_valid == shard.n_columns
    fits = one_pass_config(kind.n_columns * kind.dtype.itemsize) is not None
    workload = Workload(kind.n_ranks, kind.gradient, options.beyond_z_loss, whole_vectors, fits)
    gpu = gpu_of(kind.device.index) if kind.device.type == "cuda" else None
    impl = settings.impl
    if kind.dtype == torch.float64:
        checks.check_choice("impl, of fp64 logits, for which there are no kernels", impl, ("auto", "reference"))
        impl = "reference"
    launchers = launchers_of(select(kind.device.type, impl, workload=workload, gpu=gpu).name)
    of_call = shard, options, settings.reduction, kind.gradient
    outputs = compute_dtype(kind.dtype), other_outputs(options, kind.dtype), len(options.statistics)
    return Plan._make((*launchers, kind.rank, kind.n_ranks, *of_call, *outputs))


def other_outputs(options: LossOptions, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtypes of the outputs beside the loss that are asked for, for logits of ``dtype``."""
    asked = [name for name, is_asked in zip(TokenOutputs._fields, options.outputs, strict=True) if is_asked]
    return {name: torch.int64 if name == "predictions" else compute_dtype(dtype) for name in asked if name != "loss"}


def launchers_of(implementation: str) -> tuple[ModuleType, Callable[..., None] | None]:
    """Import and return the module with an implementation's launchers, and the launcher of ``one_pass``."""
    if implementation == "reference":
        from vocab_parallel_ce import reference

        return reference, None
    from vocab_parallel_ce import kernels

    if implementation == "triton":
        return kernels, None
    from vocab_parallel_ce.kernels.one_pass import one_pass

    return kernels, one_pass


def checked_divisor(num_items: float | Tensor, reduction: str, logits: Tensor) -> Tensor:
    """Return checked ``num_items`` as kernels take it: ``[1]`` on the device of ``logits``."""
    checks.check_num_items(num_items, reduction, logits)
    if isinstance(num_items, Tensor) and num_items.device == logits.device:
        return constant(num_items.detach().reshape(1), logits)
    return logits.new_full((1,), float(num_items), dtype=compute_dtype(logits.dtype))


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


def temperature_of_rows(temperature: Tensor | None, labels: Tensor, logits: Tensor) -> Tensor | None:
    """Return a checked tensor temperature as kernels take it: contiguous ``[N]``, of the arithmetic's dtype.

    It is a view of the caller's if that is so already, and is a ``constant``. ``logits`` may be hidden states.
    """
    if temperature is None:
        return None
    checks.check_temperature(temperature, labels)
    values = temperature.detach().to(compute_dtype(logits.dtype)).reshape(-1)
    return constant((values.expand(labels.numel()) if values.numel() == 1 else values).contiguous(), logits)


def gradient_mode(gradient: str, logits: Tensor) -> str:
    """Return the mode that runs; ``"auto"``, as a result, leaves to backward whether it writes over the logits.

    ``"in_forward"`` of a view in a graph is an error. A version raised in backward comes too late for a backward
    that runs before and uses a saved value. Raised in forward, it would lose hooks; see :func:`is_view_in_graph`.
    """
    if gradient == "auto":
        base = logits._base
        return "auto" if may_overwrite(logits if base is None else base) else "out_of_place"
    if gradient == "in_forward" and torch.is_grad_enabled() and is_view_in_graph(logits):
        raise ValueError(
            "gradient: 'in_forward' overwrites logits during forward, which autograd allows for no view "
            "of another tensor in a graph, got logits that are one; pass the tensor itself, with any leading "
            "dimensions (no .view, no slice), or use 'in_backward'"
        )
    return gradient


def may_overwrite(owner: Tensor) -> bool:
    """Whether autograd sees every reader of ``owner``, the logits or their base.

    It does not for a leaf, or a view of one: the memory belongs to a parameter, or to a tensor outside the graph (a
    DTensor's local one). Nor under saved-tensor hooks: autograd compares no version of what went through them.
    """
    return not owner.is_leaf and top_saved_tensor_hooks is not None and top_saved_tensor_hooks(True) is None


def is_view_in_graph(tensor: Tensor) -> bool:
    """Whether autograd would rebuild the tensor's node if its version were raised.

    The gradient and hooks of the node in the graph, and of views between it and its base, would be lost.
    """
    return tensor._is_view() and tensor.grad_fn is not None


def comparable(
    settings: Settings,
    num_items: float | Tensor | None,
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
) -> dict[str, Any]:
    """Return what verification compares of the options, and what says which columns a rank has."""
    options = settings._asdict() | {"num_items": None if num_items is None else float(num_items)}
    options["class_weight"] = "None" if class_weight is None else "a tensor"
    if temperature is not None:
        options["temperature"] = verify.shown(temperature)
    return options
