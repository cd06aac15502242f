"""Heads that PyTorch's tensor parallelism or FSDP has cut: the whole vocabulary's results, or an error."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.cases.flat import LinearCrossEntropy, linear_cross_entropy
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import (
    TWO_WAYS,
    WIDTH,
    Results,
    assert_right,
    grad_output_of,
    projection,
)
from tests.support.ranks.case import Case, Result, check, chunked, grad_outputs_of
from tests.support.ranks.collectives import assert_refused, messages_of
from tests.support.ranks.linear import ROWS
from tests.support.ranks.pools import device_of, in_four_ranks, in_ranks, subgroups
from tests.support.truth.budget import assert_within_budget

in_two_ranks = in_ranks((2,), (), (2,))
COLUMNS = 21  # uneven over 2 ranks and over 4
GROUP = r"pass group=weight\.device_mesh\.get_group"
INSIDE = "call it inside the module that FSDP wraps"


def _tokens(device):
    return torch.randn(4, WIDTH, device=device), torch.zeros(4, dtype=torch.int64, device=device)


class Model(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, COLUMNS)
        self.loss = LinearCrossEntropy(self.head, **options)

    def forward(self, inputs, labels=None):
        hidden = self.body(inputs).tanh()
        return hidden if labels is None else self.loss(hidden, labels)


def _training(impl="auto"):
    """A model, and the tokens and labels of two ranks of data parallelism."""
    torch.manual_seed(0)
    labels = torch.tensor([[1, 5, 20, IGNORE_INDEX], [12, 0, 13, 7]])
    return Model(impl=impl), 2 * torch.randn(2, 4, WIDTH), labels


def _assert_trained(results):
    """Gradients are those of the mean of both ranks' losses."""
    model, inputs, labels = _training()
    expected = []
    for dtype in (torch.float64, torch.float32):
        leaves = {name: value.to(dtype).requires_grad_() for name, value in model.state_dict().items()}
        hidden = F.linear(inputs.to(dtype), leaves["body.weight"]).tanh()
        logits = F.linear(hidden, leaves["head.weight"], leaves["head.bias"])
        losses = torch.stack([F.cross_entropy(*pair) for pair in zip(logits, labels, strict=True)])
        losses.mean().backward()
        expected.append((losses.detach(), {name: leaf.grad for name, leaf in leaves.items()}))
    (losses, truth), (same_losses, peer) = expected
    for part, loss, gradients in results:
        assert_within_budget(loss, losses[part], same_losses[part])
        assert gradients.keys() == truth.keys()
        for name, gradient in gradients.items():
            assert_within_budget(gradient, truth[name], peer[name])


