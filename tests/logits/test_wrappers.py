"""Saved-tensor hooks: checkpoints, offloading and compilation around a loss whose logits others use too.

Autograd compares no version of a tensor that went through such hooks. What overwrites it then trains on
another gradient without an error: the defaults must not overwrite there. PyTorch computes the same without wrappers.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import vocab_parallel_ce as vp
from tests.support.cases.pairs import covering
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import plan, vocab_parallel_cross_entropy

ROWS, WIDTH, COLUMNS = 7, 12, 21


def within(context: Callable[[], Any], function: Callable[..., Any], *args: Tensor) -> Any:
    with context():
        return function(*args)


def compiled(function: Callable[..., Any], *args: Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(lambda *args: function(*args), backend="aot_eager")(*args)


WRAPPERS = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "save_on_cpu": partial(within, save_on_cpu),
    "identity": partial(within, partial(saved_tensors_hooks, lambda t: t, lambda t: t)),
    "copies": partial(within, partial(saved_tensors_hooks, lambda t: t.detach().clone(), lambda t: t)),
    "compiled": compiled,
}
# The outermost first.
SIMPLE = ("checkpoint", "identity", "copies", "save_on_cpu")
COMPILED = ("compiled checkpoint", "compiled identity", "identity compiled")
WITHOUT_HOOKS = ("", "reentrant")
# Who else uses the logits, or the hidden states.
OTHERS = ("auxiliary loss", "second loss", "saved output", "read afterwards")


def te(logits, labels, impl, *, is_mean, **overwrite):
    loss = vp.parallel_cross_entropy(logits, labels, 0.0, is_mean, None, -100, **overwrite)
    return loss.squeeze(0) if is_mean else loss


OVER_LOGITS = {
    "auto": vocab_parallel_cross_entropy,
    "in_backward": partial(vocab_parallel_cross_entropy, gradient="in_backward"),
    "out_of_place": partial(vocab_parallel_cross_entropy, gradient="out_of_place"),
    "module": lambda logits, labels, impl: vp.VocabParallelCrossEntropy(impl=impl)(logits, labels),
    "log_probs": vp.token_log_probs,
    "te": partial(te, is_mean=True),
    "te, none": partial(te, is_mean=False),
}
IN_PLACE = {
    "in_backward": OVER_LOGITS["in_backward"],
    "in_forward": partial(vocab_parallel_cross_entropy, gradient="in_forward"),
    "te, overwriting": partial(te, is_mean=True, overwrite_input=True),
}


LOSSES = tuple(name for name in OVER_LOGITS if name != "in_backward")
HOOKED_CASES = covering(wrapper=SIMPLE, other=OTHERS, loss=LOSSES)
HOOKED_CASES += covering(wrapper=COMPILED, other=OTHERS, loss=("auto", "log_probs", "te"))
# Reentrant checkpoints and no wrapper at all: autograd sees what is overwritten by name.
SEEN = ("auto", "in_backward", "log_probs", "te, none")


def step(call, other, device="cpu", dtype=torch.float32, wrapper=""):
    """The sum of the losses and of what else uses the logits, and the gradients of three leaves."""
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, WIDTH), (WIDTH, WIDTH), (COLUMNS, WIDTH)
    leaves = [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype) * 0.6) for s in shapes]
    labels = torch.randint(0, COLUMNS, (2, ROWS), generator=generator).to(device)
    factors = torch.randn(2, ROWS, generator=generator).to(device, dtype)

    def forward(hidden, square, weight):
        x = hidden @ square @ weight.t()
        x = x.sigmoid() if other == "saved output" else x
        total = 0.1 * x.logsumexp(-1).pow(2).mean() if other == "auxiliary loss" else 0.0
        for index in range(1 + (other == "second loss")):
            loss = call(x, labels[index])
            total = total + (loss * (factors[index] if loss.dim() else factors[index, 0])).sum()
        return total + x.softmax(-1).pow(2).sum() if other == "read afterwards" else total

    for name in reversed(wrapper.split()):
        forward = partial(WRAPPERS[name], forward)
    total = forward(*leaves)
    total.backward()
    return total.detach(), *(leaf.grad for leaf in leaves)


def theirs(function):
    """PyTorch's loss in the place of a function."""
    is_none = function in (OVER_LOGITS["log_probs"], OVER_LOGITS["te, none"])

    def call(logits, labels):
        found = oracle.values(oracle.at_least_fp32(logits), labels, reduction="none" if is_none else "mean")
        return found.log_probs if function is vp.token_log_probs else found.loss

    return call


