"""Triton can bind the arguments of each kernel, which otherwise only a launch on a GPU shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MAKE_BINDERS = """
import importlib
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

backend = make_backend(GPUTarget("cuda", 90, 32))
for name in ("online_softmax", "cross_entropy", "loss", "element_mul", "one_pass"):
    module = importlib.import_module(f"vocab_parallel_ce.kernels.{name}")
    kernel = getattr(module, f"{name}_kernel")
    assert isinstance(kernel, JITFunction), kernel
    create_function_from_signature(kernel.signature, kernel.params, backend)
    print(name)
"""


@pytest.mark.compile_only
def test_no_argument_of_a_kernel_is_one_of_tritons():
    """``options`` was one: everything compiled, and every launch on a GPU raised a SyntaxError."""
    result = subprocess.run(
        [sys.executable, "-c", MAKE_BINDERS],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == 5
