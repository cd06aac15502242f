"""The loss on R ranks in real processes: the oracle's on the whole vocabulary, bit-equal on every rank."""

from functools import partial

import pytest
import torch

from tests.support.collectives import assert_refused, messages_of
from tests.support.inputs import IGNORE_INDEX, batch, grad_output_layouts
from tests.support.logits import GRADIENTS, REDUCTIONS
from tests.support.logits_ranks import Case, check, run
from tests.support.ranks import device_of, in_four_ranks, in_ranks, in_several_ranks, in_two_ranks, subgroups
from vocab_parallel_ce import VocabShard, vocab_parallel_cross_entropy

COLUMNS, ROWS = 40, 6


@pytest.mark.quick
@pytest.mark.parametrize("label_smoothing", [0.1, 0.0])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@in_ranks((1, 2, 3, 4), (2,), (2, 4))
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(rank_pool, impl, reduction, label_smoothing):
    """Peaked rows, ignored rows and confident labels; one all_gather forward, none backward.

    With smoothing, a loss from the shard's own sum of logits would differ from rank to rank. The
    number of rows that count is not the number of rows of the gather.
    """
    world = rank_pool.world_size
    for dtype, kind in ((torch.bfloat16, "peaked"), (torch.bfloat16, "some_ignored"), (torch.float32, "confident")):
        made = batch(kind, rows=ROWS, vocab_size=COLUMNS * world, shards=world, dtype=dtype)
        case = Case(*made, impl, {"reduction": reduction, "label_smoothing": label_smoothing})
        check(case, rank_pool.run(run, case))


@pytest.mark.parametrize("kind", ["excluded_shard", "far_negative", "excluded_columns", "shard_edges", "times_1000"])
@in_several_ranks
def test_rows_far_from_zero_masked_or_at_the_edges_of_shards(rank_pool, impl, kind):
    """A shard that is -inf throughout, labels in the first and last column of each, gaps above 100.

    The first token's grad_output is 0: a kernel that read it for every row would return 0.
    """
    world = rank_pool.world_size
    for dtype in (torch.float16, torch.float32):
        made = batch(kind, rows=2 * world, vocab_size=COLUMNS * world, shards=world, dtype=dtype)
        grad_output = dict(grad_output_layouts((2 * world,)))["zero in the first token"]
        case = Case(*made, impl, {"reduction": "none"}, grad_outputs=(grad_output,))
        check(case, rank_pool.run(run, case))


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@in_several_ranks
def test_a_label_outside_and_a_logit_that_is_no_number_are_nan_on_every_rank(rank_pool, impl, bad, reduction):
    """Not 0 on one rank and the log-sum-exp on several; -1 and V are outside on each of them."""
    vocab_size = COLUMNS * rank_pool.world_size
    logits, labels = batch("peaked", rows=ROWS, vocab_size=vocab_size)
    labels[0], labels[2], labels[3] = -1, IGNORE_INDEX, vocab_size
    logits[1, -1] = logits[2, 0] = bad
    case = Case(logits, labels, impl, {"reduction": reduction})
    whole = check(case, rank_pool.run(run, case))
    expected = [True, True, False, True, False, False] if reduction == "none" else True
    assert whole.loss.isnan().tolist() == expected


