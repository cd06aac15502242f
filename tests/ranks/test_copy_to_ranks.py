"""The gradient of hidden states that every rank multiplies by its own rows of a head."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import vocab_parallel_ce as vp
from tests.support.cases import flat
from tests.support.ranks.collectives import error_of, messages_of
from tests.support.ranks.pools import device_of, in_ranks, subgroups
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.summed import CopyToRanks, check_summed, check_summed_once

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
            logits = vp.copy_to_ranks(hidden, group) @ shard.t()
            return vp.vocab_parallel_cross_entropy(logits, labels, group=group, vocab_size=COLUMNS)

        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        ways = {"group": loss, "mesh": lambda h, loss=loss: loss(h, mesh), "compiled": compiled}
        found[dtype] = {way: torch.autograd.grad(call(leaf), leaf)[0].cpu() for way, call in ways.items()}
    with torch.no_grad():
        assert vp.copy_to_ranks(leaf, group) is leaf
    assert vp.copy_to_ranks(hidden, group) is hidden and vp.copy_to_ranks(leaf, None) is leaf
    kept, grad = leaf * 1, torch.ones_like(leaf).expand(2, *leaf.shape)[0]
    vp.copy_to_ranks(kept, group).backward(grad)
    assert torch.equal(grad, torch.ones_like(grad))  # the caller's stays what it is
    hidden, weight, _ = drawn(torch.float64)
    twice = _second_derivative(hidden.to(device), weight.chunk(group.size())[rank].to(device), group)
    others = dist.new_group([0])
    errors = [error_of(vp.copy_to_ranks, leaf, each) for each in ("tp", *((others,) if rank else ()))]
    return found, twice.cpu(), [*errors, error_of(vp.copy_to_ranks, leaf.tolist(), group)]


def _second_derivative(hidden, weight, group):
    leaf = hidden.clone().requires_grad_()
    (grad,) = torch.autograd.grad((vp.copy_to_ranks(leaf, group) @ weight.t()).tanh().sum(), leaf, create_graph=True)
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
    assert vp.copy_to_ranks(hidden, None) is hidden
    assert vp.copy_to_ranks(hidden=hidden, group=None) is hidden


class _CopyToModelParallelRegion(torch.autograd.Function):
    """Megatron-LM's, by its name."""

    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad := grad.clone(), group=ctx.group)
        return grad, None


VIEWS = {
    "itself": lambda h: h,
    "views and casts": lambda h: (
        h.unsqueeze(1).transpose(0, 1)[:, :TOKENS].reshape(TOKENS, -1).double().float().clone()
    ),
}
COPIES = {"copy_to_ranks": vp.copy_to_ranks, "Megatron-LM's": _CopyToModelParallelRegion.apply}


def _before_heads(rank, group):
    """In a rank: errors of heads whose hidden states are copied to the ranks, and what no error stops."""
    device, n_ranks = device_of(rank, group), group.size()
    hidden, weight, labels = (t.to(device) for t in drawn(torch.float32))
    shard, leaf = weight.chunk(n_ranks)[rank], hidden.clone().requires_grad_()
    module = nn.Linear(WIDTH, len(shard), bias=False, device=device)
    module.weight.data.copy_(shard)
    heads = {
        "loss": lambda h, **o: flat.linear_cross_entropy(h, shard, labels, group=group, **o),
        "log-probs": lambda h, **o: -flat.linear_token_log_probs(h, shard, labels, group=group, **o).sum(),
        "objective": lambda h, **o: flat.linear_objective(h, shard, labels, lambda lp: -lp, group=group, **o),
        "distillation": lambda h, **o: flat.linear_distillation_loss(
            vp.Head(h, shard), vp.Head(hidden, shard), labels=labels, hard_weight=0.5, group=group, **o
        ),
        "module": lambda h, **o: flat.LinearCrossEntropy(module, group=group, **o)(h, labels),
    }
    attempts = {
        f"{head}, {copy}, {view}": lambda f=function, c=copied, v=seen: f(v(c(leaf, group)))
        for head, function in heads.items()
        for copy, copied in COPIES.items()
        for view, seen in VIEWS.items()
    }
    part = vp.copy_to_ranks(leaf.chunk(n_ranks)[0], group)
    parts = {"sequence_parallel": True, "group": group}
    attempts["sequence parallelism"] = lambda: flat.linear_cross_entropy(
        part, shard, labels.new_zeros(n_ranks * len(part)), **parts
    )
    own = subgroups(*((r,) for r in range(n_ranks)))[rank]  # as data parallelism: other ranks
    gradients = {"plain": torch.autograd.grad(heads["loss"](leaf), leaf)[0]}
    by_head = heads["loss"](vp.copy_to_ranks(leaf, group), reduce_hidden_grad=False)
    gradients["summed by the copy"] = torch.autograd.grad(by_head, leaf)[0]
    of_others = _CopyToModelParallelRegion.apply(leaf, own)
    gradients["of other ranks"] = torch.autograd.grad(heads["loss"](of_others), leaf)[0]
    with torch.no_grad():
        heads["loss"](vp.copy_to_ranks(leaf, group))
    refused, sent = messages_of(attempts)
    assert not sent
    return refused, {name: grad.cpu() for name, grad in gradients.items()}


