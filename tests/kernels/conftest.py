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


@pytest.fixture(autouse=True, scope="module")
def _interpreter_patches_once():
    """Let the interpreter patch triton.language once per launch and module, not per call.

    That halves the time of these tests.
    """
    if COMPILED:
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launch, patched = interpreter.GridExecutor.__call__, set()

    def patched_launch(executor, *args, **kwargs):
        patched.clear()
        return launch(executor, *args, **kwargs)

    def call(function, *args, **kwargs):
        module = function.fn.__module__
        if module not in patched:
            patched.add(module)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", patched_launch)
        patch.setattr(interpreter.InterpretedFunction, "__call__", call)
        yield
