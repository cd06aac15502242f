"""A case says how many programs a row has."""

from contextlib import nullcontext

import pytest

from tests.support.kernels.launch_shapes import programs


@pytest.fixture(autouse=True)
def programs_of_rows(request):
    callspec = getattr(request.node, "callspec", None)
    case = callspec.params.get("case") if callspec else None
    kind = case.get("programs") if isinstance(case, dict) else None
    with nullcontext() if kind is None else programs(kind):
        yield
