"""Log-probabilities of the distribution that a sampler used: top-k and top-p, over the whole vocabulary."""

from functools import partial
from typing import NamedTuple

import pytest
import torch

from tests.conformance.widths import PLACE, columns_of, each, made_of, placed, rows_of
from tests.support.cases.flat import linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import broad_rows
from tests.support.cases.pairs import covering
from tests.support.cases.soft import Pair
from tests.support.ranks.case import Case, check, run
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks, in_several_ranks
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import transformed
from vocab_parallel_ce import sampling_threshold, token_log_probs, verify_calls
from vocab_parallel_ce.api.sampling import N_BITS

INF, NAN = float("inf"), float("nan")
N_STEPS = -(-32 // N_BITS)  # of a search among fp32 logits
OF_Z = ("temperature", "softcap", "logit_scale", "group", "vocab_size")  # what both functions take


class Sampling(NamedTuple):
    top_k: int | None = None
    top_p: float = 1.0


def sampled(logits, labels, sampling, **options):
    """Log-probabilities of the distribution that a sampler used."""
    of_z = {name: options[name] for name in OF_Z if name in options}
    threshold = sampling_threshold(logits, **sampling._asdict(), **of_z)
    return token_log_probs(logits, labels, threshold=threshold, **options)


SAMPLINGS = {
    "top-k": Sampling(top_k=5),
    "top-p": Sampling(top_p=0.9),
    "both": Sampling(7, 0.6),
    "the largest": Sampling(1),
    "a small nucleus": Sampling(top_p=1e-6),
    "no fewer": Sampling(10**6, 0.999),
}


def kept_by(z, sampling):
    """``[N, V]``: what a sampler keeps, by sorting; ties stay in. In fp64."""
    z, n = z.double(), z.shape[-1]
    in_order = z.sort(-1, descending=True).values
    kept = torch.ones_like(z, dtype=torch.bool)
    if sampling.top_k is not None:
        kept = z >= in_order[:, min(sampling.top_k, n) - 1 : min(sampling.top_k, n)]
    if sampling.top_p < 1:
        masses = in_order.masked_fill(in_order < z.masked_fill(~kept, INF).amin(-1, keepdim=True), -INF).softmax(-1)
        last = (masses.cumsum(-1) < sampling.top_p).sum(-1, keepdim=True).clamp(max=n - 1)
        kept &= z >= in_order.gather(-1, last)
    return kept


def outputs_of(logits, labels, sampling, temperature=1.0, **options):
    """Log-probabilities and entropies ``[N]`` in the dtype of the logits, 0 for ignored labels."""
    temperature = temperature.to(logits).unsqueeze(-1) if torch.is_tensor(temperature) else temperature
    z = transformed(logits, **options) / temperature
    exact = transformed(logits.detach().double(), **options) / (
        temperature.double() if torch.is_tensor(temperature) else temperature
    )
    kept, ignored = kept_by(exact, sampling), labels == IGNORE_INDEX
    log_p = z.masked_fill(~kept, -INF).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~kept, 0.0)).sum(-1)
    found = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return found.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


LOGITS = covering(
    **PLACE,
    kind=("peaked", "confident"),
    sampling=tuple(SAMPLINGS),
    temperature=(1.0, 0.7, "tokens"),
    softcap=(None, 10.0),
    logit_scale=(1.0, 0.5),
    outputs=((), ("entropy",)),
)


