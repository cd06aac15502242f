"""What launchers make of options; no GPU is needed to look at it."""

import pytest

from vocab_parallel_ce.kernels.launch import option_arguments
from vocab_parallel_ce.spec import LossOptions

pytestmark = pytest.mark.reference


def test_an_option_that_is_off_is_none():
    """None is a constant of a compiled kernel, 0 and 1 as floats are not: the option's code would stay."""
    assert option_arguments(LossOptions(7)) == (7, None, None, None, None, None, None)
    assert option_arguments(LossOptions(7, 0.0, 0.0, 1.0, None)) == (7, *[None] * 6)
    every = LossOptions(-100, 0.1, 1e-4, 0.5, 30.0, True, True)
    assert option_arguments(every) == (-100, 0.1, 1e-4, 0.5, 30.0, 1, 1)


def test_numbers_keep_the_types_that_launches_are_compiled_for():
    """A float would be a new argument type, and True another kernel than 1."""
    arguments = option_arguments(LossOptions(-100, 1.0, 1.0, 2.0, 1.0, True, True))
    assert [type(argument) for argument in arguments] == [int, float, float, float, float, int, int]
