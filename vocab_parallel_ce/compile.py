"""Custom operators that ``torch.compile`` traces in place of the eager path.

    loss_of_logits           inputs, targets, num_items, settings -> outputs, statistics, divisor
    loss_of_logits_gradient  statistics, gradients of the outputs, the same -> gradients of the inputs
    loss_of_head, loss_of_head_gradient: the same of hidden states, a weight and a bias

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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from vocab_parallel_ce import checks, run
from vocab_parallel_ce.collectives import group_named, group_position, summed_over_ranks
from vocab_parallel_ce.head import loops
from vocab_parallel_ce.head.arguments import Arguments, with_local_rows
from vocab_parallel_ce.head.plan import LinearCall, autocast_dtype, plan_linear_call, shape_of_tokens
from vocab_parallel_ce.head.products import without_autocast
from vocab_parallel_ce.head.settings import check_head_settings, gradient_of, rounded_dtypes
from vocab_parallel_ce.layout import compute_dtype, source_and_new, walkable
from vocab_parallel_ce.losses.base import LOSSES, Loss
from vocab_parallel_ce.options import GRADIENT_MODES, HeadSettings, Settings, bytes_of, check_settings
from vocab_parallel_ce.plan import Plan, plan_call, plan_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Head, Tokens, check, present

# What the public functions call while they are traced.


def losses(
    loss: Loss, logits: Tensor, targets: Any, settings: Settings, group: Any, num_items: float | Tensor | None
) -> TokenOutputs:
    """Return the outputs of a loss over logits."""
    if logits.stride(-1) != 1 or logits.dim() > 4:
        logits = logits.contiguous()  # so that the gradient is laid out as empty_like says
    checks.check_choice("gradient", settings.gradient, GRADIENT_MODES)
    settings = settings._replace(gradient="out_of_place")
    return _outputs(torch.ops.vocab_parallel_ce.loss_of_logits, loss, [logits], targets, num_items, group, settings)


def linear_losses(loss: Loss, arguments: Arguments, settings: Settings, head: HeadSettings) -> TokenOutputs:
    """Return the outputs of a head and its loss."""
    group, position = arguments.group, group_position(arguments.group)
    is_symbolic = isinstance(head.chunk_size, torch.SymInt)  # in torch.export: no int to the checks
    check_head_settings(settings, head._replace(chunk_size="auto") if is_symbolic else head)
    arguments, settings = with_local_rows(arguments, settings, position)
    hidden, weight, bias = arguments.head
    autocast = autocast_dtype(hidden)
    gradient = gradient_of(settings, head, rounded_dtypes(autocast or hidden.dtype, arguments.head))
    if settings.asks_for_differentiable:
        gradient = "in_backward"  # compiled backward has a gradient of each output, be it 0
    settings = settings._replace(gradient=gradient)
    inputs = [hidden, weight] if bias is None else [hidden, weight, bias]
    wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias)]
    operator, constants = torch.ops.vocab_parallel_ce.loss_of_head, (autocast, wanted, *values_of_head(head))
    return _outputs(operator, loss, inputs, arguments.targets, arguments.num_items, group, settings, *constants)


def _outputs(
    operator: Any,
    loss: Loss,
    inputs: list[Tensor],
    targets: Any,
    num_items: float | Tensor | None,
    group: Any,
    settings: Settings,
    *head: Any,
) -> TokenOutputs:
    """Call an operator, and return the outputs by their names."""
    # Here, since the dispatcher makes numbers of bools, and a fake does not see what requires a gradient.
    check_settings(settings, group_position(group)[1])
    for name, target, _ in present(targets):
        checks.check_requires_no_gradient(name, target)
    divisor = divisor_of(num_items, settings.reduction, inputs[0])
    constants = loss.name, None if group is None else group.group_name, *values_of(settings), *head
    values = operator(inputs, list(targets), divisor, *constants)
    names = loss.outputs(loss.options(settings, None, class_weight=False))
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


# Settings as operators take them: one by one.

N_SETTINGS = len(Settings._fields)
TYPES: dict[Any, str] = {
    float: "float",
    int: "int",
    bool: "bool",
    bool | str: "bool?",
    str: "str",
    tuple[str, ...]: "str[]",
}
TYPES |= {float | None: "float?", int | None: "int?", int | str | None: "int?", torch.dtype | None: "ScalarType?"}
TYPES |= {int | VocabShard | None: "int[]?", int | str: "SymInt"}  # a number of tokens may be symbolic


def schema_of(record: Any) -> str:
    """Return the fields of a record of settings as arguments of an operator."""
    return ", ".join(f"{TYPES[type_]} {name}" for name, type_ in get_type_hints(record).items())


def values_of(settings: Settings) -> tuple[Any, ...]:
    """Return the fields of checked settings: a shard of the vocabulary is three numbers, a size one, "auto" is None."""
    size: Any = settings.vocab_size
    if size is not None:
        size = list(size) if isinstance(size, VocabShard) else [size]
    check_labels: Any = None if settings.check_labels == "auto" else settings.check_labels
    return settings._replace(vocab_size=size, check_labels=check_labels)


def settings_of(values: Sequence[Any]) -> Settings:
    """Return the settings of :func:`values_of`."""
    settings = Settings(*values)
    size: Any = settings.vocab_size
    if size is not None:
        size = VocabShard(*size) if len(size) > 1 else size[0]
    check_labels = "auto" if settings.check_labels is None else settings.check_labels
    return settings._replace(outputs=tuple(settings.outputs), vocab_size=size, check_labels=check_labels)


def values_of_head(head: HeadSettings) -> tuple[Any, ...]:
    """Return the fields of checked settings of a head: bytes of a chunk are below 0, and "auto" is 0."""
    size = head.chunk_size
    return head._replace(chunk_size=size if not isinstance(size, str) else 0 if size == "auto" else -bytes_of(size))


def head_of(values: Sequence[Any]) -> HeadSettings:
    """Return the settings of :func:`values_of_head`."""
    head = HeadSettings(*values)
    size: Any = head.chunk_size
    return head._replace(chunk_size=size if size > 0 else "auto" if size == 0 else f"{-size}B")


# The operators.


class Traced(NamedTuple):
    """The arguments of an operator."""

    inputs: list[Tensor]  # logits; or hidden states, weight, and the bias if there is one
    targets: Any  # the loss's
    num_items: Tensor | None  # of the gradient over logits: what the loss was divided by
    loss: Loss
    group: Any
    settings: Settings
    autocast: torch.dtype | None = None  # of the code that was compiled
    wanted: Any = (True,)  # which inputs get a gradient; of a head three, whether there is a bias or not
    head: HeadSettings | None = None

    @classmethod
    def read(cls, inputs: list[Tensor], targets: Any, num_items: Any, name: str, group: Any, *values: Any) -> Traced:
        loss, head = LOSSES[name], values[N_SETTINGS:]
        targets = (loss.HeadTargets if head else loss.Targets)(*targets)
        call = cls(inputs, targets, num_items, loss, group_named(group), settings_of(values[:N_SETTINGS]))
        if not head:
            return call
        autocast, wanted, *others = head
        return call._replace(autocast=autocast, wanted=tuple(wanted), head=head_of(others))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tokens."""
        if self.head is None:
            return self.inputs[0].shape[:-1]
        return shape_of_tokens(self.inputs[0], group_position(self.group)[1], self.head)

    @property
    def has_gradients(self) -> bool:
        """Whether forward computes gradients: then only the loss has one."""
        return self.settings.gradient == "in_forward" and any(self.wanted)

    def fake_plan(self) -> Plan:
        """Return a plan that allocates and launches nothing: of one column, as their number may be symbolic."""
        if forward_ad._current_level >= 0:
            raise TypeError(checks.IN_TRANSFORM)
        settings = self.settings._replace(vocab_size=None, gradient="out_of_place", impl="reference")
        like = self.inputs[0].new_empty(1, 1, device="cpu")
        plan = plan_of(self.loss, like, self.targets, settings, *group_position(self.group))
        launchers = plan.launchers._replace(outputs=lambda *_: None)
        return plan._replace(launchers=launchers, mean_over=plan.mean_over if self.head is None else "")

    def plan_head(self) -> tuple[LinearCall, Head, Any]:
        """Plan the call of a head, as under the autocast of the code that was compiled."""
        assert self.head is not None
        arguments = Arguments(Head(*self.inputs), self.targets, self.group, self.num_items)
        with torch.autocast(self.inputs[0].device.type, dtype=self.autocast, enabled=self.autocast is not None):
            return plan_linear_call(self.loss, arguments, self.settings, self.head)


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
    others: list[Tensor | None]
    with without_autocast(local_head.hidden.device):
        if call.has_gradients:
            outputs, gradients, _ = loops.forward_with_gradients(linear, local_head, targets, call.wanted)
            others = [linear.overflow, *_like_inputs(gradients, call)]
        else:
            outputs, stats, _ = loops.forward(linear, local_head, targets)
            # As many rows as tokens: how many are left out is known when it runs.
            n_rows = math.prod(call.shape)
            others = [F.pad(each, (0, 0, 0, n_rows - each.shape[1])) for each in stats]
    return _present([*outputs, *others])


