"""The check of a group: what differs on one rank is the same error on all of them, and nobody hangs."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.support.budget import assert_within_budget
from tests.support.collectives import Collective, record_collectives
from tests.support.inputs import IGNORE_INDEX, batch, shard_of
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from tests.support.ranks import device_of, implementation_params, subgroups
from vocab_parallel_ce import VocabShard, verify_group, vocab_parallel_cross_entropy

COLUMNS = 10


def _in_ranks(*worlds, interpreter=()):
    params = implementation_params(worlds, interpreter, tuple(w for w in worlds if w != 3))
    return pytest.mark.parametrize(("rank_pool", "impl"), params, indirect=["rank_pool"])


in_ranks = _in_ranks(2, 3, 4)
in_two_ranks = _in_ranks(2)
in_four_ranks = _in_ranks(4)


class Arguments(NamedTuple):
    """What one rank passes; tensors on ``device``, or where None on the rank's own."""

    logits: Any
    labels: Any
    options: dict = {}
    device: str | None = None


class Outcome(NamedTuple):
    """What one rank got."""

    error: str | None
    collectives: list[Collective]


def _arguments(size, widths, **options):
    """Sound arguments of ranks whose logits have ``widths`` columns; labels are the same on all."""
    logits = torch.randn(2, 3, max(widths), generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, IGNORE_INDEX, 1], [size - 1, 4, 4]])
    return [Arguments(logits[..., :width], labels, options) for width in widths]


def _even(world):
    return _arguments(COLUMNS * world, [COLUMNS] * world)


def _options(**options):
    return lambda own: own._replace(options=options)


def _logits(change):
    return lambda own: own._replace(logits=change(own.logits))


def _labels(change):
    return lambda own: own._replace(labels=change(own.labels))


def _both(change):
    return lambda own: own._replace(logits=change(own.logits), labels=change(own.labels))


def _label(value):
    """Changes the label at (1, 1), which is 4."""
    return _labels(lambda labels: labels.index_put((torch.tensor(1), torch.tensor(1)), torch.tensor(value)))


def _with_shards(arguments, shards):
    pairs = zip(arguments, shards, strict=True)
    return [_options(shard=VocabShard(*shard))(own) for own, shard in pairs]


def _verify(group, own, rank_device, current=None):
    """One call; what the caller passed must be as it was."""
    device = own.device or rank_device
    logits, labels = (value.to(device) if torch.is_tensor(value) else value for value in own[:2])
    tensors = [value for value in (logits, labels) if torch.is_tensor(value) and not value.is_meta]
    kept = [(value.clone(), value._version) for value in tensors]
    error = None
    with record_collectives() as calls, nullcontext() if current is None else torch.cuda.device(current):
        try:
            verify_group(logits, labels, group, **own.options)
        except (TypeError, ValueError, RuntimeError) as raised:
            error = f"{type(raised).__name__}: {raised}"
    for value, (before, version) in zip(tensors, kept, strict=True):
        assert value._version == version and torch.equal(value, before)
    return Outcome(error, list(calls))


def _outcomes(rank, group, impl, calls_of_ranks, current):
    """Of each call in turn; a loss afterwards shows that no rank is a collective behind."""
    device = device_of(rank, group)
    current = current if device.type == "cuda" else None
    outcomes = [_verify(group, ranks[rank], device, current) for ranks in calls_of_ranks]
    made = _batch_of_a_loss(group.size())
    shard = shard_of(made.logits, rank, group.size()).to(device)
    return outcomes, vocab_parallel_cross_entropy(shard, made.labels.to(device), group=group, impl=impl)


def _batch_of_a_loss(world):
    return batch("peaked", rows=6, vocab_size=COLUMNS * world)


def _run(rank_pool, impl, calls_of_ranks, current=None):
    """Outcomes of all ranks, for each call."""
    results = rank_pool.run(_outcomes, impl, calls_of_ranks, current)
    made = _batch_of_a_loss(rank_pool.world_size)
    oracle, peer = cross_entropy_fp64(*made), cross_entropy_same_dtype(*made)
    for _, loss in results:
        assert_within_budget(loss, oracle.loss, peer.loss)
    return list(zip(*(outcomes for outcomes, _ in results), strict=True))


