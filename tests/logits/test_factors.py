"""What multiplies a loss at the ends of fp32: subnormal, large, infinite (docs/gradients.md)."""

import pytest
import torch

import vocab_parallel_ce as vp

IMPLEMENTATIONS = [
    pytest.param("reference", marks=pytest.mark.reference),
    pytest.param("triton", marks=pytest.mark.interpreter),
]
FACTORS = torch.tensor([1e-45, 1e-40, 2e-38, 1.0, 3e38])
LABELS = torch.tensor([0, 1, 2, 3, 4])


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def gradients(impl, factors, labels=LABELS, **options):
    leaf = drawn(5, 24).requires_grad_()
    loss = vp.vocab_parallel_cross_entropy(leaf * 1, labels, reduction="none", impl=impl, **options)
    loss.backward(factors)
    exact = leaf.detach().double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, labels, reduction="none").backward(factors.double())
    return leaf.grad, exact.grad


@pytest.mark.parametrize("gradient", ("out_of_place", "in_forward"))
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_finite_factors_keep_what_fp32_holds_of_them(impl, gradient):
    found, exact = gradients(impl, FACTORS, **({} if gradient == "out_of_place" else {"gradient": gradient}))
    smallest = 2.0**-149
    error = (found.double() - exact).abs()
    assert (error <= smallest + 1e-5 * exact.abs()).all()
    assert found[1].abs().min() > 0 and found.isfinite().all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_infinite_factor_is_seen_in_its_row_alone(impl):
    """As after an overflow of the loss scale. A scaler skips a step whose gradient is not finite."""
    factors = torch.tensor([float("inf"), 1.0, 1.0, float("inf"), 1.0])
    labels = torch.tensor([0, 1, 2, -100, 4])
    found, exact = gradients(impl, factors, labels)
    assert not found[0].isfinite().any() and torch.equal(found[3], torch.zeros(24))
    for row in (1, 2, 4):
        torch.testing.assert_close(found[row].double(), exact[row], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_a_factor_that_is_expected(impl):
    """Forward multiplies by it, and backward by what remains: nothing of an infinite one is known."""
    for factor, is_right in ((1e-40, True), (3e37, True), (float("inf"), False)):
        hidden, weight = drawn(5, 8).requires_grad_(), drawn(24, 8).requires_grad_()
        factors = torch.tensor([1.0, factor, 1.0, 1.0, 1.0])
        loss = vp.linear_cross_entropy(
            hidden,
            weight,
            LABELS,
            reduction="none",
            expected_grad_output=factors,
            options=vp.HeadOptions(gradient="in_forward", impl=impl),
        )
        loss.backward(factors)
        if not is_right:
            assert hidden.grad.isnan().all() and weight.grad.isnan().all()
            continue
        exact = [each.detach().double().requires_grad_() for each in (hidden, weight)]
        logits = exact[0] @ exact[1].t()
        torch.nn.functional.cross_entropy(logits, LABELS, reduction="none").backward(factors.double())
        scale = max(factor, 1.0)
        for found, right in zip((hidden.grad, weight.grad), exact, strict=True):
            torch.testing.assert_close(found.double() / scale, right.grad / scale, rtol=1e-5, atol=1e-6)
