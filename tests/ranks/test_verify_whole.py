"""Verification of ranks that all pass the whole vocabulary with a group, and nothing that says so."""

import pytest
import torch

from tests.ranks.test_verify import COLUMNS, FUNCTIONS, LINEAR, Arguments, _call, in_two_or_three_ranks
from tests.support.collectives import error_of
from vocab_parallel_ce import verify_calls


def _the_same(x):
    return x * 0 + torch.linspace(-2, 3, x.numel(), device=x.device).view_as(x)


def _errors(rank, group, function):
    """Errors of equal logits and heads: alone, with what says that they are shards, and of zeros."""
    options = [{}] if function == "transformer engine" else [{}, {"vocab_size": COLUMNS * group.size()}]
    given = [{"logits": _the_same, "weight": _the_same, "options": own} for own in options]
    given.append({"logits": lambda x: x * 0, "weight": lambda w: w * 0})
    with verify_calls():
        return [error_of(_call, function, Arguments(rank, group).changed(**changes)) for changes in given]


@in_two_or_three_ranks
@pytest.mark.parametrize("function", FUNCTIONS)
def test_whole_logits_and_heads_with_a_group_are_refused(rank_pool, impl, function):
    """Without verification the loss is too large by the logarithm of the number of ranks."""
    of_columns, n_ranks = "weight" if function in LINEAR else "logits", rank_pool.world_size
    expected = f"ValueError: {of_columns}: expected other columns on each rank, got equal values on all {n_ranks}; "
    for whole, *passed in rank_pool.run(_errors, function):
        assert whole.startswith(expected) and "group=None" in whole and "vocab_size=" in whole
        assert not any(passed)