def _check(outcomes, error, n_collectives=2):
    """Every rank has this error, after as many all_gathers."""
    for outcome in outcomes:
        assert outcome.error == error
        assert [call.name for call in outcome.collectives] == ["allgather_"] * n_collectives


@in_ranks
def test_ranks_that_fit_pass(rank_pool, impl):
    """Two all_gathers of under a kilobyte. NCCL must not send from the GPU that happens to be current."""
    world = rank_pool.world_size
    even, vocab_size, with_padding = _even(world), COLUMNS * world, COLUMNS * (world - 1)
    backwards = [(COLUMNS * r, COLUMNS * (r + 1), vocab_size) for r in reversed(range(world))]
    padding_first = [(start, stop, with_padding) for start, stop, _ in backwards]
    uneven = 7 * world - 1
    minus_seven = [_options(ignore_index=-7)(own) for own in even]
    calls = {
        "equal": even,
        "uneven": _arguments(uneven, [7] * (world - 1) + [6], vocab_size=uneven),
        "padded": _arguments(uneven, [8] * world, vocab_size=uneven),
        "explicit": _with_shards(even, backwards),
        "a rank of padding": _with_shards(_arguments(with_padding, [COLUMNS] * world), padding_first),
        "said in two ways": [_options(vocab_size=vocab_size)(even[0]), *even[1:]],
        "other strides": [_labels(lambda labels: labels.t().contiguous().t())(even[0]), *even[1:]],
        "no rows": [_both(lambda x: x[:0])(own) for own in even],
        "fp16 and int32": [own._replace(logits=own.logits.half(), labels=own.labels.int()) for own in even],
        "another ignore_index": [
            _labels(lambda labels: labels.where(labels >= 0, -7))(own) for own in minus_seven
        ],
    }
    for name, outcomes in zip(calls, _run(rank_pool, impl, list(calls.values()), current=0), strict=True):
        for outcome in outcomes:
            assert outcome.error is None, f"{name}: {outcome.error}"
            assert [call.name for call in outcome.collectives] == ["allgather_"] * 2, name
            assert {call.ranks for call in outcome.collectives} == {tuple(range(world))}
            assert sum(call.nbytes for call in outcome.collectives) < 1024


# Of each difference: the message, what the rank that differs has, what the others have, what makes it so.
LEADING = "logits: {odd} has leading dimensions {}, {others} leading dimensions {}"
LABELS = "labels: {odd} has {} at position (1, 1), {others} {}"
VOCAB_SIZE = "vocab_size: {odd} has {}, {others} {}"
DTYPE = "{odd} has dtype torch.{}, {others} dtype torch.{}"
DIFFERENCES = [
    (LEADING, "(2, 2)", "(2, 3)", _both(lambda x: x[:, 1:])),
    (LEADING, "(3, 2)", "(2, 3)", _both(lambda x: x.transpose(0, 1))),
    ("logits: " + DTYPE, "bfloat16", "float32", _logits(Tensor.bfloat16)),
    ("labels: " + DTYPE, "int32", "int64", _labels(Tensor.int)),
    ("ignore_index: {odd} has {}, {others} {}", "-1", "-100", _options(ignore_index=-1)),
    (VOCAB_SIZE, "15", "{V} ({R} * 10 columns{W})", _options(vocab_size=15)),
    (VOCAB_SIZE, "{V9} ({R} * 9 columns{W})", "{V} ({R} * 10 columns{W})", _logits(lambda x: x[..., 1:])),
    (LABELS, "7", "4", _label(7)),
    (LABELS, "-100", "4", _label(IGNORE_INDEX)),
    (LABELS, "1000000", "4", _label(10**6)),
]


def _one_rank_each(change, world):
    """Sound arguments of all ranks but one, which is each of them in turn."""
    sound = _even(world)
    return [[change(own) if rank == odd else own for rank, own in enumerate(sound)] for odd in range(world)]


