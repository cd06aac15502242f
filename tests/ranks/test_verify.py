"""Verification: ranks that do not fit raise the same error, in forward and backward, and none waits."""

from __future__ import annotations

import re
import runpy
import threading
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.support.budget import assert_within_budget
from tests.support.collectives import record_collectives
from tests.support.inputs import IGNORE_INDEX, batch, shard_of
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from tests.support.ranks import device_of, implementation_params, subgroups
from vocab_parallel_ce import (
    LinearCrossEntropy,
    VocabParallelCrossEntropy,
    VocabShard,
    cross_entropy_forward,
    linear_cross_entropy,
    linear_token_log_probs,
    parallel_cross_entropy,
    token_log_probs,
    verify,
    verify_calls,
    verify_group,
    vocab_parallel_cross_entropy,
)

WIDTH, COLUMNS = 8, 10  # hidden size, and columns per rank


def _in_ranks(*worlds):
    params = implementation_params(worlds, (), tuple(world for world in worlds if world != 3))
    return pytest.mark.parametrize(("rank_pool", "impl"), params, indirect=["rank_pool"])


in_ranks, in_two_ranks, in_three_ranks = _in_ranks(2, 3), _in_ranks(2), _in_ranks(3)


class Arguments:
    """Valid arguments of one rank. A change spoils one of them."""

    def __init__(self, rank: int, group: Any, n_ranks: int | None = None) -> None:
        self.group, self.n_ranks = group, n_ranks or group.size()
        self.options: dict[str, Any] = {}
        self.grad_enabled, self.scale, self.has_hook = True, 1.0, False
        logits, labels = _batch(self.n_ranks)
        leaf = shard_of(logits, rank, self.n_ranks).to(device_of(rank, None)).requires_grad_()
        self.logits: Any = leaf.view(2, 3, COLUMNS) * 1  # no leaf, as in training
        self.labels: Any = labels.view(2, 3).to(leaf.device)
        generator = torch.Generator().manual_seed(2)
        self.hidden = torch.randn(2, 3, WIDTH, generator=generator).to(leaf.device).requires_grad_()
        weight = torch.randn(COLUMNS * self.n_ranks, WIDTH, generator=generator)
        self.weight = weight.chunk(self.n_ranks)[rank].to(leaf.device).requires_grad_()

    def changed(self, **changes: Any) -> Arguments:
        for name, change in changes.items():
            setattr(self, name, change(getattr(self, name)) if callable(change) else change)
        return self


def _batch(n_ranks):
    logits, labels = batch("peaked", rows=6, vocab_size=COLUMNS * n_ranks)
    labels[1], labels[3], labels[4] = (
        IGNORE_INDEX,
        COLUMNS * n_ranks - 1,
        4,
    )  # the last two are [1, 0], [1, 1]
    return logits, labels


def _linear_module(a):
    head = torch.nn.Linear(WIDTH, COLUMNS, bias=False, device=a.weight.device)
    head.weight = torch.nn.Parameter(a.weight.detach(), requires_grad=a.weight.requires_grad)
    module = LinearCrossEntropy(head, group=a.group, **a.options)
    if a.has_hook:
        head.register_forward_hook(lambda *_: None)
    return module(a.hidden, a.labels)


def _linear(a, **options):
    return linear_cross_entropy(a.hidden, a.weight, a.labels, group=a.group, **options, **a.options)


FUNCTIONS = {
    "loss": lambda a: vocab_parallel_cross_entropy(a.logits, a.labels, group=a.group, **a.options),
    "log-probs": lambda a: -token_log_probs(a.logits, a.labels, group=a.group, **a.options).sum(),
    "module": lambda a: VocabParallelCrossEntropy(group=a.group, **a.options)(a.logits, a.labels),
    "transformer engine": lambda a: parallel_cross_entropy(
        a.logits, a.labels, reduce_loss=True, dist_process_group=a.group, **a.options
    ),
    "verify_group": lambda a: verify_group(a.logits, a.labels, a.group, **a.options),
    "linear": _linear,
    "linear in backward": lambda a: _linear(a, gradient="in_backward"),
    "linear log-probs": lambda a: linear_token_log_probs(
        a.hidden, a.weight, a.labels, group=a.group, **a.options
    ).sum(),
    "linear module": _linear_module,
    "verify_group linear": lambda a: verify_group(a.hidden, a.labels, a.group, weight=a.weight, **a.options),
}
ALL, OVER_LOGITS, LINEAR = list(FUNCTIONS), list(FUNCTIONS)[:5], list(FUNCTIONS)[5:]
NO_GRADIENT = "False, or under torch.no_grad"


