"""The loss on R ranks in real processes: the oracle's on the whole vocabulary, bit-equal on every rank."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.collectives import Collective, record_collectives
from tests.support.inputs import IGNORE_INDEX, batch, shard_of, upstream_gradients
from tests.support.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from tests.support.ranks import device_of, implementation_params, subgroups
from vocab_parallel_ce import VocabShard, vocab_parallel_cross_entropy

COLUMNS, ROWS = 40, 6
in_ranks = pytest.mark.parametrize(("rank_pool", "impl"), implementation_params(), indirect=["rank_pool"])
in_two_ranks = pytest.mark.parametrize(
    ("rank_pool", "impl"),
    implementation_params(gloo_worlds=(2,), interpreter_worlds=(2,), nccl_worlds=(2,)),
    indirect=["rank_pool"],
)
in_four_gloo_or_nccl_ranks = pytest.mark.parametrize(
    ("rank_pool", "impl"),
    implementation_params(gloo_worlds=(4,), interpreter_worlds=(), nccl_worlds=(4,)),
    indirect=["rank_pool"],
)


class Case(NamedTuple):
    """One call on the shards of ``logits [N, V]``, as every rank makes it."""

    logits: torch.Tensor
    labels: torch.Tensor
    impl: str
    options: dict
    grad_output: torch.Tensor | None = None


class Result(NamedTuple):
    """What one rank got."""

    loss: torch.Tensor
    grad: torch.Tensor
    in_forward: list[Collective]
    in_backward: list[Collective]


def _run(rank, group, case, member_sets=None):
    if member_sets is not None:
        (group,) = [
            made
            for made, members in zip(subgroups(*member_sets), member_sets, strict=True)
            if rank in members
        ] or [None]
        if group is None:
            return None
    device = device_of(rank, torch.distributed.group.WORLD)
    shard = shard_of(case.logits, group.rank(), group.size()).to(device).requires_grad_()
    labels = case.labels.to(device)
    with record_collectives() as in_forward, warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        loss = vocab_parallel_cross_entropy(shard, labels, group=group, impl=case.impl, **case.options)
    grad_output = torch.ones_like(loss) if case.grad_output is None else case.grad_output.to(device)
    with record_collectives() as in_backward:
        loss.backward(grad_output)
    assert torch.equal(labels.cpu(), case.labels), "labels were written"
    return Result(loss, shard.grad, in_forward, in_backward)


def _check(case, results):
    """Every rank has the same loss, and loss and gradient are the oracle's."""
    options = {k: v for k, v in case.options.items() if k != "gradient"}
    oracle = cross_entropy_fp64(case.logits, case.labels, grad_output=case.grad_output, **options)
    peer = cross_entropy_same_dtype(case.logits, case.labels, grad_output=case.grad_output, **options)
    grad = torch.cat([result.grad for result in results], dim=-1)
    for result in results:
        assert result.loss.dtype == torch.float32
        assert torch.equal(result.loss.nan_to_num(-7.0), results[0].loss.nan_to_num(-7.0))
        assert torch.equal(result.loss.isnan(), results[0].loss.isnan())
    assert_within_budget(results[0].loss, oracle.loss, peer.loss)
    assert_within_budget(grad, oracle.grad, peer.grad)


