"""Logits that are DTensors: the whole vocabulary's results, one collective, and gradients with their placements."""

from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

try:
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError:  # where another PyTorch has it
    from torch.distributed.tensor import _StridedShard as StridedShard

from torch.utils.checkpoint import checkpoint

from tests.support.cases.inputs import batch
from tests.support.cases.logits import EVERY, broad_rows, flat_outputs, random_grad_output
from tests.support.ranks.collectives import assert_refused, messages_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Outputs, vocab_parallel_cross_entropy
from vocab_parallel_ce.api.call import TRACES_DTENSORS
from vocab_parallel_ce.integrations.dtensor import cross_entropy, token_log_probs
from vocab_parallel_ce.options import DIFFERENTIABLE

in_two_ranks = in_ranks((2,), (2,), (2,))
in_four_ranks = in_ranks((4,), (), (4,))
V, T, S, R = "vocabulary", "tokens", "sequence", "replicate"
_ORACLES = ("label_smoothing", "z_loss", "softcap", "logit_scale", "reduction", "num_items", "temperature")


class Case(NamedTuple):
    """One call on ``logits [..., V]`` of a mesh."""

    cuts: tuple[str, ...]  # what each dimension of the mesh cuts
    mesh: tuple[int, ...]
    vocab_size: int
    options: dict[str, Any] = {}
    kind: str = "peaked"
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = (6,)  # of the labels
    function: Any = cross_entropy
    plain: bool = False  # the labels

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.Size(self.shape).numel()
        logits, labels = broad_rows(self.kind, rows, self.vocab_size, dtype=self.dtype)
        return logits.view(*self.shape, -1), labels.view(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the fields of :class:`Outputs` that are not None; the first ones have a gradient."""
        first = "log_probs" if self.function is token_log_probs else "loss"
        return first, *(name for name in Outputs.__annotations__ if name in self.options.get("outputs", ()))

    def grad_outputs(self) -> list[torch.Tensor]:
        count = 1 + len(set(DIFFERENTIABLE) & set(self.names))
        grads = [random_grad_output(torch.Size(self.shape).numel(), seed).view(self.shape) for seed in range(count)]
        per_token = self.function is token_log_probs or self.options.get("reduction") == "none"
        return grads if per_token else [torch.tensor(0.75), *grads[1:]]

    def assert_right(self, outputs, grad, part=slice(None)) -> None:
        """The outputs, in the order of their names, and the gradient of the tokens of ``part`` are PyTorch's."""
        logits, labels = (tensor[part] for tensor in self.inputs())
        given = {name: value for name, value in self.options.items() if name in _ORACLES}
        truth, peer = (logits.to(dtype).requires_grad_() for dtype in (torch.float64, torch.float32))
        expected = []
        for leaf in (truth, peer):
            found = oracle.values(leaf, labels, **given)
            expected.append([getattr(found, name) for name in self.names])
            grads = [g[part] if g.dim() else g for g in self.grad_outputs()]
            torch.autograd.backward(expected[-1][: len(grads)], [g.to(leaf.dtype) for g in grads])
        for name, value, *beside in zip(self.names, outputs, *expected, strict=True):
            if name == "predictions":
                assert torch.equal(value.cpu(), beside[0])
            else:
                assert_within_budget(value, *(other.detach() for other in beside))
        assert_within_budget(grad, truth.grad, peer.grad)


def _placements(cuts, ndim):
    of_cut = {V: Shard(ndim - 1), T: Shard(0), S: Shard(1), R: Replicate()}
    return [of_cut[cut] for cut in cuts]


class Result(NamedTuple):
    """What one rank got, put together."""

    outputs: tuple[torch.Tensor, ...]
    grad: torch.Tensor
    placements: list[Any]  # of the outputs
    of_tokens: list[Any]
    forward: list[Any]
    backward: list[Any]
    group: tuple[int, ...]
    n_tokens: int  # of this rank


def _call(rank, group, impl, case):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, case.mesh)
    (logits, labels), ndim = case.inputs(), len(case.shape) + 1
    cut = _placements(case.cuts, ndim)
    of_tokens = [Replicate() if name == V else p for name, p in zip(case.cuts, cut, strict=True)]
    leaf = distribute_tensor(logits.to(device), mesh, cut).requires_grad_()
    labels = distribute_tensor(labels.to(device), mesh, of_tokens)
    if case.plain:
        labels = labels.to_local()
    with record_collectives() as forward:
        returned = case.function(leaf * 1.0, labels, impl=impl, **case.options)
    outputs = flat_outputs(returned)
    grads = []
    for grad in case.grad_outputs():
        grad = distribute_tensor(grad.to(device), mesh, of_tokens if grad.dim() else [Replicate()] * mesh.ndim)
        grads.append(grad.to_local() if case.plain else grad)
    with record_collectives() as backward:
        torch.autograd.backward(outputs[: len(grads)], grads)
    assert leaf.grad.placements == leaf.placements == tuple(cut)
    assert leaf.grad.shape == leaf.shape and leaf.grad.dtype == leaf.dtype
    return Result(
        tuple(_whole(output, mesh, of_tokens, case) for output in outputs),
        leaf.grad.full_tensor(),
        [None if case.plain else output.placements for output in outputs],
        of_tokens,
        [tuple(call) for call in forward],
        [tuple(call) for call in backward],
        tuple(torch.distributed.get_process_group_ranks(mesh.get_group(case.cuts.index(V)))),
        (labels if case.plain else labels.to_local()).numel(),
    )