def _fake_forward(*arguments: Any) -> list[Tensor]:
    call = Traced.read(*arguments)
    like, targets = call.inputs[0], call.targets
    if call.head is None:
        tokens = Tokens(like, "logits", call.shape)
        checks.check_logits(like)
        check(targets, tokens)
        call.loss.check(targets, tokens, call.settings)
    plan = call.fake_plan()
    outputs = run.new_outputs(plan, call.shape, like)
    stats = run.new_statistics(plan, math.prod(call.shape), like)
    outputs, divisor = run.fill_outputs(plan, stats, targets, None, outputs)
    if call.head is None or not call.has_gradients:
        return _present([*outputs, *stats, divisor])
    overflow = None if call.head.valid_tokens is None else like.new_empty((), dtype=torch.float32)
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
    return [torch.empty_like(each) if call.head is None else each.new_empty(each.shape) for each in inputs]


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
    checks.check_no_double_backward()
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
        operator = operators.loss_of_logits_gradient if ctx.call.head is None else operators.loss_of_head_gradient
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
LOGITS = f"Tensor[] inputs, Tensor?[] targets, Tensor? num_items, str loss, str? group, {schema_of(Settings)}"
HEAD = f"{LOGITS}, ScalarType? autocast, bool[] wanted, {schema_of(HeadSettings)}"
for name, arguments, forward, gradient in (
    ("loss_of_logits", LOGITS, _forward, _gradient),
    ("loss_of_head", HEAD, _forward_of_head, _gradient_of_head),
):
    define(name, f"({arguments}) -> Tensor[]", forward, _fake_forward, _backward, _save)
    saved = f"Tensor[] stats, Tensor?[] grads, {arguments}"
    define(f"{name}_gradient", f"({saved}) -> Tensor[]", gradient, _fake_gradient)
define(
    "sum_over_ranks",
    "(Tensor part, str group) -> Tensor",
    lambda part, group: summed_over_ranks(part, group_named(group)),
    lambda part, group: torch.empty_like(part, memory_format=torch.contiguous_format),
)
sum_over_ranks = torch.ops.vocab_parallel_ce.sum_over_ranks  # (part, name of the group)