@pytest.mark.quick(3)
@each(LOGITS, interpreted=12)
def test_logits(impl_device, case):
    (impl, device), (logits, labels), shape = impl_device, made_of(case), rows_of(case)
    sampling, live = SAMPLINGS[case["sampling"]], labels != IGNORE_INDEX
    labels[live] = torch.where(torch.arange(len(labels)) % 2 == 0, logits.float().argmax(-1), labels)[live]
    temperature = torch.rand(len(labels)) + 0.5 if case["temperature"] == "tokens" else case["temperature"]
    there = temperature.view(shape).to(device) if torch.is_tensor(temperature) else temperature
    leaf, x = placed(logits, case, device)
    ways = {"temperature": there, "impl": impl, "outputs": case["outputs"], "vocab_size": columns_of(case)[0]}
    of_z = {name: case[name] for name in ("softcap", "logit_scale")}
    found = sampled(x, labels.view(shape).to(device), sampling, **of_z, **ways)
    found = [found.log_probs, found.entropy] if case["outputs"] else [found]
    options = {"temperature": temperature, **of_z}

    def expected(dtype, grads):
        leaf = logits.detach().to(dtype).requires_grad_()
        values = outputs_of(leaf, labels, sampling, **options)[: len(found)]
        (grad,) = torch.autograd.grad(values, leaf, [g.to(dtype) for g in grads])
        return [value.detach() for value in values], grad

    grads = [torch.randn(len(labels), generator=torch.Generator().manual_seed(i)) for i in range(len(found))]
    dropped = outputs_of(logits.double(), labels, sampling, **options)[0] == -INF
    grads[0][dropped] = 0.0  # what a trainer does with a token that its sampler could not draw
    torch.autograd.backward(found, [g.view(shape).to(device) for g in grads])
    truth, peer = expected(torch.float64, grads), expected(torch.float32, grads)
    largest = float(transformed(logits.double(), **of_z).abs().max()) / 0.5
    for name, *triple in zip(("log_probs", "entropy"), found, truth[0], peer[0], strict=False):
        value, *others = (each.detach().view(-1).cpu() for each in triple)
        assert_within_budget(value, *others, largest if name == "log_probs" else 1.0 + largest)
    assert bool((found[0].detach().cpu().view(-1)[dropped] == -INF).all())
    assert_within_budget(leaf.grad, truth[1].nan_to_num(0.0), peer[1].nan_to_num(0.0), largest)


def test_equal_logits_and_edges(impl_device):
    """Equals stay in or go together; -inf columns, NaN, +inf, a row of nothing and zeros of both signs."""
    impl, device = impl_device
    logits = torch.tensor([[3.0, 1.0, 3.0, 2.0], [0.0, -0.0, -1.0, 5.0], [-INF, 1.0, -INF, 0.0], [NAN, 1.0, 2.0, 0.0]])
    logits = torch.cat([logits, torch.tensor([[INF, 1.0, 2.0, 0.0], [-INF] * 4])]).to(device)
    labels = torch.tensor([0, 1, 1, 1, 1, 1], device=device)

    def found(**sampling):
        return sampled(logits, labels, Sampling(**sampling), impl=impl).exp().cpu()

    first, second = found(top_k=1), found(top_k=2)
    assert first[0] == 0.5 and first[1] == 0 and first[2] == 1
    assert second[0] == 0.5 and torch.isclose(second[1], 1 / (2 + torch.tensor(5.0).exp()))
    assert torch.isclose(found(top_k=3, top_p=0.5)[0], torch.tensor(0.5))
    assert torch.isclose(found(top_k=4)[2], 1 / (1 + torch.tensor(-1.0).exp()))
    for probs in (first, second, found(top_p=0.3)):
        assert probs[3:].isnan().all()
    zeros = torch.tensor([[0.0, -0.0, 0.0, -0.0, 0.01, -1.0]], device=device)
    of_zero = sampled(zeros, labels[1:2], Sampling(5, 0.5), impl=impl).exp()
    assert torch.isclose(of_zero.cpu(), 1 / (4 + torch.tensor(0.01).exp()))


@pytest.mark.reference
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32, torch.float64), ids=str)
def test_the_threshold_lies_between_the_kept_and_the_dropped_logits(dtype, monkeypatch):
    """In the middle; -inf where nothing is dropped. Many rows are done in parts, with their own temperatures."""
    logits = (torch.randn(6, 300) * 3).to(dtype)
    temperature = torch.linspace(0.5, 2.0, 6)
    for sampling in (*SAMPLINGS.values(), Sampling(200), Sampling()):
        found = sampling_threshold(logits, **sampling._asdict(), temperature=temperature)
        kept = kept_by(logits.double() / temperature.unsqueeze(-1), sampling)
        last = logits.double().masked_fill(~kept, INF).amin(-1)
        first = logits.double().masked_fill(kept, -INF).amax(-1)
        middle = (last + first) / 2
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert bool(((found > first) | (first == -INF)).all() and (found <= last).all())
        assert torch.allclose(found.double(), middle, rtol=2 * torch.finfo(found.dtype).eps, atol=0.0)
        monkeypatch.setattr("vocab_parallel_ce.api.sampling.MOST_ELEMENTS", 700)
        assert torch.equal(sampling_threshold(logits, **sampling._asdict(), temperature=temperature), found)
        monkeypatch.undo()
    assert sampling_threshold(logits[:0].view(0, 2, 300), top_k=3).shape == (0, 2)
    assert (sampling_threshold(logits, top_k=300) == -INF).all()


