"""``DistributedDataParallel`` over a model that ends in a loss: one process's gradients, with accumulation too."""

import copy
import gc
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.frameworks import training
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce import vocab_parallel_cross_entropy

in_two_ranks = in_ranks((2,), (2,), (2,))
STEPS, MICRO, RANKS = 3, 2, 2  # a static graph is known after the first step
LOSSES = {
    "torch": ("torch", {}),
    "logits": ("logits", {}),
    "logits, in_forward": ("logits", {"gradient": "in_forward"}),
    "linear": ("linear", {"chunk_size": 4}),
    "linear, in_backward": ("linear", {"gradient": "in_backward"}),
}
WRAPS = {
    "static": {"static_graph": True},
    "static, views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
}


def micro_batches(step, rank, device="cpu"):
    """Those of one rank in one step."""
    first = MICRO * (RANKS * step + rank)
    return training.batches(STEPS * RANKS * MICRO, device)[first : first + MICRO]


def _backward(model, batch):
    loss = model(*batch) / MICRO
    loss.backward()
    return loss.detach()


def _trained(rank, group, impl, name, wrap):
    """Train, with a synchronisation at the last micro-batch of each step."""
    device = device_of(rank, group)
    loss, options = LOSSES[name]
    model = training.Model(loss, **({} if loss == "torch" else {"impl": impl}), **options).to(device)
    wrapped = DistributedDataParallel(model, **WRAPS[wrap])
    optimizer, steps = torch.optim.SGD(wrapped.parameters(), lr=training.RATE), []
    for step in range(STEPS):
        optimizer.zero_grad()
        *first, last = micro_batches(step, rank, device)
        # PyTorch learns a static graph from the first backward, and raises if that does not synchronise.
        with nullcontext() if step == 0 and WRAPS[wrap].get("static_graph") else wrapped.no_sync():
            losses = [_backward(wrapped, batch) for batch in first]
        losses.append(_backward(wrapped, last))
        gradients = training.gradients_of(model)
        optimizer.step()
        steps.append(training.Step(torch.stack(losses).sum(), gradients, training.weights_of(model)))
    return steps


WRAPPED = [(name, "static") for name in ("logits, in_forward", "linear, in_backward")]
WRAPPED += [("logits", "static, views"), ("linear", "unused")]


@pytest.mark.parametrize(("name", "wrap"), WRAPPED)
@in_two_ranks
def test_accumulated_gradients(rank_pool, impl, name, wrap):
    """Gradients and weights of both ranks are those of all their micro-batches, and so is their mean loss."""
    truth = training.fp64_steps([[*micro_batches(step, 0), *micro_batches(step, 1)] for step in range(STEPS)])
    found, peer = (_with_mean_loss(rank_pool.run(_trained, impl, of, wrap)) for of in (name, "torch"))
    for ours, theirs in zip(found, peer, strict=True):
        training.assert_same_steps(ours, truth, theirs)


def _with_mean_loss(by_rank):
    means = [sum(step.loss for step in at) / RANKS for at in zip(*by_rank, strict=True)]
    return [[step._replace(loss=loss) for step, loss in zip(steps, means, strict=True)] for steps in by_rank]


def _of_a_wrapped_head(rank, group, impl, wrapper, is_held):
    """Return whether the gradient is over the logits, whether these are unchanged, and gradients beside PyTorch's."""
    device = device_of(rank, group)
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 40, device=device)
    hidden, labels = torch.randn(6, 8, device=device) + rank, torch.arange(6, device=device)
    expected = copy.deepcopy(head).double()
    F.cross_entropy(expected(hidden.double()), labels).backward()
    if wrapper == "fsdp2":
        mesh = init_device_mesh(device.type, (group.size(),))
        wrapped = fully_shard(head, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(head)
    found, logits = [], wrapped(hidden)
    address, before = logits.data_ptr(), logits.detach().clone()
    logits.register_hook(lambda grad: found.append(grad.data_ptr() == address))
    loss = vocab_parallel_cross_entropy(logits, labels, impl=impl)
    held = [logits] * is_held
    del logits
    gc.collect()  # the interpreter's launches hold their tensors in cycles
    loss.backward()
    grads = [p.grad.full_tensor() if wrapper == "fsdp2" else p.grad for p in head.parameters()]
    return (
        found,
        not held or torch.equal(held[0], before),
        [(g, p.grad) for g, p in zip(grads, expected.parameters(), strict=True)],
    )


def _of_a_wrapped_record(rank, group, impl, wrapper, coefficient):
    """Return the gradients of a model that returns an ``Outputs``, beside PyTorch's of this rank's tokens."""
    device = device_of(rank, group)
    tokens, labels = micro_batches(0, rank, device)[0]
    model, expected = (
        training.Model("linear", outputs=("lse",), impl=impl).to(device),
        training.Model("torch").double().to(device),
    )
    logits = expected.head(expected.hidden(tokens.double()))
    lse = logits.logsumexp(-1).masked_fill(labels < 0, 0.0)
    (F.cross_entropy(logits, labels) + coefficient * lse.square().sum()).backward()
    if wrapper == "fsdp2":
        wrapped = fully_shard(model, mesh=init_device_mesh(device.type, (group.size(),)))
    else:
        wrapped = DistributedDataParallel(model, **WRAPS[wrapper])
    for _ in range(2):  # a static graph is known after the first step
        model.zero_grad()
        found = wrapped(tokens, labels)
        (found.loss + coefficient * found.lse.square().sum() if coefficient else found.loss).backward()
    grads = [p.grad.full_tensor() if wrapper == "fsdp2" else p.grad for p in model.parameters()]
    return [(g, p.grad) for g, p in zip(grads, expected.parameters(), strict=True)]


@pytest.mark.parametrize("coefficient", (0.0, 0.01))
@pytest.mark.parametrize("wrapper", ("static", "unused", "fsdp2"))
@in_two_ranks
def test_wrappers_see_the_tensors_of_a_record(rank_pool, impl, wrapper, coefficient):
    """What a wrapper does not see in what a model returns stays local to each rank."""
    assert_averaged(rank_pool.run(_of_a_wrapped_record, impl, wrapper, coefficient))


def assert_averaged(by_rank):
    """Gradients are the mean over the ranks of those beside them."""
    for of_parameter in zip(*by_rank, strict=True):
        truth = torch.stack([expected for _, expected in of_parameter]).mean(0)
        for grad, _ in of_parameter:
            torch.testing.assert_close(grad.double(), truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_held", (False, True))
@pytest.mark.parametrize("wrapper", ("ddp", "fsdp2"))
@in_two_ranks
def test_logits_of_a_wrapped_head_are_overwritten_if_nobody_holds_them(rank_pool, impl, wrapper, is_held):
    results = rank_pool.run(_of_a_wrapped_head, impl, wrapper, is_held)
    for found, is_unchanged, _ in results:
        assert found == [not is_held] and is_unchanged
    assert_averaged([pairs for *_, pairs in results])