def result_of(impl_device, wrapper, other, function):
    impl, device = impl_device
    return step(partial(function, impl=impl), other, device, wrapper=wrapper)


def check(impl_device, wrapper, other, function):
    found = result_of(impl_device, wrapper, other, function)
    truth = step(theirs(function), other, dtype=torch.float64)
    peer = step(theirs(function), other, impl_device[1])
    for triple in zip(found, truth, peer, strict=True):
        assert_within_budget(*triple)


def by_case(cases):
    return pytest.mark.parametrize(tuple(cases[0]), [tuple(case.values()) for case in cases])


@pytest.mark.quick(3)
@pytest.mark.interpreted(4)
@by_case(HOOKED_CASES)
def test_under_hooks_the_loss_over_logits_is_right(impl_device, wrapper, other, loss):
    check(impl_device, wrapper, other, OVER_LOGITS[loss])


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("wrapper", SIMPLE)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("loss", IN_PLACE)
def test_under_hooks_an_explicit_mode_is_refused_by_name(impl_device, wrapper, other, loss):
    """Whoever had saved the logits used the gradient in their place."""
    with pytest.raises(ValueError, match="^gradient: 'in_.*use gradient='auto'"):
        result_of(impl_device, wrapper, other, IN_PLACE[loss])


@pytest.mark.reference
@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_a_call_that_ran_before_is_refused_under_hooks_and_changes_nothing(gradient):
    labels, values = torch.tensor([1, 2, 3]), torch.randn(3, 8)
    for _ in range(2):
        logits = values.clone().requires_grad_() * 1
        vocab_parallel_cross_entropy(logits, labels, gradient=gradient).backward()
        logits = values.clone().requires_grad_() * 1
        with save_on_cpu(), pytest.raises(ValueError, match="^gradient: .* got a call inside; use gradient='auto'"):
            vocab_parallel_cross_entropy(logits, labels, gradient=gradient)
        assert torch.equal(logits, values) and logits._version == 0
        with save_on_cpu(), torch.no_grad():  # nothing is overwritten
            vocab_parallel_cross_entropy(logits, labels, gradient=gradient)
        assert torch.equal(logits, values)


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("wrapper", WITHOUT_HOOKS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("loss", SEEN)
def test_without_hooks_it_is_right_or_refused_by_name(impl_device, wrapper, other, loss):
    if loss != "in_backward" or other == "read afterwards":
        check(impl_device, wrapper, other, OVER_LOGITS[loss])
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result_of(impl_device, wrapper, other, OVER_LOGITS[loss])


def overwrites() -> bool:
    """Whether backward of the default writes the gradient over logits that nobody else holds."""
    found = []
    logits = torch.randn(3, 8, requires_grad=True) * 1
    address = logits.data_ptr()
    logits.register_hook(lambda grad: found.append(grad.data_ptr() == address))
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]))
    del logits
    loss.backward()
    return found == [True]


@pytest.mark.reference
def test_hooks_are_seen_only_while_they_are_active():
    assert overwrites()
    with save_on_cpu():
        assert not overwrites()
    assert overwrites()


@pytest.mark.reference
def test_a_pytorch_that_cannot_say_whether_hooks_are_active_writes_out_of_place(monkeypatch):
    """The package asks for PyTorch's function when it is imported."""
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    imported_again = importlib.util.module_from_spec(plan.__spec__)
    plan.__spec__.loader.exec_module(imported_again)
    monkeypatch.setattr(plan, "top_saved_tensor_hooks", imported_again.top_saved_tensor_hooks)
    assert not overwrites()
