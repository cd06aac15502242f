"""Losses and token outputs on R ranks in real processes: those of the whole vocabulary, in one collective."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.cases.inputs import Batch, batch
from tests.support.cases.logits import EVERY as ALL_NUMBERS
from tests.support.cases.logits import (
    METRICS,
    REDUCTIONS,
    broad_rows,
    every_output,
    grads_of_every_output,
)
from tests.support.cases.weights import weights
from tests.support.ranks.case import Case, check, chunked, even, run
from tests.support.ranks.collectives import assert_refused, error_of, messages_of
from tests.support.ranks.pools import device_of, in_four_ranks, in_ranks, in_several_ranks, in_two_ranks, subgroups
from vocab_parallel_ce import VocabShard, token_log_probs, vocab_parallel_cross_entropy
from vocab_parallel_ce.integrations import dtensor

COLUMNS, ROWS = 40, 6
EVERY = {**ALL_NUMBERS, "outputs": METRICS}
OPTIONS = {
    "every": EVERY,
    "metrics": {"outputs": METRICS},
    "class_weight": {"class_weight": weights(2 * COLUMNS)},
    "num_items": {"reduction": "sum", "num_items": torch.tensor(7)},
    "every, in_backward": {**EVERY, "reduction": "sum", "num_items": 7, "gradient": "in_backward"},
    "every, out_of_place": {**EVERY, "reduction": "none", "gradient": "out_of_place"},
}
TEMPERATURES = torch.linspace(0.4, 2.0, ROWS)


@pytest.mark.quick
@pytest.mark.parametrize("reduction", REDUCTIONS)
@in_ranks((1, 2, 4), (2,), (2, 4))
def test_loss_and_gradient_are_those_of_the_whole_vocabulary(rank_pool, impl, reduction):
    """Peaked rows, ignored rows and confident labels; one all_gather forward, none backward.

    With smoothing, a loss from the shard's own sum of logits would differ from rank to rank. The
    number of rows that count is not the number of rows of the gather.
    """
    world = rank_pool.world_size
    for dtype, kind, label_smoothing in (
        (torch.bfloat16, "peaked", 0.1),
        (torch.bfloat16, "some_ignored", 0.0),
        (torch.float32, "some_ignored", 0.1),
        (torch.float32, "confident", 0.0),
    ):
        made = batch(kind, rows=ROWS, vocab_size=COLUMNS * world, shards=world, dtype=dtype)
        case = Case(made, impl, {"reduction": reduction, "label_smoothing": label_smoothing})
        check(case, rank_pool.run(run, case))


@pytest.mark.quick(7)
@pytest.mark.parametrize("name", OPTIONS)
@in_several_ranks
def test_options_that_change_what_travels_or_is_divided(rank_pool, impl, name):
    logits, labels = broad_rows("some_ignored", ROWS, COLUMNS * 2, shards=rank_pool.world_size)
    case = Case(Batch(logits, labels), impl, OPTIONS[name])
    check(case, rank_pool.run(run, case))


@in_two_ranks
def test_no_rows_need_no_collective(rank_pool, impl):
    made = batch("peaked", rows=4, vocab_size=COLUMNS * 2)
    none = Batch(made.logits[:0], made.labels[:0])
    case = Case(none, impl, EVERY, grad_outputs=(torch.ones(()),))
    for result in rank_pool.run(run, case):
        assert result.outputs[0].sum().item() == 0.0 and result.gradients[0].shape == (0, COLUMNS)
        assert result.in_forward == [] and result.in_backward == []


@in_several_ranks
def test_of_equal_logits_the_lowest_global_id_is_predicted(rank_pool, impl):
    """Whichever ranks hold them, and in whatever order ranks hold the columns."""
    world = rank_pool.world_size
    vocab_size = COLUMNS * world
    logits = torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0)) - 9
    tied = [[0, vocab_size - 1], [COLUMNS - 1, COLUMNS], [3, 7], [vocab_size - 2, vocab_size - 1], [COLUMNS]]
    for row, columns in enumerate(tied):
        logits[row, columns] = 2.0
    logits[5] = 1.0
    labels = torch.tensor([0, COLUMNS, 3, vocab_size - 2, COLUMNS, 0])
    ranks = even(COLUMNS, world)
    for bounds in (ranks, ranks[::-1]):
        case = Case(Batch(logits, labels), impl, {"outputs": METRICS}, bounds, "shard")
        _, predictions = check(case, rank_pool.run(run, case)).outputs
        assert predictions.tolist() == [0, COLUMNS - 1, 3, vocab_size - 2, COLUMNS, 0]


@in_several_ranks
def test_a_last_shard_that_is_all_padding(rank_pool, impl):
    """128 columns a rank; a label of padding is outside on every rank. With 4 ranks three own none of 100 columns.

    300 columns are padded to 512, a multiple of 128 * R as Megatron pads, and equal shards follow from their number.
    """
    bounds = even(128, rank_pool.world_size)
    for vocab_size, size in ((100, "shard"), (300, "vocab_size"))[: rank_pool.world_size // 2]:
        assert bounds[-1][0] >= vocab_size
        logits, labels = broad_rows("shard_edges", ROWS, vocab_size)
        labels[0], labels[1] = vocab_size, vocab_size - 1
        case = Case(Batch(logits, labels), impl, {**EVERY, "reduction": "none"}, bounds, size, with_alone=True)
        whole = check(case, rank_pool.run(run, case))
        assert whole.loss.isnan().tolist() == [True] + [False] * (ROWS - 1)


@pytest.mark.parametrize("member_sets", [((0, 1), (2, 3)), ((1, 3),), ((3, 0, 2),)])
@in_four_ranks
def test_a_subgroup_is_a_vocabulary_of_its_own(rank_pool, impl, member_sets):
    """The rank within the group decides which columns are owned, not the rank within the world."""
    size = len(member_sets[0])
    made = batch("shard_edges", rows=2 * size, vocab_size=COLUMNS * size - 3, shards=size)
    case = Case(made, impl, {"label_smoothing": 0.1}, chunked(COLUMNS * size - 3, size), "vocab_size")
    of_tokens = case._replace(
        options={"temperature": 0.6}, grad_outputs=tuple(grads_of_every_output(2 * size)), function=every_output
    )
    for each in (case, of_tokens):
        results = rank_pool.run(run, each, member_sets)
        for members in member_sets:
            check(each, [results[rank] for rank in sorted(members)], ranks=sorted(members))
        outside = set(range(4)) - {rank for members in member_sets for rank in members}
        assert all(results[rank] is None for rank in outside)


@in_two_ranks
def test_a_group_of_one_rank_communicates_nothing(rank_pool, impl):
    case = Case(batch("peaked", rows=ROWS, vocab_size=COLUMNS), impl, {"reduction": "mean"})
    for rank, result in enumerate(rank_pool.run(run, case, ((0,), (1,)))):
        check(case, [result], ranks=[rank])


def _dtensors(rank, group, case):
    """In a rank: log-probs with plain and DTensor labels, and the errors of temperatures that are not plain."""
    device, given = device_of(rank, group), {"impl": case.impl}
    mesh = DeviceMesh.from_group(group, device.type)
    logits = distribute_tensor(case.inputs.logits.to(device), mesh, [Shard(1)])
    labels, t = case.inputs.labels.to(device), case.options["temperature"].to(device)
    whole, of_rows = (distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (labels, t))
    found = [dtensor.token_log_probs(logits, each, temperature=t, **given) for each in (labels, whole)]
    error = error_of(partial(dtensor.token_log_probs, logits, whole, temperature=of_rows))
    return found[0].cpu(), found[1].to_local().cpu(), error


@in_ranks((2,), (), (2,))
def test_the_function_over_dtensors_takes_plain_temperatures(rank_pool, impl):
    case = Case(broad_rows("peaked", ROWS, COLUMNS), impl, {"temperature": TEMPERATURES})
    expected = token_log_probs(*case.inputs, **case.options)
    for plain, distributed, error in rank_pool.run(_dtensors, case):
        torch.testing.assert_close(plain, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(plain, distributed)
        assert error.startswith("TypeError: temperature: expected this rank's part as a plain torch.Tensor"), error


def _refusals(rank, group, impl):
    device, others = device_of(rank, group), subgroups((0,), (1,))[1 - rank]
    leaf = torch.randn(3, 5, device=device).requires_grad_()
    kept, labels = leaf.detach().clone(), torch.tensor([0, 9, -100], device=device)
    attempts = {
        "not a member": {"group": others},
        "whole": {"group": group, "vocab_size": 5},
        "larger": {"group": group, "vocab_size": 13},
        "other width": {"group": group, "vocab_size": VocabShard(6 * rank, 6 * rank + 6, 12)},
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