def _whole(output, mesh, of_tokens, case):
    """The result of all tokens; a plain one is that of this rank's."""
    if isinstance(output, DTensor):
        return output.detach().full_tensor()
    output, whole = output.detach(), torch.empty(case.shape if output.dim() else ())
    placements = of_tokens
    if not output.dim():
        placements = [Partial() if placement.is_shard() else placement for placement in of_tokens]
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(output, mesh, placements, shape=shape, stride=stride).full_tensor()


def _check(rank_pool, impl, case):
    results = rank_pool.run(_call, impl, case)
    for result in results:
        assert all(map(torch.equal, result.outputs, results[0].outputs))
        case.assert_right(result.outputs, result.grad)
        statistics = 3 + 2 * bool(case.options.get("label_smoothing"))
        statistics += len({"entropy", "predictions"} & set(case.names))
        sent = ("_allgather_base_", result.group, 4 * statistics * result.n_tokens)
        assert result.forward == ([sent] if len(result.group) > 1 and result.n_tokens else [])
        assert result.backward == []
        summed = tuple(Partial() if placement.is_shard() else placement for placement in result.of_tokens)
        for output, placements in zip(result.outputs, result.placements, strict=True):
            expected = tuple(result.of_tokens) if output.dim() else summed
            assert placements == (None if case.plain else expected)


SUM, NONE = {"reduction": "sum"}, {"reduction": "none"}
ENTROPY = {"outputs": ("entropy",), "temperature": 0.7}
METRICS = {"outputs": ("predictions", "entropy"), "z_loss": 0.02}
HALF = torch.bfloat16
ONE, CUT = ((V,), (2,)), ((T, V), (2, 1))
OF_TWO = {
    "uneven, mean": Case(*ONE, 1003),
    "uneven, bf16": Case(*ONE, 1003, NONE, "confident", HALF, (2, 3)),
    "every option": Case(*ONE, 21, {**EVERY, **SUM, "num_items": 7}, "some_ignored"),
    "metrics": Case(*ONE, 21, METRICS, "some_ignored"),
    "metrics of each token": Case(*ONE, 21, METRICS | NONE, shape=(2, 3), plain=True),
    "in place": Case(*ONE, 21, NONE | {"gradient": "in_backward"}, dtype=HALF),
    "log-probabilities": Case(*ONE, 21, ENTROPY, "some_ignored", function=token_log_probs),
    "plain log-probabilities": Case(*ONE, 21, dtype=HALF, shape=(2, 3), function=token_log_probs, plain=True),
    "no column": Case(*ONE, 1, METRICS | {"label_smoothing": 0.1}, plain=True),
    "one rank": Case(*CUT, 21, NONE),
}


@pytest.mark.parametrize("name", OF_TWO)
@in_two_ranks
def test_logits_cut_over_two_ranks(rank_pool, impl, name):
    _check(rank_pool, impl, OF_TWO[name])


OF_FOUR = {
    "no column on the last": Case((V,), (4,), 5, {"label_smoothing": 0.1, "softcap": 4.0}, "some_ignored"),
    "no column on two": Case((V,), (4,), 2, NONE | METRICS, plain=True),
    "no column, log-probabilities": Case((V,), (4,), 5, ENTROPY, function=token_log_probs),
    "tokens, sum": Case(
        (T, V), (2, 2), 1003, SUM | {"z_loss": 0.02, "outputs": ("entropy", "predictions")}, "some_ignored"
    ),
    "tokens, each": Case((T, V), (2, 2), 7, NONE, dtype=HALF, shape=(5,)),
    "tokens, plain labels": Case((T, V), (2, 2), 21, NONE, "some_ignored", shape=(3, 2), plain=True),
    "tokens on the second dimension": Case((V, T), (2, 2), 21, SUM, shape=(4, 2)),
    "sequence": Case((S, V), (2, 2), 21, {}, shape=(2, 5), function=token_log_probs),
    "fewer tokens than ranks": Case((T, V), (2, 2), 21, NONE, shape=(1,)),
    "replicas": Case((R, V), (2, 2), 21, METRICS, "some_ignored"),
    "replicas, plain labels": Case((V, R), (2, 2), 3, {}, plain=True),
}


