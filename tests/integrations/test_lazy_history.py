"""Lazy logits in autograd: each program gives the numbers, the gradients and the errors of real logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import register_multi_grad_hook

from tests.integrations.test_lazy_logits import Recording, V, both, inputs, lazy_pair, of, with_gradients
from vocab_parallel_ce.integrations.lazy_head import _say_not_called

pytestmark = pytest.mark.reference


class Tripled(torch.autograd.Function):
    """Writes to its input, or hands it on; its gradient is not that of what it computes."""

    @staticmethod
    def forward(ctx, logits, writes):
        if writes:
            ctx.mark_dirty(logits)
            logits.mul_(2)
        return logits

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad, None


class TripledClone(Tripled):
    @staticmethod
    def forward(ctx, logits, writes):
        return logits.clone()


def written(z):
    view, copied = z[:, 1:], z.clone()
    z.mul_(2)
    view.add_(z[:, :-1].detach())
    z[0, 0] = 5.0
    z /= 3
    return z.exp().sum() * view.sum() + z.clamp_(min=-2).sum() + copied.sum()


def written_behind(z):
    rows, copied = z.view(-1, V), z * 1.0
    F.dropout(rows, 0.0, inplace=True)
    z.data.add_(1.0)
    z.detach()[0] = 2.0
    return rows.square().sum() + z.exp().sum() + copied.sum()


def views_written(z):
    scaled = z * 2
    scaled[:, :-1].mul_(2.0)
    scaled.view(-1, V)[2] = 0
    return scaled.exp().sum()


def without_gradients(z):
    with torch.no_grad():
        z.mul_(2)
        z.view(-1)[:3].zero_()
    with torch.inference_mode():
        best = z.argmax(-1)
    return z.exp().sum() + best.sum()


def offloaded(z):
    with torch.autograd.graph.save_on_cpu():
        return (z / 2).tanh().exp().sum()


def of_func_grad(z):
    doubled = z * 2
    return torch.func.grad(lambda factor: (factor * doubled).exp().sum())(torch.tensor(0.5)) + doubled.sum()


def with_hook(z):
    z.register_hook(lambda grad: 2 * grad)
    return F.cross_entropy(z.view(-1, V), torch.zeros(10, dtype=torch.int64))


LOSSES = {
    "written": written,
    "written behind it": written_behind,
    "views written": views_written,
    "without gradients": without_gradients,
    "offloaded": offloaded,
    "func.grad": of_func_grad,
    "hook": with_hook,
    "dirty": lambda z: Tripled.apply(z, True).exp().sum() + z.sum(),
    "handed on": lambda z: F.cross_entropy(Tripled.apply(z.float() * 2, False).view(-1, V), torch.arange(10)),
    "cloned": lambda z: F.cross_entropy(TripledClone.apply(z.view(-1, V), False), torch.arange(10)),
    "split": lambda z: (z.split([2, 3], 1)[0].exp().sum() * z.unbind(0)[1].sum()) + z.chunk(2, -1)[0].sum(),
    "strided": lambda z: torch.as_strided(z, (3, 4), (2, 1), 1).exp().sum(),
    "stacked": lambda z: torch.stack([z, 2 * z]).logsumexp(0).sum() + torch.cat([z, z]).exp().sum(),
    "softcap": lambda z: (torch.tanh(z / 3) * 3)[:, :-1].contiguous().view(-1, V).logsumexp(-1).sum(),
}


def assert_same(program):
    found, expected, _ = both(program, scale=0.5)
    if isinstance(expected, str):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_those_of_real_logits(name):
    assert_same(with_gradients(lambda logits, labels: LOSSES[name](logits)))


def penalty(logits, labels, hidden, weight):
    (grad,) = torch.autograd.grad(logits.logsumexp(-1).square().sum(), hidden, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), (hidden, weight))


def hooks_run_once(logits, labels, hidden, weight):
    hidden.register_hook(lambda grad: 2 * grad)
    weight.register_hook(lambda grad: 3 * grad)
    logits.retain_grad()
    logits.logsumexp(-1).sum().backward()
    return hidden.grad, weight.grad, logits.grad


def of_itself(logits, labels, hidden, weight):
    scaled = logits.float() * 2
    loss = scaled.exp().sum() + logits.square().sum()
    return torch.autograd.grad(loss, (scaled, logits, weight))


def into_itself(logits, labels, hidden, weight):
    logits.exp().sum().backward(inputs=[logits, weight])
    assert hidden.grad is None
    return logits.grad, weight.grad


def never_read(logits, labels, hidden, weight):
    logits.backward(torch.ones(logits.shape))
    return hidden.grad, weight.grad


def jacobian(logits, labels, hidden, weight):
    return torch.autograd.grad(logits.exp().sum((0, 1)), (hidden, weight), torch.eye(V), is_grads_batched=True)


def saved_and_written(logits, labels, hidden, weight):
    loss = logits.square().sum()
    logits.add_(1)
    return torch.autograd.grad(loss, (hidden, weight))


def of_another_weight(logits, labels, hidden, weight):
    loss = logits.exp().sum()
    with torch.no_grad():
        weight.add_(1)
    return torch.autograd.grad(loss, (hidden,))


WAYS = [penalty, hooks_run_once, of_itself, into_itself, never_read, jacobian, saved_and_written, of_another_weight]


@pytest.mark.parametrize("way", WAYS)
def test_ways_to_differentiate_are_those_of_real_logits(way):
    assert_same(way)


def test_data_cannot_be_assigned():
    logits = of(Recording(*inputs()[:2]))
    with pytest.raises(RuntimeError, match="logits: expected no assignment to data"):
        logits.data = torch.zeros(logits.shape)


def test_a_fused_loss_makes_no_values_and_a_history_of_pytorchs_own():
    logits = of(Recording(*inputs()[:2]))
    capped = (torch.tanh(logits / 3) * 3)[:, :-1].float()
    assert [type(node.grad_fn).__name__ for node in (logits, capped)] == ["_OutputBackward", "SliceBackward0"]
    loss = F.cross_entropy(capped.reshape(-1, V), torch.zeros(8, dtype=torch.int64))
    assert [each()._real for each in logits._head.lazy if each() is not None].count(None) >= 4
    loss.backward()
    assert logits._real is None and logits._head._graph is None


def hook_of(seen, lazy, how):
    """Wait for the gradient of lazy logits in one of PyTorch's ways."""
    if how == "register_hook":
        return lazy.register_hook(seen.append)
    if how == "retain_grad":
        return lazy.retain_grad()
    mode = how.removeprefix("multi, ")
    return register_multi_grad_hook([lazy], seen.append if mode == "any" else seen.extend, mode=mode)


