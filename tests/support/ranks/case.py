"""One call on R ranks, over the columns of each: how a rank makes it, and what all of them together must get."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.cases import linear, logits
from tests.support.cases.flat import linear_cross_entropy
from tests.support.cases.inputs import NAN, Batch, padded_shard
from tests.support.cases.linear import Projection
from tests.support.ranks.collectives import Collective, record_collectives
from tests.support.ranks.pools import device_of, subgroups
from vocab_parallel_ce import VocabShard, vocab_parallel_cross_entropy


class Case(NamedTuple):
    """One call as every rank makes it, on its columns of the vocabulary."""

    inputs: Batch | Projection  # over the whole vocabulary
    impl: str
    options: dict[str, Any]
    bounds: Sequence[tuple[int, int]] | None = None  # of each rank's columns, padding from V on; None: equal
    size: str = "even"  # how ranks say which columns are theirs: "shard", "vocab_size" or "even"
    grad_outputs: tuple[Tensor | None, ...] | None = None  # None: that of the reduction
    function: Callable[..., Any] | None = None  # None: the cross-entropy of the inputs
    weight_form: str = "whole"  # or "columns": class_weight is that of this rank's
    frozen: tuple[str, ...] = ()  # of the leaves of a projection
    main_grad: bool = False
    as_dtensors: bool = False  # weight and bias are DTensors, and not this rank's plain rows
    with_alone: bool = False  # the first rank makes a call over the whole vocabulary too

    def call(self, leaves: Sequence[Tensor | None], alongside: Tensor, **options: Any) -> Any:
        """What the function returns for leaves, and labels or another tensor."""
        if isinstance(self.inputs, Projection):
            function = self.function or linear_cross_entropy
            return function(*leaves[:2], alongside, bias=leaves[2], **options)
        (leaf,) = leaves
        return (self.function or vocab_parallel_cross_entropy)(leaf, alongside, **options)


class Result(NamedTuple):
    """What one rank got."""

    outputs: tuple[Tensor, ...]  # loss and metrics; or log-probabilities and entropy
    gradients: tuple[Tensor | None, ...]  # of the leaves: logits, or hidden states, weight and bias
    in_forward: list[Collective]
    in_backward: list[Collective]
    alone: Tensor | None = None  # the first output over the whole vocabulary on this rank alone


def even(n_columns: int, n_ranks: int) -> list[tuple[int, int]]:
    """Equal shards."""
    return [(rank * n_columns, (rank + 1) * n_columns) for rank in range(n_ranks)]


def chunked(vocab_size: int, n_ranks: int) -> list[tuple[int, int]]:
    """Shards as ``torch.chunk`` cuts them."""
    width = -(-vocab_size // n_ranks)
    return [(rank * width, min((rank + 1) * width, vocab_size)) for rank in range(n_ranks)]


def with_collectives(
    call: Callable[[], Any], grad_outputs: Sequence[Tensor | None]
) -> tuple[tuple[Tensor, ...], list[Collective], list[Collective]]:
    """What ``call`` returns, and the collectives of it and of its :func:`logits.backward`."""
    with record_collectives() as in_forward:
        outputs = logits.flat_outputs(call())
    with record_collectives() as in_backward:
        logits.backward(outputs, grad_outputs)
    return outputs, in_forward, in_backward


def columns_of(case: Case) -> int:
    inputs = case.inputs
    return len(inputs.weight) if isinstance(inputs, Projection) else inputs.logits.shape[-1]


def bounds_of(case: Case, n_ranks: int) -> Sequence[tuple[int, int]]:
    return case.bounds or even(columns_of(case) // n_ranks, n_ranks)


def grad_outputs_of(case: Case) -> tuple[Tensor | None, ...]:
    if case.grad_outputs:
        return case.grad_outputs
    if case.options.get("reduction") != "none":
        return (torch.tensor(0.75),)
    made = logits.zero_first_grad_output if isinstance(case.inputs, Projection) else logits.random_grad_output
    labels = case.inputs.labels
    return (made(labels.numel()).view(labels.shape),)


def _options_of_rank(case: Case, start: int, stop: int, device: torch.device) -> dict[str, Any]:
    """On the device; ``class_weight`` whole, or of those columns, NaN in the padding."""
    moved = {name: v.to(device) for name, v in case.options.items() if torch.is_tensor(v) and name != "num_items"}
    if "class_weight" in moved and case.weight_form == "columns":
        moved["class_weight"] = padded_shard(moved["class_weight"], start, stop)
    vocab_size = columns_of(case)
    size = {"shard": VocabShard(start, stop, vocab_size), "vocab_size": vocab_size}
    return {**case.options, **moved, "impl": case.impl, "vocab_size": size.get(case.size)}


def _parts(case: Case, start: int, stop: int) -> tuple[dict[str, Tensor | None], Tensor]:
    """The leaves of those columns, by name, and what stands alongside them."""
    inputs = case.inputs
    if isinstance(inputs, Projection):
        head = linear.padded_weight(inputs, start, stop)
        return dict(zip(linear.LEAVES, (inputs.hidden, *head), strict=True)), inputs.labels
    return {"logits": padded_shard(inputs.logits, start, stop)}, inputs.labels


def run(
    rank: int,
    group: Any,
    case: Case,
    member_sets: Sequence[Sequence[int]] | None = None,
) -> Result | None:
    """In a rank: one call and its backward, in that group of ``member_sets`` it is in, or None."""
    if member_sets is not None:
        groups = zip(subgroups(*member_sets), member_sets, strict=True)
        group = next((made for made, members in groups if rank in members), None)
        if group is None:
            return None
    device, rank, n_ranks = device_of(rank, torch.distributed.group.WORLD), group.rank(), group.size()
    start, stop = bounds_of(case, n_ranks)[rank]
    parts, alongside = _parts(case, start, stop)
    if case.options.get("sequence_parallel"):
        parts["hidden"] = parts["hidden"].chunk(n_ranks)[rank]
    leaves = [
        None if part is None else part.clone().to(device).requires_grad_(name not in case.frozen)
        for name, part in parts.items()
    ]
    options = _options_of_rank(case, start, stop, torch.device(device)) | {"group": group}
    if case.as_dtensors:
        leaves[1:] = _distributed_head(case, device, group)
    if case.main_grad:
        options["main_grad"] = torch.zeros(parts["weight"].shape, device=device)
    on_device = alongside.clone().to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        outputs, *sent = with_collectives(partial(case.call, leaves, on_device, **options), grad_outputs_of(case))
    same = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)
    same(on_device.cpu(), alongside)
    if "hidden" in parts:
        same(leaves[0].detach().cpu(), parts["hidden"])
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    if case.as_dtensors:
        gradients[1:] = _local_gradients(case, leaves[1:])
    if case.main_grad:
        # Megatron's hooks wait for a gradient of the parameter that has the attribute.
        assert not gradients[1].any() if case.as_dtensors else gradients[1] is None
        gradients[1] = options["main_grad"].to(parts["weight"].dtype)
    alone = None
    if case.with_alone and rank == 0:
        whole = case.call([case.inputs.logits.to(device)], on_device, **case.options, impl=case.impl)
        alone = logits.flat_outputs(whole)[0]
    return Result(outputs, tuple(gradients), *sent, alone)


def distributed(whole: Tensor, device: torch.device, group: Any, placement: Any = None) -> DTensor:
    """Cut over the ranks, along its rows if no ``placement`` is given."""
    mesh = DeviceMesh.from_group(group, device.type)
    return distribute_tensor(whole.to(device), mesh, [placement or Shard(0)])


def _distributed_head(case: Case, device: torch.device, group: Any) -> list[DTensor | None]:
    """Weight and bias, cut along their rows."""
    wholes = linear.padded_weight(case.inputs, 0, case.bounds[-1][1])
    head = [None if whole is None else distributed(whole, device, group).requires_grad_() for whole in wholes]
    head[0].grad_added_to_main_grad = False
    return head


def _local_gradients(case: Case, head: Sequence[DTensor | None]) -> list[Tensor | None]:
    for leaf in head:
        if leaf is not None:
            assert leaf.grad.placements == leaf.placements and leaf.grad.shape == leaf.shape
    assert head[0].grad_added_to_main_grad is case.main_grad
    return [None if leaf is None else leaf.grad.to_local() for leaf in head]


def assembled(bounds: Sequence[tuple[int, int]], gradients: Sequence[Tensor], vocab_size: int) -> Tensor:
    """``[V, ...]`` from the gradients of the ranks' columns; those of padding must be 0."""
    whole = gradients[0].new_full((vocab_size, *gradients[0].shape[1:]), NAN)
    for (start, stop), gradient in zip(bounds, gradients, strict=True):
        valid = max(min(stop, vocab_size) - start, 0)
        whole[start : start + valid] = gradient[:valid]
        assert not gradient[valid:].any(), f"gradient of the padding of [{start}, {stop})"
    return whole


