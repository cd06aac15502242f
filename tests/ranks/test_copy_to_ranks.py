"""The gradient of hidden states that every rank multiplies by its own rows of a head."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import copy_to_ranks, vocab_parallel_cross_entropy

TOKENS, WIDTH, COLUMNS = 5, 6, 12


def drawn(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, COLUMNS))
    return hidden.to(dtype), weight.to(dtype), torch.tensor([3, 0, -100, 11, 7])


def _gradients(rank, group):
    """In a rank: gradients of hidden states in several ways, the number of all_reduces, and refusals."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (group.size(),))
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, labels = (t.to(device) for t in drawn(dtype))
        shard, leaf = weight.chunk(group.size())[rank], hidden.clone().requires_grad_()

        def loss(hidden, group=group, shard=shard, labels=labels):
            logits = copy_to_ranks(hidden, group) @ shard.t()
            return vocab_parallel_cross_entropy(logits, labels, group=group, vocab_size=COLUMNS)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        ways = {"group": loss, "mesh": lambda h, loss=loss: loss(h, mesh), "compiled": compiled}
        found[dtype] = {way: torch.autograd.grad(call(leaf), leaf)[0].cpu() for way, call in ways.items()}
    with torch.no_grad():
        assert copy_to_ranks(leaf, group) is leaf
    assert copy_to_ranks(hidden, group) is hidden and copy_to_ranks(leaf, None) is leaf
    kept, grad = leaf * 1, torch.ones_like(leaf).expand(2, *leaf.shape)[0]
    copy_to_ranks(kept, group).backward(grad)
    assert torch.equal(grad, torch.ones_like(grad))  # the caller's stays what it is
    hidden, weight, _ = drawn(torch.float64)
    twice = _second_derivative(hidden.to(device), weight.chunk(group.size())[rank].to(device), group)
    others = dist.new_group([0])
    errors = [error_of(copy_to_ranks, leaf, each) for each in ("tp", *((others,) if rank else ()))]
    return found, twice.cpu(), [*errors, error_of(copy_to_ranks, leaf.tolist(), group)]


def _second_derivative(hidden, weight, group):
    leaf = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad((copy_to_ranks(leaf, group) @ weight.t()).tanh().sum(), leaf, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), leaf)[0]


@in_ranks((2, 3), (), (2,))
def test_it_is_summed_over_the_ranks(rank_pool, impl):
    hidden, weight, labels = drawn(torch.float64)
    leaf = hidden.requires_grad_()
    (oracle,) = torch.autograd.grad(F.cross_entropy(leaf @ weight.t(), labels), leaf)
    expected_twice = _second_derivative(hidden, weight, None)
    ranks = rank_pool.run(_gradients)
    for rank, (found, twice, errors) in enumerate(ranks):
        for dtype, grads in found.items():
            h, w, y = drawn(dtype)
            peer = h.clone().requires_grad_()
            (own,) = torch.autograd.grad(F.cross_entropy((peer @ w.t()).float(), y), peer)
            if dtype == torch.float32:
                assert_within_budget(grads["group"], oracle, own)
            else:  # the sum of the ranks' rounded parts
                torch.testing.assert_close(grads["group"].double(), oracle, rtol=2e-2, atol=2e-3)
            assert all(torch.equal(grads["group"], grad) for grad in grads.values())
            assert torch.equal(grads["group"], ranks[0][0][dtype]["group"])
        torch.testing.assert_close(twice, expected_twice, rtol=1e-10, atol=1e-12)
        assert errors[0].startswith("TypeError: group: expected a torch.distributed.ProcessGroup or None")
        assert errors[-1] == "TypeError: hidden: expected a torch.Tensor, got list"
        assert len(errors) == 2 + bool(rank) and (not rank or "this rank must be a member" in errors[1])


@pytest.mark.reference
def test_one_rank_gets_what_it_passed():
    hidden = torch.randn(2, 3, requires_grad=True)
    assert copy_to_ranks(hidden, None) is hidden
    assert copy_to_ranks(hidden=hidden, group=None) is hidden