def _check_collectives(results, case, ranks):
    rows, smoothed = case.labels.numel(), case.options.get("label_smoothing", 0.0) > 0
    sent = 4 * (5 if smoothed else 3) * rows
    expected = [] if len(ranks) == 1 else [("_allgather_base_", tuple(ranks), sent)]
    for result in results:
        assert [tuple(call) for call in result.in_forward] == expected
        assert result.in_backward == []


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@in_ranks
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(rank_pool, impl, reduction, label_smoothing):
    """Peaked rows, ignored rows and confident labels; one all_gather forward, none backward.

    With smoothing, a loss from the shard's own sum of logits would differ from rank to rank. The
    number of rows that count is not the number of rows of the gather.
    """
    world = rank_pool.world_size
    for dtype, kind in (
        (torch.bfloat16, "peaked"),
        (torch.bfloat16, "some_ignored"),
        (torch.float32, "confident"),
    ):
        made = batch(kind, rows=ROWS, vocab_size=COLUMNS * world, shards=world, dtype=dtype)
        options = {"reduction": reduction, "label_smoothing": label_smoothing}
        grad_output = torch.tensor(0.75) if reduction != "none" else _upstream(ROWS, "random")
        case = Case(*made, impl, options, grad_output)
        results = rank_pool.run(_run, case)
        _check(case, results)
        _check_collectives(results, case, range(world))


def _upstream(rows, name):
    return dict(upstream_gradients((rows,)))[name]


@pytest.mark.parametrize(
    "kind", ["far_negative", "excluded_columns", "excluded_shard", "shard_edges", "times_1000"]
)
@in_ranks
def test_rows_far_from_zero_masked_or_at_the_edges_of_shards(rank_pool, impl, kind):
    """A shard that is -inf throughout, labels in the first and last column of each, gaps above 100.

    The first token's grad_output is 0: a kernel that read it for every row would return 0.
    """
    world = rank_pool.world_size
    for dtype in (torch.float16, torch.float32):
        made = batch(kind, rows=2 * world, vocab_size=COLUMNS * world, shards=world, dtype=dtype)
        grad_output = _upstream(2 * world, "zero in the first token")
        case = Case(*made, impl, {"reduction": "none"}, grad_output)
        _check(case, rank_pool.run(_run, case))


@pytest.mark.parametrize("gap", [4.6, 6.9])
@in_ranks
def test_the_gradient_of_a_confident_label_keeps_its_digits(rank_pool, impl, gap):
    """At p = 0.999 the label's gradient is -0.001: rounding p to bf16 first would lose all of it."""
    world = rank_pool.world_size
    for dtype in (torch.bfloat16, torch.float16):
        made = batch("confident", rows=8, vocab_size=COLUMNS * world, shards=world, dtype=dtype, gaps=(gap,))
        oracle = cross_entropy_fp64(*made, reduction="sum")
        peer = cross_entropy_same_dtype(*made, reduction="sum")
        results = rank_pool.run(_run, Case(*made, impl, {"reduction": "sum"}))
        grad = torch.cat([result.grad for result in results], dim=-1)
        assert_within_budget(grad, oracle.grad, peer.grad)


@in_ranks
def test_the_label_of_a_row_is_found_by_its_owner_alone(rank_pool, impl):
    """Logits that are the column's number: any other column's logit shows in the loss."""
    world = rank_pool.world_size
    vocab_size = COLUMNS * world
    labels = torch.arange(0, vocab_size, 13)
    logits = torch.arange(vocab_size, dtype=torch.float32).repeat(len(labels), 1)
    case = Case(logits, labels, impl, {"reduction": "none"})
    _check(case, rank_pool.run(_run, case))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@in_ranks