class Case(NamedTuple):
    """How one rank's call differs, and the error: of a ``subject`` what ``(it, the others)`` have, or whole."""

    functions: list[str]
    changes: dict[str, Any]
    error: str  # pattern
    has: tuple[str, str] | None = None  # patterns

    def expected(self, odd, n_ranks):
        if self.has is None:
            error_type, _, message = self.error.partition(": ")
            return f"{error_type}: rank {odd} of {n_ranks}: {message}"
        if n_ranks > 2:
            return "ValueError: {}: rank {} of {} has {}, the others have {}".format(
                self.error, odd, n_ranks, *self.has
            )
        return "ValueError: {}: rank 1 of 2 has {}, rank 0 has {}".format(
            self.error, *(self.has if odd else self.has[::-1])
        )


def _option(functions, error, has=None, **options):
    return Case(functions.split("/"), {"options": options}, error, has)


def _label(value):
    return {
        "labels": lambda labels: labels.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(value))
    }


def _both(function):
    return {"logits": function, "hidden": function, "labels": function}


OF_FORWARD = "loss/module/verify_group"
SHARD_WIDTH = rf"logits: last dimension must be the width 9 of {re.escape(str(VocabShard(0, 9, 20)))}, got 10"
BROKEN_GRAD = r"shape .*, norm {}, checksum \w{{12}}"
CASES = [
    Case(ALL, _label(7), r"labels\[1, 1\]", ("7", "4")),
    Case(["loss"], _label(IGNORE_INDEX), r"labels\[1, 1\]", ("-100", "4")),
    Case(["verify_group"], _label(10**6), r"labels\[1, 1\]", ("1000000", "4")),
    Case(ALL, {"labels": Tensor.int}, "labels.dtype", ("torch.int32", "torch.int64")),
    Case(OVER_LOGITS, {"grad_enabled": False}, "logits.requires_grad", (NO_GRADIENT, "True")),
    Case(LINEAR, {"grad_enabled": False}, "hidden.requires_grad", (NO_GRADIENT, "True")),
    Case(LINEAR, {"weight": Tensor.detach}, "weight.requires_grad", (NO_GRADIENT, "True")),
    Case(OVER_LOGITS, {"logits": Tensor.bfloat16}, "logits.dtype", ("torch.bfloat16", "torch.float32")),
    Case(OVER_LOGITS, _both(lambda x: x[:, 1:]), "logits.shape.*", (r"\(2, 2\)", r"\(2, 3\)")),
    Case(["verify_group"], _both(lambda x: x.transpose(0, 1)), "logits.shape.*", (r"\(3, 2\)", r"\(2, 3\)")),
    Case(LINEAR, _both(lambda x: x[:, 1:]), "hidden.shape.*", (r"\(2, 2\)", r"\(2, 3\)")),
    Case(LINEAR, {"hidden": lambda h: h * 2}, "hidden", ("values of norm .*", "values of norm .*")),
    Case(LINEAR, {"hidden": lambda h: h.flip(1)}, "hidden", ("values of norm .*", "values of norm .*")),
    Case(["loss"], {"logits": lambda x: x[..., 1:]}, "vocab_size", (".* of 9 columns", ".* of 10 columns.*")),
    _option("loss/log-probs/verify_group", "vocab_size", ("15 .*", ".0 .*"), vocab_size=15),
    _option("loss/linear/verify_group", "ignore_index", ("-1", "-100"), ignore_index=-1),
    _option(OF_FORWARD, "label_smoothing", ("0.1", "0.0"), label_smoothing=0.1),
    _option("loss/module/linear/linear module", "reduction", ("sum", "mean"), reduction="sum"),
    _option("log-probs/verify_group linear", "temperature", ("2.0", "1.0"), temperature=2.0),
    _option("linear/linear log-probs/linear module", "softcap", ("5.0", "None"), softcap=5.0),
    _option("/".join(LINEAR), "chunk_tokens", ("2", "auto"), chunk_tokens=2),
    _option("loss", "TypeError: .* unexpected keyword argument 'unknown'", unknown=3),
    _option("verify_group", "TypeError: unknown: expected an option", unknown=3),
    _option("verify_group", "TypeError: ignore_index: expected an int, got NoneType", ignore_index=None),
    _option("loss/verify_group", "TypeError: vocab_size: expected an int, got float", vocab_size=20.0),
    _option("verify_group", "ValueError: vocab_size: must be positive, got 0", vocab_size=0),
    _option("verify_group", "TypeError: shard: expected a VocabShard, got tuple", shard=(0, 10, 20)),
    _option("loss/verify_group", f"ValueError: {SHARD_WIDTH}", shard=VocabShard(0, 9, 20)),
    _option("log-probs", "ValueError: gradient: expected one of .*", gradient="in_forward"),
    _option("transformer engine", "TypeError: overwrite_input: expected a bool .*", overwrite_input="yes"),
    _option("transformer engine", "ValueError: label_smoothing: must be in .*", label_smoothing=2.0),
    _option("linear", "ValueError: labels: expected shape .*", sequence_parallel=True),
    Case(OVER_LOGITS, {"logits": Tensor.tolist}, "TypeError: logits: expected a torch.Tensor, got list"),
    Case(["verify_group"], {"labels": Tensor.tolist}, "TypeError: labels: expected a torch.Tensor, got list"),
    Case(["verify_group"], {"logits": Tensor.double}, "TypeError: logits: dtype must be .*float64"),
    Case(["verify_group"], {"logits": lambda x: x[0, 0]}, "ValueError: logits: expected shape .*"),
    Case(["verify_group"], {"labels": Tensor.t}, "ValueError: labels: shape must be .*"),
    Case(["verify_group"], _both(lambda x: x.to("meta")), "RuntimeError: NotImplementedError: .*"),
    Case(["nccl"], _both(Tensor.cpu), "logits.device.type", ("cpu", "cuda")),
    Case(ALL, {"labels": Tensor.float}, "TypeError: labels: dtype must be .*"),
    Case(LINEAR, {"weight": lambda w: w[:, :-1]}, "ValueError: weight: expected shape .*"),
    Case(["linear module"], {"has_hook": True}, "ValueError: head: .*"),
    Case(
        [name for name in FUNCTIONS if "verify_group" not in name],
        {"scale": 2.0},
        "gradient of loss",
        (BROKEN_GRAD.format(".*"), BROKEN_GRAD.format(".*")),
    ),
]


