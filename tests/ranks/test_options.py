"""Options, shards of every kind and token outputs on R ranks: one collective, and the oracle's results."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from tests.support.budget import assert_within_budget
from tests.support.collectives import Collective, record_collectives
from tests.support.inputs import IGNORE_INDEX, batch, padded_shard, upstream_gradients, with_a_broad_row
from tests.support.oracle import (
    cross_entropy_fp64,
    cross_entropy_same_dtype,
    metrics_fp64,
    metrics_same_dtype,
    token_outputs_fp64,
    token_outputs_same_dtype,
)
from tests.support.ranks import device_of, implementation_params, subgroups
from vocab_parallel_ce import VocabShard, token_log_probs, verify_group, vocab_parallel_cross_entropy

COLUMNS, ROWS = 20, 5
NAN = float("nan")
EVERY = {
    "label_smoothing": 0.1,
    "smoothing_formula": "megatron",
    "z_loss": 0.02,
    "softcap": 10.0,
    "logit_scale": 0.4,
    "return_metrics": True,
}
OPTIONS = {
    "torch": {"label_smoothing": 0.1},
    "megatron": {"label_smoothing": 0.1, "smoothing_formula": "megatron"},
    "z_loss": {"z_loss": 0.02},
    "softcap": {"softcap": 10.0},
    "logit_scale": {"logit_scale": 0.4},
    "metrics": {"return_metrics": True},
    "num_items": {"reduction": "sum", "num_items": torch.tensor(7)},
    "every": EVERY,
    "every, in_backward": {**EVERY, "reduction": "sum", "num_items": 7, "gradient": "in_backward"},
    "every, out_of_place": {**EVERY, "reduction": "none", "gradient": "out_of_place"},
}


def _ranks(gloo, interpreter, nccl=()):
    return pytest.mark.parametrize(
        ("rank_pool", "impl"), implementation_params(gloo, interpreter, nccl), indirect=["rank_pool"]
    )


in_ranks = _ranks((1, 2, 4), (2,), (2, 4))
in_several_ranks = _ranks((2, 4), (2,), (2, 4))
in_three_ranks = _ranks((3,), (3,))
in_four_ranks = _ranks((4,), (4,), (4,))


class Case(NamedTuple):
    """One call on shards of ``logits [N, V]``, as every rank makes it."""

    logits: torch.Tensor
    labels: torch.Tensor
    impl: str
    options: dict[str, Any]
    bounds: list[tuple[int, int]]  # of each rank's columns; those at V and beyond are padding
    size: str = "shard"  # how ranks say which columns are theirs: "shard", "vocab_size" or "even"
    upstreams: tuple[torch.Tensor | None, ...] = (None, None)


class Result(NamedTuple):
    """What one rank got."""

    outputs: tuple[torch.Tensor, ...]  # loss, and metrics; or log-probabilities and entropy
    grad: torch.Tensor
    in_forward: list[Collective]
    in_backward: list[Collective]
    alone: torch.Tensor | None  # the loss, or log-probabilities, of the whole vocabulary on this rank


def _call(function, logits, labels, impl, options):
    result = function(logits, labels, impl=impl, **options)
    if function is token_log_probs or not options.get("return_metrics"):
        return result if isinstance(result, tuple) else (result,)
    return result[0], *result[1]


def _run(rank, group, function, case, members=None, with_alone=False):
    if members is not None:
        (group,) = subgroups(members)
        if rank not in members:
            return None
    device = device_of(rank, torch.distributed.group.WORLD)
    start, stop = case.bounds[group.rank()]
    vocab_size = case.logits.shape[1]
    leaf = padded_shard(case.logits, start, stop).to(device).requires_grad_()
    labels = case.labels.to(device)
    size = {"shard": VocabShard(start, stop, vocab_size), "vocab_size": vocab_size}
    options = {**case.options, **{name: size[name] for name in size if name == case.size}, "group": group}
    with record_collectives() as in_forward:
        outputs = _call(function, leaf, labels, case.impl, options)
    upstreams = [
        torch.ones_like(output) if grad_output is None else grad_output.to(device)
        for output, grad_output in zip(outputs, case.upstreams, strict=False)
        if output.requires_grad
    ]
    with record_collectives() as in_backward:
        torch.autograd.backward([output for output in outputs if output.requires_grad], upstreams)
    alone = None
    if with_alone and rank == 0:
        alone = _call(function, case.logits.to(device), labels, case.impl, case.options)[0]
    return Result(outputs, leaf.grad, in_forward, in_backward, alone)


def _whole_gradient(case, results):
    """The gradient of the vocabulary from those of the shards, whose padding must be 0."""
    vocab_size = case.logits.shape[1]
    grad = torch.full_like(case.logits, NAN)
    for (start, stop), result in zip(case.bounds, results, strict=True):
        valid = max(min(stop, vocab_size) - start, 0)
        grad[:, start : start + valid] = result.grad[:, :valid]
        assert not result.grad[:, valid:].any(), f"gradient of the padding of [{start}, {stop})"
    return grad


def _check_equal_on_all_ranks(results):
    for result in results:
        for output, first in zip(result.outputs, results[0].outputs, strict=True):
            torch.testing.assert_close(output, first, rtol=0, atol=0, equal_nan=True)


def _check_collectives(case, results, ranks, extra):
    """One all_gather of ``4 * K * N`` bytes, ``K = 3 + extra``; none in backward."""
    ranks = tuple(ranks)
    sent = 4 * (3 + extra) * case.labels.numel()
    expected = [] if len(ranks) == 1 else [("_allgather_base_", ranks, sent)]
    for result in results:
        assert [tuple(call) for call in result.in_forward] == expected
        assert result.in_backward == []


def _check_loss(case, results, ranks):
    """Bit-equal on all ranks, the oracle's on the whole vocabulary, one collective."""
    _check_equal_on_all_ranks(results)
    options = {k: v for k, v in case.options.items() if k not in ("gradient", "return_metrics")}
    oracle, peer = (
        compute(case.logits, case.labels, grad_output=case.upstreams[0], **options)
        for compute in (cross_entropy_fp64, cross_entropy_same_dtype)
    )
    loss, *metrics = results[0].outputs
    assert_within_budget(loss, oracle.loss, peer.loss)
    if results[0].alone is not None:
        assert_within_budget(results[0].alone, oracle.loss, peer.loss)
    assert_within_budget(_whole_gradient(case, results), oracle.grad, peer.grad)
    if metrics:
        oracle, peer = (
            compute(case.logits, case.labels, **options) for compute in (metrics_fp64, metrics_same_dtype)
        )
        assert torch.equal(metrics[0], oracle.predictions)
        for result, expected, same_dtype in zip(metrics[1:], oracle[1:], peer[1:], strict=True):
            assert_within_budget(result, expected, same_dtype)
    smoothed = bool(options.get("label_smoothing"))
    _check_collectives(case, results, ranks, 2 * smoothed + bool(metrics))


