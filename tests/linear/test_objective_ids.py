"""Objectives of log-probabilities at k given ids of each token, inside a head: against fp64, on one rank and on two."""

import pytest
import torch
import torch.nn.functional as F

from tests.support.cases.flat import linear_objective
from tests.support.cases.linear import record_matmuls
from tests.support.ranks.pools import device_of, in_ranks

TOKENS, WIDTH, COLUMNS, K, IGNORED = 30, 8, 40, 4, -100


def reverse(log_probs, teacher):
    """Divergence from a teacher that is known at k tokens."""
    return (log_probs.exp() * (log_probs - teacher)).sum(-1)


def of_kept(log_probs, teacher, place, advantage):
    """A policy over kept tokens alone, of which some have fewer."""
    kept = log_probs.masked_fill(teacher == 0, -torch.inf).log_softmax(-1)
    return -advantage * kept.gather(-1, place.unsqueeze(-1)).squeeze(-1).exp()


def made():
    """Hidden states, weight, ids of which every 5th token has none and every 3rd fewer, and numbers by name."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, COLUMNS))
    ids = torch.stack([torch.randperm(COLUMNS, generator=generator)[:K] for _ in range(TOKENS)])
    ids[::3, 2:] = IGNORED
    ids[::5] = IGNORED
    teacher = -torch.rand(TOKENS, K, generator=generator) - 1
    numbers = {"teacher": teacher.masked_fill(ids == IGNORED, 0.0), "place": torch.arange(TOKENS) % 2}
    return hidden, weight, ids, numbers | {"advantage": torch.randn(TOKENS, generator=generator)}


def names_of(objective):
    return ("teacher",) if objective is reverse else ("teacher", "place", "advantage")


def truth_of(objective, scale):
    hidden, weight, ids, numbers = made()
    leaves = [t.double().requires_grad_() for t in (hidden, weight)]
    values = (F.linear(*leaves) * scale).log_softmax(-1).gather(-1, ids.clamp(min=0)).masked_fill(ids == IGNORED, 0.0)
    given = {n: t.double() if t.is_floating_point() else t for n, t in numbers.items() if n in names_of(objective)}
    valid = (ids != IGNORED).any(-1)
    loss = objective(values[valid], **{n: t[valid] for n, t in given.items()}).mean()
    return loss.detach(), *torch.autograd.grad(loss, leaves), values.detach()


def _in_rank(rank, group, impl, objective, device=None):
    """Loss, gradients and log-probabilities of this rank's columns, in 3 chunks."""
    hidden, weight, ids, numbers = made()
    n_ranks, device = (1, device) if group is None else (group.size(), device_of(rank, group))
    leaves = [t.to(device).requires_grad_() for t in (hidden.view(3, 10, WIDTH), weight.chunk(n_ranks)[rank])]
    tokens = {n: t.view(3, 10, *t.shape[1:]).to(device) for n, t in numbers.items() if n in names_of(objective)}
    options = {"tokens": tokens, "group": group, "impl": impl, "chunk_size": 10, "logit_scale": 0.5}
    loss, found = linear_objective(*leaves, ids.view(3, 10, K).to(device), objective, **options)
    loss.backward()
    return [t.detach().cpu() for t in (loss, *(leaf.grad for leaf in leaves), found.log_probs)]


def check(results, objective):
    loss, d_hidden, d_weight, values = truth_of(objective, 0.5)
    parts = d_weight.chunk(len(results))
    for found, part in zip(results, parts, strict=True):
        expected = loss, d_hidden.view(3, 10, WIDTH), part, values.view(3, 10, K)
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value.double(), right, rtol=1e-5, atol=2e-6 * float(right.abs().max()))
        assert torch.equal(found[0], results[0][0]) and torch.equal(found[1], results[0][1])


OBJECTIVES = pytest.mark.parametrize("objective", (reverse, of_kept))


@OBJECTIVES
def test_of_ids_against_fp64(impl_device, objective):
    impl, device = impl_device
    check([_in_rank(0, None, impl, objective, device)], objective)


@OBJECTIVES
@in_ranks()
def test_of_ids_on_ranks(rank_pool, impl, objective):
    check(rank_pool.run(_in_rank, impl, objective), objective)


def test_three_products_and_no_items(impl_device):
    """Of 0 items the gradient is 0, whatever the logits hold."""
    impl, device = impl_device
    hidden, weight, ids, numbers = (t.to(device) if torch.is_tensor(t) else t for t in made())
    options = {"tokens": {"teacher": numbers["teacher"].to(device)}, "impl": impl, "valid_tokens": TOKENS}
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    with record_matmuls() as products:
        linear_objective(*leaves, ids, reverse, **options)[0].backward()
    assert len(products) == 3
    leaves[0].data[1] = torch.nan
    loss, _ = linear_objective(*leaves, ids, reverse, num_items=torch.tensor(0, device=device), **options)
    assert loss == 0 and not any(grad.nan_to_num(1.0).any() for grad in torch.autograd.grad(loss, leaves)[:1])
