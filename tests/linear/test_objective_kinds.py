"""Objectives that a first call refuses, tensors that they keep or write to, and dtypes that would round gradients."""

import functools
import inspect
import itertools

import pytest
import torch

from tests.docs.markdown import ROOT, python_blocks
from tests.linear.test_objective import Objectives
from tests.support.cases.flat import linear_cross_entropy, linear_objective
from tests.support.cases.linear import record_matmuls
from tests.support.cases.objectives import ppo
from vocab_parallel_ce.head import objective as head_objective

HALF, WIDE = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def nothing_is_checked_yet(monkeypatch):
    monkeypatch.setattr(head_objective, "_checked", type(head_objective._checked)())


def stops_early(log_probs, old, **_):
    ratio = (log_probs - old).exp()
    return 0 * log_probs if ratio.mean() > 1.2 else ratio


def gates_by_a_mean(log_probs, old, **_):
    ratio = (log_probs - old).exp()
    return torch.where(ratio.mean() > 1.2, 0.0, ratio)


def of_a_mean(log_probs, advantage, **_):
    return -(advantage - advantage.mean()) * log_probs


def drops(log_probs, **_):
    return torch.nn.functional.dropout(log_probs, 0.5)


class Callable:
    def __call__(self, log_probs, **of):
        return of_a_mean(log_probs, **of)


@pytest.mark.parametrize("wrap", [lambda f: f, functools.partial], ids=["plain", "partial"])
@pytest.mark.parametrize("mixing", [stops_early, gates_by_a_mean, of_a_mean, drops, Callable()])
def test_a_first_call_refuses_a_function_that_mixes_tokens(impl_device, mixing, wrap):
    case = Objectives(impl_device, "peaked")
    same = case.loss()[1].log_probs
    for old in (case.tokens["old"], same):
        for _ in range(2):  # what is refused is not remembered
            with pytest.raises(ValueError, match="mixes tokens"):
                case.loss(wrap(mixing), tokens=case.tokens | {"old": old})
        case.loss(wrap(mixing), tokens=case.tokens | {"old": old}, check_objective=False)


def test_one_token_is_enough_to_refuse_and_not_to_trust(impl_device):
    case = Objectives(impl_device, "peaked")
    labels = torch.full_like(case.labels, -100)
    case.loss(ppo, labels=labels)
    assert not head_objective._checked
    labels[0] = 1
    case.loss(ppo, labels=labels)
    assert not head_objective._checked
    with pytest.raises(ValueError, match="mixes tokens"):
        case.loss(of_a_mean, labels=labels)


def test_later_calls_check_nothing(impl_device):
    case, calls = Objectives(impl_device), []

    def counted(log_probs, **of):
        calls.append(len(log_probs))
        return ppo(log_probs, **of)

    first = case.gradients(counted)
    assert len(calls) > 5
    calls.clear()
    for one, other in zip(case.gradients(functools.partial(counted)), first, strict=True):
        assert torch.equal(one, other)
    assert len(calls) == 1


def test_a_loss_may_be_added_to_in_place(impl_device):
    case = Objectives(impl_device)
    for own in ({}, {"valid_tokens": len(case.labels)}):
        loss, _ = case.loss(**own)
        loss += 1
        for one, other in zip(torch.autograd.grad(loss, case.leaves), case.gradients(), strict=True):
            torch.testing.assert_close(one, other)


def test_zero_items_and_a_nan_are_zero(impl_device):
    case = Objectives(impl_device)
    with torch.no_grad():
        case.weight[0] = torch.nan
    for num_items in (0, torch.tensor(0.0, device=case.device)):
        loss, _ = case.loss(num_items=num_items)
        assert loss == 0
    with torch.no_grad():
        case.weight[0] = 0
    tokens = {name: number * torch.nan for name, number in case.tokens.items()}
    loss, _ = case.loss(num_items=0, tokens=tokens)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, case.leaves))
    case.bias.data[2] = torch.nan
    loss, _ = case.loss(num_items=0)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, case.leaves))


def test_a_tensor_that_was_kept_says_so_in_backward(impl_device):
    case, kept = Objectives(impl_device), []

    def keeps(log_probs, entropy, **_):
        kept.append(entropy)
        return log_probs

    loss, _ = case.loss(keeps, check_objective=False)
    with pytest.raises(RuntimeError, match="objective: .*kept"):
        (loss + kept[0].sum()).backward()


