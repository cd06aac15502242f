"""Options, shards of every kind and token outputs on R ranks: one collective, and the oracle's results."""

import pytest
import torch

from tests.support.collectives import record_collectives
from tests.support.inputs import IGNORE_INDEX, batch
from tests.support.logits import EVERY as ALL_NUMBERS
from tests.support.logits import SMOOTHING, broad_rows, random_grad_output
from tests.support.logits_ranks import Case, check, chunked, even, run
from tests.support.ranks import device_of, in_four_ranks, in_ranks, in_several_ranks, in_two_ranks
from tests.support.weights import weights
from vocab_parallel_ce import VocabShard, token_log_probs

COLUMNS, ROWS = 20, 5
GRAD_OUTPUTS = random_grad_output(ROWS), random_grad_output(ROWS, seed=1)
EVERY = {**ALL_NUMBERS, "smoothing_formula": "megatron", "return_metrics": True}
OPTIONS = {
    "every": EVERY,
    **{name: SMOOTHING[name] for name in ("torch", "megatron")},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 10.0},
    "logit_scale": {"logit_scale": 0.4},
    "metrics": {"return_metrics": True},
    "class_weight": {"class_weight": weights(COLUMNS * 2)},
    "ignore_index": {"ignore_index": 5},
    "shift": {"shift": True},
    "num_items": {"reduction": "sum", "num_items": torch.tensor(7)},
    "every, in_backward": {**EVERY, "reduction": "sum", "num_items": 7, "gradient": "in_backward"},
    "every, out_of_place": {**EVERY, "reduction": "none", "gradient": "out_of_place"},
}
in_three_ranks = in_ranks((3,), (3,), ())


@pytest.mark.quick(13)
@pytest.mark.parametrize("name", OPTIONS)
@in_several_ranks
def test_each_option_and_all_of_them(rank_pool, impl, name):
    logits, labels = broad_rows("some_ignored", ROWS, COLUMNS * 2, shards=rank_pool.world_size)
    if name == "shift":
        logits, labels = logits[None], labels[None]
    case = Case(logits, labels, impl, OPTIONS[name])
    check(case, rank_pool.run(run, case))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@in_two_ranks
def test_no_items_and_no_rows_that_count(rank_pool, impl, reduction):
    options = {**EVERY, "reduction": reduction}
    logits, labels = batch("peaked", rows=2, vocab_size=COLUMNS * 2)
    if reduction == "sum":
        options["num_items"] = torch.tensor(0)
    else:
        labels = torch.full_like(labels, IGNORE_INDEX)
    for result in rank_pool.run(run, Case(logits, labels, impl, options)):
        loss, predictions, accuracy, lse, z_loss = result.outputs
        assert loss.item() == z_loss.item() == 0 and not result.grad.any()
        assert lse.isfinite().all() and accuracy.isfinite() and predictions.dtype == torch.int64


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
        case = Case(logits, labels, impl, {"return_metrics": True}, bounds, "shard")
        _, predictions, accuracy, *_ = check(case, rank_pool.run(run, case)).outputs
        assert predictions.tolist() == [0, COLUMNS - 1, 3, vocab_size - 2, COLUMNS, 0]
        assert torch.equal(accuracy, torch.tensor(5 / 6))


@in_four_ranks
def test_an_uneven_vocabulary_cut_as_torch_chunk_cuts(rank_pool, impl):
    """50257 columns over 4 ranks: 12565 three times, and 12562."""
    vocab_size = 50257
    made = broad_rows("shard_edges", 3, vocab_size, shards=4, dtype=torch.bfloat16)
    bounds = chunked(vocab_size, 4)
    assert [stop - start for start, stop in bounds] == [x.shape[1] for x in made.logits.chunk(4, dim=1)]
    made.labels[:2] = torch.tensor([bounds[3][0], vocab_size - 1])
    case = Case(*made, impl, {**EVERY, "reduction": "none"}, bounds, "vocab_size")
    check(case, rank_pool.run(run, case, None, True))


THIRDS = [(0, 342), (342, 684), (684, 1024)]


