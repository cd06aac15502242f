"""A one-dimensional DeviceMesh in the place of a group."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import vocab_parallel_ce as package
from tests.support.cases.logits import flat_outputs
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce import verify_calls

TOKENS, WIDTH, COLUMNS = 5, 6, 4  # columns of each rank


def _with_mesh_and_group(rank, group, impl):
    """Return the results of each function with a mesh and with its group, and what other meshes raise."""
    device, n_ranks = device_of(rank, group), group.size()
    torch.manual_seed(0)
    hidden, labels = torch.randn(TOKENS, WIDTH, device=device), torch.arange(TOKENS, device=device)
    weight = torch.randn(n_ranks, COLUMNS, WIDTH, device=device)[rank]
    logits, head = hidden @ weight.t(), nn.Linear(WIDTH, COLUMNS, bias=False, device=device)
    head.weight.data.copy_(weight)
    heads = package.Head(hidden, weight), package.Head(hidden, weight)

    def module(group):
        module = package.VocabParallelCrossEntropy()
        module.group = group
        return module(logits, labels)

    functions = {
        "loss": lambda group: package.vocab_parallel_cross_entropy(logits, labels, group=group, impl=impl),
        "log-probs": lambda group: package.token_log_probs(logits, labels, group=group, outputs=("lse", "entropy")),
        "head": lambda group: package.linear_cross_entropy(
            hidden, weight, labels, group=group, options=package.HeadOptions(impl=impl)
        ),
        "head, log-probs": lambda group: package.linear_token_log_probs(hidden, weight, labels, group=group),
        "distillation": lambda group: package.distillation_loss(logits, logits * 2, group=group),
        "heads": lambda group: package.linear_distillation_loss(*heads, group=group),
        "module": lambda group: package.VocabParallelCrossEntropy(group=group)(logits, labels),
        "module, set": module,
        "module of a head": lambda group: package.LinearCrossEntropy(head, group=group)(hidden, labels),
        "TransformerEngine": lambda group: package.parallel_cross_entropy(logits, labels, 0.0, False, group),
        "its first step": lambda group: package.cross_entropy_forward(logits * 1, labels, 0.0, True, group, -100),
        "compiled": torch.compile(
            lambda group: package.vocab_parallel_cross_entropy(logits, labels, group=group, impl=impl),
            fullgraph=True,
            backend="aot_eager",
        ),
    }
    mesh = init_device_mesh(device.type, (n_ranks,), mesh_dim_names=("tp",))
    found = {name: [_flat(call(each)) for each in (group, mesh)] for name, call in functions.items()}
    with verify_calls():
        both = [_flat(functions[name](mesh)) for name in ("loss", "TransformerEngine", "module of a head")]
    wrong = {
        "two": init_device_mesh(device.type, (1, n_ranks), mesh_dim_names=("dp", "tp")),
        "two, its name last but one": init_device_mesh(device.type, (n_ranks, 1), mesh_dim_names=("tp", "dp")),
        "two, no names": init_device_mesh(device.type, (1, n_ranks)),
        "descending": DeviceMesh(device.type, list(reversed(range(n_ranks)))),
    }
    calls = ("loss", "module", "module, set", "TransformerEngine")
    errors = {name: {error_of(functions[call], each) for call in calls} for name, each in wrong.items()}
    of_submesh = _flat(functions["loss"](wrong["two"]["tp"]))
    return found, both, errors, of_submesh


def _flat(found):
    return [tensor.detach().cpu() for tensor in flat_outputs(found)]


@pytest.mark.quick  # other versions of PyTorch trace it differently
@in_ranks((2,), (), ())
def test_a_mesh_of_one_dimension_is_its_group(rank_pool, impl):
    for found, verified, errors, of_submesh in rank_pool.run(_with_mesh_and_group, impl):
        for name, (of_group, of_mesh) in found.items():
            assert len(of_group) == len(of_mesh), name
            assert all(map(torch.equal, of_group, of_mesh)), name
        assert torch.equal(of_submesh[0], found["loss"][0][0])
        for name, of_mesh in zip(("loss", "TransformerEngine", "module of a head"), verified, strict=True):
            assert torch.equal(of_mesh[0], found[name][0][0]), name
        remedies = ('mesh["tp"]', 'mesh["tp"]', "mesh.get_group(dimension)", "make it of those")
        for of_calls, remedy in zip(errors.values(), remedies, strict=True):
            (error,) = of_calls  # of every call
            assert error.startswith("ValueError: group: expected a mesh of ") and error.endswith(remedy), error


def _is_released(rank, group):
    """In a rank: whether nothing keeps a mesh that was a group."""
    mesh = init_device_mesh("cpu", (group.size(),))
    alive = weakref.ref(mesh)
    logits = torch.zeros(TOKENS, COLUMNS)
    package.vocab_parallel_cross_entropy(logits, torch.zeros(TOKENS, dtype=torch.int64), group=mesh)
    del mesh
    gc.collect()
    return alive() is None


@in_ranks((2,), (), ())
def test_a_call_does_not_keep_the_mesh(rank_pool, impl):
    """A mesh keeps its groups: their threads would outlive ``destroy_process_group``."""
    assert all(rank_pool.run(_is_released))
