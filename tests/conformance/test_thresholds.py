"""The thresholds of samplers at the edges of numbers, in another rounding of the logits, and above all of them."""

from functools import partial

import pytest
import torch

from tests.conformance.test_sampling import INF, Sampling, kept_by
from tests.support.cases.flat import linear_objective, linear_token_log_probs
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import in_ranks
from vocab_parallel_ce import VocabShard, sampling_threshold, token_log_probs

EPS, TINY, MAX = 2.0**-23, 2.0**-149, torch.finfo(torch.float32).max
# Rows, top_k, and the threshold.
EDGES = {
    "adjacent": ([1.0, 1.0 + EPS], 1, 1.0 + EPS),
    "adjacent, the other to even": ([1.0 + EPS, 1.0 + 2 * EPS], 1, 1.0 + 2 * EPS),
    "adjacent and negative": ([-1.0 - EPS, -1.0], 1, -1.0),
    "adjacent subnormal numbers": ([TINY, 2 * TINY], 1, 2 * TINY),
    "the smallest number": ([0.0, TINY], 1, TINY),
    "its negative": ([-0.0, -TINY], 1, 0.0),
    "huge": ([1.5 * 2.0**127, 2.0**127], 1, 1.25 * 2.0**127),
    "huge of both signs": ([MAX, -MAX], 1, 0.0),
    "-inf below": ([2.0, -INF, -INF], 1, -INF),
    "-inf kept": ([2.0, -INF, -INF], 2, -INF),
    "equal": ([2.0, 2.0, 1.0], 1, 1.5),
    "nothing dropped": ([2.0, 2.0, 2.0], 1, -INF),
}


@pytest.mark.reference
@pytest.mark.parametrize("is_listed", (False, True))
@pytest.mark.parametrize("name", EDGES)
def test_between_any_two_numbers(name, is_listed, monkeypatch):
    if not is_listed:
        monkeypatch.setattr("vocab_parallel_ce.api.sampling.MOST_LISTED", 0)
    row, top_k, expected = EDGES[name]
    found = sampling_threshold(torch.tensor([row]), top_k=top_k)
    assert found.tolist() == [expected] and not str(found.item()).startswith("-0")


@pytest.mark.reference
@pytest.mark.parametrize("way", ({"top_k": 1}, {"top_k": 50}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.5}), ids=str)
def test_a_head_of_fp32_logits_keeps_what_bf16_logits_kept(way):
    """The last kept logit as threshold dropped it when it was rounded down: half of the rows of top_k=1 were NaN."""
    hidden, weight = torch.randn(2000, 64).bfloat16(), (torch.randn(1000, 64) * 0.3).bfloat16()
    logits = hidden @ weight.t()
    threshold = sampling_threshold(logits, **way)
    kept = kept_by(logits, Sampling(way.get("top_k"), way.get("top_p", 1.0)))
    last = logits.double().masked_fill(~kept, INF).argmin(-1)
    found = linear_token_log_probs(hidden, weight, last, threshold=threshold, logits_dtype=torch.float32)
    z = hidden.double() @ weight.double().t()
    expected = z.masked_fill(~kept, -INF).log_softmax(-1).gather(-1, last.unsqueeze(-1)).squeeze(-1)
    # What rounds to the last kept logit is kept; nothing else may be.
    assert found.isfinite().all() and torch.allclose(found.double(), expected, atol=1e-4)


@pytest.mark.reference
@pytest.mark.parametrize("top_k", (None, 500, -1, 0))
def test_a_share_that_fp32_rounds_to_1_and_the_top_k_of_vllm_leave_all(top_k):
    """vLLM holds top_p in fp32. Here exponentials of less than 2**-40 count 0: their logits went, of any mass."""
    logits = torch.randn(20, 1000) * 10
    expected = sampling_threshold(logits, top_k=top_k or None if top_k != -1 else None)
    if top_k in (None, -1, 0):
        assert (expected == -INF).all()
    for top_p in (1 - 1e-8, 1 - 1e-12, 1 - 2.0**-25):
        assert torch.equal(sampling_threshold(logits, top_k=top_k, top_p=top_p), expected)
    assert (sampling_threshold(logits, top_k=top_k, top_p=1 - 2.0**-24) > expected).any()


LOGITS = torch.tensor([[3.0, 1.0, 0.0, -1.0], [2.0, 0.0, 1.0, 0.0], [-INF, -INF, -INF, -INF]])
LABELS, ABOVE = torch.tensor([0, 1, 0]), torch.tensor([3.5, 2.0, -INF])
MESSAGE = "threshold: must leave a logit above -inf in each row, got 1 that leave none, the first 3.5; "


def calls(logits, labels, **given):
    """The functions that take a threshold."""
    weight, hidden = torch.eye(logits.shape[-1]), logits.clamp(min=-9.0)
    return (
        partial(token_log_probs, logits, labels, **given),
        partial(linear_token_log_probs, hidden, weight, labels, **given),
        partial(linear_token_log_probs, hidden.requires_grad_(), weight, labels, chunk_size=1, **given),
        partial(linear_objective, hidden, weight, labels, lambda log_probs: -log_probs, **given),
    )


@pytest.mark.reference
def test_a_row_with_nothing_kept_says_so_on_a_cpu():
    """NaN otherwise: a row of -inf, and on devices where looking would wait."""
    for call in calls(LOGITS, LABELS, threshold=ABOVE, impl="reference"):
        assert error_of(call).startswith(f"ValueError: {MESSAGE}")
    ignored = token_log_probs(LOGITS, LABELS.masked_fill(LABELS == 0, -100), threshold=ABOVE)
    assert ignored.tolist() == [0.0, -INF, 0.0]
    assert token_log_probs(LOGITS, LABELS, threshold=ABOVE.clamp(max=3.0))[[0, 2]].isnan().tolist() == [False, True]
    assert token_log_probs(LOGITS.to("meta"), LABELS.to("meta"), threshold=ABOVE.to("meta")).is_meta


def _above_on_ranks(rank, group):
    columns = slice(2 * rank, 2 * rank + 2)
    shard = {"group": group, "vocab_size": VocabShard(columns.start, columns.stop, 4), "impl": "reference"}
    call = partial(token_log_probs, LOGITS[:, columns], LABELS, **shard)
    return [error_of(partial(call, threshold=each)) for each in THRESHOLDS]


THRESHOLDS = (ABOVE, torch.tensor([3.0, 2.0, -INF]))  # of which one is above one rank's logits alone


@in_ranks((2,), (), ())
def test_all_ranks_say_so_alike(rank_pool, impl):
    for above, below in rank_pool.run(_above_on_ranks):
        assert above.startswith(f"ValueError: {MESSAGE}") and below is None
