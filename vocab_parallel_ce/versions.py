"""The release, the oldest torch and Triton that it runs with, and the tests that ran with each pair."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

__version__ = "0.3.0"

LOWEST_TORCH = "2.11"
LOWEST_TRITON = "3.6"
NOT_RUN = "not run"


class Tested(NamedTuple):
    """A torch with its Triton, and the outcome of the tests with them."""

    torch: str
    triton: str
    python: str
    quick: str  # bash scripts/test_versions.sh TORCH TRITON
    compile_only: str  # the same
    gpu: str


TESTED = (
    Tested("2.11.0", "3.6.0", "3.11", "242 passed", "6 passed", "H100, H200"),
    Tested("2.13.0", "3.7.1", "3.10, 3.11, 3.13", "242 passed", "6 passed", NOT_RUN),
    Tested("2.14.1", "3.8.0", "3.11", "242 passed", "6 passed", NOT_RUN),
    Tested("2.15.0", "3.9.0", "3.11", "218 passed", "4 passed", NOT_RUN),
)


def minor(version: str) -> str:
    """Return ``"2.11"`` for ``"2.11.0a0+git1234"``; ``""`` if the version has no such beginning."""
    match = re.match(r"\d+\.\d+", version)
    return "" if match is None else match[0]


@lru_cache(maxsize=16)
def is_older(version: str, lowest: str) -> bool:
    """Return whether ``version`` is below ``lowest``, a minor version. What cannot be read is not."""
    numbers = minor(version).split(".")
    return numbers != [""] and [int(n) for n in numbers] < [int(n) for n in lowest.split(".")]


def require_torch(version: str) -> None:
    """Raise ImportError with the remedy if ``version`` of torch is too old."""
    if is_older(version, LOWEST_TORCH):
        raise ImportError(
            f"torch: vocab_parallel_ce needs {LOWEST_TORCH} or newer, got {version}; "
            f"upgrade it: pip install 'torch>={LOWEST_TORCH}'"
        )


def how_tested(torch: str, triton: str | None) -> str:
    """Say whether the package's tests ran with this torch and this Triton; the patch version does not count."""
    rows = {(minor(row.torch), minor(row.triton)): row for row in TESTED}
    by_torch = {minor(row.torch): row for row in TESTED}
    row = by_torch.get(minor(torch)) if triton is None else rows.get((minor(torch), minor(triton)))
    what = f"torch {minor(torch)} with triton {minor(triton or '') or 'none'}"
    if row is None:
        return f"{what}: not tested; tested are {', '.join(f'{one} with {other}' for one, other in rows)}"
    return f"{what}: tested{', on a CPU only' if row.gpu == NOT_RUN and triton is not None else ''}"