@in_ranks
def test_a_rank_that_differs_is_named_on_every_rank(rank_pool, impl):
    """Of two ranks the first is taken to be right, whichever it is that was changed."""
    world = rank_pool.world_size
    cases = [(odd, case) for case in DIFFERENCES for odd in range(world)]
    calls = [_one_rank_each(change, world)[odd] for odd, (*_, change) in cases]
    for (odd, (message, *has, _)), outcomes in zip(cases, _run(rank_pool, impl, calls), strict=True):
        named, others = odd, "the others have"
        if world == 2:
            named, others, has = 1, "rank 0 has", (has if odd == 1 else has[::-1])
        sizes = {"V": COLUMNS * world, "V9": 9 * world, "R": world, "W": ", without vocab_size= or shard="}
        has = [text.format(**sizes) for text in has]
        expected = message.format(*has, odd=f"rank {named} of {world}", others=others)
        _check(outcomes, f"ValueError: {expected}", n_collectives=4 if message == LABELS else 2)


# Of arguments that are invalid whatever other ranks have: the error, and what causes it.
FP64 = "TypeError: logits: dtype must be bfloat16, float16 or float32, got torch.float64"
LABEL_SHAPE = (
    "ValueError: labels: shape must be that of logits without the last dimension, (2, 3), got (3, 2)"
)
SHARD_WIDTH = f"ValueError: logits: last dimension must be the width 9 of {VocabShard(0, 9, 20)}, got 10"
INVALID = [
    ("TypeError: logits: expected a torch.Tensor, got list", _logits(Tensor.tolist)),
    (FP64, _logits(Tensor.double)),
    ("ValueError: logits: expected shape [..., C] with rows, got (10,)", _logits(lambda x: x[0, 0])),
    ("TypeError: labels: expected a torch.Tensor, got list", _labels(Tensor.tolist)),
    ("TypeError: labels: dtype must be int64 or int32, got torch.float32", _labels(Tensor.float)),
    (LABEL_SHAPE, _labels(Tensor.t)),
    ("TypeError: ignore_index: expected an int, got NoneType", _options(ignore_index=None)),
    ("TypeError: vocab_size: expected an int, got float", _options(vocab_size=20.0)),
    ("ValueError: vocab_size: must be positive, got 0", _options(vocab_size=0)),
    ("TypeError: shard: expected a VocabShard, got tuple", _options(shard=(0, 10, 20))),
    (SHARD_WIDTH, _options(shard=VocabShard(0, 9, 20))),
    (
        "ValueError: shard: has a vocab_size itself, got vocab_size too",
        _options(shard=VocabShard(0, 10, 20), vocab_size=20),
    ),
]


@in_ranks
def test_what_is_invalid_on_one_rank_alone_is_raised_on_all(rank_pool, impl):
    """Where all ranks have the same wrong, none differs and none is named."""
    world = rank_pool.world_size
    expected, calls = [], []
    for error, change in INVALID:
        calls += [*_one_rank_each(change, world), [change(own) for own in _even(world)]]
        error_type, _, message = error.partition(": ")
        expected += [f"{error_type}: rank {odd} of {world}: {message}" for odd in range(world)] + [error]
    for error, outcomes in zip(expected, _run(rank_pool, impl, calls), strict=True):
        _check(outcomes, error)


@in_ranks
def test_of_several_ranks_with_invalid_arguments_the_first_is_named(rank_pool, impl):
    sound = _even(rank_pool.world_size)
    arguments = [sound[0], *(change(own) for own, (_, change) in zip(sound[1:], INVALID, strict=False))]
    (outcomes,) = _run(rank_pool, impl, [arguments])
    _check(outcomes, f"TypeError: rank 1 of {len(sound)}: logits: expected a torch.Tensor, got list")


