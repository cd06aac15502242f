"""One call of the fused loss on R ranks: how each makes it, and what all of them together must have got."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.cases import linear
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import LEAVES, Projection, Results, assert_right, grad_output_of, padded_weight
from tests.support.ranks.collectives import Collective
from tests.support.ranks.logits import assembled, assert_same_outputs, even, n_statistics, own_tensors, with_collectives
from tests.support.ranks.pools import device_of, subgroups
from vocab_parallel_ce import VocabShard, linear_cross_entropy

COLUMNS, ROWS = 20, 6
WAYS = {name: linear.WAYS[name] for name in ("none", "mean", "sum", "sum, in_backward")}
WAYS["sum"] = WAYS["sum"] | {"num_items": 7}
BY_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


class Case(NamedTuple):
    """One call as every rank makes it, with its rows of the weight."""

    inputs: Projection
    impl: str
    options: dict[str, Any]
    bounds: Sequence[tuple[int, int]] | None = None  # of each rank's columns, padding from V on; None: equal
    size: str = "even"  # how ranks say which columns are theirs: "even", "vocab_size" or "shard"
    grad_outputs: tuple[torch.Tensor | None, ...] | None = None  # None: that of the reduction
    function: Callable[..., Any] = linear_cross_entropy
    frozen: tuple[str, ...] = ()
    main_grad: bool = False
    weight_form: str = "whole"  # or "columns": class_weight is that of this rank's


def bounds_of(case: Case, n_ranks: int) -> Sequence[tuple[int, int]]:
    return case.bounds or even(len(case.inputs.weight) // n_ranks, n_ranks)


def grad_outputs_of(case: Case) -> tuple[torch.Tensor | None, ...]:
    labels = case.inputs.labels
    given = grad_output_of(case.options, labels.numel())
    return case.grad_outputs or (given.view(labels.shape) if given.dim() else given,)


class Result(NamedTuple):
    """What one rank got."""

    outputs: tuple[torch.Tensor, ...]
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    in_forward: list[Collective]
    in_backward: list[Collective]


def distributed(whole: torch.Tensor, device: torch.device, group: Any, placement: Any = None) -> DTensor:
    """Cut over the ranks, along its rows if no ``placement`` is given."""
    mesh = DeviceMesh.from_group(group, device.type)
    return distribute_tensor(whole.to(device), mesh, [placement or Shard(0)])


def run(
    rank: int, group: Any, case: Case, members: Sequence[int] | None = None, as_dtensors: bool = False
) -> Result | None:
    """In a rank: one call and its backward; None outside ``members``.

    Args:
        as_dtensors: weight and bias are DTensors, and not this rank's plain rows.
    """
    if members is not None:
        (group,) = subgroups(members)
        if rank not in members:
            return None
    device = device_of(rank, torch.distributed.group.WORLD)
    rank, n_ranks = group.rank(), group.size()
    start, stop = bounds_of(case, n_ranks)[rank]
    vocab_size = len(case.inputs.weight)
    weight, bias = padded_weight(case.inputs, start, stop)
    hidden = case.inputs.hidden
    if case.options.get("sequence_parallel"):
        hidden = hidden.chunk(n_ranks)[rank]
    leaves = [
        None if leaf is None else leaf.clone().to(device).requires_grad_(name not in case.frozen)
        for name, leaf in zip(LEAVES, (hidden, weight, bias), strict=True)
    ]
    if as_dtensors:
        wholes = padded_weight(case.inputs, 0, case.bounds[-1][1])
        leaves[1:] = (None if whole is None else distributed(whole, device, group).requires_grad_() for whole in wholes)
        leaves[1].grad_added_to_main_grad = False
    options = {**case.options, "bias": leaves[2], "group": group, "impl": case.impl}
    size = {"shard": VocabShard(start, stop, vocab_size), "vocab_size": vocab_size}
    options["vocab_size"] = size.get(case.size)
    options |= own_tensors(case, start, stop, device)
    main_grad = torch.zeros(weight.shape, device=device) if case.main_grad else None
    if main_grad is not None:
        options["main_grad"] = main_grad
    labels = case.inputs.labels.to(device)
    call = partial(case.function, *leaves[:2], labels, **options)
    outputs, *collectives = with_collectives(call, grad_outputs_of(case))
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    if as_dtensors:
        for index, leaf in enumerate(leaves):
            if index > 0 and leaf is not None:
                assert leaf.grad.placements == leaf.placements and leaf.grad.shape == leaf.shape
                gradients[index] = leaf.grad.to_local()
        assert leaves[1].grad_added_to_main_grad is case.main_grad
    if main_grad is not None:
        # Megatron's hooks wait for a gradient of the parameter that has the attribute.
        assert not gradients[1].any() if as_dtensors else gradients[1] is None
        gradients[1] = main_grad.to(weight.dtype)
    torch.testing.assert_close(leaves[0].detach().cpu(), hidden, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(labels.cpu(), case.inputs.labels), "labels were written"
    return Result(outputs, *gradients, *collectives)


def _hidden_gradient(case: Case, results: Sequence[Result]) -> torch.Tensor | None:
    """Of all tokens: equal on all ranks, or their parts one after the other, or the sum of their shares."""
    gradients = [result.hidden for result in results]
    if gradients[0] is None:
        return None
    if case.options.get("sequence_parallel"):
        return torch.cat(gradients)
    if not case.options.get("reduce_hidden_grad", True):
        return sum(gradients[1:], start=gradients[0])
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=0, equal_nan=True)
    return gradients[0]


def check(case: Case, results: Sequence[Result]) -> None:
    """Outputs are bit-equal on all ranks, and everything is what the whole vocabulary gives in fp64."""
    assert_same_outputs(results)
    bounds, grad_outputs = bounds_of(case, len(results)), grad_outputs_of(case)
    gradients = [_hidden_gradient(case, results)]
    for parts in ([result.weight for result in results], [result.bias for result in results]):
        gradients.append(None if parts[0] is None else assembled(bounds, parts, len(case.inputs.weight)))
    for name, gradient in zip(LEAVES, gradients, strict=True):
        assert (gradient is not None) == (name not in case.frozen and getattr(case.inputs, name) is not None), name
    whole = Results(results[0].outputs, *gradients)
    assert_right(whole, case.inputs, *grad_outputs, bounds=bounds, function=case.function, **case.options)


def check_collectives(case: Case, results: Sequence[Result], extra: int = 0) -> None:
    """``K = 3 + extra`` statistics a token are gathered once, and the gradient of each chunk is reduced once.

    By chunks where forward computes gradients, otherwise statistics all at once and the rest in backward.
    Tokens that are ignored may be left out: there should be none.
    """
    rows, hidden = case.inputs.labels.numel(), case.inputs.hidden
    size = min(case.options.get("chunk_size", rows), rows)
    chunks = [min(size, rows - start) for start in range(0, rows, size)]
    in_forward = case.options.get("gradient") == "in_forward"
    gathers = Counter(("_allgather_base_", 4 * (3 + extra) * n) for n in (chunks if in_forward else [rows]))
    reduces = Counter(("allreduce_", n * hidden.shape[-1] * hidden.element_size()) for n in chunks)
    if not case.options.get("reduce_hidden_grad", True) or "hidden" in case.frozen:
        reduces.clear()
    if len(results) == 1:
        gathers.clear()
        reduces.clear()
    for result in results:
        assert {call.ranks for call in result.in_forward + result.in_backward} <= {tuple(range(len(results)))}
        forward, backward = (
            Counter((call.name, call.nbytes) for call in calls) for calls in (result.in_forward, result.in_backward)
        )
        assert forward == (gathers + reduces if in_forward else gathers)
        assert backward == (Counter() if in_forward else reduces)


def check_sent(case: Case, results: Sequence[Result], leaves_out: bool) -> None:
    """Bytes of each kind of collective, over the chunks.

    Args:
        leaves_out: tokens that are ignored, as a CPU does that counts them.
    """
    options, (hidden, _, labels, _) = case.options, case.inputs
    kept = labels.numel()
    in_forward = options.get("gradient") == "in_forward"
    counts = "reduction" not in options or options["reduction"] == "mean"
    sum_of_weights = 4 * (in_forward and "class_weight" in options and counts and "num_items" not in options)
    expected = Counter()
    if options.get("sequence_parallel"):
        expected["_allgather_base_"] = (2 - in_forward) * hidden.nbytes // len(results)
        expected["_reduce_scatter_base_"] = hidden.nbytes
    else:
        n_valid = int((labels != options.get("ignore_index", IGNORE_INDEX)).sum())
        kept = min(options.get("valid_tokens") or (n_valid if leaves_out else kept), kept)
        expected["allreduce_"] = (
            options.get("reduce_hidden_grad", True) * kept * hidden.shape[-1] * hidden.element_size()
        )
    expected["_allgather_base_"] += sum_of_weights + 4 * n_statistics(case) * kept
    for result in results:
        sent = Counter()
        for call in result.in_forward + result.in_backward:
            sent[call.name] += call.nbytes
        assert sent == (+expected if len(results) > 1 else Counter())
