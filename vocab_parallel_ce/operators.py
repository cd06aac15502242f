"""Custom operators of PyTorch: what the losses are to ``torch.compile``.

An operator hides everything from the compiler: checks, kernels, the collective. So a compiled call does what an eager
one does, bit for bit, and ``fullgraph=True`` holds. Operators overwrite nothing. Where eager backward overwrites the
logits, a compiled one writes the gradient into a new tensor: Inductor copies a tensor that forward has saved before it
lets an operator of backward overwrite it.

Eager calls do not come here. This module is imported when the first call is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from vocab_parallel_ce import checks, run
from vocab_parallel_ce.collectives import group_named, group_position
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.layout import compute_dtype, source_and_new, walkable
from vocab_parallel_ce.linear import pipeline as linear_pipeline
from vocab_parallel_ce.linear.plan import (
    Arguments,
    Inputs,
    LinearCall,
    check_head_settings,
    gradient_of,
    plan_linear_call,
    shard_of_dtensor,
)
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import GRADIENT_MODES, HeadSettings, Settings, check_settings, loss_options
from vocab_parallel_ce.plan import output_dtype, plan_call, plan_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

N_SETTINGS, N_OUTPUTS, N_GRADS = len(Settings._fields), len(TokenOutputs._fields), len(GradOutputs._fields)
TYPES = {"VocabShard | None": "int[]?", "int | str": "SymInt?", "int | None": "int?", "float | None": "float?"}
TYPES |= {"torch.dtype | None": "ScalarType?"}


class LogitsCall(NamedTuple):
    """Arguments of the operators over logits; an operator takes the settings one by one."""

    logits: Tensor
    labels: Tensor
    num_items: Tensor | None  # of the gradient: what the loss was divided by
    class_weight: Tensor | None
    temperature: Tensor | None
    group: str | None
    settings: Settings

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> LogitsCall:
        return cls._make((*arguments[:6], _settings(arguments[6:])))


class HeadCall(NamedTuple):
    """Arguments of the operators over hidden states."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    num_items: Tensor | None
    class_weight: Tensor | None
    temperature: Tensor | None
    group: str | None
    autocast: torch.dtype | None
    wanted: linear_pipeline.Wanted
    settings: Settings
    head: HeadSettings

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> HeadCall:
        first = len(cls._fields) - 2  # before the two records
        head = HeadSettings(*arguments[first + N_SETTINGS :])
        head = head._replace(chunk_tokens="auto" if head.chunk_tokens is None else head.chunk_tokens)
        return cls._make((*arguments[:first], _settings(arguments[first : first + N_SETTINGS]), head))

    @property
    def has_gradients(self) -> bool:
        """Whether forward computes gradients."""
        return self.settings.gradient == "in_forward" and any(self.wanted)

    def plan(self) -> tuple[LinearCall, Inputs, Labels]:
        """Plan the call as under the autocast of the code that was compiled."""
        group = group_named(self.group)
        beside = Labels(self.labels, self.class_weight, self.temperature)
        given = Arguments(self.hidden, self.weight, self.bias, self.labels, beside, group, self.num_items)
        with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return plan_linear_call(LABELS, given, self.settings, self.head)

    def new_gradients(self) -> Iterable[Tensor | None]:
        tensors = zip((self.hidden, self.weight, self.bias), self.wanted, strict=True)
        return (None if t is None or not is_wanted else t.new_empty(t.shape) for t, is_wanted in tensors)


# What the public functions call while they are traced.


def losses(
    logits: Tensor, given: Labels, settings: Settings, group: Any, num_items: float | Tensor | None
) -> tuple[TokenOutputs, Tensor | None]:
    """Return the outputs of a loss over logits, and the divisor of a sum."""
    labels, class_weight, temperature = given
    if logits.stride(-1) != 1 or logits.dim() > 4:
        logits = logits.contiguous()  # so that the gradient is laid out as empty_like says
    checks.check_choice("gradient", settings.gradient, GRADIENT_MODES)
    settings = settings._replace(gradient="out_of_place")
    divisor = _divisor(num_items, settings.reduction, logits)
    checks.check_constants(class_weight, temperature, labels)
    tensors = logits, labels, divisor, class_weight, temperature
    found = torch.ops.vocab_parallel_ce.cross_entropy(*tensors, _name(group), *_values(settings))
    return _token_outputs(found, settings), divisor