@pytest.mark.parametrize("keep_logits", ("none", "all"))
def test_heads(impl_device, keep_logits):
    """In chunks, with ignored tokens left out and a temperature per token."""
    impl, device = impl_device
    hidden, weight, sampling = torch.randn(9, 12), torch.randn(43, 12), Sampling(9, 0.8)
    temperature, labels = torch.rand(9) + 0.5, (hidden @ weight.t()).argmax(-1)
    labels[4] = IGNORE_INDEX
    grad_output = torch.randn(9)

    def gradients(function, dtype, device):
        leaves = [t.to(device, dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        found = function(*leaves)
        return found.detach(), *torch.autograd.grad(found, leaves, grad_output.to(found))

    threshold = sampling_threshold(hidden @ weight.t(), **sampling._asdict(), temperature=temperature)

    def ours(h, w):
        ways = {"impl": impl, "chunk_size": 2, "keep_logits": keep_logits, "temperature": temperature.to(device)}
        return linear_token_log_probs(h, w, labels.to(device), threshold=threshold.to(device), **ways)

    found = gradients(ours, torch.float32, device)
    oracle = partial(lambda h, w: outputs_of(h @ w.t(), labels, sampling, temperature)[0])
    truth, peer = (gradients(oracle, dtype, "cpu") for dtype in (torch.float64, torch.float32))
    for triple in zip(found, truth, peer, strict=True):
        assert_within_budget(*triple, 30.0)


def _sampled(student, ignored, *, labels, top_k, top_p, temperature, reduction, **options):
    return sampled(student, labels, Sampling(top_k, top_p), temperature=temperature, **options)


def _losses(student, ignored, *, labels, top_k, top_p, temperature):
    return outputs_of(student, labels, Sampling(top_k, top_p), temperature)[0]


@pytest.mark.quick(2)
@pytest.mark.interpreted(2)
@pytest.mark.parametrize(("top_k", "top_p"), ((9, 0.8), (9, 1.0), (None, 0.8)))
@in_several_ranks
def test_ranks(rank_pool, impl, top_k, top_p):
    """The thresholds are of the whole vocabulary, and the same on all ranks: by a list, or sums above numbers.

    Then 4 bytes: the largest logit that is dropped.
    """
    logits, _ = broad_rows("peaked", 6, 61)
    n = rank_pool.world_size
    width = -(-64 // n)
    bounds = [(rank * width, (rank + 1) * width) for rank in range(n)]
    options = {"labels": logits.argmax(-1), "top_k": top_k, "top_p": top_p, "temperature": 0.7, "reduction": "none"}
    case = Case(Pair(logits, logits, _losses), impl, options, bounds, "shard", function=_sampled)
    search = [4 * 9] + [4] * (top_p < 1) if top_k else [4] + [8] + [8 * (2**N_BITS - 1)] * N_STEPS
    check(case, rank_pool.run(run, case), [*search, 4, 12])


def _head_in_rank(rank, group, impl, given, sequence_parallel):
    hidden, weight, labels = (t.to(device_of(rank, group)) for t in given)
    width = len(weight) // group.size()
    own = weight[rank * width : (rank + 1) * width].clone().requires_grad_()
    ways = {"group": group, "chunk_size": 4, "impl": impl, "sequence_parallel": sequence_parallel}
    with record_collectives() as calls:
        threshold = sampling_threshold(hidden @ own.t(), top_p=0.7, group=group)
    tokens = hidden.chunk(group.size())[rank] if sequence_parallel else hidden
    found = linear_token_log_probs(tokens, own, labels, threshold=threshold, **ways)
    found.sum().backward()
    return found.detach().cpu(), own.grad.cpu(), len(calls)


@pytest.mark.interpreted(1)
@pytest.mark.parametrize("sequence_parallel", (False, True))
@in_several_ranks
def test_heads_of_ranks(rank_pool, impl, sequence_parallel):
    """With an ignored token left out. A threshold is of all tokens, as a label is, whoever has the hidden states."""
    hidden, weight = torch.randn(8, 12), torch.randn(40, 12)
    labels = (hidden @ weight.t()).argmax(-1)
    labels[3] = IGNORE_INDEX
    expected = []
    for dtype in (torch.float64, torch.float32):
        leaf = weight.to(dtype, copy=True).requires_grad_()
        log_probs, _ = outputs_of(hidden.to(dtype) @ leaf.t(), labels, Sampling(top_p=0.7))
        expected.append((log_probs, *torch.autograd.grad(log_probs.sum(), leaf)))
    results = rank_pool.run(_head_in_rank, impl, (hidden, weight, labels), sequence_parallel)
    assert all(torch.equal(each, results[0][0]) and n_calls == 1 + 1 + N_STEPS + 1 for each, _, n_calls in results)
    d_weight = torch.cat([grad for _, grad, _ in results])
    for triple in zip((results[0][0], d_weight), *expected, strict=True):
        assert_within_budget(*triple)


def test_a_dropped_label_under_an_objective_of_exponentials(impl_device):
    """Columns that are kept are those of a dense filter, the others NaN; replaced before, nothing has a gradient."""
    impl, device = impl_device
    logits = torch.tensor([[5.0, 4.0, 3.0, 0.0, -1.0]]).to(device).requires_grad_()
    for is_replaced in (False, True):
        dense = logits.where(logits >= 3, -float("inf")).log_softmax(-1)[:, 4]
        own = sampled(logits * 1, torch.tensor([4], device=device), Sampling(3), impl=impl)
        grads = []
        for log_prob in (own, dense):
            assert log_prob == -float("inf")
            apart = -1 - (log_prob.masked_fill(log_prob.isinf(), -1.0) if is_replaced else log_prob)
            grads += torch.autograd.grad((apart.exp() - apart - 1).sum(), logits)
        if is_replaced:
            assert not grads[0].any() and not grads[1].any()
        else:
            assert torch.equal(grads[0][:, :3], grads[1][:, :3]) and not grads[0].isfinite().any()
            assert grads[0][:, 3:].isnan().all() and not grads[1][:, 3:].any()


def _differing(rank, group):
    logits, labels = torch.randn(4, 9, generator=torch.Generator().manual_seed(rank)), torch.arange(4)
    threshold = torch.full((4,), -1.0 - rank)
    given = {"labels": labels, "threshold": threshold, "group": group}
    with verify_calls():
        return [
            error_of(partial(sampling_threshold, logits, top_k=2 + rank, group=group)),
            error_of(partial(token_log_probs, logits, **given)),
            error_of(partial(linear_token_log_probs, torch.ones(4, 3), logits.t()[:, :3].contiguous(), **given)),
        ]


@in_ranks((2,), (), ())
def test_verification_compares_the_ranks(rank_pool, impl):
    for of_k, *of_thresholds in rank_pool.run(_differing):
        assert of_k == "ValueError: top_k: rank 1 of 2 has 3, rank 0 has 2"
        for error in of_thresholds:
            assert error.startswith("ValueError: threshold: rank 1 of 2 has ")


@pytest.mark.reference
@pytest.mark.parametrize("is_head", (False, True))
def test_a_compiled_call_with_a_threshold_has_the_same_bits(is_head):
    """A head leaves an ignored token out."""
    function = linear_token_log_probs if is_head else token_log_probs
    logits, labels = torch.randn(4, 9), torch.randint(0, 9, (4,))
    labels[1] = IGNORE_INDEX
    weight = (torch.eye(9),) if is_head else ()
    threshold, results = sampling_threshold(logits, top_k=5, top_p=0.9), []
    for step in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        found = step(leaf * 1, *weight, labels, threshold=threshold)
        found.clamp(min=-9.0).sum().backward()
        results.append((found.detach(), leaf.grad))
    assert all(map(torch.equal, *results))


@pytest.mark.reference
def test_all_tokens_are_those_without_a_threshold():
    logits, labels = torch.randn(4, 9), torch.randint(0, 9, (4,))
    assert torch.equal(sampled(logits, labels, Sampling(9, 1.0)), token_log_probs(logits, labels))