@pytest.mark.parametrize("name", OF_FOUR)
@in_four_ranks
def test_logits_cut_over_a_mesh_of_four_ranks(rank_pool, impl, name):
    _check(rank_pool, impl, OF_FOUR[name])


OF_CUT_TOKENS = Case((T, V), (2, 2), 21, {"outputs": ("predictions",)}, "some_ignored")


def _plain_labels_of_this_rank(rank, group, impl):
    """The mean and the accuracy of this rank's tokens."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2))
    logits, labels = OF_CUT_TOKENS.inputs()
    leaf = distribute_tensor(logits.to(device), mesh, [Shard(0), Shard(1)]).requires_grad_()
    part = mesh.get_coordinate()[0]
    own = labels.chunk(2)[part].to(device)
    found = cross_entropy(leaf, own, impl=impl, **OF_CUT_TOKENS.options)
    (0.75 * found.loss).backward()
    return part, flat_outputs(found), leaf.grad.full_tensor().chunk(2)[part]


@in_four_ranks
def test_plain_labels_give_the_mean_of_this_ranks_tokens(rank_pool, impl):
    for part, outputs, grad in rank_pool.run(_plain_labels_of_this_rank, impl):
        OF_CUT_TOKENS.assert_right(outputs, grad, slice(3 * part, 3 * part + 3))


def _around_the_loss(rank, group, impl, how):
    """The loss inside what users put around it; the gradient of the logits."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,))
    logits, labels = (tensor.to(device) for tensor in batch("some_ignored", rows=6, vocab_size=21))
    if how == "under way":  # a sum over the ranks that nothing has waited for
        leaf = DTensor.from_local(logits / 2, mesh, [Partial()]).detach().requires_grad_()
        cut = leaf.redistribute(mesh, [Shard(1)], async_op=True)
        assert hasattr(cut.to_local(), "trigger_wait")
        loss = cross_entropy(cut, labels, impl=impl)
        loss.backward()
        return loss, leaf.grad.full_tensor()
    leaf = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    if how == "another reader":
        cut = leaf * 1.0
        squares = cut.pow(2).sum().full_tensor()  # made before the loss, so that its backward runs after
        (cross_entropy(cut, labels, impl=impl) + 0.1 * squares).backward()
    else:
        checkpoint(lambda x: cross_entropy(x * 1.0, labels, impl=impl), leaf, use_reentrant=False).backward()
    return cross_entropy(leaf, labels, impl=impl), leaf.grad.full_tensor()


@pytest.mark.parametrize("how", ["under way", "another reader", "checkpoint"])
@in_two_ranks
def test_what_users_put_around_the_loss(rank_pool, impl, how):
    """By default nothing is overwritten: autograd would not notice it in the memory of a DTensor."""
    logits, labels = batch("some_ignored", rows=6, vocab_size=21)
    truth, peer = (compute(logits, labels) for compute in (oracle.cross_entropy_fp64, oracle.cross_entropy_same_dtype))
    for loss, grad in rank_pool.run(_around_the_loss, impl, how):
        assert_within_budget(loss, truth.loss, peer.loss)
        added = 0.2 if how == "another reader" else 0.0
        assert_within_budget(grad, truth.grad + added * logits.double(), peer.grad + added * logits)


