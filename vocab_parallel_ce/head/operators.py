"""The operators of a head and its loss, for ``torch.compile``; ``operators`` has those over logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.collectives import group_named, group_position
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.head import loops
from vocab_parallel_ce.head.plan import (
    Arguments,
    LinearCall,
    check_head_settings,
    gradient_of,
    plan_linear_call,
    shape_of_tokens,
    shard_of_dtensor,
    with_a_row,
)
from vocab_parallel_ce.losses.base import LOSSES, Loss
from vocab_parallel_ce.operators import (
    CONSTANTS,
    MOST_EXCHANGES,
    MOST_TARGETS,
    N_GRADS,
    N_OUTPUTS,
    N_SETTINGS,
    OUTPUTS,
    SAVED,
    STATS,
    as_two,
    check_constants,
    check_traced,
    constants_of,
    define,
    divisor_of,
    head_of,
    name_of,
    new_outputs,
    new_statistics,
    of_exchanges,
    or_empty,
    record_of,
    schema_of,
    settings_of,
    split,
    tensors_of,
    token_outputs,
    values_of,
)
from vocab_parallel_ce.options import HeadSettings, Settings
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Head


class HeadCall(NamedTuple):
    """Arguments of the operators over hidden states."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Any  # the loss's
    num_items: Tensor | None
    loss: Loss
    group: str | None
    autocast: torch.dtype | None
    wanted: loops.Wanted
    settings: Settings
    head: HeadSettings

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> HeadCall:
        tensors, others = split(arguments, 3)
        targets, (num_items, name, group, autocast, wanted, *records) = split(others, MOST_TARGETS)
        loss, settings, head = LOSSES[name], settings_of(records[:N_SETTINGS]), head_of(records[N_SETTINGS:])
        given = record_of(loss.HeadTargets, targets), num_items, loss, group, autocast, wanted, settings, head
        return cls._make((*tensors, *given))

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of an output of each token."""
        return shape_of_tokens(self.hidden, group_position(group_named(self.group))[1], self.head)

    @property
    def has_gradients(self) -> bool:
        """Whether forward computes gradients."""
        return self.settings.gradient == "in_forward" and any(self.wanted)

    def plan(self) -> tuple[LinearCall, Head, Any]:
        """Plan the call as under the autocast of the code that was compiled."""
        group = group_named(self.group)
        head = Head(self.hidden, self.weight, self.bias)
        given = Arguments(head, self.targets, group, self.num_items)
        with torch.autocast(self.hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return plan_linear_call(self.loss, given, self.settings, self.head)

    def new_gradients(self) -> Iterable[Tensor | None]:
        tensors = zip((self.hidden, self.weight, self.bias), self.wanted, strict=True)
        return (None if t is None or not is_wanted else t.new_empty(t.shape) for t, is_wanted in tensors)


def linear_losses(loss: Loss, given: Arguments, settings: Settings, head: HeadSettings) -> TokenOutputs:
    """Return the outputs of a head and its loss."""
    (hidden, weight, bias), targets, group, num_items, *_ = given
    if is_dtensor(weight):
        settings = settings._replace(vocab_size=shard_of_dtensor(given, settings, *group_position(group)))
        weight = local_rows("weight", weight, group)
    if bias is not None:
        bias = local_rows("bias", bias, group)
    if isinstance(weight, Tensor) and weight.dim() == 2:
        weight, bias, given, settings = with_a_row(weight, bias, given, settings, *group_position(group))
        targets = given.targets
    device_type = hidden.device.type
    autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    gradient = gradient_of(settings, head, autocast or hidden.dtype)
    if settings.asks_for_differentiable:
        gradient = "in_backward"  # compiled backward has a gradient of each output, be it 0
    settings = settings._replace(gradient=gradient)
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    check_constants(targets)
    divisor, values = divisor_of(num_items, settings.reduction, hidden), (*values_of(settings), *values_of(head))
    operator = torch.ops.vocab_parallel_ce.loss_of_head
    tensors = hidden, weight, bias, *tensors_of(targets), divisor
    found = operator(*tensors, loss.name, name_of(group), autocast, wanted, *values)
    return token_outputs(loss, found, settings)


# The operators.


def _linear_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments)
    linear, local, targets = call.plan()
    gradients: Sequence[Tensor | None] = (None, None, None)
    stats: tuple[Tensor, ...] = ()
    with torch.autocast(call.hidden.device.type, enabled=False):
        if call.has_gradients:
            outputs, gradients, _ = loops.forward_with_gradients(linear, local, targets, call.wanted)
        else:
            outputs, stats, _ = loops.forward(linear, local, targets)
            # As many rows as tokens: how many are left out is known when it runs.
            n_rows = math.prod(linear.shape)
            stats = tuple(F.pad(each, (0, 0, 0, n_rows - each.shape[1])) for each in stats)
    shaped = (v if v is None or v.dim() == 0 else v.view(*linear.shape, *v.shape[1:]) for v in outputs)
    return or_empty((*shaped, linear.overflow, *as_two(stats), *_like_inputs(gradients, call)), call.hidden)


def _fake_linear_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments)
    check_traced(call)
    check_head_settings(call.settings, call.head._replace(chunk_size="auto"))  # a number may be symbolic
    overflow = None if call.head.valid_tokens is None else call.hidden.new_empty((), dtype=torch.float32)
    stats = () if call.has_gradients else new_statistics(call)
    gradients = call.new_gradients() if call.has_gradients else (None, None, None)
    return or_empty((*new_outputs(call), overflow, *as_two(stats), *gradients), call.hidden)


def _linear_gradient(*arguments: Any) -> tuple[Tensor, ...]:
    stats, others = split(arguments, MOST_EXCHANGES)
    grads, others = split(others, N_GRADS)
    call = HeadCall.read(others)
    linear, local, targets = call.plan()
    own = tuple(each[:, : linear.n_rows] for each in of_exchanges(stats))
    with torch.autocast(call.hidden.device.type, enabled=False):
        of_outputs = GradOutputs(*grads)
        gradients = loops.backward(linear, local, targets, own, call.wanted, of_outputs)
    return or_empty(_like_inputs(gradients, call), call.hidden)


def _fake_linear_gradient(*arguments: Any) -> tuple[Tensor, ...]:
    call = HeadCall.read(arguments[MOST_EXCHANGES + N_GRADS :])
    return or_empty(call.new_gradients(), call.hidden)


def _like_inputs(gradients: Sequence[Tensor | None], call: HeadCall) -> tuple[Tensor | None, ...]:
    d_hidden, *others = gradients
    return None if d_hidden is None else d_hidden.view(call.hidden.shape), *others


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, n_tensors = HeadCall.read(inputs), 4 + MOST_TARGETS
    ctx.wanted, ctx.has_gradients, ctx.others = call.wanted, call.has_gradients, inputs[n_tensors:]
    overflow, *others = output[N_OUTPUTS:]
    stats, gradients = split(others, MOST_EXCHANGES)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*constants_of(call, output))
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
        stats, inputs = split(ctx.saved_tensors, MOST_EXCHANGES)
        gradients = operator(*stats, *grads[:N_GRADS], *inputs, *ctx.others)
    wanted = (grad if is_wanted else None for grad, is_wanted in zip(gradients, ctx.wanted, strict=True))
    return *wanted, *(None,) * (1 + MOST_TARGETS + len(ctx.others))


HEAD = (
    f"Tensor hidden, Tensor weight, Tensor? bias, {CONSTANTS}, "
    f"ScalarType? autocast, bool[] wanted, {schema_of(Settings)}, {schema_of(HeadSettings)}"
)
GRADIENTS = "Tensor d_hidden, Tensor d_weight, Tensor d_bias"
define(
    "loss_of_head",
    f"({HEAD}) -> ({OUTPUTS}, Tensor overflow, {STATS}, {GRADIENTS})",
    _linear_forward,
    _fake_linear_forward,
    _linear_backward,
    _save_linear,
)
define("loss_of_head_gradient", f"({SAVED}, {HEAD}) -> ({GRADIENTS})", _linear_gradient, _fake_linear_gradient)
