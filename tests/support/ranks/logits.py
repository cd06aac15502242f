"""One call over vocabulary shards on R ranks: how each makes it, and what all of them together must get.

The first functions are for calls with hidden states too.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tests.support.cases.inputs import NAN, padded_shard
from tests.support.cases.linear import linear_every_output
from tests.support.cases.logits import Results, assert_right, backward, every_output, flat_outputs, random_grad_output
from tests.support.ranks.collectives import Collective, record_collectives
from tests.support.ranks.pools import device_of, subgroups
from vocab_parallel_ce import VocabShard, vocab_parallel_cross_entropy

BOUNDS = {  # of the columns of each rank of 40, by the number of ranks
    "even": {},
    "padded": {1: [(0, 48)], 2: [(0, 24), (24, 48)], 4: [(0, 16), (16, 32), (32, 48), (48, 64)]},
    "uneven": {1: [(0, 40)], 2: [(7, 40), (0, 7)], 4: [(17, 31), (0, 10), (31, 40), (10, 17)]},
}


def even(n_columns: int, n_ranks: int) -> list[tuple[int, int]]:
    """Equal shards."""
    return [(rank * n_columns, (rank + 1) * n_columns) for rank in range(n_ranks)]


def chunked(vocab_size: int, n_ranks: int) -> list[tuple[int, int]]:
    """Shards as ``torch.chunk`` cuts them."""
    width = -(-vocab_size // n_ranks)
    return [(rank * width, min((rank + 1) * width, vocab_size)) for rank in range(n_ranks)]


def with_collectives(
    call: Callable[[], Any], grad_outputs: Sequence[torch.Tensor | None]
) -> tuple[tuple[torch.Tensor, ...], list[Collective], list[Collective]]:
    """What ``call`` returns, and the collectives of it and of its :func:`backward`."""
    with record_collectives() as in_forward:
        outputs = flat_outputs(call())
    with record_collectives() as in_backward:
        backward(outputs, grad_outputs)
    return outputs, in_forward, in_backward


def assembled(bounds: Sequence[tuple[int, int]], gradients: Sequence[torch.Tensor], vocab_size: int) -> torch.Tensor:
    """``[V, ...]`` from the gradients of the ranks' columns; those of padding must be 0."""
    whole = gradients[0].new_full((vocab_size, *gradients[0].shape[1:]), NAN)
    for (start, stop), gradient in zip(bounds, gradients, strict=True):
        valid = max(min(stop, vocab_size) - start, 0)
        whole[start : start + valid] = gradient[:valid]
        assert not gradient[valid:].any(), f"gradient of the padding of [{start}, {stop})"
    return whole


def assert_same_outputs(results: Sequence[Any]) -> None:
    """Bit-equal on all ranks."""
    for result in results:
        torch.testing.assert_close(result.outputs, results[0].outputs, rtol=0, atol=0, equal_nan=True)


class Case(NamedTuple):
    """One call on shards of ``logits [..., V]``, as every rank makes it."""

    logits: torch.Tensor
    labels: torch.Tensor
    impl: str
    options: dict[str, Any]
    bounds: Sequence[tuple[int, int]] | None = None  # of each rank's columns, padding from V on; None: equal
    size: str = "even"  # how ranks say which columns are theirs: "shard", "vocab_size" or "even"
    grad_outputs: tuple[torch.Tensor | None, ...] | None = None  # None: that of the reduction
    function: Callable[..., Any] = vocab_parallel_cross_entropy
    weight_form: str = "whole"  # or "columns": class_weight is that of this rank's


class Result(NamedTuple):
    """What one rank got."""

    outputs: tuple[torch.Tensor, ...]  # loss and metrics; or log-probabilities and entropy
    grad: torch.Tensor
    in_forward: list[Collective]
    in_backward: list[Collective]
    alone: torch.Tensor | None = None  # the first output over the whole vocabulary on this rank alone