@in_ranks
def test_tensors_that_are_elsewhere_on_one_rank(rank_pool, impl):
    """Where labels cannot be read, as on the meta device; with NCCL also tensors on the CPU."""
    world = rank_pool.world_size
    unreadable = _one_rank_each(lambda own: own._replace(device="meta"), world)
    for odd, outcomes in enumerate(_run(rank_pool, impl, unreadable)):
        start = f"RuntimeError: rank {odd} of {world}: NotImplementedError: "
        assert outcomes[0].error.startswith(start), outcomes[0].error
        _check(outcomes, outcomes[0].error)
    if rank_pool.backend == "nccl":
        on_the_cpu = _one_rank_each(lambda own: own._replace(device="cpu"), world)[-1]
        (outcomes,) = _run(rank_pool, impl, [on_the_cpu])
        others = "rank 0 has" if world == 2 else "the others have"
        named = f"rank {world - 1} of {world}"
        _check(outcomes, f"ValueError: logits: {named} has device type cpu, {others} device type cuda")


def _with_label(*values):
    """Arguments of as many ranks, with these values of one label."""
    return [_label(value)(own) for value, own in zip(values, _even(len(values)), strict=True)]


@in_four_ranks
def test_most_ranks_are_right_and_of_a_tie_the_side_of_the_lowest(rank_pool, impl):
    expected = {
        (5, 6, 6, 6): "rank 0 of 4 has 5 at position (1, 1), the others have 6",
        (5, 5, 6, 6): "rank 2 of 4 has 6 at position (1, 1), rank 0 has 5",
        (5, 6, 6, 5): "rank 1 of 4 has 6 at position (1, 1), rank 0 has 5",
        (5, 6, 7, 6): "rank 0 of 4 has 5 at position (1, 1), rank 1 has 6",
        (5, 6, 7, 8): "rank 1 of 4 has 6 at position (1, 1), rank 0 has 5",
    }
    calls = [_with_label(*values) for values in expected]
    for message, outcomes in zip(expected.values(), _run(rank_pool, impl, calls), strict=True):
        _check(outcomes, f"ValueError: labels: {message}", n_collectives=4)


@in_four_ranks
def test_shards_that_overlap_or_leave_columns_out(rank_pool, impl):
    """Padding covers nothing, and the order of ranks does not matter."""
    calls = {
        "ranks 1 and 2 of 4 both have columns [10, 20)": [(0, 10), (10, 20), (10, 20), (30, 40)],
        "ranks 0 and 3 of 4 both have columns [9, 10)": [(0, 10), (10, 20), (20, 40), (9, 10)],
        "ranks 0 and 2 of 4 both have columns [15, 20)": [(15, 30), (30, 40), (0, 20), (40, 50)],
        "no rank of 4 has columns [0, 5) of vocab_size 40": [(5, 10), (10, 20), (20, 30), (30, 40)],
        "no rank of 4 has columns [20, 22) of vocab_size 40": [(22, 30), (10, 20), (0, 10), (30, 40)],
        "no rank of 4 has columns [30, 40) of vocab_size 40": [(0, 10), (10, 20), (20, 30), (40, 50)],
    }
    arguments = []
    for bounds in calls.values():
        shards = [(start, stop, 40) for start, stop in bounds]
        widths = [stop - start for start, stop in bounds]
        arguments.append(_with_shards(_arguments(40, widths), shards))
    for expected, outcomes in zip(calls, _run(rank_pool, impl, arguments), strict=True):
        _check(outcomes, f"ValueError: shard: {expected}")


@in_ranks
def test_sizes_of_which_each_fits_its_rank_alone(rank_pool, impl):
    """With one vocab_size one rank is padded and another not: each is valid, together they overlap or gap."""
    world = rank_pool.world_size
    padded_first = _arguments(10 * world, [12] + [10] * (world - 1), vocab_size=10 * world)
    padded_last = _arguments(10 * world, [10] * (world - 1) + [12], vocab_size=10 * world)
    overlapping, gapped = _run(rank_pool, impl, [padded_first, padded_last])
    _check(overlapping, f"ValueError: shard: ranks 0 and 1 of {world} both have columns [10, 12)")
    gap = f"[{10 * (world - 1)}, {12 * (world - 1)})"
    _check(gapped, f"ValueError: shard: no rank of {world} has columns {gap} of vocab_size {10 * world}")


OUTSIDE = (
    "ValueError: labels: must be in [0, {}) or ignore_index {}, got {} outside, the first at position {}"
)


