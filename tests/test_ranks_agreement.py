"""Verification of every call: ranks that disagree raise the same error, in forward and backward, and none
waits for another.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.budget import assert_within_budget
from tests.support.collectives import record_collectives
from tests.support.inputs import IGNORE_INDEX, batch, shard_of
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from tests.support.ranks import device_of, implementation_params
from vocab_parallel_ce import (
    LinearCrossEntropy,
    VocabParallelCrossEntropy,
    cross_entropy_forward,
    linear_cross_entropy,
    linear_token_log_probs,
    parallel_cross_entropy,
    token_log_probs,
    verify_calls,
    verify_group,
    vocab_parallel_cross_entropy,
)

ROWS, WIDTH, COLUMNS = 6, 8, 10  # columns of a rank

in_ranks = pytest.mark.parametrize(
    ("rank_pool", "impl"), implementation_params((2, 3), (), (2,)), indirect=["rank_pool"]
)


class Arguments:
    """Sound arguments of one rank; a change spoils one of them."""

    def __init__(self, rank: int, group: Any) -> None:
        self.group, self.world, device = group, group.size(), device_of(rank, group)
        generator = torch.Generator().manual_seed(2)
        logits, self.labels = batch("some_ignored", rows=ROWS, vocab_size=COLUMNS * self.world)
        self.labels = self.labels.to(device)
        # No leaf, so that gradients are in place as in training.
        self.logits = shard_of(logits, rank, self.world).to(device).requires_grad_() * 1
        self.hidden = torch.randn(ROWS, WIDTH, generator=generator).to(device).requires_grad_()
        weight = torch.randn(COLUMNS * self.world, WIDTH, generator=generator)
        self.weight = weight.chunk(self.world)[rank].to(device).requires_grad_()
        self.options: dict[str, Any] = {}
        self.grad_enabled, self.scale = True, 1.0


def _module(a):
    return VocabParallelCrossEntropy(group=a.group, **a.options)(a.logits, a.labels)


def _linear_module(a):
    head = torch.nn.Linear(WIDTH, COLUMNS, bias=False, device=a.weight.device)
    head.weight = torch.nn.Parameter(a.weight.detach())
    module = LinearCrossEntropy(head, group=a.group, **a.options)
    if getattr(a, "hook", False):
        head.register_forward_hook(lambda *_: None)
    return module(a.hidden, a.labels)


FUNCTIONS = {
    "loss": lambda a: vocab_parallel_cross_entropy(a.logits, a.labels, group=a.group, **a.options),
    "log-probs": lambda a: -token_log_probs(a.logits, a.labels, group=a.group, **a.options).sum(),
    "module": _module,
    "transformer engine": lambda a: parallel_cross_entropy(
        a.logits, a.labels, reduce_loss=True, dist_process_group=a.group, **a.options
    ),
    "linear": lambda a: linear_cross_entropy(a.hidden, a.weight, a.labels, group=a.group, **a.options),
    "linear in backward": lambda a: linear_cross_entropy(
        a.hidden, a.weight, a.labels, group=a.group, gradient="in_backward", **a.options
    ),
    "linear log-probs": lambda a: linear_token_log_probs(
        a.hidden, a.weight, a.labels, group=a.group, **a.options
    ).sum(),
    "linear module": _linear_module,
}
OVER_LOGITS = ("loss", "log-probs", "module", "transformer engine")
LINEAR = tuple(name for name in FUNCTIONS if name not in OVER_LOGITS)


def _set(**values):
    def change(a):
        for name, value in values.items():
            setattr(a, name, value(getattr(a, name)) if callable(value) else value)

    return change


def _option(**options):
    return _set(options=options)


def _other_label(labels):
    return labels.masked_fill(labels == IGNORE_INDEX, 1)


# The functions it is for, what spoils one rank's call, and the argument that the error names.
CHANGES: list[tuple[tuple[str, ...], Any, str]] = [
    (tuple(FUNCTIONS), _set(labels=_other_label), "labels: "),
    (tuple(FUNCTIONS), _set(labels=lambda y: y.int()), "labels: .* dtype torch.int32"),
    (tuple(FUNCTIONS), _set(grad_enabled=False), "(logits|hidden): .* none .torch.no_grad"),
    (tuple(FUNCTIONS), _set(labels=lambda y: y.float()), "labels: dtype must be"),
    (tuple(FUNCTIONS), _set(scale=2.0), "gradient of loss: .* norm"),
    (OVER_LOGITS, _set(logits=lambda x: x.bfloat16()), "logits: .* dtype torch.bfloat16"),
    (OVER_LOGITS, _set(logits=lambda x: x[:-1], labels=lambda y: y[:-1]), "logits: .* leading dimensions"),
    (OVER_LOGITS, _set(logits=lambda x: x.tolist()), "logits: expected a torch.Tensor"),
    (("loss", "module"), _option(label_smoothing=0.1), "label_smoothing: .* 0.1"),
    (("loss", "module"), _option(reduction="sum"), "reduction: .* 'sum'"),
    (("loss",), _option(reduction="sum", num_items=3), "num_items: .* 3.0"),
    (("loss",), _option(unknown=3), "TypeError"),
    (("log-probs",), _option(temperature=2.0), "temperature: .* 2.0"),
    (("log-probs",), _option(gradient="in_forward"), "gradient: expected one of"),
    (("transformer engine",), _option(overwrite_input="yes"), "overwrite_input: expected a bool"),
    (("transformer engine",), _option(label_smoothing=2.0), "label_smoothing: must be in"),
    (LINEAR, _option(chunk_tokens=2), "chunk_tokens: .* 2"),
    (LINEAR, _option(softcap=5.0), "softcap: .* 5.0"),
    (("linear", "linear module"), _option(reduction="sum"), "reduction: .* 'sum'"),
    (LINEAR, _set(hidden=lambda h: h[:-1], labels=lambda y: y[:-1]), "hidden: .* leading dimensions"),
    (
        LINEAR,
        _set(hidden=lambda h: torch.nn.functional.dropout(h, 0.5)),
        "hidden: rank . of . has values of norm",
    ),
    (LINEAR, _set(weight=lambda w: w.detach()), "weight: .* none"),
    (LINEAR, _set(weight=lambda w: w[:, :-1]), "weight: expected shape"),
    (("linear",), _set(options={"sequence_parallel": True}), "labels: expected shape|sequence_parallel"),
    (("linear module",), _set(hook=lambda _: True), "head: "),
]


def _call(function, a):
    """Loss, and its backward; what was raised instead."""
    with torch.set_grad_enabled(a.grad_enabled):
        loss = FUNCTIONS[function](a)
    (loss * a.scale).backward()
    return loss.detach()


def _outcomes(rank, group, cases):
    """Of each case this rank's error; then a sound call, which shows that no rank is a collective behind."""
    outcomes = []
    with verify_calls():
        for function, index, odd in cases:
            a = Arguments(rank, group)
            a.hook = False
            if rank == odd:
                CHANGES[index][1](a)
            try:
                _call(function, a)
                outcomes.append("nothing")
            except (TypeError, ValueError, RuntimeError) as error:
                outcomes.append(f"{type(error).__name__}: {error}")
            _call(function, Arguments(rank, group))
        loss = _call("loss", Arguments(rank, group))
    return outcomes, loss


