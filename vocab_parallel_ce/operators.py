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
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from vocab_parallel_ce import checks, run
from vocab_parallel_ce.collectives import group_named, group_position, summed_over_ranks
from vocab_parallel_ce.head.chunks import check_chunk_tokens
from vocab_parallel_ce.layout import compute_dtype, source_and_new, walkable
from vocab_parallel_ce.losses.base import LOSSES, Loss
from vocab_parallel_ce.options import GRADIENT_MODES, HeadSettings, Settings, bytes_of, check_settings
from vocab_parallel_ce.plan import has_weights, output_dtype, plan_call, plan_of
from vocab_parallel_ce.run import N_GRADS
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Tokens, check, check_requires_no_gradient, local, passed

MOST_TARGETS, MOST_EXCHANGES = 4, 2
N_SETTINGS, N_OUTPUTS = len(Settings._fields), len(TokenOutputs._fields)
TYPES: dict[Any, str] = {float: "float", int: "int", bool: "bool", str: "str", tuple[str, ...]: "str[]"}
TYPES |= {float | None: "float?", int | None: "int?", torch.dtype | None: "ScalarType?"}
TYPES |= {int | VocabShard | None: "int[]?", int | str: "SymInt"}  # values_of says how they are passed


class LogitsCall(NamedTuple):
    """Arguments of the operators over logits; an operator takes the settings one by one."""

    logits: Tensor
    targets: Any  # the loss's
    num_items: Tensor | None  # of the gradient: what the loss was divided by
    loss: Loss
    group: str | None
    settings: Settings

    @classmethod
    def read(cls, arguments: Sequence[Any]) -> LogitsCall:
        logits, (tensors, others) = arguments[0], split(arguments[1:], MOST_TARGETS)
        num_items, name, group, *settings = others
        loss = LOSSES[name]
        return cls(logits, record_of(loss.Targets, tensors), num_items, loss, group, settings_of(settings))

    @property
    def rows(self) -> torch.Size:
        """The shape of an output of each row."""
        return self.logits.shape[:-1]


# What the public functions call while they are traced.


def losses(
    loss: Loss, logits: Tensor, targets: Any, settings: Settings, group: Any, num_items: float | Tensor | None
) -> TokenOutputs:
    """Return the outputs of a loss over logits."""
    if logits.stride(-1) != 1 or logits.dim() > 4:
        logits = logits.contiguous()  # so that the gradient is laid out as empty_like says
    checks.check_choice("gradient", settings.gradient, GRADIENT_MODES)
    settings = settings._replace(gradient="out_of_place")
    check_constants(targets)
    divisor = divisor_of(num_items, settings.reduction, logits)
    operator = torch.ops.vocab_parallel_ce.loss_of_logits
    found = operator(logits, *tensors_of(targets), divisor, loss.name, name_of(group), *values_of(settings))
    return token_outputs(loss, found, settings)


def sum_over_ranks(part: Tensor, group: str) -> Tensor:
    """Return the sum of ``part`` over the ranks, as an operator."""
    total: Tensor = torch.ops.vocab_parallel_ce.sum_over_ranks(part, group)
    return total


def split(values: Sequence[Any], n: int) -> tuple[tuple[Any, ...], Sequence[Any]]:
    return tuple(values[:n]), values[n:]


def record_of(kind: Any, tensors: tuple[Tensor | None, ...]) -> Any:
    """Return targets as a loss takes them."""
    return kind(*tensors[: len(kind._fields)])


def tensors_of(targets: Any) -> tuple[Tensor | None, ...]:
    """Return targets as an operator takes them; what it has no room for is None."""
    assert all(target is None for target in targets[MOST_TARGETS:]), "MOST_TARGETS leaves one out"
    return (*targets, *(None,) * MOST_TARGETS)[:MOST_TARGETS]


def check_constants(targets: Any) -> None:
    """Check what an operator takes: it does not see whether a tensor requires a gradient."""
    for name, target, _ in passed(targets):
        check_requires_no_gradient(name, target)