def _call(function, a):
    """The loss, after its backward; None of ``verify_group``."""
    with torch.set_grad_enabled(a.grad_enabled):
        loss = FUNCTIONS[function](a)
    if loss is None:
        return None
    (loss * a.scale).backward()
    return loss.detach()


def _error(call, *args):
    """What ``call`` raises, or None."""
    try:
        call(*args)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _errors(rank, group, function, calls):
    """Errors of calls, in each of which ``odd`` ranks differ by ``changes``; and the loss of a valid call.

    A valid call after every one would hang or give another result if a rank were a collective behind.
    """
    errors = []
    with verify_calls():
        for index, odd in calls:
            a = Arguments(rank, group).changed(**CASES[index].changes if rank in odd else {})
            errors.append(_error(_call, function, a))
            assert _error(_call, function, Arguments(rank, group)) is None
    return errors, FUNCTIONS["loss"](Arguments(rank, group))


@in_ranks
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_differs_is_the_same_error_on_every_rank(rank_pool, impl, function):
    """Without verification these return a number, abort gloo or wait for half an hour."""
    n_ranks = rank_pool.world_size
    names = {function, rank_pool.backend} if function == "verify_group" else {function}
    indices = [index for index, case in enumerate(CASES) if names & set(case.functions)]
    calls = [(index, (odd,)) for index in indices for odd in (0, n_ranks - 1)]
    results = rank_pool.run(_errors, function, calls)
    for (index, (odd,)), *errors in zip(calls, *(errors for errors, _ in results), strict=True):
        expected = CASES[index].expected(odd, n_ranks)
        assert errors[0] and re.match(expected, errors[0]), (errors[0], expected)
        assert errors == errors[:1] * n_ranks
    _check_loss([loss for _, loss in results], n_ranks)


