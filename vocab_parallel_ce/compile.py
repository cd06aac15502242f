"""Custom operators that ``torch.compile`` traces in place of the eager path.

    loss_of_logits           inputs, targets, num_items, constants, chunk_size -> outputs, statistics, divisor
    loss_of_logits_gradient  statistics, gradients of the outputs, the same -> gradients of the inputs
    loss_of_head, loss_of_head_gradient: the same of hidden states, a weight and a bias

An operator hides everything from the compiler: checks, kernels, the collective. So a compiled call does what an eager
one does, bit for bit, and ``fullgraph=True`` holds. Operators overwrite nothing. Where eager backward overwrites the
logits, a compiled one writes the gradient into a new tensor: Inductor copies a tensor that forward has saved before it
lets an operator of backward overwrite it.

Eager calls do not come here. This module is imported when the first call is compiled.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import math
from collections.abc import Iterable
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_scalar
from torch.utils import _pytree as pytree

from vocab_parallel_ce import checks, run
from vocab_parallel_ce.collectives import group_named, group_position, summed_over_ranks
from vocab_parallel_ce.head import loops
from vocab_parallel_ce.head.arguments import (
    Arguments,
    autocast_dtype,
    check_gradient,
    mode_of,
    shape_of_tokens,
    with_local_rows,
)
from vocab_parallel_ce.head.plan import LinearCall, plan_linear_call
from vocab_parallel_ce.head.products import without_autocast
from vocab_parallel_ce.layout import compute_dtype, source_and_new, walkable
from vocab_parallel_ce.losses.base import LOSSES, Loss
from vocab_parallel_ce.options import (
    DEFAULTS,
    GRADIENT_MODES,
    HEAD_FIELDS,
    HeadOptions,
    Settings,
    TeacherOptions,
    check_settings,
)
from vocab_parallel_ce.plan import Plan, plan_call, plan_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Head, Tokens, check, present
from vocab_parallel_ce.versions import __version__


class Traced(NamedTuple):
    """A call that is compiled."""

    inputs: list[Tensor]  # logits; or hidden states, weight, and the bias if there is one
    targets: Any  # the loss's
    num_items: Any  # the caller's; of an operator a tensor or None, and of its gradient what the loss was divided by
    loss: Loss
    group: Any
    settings: Settings
    autocast: torch.dtype | None = None  # of the code that was compiled
    wanted: Any = (True,)  # which inputs get a gradient; of a head three, whether there is a bias or not

    @classmethod
    def read(cls, inputs: list[Tensor], targets: Any, num_items: Any, constants: str, chunk_size: Any) -> Traced:
        """Return the call of an operator's arguments."""
        loss, group, settings, autocast, wanted = constants_of(constants)
        if chunk_size is not None:
            settings = settings._replace(head=dataclasses.replace(settings.head, chunk_size=chunk_size))
        call = cls(inputs, targets, num_items, loss, group_named(group), settings, autocast, wanted)
        return call._replace(targets=(loss.HeadTargets if call.is_head else loss.Targets)(*targets))

    def constants(self) -> tuple[Any, ...]:
        """Return an operator's arguments that are no tensors: a text, and the tokens of a chunk, maybe symbolic."""
        group = None if self.group is None else self.group.group_name
        head = {name: getattr(self.settings.head, name) for name in HEAD_FIELDS}
        chunk_size = None if isinstance(head["chunk_size"], str) else head.pop("chunk_size")
        settings = self.settings._asdict() | {"head": head}
        # The release: the compiler keeps graphs on disk, and another release's gradient takes other arguments.
        return repr(_literal((__version__, self.loss.name, group, settings, self.autocast, self.wanted))), chunk_size

    @property
    def is_head(self) -> bool:
        return len(self.wanted) > 1

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.is_head:
            return self.inputs[0].shape[:-1]
        return shape_of_tokens(self.inputs[0], group_position(self.group)[1], self.settings.head)

    @property
    def has_gradients(self) -> bool:
        """Whether forward computes gradients: then only the loss has one."""
        return self.settings.gradient == "in_forward" and any(self.wanted)

    def fake_plan(self) -> Plan:
        """Return a plan that allocates and launches nothing: of one column, as their number may be symbolic."""
        if forward_ad._current_level >= 0:
            raise TypeError(checks.IN_TRANSFORM)
        settings = self.settings._replace(vocab_size=None, gradient="out_of_place", impl="reference", head=DEFAULTS)
        like = self.inputs[0].new_empty(1, 1, device="cpu")
        plan = plan_of(self.loss, like, self.targets, settings, *group_position(self.group))
        launchers = plan.launchers._replace(outputs=lambda *_: None)
        return plan._replace(launchers=launchers, mean_over="" if self.is_head else plan.mean_over)

    def plan_head(self) -> tuple[LinearCall, Head, Any]:
        """Plan the call of a head, as under the autocast of the code that was compiled."""
        arguments = Arguments(Head(*self.inputs), self.targets, self.group, self.num_items)
        with torch.autocast(self.inputs[0].device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return plan_linear_call(self.loss, arguments, self.settings)


def _literal(value: Any) -> Any:
    """Return what :func:`ast.literal_eval` reads: of Python's types, not NumPy's or an enumeration's, and not symbolic.

    Where the compiler would take a number for any number, the graph becomes one of this number.
    """
    if isinstance(value, tuple | list):
        return tuple([_literal(each) for each in value])
    if isinstance(value, dict):
        return {name: _literal(each) for name, each in value.items()}
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, str):
        return "".join([value])
    if value is None or isinstance(value, bool):
        return value
    return guard_scalar(int(value) if isinstance(value, Integral | torch.SymInt) else float(value))


