"""Log-probabilities of the distribution that a sampler used: top-k and top-p, over the whole vocabulary."""

from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch

from tests.support.cases.flat import linear_token_log_probs
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks, in_several_ranks
from tests.support.truth.oracle import transformed
from vocab_parallel_ce import VocabShard, sampling_threshold, token_log_probs, verify_calls
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
    of_z = {"softcap": 10.0, "logit_scale": 0.5}
    for sampling, own in product((*SAMPLINGS.values(), Sampling(200), Sampling()), ({}, of_z)):
        options = {"temperature": torch.linspace(0.5, 2.0, 6), **own}
        found = sampling_threshold(logits, **sampling._asdict(), **options)
        kept = kept_by(transformed(logits.double(), **own) / options["temperature"].unsqueeze(-1), sampling)
        last = logits.double().masked_fill(~kept, INF).amin(-1)
        first = logits.double().masked_fill(kept, -INF).amax(-1)
        middle = (last + first) / 2
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert bool(((found > first) | (first == -INF)).all() and (found <= last).all())
        assert torch.allclose(found.double(), middle, rtol=2 * torch.finfo(found.dtype).eps, atol=0.0)
        monkeypatch.setattr("vocab_parallel_ce.api.sampling.MOST_ELEMENTS", 700)
        assert torch.equal(sampling_threshold(logits, **sampling._asdict(), **options), found)
        monkeypatch.undo()
    assert sampling_threshold(logits[:0].view(0, 2, 300), top_k=3).shape == (0, 2)
    assert (sampling_threshold(logits, top_k=300) == -INF).all()


def _in_rank(rank, group, logits, sampling):
    width = -(-64 // group.size())
    own = logits[:, rank * width : (rank + 1) * width].to(device_of(rank, group))
    with record_collectives() as calls:
        shard = VocabShard(rank * width, rank * width + own.shape[-1], logits.shape[-1])
        found = sampling_threshold(own, **sampling._asdict(), temperature=0.7, group=group, vocab_size=shard)
    return found, [(call.name, call.nbytes) for call in calls]


@pytest.mark.quick(2)
@pytest.mark.parametrize(("top_k", "top_p"), ((9, 0.8), (9, 1.0), (None, 0.8)))
@in_several_ranks
def test_ranks(rank_pool, impl, top_k, top_p):
    """The thresholds are of the whole vocabulary, and the same on all ranks: by a list, or sums above numbers.

    Then 4 bytes: the largest logit that is dropped.
    """
    logits = torch.randn(6, 61) * 3
    expected = sampling_threshold(logits, top_k=top_k, top_p=top_p, temperature=0.7)
    search = [4 * 9] + [4] * (top_p < 1) if top_k else [4] + [8] + [8 * (2**N_BITS - 1)] * N_STEPS
    for found, sent in rank_pool.run(_in_rank, logits, Sampling(top_k, top_p)):
        assert torch.equal(found, expected)
        assert sent == [("_allgather_base_", 6 * n) for n in (*search, 4)]


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
def test_all_tokens_are_those_without_a_threshold():
    logits, labels = torch.randn(4, 9), torch.randint(0, 9, (4,))
    assert torch.equal(sampled(logits, labels, Sampling(9, 1.0)), token_log_probs(logits, labels))
