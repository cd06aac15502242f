"""``merge`` is a commutative monoid: ranks may be combined in any grouping and order."""

from __future__ import annotations

import itertools

import pytest
import torch

from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import RowStats

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies

pytestmark = pytest.mark.reference

INF = float("inf")
VOCAB = 100
LABEL = 0
# Wide enough that one shard's exponentials vanish beside another's; few enough values for ties.
LOGIT = st.one_of(st.floats(-30, 30), st.floats(-1e4, 1e4), st.integers(-1, 1).map(float), st.just(-INF), st.just(-0.0))
SHARD = st.lists(LOGIT, min_size=1, max_size=5)
laws = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)


def _stats(columns, start=0):
    """Of one row with the label 0, which the shard at 0 alone owns."""
    logits = torch.tensor([columns], dtype=torch.float64)
    return spec.local_stats(logits, torch.tensor([LABEL]), start, VOCAB)


def _stats_of(*shards):
    """Of shards that follow one another in the vocabulary."""
    starts = itertools.accumulate(map(len, shards), initial=0)
    return [_stats(shard, start) for shard, start in zip(shards, starts, strict=False)]


def _assert_equal(a, b):
    for name, x, y in zip(RowStats._fields, a, b, strict=True):
        assert torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)), f"{name}: {x} and {y}"
        assert torch.equal(x.isnan(), y.isnan()), f"{name}: {x} and {y}"


def _assert_close(a, b):
    """Equal up to the rounding of a handful of additions of terms of one sign."""
    for name in ("row_max", "label_logit", "n_columns", "argmax"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for name in ("others_sum", "shifted_sum", "exp_shifted_sum"):
        x, y = getattr(a, name), getattr(b, name)
        # Of 20 columns none adds more than 1 to others_sum, or 1 / e to exp_shifted_sum.
        magnitude = float(y.abs()) if name == "shifted_sum" and y.isfinite() else 20.0
        torch.testing.assert_close(x, y, rtol=0, atol=64 * torch.finfo(x.dtype).eps * magnitude, equal_nan=True)


@laws
@hypothesis.given(SHARD, SHARD)
def test_merge_is_commutative_bit_for_bit(a, b):
    x, y = _stats_of(a, b)
    _assert_equal(spec.merge(x, y), spec.merge(y, x))


@laws
@hypothesis.given(SHARD, SHARD, SHARD)
def test_merge_is_associative_and_gives_the_statistics_of_the_union(a, b, c):
    x, y, z = _stats_of(a, b, c)
    _assert_close(spec.merge(x, y), _stats(a + b))
    left, right = spec.merge(spec.merge(x, y), z), spec.merge(x, spec.merge(y, z))
    _assert_close(left, right)
    _assert_close(left, _stats(a + b + c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_shard_of_the_lowest_numbers(dtype):
    """The sum of its shifted logits is -inf: -inf * 0 is NaN, and moved that far, -inf would meet +inf."""
    label = torch.tensor([LABEL])
    near = spec.local_stats(torch.tensor([[3.0, 1.0]], dtype=dtype), label, 0, VOCAB)
    lowest, excluded = torch.full((1, 8), torch.finfo(dtype).min, dtype=dtype), torch.full((1, 8), -INF, dtype=dtype)
    beyond = spec.local_stats(lowest, label, 2, VOCAB)
    for merged in (spec.merge(near, beyond), spec.merge(beyond, near)):
        assert torch.equal(merged.exp_shifted_sum, near.exp_shifted_sum)
        assert torch.equal(merged.others_sum, near.others_sum)
    first, second = (spec.local_stats(x[:, :2], label, i, VOCAB) for i, x in ((0, lowest), (2, excluded)))
    for merged in (spec.merge(first, second), spec.merge(second, first)):
        assert (merged.others_sum.item(), merged.exp_shifted_sum.item()) == (1, 0)
        assert merged.shifted_sum.item() == -INF