@pytest.mark.parametrize(
    ("gradient", "options"),
    [
        ("in_backward", {**EVERY, "reduction": "none"}),
        ("in_forward", {"reduction": "sum"}),
        ("out_of_place", {**EVERY, "reduction": "mean"}),
    ],
)
@in_three_ranks
def test_a_last_shard_that_is_partly_padding(rank_pool, impl, gradient, options):
    """1003 columns over 3 ranks of 342, 342 and 340, the last 21 padding."""
    logits, labels = broad_rows("peaked", ROWS, 1003)
    labels[:3] = torch.tensor([1002, 684, IGNORE_INDEX])
    case = Case(logits, labels, impl, {**options, "gradient": gradient}, THIRDS, "shard")
    check(case, rank_pool.run(run, case, None, True))


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
        case = Case(logits, labels, impl, {**EVERY, "reduction": "none"}, bounds, size)
        whole = check(case, rank_pool.run(run, case, None, True))
        assert whole.loss.isnan().tolist() == [True, False, False, False, False]


@in_several_ranks
def test_shards_in_another_order_than_the_ranks(rank_pool, impl):
    """And of different widths: who holds which columns, the shards say and not the ranks."""
    ends = [7, 31, 40, 64][: rank_pool.world_size]
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    bounds = bounds[1:] + bounds[:1]
    made = broad_rows("excluded_columns", ROWS, ends[-1])
    case = Case(*made, impl, {**EVERY, "label_smoothing": 0.0}, bounds, "shard")
    check(case, rank_pool.run(run, case))


@in_four_ranks
def test_a_subgroup_has_shards_of_its_own(rank_pool, impl):
    """The rank within the group says which columns follow from a vocab_size."""
    members, vocab_size = (1, 3), 37
    made = broad_rows("shard_edges", ROWS, vocab_size)
    case = Case(*made, impl, EVERY, chunked(vocab_size, 2), "vocab_size")
    options = {"entropy": True, "temperature": 0.6}
    of_tokens = case._replace(options=options, grad_outputs=GRAD_OUTPUTS, function=token_log_probs)
    for each in (case, of_tokens):
        results = rank_pool.run(run, each, (members,))
        assert results[0] is None and results[2] is None
        check(each, [results[rank] for rank in members], members)


@in_three_ranks
def test_token_log_probs_of_padded_shards(rank_pool, impl):
    logits, labels = broad_rows("peaked", ROWS, 1003)
    labels[0], labels[1] = 1002, 1003
    options = {"entropy": True, "softcap": 10.0}
    case = Case(logits, labels, impl, options, THIRDS, "shard", GRAD_OUTPUTS, token_log_probs)
    check(case, rank_pool.run(run, case))


def _largest(rank, group, logits, labels, impl, temperature):
    """The results of this rank's columns, and the collectives of the call."""
    device = device_of(rank, group)
    shard = VocabShard.of_rank(logits.shape[-1], rank, group.size())
    own, labels = logits[:, shard.start : shard.stop].to(device), labels.to(device)
    options = {"vocab_size": logits.shape[-1], "temperature": temperature, "impl": impl}
    with record_collectives() as collectives:
        found = token_log_probs(own, labels, group=group, outputs=("rank",), top_k=5, **options)
    return [found.rank.cpu(), found.top_ids.cpu(), found.top_log_probs.cpu()], collectives


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@in_several_ranks
def test_the_largest_travel_with_the_statistics_and_the_rank_is_counted_afterwards(rank_pool, impl, dtype, temperature):
    """A last shard narrower than the five that are asked for; in fp64 words of 8 bytes beside an odd number of 4."""
    if dtype == torch.float64:
        impl = "reference"  # the only one of fp64
    logits = (
        torch.stack([torch.randperm(21, generator=torch.Generator().manual_seed(i)) for i in range(5)]).to(dtype) / 3
    )
    labels = torch.tensor([0, 20, IGNORE_INDEX, 7, 3])
    whole = token_log_probs(logits, labels, outputs=("rank",), top_k=5, temperature=temperature)
    for found, collectives in rank_pool.run(_largest, logits, labels, impl, temperature):
        assert torch.equal(found[0], whole.rank) and torch.equal(found[1], whole.top_ids)
        torch.testing.assert_close(found[2], whole.top_log_probs, rtol=1e-6, atol=1e-6)
        sizes = [(call.name, call.nbytes) for call in collectives]
        assert sizes == [
            ("_allgather_base_", (dtype.itemsize * (3 + 5 + (temperature != 1)) + 4 * 5) * len(labels)),
            ("allreduce_", 4 * len(labels)),
        ]
