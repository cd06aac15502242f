"""The device that kernels run on in this process: a GPU, or the CPU under Triton's interpreter."""

import pytest

from tests.conftest import HOST

COMPILED = bool(HOST.gpu_count) and not HOST.interprets


@pytest.fixture(
    params=[
        pytest.param("cuda", marks=pytest.mark.cuda)
        if COMPILED
        else pytest.param("cpu", id="interpreter", marks=pytest.mark.interpreter)
    ]
)
def kernel_device(request: pytest.FixtureRequest) -> str:
    return request.param
