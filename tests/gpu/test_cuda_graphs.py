"""CUDA graphs of forward and backward: a replay gives the loss and gradients of the data it finds.

Each replay is compared with the whole vocabulary in fp64, on one GPU and on two, whose collectives are in the graph.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import vocab_parallel_ce as vp
from tests.support.cases import flat, linear
from tests.support.cases.inputs import IGNORE_INDEX, batch, shard_of
from tests.support.cases.linear import WIDTH, Projection, many_tokens
from tests.support.cases.logits import Results, assert_right, flat_outputs, zero_first_grad_output
from tests.support.host.gpu import captured
from tests.support.ranks.case import even

# Two chunks, the first of which two ranks send in two parts. As wide as one_pass takes it.
ROWS, CHUNK, COLUMNS, ONE_PASS_COLUMNS = 300, 160, 1000, 16384
# Whose parts have programs of their own, also those of half of the columns: kernels begin before others have ended.
FEW_ROWS, CUT_COLUMNS = 16, 131072
SEEDS = (1, 2, 3)
DEVICE = "cuda"
on_two_gpus = pytest.mark.parametrize(
    "rank_pool", [pytest.param(("nccl", 2), id="nccl-2", marks=pytest.mark.nccl)], indirect=True
)


def grad_outputs_of(options: dict[str, Any], seed: int, rows: int = ROWS) -> tuple[Tensor, ...]:
    """Of every output: one number for a mean, otherwise one per token, the first of which is 0."""
    if options.get("reduction", "none") == "mean":
        return (0.5 + torch.rand((), generator=torch.Generator().manual_seed(seed)),)
    n_outputs = 1 + len(options.get("outputs", ()))
    return tuple(zero_first_grad_output(rows, 10 * seed + i) for i in range(n_outputs))


class OverLogits(NamedTuple):
    """A function over logits that a graph makes anew at each replay."""

    function: Callable[..., Any]
    options: dict[str, Any]
    columns: int = COLUMNS
    rows: int = ROWS

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        made = batch("some_ignored", rows=self.rows, vocab_size=self.columns, dtype=torch.bfloat16, seed=seed)
        return *made, *grad_outputs_of(self.options, seed, self.rows)

    def of_rank(self, rank: int, n_ranks: int, logits: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return shard_of(logits, rank, n_ranks), *others

    def step(self, group: Any, values: Tensor, labels: Tensor, *grad_outputs: Tensor) -> tuple[Tensor, ...]:
        if self.function is vp.cross_entropy_forward:
            loss, grad = vp.cross_entropy_forward(values * 1, labels, 0.0, True, group, IGNORE_INDEX)
            return loss, vp.cross_entropy_backward(grad, *grad_outputs)
        logits = values.detach().requires_grad_() * 1
        if self.function is vp.parallel_cross_entropy:
            is_mean = self.options["reduction"] == "mean"
            loss = vp.parallel_cross_entropy(logits, labels, reduce_loss=is_mean, dist_process_group=group)
            loss = loss[0] if is_mean else loss
            return loss, *torch.autograd.grad(loss, logits, grad_outputs)
        outputs = flat_outputs(self.function(logits, labels, group=group, **self.options))
        return *outputs, *torch.autograd.grad(outputs, logits, grad_outputs)

    def check(self, by_rank: Sequence[Sequence[Tensor]], *inputs: Tensor) -> None:
        grad = torch.cat([results[-1] for results in by_rank], dim=-1)
        function = self.function if self.function is vp.token_log_probs else vp.vocab_parallel_cross_entropy
        options = dict(self.options)
        if self.function is vp.cross_entropy_forward:
            options["gradient"] = "in_forward"
        assert_right(Results(tuple(by_rank[0][:-1]), grad), *inputs, function=function, **options)


class OverHeads(NamedTuple):
    """A function of hidden states and head."""

    function: Callable[..., Any]
    options: dict[str, Any]

    def inputs(self, seed: int) -> tuple[Tensor, ...]:
        hidden, weight, labels, _ = many_tokens(ROWS, COLUMNS, torch.bfloat16, seed)
        labels[seed :: 3 + seed] = IGNORE_INDEX
        return hidden, weight, labels, *grad_outputs_of(self.options, seed)

    def of_rank(self, rank: int, n_ranks: int, hidden: Tensor, weight: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return hidden, weight.chunk(n_ranks)[rank], *others

    def step(self, group: Any, hidden: Tensor, weight: Tensor, labels: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        leaves = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
        result = self.function(*leaves, labels, group=group, chunk_size=CHUNK, **self.options)
        outputs = flat_outputs(result)
        return *outputs, *torch.autograd.grad(outputs, leaves, grads)

    def check(self, by_rank: Sequence[Sequence[Tensor]], *inputs: Tensor) -> None:
        check_head(by_rank, self.function, self.options, *inputs)


def check_head(
    by_rank: Sequence[Sequence[Tensor]], function: Any, options: Any, hidden: Tensor, weight: Tensor, *others: Tensor
) -> None:
    """Of outputs, and the gradients of hidden states, equal on all ranks, and of a rank's rows of the weight."""
    *outputs, d_hidden, _ = by_rank[0]
    assert all(torch.equal(results[-2], d_hidden) for results in by_rank)
    d_weight = torch.cat([results[-1] for results in by_rank])
    bounds = even(COLUMNS // len(by_rank), len(by_rank))
    labels, *grad_outputs = others
    results, inputs = linear.Results(tuple(outputs), d_hidden, d_weight, None), Projection(hidden, weight, labels)
    linear.assert_right(results, inputs, *grad_outputs, function=function, bounds=bounds, **options)


PROGRAMS: dict[str, OverLogits | OverHeads] = {
    f"{gradient}, {reduction}": OverLogits(
        vp.vocab_parallel_cross_entropy, {"gradient": gradient, "reduction": reduction}
    )
    for gradient in ("auto", "in_forward", "out_of_place")
    for reduction in ("mean", "none")
}
PROGRAMS |= {
    "one_pass": OverLogits(
        vp.vocab_parallel_cross_entropy,
        {"gradient": "in_forward", "reduction": "mean", "impl": "one_pass"},
        ONE_PASS_COLUMNS,
    ),
    "log-probs": OverLogits(vp.token_log_probs, {"outputs": ("entropy",), "temperature": 0.7}),
    "te, mean": OverLogits(vp.parallel_cross_entropy, {"reduction": "mean"}),
    "te, none": OverLogits(vp.parallel_cross_entropy, {"reduction": "none"}),
    "te, pair": OverLogits(vp.cross_entropy_forward, {"reduction": "mean"}),
    **{
        f"few rows, {reduction}": OverLogits(
            vp.vocab_parallel_cross_entropy, {"reduction": reduction}, CUT_COLUMNS, FEW_ROWS
        )
        for reduction in ("mean", "none")
    },
    "few rows, log-probs": OverLogits(vp.token_log_probs, {"outputs": ("entropy",)}, CUT_COLUMNS, FEW_ROWS),
    "linear, mean": OverHeads(flat.linear_cross_entropy, {"gradient": "in_forward", "reduction": "mean"}),
    "linear, none": OverHeads(flat.linear_cross_entropy, {"gradient": "in_backward", "reduction": "none"}),
    "linear, log-probs": OverHeads(flat.linear_token_log_probs, {"outputs": ("entropy",)}),
}


def _inputs_of_rank(program: Any, rank: int, group: Any, seed: int) -> list[Tensor]:
    n_ranks = 1 if group is None else group.size()
    device = torch.device(DEVICE, rank) if DEVICE == "cuda" else DEVICE
    return [tensor.to(device) for tensor in program.of_rank(rank, n_ranks, *program.inputs(seed))]


def _replays(rank: int, group: Any, name: str) -> list[list[Tensor]]:
    """Outputs and gradients of one graph, replayed over the data of each seed."""
    program = PROGRAMS[name]
    static = _inputs_of_rank(program, rank, group, seed=0)
    graph, outputs = captured(lambda: program.step(group, *static), warm_ups=3)
    results = []
    for seed in SEEDS:
        for of_graph, new in zip(static, _inputs_of_rank(program, rank, group, seed), strict=True):
            of_graph.copy_(new)
        graph.replay()
        results.append([output.detach().clone().cpu() for output in outputs])
    return results


def _calls(rank: int, group: Any, name: str) -> list[list[Tensor]]:
    """The same of eager calls, all queued before the host waits for any."""
    program = PROGRAMS[name]
    inputs = [_inputs_of_rank(program, rank, group, seed) for seed in SEEDS]
    results = [program.step(group, *of_seed) for _ in range(5) for of_seed in inputs]
    return [[output.detach().cpu() for output in outputs] for outputs in results[-len(SEEDS) :]]


def check(program: Any, by_rank: Sequence[Sequence[Sequence[Tensor]]]) -> None:
    """``by_rank`` has a list of results for each rank, of one per seed."""
    for seed, results in zip(SEEDS, zip(*by_rank, strict=True), strict=True):
        assert all(torch.equal(of_rank[0], results[0][0]) for of_rank in results)
        program.check(results, *program.inputs(seed))


@pytest.mark.cuda
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_replay_is_right(name):
    check(PROGRAMS[name], [_replays(0, None, name)])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "one_pass"])  # which needs one rank
