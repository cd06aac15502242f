"""The check before a training: what fits, what does not, and groups of fewer ranks than the world."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

import vocab_parallel_ce as vp
from tests.ranks.test_verify import COLUMNS, FUNCTIONS, Arguments, _all, _label, in_two_or_three_ranks
from tests.support.cases import flat
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import in_ranks, subgroups


def _shard(rank, n, size):
    """The last rank has the first columns."""
    return {"options": {"vocab_size": vp.VocabShard(10 * (n - 1 - rank), 10 * (n - rank), size)}}


# Of ranks that pass different things, changes of rank ``r`` of ``n``: those that fit, and those that do not.
FITTING = [
    lambda r, n: {"options": {"vocab_size": 10 * n - 3}},  # padded
    lambda r, n: {"logits": lambda x: x[..., : 10 - r // (n - 1)], "options": {"vocab_size": 10 * n - 1}},
    lambda r, n: _shard(r, n, 10 * n - 10),  # rank 0 has padding alone
    lambda r, n: {"options": {"z_loss": 1.0} if r else {"z_loss": 1, "vocab_size": 10 * n}},
    lambda r, n: {"labels": lambda y: y if r else y.t().contiguous().t()},
    lambda r, n: _all(lambda x: x[:0]),
    lambda r, n: {"logits": Tensor.half, "labels": Tensor.int},
    lambda r, n: {"labels": lambda y: y.where(y >= 0, -7), "options": {"ignore_index": -7}},
]
COVER = "vocab_size: shards must have every column of [0, {V}) on exactly one rank, got by rank [0, 1"
OUTSIDE = "labels: must be in [0, {}) or ignore_index {}, got 1 outside, the first at position {}"
FAILING = [
    (
        COVER + "0), ",
        lambda r, n: {"logits": lambda x: pad(x, (0, 2 * (r == n - 1))), "options": {"vocab_size": 10 * n}},
    ),
    (OUTSIDE.format("{V}", -100, "(1, 1): {V}"), lambda r, n: _label(10 * n)),
    (OUTSIDE.format("{V}", 0, "(0, 1): -100"), lambda r, n: {"options": {"ignore_index": 0}}),
    (OUTSIDE.format(15, -100, "(1, 1): 15"), lambda r, n: _label(15) | {"options": {"vocab_size": 15}}),
    ("rank 1 of {n}: labels: shape ", lambda r, n: {"labels": Tensor.t} if r else {"logits": Tensor.float}),
    ("labels: shape must be that of logits", lambda r, n: {"labels": Tensor.t}),
]


def _checked(a):
    """The error of the check before a training: a loss of which nothing stays."""
    with vp.verify_calls(), torch.no_grad():
        return error_of(partial(vp.vocab_parallel_cross_entropy, a.logits, a.labels, check_labels=True, **a.given))


def _group_outcomes(rank, group):
    """Errors of the check, which leaves its arguments as they are."""
    errors = []
    for changes in FITTING + [changes for _, changes in FAILING]:
        a = Arguments(rank, group).changed(labels=lambda y: y.clamp(max=4))
        a.changed(**changes(rank, group.size()))
        before = a.logits.clone(), a.labels.clone(), a.logits._version
        # NCCL must not send from the GPU that happens to be current.
        with torch.cuda.device(0) if a.logits.is_cuda else nullcontext():
            errors.append(_checked(a))
        assert all(map(torch.equal, (a.logits, a.labels), before)) and a.logits._version == before[2]
    return errors


@in_two_or_three_ranks
def test_ranks_that_pass_different_things_fit_or_not(rank_pool, impl):
    n = rank_pool.world_size
    expected = [None] * len(FITTING) + ["ValueError: " + error.format(V=10 * n, n=n) for error, _ in FAILING]
    for errors in rank_pool.run(_group_outcomes):
        for error, start in zip(errors, expected, strict=True):
            assert error is None if start is None else error and error.startswith(start), (error, start)


@vp.verify_calls()
def _beside_a_head(rank, group):
    """Errors of what is alongside a head: grad_outputs that are expected, and biases on the last rank alone."""
    a, errors = Arguments(rank, group), []
    ones = torch.ones(2, 3, device=a.hidden.device)
    loss = FUNCTIONS["linear"]
    for own in (ones.masked_fill(a.labels == IGNORE_INDEX, rank), ones + rank, None if rank else ones):
        mode = "in_backward" if own is None else "in_forward"
        options = {"reduction": "none", "gradient": mode, "expected_grad_output": own}
        errors.append(error_of(lambda a: loss(a).sum(), a.changed(options=options)))
    bias = torch.zeros(COLUMNS, device=a.hidden.device) if rank else None
    errors.append(error_of(loss, a.changed(options={"bias": bias})))
    student, teacher = vp.Head(a.hidden, a.weight), vp.Head(a.hidden.detach(), a.weight.detach(), bias)
    errors.append(error_of(partial(flat.linear_distillation_loss, student, teacher, group=group)))
    return errors


@vp.verify_calls()
def _objectives(rank, group):
    """Errors of numbers that differ, of their names, of functions, of closures, of one rank's function, and of none."""
    a, numbers = Arguments(rank, group), torch.ones(2, 3)

    def one(log_probs, **numbers):
        return log_probs

    def other(log_probs, **numbers):
        return -log_probs

    def closure(log_probs, **numbers):
        return (1 + rank) * log_probs

    def failing(log_probs, **numbers):
        if rank:
            raise KeyError("none")
        return log_probs

    def error(function, **tokens):
        own = {name: number.to(a.hidden.device) for name, number in tokens.items()}
        return error_of(lambda: vp.linear_objective(a.hidden, a.weight, a.labels, function, tokens=own, group=group))

    named, functions = {"b": numbers} if rank else {"a": numbers}, (other if rank else one, closure, failing)
    return error(one, a=numbers + rank), error(one, **named), *map(error, functions), error(one, a=numbers)