def _skips(function, index):
    """What a change cannot spoil."""
    weight_is_detached = index == next(i for i, c in enumerate(CHANGES) if c[2] == "weight: .* none")
    return function == "linear module" and weight_is_detached  # its head makes a parameter of it


@in_ranks
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_disagrees_is_the_same_error_on_every_rank(rank_pool, impl, function):
    """Without the comparison these return a number, abort gloo or wait for half an hour."""
    world = rank_pool.world_size
    chosen = [i for i, change in enumerate(CHANGES) if function in change[0] and not _skips(function, i)]
    cases = [(function, index, odd) for index in chosen for odd in (0, world - 1)]
    results = rank_pool.run(_outcomes, cases)
    for number, (_, index, odd) in enumerate(cases):
        errors = {outcomes[number] for outcomes, _ in results}
        assert len(errors) == 1, (CHANGES[index][2], errors)
        (error,) = errors
        named = rf"rank {odd if world > 2 else '.'} of {world}"
        assert re.search(CHANGES[index][2], error) and re.search(named, error), (CHANGES[index][2], error)
    made = batch("some_ignored", rows=ROWS, vocab_size=COLUMNS * world)
    for _, loss in results:
        assert_within_budget(loss, cross_entropy_fp64(*made).loss, cross_entropy_same_dtype(*made).loss)


def _counted(rank, group):
    counts = {}
    for name, context in (("off", nullcontext()), ("on", verify_calls()), ("off within", verify_calls())):
        a = Arguments(rank, group)
        with context, verify_calls(False) if name == "off within" else nullcontext():
            with record_collectives() as forward:
                loss = vocab_parallel_cross_entropy(a.logits, a.labels, group=group)
            with record_collectives() as backward:
                loss.backward()
        counts[name] = [[call.name for call in calls] for calls in (forward, backward)]
        counts[name].append(max(call.nbytes for call in forward))
    return counts


