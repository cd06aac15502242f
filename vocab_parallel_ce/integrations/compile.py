"""Custom operators of PyTorch, which the losses call while ``torch.compile`` traces them.

An operator hides everything from the compiler: checks, kernels, the collective. So a compiled call does what an eager
one does, bit for bit, and ``fullgraph=True`` holds. Operators overwrite nothing. Where eager backward overwrites the
logits, a compiled one writes the gradient into a new tensor: an operator that overwrites a tensor that forward has
saved gets a copy of it from Inductor, which takes longer.

Eager calls do not come here: this module is imported when something is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce import checks, pipeline
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor, local_rows, ranks_along
from vocab_parallel_ce.layout import flat, source_and_new, walkable
from vocab_parallel_ce.linear import pipeline as linear_pipeline
from vocab_parallel_ce.linear.plan import (
    Arguments,
    check_head_settings,
    gradient_of,
    plan_linear_call,
    shard_of_dtensor,
)
from vocab_parallel_ce.options import HeadSettings, Settings, check_settings, loss_options
from vocab_parallel_ce.plan import plan_call, plan_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import TokenOutputs

TYPES = {"VocabShard | None": "int[]?", "int | str": "str", "int | None": "int?", "float | None": "float?"}


def schema_of(record: Any) -> str:
    """Return the fields of a record of settings as arguments of an operator."""
    types = {name: getattr(type_, "__forward_arg__", type_) for name, type_ in record.__annotations__.items()}
    return ", ".join(f"{TYPES.get(type_, type_)} {name}" for name, type_ in types.items())


SETTINGS = schema_of(Settings)
HEAD = f"str? group, ScalarType? autocast, bool[] wanted, {SETTINGS}, {schema_of(HeadSettings)}"
INPUTS = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, Tensor? num_items"
OUTPUTS = "Tensor loss, Tensor entropy, Tensor lse, Tensor predictions"
LOSS = f"(Tensor logits, Tensor labels, Tensor? num_items, str? group, {SETTINGS}) -> ({OUTPUTS}, Tensor, Tensor)"
GRADIENT = (
    "(Tensor logits, Tensor labels, Tensor stats, Tensor? divisor, Tensor? grad_loss, Tensor? grad_entropy, "
    f"str? group, {SETTINGS}) -> Tensor"
)
LINEAR_LOSS = f"({INPUTS}, {HEAD}) -> ({OUTPUTS}, Tensor, Tensor, Tensor, Tensor, Tensor)"
LINEAR_GRADIENT = (
    f"({INPUTS}, Tensor stats, Tensor? grad_loss, Tensor? grad_entropy, {HEAD}) -> (Tensor, Tensor, Tensor)"
)
N_SETTINGS = len(Settings._fields)


def losses(
    logits: Tensor, labels: Tensor, settings: Settings, group: Any, num_items: int | Tensor | None
) -> tuple[TokenOutputs, Tensor | None]:
    """Return the outputs of a loss over logits, and the divisor of a sum; the compiler sees one operator."""
    if logits.stride(-1) != 1 or logits.dim() > 4:
        logits = logits.contiguous()  # an operator's gradient is laid out as empty_like says
    settings = settings._replace(gradient="out_of_place")
    divisor = _divisor(num_items, logits)
    found = torch.ops.vocab_parallel_ce.cross_entropy(logits, labels, divisor, _name(group), *_values(settings))
    return _token_outputs(found, settings), divisor


def linear_losses(
    given: Arguments, settings: Settings, head: HeadSettings
) -> tuple[TokenOutputs, Tensor | None, Tensor | None]:
    """Return the outputs of a head and its loss, the divisor of a sum, and NaN or 1 for too many valid tokens."""
    hidden, weight, labels, bias, group, num_items, _ = given
    if is_dtensor(weight):
        settings = settings._replace(shard=shard_of_dtensor(given, settings, *group_position(group)), vocab_size=None)
        weight = local_rows("weight", weight, group)
    if bias is not None:
        bias = local_rows("bias", bias, group)
    device_type = hidden.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    settings = settings._replace(gradient=gradient_of(settings, autocast or hidden.dtype))
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    divisor, values = _divisor(num_items, hidden), (*_values(settings), *_values(head))
    operator = torch.ops.vocab_parallel_ce.linear_cross_entropy
    found = operator(hidden, weight, bias, labels, divisor, _name(group), autocast, wanted, *values)
    overflow = None if head.valid_tokens is None else found[5]
    return _token_outputs(found, settings), divisor, overflow


def _divisor(num_items: int | Tensor | None, like: Tensor) -> Tensor | None:
    """Return ``num_items [1]`` on the device of ``like``, without waiting for it."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor):
        return num_items.detach().to(like.device)
    if not isinstance(num_items, int) or isinstance(num_items, bool):
        raise TypeError(f"num_items: expected an int or a tensor of one element, got {type(num_items).__name__}")
    return like.new_full((1,), num_items, dtype=torch.float32)


