"""How many programs a row has: set for a test, because only wide rows have several by themselves."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from vocab_parallel_ce import blocks, one_pass, plan
from vocab_parallel_ce.head import plan as head_plan

MANY = 1 << 30
ONE, SEVERAL, BY_SIZE = "uncut rows", "rows in parts", "rows as they are"
LIMITS: dict[str, dict[str, Any]] = {
    BY_SIZE: {},
    ONE: {"CUT_PARTS": MANY, "PROGRAMS_OF_FEW_ROWS": 0, "AT_ONCE_ROWS": 0},
    SEVERAL: {"CUT_ROWS": MANY, "CUT_PARTS": 2, "PROGRAMS_OF_FEW_ROWS": MANY, "AT_ONCE_ROWS": MANY},
}
FEWEST_ROWS = {BY_SIZE: one_pass.FEWEST_ROWS, ONE: ((MANY, 0),), SEVERAL: ((MANY, MANY),)}  # of one_pass


@contextmanager
def programs(kind: str) -> Iterator[None]:
    """Let rows have ONE program, of gradients one per few tiles; or SEVERAL; or BY_SIZE, as outside of tests."""
    with _limits(**LIMITS[kind]), patch.object(one_pass, "FEWEST_ROWS", FEWEST_ROWS[kind]):
        yield


@contextmanager
def programs_by_rows() -> Iterator[None]:
    """Let 1 or 2 rows have a program per part, 3 or 4 read several parts at once if options allow, others neither."""
    with _limits(CUT_ROWS=2, CUT_PARTS=2, PROGRAMS_OF_FEW_ROWS=8, AT_ONCE_ROWS=4):
        yield


@contextmanager
def _limits(**limits: Any) -> Iterator[None]:
    try:
        with patch.multiple(blocks, **limits) if limits else nullcontext():
            _forget_shapes()
            yield
    finally:
        _forget_shapes()


def _forget_shapes() -> None:
    blocks.statistics_shape.cache_clear()
    blocks.gradient_shape.cache_clear()
    forget_plans()


def forget_plans() -> None:
    """Let the next call make its plan again."""
    plan._cached_plan.cache_clear()
    plan._kinds.forget()
    head_plan._kinds.forget()
