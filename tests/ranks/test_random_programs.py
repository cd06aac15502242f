"""Random programs around a loss: every number is right in fp64, or there is an error.

A program is a model's few operations, one or two losses, other users of what the losses read, wrappers with
saved-tensor hooks, and an order of ``backward`` calls; ``support/random/wrappers.py`` draws it. PyTorch plays
the same program without wrappers, with its own cross-entropy over the whole vocabulary, in fp64 for the truth
and in the same dtype for the budget.

README documents these as not safe, and no case has them:

- a mode asked for by name (``in_forward``, ``in_backward``, ``overwrite_input=True``) under saved-tensor
  hooks, if somebody else uses the logits;
- a read of the logits after a call in ``in_forward`` (TransformerEngine's default of a mean) or after a
  backward in place, an optimizer's step on such logits included;
- hooks that keep a tensor as it is, around another operation that saves the logits and not around the loss.

``VPCE_RANDOM_CASES`` is the number of cases, ``VPCE_RANDOM_FIRST`` the first of them.
"""

import itertools
import os
from collections import Counter
from typing import Any

import pytest
import torch

from tests.support.random.programs import Numbers, Package, outcome, problem
from tests.support.random.wrappers import Case, draw, relies_on_versions
from tests.support.ranks.pools import device_of, in_ranks

N_CASES = {"logits": 60, "linear": 25}
N_COMPILED = {"logits": 30, "linear": 15}  # on a GPU
N_INTERPRETED = {"logits": 6, "linear": 2}
LEAST_SHARE = 0.6  # of cases that give numbers
ENOUGH = 40  # cases to speak of a share
SECONDS_PER_CASE = 3.0
ASKED_FOR = int(os.environ.get("VPCE_RANDOM_CASES", "0"))
FIRST = int(os.environ.get("VPCE_RANDOM_FIRST", "0"))
SECONDS = max(240.0, SECONDS_PER_CASE * ASKED_FOR)

pytestmark = pytest.mark.timeout(SECONDS + 60)


def cases(family: str, ranks: int, impl: str) -> list[Case]:
    """The first cases; interpreted, where each is slow, the first that need versions raised.

    The reference writes with PyTorch, which raises them. Kernels do not.
    """
    is_interpreted = impl == "triton" and not torch.cuda.is_available()
    default = N_CASES[family]
    if is_interpreted:
        default = max(N_INTERPRETED[family] // ranks, 1)
    elif impl == "triton":
        default = N_COMPILED[family]
    drawn = (draw(family, ranks, index) for index in itertools.count(FIRST))
    if is_interpreted and family == "logits":
        drawn = filter(relies_on_versions, drawn)
    return list(itertools.islice(drawn, ASKED_FOR or default))


def outcomes_in_rank(rank: int, group: Any, family: str, indices: list[int], impl: str) -> list[Numbers | str]:
    device, ranks = device_of(rank, group), group.size()
    drawn = (draw(family, ranks, index) for index in indices)
    return [outcome(case, Package(impl, device, case.dtype, (rank,), group)) for case in drawn]


def check(drawn: list[Case], results: list[list[Numbers | str]], device: Any = "cpu") -> None:
    """``results[case][rank]`` are right or refusals, and not too many of these."""
    problems = []
    for case, of_ranks in zip(drawn, results, strict=True):
        found = problem(case, of_ranks, device)
        if found:
            index = case.name.rpartition("-")[2]
            problems.append(f"{found}\n  VPCE_RANDOM_FIRST={index} VPCE_RANDOM_CASES=1 for {case}")
    # Without a tensor's shape, and what autograd says after it.
    messages = (result[0] for result in results if isinstance(result[0], str))
    refusals = Counter(message.partition("(one of")[0].partition("[")[0] for message in messages)
    n_right = len(drawn) - refusals.total() - len(problems)
    print(f"{len(drawn)} cases: {n_right} right, {refusals.total()} refused, {len(problems)} problems")
    for message, count in refusals.most_common():
        print(f"  {count} x {message}")
    assert not problems, f"{len(problems)} of {len(drawn)} cases:\n" + "\n".join(problems)
    assert len(drawn) < ENOUGH or n_right >= LEAST_SHARE * len(drawn), refusals


@pytest.mark.parametrize("family", ("logits", "linear"))
def test_a_random_program_is_right_or_refused(impl_device, family):
    impl, device = impl_device
    drawn = cases(family, 1, impl)
    check(drawn, [[outcome(case, Package(impl, device, case.dtype))] for case in drawn], device)


@pytest.mark.parametrize("family", ("logits", "linear"))
@in_ranks()
def test_a_random_program_of_two_ranks_is_right_or_refused(rank_pool, impl, family):
    drawn = cases(family, 2, impl)
    indices = [int(case.name.rpartition("-")[2]) for case in drawn]
    of_ranks = rank_pool.run(outcomes_in_rank, family, indices, impl, timeout=SECONDS)
    # PyTorch's own results come from the same device: a product of bf16 rounds otherwise elsewhere.
    device = "cuda" if rank_pool.backend == "nccl" else "cpu"
    check(drawn, [list(results) for results in zip(*of_ranks, strict=True)], device)