def _check_loss(losses, n_ranks):
    oracle, peer = cross_entropy_fp64(*_batch(n_ranks)), cross_entropy_same_dtype(*_batch(n_ranks))
    for loss in losses:
        assert_within_budget(loss, oracle.loss, peer.loss)


@in_three_ranks
def test_of_several_ranks_that_fail_the_first_is_named_and_of_all_none(rank_pool, impl):
    index = next(index for index, case in enumerate(CASES) if case.error.startswith("ValueError: labels: sh"))
    for errors, _ in rank_pool.run(_errors, "verify_group", [(index, (1, 2)), (index, (0, 1, 2))]):
        assert errors[0].startswith("ValueError: rank 1 of 3: labels: shape must be")
        assert errors[1].startswith("ValueError: labels: shape must be")


def _group_outcomes(rank, group, calls):
    """Error and collectives of each ``verify_group``; arguments stay as they are."""
    outcomes, device = [], device_of(rank, group)
    for ranks in calls:
        logits, labels, options = ranks[rank]
        given = [value.to(device) for value in (logits, labels)]
        before = [(value.clone(), value._version) for value in given]
        # NCCL must not send from the GPU that happens to be current.
        other = torch.cuda.device(0) if device.type == "cuda" else nullcontext()
        with record_collectives() as sent, other:
            error = _error(lambda: verify_group(*given, group, **options))  # noqa: B023
        for value, (values, version) in zip(given, before, strict=True):
            assert value._version == version and torch.equal(value, values)
        outcomes.append((error, [call.name for call in sent], sum(call.nbytes for call in sent)))
    return outcomes


def _calls(n_ranks):
    """By name, what each rank passes, and what their error says."""

    def of(size, widths, **options):
        logits = torch.randn(2, 3, max(widths), generator=torch.Generator().manual_seed(0))
        labels = torch.tensor([[0, IGNORE_INDEX, 1], [size - 1, 4, 4]])
        return [(logits[..., :width], labels, options) for width in widths]

    def with_shards(ranks, size):
        backwards = [VocabShard(COLUMNS * r, COLUMNS * (r + 1), size) for r in reversed(range(n_ranks))]
        return [(*own[:2], {"shard": shard}) for own, shard in zip(ranks, backwards, strict=True)]

    even, size, uneven = of(COLUMNS * n_ranks, [COLUMNS] * n_ranks), COLUMNS * n_ranks, 7 * n_ranks - 1
    all_padding = with_shards(of(size - COLUMNS, [COLUMNS] * n_ranks), size - COLUMNS)
    fitting = {
        "even": even,
        "uneven": of(uneven, [7] * (n_ranks - 1) + [6], vocab_size=uneven),
        "padded": of(uneven, [8] * n_ranks, vocab_size=uneven),
        "shards": with_shards(even, size),
        "a rank of padding": all_padding,
        "said in two ways": [(*even[0][:2], {"vocab_size": size}), *even[1:]],
        "other strides": [(even[0][0], even[0][1].t().contiguous().t(), {}), *even[1:]],
        "no rows": [(x[:0], y[:0], {}) for x, y, _ in even],
        "fp16, int32": [(x.half(), y.int(), {}) for x, y, _ in even],
        "ignore_index": [(x, y.where(y >= 0, -7), {"ignore_index": -7}) for x, y, _ in even],
        "an int and a float": [
            (*even[0][:2], {"softcap": 30}),
            *((*e[:2], {"softcap": 30.0}) for e in even[1:]),
        ],
    }
    outside = "labels: must be in [0, {}) or ignore_index {}, got {} outside, the first at position {}"
    columns = f"must have every column of [0, {size}) on exactly one rank, got by rank [0, 1"
    failing = {
        f"shard: {columns}2), ": of(size, [12] + [10] * (n_ranks - 1), vocab_size=size),  # overlap
        f"shard: {columns}0), ": of(size, [10] * (n_ranks - 1) + [12], vocab_size=size),  # gap
        outside.format(size, -100, 1, f"(1, 0): {size}"): of(size + 1, [COLUMNS] * n_ranks),
        outside.format(size, 0, 1, "(0, 1): -100"): [(x, y, {"ignore_index": 0}) for x, y, _ in even],
        outside.format(15, -100, 1, f"(1, 0): {size - 1}"): [(x, y, {"vocab_size": 15}) for x, y, _ in even],
    }
    return fitting, failing