def _train(model, part, inputs, labels, device, where):
    tokens = inputs[part].to(device), labels[part].to(device)
    loss = model.loss(model(tokens[0]), tokens[1]) if where == "outside" else model(*tokens)
    loss.backward()
    return part, loss, {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def _in_fsdp(rank, group, impl, where, reshard):
    device = device_of(rank, group)
    model, inputs, labels = _training(impl)
    fully_shard(model.to(device), mesh=init_device_mesh(device.type, (2,)), reshard_after_forward=reshard)
    if where == "made afterwards":
        model.loss = LinearCrossEntropy(model.head, impl=impl)
    return _train(model, rank, inputs, labels, device, where)


@pytest.mark.parametrize(
    ("where", "reshard"), [("inside", True), ("inside", False), ("made afterwards", True), ("outside", False)]
)
@in_two_ranks
def test_a_head_inside_the_module_that_fsdp_wraps_is_trained(rank_pool, impl, where, reshard):
    """Outside too, as long as FSDP keeps the weight whole after forward."""
    _assert_trained(rank_pool.run(_in_fsdp, impl, where, reshard))


def _refusals_of_fsdp(rank, group, impl):
    device = device_of(rank, group)
    hidden, labels = _tokens(device)
    mesh, head = init_device_mesh(device.type, (2,), mesh_dim_names=("dp",)), nn.Linear(WIDTH, COLUMNS).to(device)
    made = LinearCrossEntropy(head, impl=impl)
    fully_shard(head, mesh=mesh)
    model = fully_shard(Model(impl=impl).to(device), mesh=mesh)
    first = FullyShardedDataParallel(nn.Linear(WIDTH, COLUMNS).to(device), device_id=device)
    attempts = {
        "function": lambda: linear_cross_entropy(hidden, head.weight, labels, impl=impl),
        "head": lambda: LinearCrossEntropy(head),
        "head, the first FSDP": lambda: LinearCrossEntropy(first),
        "head, made before": lambda: made(hidden, labels),
        "outside of its parent": lambda: model.loss(hidden, labels),
    }
    return messages_of(attempts)


@in_two_ranks
def test_a_head_that_fsdp_has_cut_is_no_shard_of_the_vocabulary(rank_pool, impl):
    """Its ranks have their own tokens: the loss would be inf, or a plausible number."""
    expected = dict.fromkeys(("head", "head, the first FSDP", "head, made before"), f"ValueError: head: .*{INSIDE}")
    expected["function"] = rf'ValueError: weight: .*{GROUP}\("dp"\).*{INSIDE}'
    expected["outside of its parent"] = f"ValueError: (weight|bias): .*{INSIDE}"
    assert_refused(rank_pool.run(_refusals_of_fsdp, impl), expected)


STYLES = {
    "default": ({}, {}),
    "whole logits": ({"output_layouts": Replicate(), "use_local_output": False}, {}),
    "sequence_parallel": ({}, {"sequence_parallel": True}),
}


def _on_parallel_head(rank, group, case, style):
    """The module is made before its head is parallelized, and no group is said."""
    device, world = device_of(rank, group), group.size()
    head = nn.Linear(WIDTH, COLUMNS)
    head.load_state_dict({"weight": case.inputs.weight, "bias": case.inputs.bias})
    module = LinearCrossEntropy(head.to(device), impl=case.impl, **case.options)
    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    parallelize_module(head, mesh, ColwiseParallel(**style))
    hidden = case.inputs.hidden
    if case.options.get("sequence_parallel"):
        hidden = hidden.chunk(world)[rank]
    hidden = hidden.clone().to(device).requires_grad_()
    loss = module(hidden, case.inputs.labels.to(device))
    loss.backward(grad_outputs_of(case)[0].to(device))
    assert f"{world} ranks, weight=({COLUMNS}, {WIDTH})" in repr(module)
    for parameter in head.parameters():
        assert parameter.grad.placements == (Shard(0),) and parameter.grad.shape == parameter.shape
    return Result((loss,), (hidden.grad, head.weight.grad.to_local(), head.bias.grad.to_local()), [], [])


@TWO_WAYS
@pytest.mark.parametrize("name", STYLES)
@in_two_ranks
def test_a_head_that_tensor_parallelism_has_cut_needs_no_group(rank_pool, impl, name, way):
    style, options = STYLES[name]
    inputs = projection("shard_edges", ROWS, bias=True)
    case = Case(inputs, impl, {**way, **options}, chunked(COLUMNS, 2))
    check(case, rank_pool.run(_on_parallel_head, case, style))


class ScaledParallel(ColwiseParallel):
    """A style of the user's own, whose hook does more than PyTorch's."""

    @staticmethod
    def _prepare_input_fn(input_layouts, desired_input_layouts, mod, inputs, device_mesh):
        args = input_layouts, desired_input_layouts, mod, inputs, device_mesh
        return ColwiseParallel._prepare_input_fn(*args) * 2


def _refusals_of_parallel_heads(rank, group, impl):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    hidden, labels = _tokens(device)

    def cut(style, change=None):
        head = nn.Linear(WIDTH, COLUMNS).to(device)
        if isinstance(style, ColwiseParallel | RowwiseParallel):
            parallelize_module(head, mesh, style)
        else:
            distribute_module(head, mesh, *style)
        if change is not None:
            change(head)
        return head

    def call(head, **options):
        LinearCrossEntropy(head, impl=impl, **options)(hidden, labels)

    def partition(name, module, mesh):
        for name, parameter in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def hooked(head):
        head.register_forward_hook(lambda *_: None)

    def assigned(head):
        head.weight = nn.Parameter(torch.ones(COLUMNS, WIDTH, device=device))

    heads = {
        "parts": cut(ColwiseParallel(input_layouts=Shard(1))),
        "columns": cut(RowwiseParallel(input_layouts=Replicate())),
        "another hook": cut(ColwiseParallel(), hooked),
        "style of one's own": cut(ScaledParallel()),
        "hooks of one's own": cut((partition, lambda m, x, mesh: x, lambda m, x, mesh: x)),
        "no hooks": cut((partition,)),
        "plain weight": cut(ColwiseParallel(), assigned),
    }
    attempts = {name: partial(call, head) for name, head in heads.items()}
    own = subgroups((0,), (1,))[rank]
    return messages_of(attempts | {"another group": partial(call, cut(ColwiseParallel()), group=own)})


@in_two_ranks
def test_a_parallel_head_that_does_more_than_the_loss_is_refused(rank_pool, impl):
    """Hooks are skipped: right for whole hidden states alone."""
    hooks = "ValueError: head: has hooks .*; remove them"
    expected = {
        "parts": r"ValueError: head: .*input_layouts=Replicate\(\).*Shard.*ColwiseParallel\(\)",
        "columns": r"ValueError: (weight|bias): expected a DTensor with Shard\(0\)",
        "another hook": hooks,
        "style of one's own": hooks,
        "hooks of one's own": hooks,
        "no hooks": r'ValueError: (weight|bias): .*get_group\("tp"\)',
        "plain weight": "ValueError: head: .*DTensor, got a Parameter; .*distribute_tensor",
        "another group": r"ValueError: group: expected the ranks \(0, 1\) .*get_group",
    }
    assert_refused(rank_pool.run(_refusals_of_parallel_heads, impl), expected)


def _on_both_dimensions(rank, group, impl, inputs, way):
    """Tensor parallelism over a mesh of 2 x 2."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("x", "y"))
    cut = [Shard(0), Shard(0)]
    weight, bias = (distribute_tensor(x.to(device), mesh, cut).requires_grad_() for x in inputs[1:4:2])
    hidden, labels = inputs.hidden.clone().to(device).requires_grad_(), inputs.labels.to(device)
    options = {"bias": bias, "group": mesh._flatten("tp").get_group(), "impl": impl, "chunk_size": 4, **way}
    loss = linear_cross_entropy(hidden, weight, labels, vocab_size=len(inputs.weight) - 1, **options)
    loss.backward(grad_output_of(way, ROWS).to(device))
    assert weight.grad.placements == bias.grad.placements == tuple(cut) and weight.grad.device_mesh == mesh
    return (loss.detach(),), hidden.grad, weight.grad.full_tensor(), bias.grad.full_tensor()


@TWO_WAYS
@in_four_ranks
def test_a_head_that_both_dimensions_of_a_mesh_cut(rank_pool, impl, way):
    """Its last row is padding."""
    inputs = projection("shard_edges", ROWS, 23, bias=True)
    padded = inputs._replace(weight=F.pad(inputs.weight, (0, 0, 0, 1), value=9.0), bias=F.pad(inputs.bias, (0, 1)))
    results = [Results(*found) for found in rank_pool.run(_on_both_dimensions, impl, padded, way)]
    for found in results:
        assert torch.equal(found.outputs[0], results[0].outputs[0]) and not found.weight[23:].any()
        found = found._replace(bias=found.bias[:23])
        assert_right(found, inputs, grad_output_of(way, ROWS), bounds=[(0, 6), (6, 12), (12, 18), (18, 23)], **way)


def _refusals_of_meshes(rank, group, impl):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    descending, square = DeviceMesh(device.type, [3, 2, 1, 0]), DeviceMesh(device.type, [[3, 2], [1, 0]])
    whole = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0)).to(device)
    hidden, labels = _tokens(device)
    rows, both, tp = [Replicate(), Shard(0)], [Shard(0), Shard(0)], mesh.get_group("tp")
    weights = {  # and the group that is given
        "no group": (distribute_tensor(whole, mesh, rows), None),
        "group of the replicas": (distribute_tensor(whole, mesh, rows), mesh.get_group("dp")),
        "group of all": (distribute_tensor(whole, mesh, rows), group),
        "both": (distribute_tensor(whole, mesh, both), tp),
        "both, no group": (distribute_tensor(whole, mesh, both), None),
        "both, another order": (distribute_tensor(whole, square, both), descending.get_group()),
        "another order": (distribute_tensor(whole, descending, [Shard(0)]), descending.get_group()),
        "unequal parts": (distribute_tensor(whole[:22], mesh, both), group),
        "columns too": (distribute_tensor(whole, mesh, [Shard(1), Shard(0)]), tp),
        "no rows": (distribute_tensor(whole, mesh, [Replicate(), Replicate()]), tp),
        "partial": (DTensor.from_local(whole[:12], mesh, [Partial(), Shard(0)]), tp),
    }
    call = partial(linear_cross_entropy, hidden, labels=labels, impl=impl)
    return messages_of({name: partial(call, weight=weight, group=g) for name, (weight, g) in weights.items()})


@in_four_ranks
def test_a_dtensor_is_cut_along_its_rows_over_its_group_alone(rank_pool, impl):
    layout = r"ValueError: weight: expected a DTensor with Shard\(0\) on one or more .* got "
    expected = {
        "no group": rf'ValueError: weight: .*{GROUP}\("tp"\).*{INSIDE}',
        "group of the replicas": rf'ValueError: group: .*{GROUP}\("tp"\)',
        "group of all": rf'ValueError: group: .* got \(0, 1, 2, 3\); {GROUP}\("tp"\)',
        "both": rf"ValueError: group: expected the ranks \(0, 1, 2, 3\) .*FSDP.*{INSIDE}",
        "both, no group": rf"ValueError: weight: .*got None.*the flattened dimensions \(0, 1\).*{INSIDE}",
        "both, another order": r"ValueError: group: .*\(3, 2, 1, 0\) .* got .*; .*ascending ranks",
        "another order": r"ValueError: group: .*\(3, 2, 1, 0\) .* got \(0, 1, 2, 3\); .*ascending ranks",
        "unequal parts": r"ValueError: weight: expected a multiple of .* rows, .*, got 22; pad",
        "columns too": rf"{layout}\(Shard\(dim=1\).*plain tensor",
        "no rows": rf"{layout}\(Replicate\(\), Replicate.*plain tensor",
        "partial": rf"{layout}\(Partial.*plain tensor",
    }
    assert_refused(rank_pool.run(_refusals_of_meshes, impl), expected)