HOOKS = ("register_hook", "retain_grad", "multi, all", "multi, any")
Y = torch.zeros(10, dtype=torch.int64)


@pytest.mark.parametrize("how", HOOKS)
def test_a_hook_before_the_loss_sees_its_gradient(how):
    seen = []
    head, lazy, real = lazy_pair()
    hook_of(seen, lazy, how)
    assert head.events == [f"{'retain_grad' if how == 'retain_grad' else 'register_hook'} made the logits"]
    F.cross_entropy(lazy.view(-1, V), Y).backward()
    (expected,) = torch.autograd.grad(F.cross_entropy((leaf := real.requires_grad_()).view(-1, V), Y), leaf)
    torch.testing.assert_close([lazy.grad] if how == "retain_grad" else seen, [expected])


@pytest.mark.parametrize("how", HOOKS)
def test_a_hook_after_a_fused_loss_is_called_if_something_differentiates_the_logits(how, caplog):
    """With the gradient of what does; it makes no logits, and that it is not called else is said once."""
    _say_not_called.cache_clear()
    for then in (lambda z: z.square().sum(), lambda z: 3 * F.cross_entropy(z.float().view(-1, V), Y + 1), None):
        seen = []
        head, lazy, real = lazy_pair()
        loss = F.cross_entropy(lazy.view(-1, V), Y)
        hook_of(seen, lazy, how)
        assert head.events == ["fused"]
        (loss if then is None else loss + then(lazy)).backward()
        expected = []
        if then is not None:
            expected += torch.autograd.grad(then(leaf := real.requires_grad_()), leaf)
        found = [lazy.grad] if how == "retain_grad" and then is not None else seen
        torch.testing.assert_close(found, expected)
        assert head.weight.grad.any()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "called only if something else differentiates the logits" in said
