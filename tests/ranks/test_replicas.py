"""A DTensor head on a mesh with replicated dimensions: their ranks have their own tokens, and backward sums."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.cases.flat import linear_cross_entropy
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import Results, assert_results, linear_fp64, linear_same_dtype, projection
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.linear import ROWS
from tests.support.ranks.pools import device_of, in_four_ranks, in_ranks
from tests.support.truth.budget import assert_within_budget


def _on_replicas(rank, group, impl, of_replicas, tp_dim):
    """Each of two replicas of a cut head has its own tokens; one step of SGD."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp") if tp_dim else ("tp", "dp"))
    part = mesh.get_local_rank("dp")
    inputs = of_replicas[part]
    cut = [Shard(0) if dim == tp_dim else Replicate() for dim in range(2)]
    weight, bias = (distribute_tensor(x.to(device), mesh, cut).requires_grad_() for x in inputs[1:4:2])
    hidden = inputs.hidden.clone().to(device).requires_grad_()
    loss = linear_cross_entropy(
        hidden, weight, inputs.labels.to(device), bias=bias, group=mesh.get_group("tp"), impl=impl
    )
    loss.backward()
    gradients = []
    for leaf in (weight, bias):
        assert leaf.grad.placements == tuple(cut) and leaf.grad.shape == leaf.shape and leaf.grad.device_mesh == mesh
        gradients.append(leaf.grad.full_tensor())
    norm = nn.utils.clip_grad_norm_([weight, bias], 0.5).full_tensor()  # PyTorch 2.11 does not clip a Partial()
    clipped = weight.grad.full_tensor()
    torch.optim.SGD([weight], lr=0.5).step()
    return part, loss, hidden.grad, *gradients, weight.full_tensor(), norm, clipped


@pytest.mark.parametrize("tp_dim", [1, 0])
@in_four_ranks
def test_replicas_of_a_cut_head_add_up_their_gradients(rank_pool, impl, tp_dim):
    """Backward sums them, and they are clipped as one."""
    first = projection("shard_edges", ROWS, bias=True)
    second = first._replace(hidden=first.hidden.roll(1, 0), labels=torch.tensor([20, 3, 11, 10, IGNORE_INDEX, 0]))
    of_replicas = (first, second)
    truths, peers = ([compute(inputs) for inputs in of_replicas] for compute in (linear_fp64, linear_same_dtype))
    weights, biases = (
        [getattr(a, name) + getattr(b, name) for a, b in (truths, peers)] for name in Results._fields[2:]
    )
    norms = [torch.stack([w.norm(), b.norm()]).norm() for w, b in zip(weights, biases, strict=True)]
    clipped = [w * 0.5 / norm for w, norm in zip(weights, norms, strict=True)]
    assert norms[0] > 0.6
    for part, loss, hidden, weight, bias, *stepped in rank_pool.run(_on_replicas, impl, of_replicas, tp_dim):
        own = truths[part], peers[part]
        assert_results(Results((loss,), hidden, None, None), *own)
        assert_within_budget(weight, *weights)
        assert_within_budget(bias, *biases)
        assert_within_budget(stepped[0], first.weight.double() - 0.5 * clipped[0], first.weight - 0.5 * clipped[1])
        torch.testing.assert_close(stepped[1].double(), norms[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(stepped[2].double(), clipped[0], rtol=1e-4, atol=1e-6)


def _ways_of_replicas(rank, group, impl):
    """In a rank: collectives and gradients of a head on meshes with replicated dimensions."""
    device, n_ranks = device_of(rank, group), group.size()
    shapes = {"2-D": (n_ranks // 2, 2), "3-D": (n_ranks // 2, 2, 1), "no tensor parallelism": (n_ranks, 1)}
    inputs, found = projection("shard_edges", ROWS, bias=False), {}
    for name, shape in shapes.items():
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp", "cp")[: len(shape)])
        cut = [Shard(0) if dim == 1 else Replicate() for dim in range(len(shape))]
        weight = distribute_tensor(inputs.weight.to(device), mesh, cut).requires_grad_()
        hidden, labels = inputs.hidden.clone().to(device) * (1 + mesh.get_local_rank("dp")), inputs.labels.to(device)
        options = {"group": mesh.get_group("tp"), "impl": impl}
        with record_collectives() as calls:
            linear_cross_entropy(hidden, weight, labels, **options).backward()
        assert weight.grad.placements == tuple(cut)
        with record_collectives() as calls_of_main_grad:
            leaf = weight.detach().requires_grad_()
            main_grad = torch.zeros_like(weight.to_local())
            linear_cross_entropy(hidden, leaf, labels, main_grad=main_grad, **options).backward()
        # PyTorch 2.11 makes zeros where a DTensor's local tensor gets no gradient.
        assert leaf.grad is None or (torch.__version__ < (2, 13) and not leaf.grad.to_local().any())
        dist.all_reduce(main_grad, group=mesh.get_group("dp"))  # what main_grad has is this rank's
        torch.testing.assert_close(main_grad, weight.grad.to_local())
        summed = [[call.name for call in each].count("allreduce_") for each in (calls, calls_of_main_grad)]
        found[name] = weight.grad.full_tensor().cpu(), summed, [s for s in shape[::2] if s > 1]
    return found


@in_ranks((2, 4), (), (2, 4))
def test_backward_sums_once_for_each_replicated_dimension(rank_pool, impl):
    inputs = projection("shard_edges", ROWS, bias=False)
    for found in rank_pool.run(_ways_of_replicas, impl):
        for name, (grad, (summed, of_main_grad), replicated) in found.items():
            n_replicas = replicated[0] if replicated else 1
            truths = [linear_fp64(inputs._replace(hidden=inputs.hidden * (1 + r))) for r in range(n_replicas)]
            torch.testing.assert_close(grad.double(), sum(truth.weight for truth in truths), rtol=1e-5, atol=1e-6)
            assert summed == len(replicated) and of_main_grad == 0, name