@in_ranks((2,), (), (2,))
def test_objectives_and_their_numbers_are_compared(rank_pool, impl):
    for numbers, names, functions, closures, failed, none in rank_pool.run(_objectives):
        assert numbers.startswith("ValueError: tokens['a']: rank 1 of 2 has shape (2, 3), norm 4")
        assert names.startswith("ValueError: tokens['a']: rank 1 of 2 has None, rank 0 has shape (2, 3)")
        assert functions.startswith("ValueError: objective: rank 1 of 2 has _objectives.<locals>.other")
        assert closures.startswith("ValueError: objective's loss: rank 1 of 2 has shape (), norm ")
        assert failed == "RuntimeError: rank 1 of 2: KeyError: 'none'"
        assert none is None


@in_ranks((2,), (), (2,))
def test_tensors_alongside_a_head_are_compared(rank_pool, impl):
    """Values of ignored tokens are not. Without a comparison the gradients of hidden states were wrong on both."""
    for same, other, none, bias, of_teacher in rank_pool.run(_beside_a_head):
        assert same is None
        expected = "ValueError: expected_grad_output: rank 1 of 2 has shape (6,), norm 4"
        assert other.startswith(expected) and "gradient: rank 1 of 2" in none
        assert bias == "ValueError: bias: rank 1 of 2 has a tensor, rank 0 has None"
        assert of_teacher == "ValueError: teacher.bias: rank 1 of 2 has a tensor, rank 0 has None"


def _in_subgroups(rank, group):
    """Errors of no group, of this rank's alone, of another rank's, of no process group, of ranks 0 and 2."""
    *alone, two = subgroups((0,), (1,), (2,), (0, 2))
    given = [Arguments(0, chosen, 1) for chosen in (None, alone[rank], alone[rank - 1], "tensor parallel")]
    given += [Arguments(0, chosen, 1).changed(**_label(10)) for chosen in (None, alone[rank])]
    with record_collectives() as sent:
        errors = [_checked(a) for a in given]
    a = Arguments(rank // 2, two, 2).changed(**_label(7) if rank == 2 else {})
    return errors, sent, _checked(a)


@in_ranks((3,), (), ())
def test_one_rank_sends_nothing_and_ranks_are_counted_within_the_group(rank_pool, impl):
    results = rank_pool.run(_in_subgroups)
    not_in_it = "ValueError: group: this rank must be a member"
    for (*passed, not_a_member, not_a_group, outside, also), sent, _ in results:
        assert passed == [None, None] and sent == []
        assert not_a_member.startswith(not_in_it)
        assert not_a_group.startswith("TypeError: group: expected")
        assert outside == also and outside.startswith("ValueError: labels: must be in [0, 10)")
    first, outside, last = (error for *_, error in results)
    assert first == last == "ValueError: labels[1, 1]: rank 1 of 2 has 7, rank 0 has 4"
    assert outside.startswith(not_in_it)