def _even(n_columns, n_ranks):
    return [(rank * n_columns, (rank + 1) * n_columns) for rank in range(n_ranks)]


def _rows(kind, vocab_size, shards, dtype=torch.float32, rows=ROWS):
    made = batch(kind, rows=rows - 1, vocab_size=vocab_size, shards=shards, dtype=dtype)
    return with_a_broad_row(made)


def _random(rows=ROWS, seed=0):
    grad_output = dict(upstream_gradients((rows,), seed=seed))["random"]
    grad_output[-1] = 1.5  # the broad row's is not near 0
    return grad_output


@pytest.mark.parametrize("name", OPTIONS)
@in_ranks
def test_each_option_and_all_of_them(rank_pool, impl, name):
    world = rank_pool.world_size
    options = OPTIONS[name]
    grad_output = _random() if options.get("reduction") == "none" else torch.tensor(0.75)
    made = _rows("some_ignored", COLUMNS * world, world)
    case = Case(*made, impl, options, _even(COLUMNS, world), "even", (grad_output,))
    _check_loss(case, rank_pool.run(_run, vocab_parallel_cross_entropy, case), range(world))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@in_ranks
def test_no_items_and_no_rows_that_count(rank_pool, impl, reduction):
    world = rank_pool.world_size
    options = {**EVERY, "reduction": reduction}
    logits, labels = batch("peaked", rows=2, vocab_size=COLUMNS * world)
    if reduction == "sum":
        options["num_items"] = torch.tensor(0)
    else:
        labels = torch.full_like(labels, IGNORE_INDEX)
    case = Case(logits, labels, impl, options, _even(COLUMNS, world))
    for result in rank_pool.run(_run, vocab_parallel_cross_entropy, case):
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
    ranks = _even(COLUMNS, world)
    for bounds in (ranks, ranks[::-1]):
        case = Case(logits, labels, impl, {"return_metrics": True}, bounds)
        results = rank_pool.run(_run, vocab_parallel_cross_entropy, case)
        _check_loss(case, results, range(world))
        _, predictions, accuracy, *_ = results[0].outputs
        assert predictions.tolist() == [0, COLUMNS - 1, 3, vocab_size - 2, COLUMNS, 0]
        assert torch.equal(accuracy, torch.tensor(5 / 6))