def divisor_of(num_items: float | Tensor | None, reduction: str, like: Tensor) -> Tensor | None:
    """Return ``num_items`` on the device of ``like``, without waiting for it."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor) and reduction == "sum":
        checks.check_constant("num_items", num_items)
        return num_items.detach().to(like.device)  # the operator checks it
    checks.check_num_items(num_items, reduction, like)
    assert not isinstance(num_items, Tensor)
    return like.new_full((1,), num_items, dtype=compute_dtype(like.dtype))


def name_of(group: Any) -> str | None:
    return None if group is None else group.group_name


def values_of(record: Settings | HeadSettings) -> list[Any]:
    """Return the fields of a record as an operator takes them; it would take True for 1."""
    for name, default, value in zip(record._fields, type(record)(), record, strict=True):
        if isinstance(value, bool) != isinstance(default, bool):
            expected = "a bool" if isinstance(default, bool) else "no bool"
            raise TypeError(f"{name}: expected {expected}, got {value!r}")
    named = record._asdict()
    if isinstance(record, HeadSettings):
        chunk = record.chunk_size  # passed as tokens, bytes below 0, or 0 for "auto"
        if not isinstance(chunk, str):
            check_chunk_tokens(chunk)
        named["chunk_size"] = chunk if not isinstance(chunk, str) else 0 if chunk == "auto" else -bytes_of(chunk)
    elif record.vocab_size is not None:
        size = record.vocab_size
        named["vocab_size"] = list(size) if isinstance(size, VocabShard) else [size]
    return list(named.values())


def settings_of(values: Sequence[Any]) -> Settings:
    """Return the settings of :func:`values_of`."""
    settings = Settings(*values)
    settings = settings._replace(outputs=tuple(settings.outputs))
    if settings.vocab_size is None:
        return settings
    size: Any = settings.vocab_size
    return settings._replace(vocab_size=VocabShard(*size) if len(size) > 1 else size[0])


def head_of(values: Sequence[Any]) -> HeadSettings:
    """Return the settings of a head of :func:`values_of`; a number of tokens may be symbolic."""
    head = HeadSettings(*values)
    size: Any = head.chunk_size
    return head._replace(chunk_size=size if size > 0 else "auto" if size == 0 else f"{-size}B")


def _options(loss: Loss, settings: Settings, *, class_weight: bool = False) -> Any:
    return loss.options(settings, None, class_weight=class_weight)


def outputs_asked(loss: Loss, settings: Settings) -> dict[str, bool]:
    """Return the names of the outputs that are asked for, and whether they have a gradient.

    They have none alongside a gradient that forward computes. Calls that ask for one there are eager or in_backward.
    """
    outputs, later = loss.outputs(_options(loss, settings)), settings.gradient != "in_forward"
    return {"loss": True, **{name: has_gradient and later for name, has_gradient in outputs.items()}}


def token_outputs(loss: Loss, found: Sequence[Tensor], settings: Settings) -> TokenOutputs:
    """Return the outputs that were asked for; an operator returns empty tensors for the others."""
    named, asked = zip(TokenOutputs._fields, found, strict=False), outputs_asked(loss, settings)
    return TokenOutputs(**{name: tensor for name, tensor in named if name in asked})


# The operators.


def or_empty(tensors: Iterable[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if tensor is None else tensor for tensor in tensors)


def as_two(stats: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the statistics of as many exchanges as an operator returns."""
    return (*stats, *(None,) * MOST_EXCHANGES)[:MOST_EXCHANGES]


