"""The most probable tokens of sharded logits: ids, log-probabilities, ties, what travels."""

from functools import partial

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks, in_several_ranks

NAN, INF = float("nan"), float("inf")
COLUMNS, TOKENS = 21, 7
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def logits_of(dtype=torch.float32):
    """With equal logits in every row, at the end of the largest too, and excluded columns."""
    logits = torch.randint(-6, 6, (TOKENS, COLUMNS), generator=torch.Generator().manual_seed(0)).to(dtype) / 2
    logits[1], logits[2, 3:], logits[3, ::2] = 1.5, -INF, -INF
    return logits


def expected(logits, k, temperature=1.0):
    """From a stable sort: of equal logits the smallest id."""
    log_probs = (logits.double() / temperature).log_softmax(-1)
    ids = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return ids, log_probs.gather(-1, ids).to(torch.promote_types(logits.dtype, torch.float32))


@pytest.mark.reference
@pytest.mark.parametrize("k", (1, 4, COLUMNS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ids_and_log_probabilities(dtype, k):
    logits = logits_of(dtype).requires_grad_()
    for temperature in (1.0, 0.7, 30.0):
        found = vp.top_k(logits, k, temperature=temperature)
        truth = expected(logits.detach(), k, temperature)
        assert torch.equal(found[0], truth[0]) and found[0].dtype == torch.int64
        torch.testing.assert_close(found[1], truth[1], rtol=1e-6, atol=1e-6)
        assert not found[1].requires_grad
    padded = torch.cat([logits.detach(), torch.full_like(logits, INF)], dim=-1).view(1, TOKENS, -1)
    ids, log_probs = vp.top_k(padded, k, vocab_size=COLUMNS)
    assert ids.shape == log_probs.shape == (1, TOKENS, k)
    assert torch.equal(ids[0], truth[0])
    assert torch.equal(vp.top_k(logits.detach().t().contiguous().t(), k)[0], truth[0])


@pytest.mark.reference
def test_rows_that_are_no_numbers(monkeypatch):
    """And many rows are done in parts."""
    logits = logits_of()
    logits[0, 4], logits[1, 2], logits[2] = NAN, INF, -INF
    ids, log_probs = vp.top_k(logits, 4)
    assert log_probs[:3].isnan().all() and log_probs[3:].isfinite().all() and ((ids >= 0) & (ids < COLUMNS)).all()
    monkeypatch.setattr("vocab_parallel_ce.api.top_k.MOST_ELEMENTS", 3 * COLUMNS)
    assert torch.equal(vp.top_k(logits, 4)[0], ids)
    assert [part.shape for part in vp.top_k(logits[:0], 4)] == [(0, 4), (0, 4)]


BOUNDS = {"even": (6, 12, 18, 21), "uneven": (2, 3, 16, 21), "none": (0, 15, 15, 21), "reversed": None}


def _in_rank(rank, group, bounds, dtype, k):
    """What this rank's columns give, padded by large numbers, and the collectives."""
    n_ranks = group.size()
    if bounds is None:  # the first rank has the last columns
        stop = COLUMNS - rank * (COLUMNS // n_ranks)
        start = 0 if rank == n_ranks - 1 else stop - COLUMNS // n_ranks
    else:
        ends = [0, *bounds[: n_ranks - 1], COLUMNS]
        start, stop = ends[rank], ends[rank + 1]
    n_padded = 3 * (stop == COLUMNS)
    logits = torch.nn.functional.pad(logits_of(dtype)[:, start:stop], (0, n_padded), value=100.0)
    shard = vp.VocabShard(start, stop + n_padded, COLUMNS)
    with record_collectives() as collectives:
        ids, log_probs = vp.top_k(logits.to(device_of(rank, group)), k, group=group, vocab_size=shard, temperature=0.7)
    return ids.cpu(), log_probs.cpu(), [(call.name, call.nbytes) for call in collectives]


@pytest.mark.parametrize("bounds", BOUNDS)
@in_several_ranks
def test_the_ranks_agree(rank_pool, impl, bounds):
    """Also on more ids than a rank has columns, in one exchange."""
    for dtype, k in ((torch.float32, 5), (torch.bfloat16, COLUMNS), (torch.float64, 3)):
        truth = expected(logits_of(dtype), k, 0.7)
        results = rank_pool.run(_in_rank, BOUNDS[bounds], dtype, k)
        for ids, log_probs, collectives in results:
            assert torch.equal(ids, truth[0]) and torch.equal(log_probs, results[0][1])
            torch.testing.assert_close(log_probs, truth[1], rtol=1e-6, atol=1e-6)
            size = log_probs.dtype.itemsize
            assert collectives == [("_allgather_base_", (size * (1 + k) + 4 * k) * TOKENS)]


def _teacher_and_verified(rank, group):
    """The loss of a student over whole logits, from a teacher that is cut; what other numbers on each rank raise."""
    width = COLUMNS // group.size() + 1
    own = logits_of()[:, width * rank : width * (rank + 1)]
    on = {"group": group, "vocab_size": COLUMNS}
    loss = vp.distillation_loss(torch.zeros(TOKENS, COLUMNS), vp.TopKTeacher(*vp.top_k(own, 3, **on), "bucket"))
    with vp.verify_calls():
        same = vp.top_k(own, 3, **on)
        errors = [error_of(lambda: vp.top_k(own, 3 + rank, **on))]
        overlapping = {"vocab_size": vp.VocabShard(0, width, COLUMNS)}
        for find in (partial(vp.top_k, k=3, group=group), partial(vp.sampling_threshold, top_k=3, group=group)):
            errors += [error_of(find, logits_of()), error_of(partial(find, **overlapping), logits_of()[:, :width])]
        return loss, same, errors


@in_ranks((2,), (), ())
def test_it_makes_a_teacher_and_is_verified(rank_pool, impl):
    whole = vp.TopKTeacher(*expected(logits_of(), 3), "bucket")
    truth = vp.distillation_loss(torch.zeros(TOKENS, COLUMNS), whole)
    refused = [
        "logits: expected other columns on each rank",
        "vocab_size: shards must have every column of [0, 21)",
    ] * 2
    for loss, same, errors in rank_pool.run(_teacher_and_verified):
        torch.testing.assert_close(loss, truth)
        assert torch.equal(same[0], whole.ids)
        assert errors.pop(0) == "ValueError: k: rank 1 of 2 has 4, rank 0 has 3"
        for error, start in zip(errors, refused, strict=True):
            assert error and error.startswith(f"ValueError: {start}"), error


@pytest.mark.reference
def test_compiled_code_has_the_same_ids():
    logits = torch.randn(2, 6)
    compiled = torch.compile(lambda x: vp.top_k(x, 2)[0] + 1, backend="eager")
    assert torch.equal(compiled(logits), vp.top_k(logits, 2)[0] + 1)