@in_ranks
def test_verify_group_of_ranks_that_fit_and_of_ranks_that_only_fit_alone(rank_pool, impl):
    """Two all_gathers of less than a kilobyte."""
    fitting, failing = _calls(rank_pool.world_size)
    expected = [None] * len(fitting) + list(failing)
    for outcomes in rank_pool.run(_group_outcomes, [*fitting.values(), *failing.values()]):
        for (error, sent, nbytes), message in zip(outcomes, expected, strict=True):
            assert error is None if message is None else error.startswith(f"ValueError: {message}"), error
            assert sent == ["allgather_"] * 2 and nbytes < 1024


@pytest.mark.reference
@pytest.mark.parametrize(
    ("values", "odd", "usual"),
    [("5666", 0, None), ("5566", 2, 0), ("5665", 1, 0), ("5676", 0, 1), ("5678", 1, 0), ("56", 1, 0)],
)
def test_most_ranks_are_right_and_of_a_tie_the_side_of_the_lowest(values, odd, usual):
    others = "the others have" if usual is None else f"rank {usual} has"
    shown = values[1 if usual is None else usual]
    error = f"x: rank {odd} of {len(values)} has {values[odd]}, {others} {shown}; do"
    assert _error(verify._compare, "x", values, (), "; do") == f"ValueError: {error}"
    prints = [(float(value), float(value) * 0.1) for value in values]
    assert _error(verify._compare_hidden, prints).startswith(f"ValueError: hidden: rank {odd} ")


@pytest.mark.reference
def test_hidden_states_that_rounding_or_nan_sets_apart_are_not_compared():
    for other in ((100.9, 52.0), (float("nan"), 0.0), (float("inf"), float("-inf"))):
        verify._compare_hidden([(100.0, 50.0), other, (99.0, 50.0)])
    assert _error(verify._compare_hidden, [(100.0, 50.0), (100.0, 54.0)])


@pytest.mark.reference
@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 10), (10, 20), (10, 20), (30, 40)],
        [(0, 10), (10, 20), (20, 40), (9, 10)],
        [(15, 30), (30, 40), (0, 20), (40, 50)],
        [(5, 10), (10, 20), (20, 30), (30, 40)],
        [(0, 10), (10, 20), (22, 30), (30, 40)],
        [(0, 10), (10, 20), (20, 30), (40, 50)],
    ],
)
def test_shards_that_overlap_or_leave_columns_out(bounds):
    """Padding holds no column, and the order of the ranks does not matter."""
    verify._compare_shards([VocabShard(*own, 40) for own in ((20, 45), (0, 20), (45, 50))])
    error = _error(verify._compare_shards, [VocabShard(*own, 40) for own in bounds])
    assert error.startswith(
        "ValueError: shard: must have every column of [0, 40) on exactly one rank, got by"
    )


def _counted(rank, group):
    counts = {}
    for name, context in (("off", nullcontext()), ("on", verify_calls()), ("off within", verify_calls())):
        a = Arguments(rank, group)
        with context, verify_calls(False) if name == "off within" else nullcontext():
            with record_collectives() as forward:
                loss = FUNCTIONS["loss"](a)
            with record_collectives() as backward:
                loss.backward()
        counts[name] = len(forward), len(backward), max(call.nbytes for call in forward)
    return counts


@in_two_ranks
def test_off_it_sends_nothing(rank_pool, impl):
    for counts in rank_pool.run(_counted):
        assert counts["off"][:2] == counts["off within"][:2] == (1, 0)
        assert counts["on"][:2] == (3, 2) and counts["on"][2] < 4096


def _backward_alone(rank, group):
    """Forward ran before verification, and backward runs in another thread."""
    errors = []
    for function in ("loss", "linear", "linear in backward"):
        loss = FUNCTIONS[function](Arguments(rank, group)) * (1.0 + rank)
        with verify_calls():
            thread = threading.Thread(target=lambda: errors.append(_error(loss.backward)))  # noqa: B023
            thread.start()
            thread.join()
    return errors


@in_two_ranks
def test_a_backward_alone_is_compared_in_any_thread(rank_pool, impl):
    first, second = rank_pool.run(_backward_alone)
    assert first == second and len(first) == 3
    assert all(
        error.startswith("ValueError: gradient of loss: rank 1 of 2 has shape (), ") for error in first
    )


