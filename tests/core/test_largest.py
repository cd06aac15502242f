"""The largest logits of rows by the maxima of tiles, against a sort of the whole row: of equal logits the first."""

import pytest
import torch

from vocab_parallel_ce import VocabShard, largest, sampling_threshold
from vocab_parallel_ce.api import sampling
from vocab_parallel_ce.api.top_k import _local_sums

pytestmark = pytest.mark.reference
NAN, INF = float("nan"), float("inf")


def rows_of(kind, n_columns):
    rows = torch.randn(3, n_columns)
    if kind == "equal":
        rows = (2 * rows).round()
    if kind == "excluded":
        rows[:, :-2] = -INF
    if kind == "NaN":
        rows = rows.bfloat16()
        rows[0, 5], rows[1, -1] = NAN, INF
    return rows


@pytest.mark.parametrize("kind", ("normal", "equal", "excluded", "NaN"))
@pytest.mark.parametrize(("n_columns", "k"), ((300, 1), (1024, 3), (4999, 7), (5000, 300), (20001, 8)))
def test_columns_and_values(kind, n_columns, k):
    rows = rows_of(kind, n_columns)
    values, columns = rows.sort(dim=-1, descending=True, stable=True)
    if (kind, k) != ("NaN", 300):  # there a row with NaN has any columns
        found = largest.largest_columns(rows, k)
        assert torch.equal(found.sort().values, columns[:, :k].sort().values)
    assert torch.equal(largest.largest_values(rows, k).nan_to_num(nan=99), values[:, :k].nan_to_num(nan=99))


def test_as_many_are_compared_as_the_memory_is_planned_for():
    """Where a row is compared whole, a quarter of it was counted: four times the rows went at once."""
    assert largest.n_compared(1000, 8) == 1000
    assert largest.n_compared(100_000, 8) == 100_000 // 64 + 8 * 64


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("kind", ("normal", "equal", "excluded", "NaN"))
@pytest.mark.parametrize("top_p", (0.3, 0.9, 1.0))
def test_a_list_and_a_search_find_the_same_threshold(kind, top_p, dtype, monkeypatch):
    rows, options = rows_of(kind, 3001).to(dtype), {"top_k": 11, "top_p": top_p, "temperature": 0.7}
    listed = sampling_threshold(rows, **options)
    monkeypatch.setattr(sampling, "MOST_LISTED", 0)
    assert torch.equal(listed, sampling_threshold(rows, **options))


def test_a_nucleus_does_not_depend_on_the_default_dtype():
    """An int64 sum times a Python float has that dtype: in bf16 a third of these rows had another threshold."""
    rows = torch.randn(200, 50)
    for way in ({"top_p": 0.9}, {"top_k": 30, "top_p": 0.9}):
        want = sampling_threshold(rows, **way)
        torch.set_default_dtype(torch.bfloat16)
        try:
            assert torch.equal(sampling_threshold(rows, **way), want)
        finally:
            torch.set_default_dtype(torch.float32)


def test_a_rank_without_columns_sends_what_can_be_packed():
    """Of one row, a sum with the stride of its ids raised on that rank alone, and the others waited."""
    best = torch.zeros(1, 2, dtype=torch.int32)[:, 0]
    sums = _local_sums(torch.empty(1, 0, dtype=torch.float64), best, VocabShard(8, 8, 8), 1.0)
    assert sums.view(torch.int32).tolist() == [0, 0]
