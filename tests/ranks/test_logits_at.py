"""Logits at given ids, and the distribution of a sampler that kept them: over logits, in a head, and on ranks."""

import pytest
import torch

from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of, in_several_ranks
from vocab_parallel_ce import HeadOptions, VocabShard, linear_token_log_probs, logits_at, vocab_parallel_cross_entropy

NAN, INF = float("nan"), float("inf")
COLUMNS, TOKENS = 21, 6


def inputs(dtype=torch.float32):
    """Logits, one id given twice, fewer ids in every second token, and a gradient."""
    seeded = torch.Generator().manual_seed(3)
    logits = torch.randn(TOKENS, COLUMNS, generator=seeded).to(dtype)
    ids = torch.stack([torch.randperm(COLUMNS, generator=seeded)[:5] for _ in range(TOKENS)])
    ids[:, 1], ids[::2, 4] = ids[:, 0], -1
    return logits, ids, torch.randn(ids.shape, generator=seeded)


def expected(logits, ids, grad):
    """In fp64, of a matrix of which columns are given."""
    x = logits.double()
    given = ids.unsqueeze(-1) == torch.arange(x.shape[-1])
    values = torch.where(given, x.unsqueeze(1), 0.0).sum(-1).masked_fill(ids == -1, -INF)
    return values, torch.where(given, grad.double().unsqueeze(-1), 0.0).sum(1)


def _in_rank(rank, group, dtype, bounds):
    """What this rank's columns give, the last padded with NaN, their gradient, and the collectives."""
    (logits, ids, grad), device, (start, stop) = inputs(dtype), device_of(rank, group), bounds[rank]
    n_padded = 2 * (stop == COLUMNS)
    leaf = torch.nn.functional.pad(logits[:, start:stop], (0, n_padded), value=NAN).to(device).requires_grad_()
    shard = VocabShard(start, stop + n_padded, COLUMNS)
    with record_collectives() as collectives:
        found = logits_at(leaf * 1, ids.to(device), group=group, vocab_size=shard)
        found.backward(grad.to(found))
    own, of_padding = leaf.grad.cpu().split([stop - start, n_padded], dim=-1)
    return found.detach().cpu(), own, of_padding, [(call.name, call.nbytes) for call in collectives]


@in_several_ranks
def test_ranks(rank_pool, impl):
    """Shards that are not even: of three ranks or more one is empty."""
    cuts = [0, *[13] * (rank_pool.world_size - 1), COLUMNS]
    bounds = list(zip(cuts, cuts[1:], strict=False))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values, grad = expected(*inputs(dtype))
        results = rank_pool.run(_in_rank, dtype, bounds)
        for found, _, of_padding, collectives in results:
            assert torch.equal(found.double(), values) and found.dtype == torch.promote_types(dtype, torch.float32)
            assert not of_padding.any() and collectives == [("allreduce_", found.nbytes)]
        own = torch.cat([each for _, each, *_ in results], -1)
        torch.testing.assert_close(own, grad.to(dtype), rtol=0.01, atol=0.01)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32, torch.float64), ids=str)
def test_one_rank(dtype):
    logits, ids, grad = inputs(dtype)
    values, expected_grad = expected(logits, ids, grad)
    for given in (ids, ids.int()):
        leaf = logits.clone().requires_grad_()
        found = logits_at(leaf, given)
        found.backward(grad.to(found.dtype))
        assert torch.equal(found.detach().double(), values)
        torch.testing.assert_close(leaf.grad, expected_grad.to(dtype), rtol=0.01, atol=0.01)
        assert not leaf.grad[expected_grad == 0].any()
    x = logits.view(2, 3, -1).transpose(0, 1)
    assert torch.equal(logits_at(x, ids.view(2, 3, -1).transpose(0, 1)).transpose(0, 1).flatten(0, 1), values.to(found))


