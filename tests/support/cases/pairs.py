"""Covering arrays: few cases in which every pair of values of two parameters occurs."""

import itertools
from collections.abc import Callable
from typing import Any


def covering(
    allowed: Callable[[dict[str, Any]], bool] = lambda case: True, **factors: tuple[Any, ...]
) -> list[dict[str, Any]]:
    """Return cases in which every pair of values of two factors occurs, by greedy choice.

    Args:
        allowed: whether there may be such a case, of which not all factors are chosen yet. Every part of an allowed
            case must be allowed, and have an allowed case that it is a part of.
    """
    names = list(factors)

    def pairs(case: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2))

    missing = set()
    for first, second in itertools.combinations(names, 2):
        pairs_of_two = itertools.product(factors[first], factors[second])
        missing |= {((first, a), (second, b)) for a, b in pairs_of_two if allowed({first: a, second: b})}
    cases = []
    while missing:
        # A pair that is missing first, then whatever covers most of the rest.
        case = dict(min(missing, key=repr))
        for name in names:
            if name not in case:
                trials = [trial for value in factors[name] if allowed(trial := {**case, name: value})]
                ordered = [{key: trial[key] for key in names if key in trial} for trial in trials]
                case = trials[max(range(len(trials)), key=lambda i: len(pairs(ordered[i]) & missing))]
        case = {name: case[name] for name in names}
        missing -= pairs(case)
        cases.append(case)
    return cases