def of_exchanges(stats: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the statistics of the exchanges that there are."""
    return tuple(each for each in stats if each.dim() == 3)


def new_outputs(call: Any) -> TokenOutputs:
    settings, like, dtype = call.settings, call[0], call[0].dtype
    shape = (*call.rows, *call.loss.row_shape(_options(call.loss, settings)))
    value = like.new_empty(shape if settings.reduction == "none" else (), dtype=compute_dtype(dtype))
    others = {
        name: like.new_empty(call.rows, dtype=output_dtype(name, dtype)) for name in outputs_asked(call.loss, settings)
    }
    return TokenOutputs(**(others | {"loss": value}))


def check_traced(call: Any) -> None:
    """Check what is known while the call is traced."""
    if forward_ad._current_level >= 0:
        raise TypeError(checks.IN_TRANSFORM)
    check_settings(call.settings, _n_ranks(call))


def _n_ranks(call: Any) -> int:
    return group_position(group_named(call.group))[1]


def new_statistics(call: Any) -> tuple[Tensor, ...]:
    options = _options(call.loss, call.settings, class_weight=has_weights(call.targets))
    shape = _n_ranks(call), math.prod(call.rows)  # Size.numel() would fix the number of rows
    dtype = compute_dtype(call[0].dtype)
    return tuple(call[0].new_empty(*shape, len(names), dtype=dtype) for names in call.loss.exchanges(options))


def _forward(*arguments: Any) -> tuple[Tensor, ...]:
    given = LogitsCall.read(arguments)
    logits, group = given.logits, group_named(given.group)
    call, targets = plan_call(given.loss, logits, given.targets, given.settings, group, given.num_items)
    outputs, stats, divisor = run.forward(call, walkable(logits), targets, given.rows)
    count = divisor if given.settings.reduction == "mean" else None  # an operator must not return what it was given
    return or_empty((*outputs, *as_two(stats), count), logits)


def _fake_forward(*arguments: Any) -> tuple[Tensor, ...]:
    call = LogitsCall.read(arguments)
    check_traced(call)
    checks.check_logits(call.logits)
    tokens = Tokens(call.logits, "logits", call.rows)
    check(call.targets, tokens, call.settings)
    call.loss.check(call.targets, tokens, call.settings)
    count = None
    if call.settings.reduction == "mean":
        is_weighted = call.loss.counts and has_weights(call.targets)
        dtype = torch.int32 if call.loss.counts else torch.int64
        count = call.logits.new_empty(1, dtype=compute_dtype(call.logits.dtype) if is_weighted else dtype)
    return or_empty((*new_outputs(call), *as_two(new_statistics(call)), count), call.logits)


def _gradient(*arguments: Any) -> Tensor:
    stats, others = split(arguments, MOST_EXCHANGES)
    grads, others = split(others, N_GRADS)
    call = LogitsCall.read(others)
    loss, logits, settings = call.loss, call.logits, call.settings._replace(check_labels=False)
    position = group_position(group_named(call.group))
    plan = plan_of(loss, logits, call.targets, call.settings, *position)
    targets = local(call.targets, Tokens(logits, "logits", call.rows), settings, plan)
    source, grad = source_and_new(logits)
    run.write_gradient(plan, source, targets, of_exchanges(stats), call.num_items, GradOutputs(*grads), grad)
    return grad


def _fake_gradient(*arguments: Any) -> Tensor:
    return torch.empty_like(arguments[MOST_EXCHANGES + N_GRADS])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    call, (*stats, count) = LogitsCall.read(inputs), output[N_OUTPUTS:]
    ctx.others = inputs[2 + MOST_TARGETS :]  # those that are no tensors
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*constants_of(call, output))
    divisor = count if call.settings.reduction == "mean" else call.num_items
    ctx.save_for_backward(*stats, call.logits, *inputs[1 : 1 + MOST_TARGETS], divisor)


def constants_of(call: Any, output: tuple[Tensor, ...]) -> list[Tensor]:
    """Return what an operator returns without a gradient."""
    asked = outputs_asked(call.loss, call.settings)
    outputs = zip(TokenOutputs._fields, output, strict=False)
    return [tensor for name, tensor in outputs if not asked.get(name, False)] + list(output[N_OUTPUTS:])


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    checks.check_no_double_backward()
    grad, (stats, inputs) = None, split(ctx.saved_tensors, MOST_EXCHANGES)
    if any(of_output is not None for of_output in grads[:N_GRADS]):
        operator = torch.ops.vocab_parallel_ce.loss_of_logits_gradient
        grad = operator(*stats, *grads[:N_GRADS], *inputs, *ctx.others)
    return grad, *(None,) * (1 + MOST_TARGETS + len(ctx.others))


def schema_of(record: Any) -> str:
    """Return the fields of a record of settings as arguments of an operator."""
    return ", ".join(f"{TYPES[type_]} {name}" for name, type_ in get_type_hints(record).items())


def define(name: str, schema: str, function: Any, fake: Any, *autograd: Any) -> None:
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
TARGETS = ", ".join(f"Tensor? target_{i}" for i in range(MOST_TARGETS))
CONSTANTS = f"{TARGETS}, Tensor? num_items, str loss, str? group"
LOGITS = f"Tensor logits, {CONSTANTS}, {schema_of(Settings)}"
LOSS_OF_LOGITS = f"({LOGITS}) -> ({OUTPUTS}, {STATS}, Tensor count)"
define("loss_of_logits", LOSS_OF_LOGITS, _forward, _fake_forward, _backward, _save)
define("loss_of_logits_gradient", f"({SAVED}, {LOGITS}) -> Tensor", _gradient, _fake_gradient)
define(
    "sum_over_ranks",
    "(Tensor part, str group) -> Tensor",
    lambda part, group: summed_over_ranks(part, group_named(group)),
    lambda part, group: torch.empty_like(part, memory_format=torch.contiguous_format),
)