def check(case: Case, results: Sequence[Result], ranks: Sequence[int] | None = None) -> Any:
    """Outputs are bit-equal on all ranks, and everything is what the whole vocabulary gives in fp64.

    Of logits, nothing is sent in backward, and in forward what is below.

    Args:
        ranks: global ranks of the group; None is all of the world.
    """
    for result in results:
        torch.testing.assert_close(result.outputs, results[0].outputs, rtol=0, atol=0, equal_nan=True)
    if isinstance(case.inputs, Projection):
        return _check_projection(case, results)
    bounds, (outputs, *_) = bounds_of(case, len(results)), results[0]
    gradients = [result.gradients[0].movedim(-1, 0) for result in results]
    gradient = assembled(bounds, gradients, columns_of(case)).movedim(0, -1)
    for first in (outputs[0], results[0].alone):
        if first is None:
            continue
        whole = logits.Results((first, *outputs[1:]), gradient)
        function = case.function or vocab_parallel_cross_entropy
        logits.assert_right(whole, *case.inputs, *grad_outputs_of(case), function=function, **case.options)
    ranks, n_rows = tuple(ranks or range(len(results))), case.inputs.logits[..., 0].numel()
    n_bytes = max(4, case.inputs.logits.itemsize) * n_statistics(case) * n_rows
    expected = [("_allgather_base_", ranks, n_bytes)] * (len(ranks) > 1)
    for result in results:
        assert [tuple(call) for call in result.in_forward] == expected
        assert result.in_backward == []
    return logits.Results(outputs, gradient)


