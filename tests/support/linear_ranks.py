"""One call of the fused loss on R ranks: how each makes it, and what all of them together must have got."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.collectives import Collective, record_collectives
from tests.support.linear import (
    Projection,
    Results,
    assert_linear_metrics,
    assert_results,
    linear_fp64,
    linear_same_dtype,
    padded_weight,
)
from tests.support.logits import flat_outputs
from tests.support.ranks import device_of, subgroups
from vocab_parallel_ce import VocabShard, linear_cross_entropy

ONE = torch.ones(())
COLUMNS, ROWS = 20, 6
WAYS = {
    "mean": {"reduction": "mean", "gradient": "in_forward"},
    "sum": {"reduction": "sum", "num_items": 7, "gradient": "in_forward"},
    "sum, in_backward": {"reduction": "sum", "gradient": "in_backward"},
    "none": {"reduction": "none"},
}
BY_WAY = pytest.mark.parametrize("way", [WAYS["none"], *list(WAYS.values())[:3]], ids=str)
TWO_WAYS = pytest.mark.parametrize("way", [WAYS["none"], WAYS["mean"]], ids=["none", "mean"])


class Case(NamedTuple):
    """One call as every rank makes it, with its rows of the weight."""

    inputs: Projection
    impl: str
    options: dict[str, Any]
    bounds: list[tuple[int, int]]  # of each rank's columns; those at V and beyond are padding
    grad_outputs: tuple[torch.Tensor | None, ...] = (ONE,)
    size: str = "even"  # how ranks say which columns are theirs: "even", "vocab_size" or "shard"
    function: Callable[..., Any] = linear_cross_entropy
    frozen: tuple[str, ...] = ()
    main_grad: bool = False


class Result(NamedTuple):
    """What one rank got."""

    outputs: tuple[torch.Tensor, ...]
    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    in_forward: list[Collective]
    in_backward: list[Collective]


def run(
    rank: int,
    group: Any,
    case: Case,
    members: Sequence[int] | None = None,
    distribute: Callable[[Case, torch.device, Any], torch.Tensor] | None = None,
) -> Result | None:
    """In a rank: one call and its backward; None outside ``members``.

    Args:
        distribute: makes the weight that is passed instead of this rank's plain rows.
    """
    if members is not None:
        (group,) = subgroups(members)
        if rank not in members:
            return None
    device = device_of(rank, torch.distributed.group.WORLD)
    start, stop = case.bounds[group.rank()]
    vocab_size = len(case.inputs.weight)
    weight, bias = padded_weight(case.inputs, start, stop)
    hidden = case.inputs.hidden
    if case.options.get("sequence_parallel"):
        hidden = hidden.chunk(group.size())[group.rank()]
    leaves = [
        None if leaf is None else leaf.clone().to(device).requires_grad_(name not in case.frozen)
        for name, leaf in (("hidden", hidden), ("weight", weight), ("bias", bias))
    ]
    if distribute is not None:
        leaves[1] = distribute(case, device, group).requires_grad_()
    options = {**case.options, "bias": leaves[2], "group": group, "impl": case.impl}
    size = {"shard": VocabShard(start, stop, vocab_size), "vocab_size": vocab_size}
    options |= {name: value for name, value in size.items() if name == case.size}
    main_grad = torch.zeros(weight.shape, device=device) if case.main_grad else None
    if main_grad is not None:
        options["main_grad"] = main_grad
    labels = case.inputs.labels.to(device)
    with record_collectives() as in_forward:
        outputs = flat_outputs(case.function(leaves[0], leaves[1], labels, **options))
    pairs = [
        (output, grad_output.to(device).expand(output.shape))
        for output, grad_output in zip(outputs, case.grad_outputs, strict=False)
        if grad_output is not None and output.requires_grad
    ]
    with record_collectives() as in_backward:
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    if hasattr(gradients[1], "placements"):
        assert gradients[1].placements == leaves[1].placements and gradients[1].shape == leaves[1].shape
        gradients[1] = gradients[1].to_local()
    if main_grad is not None:
        assert gradients[1] is None
        gradients[1] = main_grad.to(weight.dtype)
    torch.testing.assert_close(leaves[0].detach().cpu(), hidden, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(labels.cpu(), case.inputs.labels), "labels were written"
    return Result(outputs, *gradients, in_forward, in_backward)


def _assembled(case: Case, results: Sequence[Result], name: str) -> torch.Tensor | None:
    """The gradient over the vocabulary from those of the ranks' rows, whose padding must be 0."""
    if getattr(results[0], name) is None:
        return None
    whole = getattr(case.inputs, name)
    grad = torch.full_like(whole, float("nan"), dtype=getattr(results[0], name).dtype)
    for (start, stop), result in zip(case.bounds, results, strict=True):
        valid = max(min(stop, len(whole)) - start, 0)
        grad[start : start + valid] = getattr(result, name)[:valid]
        assert not getattr(result, name)[valid:].any(), f"gradient of the padding of [{start}, {stop})"
    return grad


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


def check(case: Case, results: Sequence[Result]) -> tuple[Results, Results]:
    """Outputs are bit-equal on all ranks, and everything is what the whole vocabulary gives in fp64.

    Returns:
        the results put together, and those in fp64.
    """
    for result in results:
        for output, first in zip(result.outputs, results[0].outputs, strict=True):
            torch.testing.assert_close(output, first, rtol=0, atol=0, equal_nan=True)
    whole = Results(
        results[0].outputs,
        _hidden_gradient(case, results),
        _assembled(case, results, "weight"),
        None if case.inputs.bias is None else _assembled(case, results, "bias"),
    )
    settings = {"function": case.function, **case.options}
    truth = linear_fp64(case.inputs, *case.grad_outputs, **settings)
    peer = linear_same_dtype(case.inputs, *case.grad_outputs, bounds=case.bounds, **settings)
    assert_results(whole, truth, peer)
    if case.options.get("return_metrics"):
        assert_linear_metrics(results[0].outputs[1:], case.inputs, **case.options)
    return whole, truth


def check_collectives(case: Case, results: Sequence[Result], extra: int = 0) -> None:
    """``K = 3 + extra`` statistics a token are gathered once, and the gradient of each chunk is reduced once.

    By chunks where forward computes gradients, otherwise statistics all at once and the rest in backward.
    Tokens that are ignored may be left out: there should be none.
    """
    rows, hidden = case.inputs.labels.numel(), case.inputs.hidden
    size = min(case.options.get("chunk_tokens", rows), rows)
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


def messages_of(attempts: dict[str, Callable[[], Any]]) -> tuple[dict[str, str], list[Collective]]:
    """In a rank: what each attempt raises, and the collectives that all of them sent."""
    messages = {}
    with record_collectives() as calls:
        for name, attempt in attempts.items():
            try:
                attempt()
                messages[name] = "accepted"
            except (TypeError, ValueError) as error:
                messages[name] = f"{type(error).__name__}: {error}"
    return messages, calls


def assert_refused(results: Sequence[tuple[dict[str, str], list[Collective]]], expected: dict[str, str]) -> None:
    """Every rank refuses every attempt, in words that match these, before anything is sent."""
    for messages, calls in results:
        assert messages.keys() == expected.keys()
        for name, pattern in expected.items():
            assert re.match(pattern, messages[name]), (name, messages[name])
        assert calls == []
