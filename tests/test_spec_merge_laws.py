"""``merge`` is a commutative monoid: ranks may be combined in any grouping and order."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from tests.support.budget import assert_fp64_equal
from vocab_parallel_ce import spec
from vocab_parallel_ce.spec import RowStats

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies

pytestmark = pytest.mark.reference

NAN, INF = float("nan"), float("inf")
# Wide enough that one shard's exponentials vanish beside another's.
LOGIT = st.one_of(st.floats(-30, 30), st.floats(-1e4, 1e4), st.just(-INF), st.just(0.0), st.just(-0.0))
SHARD = st.lists(LOGIT, min_size=1, max_size=5)
laws = hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)


def _stats(columns, label=None):
    logits = torch.tensor([columns], dtype=torch.float64)
    labels = torch.tensor([-1 if label is None else label])
    return spec.local_stats(logits, labels, 0)


def _identity():
    return RowStats(*(torch.tensor([x], dtype=torch.float64) for x in (-INF, 0.0, -INF, 0.0)))


def _assert_equal(a, b):
    for name, x, y in zip(RowStats._fields, a, b, strict=True):
        assert torch.equal(x.nan_to_num(7.5), y.nan_to_num(7.5)), f"{name}: {x} and {y}"
        assert torch.equal(x.isnan(), y.isnan()), f"{name}: {x} and {y}"


def _assert_close(a, b, magnitude):
    """Equal up to the rounding of a handful of additions of terms no larger than ``magnitude``."""
    assert torch.equal(a.row_max, b.row_max) and torch.equal(a.target_logit, b.target_logit)
    assert_fp64_equal(a.sum_exp, b.sum_exp, float(a.sum_exp.max()))
    assert_fp64_equal(a.logit_sum, b.logit_sum, magnitude)


def _magnitude(*shards):
    return 1 + sum(abs(x) for shard in shards for x in shard if x != -INF)


@laws
@hypothesis.given(SHARD, st.integers(0, 5))
def test_the_empty_set_is_the_identity(shard, label):
    stats = _stats(shard, label)
    _assert_equal(spec.merge(stats, _identity()), stats)
    _assert_equal(spec.merge(_identity(), stats), stats)
    _assert_equal(spec.merge(_identity(), _identity()), _identity())


@laws
@hypothesis.given(SHARD, SHARD)
def test_merge_is_commutative_bit_for_bit(a, b):
    _assert_equal(spec.merge(_stats(a, 0), _stats(b)), spec.merge(_stats(b), _stats(a, 0)))


@laws
@hypothesis.given(SHARD, SHARD, SHARD)
def test_merge_is_associative(a, b, c):
    x, y, z = _stats(a), _stats(b, 0), _stats(c)
    _assert_close(spec.merge(spec.merge(x, y), z), spec.merge(x, spec.merge(y, z)), _magnitude(a, b, c))


@laws
@hypothesis.given(SHARD, SHARD)
def test_merge_is_the_statistics_of_the_union(a, b):
    _assert_close(spec.merge(_stats(a, 0), _stats(b)), _stats(a + b, 0), _magnitude(a, b))


@laws
@hypothesis.given(st.lists(SHARD, min_size=2, max_size=4))
def test_any_order_of_ranks_gives_the_same(shards):
    known = [_stats(shard, 0 if rank == 1 else None) for rank, shard in enumerate(shards)]
    first = functools.reduce(spec.merge, known)
    for order in itertools.permutations(known):
        _assert_close(functools.reduce(spec.merge, order), first, _magnitude(*shards))


@laws
@hypothesis.given(
    st.lists(st.lists(st.integers(-4000, 4000), min_size=1, max_size=5), min_size=2, max_size=3),
    st.sampled_from([2.0**30, -(2.0**30)]),
)
def test_a_shift_moves_the_maximum_and_nothing_else(shards, shift):
    """A maximum that began at 0 instead of -inf would lose rows far below 0."""
    shards = [[x / 16 for x in shard] for shard in shards]
    moved = functools.reduce(spec.merge, (_stats([x + shift for x in s], 0) for s in shards))
    plain = functools.reduce(spec.merge, (_stats(s, 0) for s in shards))
    assert torch.equal(moved.row_max, plain.row_max + shift)
    assert torch.equal(moved.sum_exp, plain.sum_exp)
    assert torch.equal(moved.target_logit, plain.target_logit + shift)


@laws
@hypothesis.given(SHARD, st.integers(1, 4))
def test_shards_excluded_throughout_add_nothing(shard, width):
    """exp(-inf - -inf) is NaN: the maximum of an excluded shard must not be subtracted as it is."""
    excluded = _stats([-INF] * width)
    assert excluded.sum_exp.item() == 0.0
    stats = _stats(shard, 0)
    for merged in (spec.merge(stats, excluded), spec.merge(excluded, stats)):
        _assert_equal(merged._replace(logit_sum=stats.logit_sum), stats)
        assert merged.logit_sum.item() == -INF


@laws
@hypothesis.given(SHARD, st.sampled_from([NAN, INF]), st.booleans())
def test_nan_and_plus_infinity_survive_every_merge(shard, bad, first):
    pair = (_stats([bad, 1.0]), _stats(shard, 0))
    merged = spec.merge(*(pair if first else reversed(pair)))
    assert spec.loss(merged, torch.tensor([0]), len(shard) + 2).isnan().all()