@in_ranks
def test_off_it_sends_nothing(rank_pool, impl):
    for counts in rank_pool.run(_counted):
        assert counts["off"][:2] == counts["off within"][:2] and len(counts["off"][0]) == 1
        assert counts["off"][1] == []
        assert len(counts["on"][0]) == 3 and len(counts["on"][1]) == 2
        assert counts["on"][2] < 4096


def _forward_outside(rank, group):
    """Backward compares if it runs within verification, wherever forward ran."""
    errors = []
    for function in ("loss", "linear", "linear in backward"):
        a = Arguments(rank, group)
        loss = FUNCTIONS[function](a)
        with verify_calls():
            try:
                (loss * (1.0 + rank)).backward()
            except ValueError as error:
                errors.append(str(error))
    return errors


def _in_a_checkpoint(rank, group):
    losses = []
    with verify_calls():
        for function in ("loss", "transformer engine", "linear", "linear in backward"):
            a = Arguments(rank, group)
            given = (a.logits, a.hidden, a.weight)

            def call(logits, hidden, weight, a=a, function=function):
                a.logits, a.hidden, a.weight = logits * 1, hidden, weight
                return FUNCTIONS[function](a)

            loss = checkpoint(call, *given, use_reentrant=False)
            loss.backward()
            losses.append(loss.detach())
    return losses


@in_ranks
def test_it_works_in_a_checkpoint(rank_pool, impl):
    """Which hands out saved tensors once."""
    made = batch("some_ignored", rows=ROWS, vocab_size=COLUMNS * rank_pool.world_size)
    for over_logits, te, *_ in rank_pool.run(_in_a_checkpoint):
        for loss in (over_logits, te):
            assert_within_budget(loss, cross_entropy_fp64(*made).loss, cross_entropy_same_dtype(*made).loss)


@in_ranks
def test_a_backward_alone_is_compared(rank_pool, impl):
    first, *others = rank_pool.run(_forward_outside)
    assert len(first) == 3 and all("gradient of loss: rank" in error for error in first), first
    assert all(errors == first for errors in others)


def _unmatched(rank, group):
    """Other cases in which ranks call different things."""
    errors = []
    with verify_calls():
        for call in (
            lambda a: FUNCTIONS["loss" if rank else "linear"](a),
            lambda a: cross_entropy_forward(a.logits, a.labels, 0.1 * rank, True, a.group, -100),
            lambda a: verify_group(
                a.hidden, a.labels, group, weight=a.weight, chunk_tokens=2 + rank, temperature=1.0
            ),
            lambda a: verify_group(a.hidden, a.labels, group, weight=a.weight, label_smoothing=0.1 * rank),
            lambda a: verify_group(a.hidden, a.labels, group, weight=a.weight[:, rank:]),
            lambda a: verify_group(a.hidden, a.labels, group, weight=a.weight, chunk_tokens=2),
        ):
            try:
                call(Arguments(rank, group))
                errors.append(None)
            except (TypeError, ValueError) as error:
                errors.append(f"{type(error).__name__}: {error}")
    return errors


@pytest.mark.parametrize(("rank_pool", "impl"), implementation_params((2,), (), (2,)), indirect=["rank_pool"])
def test_calls_of_different_functions_and_linear_calls_of_verify_group(rank_pool, impl):
    first, second = rank_pool.run(_unmatched)
    assert first == second
    expected = (
        "call: .* a loss over logits",
        "label_smoothing: ",
        "chunk_tokens: ",
        "label_smoothing: ",
        "weight: ",
    )
    for pattern, error in zip(expected, first, strict=False):
        assert error and re.search(pattern, error), (pattern, error)
    assert first[-1] is None


@pytest.mark.reference
@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True"), ("0", "False"), ("", "False"), (None, "False")]
)
def test_the_variable_switches_it_on_for_a_program(value, expected):
    environment = {name: v for name, v in os.environ.items() if name != "VOCAB_PARALLEL_CE_VERIFY"}
    if value is not None:
        environment["VOCAB_PARALLEL_CE_VERIFY"] = value
    program = "from vocab_parallel_ce import agreement; print(agreement.is_on)"
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected, done.stderr


@pytest.mark.reference
def test_one_rank_compares_nothing():
    logits = torch.randn(3, 8, requires_grad=True)
    with verify_calls():
        vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3])).backward()
        with pytest.raises(ValueError, match="^labels: shape"):
            vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]))