@functools.lru_cache(maxsize=1024)
def constants_of(text: str) -> tuple[Any, ...]:
    """Return what :meth:`Traced.constants` wrote, with the loss of its name."""
    _, loss, group, settings, autocast, wanted = ast.literal_eval(text)
    head, size = settings["head"], settings["vocab_size"]
    head["logits_dtype"] = _dtype_named(head["logits_dtype"])
    teacher = settings["teacher"]
    settings["teacher"] = None if teacher is None else TeacherOptions(*teacher)
    settings |= {"head": HeadOptions(**head), "vocab_size": VocabShard(*size) if isinstance(size, tuple) else size}
    return LOSSES[loss], group, Settings(**settings), _dtype_named(autocast), wanted


def _dtype_named(name: Any) -> torch.dtype | None:
    return None if name is None else getattr(torch, name.removeprefix("torch."))


# What the public functions call while they are traced.


def losses(
    loss: Loss, logits: Tensor, targets: Any, settings: Settings, group: Any, num_items: float | Tensor | None
) -> TokenOutputs:
    """Return the outputs of a loss over logits."""
    if logits.stride(-1) != 1 or logits.dim() > 4:
        logits = logits.contiguous()  # so that the gradient is laid out as empty_like says
    checks.check_choice("gradient", settings.gradient, GRADIENT_MODES)
    settings = settings._replace(gradient="out_of_place")
    return _outputs(Traced([logits], targets, num_items, loss, group, settings))


def linear_losses(loss: Loss, arguments: Arguments, settings: Settings) -> TokenOutputs:
    """Return the outputs of a head and its loss."""
    group, position = arguments.group, group_position(arguments.group)
    check_gradient(settings, knows_grad_output=False)
    arguments, settings = with_local_rows(arguments, settings, position)
    hidden, weight, bias = arguments.head
    autocast = autocast_dtype(hidden)
    gradient, scales = mode_of(arguments, settings, autocast or hidden.dtype)
    # Compiled backward has a gradient of each output, be it 0, and no scale of forward's.
    waits = settings.asks_for_differentiable or scales
    settings = settings._replace(gradient="in_backward" if waits else gradient)
    inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
    wanted = tuple([torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)])
    return _outputs(Traced(inputs, arguments.targets, arguments.num_items, loss, group, settings, autocast, wanted))


