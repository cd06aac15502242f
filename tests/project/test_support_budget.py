"""The error budget accepts PyTorch's own error and fails on anything larger."""

from __future__ import annotations

import re

import pytest
import torch

from tests.support.budget import K, assert_fp64_equal, assert_within_budget

ORACLE = torch.tensor([[1.0, -2.0], [0.25, 8.0]], dtype=torch.float64)
EPS = torch.finfo(torch.bfloat16).eps


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16)


def test_the_same_computation_passes():
    assert_within_budget(_bf16(ORACLE), ORACLE, _bf16(ORACLE))


def test_an_error_at_the_limit_passes_and_just_above_it_fails():
    oracle = torch.tensor([1.0, 0.0], dtype=torch.float64)
    peer = torch.tensor([1.0, 2.0**-20], dtype=torch.float32)
    eps = torch.finfo(torch.float32).eps
    limit = K * (2.0**-20 + eps)
    assert_within_budget(torch.tensor([1.0, limit]), oracle, peer)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within_budget(torch.tensor([1.0, limit * 1.001]), oracle, peer)


def test_an_error_twice_the_budget_fails_with_the_worst_element_of_all_three():
    actual = _bf16(ORACLE).clone()
    actual[1, 0] += 2 * K * EPS * 8
    with pytest.raises(AssertionError) as failure:
        assert_within_budget(actual, ORACLE, _bf16(ORACLE))
    message = str(failure.value)
    assert "at (1, 0)" in message
    assert re.search(r"actual 0\.5\d*, oracle 0\.25, same dtype 0\.25", message), message


def test_a_peer_that_is_wrong_widens_the_budget_only_by_its_own_error():
    peer = ORACLE.float() + 1e-3
    assert_within_budget(ORACLE.float() - 1e-3, ORACLE, peer)
    with pytest.raises(AssertionError):
        assert_within_budget(ORACLE.float() - 3e-3, ORACLE, peer)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_element_where_the_oracle_is_finite_fails(value):
    actual = ORACLE.float().clone()
    actual[0, 1] = value
    with pytest.raises(AssertionError, match=r"non-finite elements differ; first at \(0, 1\)"):
        assert_within_budget(actual, ORACLE, ORACLE.float())


@pytest.mark.parametrize("truth", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_oracle_must_be_matched_exactly(truth):
    oracle = ORACLE.clone()
    oracle[0, 0] = truth
    assert_within_budget(oracle.float(), oracle, oracle.float())
    for other in (0.0, 3e38, float("nan"), float("inf"), float("-inf")):
        actual = oracle.float()
        actual[0, 0] = other
        if torch.equal(actual.nan_to_num(7.5), oracle.float().nan_to_num(7.5)):
            continue
        with pytest.raises(AssertionError, match="non-finite"):
            assert_within_budget(actual, oracle, oracle.float())


def test_a_peer_that_overflows_does_not_excuse_anything():
    peer = ORACLE.float().clone()
    peer[1, 1] = float("inf")
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within_budget(ORACLE.float() * 1.1, ORACLE, peer)


def test_mismatched_dtype_shape_or_oracle_fails():
    with pytest.raises(AssertionError, match="dtype"):
        assert_within_budget(ORACLE.float(), ORACLE, _bf16(ORACLE))
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(ORACLE.float()[:1], ORACLE, ORACLE.float())
    with pytest.raises(AssertionError, match="shape"):
        assert_within_budget(ORACLE[:1].float().squeeze(0), ORACLE[:1], ORACLE[:1].float())
    with pytest.raises(AssertionError, match="float64"):
        assert_within_budget(ORACLE.float(), ORACLE.float(), ORACLE.float())


def test_scalars_and_empty_tensors_are_compared_too():
    one = torch.tensor(1.0, dtype=torch.float64)
    assert_within_budget(one.float(), one, one.float())
    with pytest.raises(AssertionError, match="exceeds"):
        assert_within_budget(one.float() + 1e-3, one, one.float())
    empty = torch.empty(0, 3, dtype=torch.float64)
    assert_within_budget(empty.float(), empty, empty.float())


def test_fp64_computations_may_differ_by_rounding_of_their_magnitude_only():
    expected = torch.tensor([1.0, float("nan"), float("-inf")], dtype=torch.float64)
    rounding = torch.tensor([1e-14, 0.0, 0.0], dtype=torch.float64)
    assert_fp64_equal(expected + rounding, expected, 1.0)
    with pytest.raises(AssertionError):
        assert_fp64_equal(expected + 10 * rounding, expected, 1.0)
    assert_fp64_equal(expected + 10 * rounding, expected, 100.0)
    with pytest.raises(AssertionError):
        assert_fp64_equal(expected.nan_to_num(0.0), expected, 1.0)
    with pytest.raises(AssertionError, match="float32"):
        assert_fp64_equal(expected.float(), expected.float(), 1.0)
