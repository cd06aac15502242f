"""Tensors with PyTorch's negative bit, whose memory has the negative of their numbers, as ``x.conj().imag`` has."""

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.cases import flat

TOKENS, COLUMNS, WIDTH = 5, 24, 8
MODES = ("auto", "out_of_place", "in_backward", "in_forward")


def drawn(*shape, seed=0):
    return 3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def negative(values):
    """Return a tensor of these values with the bit, in a graph if it needs a gradient."""
    view = torch._neg_view(-values)
    assert view.is_neg() and torch.equal(view, values)
    return view


@pytest.mark.parametrize("gradient", MODES)
def test_logits_targets_and_the_gradient_of_the_loss(impl_device, gradient):
    impl, device = impl_device
    logits, labels = drawn(TOKENS, COLUMNS), torch.arange(TOKENS)
    factors, weight, results = drawn(TOKENS, seed=1), drawn(COLUMNS, seed=2).abs(), []
    for bits in range(4):
        leaf = logits.detach().to(device).requires_grad_()
        given = negative(leaf) if bits & 1 else leaf * 1
        before = given.detach().clone()
        as_passed = negative if bits & 2 else torch.clone
        if gradient == "in_forward" and given.is_neg():  # it is a view in a graph
            with pytest.raises(ValueError, match="^gradient: 'in_forward' overwrites"):
                vp.vocab_parallel_cross_entropy(given, labels.to(device), gradient=gradient, impl=impl)
            continue
        losses = vp.vocab_parallel_cross_entropy(
            *(given, as_passed(labels.to(device))),
            **{"class_weight": as_passed(weight.to(device)), "reduction": "none", "gradient": gradient, "impl": impl},
        )
        losses.backward(as_passed(factors.to(device)))
        results.append((losses.detach(), leaf.grad))
        torch.testing.assert_close(results[-1], results[0], rtol=1e-6, atol=1e-7)
        if given.is_neg() or gradient == "out_of_place":
            assert torch.equal(given.detach(), before)  # it was read, and not written


def test_numbers_of_rows_a_teacher_and_the_number_of_items(impl_device):
    impl, device = impl_device
    logits, labels = drawn(TOKENS, COLUMNS).to(device), torch.arange(TOKENS, device=device)
    others = drawn(TOKENS, COLUMNS, seed=1).to(device)
    per_row, items = drawn(TOKENS, seed=2).to(device).abs() + 0.5, torch.tensor(3.0, device=device)
    calls = {
        "temperature": lambda f: vp.token_log_probs(f(logits), f(labels), temperature=f(per_row), impl=impl),
        "threshold": lambda f: vp.token_log_probs(f(logits), f(labels), threshold=f(per_row - 9), impl=impl),
        "teacher": lambda f: vp.distillation_loss(f(logits), f(others), impl=impl),
        "items": lambda f: vp.vocab_parallel_cross_entropy(
            logits, labels, reduction="sum", num_items=f(items), impl=impl
        ),
        "top k": lambda f: vp.top_k(f(logits), 3)[1],
        "sampling": lambda f: vp.sampling_threshold(f(logits), top_k=3),
    }
    for name, call in calls.items():
        for _ in range(2):  # the second is warm
            assert torch.equal(call(lambda t: t), call(negative)), name


def test_heads(impl_device):
    impl, device = impl_device
    hidden, weight, labels = drawn(TOKENS, WIDTH), drawn(COLUMNS, WIDTH, seed=1), torch.arange(TOKENS)
    factors = drawn(TOKENS, seed=2)
    expected = {"reduction": "none", "gradient": "in_forward", "expected_grad_output": factors.to(device)}
    for options in ({}, {"reduction": "none"}, expected):
        gradients = []
        for as_passed in (lambda t: t, negative):
            leaves = [t.to(device).requires_grad_() for t in (hidden, weight)]
            given = {n: as_passed(t) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
            loss = flat.linear_cross_entropy(*map(as_passed, leaves), as_passed(labels.to(device)), impl=impl, **given)
            loss.backward(as_passed(factors.to(device)) if options else as_passed(torch.tensor(0.7, device=device)))
            gradients.append([loss.detach(), *(leaf.grad for leaf in leaves)])
        for plain, of_negative in zip(*gradients, strict=True):
            torch.testing.assert_close(plain, of_negative, rtol=1e-6, atol=1e-7)
    main_grad = torch._neg_view(torch.zeros(COLUMNS, WIDTH, device=device))
    leaves[0].grad = None
    for _ in range(2):
        with pytest.raises(ValueError, match="^main_grad: must hold its own numbers"):
            vp.linear_cross_entropy(*leaves, labels.to(device), main_grad=main_grad, options=vp.HeadOptions(impl=impl))


def test_the_second_step_of_the_pair_refuses_what_it_would_write(impl_device):
    _, device = impl_device
    loss, grad = vp.cross_entropy_forward(
        negative(drawn(TOKENS, COLUMNS).to(device)), torch.arange(TOKENS, device=device), 0.0, True, None, -100
    )
    plain = vp.cross_entropy_backward(grad.clone(), torch.tensor(2.0, device=device))
    assert torch.equal(vp.cross_entropy_backward(grad.clone(), negative(torch.tensor(2.0, device=device))), plain)
    with pytest.raises(ValueError, match="^_input: expected the tensor that cross_entropy_forward returned"):
        vp.cross_entropy_backward(negative(grad), torch.tensor(2.0, device=device))