def whole_of(results: Sequence[Result], bounds: Sequence[tuple[int, int]], vocab_size: int) -> Results:
    """Outputs, which must be bit-equal on all ranks, and the gradient of the whole vocabulary."""
    assert_same_outputs(results)
    gradients = [result.grad.movedim(-1, 0) for result in results]
    return Results(results[0].outputs, assembled(bounds, gradients, vocab_size).movedim(0, -1))


def bounds_of(case: Case, n_ranks: int) -> Sequence[tuple[int, int]]:
    return case.bounds or even(case.logits.shape[-1] // n_ranks, n_ranks)


def grad_outputs_of(case: Case) -> tuple[torch.Tensor | None, ...]:
    if case.grad_outputs:
        return case.grad_outputs
    if case.options.get("reduction") != "none":
        return (torch.tensor(0.75),)
    return (random_grad_output(case.labels.numel()).view(case.labels.shape),)


def own_tensors(case: Any, start: int, stop: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Options that are tensors, on the device; ``class_weight`` whole, or of those columns, NaN in the padding."""
    names = ("class_weight", "expected_grad_output", "temperature")
    given = {name: case.options[name] for name in names if isinstance(case.options.get(name), torch.Tensor)}
    if "class_weight" in given and case.weight_form == "columns":
        given["class_weight"] = padded_shard(given["class_weight"], start, stop)
    return {name: value.to(device) for name, value in given.items()}


def run(
    rank: int, group: Any, case: Case, member_sets: Sequence[Sequence[int]] | None = None, with_alone: bool = False
) -> Result | None:
    """In a rank: one call and its backward, in that group of ``member_sets`` it is in, or None."""
    if member_sets is not None:
        groups = zip(subgroups(*member_sets), member_sets, strict=True)
        group = next((made for made, members in groups if rank in members), None)
        if group is None:
            return None
    device = device_of(rank, torch.distributed.group.WORLD)
    rank, n_ranks = group.rank(), group.size()
    start, stop = bounds_of(case, n_ranks)[rank]
    vocab_size = case.logits.shape[-1]
    leaf = padded_shard(case.logits, start, stop).to(device).requires_grad_()
    labels = case.labels.to(device)
    size = {"shard": VocabShard(start, stop, vocab_size), "vocab_size": vocab_size}
    options = {**case.options, "impl": case.impl, "vocab_size": size.get(case.size)}
    options |= own_tensors(case, start, stop, device)
    call = partial(case.function, leaf, labels, group=group, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        outputs, *collectives = with_collectives(call, grad_outputs_of(case))
    assert torch.equal(labels.cpu(), case.labels), "labels were written"
    alone = None
    if with_alone and rank == 0:
        whole = case.function(case.logits.to(device), labels, **case.options, impl=case.impl)
        alone = flat_outputs(whole)[0]
    return Result(outputs, leaf.grad, *collectives, alone)


def n_statistics(case: Any) -> int:
    """How many each rank sends of a row."""
    options, number = case.options, 3
    asked = options.get("outputs", ())
    number += 2 * bool(options.get("label_smoothing")) + ("entropy" in asked)
    number += "predictions" in asked
    number += options.get("class_weight") is not None
    return number + 5 * (case.function in (every_output, linear_every_output))


def check(case: Case, results: Sequence[Result], ranks: Sequence[int] | None = None) -> Results:
    """Outputs are bit-equal on all ranks and the whole vocabulary's in fp64; one collective in all.

    Args:
        ranks: global ranks of the group; None is all of the world.
    """
    whole = whole_of(results, bounds_of(case, len(results)), case.logits.shape[-1])
    for first in (whole.loss, results[0].alone):
        if first is not None:
            each = whole._replace(outputs=(first, *whole.outputs[1:]))
            given = {"function": case.function, **case.options}
            assert_right(each, case.logits, case.labels, *grad_outputs_of(case), **given)
    ranks = tuple(ranks or range(len(results)))
    of_row = max(4, case.logits.itemsize) * n_statistics(case)
    expected = [("_allgather_base_", ranks, of_row * case.labels.numel())]
    for result in results:
        assert [tuple(call) for call in result.in_forward] == (expected if len(ranks) > 1 else [])
        assert result.in_backward == []
    return whole