@pytest.mark.parametrize("reduction", REDUCTIONS)
@in_two_ranks
def test_all_ignored_is_zero_on_every_rank_and_no_rows_need_no_collective(rank_pool, impl, reduction):
    """No row counts: a division by their number would spread NaN to every rank's parameters."""
    made = batch("all_ignored", rows=4, vocab_size=COLUMNS * 2, dtype=torch.bfloat16)
    case = Case(*made, impl, {"reduction": reduction, "label_smoothing": 0.1})
    for result in rank_pool.run(run, case):
        assert not result.outputs[0].any() and torch.equal(result.grad, torch.zeros_like(result.grad))
    case = case._replace(logits=made.logits[:0], labels=made.labels[:0], grad_outputs=(torch.ones(()),))
    for result in rank_pool.run(run, case):
        assert result.outputs[0].sum().item() == 0.0 and result.grad.shape == (0, COLUMNS)
        assert result.in_forward == [] and result.in_backward == []


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@in_two_ranks
def test_every_way_of_writing_the_gradient_gathers_once(rank_pool, impl, reduction, gradient):
    logits, labels = batch("mixture", rows=8, vocab_size=2 * COLUMNS, shards=2)
    grad_output = torch.tensor(0.75) if reduction == "mean" else dict(grad_output_layouts((2, 4)))["transposed"]
    options = {"reduction": reduction, "gradient": gradient, "label_smoothing": 0.1}
    case = Case(logits.view(2, 4, -1), labels.view(2, 4), impl, options, grad_outputs=(grad_output,))
    assert check(case, rank_pool.run(run, case)).loss.shape == (() if reduction == "mean" else (2, 4))


@pytest.mark.parametrize("member_sets", [((0, 1), (2, 3)), ((1, 3),), ((3, 0, 2),)])
@in_four_ranks
def test_a_subgroup_is_a_vocabulary_of_its_own(rank_pool, impl, member_sets):
    """The rank within the group decides which columns are owned, not the rank within the world."""
    size = len(member_sets[0])
    made = batch("shard_edges", rows=2 * size, vocab_size=COLUMNS * size, shards=size)
    case = Case(*made, impl, {"reduction": "mean", "label_smoothing": 0.1})
    results = rank_pool.run(run, case, member_sets)
    for members in member_sets:
        check(case, [results[rank] for rank in sorted(members)], sorted(members))
    outside = set(range(4)) - {rank for members in member_sets for rank in members}
    assert all(results[rank] is None for rank in outside)


@in_two_ranks
def test_a_group_of_one_rank_communicates_nothing(rank_pool, impl):
    case = Case(*batch("peaked", rows=ROWS, vocab_size=COLUMNS), impl, {"reduction": "mean"})
    for rank, result in enumerate(rank_pool.run(run, case, ((0,), (1,)))):
        check(case, [result], [rank])


def _refusals(rank, group, impl):
    device, others = device_of(rank, group), subgroups((0,), (1,))[1 - rank]
    leaf = torch.randn(3, 5, device=device).requires_grad_()
    kept, labels = leaf.detach().clone(), torch.tensor([0, 9, -100], device=device)
    attempts = {
        "not a member": {"group": others},
        "whole": {"group": group, "vocab_size": 5},
        "larger": {"group": group, "vocab_size": 13},
        "other width": {"group": group, "shard": VocabShard(6 * rank, 6 * rank + 6, 12)},
        "missing group": {"vocab_size": 10},
        "not a group": {"group": "tensor parallel"},
        "label": {"check_labels": True},
    }
    call = partial(vocab_parallel_cross_entropy, leaf, labels, impl=impl)
    messages = messages_of({name: partial(call, **options) for name, options in attempts.items()})
    assert torch.equal(leaf, kept) and leaf._version == 0 and leaf.grad is None
    assert call(group=group, check_labels=True, vocab_size=10).isfinite()
    return messages


@in_two_ranks
def test_groups_and_sizes_that_do_not_fit_are_refused(rank_pool, impl):
    """A whole vocabulary's logits passed with a group would make the loss larger by log(R).

    Five columns do fit a vocabulary of 11 on one of the two ranks, and the other would be left alone: the
    sizes here fit on neither.
    """
    expected = {
        "not a member": "ValueError: group: this rank must be a member",
        "whole": "ValueError: logits: .*vocab_size 5.*got 5; ",
        "larger": "ValueError: logits: .*vocab_size 13.*got 5; ",
        "other width": "ValueError: logits: .*width 6",
        "missing group": "ValueError: logits: .*10",
        "not a group": "TypeError: group: expected",
        "label": r"ValueError: labels: .*\(1,\): 9",
    }
    assert_refused(rank_pool.run(_refusals, impl), expected)
