"""Saved-tensor hooks: checkpoints, offloading and compilation around a loss whose logits others use too.

Autograd compares no version of a tensor that went through such hooks. What overwrites it then trains on
another gradient without an error: the defaults must not overwrite there.
"""

import functools
import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from tests.support.budget import assert_within_budget
from tests.support.pairs import covering
from vocab_parallel_ce import (
    linear_cross_entropy,
    parallel_cross_entropy,
    plan,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

ROWS, WIDTH, COLUMNS, VOCABULARY = 7, 16, 33, 21
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def auxiliary(loss: Loss, h: Tensor, w: Tensor, head: Tensor, y: Tensor) -> Tensor:
    x = h @ w.t()
    extra = 0.1 * torch.logsumexp(x, -1).pow(2).mean()
    return loss(x, head, y) + extra


def two_losses(loss: Loss, h: Tensor, w: Tensor, head: Tensor, y: Tensor) -> Tensor:
    x = h @ w.t()
    return loss(x, head, y) + 0.3 * loss(x, head, y.roll(1))


def saved_output(loss: Loss, h: Tensor, w: Tensor, head: Tensor, y: Tensor) -> Tensor:
    return loss(torch.sigmoid(h @ w.t()), head, y)


def read_afterwards(loss: Loss, h: Tensor, w: Tensor, head: Tensor, y: Tensor) -> Tensor:
    x = h @ w.t()
    value = loss(x, head, y)
    return value + 0.1 * x.softmax(-1).pow(2).sum()


FUNCTIONS = {f.__name__: f for f in (auxiliary, two_losses, saved_output, read_afterwards)}
HOOKS = {
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "copies": lambda: saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t),
    "save_on_cpu": save_on_cpu,
}


def in_checkpoint(function, *args):
    return checkpoint(function, *args, use_reentrant=False)


def under(name, function, *args):
    with HOOKS[name]():
        return function(*args)


def compiled(wrapper, function, *args):
    def step(*args):
        return wrapper(function, *args)

    torch.compiler.reset()
    return torch.compile(step, backend="aot_eager")(*args)


def call(function, *args):
    return function(*args)


WRAPPERS: dict[str, Callable[..., Tensor]] = {
    "plain": call,
    "checkpoint": in_checkpoint,
    "reentrant": lambda function, *args: checkpoint(function, *args, use_reentrant=True),
    **{name: functools.partial(under, name) for name in HOOKS},
    "compiled checkpoint": functools.partial(compiled, in_checkpoint),
    "compiled identity": functools.partial(compiled, functools.partial(under, "identity")),
    "identity around compiled": lambda function, *args: under("identity", compiled, call, function, *args),
}


def over_logits(name: str, impl: str) -> Loss:
    """By a gradient mode of the loss, as log-probabilities, or by TransformerEngine's signature."""
    if name == "log_probs":
        return lambda x, head, y: -token_log_probs(x, y, impl=impl).mean()
    if name.startswith("te"):
        return lambda x, head, y: parallel_cross_entropy(x, y, reduce_loss=name == "te").mean()
    return lambda x, head, y: vocab_parallel_cross_entropy(x, y, gradient=name, impl=impl)


def fused(impl: str, gradient: str) -> Loss:
    return lambda x, head, y: linear_cross_entropy(x, head, y, gradient=gradient, impl=impl, chunk_tokens=3)


def inputs(dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    h, w, head = (
        torch.randn(*size, generator=generator, dtype=torch.float64)
        for size in ((ROWS, WIDTH), (COLUMNS, WIDTH), (VOCABULARY, COLUMNS))
    )
    y = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return [*((t * 0.7).to(dtype).to(device).requires_grad_() for t in (h, w, head)), y.to(device)]


def results(wrapper: str, name: str, loss: Loss, dtype: torch.dtype, device: str = "cpu") -> list[Tensor]:
    h, w, head, y = inputs(dtype, device)
    uses = FUNCTIONS[name]

    def function(*args):
        return uses(loss, *args)

    value = WRAPPERS[wrapper](function, h, w, head, y)
    value.backward()
    return [t.detach().cpu() for t in (value, h.grad, w.grad)] + ([] if head.grad is None else [head.grad.cpu()])


def assert_right(actual: list[Tensor], name: str, peer: Loss) -> None:
    """Within the budget of PyTorch's own loss, without any wrapper."""
    truth, same_dtype = (results("plain", name, peer, dtype) for dtype in (torch.float64, torch.float32))
    assert len(actual) == len(truth)
    for got, expected, other in zip(actual, truth, same_dtype, strict=True):
        assert_within_budget(got, expected, other)


def of_torch(x: Tensor, head: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(x, y)


def fused_of_torch(x: Tensor, head: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(linear(x, head), y)


NAMES, HOOKED = tuple(FUNCTIONS), tuple(name for name in WRAPPERS if name not in ("plain", "reentrant"))
OVER_LOGITS = ("auto", "out_of_place", "log_probs", "te", "te, none")
HOOKED_CASES = covering(wrapper=HOOKED, name=NAMES, loss=OVER_LOGITS)
LINEAR_CASES = covering(wrapper=tuple(WRAPPERS), name=NAMES, gradient=("auto", "in_forward", "in_backward"))


def by_case(cases: list[dict[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(tuple(cases[0]), [tuple(case.values()) for case in cases])


@pytest.mark.quick(3)
@pytest.mark.interpreted(4)
@by_case(HOOKED_CASES)
def test_under_hooks_the_loss_over_logits_is_right(impl_device, wrapper, name, loss):
    impl, device = impl_device
    assert_right(results(wrapper, name, over_logits(loss, impl), torch.float32, device), name, of_torch)


@by_case(LINEAR_CASES)
def test_the_linear_loss_is_right_in_every_wrapper(impl_device, wrapper, name, gradient):
    """Hidden states and weight are never overwritten."""
    impl, device = impl_device
    actual = results(wrapper, name, fused(impl, gradient), torch.float32, device)
    assert_right(actual, name, fused_of_torch)


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("wrapper", ("plain", "reentrant"))
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("gradient", ("auto", "in_backward", "out_of_place"))
def test_without_hooks_it_is_right_or_refused(impl_device, wrapper, name, gradient):
    impl, device = impl_device
    run = functools.partial(results, wrapper, name, over_logits(gradient, impl), torch.float32, device)
    if gradient == "out_of_place" or name == "read_afterwards":
        assert_right(run(), name, of_torch)
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run()


def overwrites() -> bool:
    """Whether backward of the default writes the gradient over the logits."""
    logits = torch.randn(3, 8, requires_grad=True) * 1
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]))
    return torch.autograd.grad(loss, logits)[0].data_ptr() == logits.data_ptr()


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
    monkeypatch.setattr(plan, "_top_saved_tensor_hooks", imported_again._top_saved_tensor_hooks)
    assert not overwrites()
