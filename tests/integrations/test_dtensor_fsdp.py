"""Heads that tensor parallelism and FSDP2 both cut, inside FSDP's own forward: on 2 x 2 ranks."""

import contextlib
import importlib.util
import io
import re
import sys
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.cases.flat import LinearCrossEntropy, linear_cross_entropy
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import COLUMNS, WIDTH, Results, linear_fp64, linear_same_dtype, projection
from tests.support.host.fresh import ROOT
from tests.support.ranks.collectives import assert_refused, messages_of
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.integrations.dtensor import cross_entropy

in_four_ranks = in_ranks((4,), (), (4,))
EXAMPLE = ROOT / "scripts" / "examples" / "dtensor_fsdp_tp.py"
ROWS = 6


class Head(nn.Module):
    """A head and its loss, as one of three calls."""

    def __init__(self, how, group, **options):
        super().__init__()
        self.head = nn.Linear(WIDTH, COLUMNS)
        self.how, self.group, self.options = how, group, options
        self.module = LinearCrossEntropy(self.head, **options) if how == "module" else None

    def forward(self, hidden, labels):
        if self.how == "module":
            return self.module(hidden, labels)
        if self.how == "function":
            weight, bias = self.head.weight, self.head.bias
            assert weight.placements == (Shard(0),)
            return linear_cross_entropy(hidden, weight, labels, bias=bias, group=self.group, **self.options)
        logits = self.head(hidden)
        assert logits.placements == (Shard(logits.dim() - 1),)
        return cross_entropy(logits, labels, **self.options)


def _inputs(dtype):
    """The tokens of both replicas, of one head."""
    first = projection("shard_edges", ROWS, bias=True, dtype=dtype)
    labels = torch.tensor([20, 3, 11, 10, IGNORE_INDEX, 0])
    return first, first._replace(hidden=first.hidden.roll(1, 0), labels=labels)


def _train(rank, group, impl, how, half, reshard, steps, options):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    part = mesh.get_local_rank("dp")
    inputs = _inputs(torch.bfloat16 if half else torch.float32)[part]
    model = Head(how, mesh.get_group("tp"), impl=impl, **options).to(device)
    model.head.load_state_dict({"weight": inputs.weight.float(), "bias": inputs.bias.float()})
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model.head, mesh["tp"], style)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(
        model, mesh=mesh["dp"], reshard_after_forward=reshard, mp_policy=policy if half else MixedPrecisionPolicy()
    )
    weight = model.head.weight
    placements = weight.placements
    assert type(placements[0]).__name__ == "_StridedShard" and placements[1] == Shard(0)
    outside, calls = messages_of({"outside": partial(linear_cross_entropy, inputs.hidden, weight, inputs.labels)})
    labels = inputs.labels.to(device)
    for step in range(steps):  # accumulated: FSDP sends the gradients at the last one
        model.set_requires_gradient_sync(step == steps - 1)
        hidden = inputs.hidden.clone().to(device).requires_grad_()
        loss = model(hidden, labels)
        loss.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad.placements == parameter.placements
    gradients = [parameter.grad.full_tensor() for parameter in (model.head.weight, model.head.bias)]
    return part, Results((loss.detach(),), hidden.grad, *gradients), (outside, calls)


CASES = {
    "in_forward": ("module", False, True, 1, {"gradient": "in_forward"}),
    "in_backward, reshard": ("module", False, True, 1, {"gradient": "in_backward"}),
    "in_backward, no reshard": ("module", False, False, 1, {"gradient": "in_backward"}),
    "mixed precision": ("module", True, True, 1, {"label_smoothing": 0.1}),
    "mixed precision, each token": ("module", True, True, 1, {"reduction": "none"}),
    "function": ("function", False, True, 1, {"softcap": 4.0}),
    "function, chunks": ("function", True, True, 1, {"chunk_size": 2, "reduction": "sum", "num_items": 5}),
    "logits": ("logits", False, True, 1, {"z_loss": 0.02}),
    "logits, mixed precision": ("logits", True, True, 1, {"reduction": "none"}),
    "accumulated": ("module", False, True, 2, {}),
    "logits, accumulated": ("logits", False, True, 2, {}),
}


@pytest.mark.parametrize("name", CASES)
@in_four_ranks
def test_gradients_are_the_mean_of_both_replicas(rank_pool, impl, name):
    how, half, reshard, steps, options = CASES[name]
    of_replicas = _inputs(torch.bfloat16 if half else torch.float32)
    ones = [torch.ones(ROWS)] if options.get("reduction") == "none" else []
    expected = {name: value for name, value in options.items() if name not in ("gradient", "chunk_size")}
    truths, peers = (
        [compute(inputs, *ones, **expected) for inputs in of_replicas] for compute in (linear_fp64, linear_same_dtype)
    )
    for part, found, refused in rank_pool.run(_train, impl, how, half, reshard, steps, options):
        truth, peer = truths[part], peers[part]
        if how == "logits" and half:  # the head of PyTorch rounds the logits
            torch.testing.assert_close(found.outputs[0].double(), truth.outputs[0], rtol=0.02, atol=0.02)
        else:
            assert_within_budget(found.outputs[0], truth.outputs[0], peer.outputs[0])
            assert_within_budget(found.hidden, truth.hidden, peer.hidden)
        for field in ("weight", "bias"):
            of_truth, of_peer = (
                steps * sum(getattr(results, field) for results in of_both) / 2 for of_both in (truths, peers)
            )
            gradient = getattr(found, field)
            assert gradient.dtype == torch.float32
            if half:
                error = (gradient.double() - of_truth).norm() / of_truth.norm()
                assert error < 2**-7, error  # bf16 gradients of each replica
            else:
                assert_within_budget(gradient, of_truth, of_peer.float())
        assert_refused([refused], {"outside": "ValueError: weight: .*both cut it: call it inside the module that FSDP"})


def _example():
    spec = importlib.util.spec_from_file_location("dtensor_fsdp_tp", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run_example(rank, group, impl, loss):
    arguments = [str(EXAMPLE), "--loss", loss, "--steps", "8", *(["--cpu"] if dist.get_backend() == "gloo" else [])]
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        patch.object(sys, "argv", arguments),
        patch.dict("os.environ", LOCAL_RANK=str(rank)),
        patch.object(dist, "init_process_group"),  # the ranks are a group before it, and stay one
        patch.object(dist, "destroy_process_group"),
    ):
        _example().main()
    return printed.getvalue()


@pytest.mark.parametrize("loss", ["logits", "linear"])
@in_four_ranks
def test_the_example_trains_as_a_model_that_is_not_cut(rank_pool, impl, loss):
    if impl == "triton":
        pytest.skip("the example chooses the implementation itself")
    first, *others = rank_pool.run(_run_example, impl, loss)
    assert others == [""] * 3
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) on 2 x 2 ranks", first).groups())
    assert after < before - 0.2
    largest = 1e-5 if rank_pool.backend == "gloo" else 1e-4  # GPUs sum in another order in each run
    assert float(re.search(r"not cut: (\S+)", first)[1]) < largest