@in_ranks((2,), (), (2,))
def test_a_head_refuses_hidden_states_whose_gradient_it_would_sum_again(rank_pool, impl):
    hidden, weight, labels = drawn(torch.float64)
    leaf = hidden.requires_grad_()
    (oracle,) = torch.autograd.grad(F.cross_entropy(leaf @ weight.t(), labels), leaf)
    for errors, gradients in rank_pool.run(_before_heads):
        for name, error in errors.items():
            subject = "student.hidden" if name.startswith("distillation") else "hidden"
            assert error.startswith(f"ValueError: {subject}: expected its gradient to be summed once, "), (name, error)
        for name, grad in gradients.items():
            torch.testing.assert_close(grad.double(), oracle, rtol=1e-5, atol=1e-6, msg=name)


def _under_verification(rank, group):
    """In a rank: what verification says of logits ``hidden @ weight.t()``."""
    device, n_ranks = device_of(rank, group), group.size()
    hidden, weight, labels = (t.to(device) for t in drawn(torch.float32))
    head = nn.Linear(WIDTH, COLUMNS // n_ranks, device=device)
    shard, leaf = weight.chunk(n_ranks)[rank].clone().requires_grad_(), hidden.clone().requires_grad_()
    options = {"group": group, "vocab_size": COLUMNS}
    wrong = {
        "mm": (leaf * 1) @ shard.t(),
        "addmm": head(leaf.tanh()),
        "3-D": F.linear(leaf.tanh().view(1, TOKENS, -1), shard)[0],
        "3-D, bias": head(leaf.tanh().view(1, TOKENS, -1))[0],
        "bmm": torch.bmm(leaf.tanh().unsqueeze(0), shard.t().unsqueeze(0)).float()[0],
        "a leaf": leaf @ shard.t(),
        "scaled": (leaf @ shard.t()) * 1,
        "a frozen head": leaf.tanh() @ shard.detach().t(),
    }
    right = {
        "copied": vp.copy_to_ranks(leaf.tanh(), group).view(1, TOKENS, -1) @ shard.t(),
        "Megatron-LM's": head(_CopyToModelParallelRegion.apply(leaf.tanh(), group)),
        "hidden needs no gradient": hidden @ shard.t(),
        "a head on its other side": (nn.Parameter(shard.detach()) @ leaf.t()).t(),
    }
    calls = {
        "loss": lambda z: vp.vocab_parallel_cross_entropy(z.view(TOKENS, -1), labels, **options),
        "log-probs": lambda z: vp.token_log_probs(z.view(TOKENS, -1), labels, **options),
        "logits at ids": lambda z: vp.logits_at(z.view(TOKENS, -1), labels.clamp(min=0).unsqueeze(-1), **options),
    }
    with vp.verify_calls():
        errors, _ = messages_of(
            {f"{c}, {n}": lambda f=f, z=z: f(z) for c, f in calls.items() for n, z in wrong.items()}
        )
        for logits in right.values():
            calls["loss"](logits)
        with torch.no_grad():
            calls["loss"](wrong["mm"])
    calls["loss"](wrong["mm"])
    return errors


@in_ranks((2,), (), (2,))
def test_verification_finds_logits_whose_hidden_states_get_a_part_of_their_gradient(rank_pool, impl):
    first, *others = rank_pool.run(_under_verification)
    assert all(each == first for each in others)
    for name, error in first.items():
        assert error.startswith("ValueError: logits: expected a product of copy_to_ranks(hidden, group)"), (name, error)


H = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
HANDED_ON = {
    "scaled": lambda h: h * 0.5,
    "dropped": lambda h: torch.dropout(h, 0.1, True),
    "masked": lambda h: h.masked_fill(H > 9, 0.0),
    "joined": lambda h: torch.cat([h, h]),
    "cut": lambda h: h.split([1, 3])[1],
}


@pytest.mark.reference
@pytest.mark.parametrize("name", HANDED_ON)
def test_what_hands_a_gradient_on_is_looked_through(name):
    weight, copied = torch.ones(5, 3, requires_grad=True), CopyToRanks.apply(H, None)
    check_summed(HANDED_ON[name](copied) @ weight.t())
    check_summed((weight @ HANDED_ON[name](copied).t()).t())
    check_summed_once(HANDED_ON[name](H * 1), None)
    with pytest.raises(ValueError, match=r"^logits: expected a product of copy_to_ranks"):
        check_summed(HANDED_ON[name](H) @ weight.t())
    with pytest.raises(ValueError, match=r"^hidden: expected its gradient to be summed once"):
        check_summed_once(HANDED_ON[name](copied), None)