def linear_losses(
    given: Arguments, settings: Settings, head: HeadSettings
) -> tuple[TokenOutputs, Tensor | None, Tensor | None]:
    """Return the outputs of a head and its loss, the divisor of a sum, and NaN or 1 for too many valid tokens."""
    hidden, weight, bias, labels, (_, class_weight, temperature), group, num_items, *_ = given
    if is_dtensor(weight):
        settings = settings._replace(shard=shard_of_dtensor(given, settings, *group_position(group)), vocab_size=None)
        weight = local_rows("weight", weight, group)
    if bias is not None:
        bias = local_rows("bias", bias, group)
    device_type = hidden.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    settings = settings._replace(gradient=gradient_of(settings, autocast or hidden.dtype))
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    divisor, values = _divisor(num_items, settings.reduction, hidden), (*_values(settings), *_values(head))
    operator = torch.ops.vocab_parallel_ce.linear_cross_entropy
    checks.check_constants(class_weight, temperature, labels)
    tensors = hidden, weight, bias, labels, divisor, class_weight, temperature
    found = operator(*tensors, _name(group), autocast, wanted, *values)
    return _token_outputs(found, settings), divisor, None if head.valid_tokens is None else found[N_OUTPUTS]


def _divisor(num_items: float | Tensor | None, reduction: str, like: Tensor) -> Tensor | None:
    """Return ``num_items`` on the device of ``like``, without waiting for it."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor) and reduction == "sum":
        checks.check_constant("num_items", num_items)
        return num_items.detach().to(like.device)  # the operator checks it
    checks.check_num_items(num_items, reduction, like)
    assert not isinstance(num_items, Tensor)
    return like.new_full((1,), num_items, dtype=compute_dtype(like.dtype))


def _name(group: Any) -> str | None:
    return None if group is None else group.group_name


def _values(record: Settings | HeadSettings) -> list[Any]:
    """Return the fields of a record as an operator takes them; it would take True for 1."""
    for name, default, value in zip(record._fields, type(record)(), record, strict=True):
        if isinstance(value, bool) != isinstance(default, bool):
            expected = "a bool" if isinstance(default, bool) else "no bool"
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
    values: list[Any] = list(record)
    if isinstance(record, HeadSettings):
        tokens = record.chunk_tokens
        if isinstance(tokens, str) and tokens != "auto":
            raise ValueError(f"chunk_tokens: expected 'auto' or a number of tokens, got {tokens!r}")
        values[HeadSettings._fields.index("chunk_tokens")] = None if tokens == "auto" else tokens
    elif record.shard is not None:
        values[Settings._fields.index("shard")] = list(record.shard)
    return values


def _settings(values: Sequence[Any]) -> Settings:
    settings = Settings(*values)
    return settings if settings.shard is None else settings._replace(shard=VocabShard(*settings.shard))


def _token_outputs(found: Sequence[Tensor], settings: Settings) -> TokenOutputs:
    """Return the outputs that were asked for; an operator returns empty tensors for the others."""
    asked = loss_options(settings, None).outputs
    loss, *others = (tensor if is_asked else None for tensor, is_asked in zip(found, asked, strict=False))
    assert loss is not None
    return TokenOutputs(loss, *others)


# The operators.


def _or_empty(tensors: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in tensors)


def _new_outputs(call: LogitsCall | HeadCall) -> TokenOutputs:
    settings, labels, dtype = call.settings, call.labels, call[0].dtype
    loss = labels.new_empty(labels.shape if settings.reduction == "none" else (), dtype=compute_dtype(dtype))
    asked = LABELS.outputs(loss_options(settings, None))
    others = {name: labels.new_empty(labels.shape, dtype=output_dtype(name, dtype)) for name in asked}
    return TokenOutputs(loss, **others)


def _check(call: LogitsCall | HeadCall) -> None:
    """Check what is known while the call is traced."""
    if forward_ad._current_level >= 0:
        raise TypeError(checks.IN_TRANSFORM)
    check_settings(call.settings, _n_ranks(call))


def _n_ranks(call: LogitsCall | HeadCall) -> int:
    return group_position(group_named(call.group))[1]


def _new_statistics(call: LogitsCall | HeadCall) -> Tensor:
    options = loss_options(call.settings, None, class_weight=call.class_weight is not None)
    shape = (_n_ranks(call), call.labels.numel(), len(options.statistics))
    return call.labels.new_empty(shape, dtype=compute_dtype(call[0].dtype))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    logits, labels, num_items, class_weight, temperature, group, settings = LogitsCall.read(arguments)
    given = Labels(labels, class_weight, temperature)
    call, beside = plan_call(LABELS, logits, given, settings, group_named(group), num_items)
    outputs, stats, divisor = run.forward(call, walkable(logits), beside, labels.shape)
    count = divisor if settings.reduction == "mean" else None  # an operator must not return what it was given
    return _or_empty((*outputs, *stats, count), logits)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = LogitsCall.read(arguments)
    _check(call)
    checks.check_logits(call.logits)
    checks.check_labels(call.labels, call.logits)
    checks.check_rows(call.labels, call.logits)
    dtype = torch.int32 if call.class_weight is None else compute_dtype(call[0].dtype)
    count = call.labels.new_empty(1, dtype=dtype) if call.settings.reduction == "mean" else None
    return _or_empty((*_new_outputs(call), _new_statistics(call), count), call.logits)


def _gradient(stats: Tensor, *arguments: Any) -> Tensor:
    grads = GradOutputs(*arguments[:N_GRADS])
    logits, labels, divisor, weights, temperature, group, settings = LogitsCall.read(arguments[N_GRADS:])
    given = Labels(labels, weights, temperature)
    plan = plan_of(LABELS, logits, given, settings, *group_position(group_named(group)))
    beside = LABELS.beside(given, logits, settings._replace(check_labels=False), plan.shard, plan.rank, plan.n_ranks)
    source, grad = source_and_new(logits)
    run.write_gradient(plan, source, beside, (stats,), divisor, grads, grad)
    return grad


def _fake_gradient(stats: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(arguments[N_GRADS])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (stats, count) = LogitsCall.read(inputs), output[N_OUTPUTS:]
    ctx.others = inputs[5:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*_constants(output, call.settings))
    divisor = count if call.settings.reduction == "mean" else call.num_items
    ctx.save_for_backward(stats, call.logits, call.labels, divisor, call.class_weight, call.temperature)


def _constants(output: tuple[Tensor, ...], settings: Settings) -> list[Tensor]:
    """Return what an operator returns without a gradient."""
    are_differentiable = loss_options(settings, None).differentiable
    outputs = zip(output, are_differentiable, strict=False)
    return [tensor for tensor, has_gradient in outputs if not has_gradient] + list(output[N_OUTPUTS:])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    checks.check_no_double_backward()
    grad, (stats, *inputs) = None, ctx.saved_tensors
    if any(of_output is not None for of_output in grads[:N_GRADS]):
        operator = torch.ops.vocab_parallel_ce.cross_entropy_gradient
        grad = operator(stats, *grads[:N_GRADS], *inputs, *ctx.others)
    return grad, *(None,) * (4 + len(ctx.others))


def _linear_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments)
    linear, inputs, beside = call.plan()
    gradients: Sequence[Tensor | None] = (None, None, None)
    stats = None
    with torch.autocast(call.hidden.device.type, enabled=False):
        if call.has_gradients:
            outputs, gradients = linear_pipeline.forward_with_gradients(linear, inputs, beside, call.wanted)
        else:
            outputs, (stats,) = linear_pipeline.forward(linear, inputs, beside)
            # As many rows as labels: how many tokens are left out is known when it runs.
            stats = F.pad(stats, (0, 0, 0, call.labels.numel() - stats.shape[1]))
    shaped = (v if v is None or v.dim() == 0 else v.view(call.labels.shape) for v in outputs)
    return _or_empty((*shaped, linear.overflow, stats, *_like_inputs(gradients, call)), call.hidden)


def _fake_linear_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments)
    _check(call)
    check_head_settings(call.settings, call.head._replace(chunk_tokens="auto"))  # a number may be symbolic
    overflow = None if call.head.valid_tokens is None else call.hidden.new_empty((), dtype=torch.float32)
    stats = None if call.has_gradients else _new_statistics(call)
    gradients = call.new_gradients() if call.has_gradients else (None, None, None)
    return _or_empty((*_new_outputs(call), overflow, stats, *gradients), call.hidden)


def _linear_gradient(stats: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    grads, call = GradOutputs(*arguments[:N_GRADS]), HeadCall.read(arguments[N_GRADS:])
    linear, inputs, beside = call.plan()
    stats, divisor = stats[:, : linear.labels.shape[0]], linear.call.divisor
    with torch.autocast(call.hidden.device.type, enabled=False):
        gradients = linear_pipeline.backward(linear, inputs, beside, (stats,), divisor, call.wanted, grads)
    return _or_empty(_like_inputs(gradients, call), call.hidden)


def _fake_linear_gradient(stats: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments[N_GRADS:])
    return _or_empty(call.new_gradients(), call.hidden)


def _like_inputs(gradients: Sequence[Tensor | None], call: HeadCall) -> tuple[Tensor | None, ...]:
    d_hidden, *others = gradients
    return None if d_hidden is None else d_hidden.view(call.hidden.shape), *others


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call = HeadCall.read(inputs)
    ctx.wanted, ctx.has_gradients, ctx.others = call.wanted, call.has_gradients, inputs[7:]
    overflow, stats, *gradients = output[N_OUTPUTS:]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*_constants(output, call.settings))
    ctx.save_for_backward(*((overflow, *gradients) if call.has_gradients else (stats, *inputs[:7])))


def _linear_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    checks.check_no_double_backward()
    first, *others = ctx.saved_tensors
    gradients: Sequence[Tensor | None] = (None, None, None)
    if ctx.has_gradients and grads[0] is not None:
        factor = grads[0] * first if first.numel() else grads[0]
        # 0 stays 0 under inf, as in element_mul.
        gradients = [torch.where(grad == 0, 0.0, grad.float() * factor).to(grad.dtype) for grad in others]
    elif not ctx.has_gradients and any(of_output is not None for of_output in grads[:N_GRADS]):
        operator = torch.ops.vocab_parallel_ce.linear_cross_entropy_gradient
        gradients = operator(first, *grads[:N_GRADS], *others, *ctx.others)
    wanted = (grad if is_wanted else None for grad, is_wanted in zip(gradients, ctx.wanted, strict=True))
    return *wanted, *(None,) * (4 + len(ctx.others))


def _schema_of(record: Any) -> str:
    """Return the fields of a record of settings as arguments of an operator."""
    types = {name: getattr(type_, "__forward_arg__", type_) for name, type_ in record.__annotations__.items()}
    return ", ".join(f"{TYPES.get(type_, type_)} {name}" for name, type_ in types.items())


def _define(name: str, schema: str, function: Any, fake: Any, *autograd: Any) -> None:
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vocab_parallel_ce::{name}", fake, lib=library)
    if autograd:
        backward, save = autograd
        torch.library.register_autograd(f"vocab_parallel_ce::{name}", backward, setup_context=save, lib=library)


library = torch.library.Library("vocab_parallel_ce", "DEF")
OUTPUTS = ", ".join(f"Tensor {name}" for name in TokenOutputs._fields)
SAVED = ", ".join(["Tensor stats", *(f"Tensor? grad_{name}" for name in GradOutputs._fields)])
CONSTANTS = "Tensor? num_items, Tensor? class_weight, Tensor? row_temperature, str? group"
LOGITS = f"Tensor logits, Tensor labels, {CONSTANTS}, {_schema_of(Settings)}"
HEAD = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {CONSTANTS}, "
    f"ScalarType? autocast, bool[] wanted, {_schema_of(Settings)}, {_schema_of(HeadSettings)}"
)
_define(
    "cross_entropy", f"({LOGITS}) -> ({OUTPUTS}, Tensor stats, Tensor count)", _forward, _fake_forward, _backward, _save
)
_define("cross_entropy_gradient", f"({SAVED}, {LOGITS}) -> Tensor", _gradient, _fake_gradient)
_define(
    "linear_cross_entropy",
    f"({HEAD}) -> ({OUTPUTS}, Tensor overflow, Tensor stats, Tensor d_hidden, Tensor d_weight, Tensor d_bias)",
    _linear_forward,
    _fake_linear_forward,
    _linear_backward,
    _save_linear,
)
_define(
    "linear_cross_entropy_gradient",
    f"({SAVED}, {HEAD}) -> (Tensor d_hidden, Tensor d_weight, Tensor d_bias)",
    _linear_gradient,
    _fake_linear_gradient,
)