def test_a_label_outside_the_vocabulary_is_nan_on_every_rank(rank_pool, impl, reduction):
    """Not 0 on one rank and the log-sum-exp on several; -1 and V are outside on each of them."""
    world = rank_pool.world_size
    logits, labels = batch("peaked", rows=ROWS, vocab_size=COLUMNS * world)
    labels[0], labels[2], labels[3] = -1, COLUMNS * world, IGNORE_INDEX
    case = Case(logits, labels, impl, {"reduction": reduction})
    results = rank_pool.run(_run, case)
    _check(case, results)
    assert results[0].loss.isnan().sum() == (1 if reduction == "mean" else 2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@in_ranks
def test_nan_or_plus_infinity_in_one_shard_is_nan_on_every_rank(rank_pool, impl, bad):
    world = rank_pool.world_size
    logits, labels = batch("peaked", rows=ROWS, vocab_size=COLUMNS * world)
    logits[1, COLUMNS * world - 1] = bad
    logits[2, 0], labels[2] = bad, IGNORE_INDEX
    case = Case(logits, labels, impl, {"reduction": "none"})
    results = rank_pool.run(_run, case)
    _check(case, results)
    assert results[0].loss.isnan().tolist() == [False, True, False, False, False, False]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@in_ranks
def test_all_ignored_is_zero_on_every_rank_and_backward_runs(rank_pool, impl, reduction):
    """No row counts: a division by their number would spread NaN to every rank's parameters."""
    world = rank_pool.world_size
    made = batch("all_ignored", rows=4, vocab_size=COLUMNS * world, dtype=torch.bfloat16)
    case = Case(*made, impl, {"reduction": reduction, "label_smoothing": 0.1})
    for result in rank_pool.run(_run, case):
        assert torch.equal(result.loss, torch.zeros_like(result.loss))
        assert torch.equal(result.grad, torch.zeros_like(result.grad))


@in_ranks
def test_no_rows_need_no_collective(rank_pool, impl):
    world = rank_pool.world_size
    made = batch("peaked", rows=0, vocab_size=COLUMNS * world)
    case = Case(*made, impl, {"reduction": "mean"})
    for result in rank_pool.run(_run, case):
        assert result.loss.item() == 0.0 and result.grad.shape == (0, COLUMNS)
        assert result.in_forward == [] and result.in_backward == []


@pytest.mark.parametrize("gradient", ["in_forward", "in_backward", "out_of_place"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@in_two_ranks
def test_every_way_of_writing_the_gradient_gathers_once(rank_pool, impl, reduction, gradient):
    made = batch("mixture", rows=8, vocab_size=2 * COLUMNS, shards=2)
    case = Case(*made, impl, {"reduction": reduction, "gradient": gradient})
    results = rank_pool.run(_run, case)
    _check(case, results)
    _check_collectives(results, case, range(2))


@in_two_ranks
def test_labels_and_logits_of_several_dimensions(rank_pool, impl):
    logits, labels = batch("mixture", rows=6, vocab_size=2 * COLUMNS, shards=2)
    shaped = logits.view(2, 3, -1), labels.view(2, 3)
    grad_output = dict(upstream_gradients((2, 3)))["transposed"]
    case = Case(*shaped, impl, {"reduction": "none", "label_smoothing": 0.1}, grad_output)
    results = rank_pool.run(_run, case)
    assert results[0].loss.shape == (2, 3)
    _check(case, results)


@pytest.mark.parametrize("member_sets", [((0, 1), (2, 3)), ((1, 3),), ((3, 0, 2),)])
@in_four_gloo_or_nccl_ranks
def test_a_subgroup_is_a_vocabulary_of_its_own(rank_pool, impl, member_sets):
    """The rank within the group decides which columns are owned, not the rank within the world."""
    size = len(member_sets[0])
    made = batch("shard_edges", rows=2 * size, vocab_size=COLUMNS * size, shards=size)
    case = Case(*made, impl, {"reduction": "mean", "label_smoothing": 0.1})
    results = rank_pool.run(_run, case, member_sets)
    for members in member_sets:
        in_group_order = [results[rank] for rank in sorted(members)]
        _check(case, in_group_order)
        _check_collectives(in_group_order, case, sorted(members))
    outside = set(range(4)) - {rank for members in member_sets for rank in members}
    assert all(results[rank] is None for rank in outside)


def _one_rank_alone(rank, group, case):
    alone = subgroups((0,), (1,))[rank]
    with record_collectives() as calls:
        device = device_of(rank, group)
        leaf = case.logits.to(device).requires_grad_()
        loss = vocab_parallel_cross_entropy(
            leaf, case.labels.to(device), group=alone, impl=case.impl, **case.options
        )
        loss.backward()
    return Result(loss, leaf.grad, calls, [])


@in_two_ranks
def test_a_group_of_one_rank_communicates_nothing(rank_pool, impl):
    case = Case(*batch("peaked", rows=ROWS, vocab_size=COLUMNS), impl, {"reduction": "mean"})
    for result in rank_pool.run(_one_rank_alone, case):
        assert result.in_forward == []
        _check(case, [result])


def _refusals(rank, group, impl):
    """Messages of calls that must be refused before anything is sent or written."""
    others = subgroups((0,), (1,))[1 - rank]
    device = device_of(rank, group)
    logits = torch.randn(3, 5, device=device)
    kept = logits.clone()
    labels = torch.tensor([0, 9, -100], device=device)
    attempts = [
        {"group": others},
        {"group": group, "vocab_size": 5},
        {"group": group, "vocab_size": 13},
        {"group": group, "shard": VocabShard(6 * rank, 6 * rank + 6, 12)},
        {"group": None, "vocab_size": 10},
        {"group": "tensor parallel"},
        {"group": None, "check_labels": True},
    ]
    messages = []
    with record_collectives() as calls:
        for options in attempts:
            leaf = logits.requires_grad_()
            try:
                vocab_parallel_cross_entropy(leaf, labels, impl=impl, **options)
                messages.append("accepted")
            except (TypeError, ValueError) as error:
                messages.append(f"{type(error).__name__}: {error}")
    assert torch.equal(logits, kept) and logits._version == 0 and logits.grad is None
    in_range = vocab_parallel_cross_entropy(
        logits.detach(), labels, group=group, impl=impl, check_labels=True, vocab_size=10
    )
    return messages, calls, in_range.isfinite().item()


@in_two_ranks
def test_groups_and_sizes_that_do_not_fit_are_refused(rank_pool, impl):
    """A whole vocabulary's logits passed with a group would make the loss larger by log(R).

    Five columns do fit a vocabulary of 11 on one of the two ranks, and the other would be left alone: the
    sizes here fit on neither.
    """
    for messages, calls, accepted_in_range in rank_pool.run(_refusals, impl):
        outside, whole, larger, other_width, missing_group, not_a_group, label = messages
        assert outside.startswith("ValueError: group: this rank must be a member")
        for message, vocab_size in ((whole, 5), (larger, 13)):
            assert message.startswith("ValueError: logits: "), message
            assert f"vocab_size {vocab_size}" in message and "got 5; " in message, message
        assert other_width.startswith("ValueError: logits: ") and "width 6" in other_width
        assert missing_group.startswith("ValueError: logits: ") and "10" in missing_group
        assert not_a_group.startswith("TypeError: group: expected"), not_a_group
        assert label.startswith("ValueError: labels: ") and "(1,): 9" in label, label
        assert calls == [] and accepted_in_range


def _stats_of_ranks(rank, group, case):
    """Loss of the same rows when this rank's neighbours hold the same shards in another order."""
    order = list(range(group.size()))
    order = order[1:] + order[:1]
    device = device_of(rank, group)
    shard = shard_of(case.logits, order[rank], group.size()).to(device)
    labels = case.labels.to(device)
    return vocab_parallel_cross_entropy(shard, labels, group=group, impl=case.impl, **case.options)


@in_ranks
def test_which_rank_holds_which_columns_does_not_matter(rank_pool, impl):
    world = rank_pool.world_size
    made = batch("peaked", rows=ROWS, vocab_size=COLUMNS * world, shards=world)
    options = {"reduction": "none", "label_smoothing": 0.1}
    moved_labels = (made.labels - COLUMNS) % (COLUMNS * world)
    case = Case(made.logits, moved_labels, impl, options)
    oracle = cross_entropy_fp64(*made, **options)
    peer = cross_entropy_same_dtype(*made, **options)
    for loss in rank_pool.run(_stats_of_ranks, case):
        assert_within_budget(loss, oracle.loss, peer.loss)
