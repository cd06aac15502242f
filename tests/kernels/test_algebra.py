"""Kernels take a loss as a record of jit functions: an edit of one of them must reach the compiled kernel."""

import shutil

import pytest

from tests.support.host.fresh import ROOT, fresh_python

pytestmark = pytest.mark.compile_only

PACKAGE, FILE = "vocab_parallel_ce", "kernels/divergences.py"
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from tests.support.kernels import compile_kernels, kernel_variants
from vocab_parallel_ce.kernels import divergences
from vocab_parallel_ce.losses.divergences import DivergenceOptions

assert divergences.__file__.startswith(PLACE)
variants = kernel_variants.of_divergence("bf16", False, DivergenceOptions())
outputs = next(variant for variant in variants if variant.name.startswith("divergence_outputs"))
print(triton.compile(compile_kernels.source_of(outputs), target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
EDITS = {  # of functions of the algebra: of one itself, and of one that another calls
    "loss": ("student_log = tl.log(stats.student_sum)\n", "student_log = tl.log(stats.student_sum) + 12345.0\n"),
    "moved": ("tl.where(weight_sum == 0, 0.0, weight_sum", "tl.where(weight_sum == 0, 12345.0, weight_sum"),
}
NUMBER = "0f4640E400"  # 12345


def test_an_edited_function_of_an_algebra_is_compiled_again(tmp_path):
    """Triton's cache on disk would return what was compiled before the edit, which has the same name."""
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / PACKAGE / FILE
    original = path.read_text(encoding="utf-8")

    def compiled(text):
        path.write_text(text, encoding="utf-8")
        variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        variables |= {"TRITON_INTERPRET": "0", "PYTHONDONTWRITEBYTECODE": "1"}
        result = fresh_python("-c", f"PLACE = {str(tmp_path)!r}\n{COMPILE}", cwd=tmp_path, **variables)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert NUMBER not in compiled(original)
    for old, new in EDITS.values():
        assert original.count(old) == 1
        assert NUMBER in compiled(original.replace(old, new))
