"""Custom operators of PyTorch: what the losses are to ``torch.compile``.

An operator hides everything from the compiler: checks, kernels, the collective. So a compiled call does what an eager
one does, bit for bit, and ``fullgraph=True`` holds. Operators overwrite nothing. Where eager backward overwrites the
logits, a compiled one writes the gradient into a new tensor: Inductor copies a tensor that forward has saved before it
lets an operator of backward overwrite it.

Eager calls do not come here. This module is imported when the first call is compiled.
"""

from __future__ import annotations

import math
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
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.losses.divergences import DIVERGENCE
from vocab_parallel_ce.losses.known_tokens import KNOWN_TOKENS
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.losses.targets import TARGETS
from vocab_parallel_ce.options import GRADIENT_MODES, HeadSettings, Settings, check_settings
from vocab_parallel_ce.plan import output_dtype, plan_call, plan_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

LOSSES: dict[str, Loss] = {"labels": LABELS, "targets": TARGETS, "divergence": DIVERGENCE, "known_tokens": KNOWN_TOKENS}
NAMES = {id(loss): name for name, loss in LOSSES.items()}
MOST_BESIDE, MOST_EXCHANGES = 3, 2
N_SETTINGS, N_OUTPUTS, N_GRADS = len(Settings._fields), len(TokenOutputs._fields), len(GradOutputs._fields)
TYPES = {"VocabShard | None": "int[]?", "int | str": "SymInt?", "int | None": "int?", "float | None": "float?"}
TYPES |= {"torch.dtype | None": "ScalarType?"}


class LogitsCall(NamedTuple):
    """Arguments of the operators over logits; an operator takes the settings one by one."""

    logits: Tensor
    beside: tuple[Tensor | None, ...]  # the first fields of the loss's record
    num_items: Tensor | None  # of the gradient: what the loss was divided by
    loss: Loss
    group: str | None
    settings: Settings

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> LogitsCall:
        logits, (beside, others) = arguments[0], _split(arguments[1:], MOST_BESIDE)
        num_items, loss, group, *settings = others
        return cls(logits, beside, num_items, LOSSES[loss], group, _settings(settings))

    @property
    def given(self) -> Any:
        return _record(self.loss.Beside, self.beside)

    @property
    def rows(self) -> torch.Size:
        """The shape of an output of each row."""
        return self.logits.shape[:-1]