@pytest.mark.reference
@pytest.mark.parametrize("loss_is_first", (True, False))
def test_a_loss_overwrites_the_same_logits(loss_is_first):
    """The logits at ids are not saved: backward of the loss may write over them before theirs runs."""
    logits, ids, grad = inputs()
    exact = logits.double().requires_grad_()
    torch.nn.functional.cross_entropy(exact, ids[:, 0]).backward()
    leaf = logits.clone().requires_grad_()
    x = leaf * 1
    calls = [
        lambda: vocab_parallel_cross_entropy(x, ids[:, 0], gradient="in_backward"),
        lambda: (logits_at(x, ids).masked_fill(ids == -1, 0.0) * grad).sum(),
    ]
    first, second = [call() for call in (calls if loss_is_first else reversed(calls))]
    (first + second).backward()
    right = exact.grad + expected(logits, ids, grad)[1]
    torch.testing.assert_close(leaf.grad.double(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.reference
def test_second_derivatives():
    """The values are linear in the logits: a second derivative is that by grad_output."""
    logits, ids, _ = inputs(torch.float64)
    columns = logits.requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: logits_at(x, ids.clamp(min=0)) ** 2, columns)


@pytest.mark.reference
def test_what_is_no_number_stays_where_it_is():
    logits = torch.tensor([[NAN, 1.0, INF, -INF]]).requires_grad_()
    found = logits_at(logits, torch.tensor([[1, 3, -1]]))
    found.log_softmax(-1)[:, 0].sum().backward()
    assert found.tolist() == [[1.0, -INF, -INF]] and not logits.grad.any()
    assert logits_at(logits, torch.tensor([[0]])).isnan().all()


def of_sampler(log_probs, kept, drawn):
    """As docs/rl.md has it: log-probability of what was drawn, and entropy."""
    log_p = log_probs.log_softmax(-1)
    found = log_p.masked_fill(kept != drawn.unsqueeze(-1), -INF).amax(-1)
    return found, -(log_p.exp() * log_p.masked_fill(kept == -1, 0.0)).sum(-1)


def test_a_kept_set_over_logits_and_in_a_head(impl_device):
    """Against a softmax in fp64 of all logits that are not kept at -inf."""
    impl, device = impl_device
    seeded = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(TOKENS, 8, generator=seeded), torch.randn(COLUMNS, 8, generator=seeded)
    kept = torch.stack([torch.randperm(COLUMNS, generator=seeded)[:5] for _ in range(TOKENS)])
    drawn = kept[:, 0].clone()
    kept[::2, 4] = -1

    def gradients(function, dtype, place):
        leaves = [t.to(place, dtype, copy=True).requires_grad_() for t in (hidden, weight)]
        values = function(*leaves, kept.to(place), drawn.to(place))
        grads = torch.autograd.grad(values[0].sum() + values[1].sum(), leaves)
        return [each.detach().cpu().double() for each in (*values, *grads)]

    def truth(h, w, ids, y):
        z = h @ w.t()
        is_kept = (ids.unsqueeze(-1) == torch.arange(COLUMNS)).any(1)
        log_p = z.masked_fill(~is_kept, -INF).log_softmax(-1)
        entropy = -(log_p.exp() * log_p.masked_fill(~is_kept, 0.0)).sum(-1)
        return log_p.gather(-1, y.unsqueeze(-1)).squeeze(-1), entropy

    def over_logits(h, w, ids, y):
        return of_sampler(logits_at(h @ w.t(), ids), ids, y)

    def in_a_head(h, w, ids, y):
        log_probs = linear_token_log_probs(h, w, ids, ignore_index=-1, options=HeadOptions(impl=impl, chunk_size=4))
        return of_sampler(log_probs.masked_fill(ids == -1, -INF), ids, y)

    right = gradients(truth, torch.float64, "cpu")
    for function in (over_logits, in_a_head):
        for one, other in zip(gradients(function, torch.float32, device), right, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.mark.reference
def test_an_id_outside_of_the_vocabulary_is_nan_where_nobody_looks():
    logits, ids, grad = inputs()
    ids[2, 3], ids[3, 2] = COLUMNS, -2
    leaf = logits.requires_grad_()
    found = logits_at(leaf, ids)
    found.backward(grad)
    values, expected_grad = expected(logits.detach(), ids, grad)
    values[2, 3] = values[3, 2] = NAN
    torch.testing.assert_close(found.detach().double(), values, equal_nan=True)
    torch.testing.assert_close(leaf.grad, expected_grad.float())
