"""Covering arrays: few cases in which every pair of values of two parameters occurs."""

import itertools
from typing import Any


def covering(**factors: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Return cases in which every pair of values of two factors occurs, by greedy choice."""
    names = list(factors)

    def pairs(case: dict[str, Any]) -> set[Any]:
        return set(itertools.combinations(case.items(), 2))

    missing = set()
    for first, second in itertools.combinations(names, 2):
        missing |= {((first, a), (second, b)) for a in factors[first] for b in factors[second]}
    cases = []
    while missing:
        # A pair that is missing first, then whatever covers most of the rest.
        case = dict(min(missing, key=repr))
        for name in names:
            if name not in case:
                trials = [{**case, name: value} for value in factors[name]]
                ordered = [{key: trial[key] for key in names if key in trial} for trial in trials]
                case = trials[max(range(len(trials)), key=lambda i: len(pairs(ordered[i]) & missing))]
        case = {name: case[name] for name in names}
        missing -= pairs(case)
        cases.append(case)
    return cases