@in_four_ranks
def test_an_uneven_vocabulary_cut_as_torch_chunk_cuts(rank_pool, impl):
    """50257 columns over 4 ranks: 12565 three times, and 12562."""
    vocab_size = 50257
    made = _rows("shard_edges", vocab_size, 4, torch.bfloat16, rows=3)
    widths = [chunk.shape[1] for chunk in made.logits.chunk(4, dim=1)]
    assert widths == [12565, 12565, 12565, 12562]
    ends = torch.tensor(widths).cumsum(0).tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    made.labels[:2] = torch.tensor([bounds[3][0], vocab_size - 1])
    case = Case(*made, impl, {**EVERY, "reduction": "none"}, bounds, "vocab_size", (_random(3),))
    results = rank_pool.run(_run, vocab_parallel_cross_entropy, case, None, True)
    _check_loss(case, results, range(4))


THIRDS = [(0, 342), (342, 684), (684, 1024)]


@pytest.mark.parametrize(
    ("gradient", "options"),
    [
        ("in_forward", {"reduction": "sum"}),
        ("in_backward", {**EVERY, "reduction": "none"}),
        ("out_of_place", {**EVERY, "reduction": "mean"}),
    ],
)
@in_three_ranks
def test_a_last_shard_that_is_partly_padding(rank_pool, impl, gradient, options):
    """1003 columns over 3 ranks of 342, 342 and 340, the last 21 padding."""
    logits, labels = _rows("peaked", 1003, 3)
    labels[:3] = torch.tensor([1002, 684, IGNORE_INDEX])
    options = {**options, "gradient": gradient}
    grad_output = _random() if options["reduction"] == "none" else torch.tensor(0.75)
    case = Case(logits, labels, impl, options, THIRDS, "shard", (grad_output,))
    results = rank_pool.run(_run, vocab_parallel_cross_entropy, case, None, True)
    _check_loss(case, results, range(3))


def _check_wholly_padded(rank_pool, impl, vocab_size, size):
    """128 columns a rank, the last rank's all padding; a label of one of them is outside on every rank."""
    world = rank_pool.world_size
    bounds = _even(128, world)
    assert bounds[-1][0] >= vocab_size
    logits, labels = _rows("shard_edges", vocab_size, 1)
    labels[0], labels[1] = vocab_size, vocab_size - 1
    case = Case(logits, labels, impl, {**EVERY, "reduction": "none"}, bounds, size, (_random(),))
    results = rank_pool.run(_run, vocab_parallel_cross_entropy, case, None, True)
    _check_loss(case, results, range(world))
    assert results[0].outputs[0].isnan().tolist() == [True, False, False, False, False]


@in_several_ranks
def test_a_last_shard_that_is_all_padding(rank_pool, impl):
    """With 4 ranks three of them own nothing."""
    _check_wholly_padded(rank_pool, impl, 100, "shard")


@in_four_ranks
def test_equal_padded_shards_follow_from_the_size_of_the_vocabulary(rank_pool, impl):
    """300 columns padded to 512, a multiple of 128 * R as Megatron pads."""
    _check_wholly_padded(rank_pool, impl, 300, "vocab_size")


@in_several_ranks
def test_shards_in_another_order_than_the_ranks(rank_pool, impl):
    """And of different widths: who holds which columns, the shards say and not the ranks."""
    world = rank_pool.world_size
    ends = [7, 31, 40, 64][:world]
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    bounds = bounds[1:] + bounds[:1]
    made = _rows("excluded_columns", ends[-1], 1)
    options = {**EVERY, "label_smoothing": 0.0}
    case = Case(*made, impl, options, bounds)
    _check_loss(case, rank_pool.run(_run, vocab_parallel_cross_entropy, case), range(world))