class HeadCall(NamedTuple):
    """Arguments of the operators over hidden states."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    labels: Tensor
    beside: tuple[Tensor | None, ...]  # the first fields of the loss's record
    num_items: Tensor | None
    loss: Loss
    group: str | None
    autocast: torch.dtype | None
    wanted: linear_pipeline.Wanted
    settings: Settings
    head: HeadSettings

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> HeadCall:
        tensors, others = _split(arguments, 4)
        beside, (num_items, loss, group, autocast, wanted, *records) = _split(others, MOST_BESIDE)
        head = HeadSettings(*records[N_SETTINGS:])
        head = head._replace(chunk_tokens="auto" if head.chunk_tokens is None else head.chunk_tokens)
        own = LOSSES[loss], group, autocast, wanted, _settings(records[:N_SETTINGS]), head
        return cls._make((*tensors, beside, num_items, *own))

    @property
    def given(self) -> Any:
        return _record(self.loss.BesideHead, self.beside)

    @property
    def rows(self) -> torch.Size:
        """The shape of an output of each token."""
        return self.labels.shape

    @property
    def has_gradients(self) -> bool:
        """Whether forward computes gradients."""
        return self.settings.gradient == "in_forward" and any(self.wanted)

    def plan(self) -> tuple[LinearCall, Inputs, Any]:
        """Plan the call as under the autocast of the code that was compiled."""
        group = group_named(self.group)
        given = Arguments(self.hidden, self.weight, self.bias, self.labels, self.given, group, self.num_items)
        with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return plan_linear_call(self.loss, given, self.settings, self.head)

    def new_gradients(self) -> Iterable[Tensor | None]:
        tensors = zip((self.hidden, self.weight, self.bias), self.wanted, strict=True)
        return (None if t is None or not is_wanted else t.new_empty(t.shape) for t, is_wanted in tensors)


# What the public functions call while they are traced.


def losses(
    loss: Loss, logits: Tensor, given: Any, settings: Settings, group: Any, num_items: float | Tensor | None
) -> tuple[TokenOutputs, Tensor | None]:
    """Return the outputs of a loss over logits, and the divisor of a sum."""
    if logits.stride(-1) != 1 or logits.dim() > 4:
        logits = logits.contiguous()  # so that the gradient is laid out as empty_like says
    checks.check_choice("gradient", settings.gradient, GRADIENT_MODES)
    settings = settings._replace(gradient="out_of_place")
    loss.check_constants(given)
    divisor = _divisor(num_items, settings.reduction, logits)
    operator = torch.ops.vocab_parallel_ce.loss_of_logits
    found = operator(logits, *_beside(given), divisor, NAMES[id(loss)], _name(group), *_values(settings))
    return _token_outputs(loss, found, settings), divisor


def linear_losses(
    loss: Loss, given: Arguments, settings: Settings, head: HeadSettings
) -> tuple[TokenOutputs, Tensor | None, Tensor | None]:
    """Return the outputs of a head and its loss, the divisor of a sum, and NaN or 1 for too many valid tokens."""
    hidden, weight, bias, labels, beside, group, num_items, *_ = given
    if is_dtensor(weight):
        settings = settings._replace(shard=shard_of_dtensor(given, settings, *group_position(group)), vocab_size=None)
        weight = local_rows("weight", weight, group)
    if bias is not None:
        bias = local_rows("bias", bias, group)
    device_type = hidden.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    settings = settings._replace(gradient=gradient_of(settings, autocast or hidden.dtype))
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    loss.check_constants(beside)
    divisor, values = _divisor(num_items, settings.reduction, hidden), (*_values(settings), *_values(head))
    operator = torch.ops.vocab_parallel_ce.loss_of_head
    tensors = hidden, weight, bias, labels, *_beside(beside), divisor
    found = operator(*tensors, NAMES[id(loss)], _name(group), autocast, wanted, *values)
    return _token_outputs(loss, found, settings), divisor, None if head.valid_tokens is None else found[N_OUTPUTS]


def _split(values: Sequence[Any], n: int) -> tuple[tuple[Any, ...], Sequence[Any]]:
    return tuple(values[:n]), values[n:]


def _record(record: Any, beside: tuple[Tensor | None, ...]) -> Any:
    return record(*beside[: len(record._fields)])


def _beside(given: Any) -> tuple[Tensor | None, ...]:
    """Return what stands beside the logits as an operator takes it."""
    return (*given, *(None,) * MOST_BESIDE)[:MOST_BESIDE]


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


def _options(loss: Loss, settings: Settings, *, class_weight: bool = False) -> Any:
    return loss.options(settings, None, class_weight=class_weight)


def _asked(loss: Loss, settings: Settings) -> dict[str, bool]:
    """Return the names of the outputs that are asked for, and whether they have a gradient."""
    return {"loss": True, **loss.outputs(_options(loss, settings))}


def _token_outputs(loss: Loss, found: Sequence[Tensor], settings: Settings) -> TokenOutputs:
    """Return the outputs that were asked for; an operator returns empty tensors for the others."""
    named, asked = zip(TokenOutputs._fields, found, strict=False), _asked(loss, settings)
    return TokenOutputs(**{name: tensor for name, tensor in named if name in asked})


# The operators.


def _or_empty(tensors: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in tensors)


def _two(stats: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the statistics of as many exchanges as an operator returns."""
    return (*stats, *(None,) * MOST_EXCHANGES)[:MOST_EXCHANGES]