def _refusals(rank, group, impl):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    other = init_device_mesh(device.type, (4,))
    logits, labels = (tensor.to(device) for tensor in batch("peaked", rows=4, vocab_size=8))

    def place(tensor, mesh, placements):
        return distribute_tensor(tensor, mesh, placements, src_data_rank=None)  # sends nothing

    def call(*placements, labels=labels, logits=logits, function=cross_entropy, **options):
        function(place(logits, mesh, placements), labels, impl=impl, **options)

    def strided():
        rows = place(logits.t().contiguous(), mesh, [Replicate(), Shard(0)])
        return DTensor.from_local(rows.to_local().t(), mesh, [StridedShard(1, split_factor=2), Replicate()])

    def loss_of(logits):
        return cross_entropy(logits, labels, impl=impl)

    cut = place(labels, mesh, [Shard(0), Replicate()])
    whole = place(logits, mesh, [Replicate(), Shard(1)])
    descending = DeviceMesh(device.type, [3, 2, 1, 0])
    attempts = {
        "plain": lambda: cross_entropy(logits, labels),
        "tokens": lambda: call(Shard(0), Replicate()),
        "whole": lambda: call(Replicate(), Replicate()),
        "another order": lambda: cross_entropy(DTensor.from_local(logits, descending, [Shard(1)]), labels),
        "twice": lambda: call(Shard(1), Shard(1)),
        "partial": lambda: cross_entropy(DTensor.from_local(logits, mesh, [Partial(), Shard(1)]), labels),
        "strided": lambda: cross_entropy(strided(), labels),
        "another width": lambda: cross_entropy(
            DTensor.from_local(logits, other, [Shard(1)], shape=torch.Size((4, 40)), stride=(40, 1)), labels
        ),
        "labels elsewhere": lambda: call(Shard(0), Shard(1), labels=place(labels, mesh, [Shard(0)] * 2)),
        "labels of another mesh": lambda: call(Replicate(), Shard(1), labels=place(labels, other, [Replicate()])),
        "mean": lambda: call(Shard(0), Shard(1), labels=cut),
        "probabilities": lambda: call(Replicate(), Shard(1), labels=logits[:, :4].softmax(-1)),
        "group": lambda: call(Replicate(), Shard(1), group=group),
        "items": lambda: call(Replicate(), Shard(1), reduction="sum", num_items=cut),
        "the loss itself": lambda: vocab_parallel_cross_entropy(whole, labels, group=group),
        "vmap": lambda: torch.func.vmap(loss_of)(whole.expand(2, 4, 8)),
        "grad": lambda: torch.func.grad(loss_of)(whole),
    }
    return messages_of(attempts)


@in_four_ranks
def test_other_placements_are_refused_with_what_to_do(rank_pool, impl):
    layout = r"ValueError: logits: expected a DTensor with Shard\(-1\) on exactly one dimension of its mesh.* got "
    expected = {
        "plain": "TypeError: logits: expected a DTensor, got a plain torch.Tensor; .*vocab_parallel_ce, with group=",
        "tokens": rf"{layout}\(Shard\(dim=0\), Replicate\(\)\); every rank has the whole .*of its tokens.*to_local",
        "whole": rf"{layout}\(Replicate\(\), Replicate\(\)\); every rank has .*to_local",
        "another order": r"ValueError: logits: expected a mesh of ascending ranks along dimension 0, got \(3, 2, 1",
        "twice": rf"{layout}.*; flatten these dimensions",
        "partial": rf"{layout}\(Partial.*; redistribute it first: its values are sums",
        "strided": rf"{layout}\(_StridedShard.*; redistribute it first$",
        "another width": "ValueError: logits: expected a local tensor with 10 of 40 columns at position .* got 8",
        "labels elsewhere": r"ValueError: labels: expected .*\(Shard\(dim=0\), Replicate\(\)\), got .*redistribute",
        "labels of another mesh": "ValueError: labels: expected a DTensor with the mesh of logits",
        "mean": "ValueError: reduction: expected no mean of tokens that are on several ranks.* num_items=",
        "probabilities": "TypeError: labels: dtype must be ",
        "group": "TypeError: .*unexpected keyword argument 'group'",
        "items": "TypeError: num_items: expected .*to_local",
        **dict.fromkeys(("vmap", "grad"), "TypeError: cross-entropy: expected a call outside of torch.func transforms"),
        "the loss itself": "TypeError: logits: .*; pass its to_local.*vocab_parallel_ce.integrations.dtensor",
    }
    assert_refused(rank_pool.run(_refusals, impl), expected)


def _compiled(rank, group, impl, function, outputs, fullgraph):
    """Compiled and eager: the loss and this rank's part of the gradient."""
    device, found = device_of(rank, group), []
    mesh = init_device_mesh(device.type, (2,))
    logits, labels = (tensor.to(device) for tensor in batch("some_ignored", rows=6, vocab_size=21))

    def step(leaf):
        return sum(value.sum() for value in flat_outputs(function(leaf * 1.0, labels, impl=impl, outputs=outputs)))

    torch._dynamo.reset()
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    for call in (torch.compile(step, fullgraph=fullgraph, backend=backend), step):
        leaf = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
        loss = call(leaf)
        loss.backward()
        found.append((loss.detach(), leaf.grad.to_local()))
    return found


@pytest.mark.parametrize(("function", "outputs"), [(cross_entropy, ()), (token_log_probs, ("entropy",))])
@in_two_ranks
def test_compiled_calls_are_one_graph(rank_pool, impl, function, outputs):
    for compiled, eager in rank_pool.run(_compiled, impl, function, outputs, TRACES_DTENSORS):
        torch.testing.assert_close(compiled[0], eager[0], rtol=1e-6, atol=0)  # the compiler adds up log-probabilities
        assert torch.equal(compiled[1], eager[1])