@on_two_gpus
def test_a_replay_is_right_on_two_ranks(rank_pool, name):
    check(PROGRAMS[name], rank_pool.run(_replays, name))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("few rows")])
@on_two_gpus
def test_calls_of_few_rows_wait_for_the_exchange(rank_pool, name):
    check(PROGRAMS[name], rank_pool.run(_calls, name))


class HeadAndLoss(nn.Module):
    """The end of a model, as ``make_graphed_callables`` takes it."""

    def __init__(self, weight: Tensor, group: Any, is_linear: bool, options: dict[str, Any]) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, len(weight), bias=False, device="meta")
        self.head.weight = nn.Parameter(weight)
        options = options | {"group": group}
        self.loss = (
            flat.LinearCrossEntropy(self.head, **options) if is_linear else vp.VocabParallelCrossEntropy(**options)
        )
        self.is_linear = is_linear

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.loss(hidden if self.is_linear else self.head(hidden), labels)

    def results(self, group: Any, hidden: Tensor, labels: Tensor, grad_output: Tensor) -> tuple[Tensor, ...]:
        """Loss and gradients, which are made anew."""
        hidden.grad = self.head.weight.grad = None
        loss = self(hidden, labels)
        loss.backward(grad_output)
        if group is not None and not self.is_linear:  # as a column-parallel head does
            torch.distributed.all_reduce(hidden.grad, group=group)
        return loss.detach(), hidden.grad, self.head.weight.grad