def _name(group: Any) -> str | None:
    return None if group is None else group.group_name


def _values(record: Settings | HeadSettings) -> list[Any]:
    """Return the fields of a record as an operator takes them."""
    values: list[Any] = list(record)
    if isinstance(record, HeadSettings):
        values[HeadSettings._fields.index("chunk_tokens")] = str(record.chunk_tokens)
    elif record.shard is not None:
        values[Settings._fields.index("shard")] = list(record.shard)
    return values


def _settings(values: Sequence[Any]) -> Settings:
    settings = Settings(*values)
    return settings if settings.shard is None else settings._replace(shard=VocabShard(*settings.shard))


def _head_settings(values: Sequence[Any]) -> HeadSettings:
    head = HeadSettings(*values)
    tokens = str(head.chunk_tokens)
    return head._replace(chunk_tokens=int(tokens) if tokens.lstrip("-").isdigit() else tokens)


def _group(name: str | None) -> Any:
    return None if name is None else dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _token_outputs(found: Sequence[Tensor], settings: Settings) -> TokenOutputs:
    """Return what an operator gave as outputs; a tensor that was not asked for is empty."""
    loss, entropy, lse, predictions = found[:4]
    metrics = settings.return_metrics
    return TokenOutputs(
        loss, entropy if settings.entropy else None, lse if metrics else None, predictions if metrics else None
    )


def _position(name: str | None) -> tuple[int, int]:
    return group_position(_group(name))


def _or_empty(tensor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0, dtype=torch.float32) if tensor is None else tensor


def _forward(
    logits: Tensor, labels: Tensor, num_items: Tensor | None, group: str | None, *values: Any
) -> tuple[Tensor, ...]:
    call = plan_call(logits, labels, _settings(values), group=_group(group), num_items=num_items)
    outputs, stats, divisor = pipeline.forward(call, walkable(logits), flat(labels), labels.shape)
    count = divisor if call.plan.reduction == "mean" else None  # an operator must not return what it was given
    return *(_or_empty(values, logits) for values in outputs), stats, _or_empty(count, logits)


def _fake_forward(
    logits: Tensor, labels: Tensor, num_items: Tensor | None, group: str | None, *values: Any
) -> tuple[Tensor, ...]:
    settings, n_ranks = _settings(values), _position(group)[1]
    check_settings(settings, n_ranks)
    checks.check_logits(logits)
    checks.check_labels(labels, logits)
    checks.check_rows(labels, logits)
    stats = logits.new_empty((n_ranks, labels.numel(), _n_statistics(settings)), dtype=torch.float32)
    count = logits.new_empty(1, dtype=torch.int32) if settings.reduction == "mean" else _or_empty(None, logits)
    return *_fake_outputs(labels.shape, settings, logits), stats, count


