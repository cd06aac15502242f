"""Any objective of each token inside a head: against fp64, on several ranks, and beside its two steps."""

from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.cases import linear
from tests.support.cases.flat import linear_objective, linear_token_log_probs
from tests.support.cases.linear import COLUMNS, WIDTH, record_matmuls
from tests.support.cases.objectives import OBJECTIVES, grpo, numbers_of, ppo
from tests.support.host.gpu import assert_graph_replays, assert_host_never_waits, extra_peak_bytes
from tests.support.ranks import case as on_ranks
from tests.support.ranks.linear import COLUMNS as OF_RANK
from tests.support.ranks.linear import check_collectives
from tests.support.ranks.pools import device_of, in_several_ranks
from vocab_parallel_ce import linear_cross_entropy

ROWS, OF_RANKS = linear.N_LEAVES, 8


class Objectives(linear.Leaves):
    """Calls of an objective, and of its two steps, which other tests know to be right."""

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.tokens = {name: number.to(self.device) for name, number in numbers_of(self.labels.shape).items()}

    def loss(self, objective=ppo, **options):
        options = {"bias": self.bias, "impl": self.impl, "outputs": ("entropy",), "tokens": self.tokens, **options}
        labels = options.pop("labels", self.labels)
        return linear_objective(self.hidden, self.weight, labels, objective, **options)

    def gradients(self, *args, factor=1.0, **options):
        return torch.autograd.grad(factor * self.loss(*args, **options)[0], self.leaves)

    def in_two_steps(self, objective=ppo, divisor=None, **options):
        options = {"bias": self.bias, "impl": self.impl, "outputs": ("entropy",), **options}
        found = linear_token_log_probs(self.hidden, self.weight, self.labels, **options)
        is_valid = self.labels != -100
        values = objective(found.log_probs, entropy=found.entropy, **self.tokens)
        loss = torch.where(is_valid, values, 0.0).sum() / (is_valid.sum() if divisor is None else divisor)
        return loss, found, torch.autograd.grad(loss, self.leaves)

    def assert_as_in_two_steps(self, divisor=None, own=None, **options):
        loss, found = self.loss(**options, **(own or {}))
        expected, record, gradients = self.in_two_steps(divisor=divisor, **options)
        torch.testing.assert_close(loss, expected)
        for one, other in zip(torch.autograd.grad(loss, self.leaves), gradients, strict=True):
            torch.testing.assert_close(one, other)
        for name in ("log_probs", "entropy"):
            one, other = getattr(found, name), getattr(record, name)
            torch.testing.assert_close(one, other.detach())
            assert not one.requires_grad and one.grad_fn is None


@pytest.mark.quick
@pytest.mark.parametrize("name", OBJECTIVES)
def test_algorithms(impl_device, name):
    """Random calls have the numbers of both steps, in every dtype."""
    for kind, options in (
        ("some_ignored", {"chunk_size": 2}),
        ("some_ignored", {"softcap": 9.0}),
        ("peaked", {"chunk_size": 4, "temperature": 1.3}),
    ):
        options |= {"objective": OBJECTIVES[name], "logit_scale": 0.3}  # log-probabilities near those of the numbers
        Objectives(impl_device, kind).assert_as_in_two_steps(**options)


def _in_rank(rank, group, impl, inputs):
    device = device_of(rank, group)
    leaves = [t.clone().to(device).requires_grad_() for t in (inputs.hidden, inputs.weight.chunk(group.size())[rank])]
    tokens = {name: number.to(device) for name, number in numbers_of((OF_RANKS,)).items()}
    options = {"tokens": tokens, "outputs": ("entropy",), "group": group, "impl": impl, "chunk_size": 4}
    call = partial(linear_objective, *leaves, inputs.labels.to(device), ppo, **options)
    outputs, *sent = on_ranks.with_collectives(call, ())
    return on_ranks.Result(outputs, (leaves[0].grad,), *sent)


@in_several_ranks
def test_an_algorithm_on_several_ranks(rank_pool, impl):
    """One all_gather and one all_reduce a chunk, and nothing in backward."""
    inputs = linear.many_tokens(OF_RANKS, OF_RANK * rank_pool.world_size)
    results = rank_pool.run(_in_rank, impl, inputs)
    for result in results:
        assert all(map(torch.equal, result.outputs + result.gradients, results[0].outputs + results[0].gradients))
    case = on_ranks.Case(inputs, impl, {"chunk_size": 4, "gradient": "in_forward"})
    check_collectives(case, results, extra=1)