MODULES: dict[str, tuple[bool, dict[str, Any]]] = {
    "logits": (False, {"reduction": "mean"}),
    "logits, in_forward": (False, {"reduction": "mean", "gradient": "in_forward"}),
    "logits, out_of_place": (False, {"reduction": "mean", "gradient": "out_of_place"}),
    "logits, none": (False, {"reduction": "none"}),
    "linear": (True, {"reduction": "mean"}),
    "linear, none": (True, {"reduction": "none"}),
}


def _graphed(rank: int, group: Any, name: str) -> list[list[Tensor]]:
    """Loss and gradients of a module whose forward and backward are graphs, over the data of each seed."""
    program, results = OverHeads(flat.linear_cross_entropy, MODULES[name][1]), []
    hidden, weight, labels, _ = _inputs_of_rank(program, rank, group, seed=0)
    module = HeadAndLoss(weight, group, *MODULES[name])
    torch.cuda.make_graphed_callables(module, (hidden.requires_grad_(), labels))  # the module itself changes
    for seed in SEEDS:
        hidden, new, labels, grad_output = _inputs_of_rank(program, rank, group, seed)
        weight.copy_(new)
        outputs = module.results(group, hidden.requires_grad_(), labels, grad_output)
        results.append([output.clone().cpu() for output in outputs])
    return results


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODULES)
def test_a_module_in_graphs_is_right(name):
    check(OverHeads(flat.linear_cross_entropy, MODULES[name][1]), [_graphed(0, None, name)])


@pytest.mark.parametrize("name", MODULES)
@on_two_gpus
def test_a_module_in_graphs_is_right_on_two_ranks(rank_pool, name):
    check(OverHeads(flat.linear_cross_entropy, MODULES[name][1]), rank_pool.run(_graphed, name))


@pytest.mark.cuda
def test_a_head_that_is_no_parameter_of_the_graphed_module_gets_no_gradient():
    """As with every module; docs/training.md says so."""
    hidden, weight, labels, _ = _inputs_of_rank(OverHeads(flat.linear_cross_entropy, {}), 0, None, seed=0)
    owner = nn.ModuleList([head := nn.Linear(WIDTH, COLUMNS, bias=False, device=DEVICE, dtype=weight.dtype)])
    graphed = torch.cuda.make_graphed_callables(vp.LinearCrossEntropy(owner[0]), (hidden.requires_grad_(), labels))
    graphed(hidden, labels).backward()
    assert hidden.grad.any() and head.weight.grad is None


@pytest.mark.cuda
@pytest.mark.parametrize("gradient", ("auto", "in_backward", "in_forward", "out_of_place"))
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_a_loss_after_a_graphed_head_is_right(gradient, reduction):
    """Each replay writes its logits where the step before left its gradient: they are logits again."""
    options = {"gradient": gradient, "reduction": reduction}
    program, results = OverHeads(flat.linear_cross_entropy, {"reduction": reduction}), []
    hidden, weight, _, _ = _inputs_of_rank(program, 0, None, seed=0)
    head = nn.Linear(WIDTH, COLUMNS, bias=False, device=DEVICE, dtype=weight.dtype)
    graphed = torch.cuda.make_graphed_callables(head, (hidden.requires_grad_(),))
    for seed in SEEDS:
        hidden, weight, labels, grad_output = _inputs_of_rank(program, 0, None, seed)
        with torch.no_grad():
            head.weight.copy_(weight)
        head.zero_grad()
        loss = vp.vocab_parallel_cross_entropy(graphed(hidden.requires_grad_()), labels, **options)
        loss.backward(grad_output)
        results.append([loss.detach().clone().cpu(), hidden.grad.cpu(), head.weight.grad.cpu()])
    check(program, [results])