def test_three_products_of_given_ids(impl_device):
    case = Objectives(impl_device)
    ids = torch.stack([case.labels, case.labels.roll(1)], dim=-1)
    with record_matmuls() as matmuls:
        loss, found = linear_objective(case.hidden, case.weight, ids, lambda p: p.exp().prod(-1), impl=case.impl)
        loss.backward()
    assert len(matmuls) == 3 and found.log_probs.shape == ids.shape


def test_a_sparse_result_is_refused(impl_device):
    with pytest.raises(TypeError, match="objective: expected a dense tensor, got layout"):
        Objectives(impl_device).loss(lambda log_probs, **_: log_probs.to_sparse())


SMALL, LOSS_SCALE = 1e-9, 2.0**27  # what multiplies each token's loss, and what backward multiplies them by


def of_many(hidden, weight, labels, **options):
    return linear_cross_entropy(hidden, weight, labels, num_items=1 / SMALL, **options)


def of_an_objective(hidden, weight, labels, **options):
    return linear_objective(hidden, weight, labels, lambda log_probs: -log_probs, num_items=1 / SMALL, **options)[0]


def of_expected_factors(hidden, weight, labels, **options):
    factors = torch.full(labels.shape, SMALL, device=labels.device)
    options |= {"reduction": "none", "gradient": "in_forward", "expected_grad_output": factors}
    return (linear_cross_entropy(hidden, weight, labels, **options) * factors).sum()