def _check_projection(case: Case, results: Sequence[Result]) -> None:
    bounds, of_hidden, inputs = bounds_of(case, len(results)), _hidden_gradient(case, results), case.inputs
    gradients = [of_hidden]
    for parts in list(zip(*(result.gradients for result in results), strict=True))[1:]:
        gradients.append(None if parts[0] is None else assembled(bounds, parts, columns_of(case)))
    for name, gradient in zip(linear.LEAVES, gradients, strict=True):
        assert (gradient is not None) == (name not in case.frozen and getattr(inputs, name) is not None), name
    whole = linear.Results(results[0].outputs, *gradients)
    function = case.function or linear_cross_entropy
    linear.assert_right(whole, inputs, *grad_outputs_of(case), bounds=bounds, function=function, **case.options)


def _hidden_gradient(case: Case, results: Sequence[Result]) -> Tensor | None:
    """Of all tokens: equal on all ranks, or their parts one after the other, or the sum of their shares."""
    gradients = [result.gradients[0] for result in results]
    if gradients[0] is None:
        return None
    if case.options.get("sequence_parallel"):
        return torch.cat(gradients)
    if not case.options.get("reduce_hidden_grad", True):
        return sum(gradients[1:], start=gradients[0])
    for gradient in gradients:
        torch.testing.assert_close(gradient, gradients[0], rtol=0, atol=0, equal_nan=True)
    return gradients[0]


def n_statistics(case: Case) -> int:
    """How many each rank sends of a row."""
    options, number = case.options, 3
    number += 2 * bool(options.get("label_smoothing"))
    number += len({"entropy", "predictions"}.intersection(options.get("outputs", ())))
    number += options.get("class_weight") is not None
    return number + 5 * (case.function in (logits.every_output, linear.linear_every_output))