@_ranks((4,), (), (4,))
def test_a_subgroup_has_shards_of_its_own(rank_pool, impl):
    """The rank within the group says which columns follow from a vocab_size."""
    members, vocab_size = (1, 3), 37
    made = _rows("shard_edges", vocab_size, 1)
    case = Case(*made, impl, EVERY, [(0, 19), (19, 37)], "vocab_size")
    results = rank_pool.run(_run, vocab_parallel_cross_entropy, case, members)
    assert results[0] is None and results[2] is None
    _check_loss(case, [results[rank] for rank in members], members)
    upstreams = (_random(), _random(seed=1))
    case = case._replace(options={"entropy": True, "temperature": 0.6}, upstreams=upstreams)
    results = rank_pool.run(_run, token_log_probs, case, members)
    _check_token_outputs(case, [results[rank] for rank in members], members)


def _check_token_outputs(case, results, ranks):
    _check_equal_on_all_ranks(results)
    with_entropy = case.options.get("entropy", False)
    options = {k: v for k, v in case.options.items() if k not in ("gradient", "entropy")}
    upstreams = {"grad_output": case.upstreams[0]}
    if with_entropy:
        upstreams["grad_entropy"] = case.upstreams[1]
    oracle, peer = (
        compute(case.logits, case.labels, **upstreams, **options)
        for compute in (token_outputs_fp64, token_outputs_same_dtype)
    )
    assert len(results[0].outputs) == 1 + with_entropy
    for result, expected, same_dtype in zip(results[0].outputs, oracle[:2], peer[:2], strict=False):
        assert_within_budget(result, expected, same_dtype)
    assert_within_budget(_whole_gradient(case, results), oracle.grad, peer.grad)
    _check_collectives(case, results, ranks, int(with_entropy))


@pytest.mark.parametrize("entropy", [False, True])
@in_ranks
def test_token_log_probs(rank_pool, impl, entropy):
    world = rank_pool.world_size
    transform = {"temperature": 0.6, "softcap": 10.0, "logit_scale": 0.4}
    upstreams = _random(), _random(seed=1)
    for kind, options in (("some_ignored", {}), ("excluded_shard", {}), ("shard_edges", transform)):
        made = _rows(kind, COLUMNS * world, world)
        options = {**options, "entropy": entropy}
        case = Case(*made, impl, options, _even(COLUMNS, world), "even", upstreams)
        _check_token_outputs(case, rank_pool.run(_run, token_log_probs, case), range(world))


@in_three_ranks
def test_token_log_probs_of_padded_shards(rank_pool, impl):
    logits, labels = _rows("peaked", 1003, 3)
    labels[0], labels[1] = 1002, 1003
    options = {"entropy": True, "softcap": 10.0}
    case = Case(logits, labels, impl, options, THIRDS, "shard", (_random(), _random(seed=1)))
    _check_token_outputs(case, rank_pool.run(_run, token_log_probs, case), range(3))


def _verified(rank, group, options_of_ranks):
    logits = torch.randn(4, 10, device=device_of(rank, group))
    labels = torch.arange(4, device=logits.device)
    try:
        verify_group(logits, labels, group, **options_of_ranks[rank])
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "agreed"


@pytest.mark.parametrize(
    ("options_of_ranks", "message"),
    [
        (({"softcap": 30.0, "reduction": "none"},) * 2, "agreed"),
        (({}, {"softcap": 30.0}), "ValueError: softcap: rank 1 of 2 has 30.0, rank 0 has None"),
        (({"z_loss": 0.1}, {"z_loss": 0.2}), "ValueError: z_loss: rank 1 of 2 has 0.2, rank 0 has 0.1"),
        (({"softcap": 30}, {"softcap": 30.0}), "agreed"),
        (({}, {"soft_cap": 30.0}), "TypeError: rank 1 of 2: soft_cap: expected an option of the loss"),
    ],
    ids=["same", "missing", "other value", "as a float", "unknown"],
)
@_ranks((2,), (), (2,))
def test_options_that_differ_between_ranks_are_found(rank_pool, impl, options_of_ranks, message):
    """A softcap on one rank alone gave the same wrong loss on all, without an error."""
    for got in rank_pool.run(_verified, options_of_ranks):
        assert got.startswith(message), got