def _of_exchanges(stats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the statistics of the exchanges that there are."""
    return tuple(each for each in stats if each.dim() == 3)


def _new_outputs(call: LogitsCall | HeadCall) -> TokenOutputs:
    settings, like, dtype = call.settings, call[0], call[0].dtype
    value = like.new_empty(call.rows if settings.reduction == "none" else (), dtype=compute_dtype(dtype))
    others = {name: like.new_empty(call.rows, dtype=output_dtype(name, dtype)) for name in _asked(call.loss, settings)}
    return TokenOutputs(**(others | {"loss": value}))


def _check(call: LogitsCall | HeadCall) -> None:
    """Check what is known while the call is traced."""
    if forward_ad._current_level >= 0:
        raise TypeError(checks.IN_TRANSFORM)
    check_settings(call.settings, _n_ranks(call))


def _n_ranks(call: LogitsCall | HeadCall) -> int:
    return group_position(group_named(call.group))[1]


def _new_statistics(call: LogitsCall | HeadCall) -> tuple[Tensor, ...]:
    options = _options(call.loss, call.settings, class_weight=call.given.class_weight is not None)
    shape = _n_ranks(call), math.prod(call.rows)  # Size.numel() would fix the number of rows
    dtype = compute_dtype(call[0].dtype)
    return tuple(call[0].new_empty(*shape, len(names), dtype=dtype) for names in call.loss.exchanges(options))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = LogitsCall.read(arguments)
    logits, group = given.logits, group_named(given.group)
    call, beside = plan_call(given.loss, logits, given.given, given.settings, group, given.num_items)
    outputs, stats, divisor = run.forward(call, walkable(logits), beside, given.rows)
    count = divisor if given.settings.reduction == "mean" else None  # an operator must not return what it was given
    return _or_empty((*outputs, *_two(stats), count), logits)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = LogitsCall.read(arguments)
    _check(call)
    checks.check_logits(call.logits)
    call.loss.check(call.given, call.logits, call.settings)
    count = None
    if call.settings.reduction == "mean":
        has_weights = call.loss.counts and call.given.class_weight is not None
        dtype = torch.int32 if call.loss.counts else torch.int64
        count = call.logits.new_empty(1, dtype=compute_dtype(call.logits.dtype) if has_weights else dtype)
    return _or_empty((*_new_outputs(call), *_two(_new_statistics(call)), count), call.logits)


def _gradient(*arguments: Any) -> Tensor:
    stats, others = _split(arguments, MOST_EXCHANGES)
    grads, others = _split(others, N_GRADS)
    call = LogitsCall.read(others)
    loss, logits, settings = call.loss, call.logits, call.settings._replace(check_labels=False)
    position = group_position(group_named(call.group))
    plan = plan_of(loss, logits, call.given, call.settings, *position)
    beside = loss.beside(call.given, logits, settings, plan.shard, *position)
    source, grad = source_and_new(logits)
    run.write_gradient(plan, source, beside, _of_exchanges(stats), call.num_items, GradOutputs(*grads), grad)
    return grad


def _fake_gradient(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[MOST_EXCHANGES + N_GRADS])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (*stats, count) = LogitsCall.read(inputs), output[N_OUTPUTS:]
    ctx.others = inputs[2 + MOST_BESIDE :]  # those that are no tensors
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*_constants(call, output))
    divisor = count if call.settings.reduction == "mean" else call.num_items
    ctx.save_for_backward(*stats, call.logits, *call.beside, divisor)


def _constants(call: LogitsCall | HeadCall, output: tuple[Tensor, ...]) -> list[Tensor]:
    """Return what an operator returns without a gradient."""
    asked = _asked(call.loss, call.settings)
    outputs = zip(TokenOutputs._fields, output, strict=False)
    return [tensor for name, tensor in outputs if not asked.get(name, False)] + list(output[N_OUTPUTS:])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    checks.check_no_double_backward()
    grad, (stats, inputs) = None, _split(ctx.saved_tensors, MOST_EXCHANGES)
    if any(of_output is not None for of_output in grads[:N_GRADS]):
        operator = torch.ops.vocab_parallel_ce.loss_of_logits_gradient
        grad = operator(*stats, *grads[:N_GRADS], *inputs, *ctx.others)
    return grad, *(None,) * (1 + MOST_BESIDE + len(ctx.others))


def _linear_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments)
    linear, inputs, beside = call.plan()
    gradients: Sequence[Tensor | None] = (None, None, None)
    stats: tuple[Tensor, ...] = ()
    with torch.autocast(call.hidden.device.type, enabled=False):
        if call.has_gradients:
            outputs, gradients = linear_pipeline.forward_with_gradients(linear, inputs, beside, call.wanted)
        else:
            outputs, stats = linear_pipeline.forward(linear, inputs, beside)
            # As many rows as labels: how many tokens are left out is known when it runs.
            n_rows = call.labels.numel()
            stats = tuple(F.pad(each, (0, 0, 0, n_rows - each.shape[1])) for each in stats)
    shaped = (v if v is None or v.dim() == 0 else v.view(call.labels.shape) for v in outputs)
    return _or_empty((*shaped, linear.overflow, *_two(stats), *_like_inputs(gradients, call)), call.hidden)


def _fake_linear_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments)
    _check(call)
    check_head_settings(call.settings, call.head._replace(chunk_tokens="auto"))  # a number may be symbolic
    overflow = None if call.head.valid_tokens is None else call.hidden.new_empty((), dtype=torch.float32)
    stats = () if call.has_gradients else _new_statistics(call)
    gradients = call.new_gradients() if call.has_gradients else (None, None, None)
    return _or_empty((*_new_outputs(call), overflow, *_two(stats), *gradients), call.hidden)


def _linear_gradient(*arguments: Any) -> tuple[Tensor, ...]:
    stats, others = _split(arguments, MOST_EXCHANGES)
    grads, others = _split(others, N_GRADS)
    call = HeadCall.read(others)
    linear, inputs, beside = call.plan()
    own, divisor = tuple(each[:, : linear.labels.shape[0]] for each in _of_exchanges(stats)), linear.call.divisor
    with torch.autocast(call.hidden.device.type, enabled=False):
        of_outputs = GradOutputs(*grads)
        gradients = linear_pipeline.backward(linear, inputs, beside, own, divisor, call.wanted, of_outputs)
    return _or_empty(_like_inputs(gradients, call), call.hidden)


def _fake_linear_gradient(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments[MOST_EXCHANGES + N_GRADS :])
    return _or_empty(call.new_gradients(), call.hidden)


def _like_inputs(gradients: Sequence[Tensor | None], call: HeadCall) -> tuple[Tensor | None, ...]:
    d_hidden, *others = gradients
    return None if d_hidden is None else d_hidden.view(call.hidden.shape), *others


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, n_tensors = HeadCall.read(inputs), 5 + MOST_BESIDE
    ctx.wanted, ctx.has_gradients, ctx.others = call.wanted, call.has_gradients, inputs[n_tensors:]
    overflow, *others = output[N_OUTPUTS:]
    stats, gradients = _split(others, MOST_EXCHANGES)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*_constants(call, output))
    ctx.save_for_backward(*((overflow, *gradients) if call.has_gradients else (*stats, *inputs[:n_tensors])))


def _linear_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    checks.check_no_double_backward()
    gradients: Sequence[Tensor | None] = (None, None, None)
    if ctx.has_gradients and grads[0] is not None:
        overflow, *others = ctx.saved_tensors
        factor = grads[0] * overflow if overflow.numel() else grads[0]
        # 0 stays 0 under inf, as in element_mul.
        gradients = [torch.where(grad == 0, 0.0, grad.float() * factor).to(grad.dtype) for grad in others]
    elif not ctx.has_gradients and any(of_output is not None for of_output in grads[:N_GRADS]):
        operator = torch.ops.vocab_parallel_ce.loss_of_head_gradient
        stats, inputs = _split(ctx.saved_tensors, MOST_EXCHANGES)
        gradients = operator(*stats, *grads[:N_GRADS], *inputs, *ctx.others)
    wanted = (grad if is_wanted else None for grad, is_wanted in zip(gradients, ctx.wanted, strict=True))
    return *wanted, *(None,) * (2 + MOST_BESIDE + len(ctx.others))


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
STATS = ", ".join(f"Tensor stats_{i}" for i in range(MOST_EXCHANGES))
SAVED = ", ".join([STATS, *(f"Tensor? grad_{name}" for name in GradOutputs._fields)])
BESIDE = ", ".join(f"Tensor? beside_{i}" for i in range(MOST_BESIDE))
CONSTANTS = f"{BESIDE}, Tensor? num_items, str loss, str? group"
LOGITS = f"Tensor logits, {CONSTANTS}, {_schema_of(Settings)}"
HEAD = (
    f"Tensor hidden, Tensor weight, Tensor? bias, Tensor labels, {CONSTANTS}, "
    f"ScalarType? autocast, bool[] wanted, {_schema_of(Settings)}, {_schema_of(HeadSettings)}"
)
GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias"
LOSS_OF_LOGITS = f"({LOGITS}) -> ({OUTPUTS}, {STATS}, Tensor count)"
_define("loss_of_logits", LOSS_OF_LOGITS, _forward, _fake_forward, _backward, _save)
_define("loss_of_logits_gradient", f"({SAVED}, {LOGITS}) -> Tensor", _gradient, _fake_gradient)
_define(
    "loss_of_head",
    f"({HEAD}) -> ({OUTPUTS}, Tensor overflow, {STATS}, {GRADIENTS})",
    _linear_forward,
    _fake_linear_forward,
    _linear_backward,
    _save_linear,
)
_define("loss_of_head_gradient", f"({SAVED}, {HEAD}) -> ({GRADIENTS})", _linear_gradient, _fake_linear_gradient)