def test_divisors_and_bounds_of_valid_tokens(impl_device):
    case = Objectives(impl_device)
    n_valid = int((case.labels != -100).sum())
    for divisor, own in (
        (1, {"reduction": "sum"}),
        (2.5, {"num_items": 2.5}),
        (4, {"num_items": torch.tensor(4, device=case.device), "reduction": "sum"}),
        (None, {"valid_tokens": n_valid, "chunk_size": 2}),
        (None, {"check_objective": True, "chunk_size": 4}),
    ):
        case.assert_as_in_two_steps(divisor, own)
    loss, found = case.loss(valid_tokens=n_valid - 1, check_labels=False)
    assert loss.isnan() and found.log_probs.isnan().any()
    assert all(gradient.isnan().any() for gradient in torch.autograd.grad(loss, case.leaves))


def test_ignored_tokens_count_nowhere(impl_device):
    """Whatever an objective makes of their log-probability of 0 and of their numbers."""
    case = Objectives(impl_device)
    is_ignored = case.labels == -100
    assert is_ignored.any() and not is_ignored.all()
    plain, tokens = case.gradients(), dict(case.tokens)
    for number in (torch.nan, torch.inf):
        tokens["old"] = tokens["old"].masked_fill(is_ignored, number)
        tokens["advantage"] = tokens["advantage"].masked_fill(is_ignored, number)
        loss, _ = case.loss(tokens=tokens)
        assert torch.equal(loss, case.loss()[0])
        for one, other in zip(torch.autograd.grad(loss, case.leaves), plain, strict=True):
            assert torch.equal(one, other)
    loss, found = case.loss(labels=torch.full_like(case.labels, -100))
    assert loss == 0 and not found.log_probs.any() and not any(g.any() for g in torch.autograd.grad(loss, case.leaves))


def test_an_ignored_token_among_many_counts_nowhere(impl_device):
    """A CPU leaves out none of them if nearly all count, and a GPU never does."""
    impl, device = impl_device
    inputs, numbers = linear.many_tokens(24, COLUMNS), numbers_of((24,))
    inputs.labels[5], numbers["old"][5] = -100, torch.nan
    loss_and_gradients = []
    for rows in (torch.arange(24), torch.tensor([row for row in range(24) if row != 5])):
        hidden, weight = inputs.hidden[rows].to(device).requires_grad_(), inputs.weight.to(device).requires_grad_()
        tokens = {name: number[rows].to(device) for name, number in numbers.items()}
        options = {"tokens": tokens, "outputs": ("entropy",), "impl": impl, "chunk_size": 10}
        loss, _ = linear_objective(hidden, weight, inputs.labels[rows].to(device), ppo, **options)
        loss_and_gradients.append((loss.detach(), *torch.autograd.grad(loss, (hidden, weight))))
    (loss, d_hidden, d_weight), (other, d_others, d_weight_of_others) = loss_and_gradients
    torch.testing.assert_close((loss, d_weight), (other, d_weight_of_others))
    assert not d_hidden[5].any()
    torch.testing.assert_close(torch.cat([d_hidden[:5], d_hidden[6:]]), d_others)


def test_three_products_of_each_chunk_and_none_in_backward(impl_device):
    case = Objectives(impl_device, dtype=torch.bfloat16)
    for own, n_products in (({}, 3), ({"chunk_size": 2, "valid_tokens": 4}, 6)):
        with record_matmuls() as in_forward:
            loss, _ = case.loss(**own)
        with record_matmuls() as in_backward:
            loss.backward()
        assert (len(in_forward), len(in_backward)) == (n_products, 0)
    with torch.no_grad(), record_matmuls() as in_forward:
        loss, found = case.loss()
    assert len(in_forward) == 1 and loss.grad_fn is None
    torch.testing.assert_close(loss, case.loss()[0].detach(), rtol=1e-3, atol=1e-3)
    frozen = Objectives(impl_device, frozen=("weight", "bias"))
    with record_matmuls() as in_forward:
        frozen.gradients()
    assert len(in_forward) == 2


def test_backward_runs_once_and_outputs_have_no_gradient(impl_device):
    case = Objectives(impl_device)
    loss, found = case.loss(outputs=("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions"))
    assert not any(each.requires_grad for each in (found.log_probs, found.entropy, found.lse, found.predictions))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_objective: backward ran a second time"):
        loss.backward()
    with pytest.raises(RuntimeError, match="linear_objective: expected backward without create_graph"):
        torch.autograd.grad(case.loss()[0], case.leaves, create_graph=True)