def _fake_outputs(shape: Sequence[int], settings: Settings, like: Tensor) -> tuple[Tensor, ...]:
    def values(is_wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        return like.new_empty(shape, dtype=dtype) if is_wanted else _or_empty(None, like)

    loss = values(True) if settings.reduction == "none" else like.new_empty((), dtype=torch.float32)
    return loss, values(settings.entropy), values(settings.return_metrics), values(settings.return_metrics, torch.int64)


def _n_statistics(settings: Settings) -> int:
    return len(loss_options(settings, None).statistics)


def _gradient(
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    divisor: Tensor | None,
    grad_loss: Tensor | None,
    grad_entropy: Tensor | None,
    group: str | None,
    *values: Any,
) -> Tensor:
    plan = plan_of(logits, _settings(values), *_position(group))
    source, grad = source_and_new(logits)
    pipeline.write_gradient(plan, source, flat(labels), stats, divisor, grad_loss, grad_entropy, grad)
    return grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, labels, num_items, *ctx.others = inputs
    stats, count = output[4:]
    settings = _settings(inputs[4:])
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2 if settings.entropy else 1 :])
    ctx.save_for_backward(logits, labels, stats, count if settings.reduction == "mean" else num_items)


def _backward(ctx: Any, grad_loss: Tensor | None, grad_entropy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    grad = None
    if grad_loss is not None or grad_entropy is not None:
        operator = torch.ops.vocab_parallel_ce.cross_entropy_gradient
        grad = operator(*ctx.saved_tensors, grad_loss, grad_entropy, *ctx.others)
    return grad, *(None,) * (2 + len(ctx.others))


def _planned(inputs: tuple[Any, ...], group: str | None, autocast: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Plan a head and its loss as under the autocast of the traced call."""
    hidden, weight, bias, labels, num_items = inputs
    given = Arguments(hidden, weight, labels, bias, _group(group), num_items, None)
    with torch.autocast(hidden.device.type, dtype=autocast, enabled=autocast is not None):
        return plan_linear_call(given, _settings(values[:N_SETTINGS]), _head_settings(values[N_SETTINGS:]))


def _linear_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | None,
    group: str | None,
    autocast: torch.dtype | None,
    wanted: linear_pipeline.Wanted,
    *values: Any,
) -> tuple[Tensor, ...]:
    linear, inputs = _planned((hidden, weight, bias, labels, num_items), group, autocast, values)
    gradients: linear_pipeline.Gradients = (None, None, None)
    stats = None
    with torch.autocast(hidden.device.type, enabled=False):
        if linear.call.plan.gradient == "in_forward" and any(wanted):
            outputs, gradients = linear_pipeline.forward_with_gradients(linear, inputs, wanted)
        else:
            outputs, stats = linear_pipeline.forward(linear, inputs)
            # Its rows are known to all who trace: as many as labels, also if ignored ones are left out.
            stats = torch.nn.functional.pad(stats, (0, 0, 0, labels.numel() - stats.shape[1]))
    per_token = (v if v is None or v.dim() == 0 else v.view(labels.shape) for v in outputs)
    d_hidden = None if gradients[0] is None else gradients[0].view(hidden.shape)
    others = (linear.overflow, stats, d_hidden, *gradients[1:])
    return *(_or_empty(v, hidden) for v in per_token), *(_or_empty(v, hidden) for v in others)


def _fake_linear_forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | None,
    group: str | None,
    autocast: torch.dtype | None,
    wanted: linear_pipeline.Wanted,
    *values: Any,
) -> tuple[Tensor, ...]:
    settings, head = _settings(values[:N_SETTINGS]), _head_settings(values[N_SETTINGS:])
    n_ranks = _position(group)[1]
    check_head_settings(settings, head)
    check_settings(settings, n_ranks)
    overflow = None if head.valid_tokens is None else hidden.new_empty((), dtype=torch.float32)
    others: list[Tensor | None] = [overflow, None, None, None, None]
    if settings.gradient == "in_forward" and any(wanted):
        others[2:] = _fake_gradients((hidden, weight, bias), wanted)
    else:
        others[1] = hidden.new_empty((n_ranks, labels.numel(), _n_statistics(settings)), dtype=torch.float32)
    return *_fake_outputs(labels.shape, settings, hidden), *(_or_empty(v, hidden) for v in others)


def _linear_gradient(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    num_items: Tensor | None,
    stats: Tensor,
    grad_loss: Tensor | None,
    grad_entropy: Tensor | None,
    group: str | None,
    autocast: torch.dtype | None,
    wanted: linear_pipeline.Wanted,
    *values: Any,
) -> tuple[Tensor, ...]:
    linear, inputs = _planned((hidden, weight, bias, labels, num_items), group, autocast, values)
    stats, divisor = stats[:, : inputs.labels.shape[0]], linear.call.num_items
    with torch.autocast(hidden.device.type, enabled=False):
        gradients = linear_pipeline.backward(linear, inputs, stats, divisor, wanted, grad_loss, grad_entropy)
    d_hidden = None if gradients[0] is None else gradients[0].view(hidden.shape)
    return tuple(_or_empty(v, hidden) for v in (d_hidden, *gradients[1:]))


def _fake_linear_gradient(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    return tuple(_or_empty(v, hidden) for v in _fake_gradients((hidden, weight, bias), others[7]))


def _fake_gradients(tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> list[Tensor | None]:
    pairs = zip(tensors, wanted, strict=True)
    return [tensor.new_empty(tensor.shape) if is_wanted and tensor is not None else None for tensor, is_wanted in pairs]


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.others = inputs[5:]
    ctx.wanted, settings = inputs[7], _settings(inputs[8 : 8 + N_SETTINGS])
    ctx.in_forward = settings.gradient == "in_forward"
    overflow, stats, *gradients = output[4:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2 if settings.entropy else 1 :])
    if ctx.in_forward:
        ctx.save_for_backward(overflow, *gradients)
    else:
        ctx.save_for_backward(*inputs[:5], stats)


def _linear_backward(
    ctx: Any, grad_loss: Tensor | None, grad_entropy: Tensor | None, *_: None
) -> tuple[Tensor | None, ...]:
    gradients: Sequence[Tensor | None] = (None, None, None)
    if ctx.in_forward and grad_loss is not None:
        overflow, *unscaled = ctx.saved_tensors
        factor = grad_loss * overflow if overflow.numel() else grad_loss
        gradients = [(grad.float() * factor).to(grad.dtype) for grad in unscaled]
    elif not ctx.in_forward and (grad_loss is not None or grad_entropy is not None):
        operator = torch.ops.vocab_parallel_ce.linear_cross_entropy_gradient
        gradients = operator(*ctx.saved_tensors, grad_loss, grad_entropy, *ctx.others)
    gradients = [grad if wanted else None for grad, wanted in zip(gradients, ctx.wanted, strict=True)]
    return *gradients, *(None,) * (2 + len(ctx.others))


library = torch.library.Library("vocab_parallel_ce", "DEF")


def _define(name: str, schema: str, function: Any, fake: Any, save: Any = None, backward: Any = None) -> None:
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vocab_parallel_ce::{name}", fake, lib=library)
    if backward is not None:
        torch.library.register_autograd(f"vocab_parallel_ce::{name}", backward, setup_context=save, lib=library)


def _fake_gradient(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits)


_define("cross_entropy", LOSS, _forward, _fake_forward, _save, _backward)
_define("cross_entropy_gradient", GRADIENT, _gradient, _fake_gradient)
_define("linear_cross_entropy", LINEAR_LOSS, _linear_forward, _fake_linear_forward, _save_linear, _linear_backward)
_define("linear_cross_entropy_gradient", LINEAR_GRADIENT, _linear_gradient, _fake_linear_gradient)
torch.compiler.assume_constant_result(ranks_along)  # it reads a tensor of the mesh, which never changes