def _outputs(call: Traced) -> TokenOutputs:
    """Call an operator, and return the outputs by their names."""
    loss, settings = call.loss, call.settings
    # Here, since text has only numbers, bools and names, and a fake does not see what requires a gradient.
    check_settings(settings, group_position(call.group)[1])
    for name, target, _ in present(call.targets):
        checks.check_requires_no_gradient(name, target)
    divisor = divisor_of(call.num_items, settings.reduction, call.inputs[0])
    names = loss.outputs(loss.options(settings, None, class_weight=False))
    operators = torch.ops.vocab_parallel_ce
    operator = operators.loss_of_head if call.is_head else operators.loss_of_logits
    values = operator(call.inputs, list(call.targets), divisor, *call.constants())
    return TokenOutputs(**dict(zip(("loss", *names), values, strict=False)))


def divisor_of(num_items: float | Tensor | None, reduction: str, like: Tensor) -> Tensor | None:
    """Return ``num_items`` on the device of ``like``, without waiting for it."""
    if num_items is None:
        return None
    if isinstance(num_items, Tensor) and reduction == "sum":
        checks.check_requires_no_gradient("num_items", num_items)
        return num_items.detach().to(like.device)  # the operator checks it
    checks.check_num_items(num_items, reduction, like)
    assert not isinstance(num_items, Tensor)
    return like.new_full((1,), num_items, dtype=compute_dtype(like.dtype))


# The operators.