@in_ranks
def test_a_label_outside_the_vocabulary_is_raised_on_every_rank(rank_pool, impl):
    """Padding is outside too."""
    world = rank_pool.world_size
    even = _even(world)
    calls = [
        [_options(**options)(_label(value)(own)) for own in even]
        for value, options in ((10 * world, {}), (-1, {}), (15, {"vocab_size": 15}), (7, {"ignore_index": 7}))
    ]
    above, below, padding, not_ignored = _run(rank_pool, impl, calls)
    _check(above, OUTSIDE.format(10 * world, -100, 1, f"(1, 1): {10 * world}"))
    _check(below, OUTSIDE.format(10 * world, -100, 1, "(1, 1): -1"))
    _check(padding, OUTSIDE.format(15, -100, 2, f"(1, 0): {10 * world - 1}"))
    _check(not_ignored, OUTSIDE.format(10 * world, 7, 1, "(0, 1): -100"))


@_in_ranks(2, interpreter=(2,))
def test_the_loss_of_the_group_runs_after_every_error(rank_pool, impl):
    """All of them in one sequence: one rank a collective ahead would hang or give the next call's bytes."""
    changes = [change for *_, change in (*DIFFERENCES, *INVALID)]
    calls = [ranks for change in changes for ranks in (*_one_rank_each(change, 2), _even(2))]
    outcomes = _run(rank_pool, impl, calls)
    passed = [of_ranks for of_ranks in outcomes if of_ranks[0].error is None]
    assert len(passed) == len(changes)
    for of_ranks in outcomes:
        assert of_ranks[0].error == of_ranks[1].error


INCOMPLETE = (
    f"ValueError: shard: must be the whole vocabulary where there is one rank, got {VocabShard(0, 10, 11)}"
)
# Of one rank's arguments: the error, and what causes it.
LOCAL = [
    (FP64, _logits(Tensor.double)),
    (OUTSIDE.format(10, -100, 1, "(1, 1): 10"), _label(10)),
    (OUTSIDE.format(9, -100, 1, "(1, 0): 9"), _options(shard=VocabShard(0, 10, 9))),
    (INCOMPLETE, _options(shard=VocabShard(0, 10, 11))),
]


def _alone(rank, group):
    """Outcomes with groups that need no communication, and with ones that are none or of other ranks."""
    made = subgroups((0,), (1,))
    alone, others = made[rank], made[1 - rank]
    sound, device = _arguments(COLUMNS, [COLUMNS])[0], device_of(rank, group)
    changed = [sound] + [change(sound) for _, change in LOCAL]
    local = [[_verify(chosen, own, device) for own in changed] for chosen in (None, alone)]
    return local, [_verify(chosen, sound, device) for chosen in (others, "tensor parallel")]


@in_two_ranks
def test_one_rank_checks_its_own_arguments_and_sends_nothing(rank_pool, impl):
    for local, (not_a_member, not_a_group) in rank_pool.run(_alone):
        for passed, *refused in local:
            _check([passed], None, n_collectives=0)
            for (error, _), outcome in zip(LOCAL, refused, strict=True):
                _check([outcome], error, n_collectives=0)
        assert not_a_member.error.startswith("ValueError: group: this rank must be a member")
        assert not_a_group.error.startswith("TypeError: group: expected")
        assert not_a_member.collectives == not_a_group.collectives == []


def _in_a_subgroup(rank, group, arguments):
    (members,) = subgroups((0, 2, 3))
    own = arguments[0] if rank == 1 else arguments[members.rank()]
    return _verify(members, own, device_of(rank, group))


@in_four_ranks
def test_ranks_are_counted_within_the_group(rank_pool, impl):
    outcomes = rank_pool.run(_in_a_subgroup, _with_label(5, 5, 6))
    outside = outcomes[1]
    assert outside.error.startswith("ValueError: group: ") and outside.collectives == []
    members = [outcomes[rank] for rank in (0, 2, 3)]
    _check(members, "ValueError: labels: rank 2 of 3 has 6 at position (1, 1), the others have 5", 4)
    assert {call.ranks for outcome in members for call in outcome.collectives} == {(0, 2, 3)}