@pytest.mark.parametrize("dtypes", list(itertools.product((HALF, WIDE), repeat=2)), ids=str)
@pytest.mark.parametrize("autocast", [torch.bfloat16, HALF])
@pytest.mark.parametrize("loss", [of_many, of_an_objective, of_expected_factors])
def test_small_gradients_of_fp16_wait_for_the_loss_scale(impl_device, dtypes, autocast, loss):
    """In three matmuls: 1e-9 is 0 in fp16, and only backward knows the loss scale."""
    case = Objectives(impl_device)
    if impl_device[1] == "cpu" and autocast == HALF and not torch.amp.is_autocast_available("cpu"):
        pytest.skip("no autocast")
    made = case.hidden.detach(), case.weight.detach()
    leaves = [tensor.to(dtype).requires_grad_() for tensor, dtype in zip(made, dtypes, strict=True)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    with torch.autocast(case.device, autocast), record_matmuls() as matmuls:
        found = torch.autograd.grad(loss(*leaves, case.labels, impl=case.impl) * LOSS_SCALE, leaves)
    truth = torch.nn.functional.cross_entropy(exact[0] @ exact[1].t(), case.labels, reduction="sum")
    for value, expected in zip(found, torch.autograd.grad(truth * SMALL * LOSS_SCALE, exact), strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=0.03 * float(expected.abs().max()))
    assert len(matmuls) == 3


@pytest.mark.reference
@pytest.mark.parametrize("of_entropy", [False, True])
def test_sums_of_fp16_gradients_are_not_rounded_before_the_loss_scale(of_entropy):
    """Of the weight and the bias: 16 times the sum over 9000 tokens is infinite in fp16."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).half() for shape in ((9000, 4), (7, 4), (7,))]
    leaves[0][:, 0] = 1.0  # so that the weight's gradient has a sum, too
    labels, found = torch.zeros(9000, dtype=torch.int64), []
    for dtype in (HALF, torch.float64):
        hidden, weight, bias = each = [leaf.detach().to(dtype).requires_grad_() for leaf in leaves]
        if dtype == HALF:
            record = linear_cross_entropy(hidden, weight, labels, bias=bias, outputs=("entropy",))
            loss, entropy = record.loss, record.entropy
        else:
            log_p = (hidden @ weight.t() + bias).log_softmax(-1)
            loss, entropy = -log_p[:, 0].mean(), -(log_p.exp() * log_p).sum(-1)
        found.append(torch.autograd.grad(1024.0 * (loss + entropy.mean() if of_entropy else loss), each))
    for value, truth in zip(*found, strict=True):
        assert float((value.double() - truth).abs().max()) <= 2e-3 * float(truth.abs().max())


@pytest.mark.reference
@pytest.mark.parametrize(("gradient", "reduction"), [("auto", "mean"), ("auto", "sum"), ("in_forward", "mean")])
@pytest.mark.parametrize("weight_of_all", [1e-8, 5e3])
def test_class_weights_that_are_equal_change_nothing_in_fp16(gradient, reduction, weight_of_all):
    """Those of a sum multiply it."""
    case = Objectives(("reference", "cpu"))
    leaves = [leaf.detach().half().requires_grad_() for leaf in (case.hidden, case.weight)]
    weights, found = torch.full((len(case.weight),), weight_of_all), []
    for options in ({}, {"class_weight": weights}):
        loss = linear_cross_entropy(*leaves, case.labels, gradient=gradient, reduction=reduction, **options)
        scale = 8 / weight_of_all if options and reduction == "sum" else 8
        found.append(torch.autograd.grad(scale * loss, leaves))
    for value, right in zip(*found, strict=True):
        torch.testing.assert_close(value, right, rtol=0, atol=2e-3 * float(right.abs().max()))


@pytest.mark.reference
def test_losses_and_outputs_of_fp16_have_backwards_of_their_own():
    case = Objectives(("reference", "cpu"))
    leaves = [leaf.detach().half().requires_grad_() for leaf in (case.hidden, case.weight)]
    record = linear_cross_entropy(*leaves, case.labels, outputs=("entropy",))
    both = torch.autograd.grad(record.loss + record.entropy.mean(), leaves, retain_graph=True)
    first = torch.autograd.grad(record.loss, leaves, retain_graph=True)
    for value, *parts in zip(both, first, torch.autograd.grad(record.entropy.mean(), leaves), strict=True):
        torch.testing.assert_close(sum(parts), value, rtol=0, atol=2e-3 * float(value.abs().max()))


@pytest.mark.reference
def test_the_pages_algorithms_survive_far_log_probabilities():
    """An exponential of more than 88 is infinite in fp32, and a clamp after it gives 0 * inf."""
    names: dict[str, object] = {}
    for block in python_blocks((ROOT / "docs" / "objective.md").read_text(encoding="utf-8"))[:4]:
        exec(block, names)
    for name in ("ppo", "grpo", "dapo", "cispo"):
        for far in (-300.0, 300.0):
            log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
            old = log_probs.detach() + torch.tensor([0.0, far, 0.1])
            given = {"advantage": torch.tensor([1.0, -1.0, 2.0]), "old": old, "reference": old}
            taken = inspect.signature(names[name]).parameters
            values = names[name](log_probs, **{k: v for k, v in given.items() if k in taken})
            (gradient,) = torch.autograd.grad(values.sum(), log_probs)
            assert values.isfinite().all() and gradient.isfinite().all(), (name, far)


class _Negative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_probs):
        return -log_probs

    @staticmethod
    def backward(ctx, grad):
        return -grad


class _Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, log_probs):
        return log_probs.mean() - log_probs

    @staticmethod
    def backward(ctx, grad):
        return grad.mean() - grad


def _wrapped(function):
    def inner(*args):
        return function(*args)

    return inner


def _flagged(log_probs, centres):
    return log_probs.mean().detach() - log_probs if centres else -log_probs


def _called(function, log_probs):
    return function(log_probs)


PAIRS = {
    "functions of autograd": (_Negative.apply, _Centred.apply),
    "closures": (_wrapped(lambda p: -p), _wrapped(lambda p: p.mean().detach() - p)),
    "partials": (functools.partial(_flagged, centres=False), functools.partial(_flagged, centres=True)),
    "partials that call partials": tuple(
        functools.partial(_called, functools.partial(_flagged, centres=centres)) for centres in (False, True)
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_functions_that_share_their_code_are_told_apart(impl_device, name):
    case, (right, wrong) = Objectives(impl_device), PAIRS[name]
    given = {"impl": case.impl}
    linear_objective(case.hidden, case.weight, case.labels, right, **given)
    with pytest.raises(ValueError, match="it mixes tokens"):
        linear_objective(case.hidden, case.weight, case.labels, wrong, **given)


def test_a_function_may_refuse_numbers_that_the_check_makes_up(impl_device):
    case = Objectives(impl_device)
    reference = torch.full(case.labels.shape, -30.0, device=case.device)

    def guarded(log_probs, reference):
        if not (log_probs - reference).exp().isfinite().all() or log_probs.min() < -40:
            raise ValueError("diverged")
        return (log_probs - reference).clamp(max=20).exp()

    linear_objective(case.hidden, case.weight, case.labels, guarded, tokens={"reference": reference}, impl=case.impl)