def _in_a_checkpoint(rank, group):
    losses, errors = [], []
    with verify_calls():
        for function in ("loss", "transformer engine", "linear", "linear in backward"):
            for scale in (1.0, 1.0 + rank):
                a = Arguments(rank, group)

                def call(logits, hidden, weight, a=a, function=function):
                    return FUNCTIONS[function](a.changed(logits=logits * 1, hidden=hidden, weight=weight))

                loss = checkpoint(call, a.logits, a.hidden, a.weight, use_reentrant=False)
                errors.append(_error((loss * scale).backward))
            losses.append(loss.detach())
    return losses, errors


@in_two_ranks
def test_it_works_in_a_checkpoint(rank_pool, impl):
    """A checkpoint hands out saved tensors once, and calls the loss again within its backward."""
    for losses, errors in rank_pool.run(_in_a_checkpoint):
        _check_loss(losses[:2], 2)
        assert errors[::2] == [None] * 4
        assert all(error.startswith("ValueError: gradient of loss: rank 1 of 2 ") for error in errors[1::2])


def _unmatched(rank, group):
    calls = (
        lambda a: FUNCTIONS["loss" if rank else "linear"](a),
        lambda a: cross_entropy_forward(a.logits, a.labels, 0.1 * rank, True, a.group, -100),
    )
    with verify_calls():
        return [_error(call, Arguments(rank, group)) for call in calls]


@in_two_ranks
def test_calls_of_different_functions(rank_pool, impl):
    first, second = rank_pool.run(_unmatched)
    assert first == second
    assert first[0] == "ValueError: call: rank 1 of 2 has a loss over logits, rank 0 has a loss over hidden"
    assert first[1] == "ValueError: label_smoothing: rank 1 of 2 has 0.1, rank 0 has 0.0"


def _in_subgroups(rank, group):
    """Of a group of one rank, of none, of other ranks, of something else and of two of three ranks."""
    alone, two = subgroups((0,), (1,), (2,), (0, 2)), subgroups((0, 2))[0]
    outcomes = []
    for chosen in (None, alone[rank], alone[rank - 1], "tensor parallel", two):
        is_member = chosen is two and rank != 1
        a = Arguments(rank // 2, chosen, n_ranks=2) if is_member else Arguments(0, chosen, n_ranks=1)
        if is_member and rank == 2:
            a.changed(**_label(7))
        with record_collectives() as sent:
            error = _error(FUNCTIONS["verify_group"], a)
        outside = _error(FUNCTIONS["verify_group"], Arguments(0, chosen, n_ranks=1).changed(**_label(10)))
        outcomes.append((error, outside if chosen is not two else None, {call.ranks for call in sent}))
    return outcomes


@in_three_ranks
def test_one_rank_sends_nothing_and_ranks_are_counted_within_the_group(rank_pool, impl):
    results = rank_pool.run(_in_subgroups)
    for rank, (without, alone, not_a_member, not_a_group, of_two) in enumerate(results):
        for error, outside, sent in (without, alone):
            assert error is None and outside.startswith("ValueError: labels: must be in [0, 10)") and not sent
        assert not_a_member[0].startswith("ValueError: group: this rank must be a member")
        assert not_a_group[0].startswith("TypeError: group: expected")
        expected = "ValueError: labels[1, 1]: rank 1 of 2 has 7, rank 0 has 4"
        assert of_two[0] == (not_a_member[0] if rank == 1 else expected)
        assert of_two[2] == (set() if rank == 1 else {(0, 2)})


@pytest.mark.reference
@pytest.mark.parametrize(("value", "is_on"), [("1", True), ("0", False), ("", False), (None, False)])
def test_the_variable_switches_it_on_for_a_program(monkeypatch, value, is_on):
    monkeypatch.delenv("VOCAB_PARALLEL_CE_VERIFY", raising=False)
    if value is not None:
        monkeypatch.setenv("VOCAB_PARALLEL_CE_VERIFY", value)
    assert runpy.run_path(verify.__file__)["is_on"] is is_on


@pytest.mark.reference
def test_one_rank_compares_nothing():
    logits = torch.randn(3, 8, requires_grad=True)
    with verify_calls():
        vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3])).backward()
        with pytest.raises(ValueError, match="^labels: shape"):
            vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]))
    assert not verify.open_calls and not verify.is_on
