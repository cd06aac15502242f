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

The last number in a test's name is the seed. ``VPCE_RANDOM_CASES`` is the number of cases of logits and of linear
losses, and ``VPCE_RANDOM_FIRST`` the first seed.
"""

from typing import Any

import pytest

from tests.support.random.calls import seeds
from tests.support.random.programs import Numbers, Package, outcome, problem
from tests.support.random.wrappers import draw, must_run, relies_on_versions
from tests.support.ranks.pools import device_of, in_ranks

CASES = [(family, index) for family, n in (("logits", 90), ("linear", 25)) for index in seeds(n)]


def may_be_interpreted(params: dict[str, Any]) -> bool:
    """Those that need versions raised, because only PyTorch's own writes raise them; and some others."""
    ranks = params["rank_pool"][1] if "rank_pool" in params else 1
    return params["index"] % 10 == 0 or relies_on_versions(draw(params["family"], ranks, params["index"]))


def every_case(test: Any) -> Any:
    test = pytest.mark.interpreted(len(CASES), among=may_be_interpreted)(test)
    return pytest.mark.parametrize(("family", "index"), CASES)(test)


@every_case
def test_a_random_program_is_right_or_refused(impl_device, family, index):
    impl, device = impl_device
    case = draw(family, 1, index)
    found = problem(case, [outcome(case, Package(impl, device, case.dtype))], device)
    assert not found, f"{found} in {case}"


def outcome_in_rank(rank: int, group: Any, family: str, index: int, impl: str) -> Numbers | str:
    case = draw(family, group.size(), index)
    return outcome(case, Package(impl, device_of(rank, group), case.dtype, (rank,), group))


@every_case
@in_ranks()
def test_a_random_program_of_two_ranks_is_right_or_refused(rank_pool, impl, family, index):
    case = draw(family, 2, index)
    results = rank_pool.run(outcome_in_rank, family, index, impl)
    # PyTorch's own results come from the same device: a product of bf16 rounds otherwise elsewhere.
    found = problem(case, results, "cuda" if rank_pool.backend == "nccl" else "cpu")
    assert not found, f"{found} in {case}"


@pytest.mark.parametrize("ranks", (1, 2))
def test_few_programs_may_be_refused(ranks):
    drawn = [draw("logits", ranks, index) for index in range(60)]
    assert sum(map(must_run, drawn)) >= 0.6 * len(drawn)