def test_autocast_and_no_tokens(impl_device):
    case = Objectives(impl_device, "peaked")
    with torch.autocast(case.device, torch.bfloat16):
        gradients = case.gradients()
    for one, other in zip(gradients, case.gradients(), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0.03 * float(other.abs().max()))
    empty = torch.zeros(0, WIDTH, device=case.device, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64, device=case.device)
    loss, found = linear_objective(empty, case.weight, none, lambda log_probs: log_probs, impl=case.impl)
    loss.backward()
    assert loss == 0 and found.log_probs.shape == (0,) and empty.grad.shape == (0, WIDTH) and not case.weight.grad.any()


def test_an_objective_gets_copies(impl_device):
    """It may write to them, and numbers may be of any dtype, or made where autograd saves nothing."""
    case = Objectives(impl_device, "peaked")  # no token is left out
    with torch.inference_mode():
        tokens = {"advantage": case.tokens["advantage"] * 1, "mask": case.tokens["old"] > -3, "count": case.labels * 1}

    def plain(log_probs, advantage, mask, count, predictions):
        return torch.where(mask, -4 * advantage * log_probs / count.add(1), 0.0)

    def writing(log_probs, advantage, mask, count, predictions):
        predictions.zero_()
        return torch.where(mask, -advantage.mul_(2) * log_probs.mul_(2) / count.add_(1), 0.0)

    before = {name: number.clone() for name, number in tokens.items()}
    options = {"tokens": tokens, "outputs": ("predictions",), "check_objective": True}
    expected = case.gradients(plain, **options)
    for one, other in zip(case.gradients(writing, **options), expected, strict=True):
        assert torch.equal(one, other)
    _, found = case.loss(plain, **options)
    _, of_writing = case.loss(writing, **options)
    with torch.no_grad():
        _, unrecorded = case.loss(lambda log_probs, **of: log_probs.sub_(1) + of["predictions"].zero_(), **options)
    for record in (of_writing, unrecorded):
        assert torch.equal(record.log_probs, found.log_probs) and torch.equal(record.predictions, found.predictions)
    assert all(torch.equal(tokens[name], number) for name, number in before.items())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_runs_its_forward_once_in_forward(impl_device, is_reentrant):
    """Its hooks see no tensor of the objective: to unpack one runs everything again, in each chunk."""
    case, calls = Objectives(impl_device), []

    def counted(log_probs, **of):
        calls.append(len(log_probs))
        return ppo(log_probs, **of)

    def region(hidden, weight):
        calls.append("region")
        own = {"bias": case.bias, "impl": case.impl, "tokens": case.tokens, "outputs": ("entropy",), "chunk_size": 2}
        return linear_objective(hidden * 1, weight, case.labels, counted, check_objective=False, **own)[0]

    expected = case.gradients(chunk_size=2)
    loss = checkpoint(region, case.hidden, case.weight, use_reentrant=is_reentrant)
    assert calls[0] == "region" and "region" not in calls[1:]
    loss.backward()
    assert calls.count("region") == 2 and len(calls) <= 2 * (1 + ROWS // 2)
    for leaf, other in zip((case.hidden, case.weight), expected, strict=False):
        torch.testing.assert_close(leaf.grad, other)


def test_a_check_finds_nothing_in_right_objectives(impl_device):
    case = Objectives(impl_device)
    for objective in (
        lambda log_probs, **of: ppo(log_probs, **of).bfloat16(),
        lambda log_probs, **of: ppo(log_probs.bfloat16(), **of),
        lambda log_probs, advantage, **_: 1e-8 * advantage * log_probs,
        lambda log_probs, advantage, **_: 1e6 * advantage * log_probs.exp(),
    ):
        case.loss(objective, check_objective=True)


MIXING = {
    "a small mean": lambda p, advantage: 1e-8 * p * (advantage - advantage.mean()),
    "a mean": lambda p, advantage: p * (advantage - advantage.mean()),
    "a sum of a sequence": lambda p, advantage: p.cumsum(0) * advantage,
    "a neighbour": lambda p, advantage: p * p.roll(1).detach(),
    "a value alone": lambda p, advantage: p + p.mean().detach(),
    "the factor of a derivative": lambda p, advantage: p.detach() + (p - p.detach()) * advantage.mean(),
    "a derivative alone": lambda p, advantage: p + (p.roll(1) - p.roll(1).detach()),
    "the number of tokens": lambda p, advantage: p / len(p),
    "a token": lambda p, advantage: p - p[0].detach(),
    "the largest": lambda p, advantage: p - p.max().detach(),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_check_finds_objectives_that_mix_tokens(impl_device, name):
    case = Objectives(impl_device, "peaked")

    def objective(log_probs, advantage, **_):
        return MIXING[name](log_probs, advantage)

    case.gradients(objective, check_objective=False)
    for own in ({}, {"chunk_size": 4}):
        with pytest.raises(ValueError, match="it mixes tokens"):
            case.loss(objective, check_objective=True, **own)


def test_a_check_sees_through_a_policy_that_is_its_own_reference(impl_device):
    """A mean of k3 and its derivative are 0 there; and without advantages, gradients are rounding alone."""
    case = Objectives(impl_device, "peaked")
    same = case.loss()[1].log_probs
    tokens = {"advantage": torch.zeros_like(same), "old": same, "reference": same + 1e-6}

    def of_a_mean(log_probs, old, **_):
        difference = old - log_probs
        return log_probs + 0.04 * (difference.exp() - difference - 1).mean()

    for objective in (lambda p, **of: grpo(p, **of), lambda p, **of: grpo(p.bfloat16(), **of)):
        case.loss(objective, tokens=tokens, check_objective=True)
    with pytest.raises(ValueError, match="it mixes tokens"):
        case.loss(of_a_mean, tokens=tokens, check_objective=True)


def test_an_objective_of_all_tokens_is_told_so(impl_device):
    case = Objectives(impl_device, "peaked")
    advantage = case.tokens["advantage"]
    for objective in (lambda p, **_: advantage * p, lambda p, **_: p.view(2, -1).mean(-1).repeat(ROWS // 2)):
        case.gradients(objective, check_objective=False)
        with pytest.raises(ValueError, match=r"it mixes tokens.*Numbers of all tokens must be in tokens=$"):
            case.loss(objective, check_objective=True)


def test_a_check_without_memory_says_so(impl_device):
    lengths = []

    def objective(log_probs, **_):
        lengths.append(len(log_probs))
        if lengths[-1] < lengths[0]:
            raise torch.OutOfMemoryError
        return log_probs * 1

    pytest.raises(torch.OutOfMemoryError, Objectives(impl_device).loss, objective, check_objective=True)


def test_compiled_code_breaks_its_graph_and_goes_on():
    case = Objectives(("reference", "cpu"), "peaked")
    tokens = case.tokens

    def step(hidden):
        return linear_objective(hidden * 2, case.weight, case.labels, grpo, tokens=tokens, outputs=("entropy",))[0] + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match="linear_objective has no operator"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(case.hidden)
    torch._dynamo.reset()
    expected = torch.autograd.grad(step(case.hidden), case.hidden)
    found = torch.autograd.grad(torch.compile(step, backend="aot_eager")(case.hidden), case.hidden)
    torch.testing.assert_close(found, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_the_host_never_waits(impl):
    case = Objectives((impl, "cuda"), dtype=torch.bfloat16)
    main_grad = torch.zeros(COLUMNS, WIDTH, device="cuda")

    def step():
        case.gradients(grpo)
        loss, _ = case.loss(main_grad=main_grad, chunk_size=2)
        loss.backward()

    assert_host_never_waits(step)


@pytest.mark.cuda
def test_a_captured_graph_replays_other_numbers():
    case = Objectives(("triton", "cuda"), dtype=torch.bfloat16)
    weight = case.weight.detach()

    def step(hidden, advantage, old):
        hidden, tokens = hidden.detach().requires_grad_(), {"advantage": advantage, "old": old, "reference": old}
        options = {"tokens": tokens, "outputs": ("entropy",), "impl": "triton", "chunk_size": 4}
        loss, found = linear_objective(hidden, weight, case.labels, ppo, **options)
        return loss.detach(), found.log_probs, *torch.autograd.grad(loss, [hidden])

    hidden, advantage, old = case.hidden.detach(), case.tokens["advantage"], case.tokens["old"]
    batches = [(hidden * number, advantage * number, old + number) for number in (2.0, 3.0)]
    assert_graph_replays(step, (hidden.clone(), advantage.clone(), old.clone()), batches)


@pytest.mark.cuda
@pytest.mark.no_poison
def test_the_peak_memory_is_that_of_a_mean():
    n_tokens, hidden_size, n_columns = 8192, 1024, 32_000
    hidden = torch.randn(n_tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(n_columns, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(n_columns, (n_tokens,), device="cuda")
    tokens = {name: number.cuda() for name, number in numbers_of((n_tokens,)).items()}

    def of_a_mean():
        return torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))

    def of_an_objective():
        loss, _ = linear_objective(hidden, weight, labels, grpo, tokens=tokens, outputs=("entropy",))
        return torch.autograd.grad(loss, (hidden, weight))

    assert extra_peak_bytes(of_an_objective) <= extra_peak_bytes(of_a_mean) + 40 * 4 * n_tokens
