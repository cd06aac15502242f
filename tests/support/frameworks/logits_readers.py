"""Readers of a model's logits, ways to differentiate a loss, and what a model gives with both.

The tests of stand-ins for logits compare them with the same model without a stand-in.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vocab_parallel_ce import distillation_loss, token_log_probs, vocab_parallel_cross_entropy

TOLERANCE = 1e-5  # of the largest element: of two sums in fp32, in another order
PLACES = ("alone", "beside", "inside")  # of a reader: after forward, alone or beside the model's loss, or in forward
RETAINED = "retain_graph, twice"
Named = dict[str, Any]  # parameters, or their gradients
Reader = Callable[[Tensor, Tensor, Any], Tensor]


class _LogSumExp(torch.autograd.Function):
    """A Function of somebody's own, of ``[..., V]``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (logits,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * logits.softmax(-1)


def log_sum_exp(logits: Tensor) -> Tensor:
    """A loss of PyTorch's operations."""
    return 2 * (logits.float() - 1.0).logsumexp(-1).square().mean()


@functools.cache
def _scripted() -> Callable[[Tensor], Tensor]:
    return torch.jit.script(log_sum_exp)


@functools.cache
def _compiled() -> Callable[[Tensor], Tensor]:
    return torch.compile(log_sum_exp, backend="aot_eager")


def teacher_of(logits: Tensor) -> Tensor:
    """Logits of a teacher, of the shape of a student's."""
    made = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    return 3 * made.to(logits.device)


def _kl_div(logits: Tensor) -> Tensor:
    """PyTorch's own, of tokens."""
    log_probs, teacher = (z.flatten(0, 1).log_softmax(-1) for z in (logits, teacher_of(logits)))
    return F.kl_div(log_probs, teacher, log_target=True, reduction="batchmean")


def _doubled(logits: Tensor) -> Tensor:
    logits.register_hook(lambda grad: 2 * grad)
    return log_sum_exp(logits)


OWN_PART = "register_hook of its own part"
READERS: dict[str, Reader] = {
    "operations": lambda z, y, g: log_sum_exp(z),
    "kl_div": lambda z, y, g: _kl_div(z),
    "a Function": lambda z, y, g: _LogSumExp.apply(z).square().mean(),
    "a Function of a slice": lambda z, y, g: _LogSumExp.apply(z[:, :-1].float() / 2.0).square().mean(),
    "vocab_parallel_cross_entropy": lambda z, y, g: vocab_parallel_cross_entropy(z, y, group=g, label_smoothing=0.3),
    "token_log_probs": lambda z, y, g: -token_log_probs(z, y, group=g).mean(),
    "distillation_loss": lambda z, y, g: distillation_loss(z, teacher_of(z), group=g),
    "jit.script": lambda z, y, g: _scripted()(z),
    "vmap": lambda z, y, g: torch.vmap(lambda row: row.logsumexp(-1).square())(z).mean(),
    "checkpoint": lambda z, y, g: checkpoint(log_sum_exp, z, use_reentrant=False),
    "reentrant checkpoint": lambda z, y, g: checkpoint(log_sum_exp, z, use_reentrant=True),
    "compile": lambda z, y, g: _compiled()(z) + _compiled()(0.5 * z),  # the numbers of one call are not in the next
    "register_hook": lambda z, y, g: _doubled(z),
    OWN_PART: lambda z, y, g: _doubled(z.view_as(z)),
}


def _grads(parameters: Named) -> Named:
    return {name: parameter.grad for name, parameter in parameters.items()}


def _backward(loss: Tensor, parameters: Named) -> Named:
    loss.backward()
    return _grads(parameters)


def _backward_twice(loss: Tensor, parameters: Named) -> Named:
    loss.backward(retain_graph=True)
    loss.backward()
    return {name: None if grad is None else grad / 2 for name, grad in _grads(parameters).items()}


def _backward_of_inputs(loss: Tensor, parameters: Named) -> Named:
    some = {name: parameters[name] for name in list(parameters)[::-2]}  # the last, the head's, among them
    loss.backward(inputs=list(some.values()))
    assert all(parameter.grad is None for name, parameter in parameters.items() if name not in some)
    return _grads(some)


def _grad(loss: Tensor, parameters: Named) -> Named:
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def _grad_of_unused_too(loss: Tensor, parameters: Named, **options: bool) -> Named:
    unused = torch.zeros(2, requires_grad=True)
    *gradients, unused_grad = torch.autograd.grad(loss, (*parameters.values(), unused), **options)
    assert unused_grad is None if "allow_unused" in options else not unused_grad.any()
    return dict(zip(parameters, gradients, strict=True))


WAYS: dict[str, Callable[[Tensor, Named], Named]] = {
    "backward": _backward,
    RETAINED: _backward_twice,
    "grad": _grad,
    "inputs": _backward_of_inputs,
    "allow_unused": lambda loss, parameters: _grad_of_unused_too(loss, parameters, allow_unused=True),
    "materialize_grads": lambda loss, parameters: _grad_of_unused_too(loss, parameters, materialize_grads=True),
}


BACKWARD_ONLY = "reentrant checkpoint"  # PyTorch refuses inputs= and autograd.grad there
NOT_RETAINED = "compile"  # and retain_graph there: its buffers are donated


def ways_of(reader: str) -> list[str]:
    """The ways that PyTorch has for a reader."""
    ways = ["backward", RETAINED] if reader == BACKWARD_ONLY else list(WAYS)
    return [way for way in ways if way != RETAINED or reader != NOT_RETAINED]


def true_reader(reader: str, place: str) -> str:
    """The reader whose numbers are right: a hook after the loss was fused sees the gradient of all but that loss."""
    return OWN_PART if (reader, place) == ("register_hook", "beside") else reader


class Step(NamedTuple):
    """A loss, and the gradients that were asked for."""

    loss: Tensor
    gradients: Named


def differentiated(model: torch.nn.Module, loss: Tensor, way: str = "backward") -> Step:
    """Differentiate the loss of a model in a ``way``."""
    model.zero_grad()
    gradients = WAYS[way](loss, dict(model.named_parameters()))
    model.zero_grad()
    return Step(loss.detach(), gradients)


def differs(actual: Step, expected: Step) -> str | None:
    """What of a step is not as expected, the most wrong of it, or None."""
    pairs = {"loss": (actual.loss, expected.loss)}
    pairs |= {name: (grad, expected.gradients[name]) for name, grad in actual.gradients.items()}
    missing = [name for name, (grad, _) in pairs.items() if grad is None]
    if missing:
        return f"{', '.join(missing)}: no gradient"
    errors = {name: _error(grad.double(), true.double()) for name, (grad, true) in pairs.items()}
    worst = max(errors, key=errors.__getitem__)
    return None if errors[worst] <= TOLERANCE else f"{worst}: off by {errors[worst]:.2g} of its largest"


def _error(actual: Tensor, expected: Tensor) -> float:
    error = float((actual - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def matters(expected: Step, without: Step, name: str) -> bool:
    """Whether a reader's part of a parameter's gradient would be missed."""
    whole, rest = expected.gradients[name], without.gradients[name]
    return bool((whole - rest).norm() > 0.1 * rest.norm() > 0)