def _present(tensors: Iterable[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _forward(*arguments: Any) -> list[Tensor]:
    traced = Traced.read(*arguments)
    (logits,), settings = traced.inputs, traced.settings
    call, targets = plan_call(traced.loss, logits, traced.targets, settings, traced.group, traced.num_items)
    outputs, (divisor, *stats) = run.forward(call, walkable(logits), targets)
    count = divisor if settings.reduction == "mean" else None  # an operator must not return one of its arguments
    return _present([*outputs, *stats, count])


def _forward_of_head(*arguments: Any) -> list[Tensor]:
    call = Traced.read(*arguments)
    linear, local_head, targets = call.plan_head()
    wanted = call.wanted if call.has_gradients else loops.NOTHING
    with without_autocast(local_head.hidden.device):
        outputs, gradients, stats, _ = loops.forward(linear, local_head, targets, wanted)
    if call.has_gradients:
        return _present([*outputs, linear.overflow, *_like_inputs(gradients, call)])
    # As many rows as tokens: how many are left out is known when it runs.
    n_rows = math.prod(call.shape)
    return _present([*outputs, *[F.pad(each, (0, 0, 0, n_rows - each.shape[1])) for each in stats]])


def _fake_forward(*arguments: Any) -> list[Tensor]:
    call = Traced.read(*arguments)
    like, targets = call.inputs[0], call.targets
    if not call.is_head:
        tokens = Tokens(like, "logits", call.shape)
        checks.check_logits(like)
        check(targets, tokens)
        call.loss.check(targets, tokens, call.settings)
    plan = call.fake_plan()
    outputs = run.new_outputs(plan, call.shape, like)
    stats = run.new_statistics(plan, math.prod(call.shape), like)
    outputs, divisor = run.fill_outputs(plan, stats, targets, None, outputs)
    if not (call.is_head and call.has_gradients):
        return _present([*outputs, *stats, divisor])
    overflow = None if call.settings.head.valid_tokens is None else like.new_empty((), dtype=torch.float32)
    return _present([*outputs, overflow, *_new_gradients(call)])


def _gradient(stats: list[Tensor], grads: list[Tensor | None], *arguments: Any) -> list[Tensor]:
    traced = Traced.read(*arguments)
    (logits,), settings = traced.inputs, traced.settings._replace(check_labels=False)
    call, targets = plan_call(traced.loss, logits, traced.targets, settings, traced.group)
    source, grad = source_and_new(logits)
    found, of_outputs = (traced.num_items, *stats), run.with_loss(GradOutputs(*grads), grad)
    run.fill_gradient(call.plan, source, found, targets, of_outputs, grad)
    return [grad]


def _gradient_of_head(stats: list[Tensor], grads: list[Tensor | None], *arguments: Any) -> list[Tensor]:
    call = Traced.read(*arguments)
    call = call._replace(settings=call.settings._replace(check_labels=False))
    linear, local_head, targets = call.plan_head()
    row_stats = tuple(each[:, : linear.n_rows] for each in stats)
    with without_autocast(local_head.hidden.device):
        gradients = loops.backward(linear, local_head, targets, row_stats, call.wanted, GradOutputs(*grads))
    return _present(_like_inputs(gradients, call))


def _fake_gradient(stats: list[Tensor], grads: list[Tensor | None], *arguments: Any) -> list[Tensor]:
    return _new_gradients(Traced.read(*arguments))


def _like_inputs(gradients: loops.Gradients, call: Traced) -> list[Tensor | None]:
    d_hidden, *others = gradients
    return [None if d_hidden is None else d_hidden.view(call.inputs[0].shape), *others]


def _new_gradients(call: Traced) -> list[Tensor]:
    inputs = [each for each, is_wanted in zip(call.inputs, call.wanted, strict=False) if is_wanted]
    return [each.new_empty(each.shape) if call.is_head else torch.empty_like(each) for each in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    call = Traced.read(*inputs)
    plan, (tensors, targets, num_items, *ctx.constants) = call.fake_plan(), inputs
    ctx.call = call._replace(inputs=[], targets=None, num_items=None)
    ctx.names, ctx.nothing = ("loss", *plan.other_outputs), [_nothing(each) for each in inputs]
    outputs, others = zip(ctx.names, output, strict=False), output[len(ctx.names) :]
    constants = plan.other_outputs if call.has_gradients else plan.constants
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(each for name, each in outputs if name in constants), *others)
    if call.has_gradients:
        n = len(others) - sum(call.wanted)
        saved: Any = others[:n], others[n:]
    else:
        n = len(plan.launchers.widths)
        saved = others[:n], tensors, targets, others[n] if others[n:] else num_items
    leaves, ctx.structure = pytree.tree_flatten(saved)
    ctx.save_for_backward(*leaves)


def _nothing(argument: Any) -> Any:
    """Return the gradient of an argument that has none: PyTorch takes a list of tensors for as many arguments."""
    is_tensors = isinstance(argument, list) and all(isinstance(each, Tensor) for each in argument)
    return [None] * len(argument) if is_tensors else None


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise checks.recorded_backward()
    first, *saved = pytree.tree_unflatten(list(ctx.saved_tensors), ctx.structure)
    used = {name: grad for name, grad in zip(ctx.names, grads, strict=False) if grad is not None}
    if not used:
        return tuple(ctx.nothing)
    if ctx.call.has_gradients:
        factor = used["loss"] * first[0] if first else used["loss"]
        # 0 stays 0 under inf, as in element_mul.
        gradients = [torch.where(grad == 0, 0.0, grad.float() * factor).to(grad.dtype) for grad in saved[0]]
    else:
        operators = torch.ops.vocab_parallel_ce
        operator = operators.loss_of_head_gradient if ctx.call.is_head else operators.loss_of_logits_gradient
        gradients = operator(first, list(GradOutputs(**used)), *saved, *ctx.constants)
    each, (inputs, *others) = iter(gradients), ctx.nothing
    return [next(each) if is_wanted else None for is_wanted in ctx.call.wanted[: len(inputs)]], *others


def define(name: str, schema: str, function: Any, fake: Any, *autograd: Any) -> None:
    library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"vocab_parallel_ce::{name}", fake, lib=library)
    if autograd:
        backward, save = autograd
        torch.library.register_autograd(f"vocab_parallel_ce::{name}", backward, setup_context=save, lib=library)


library = torch.library.Library("vocab_parallel_ce", "DEF")
ARGUMENTS = "Tensor[] inputs, Tensor?[] targets, Tensor? num_items, str constants, SymInt? chunk_size"
SAVED = f"Tensor[] stats, Tensor?[] grads, {ARGUMENTS}"
for name, forward, gradient in (
    ("loss_of_logits", _forward, _gradient),
    ("loss_of_head", _forward_of_head, _gradient_of_head),
):
    define(name, f"({ARGUMENTS}) -> Tensor[]", forward, _fake_forward, _backward, _save)
    define(f"{name}_gradient", f"({SAVED}) -> Tensor[]", gradient, _fake_gradient)
define(
    "sum_over_ranks",
    "(Tensor part, str group) -> Tensor",
    lambda part, group: summed_over_ranks(part, group_named(group)),
    lambda part, group: torch.empty_like(part, memory_format=torch.contiguous_format),
)
