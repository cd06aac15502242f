"""Who imports whom, and what importing the package costs."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.architecture import PACKAGE, violations

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / PACKAGE

# What a module that a rule concerns must not say, and a word of the rule it breaks.
PLANTED = [
    ("spec.py", "from vocab_parallel_ce import shard", "sibling"),
    ("spec.py", "from vocab_parallel_ce.cross_entropy import vocab_parallel_cross_entropy", "above"),
    ("spec.py", "import vocab_parallel_ce", "above"),
    ("spec.py", "from . import te_compat", "above"),
    ("exchange.py", "from .kernels import layout", "sibling"),
    ("exchange.py", "from vocab_parallel_ce import selection", "sibling"),
    ("reference.py", "def f():\n    from vocab_parallel_ce.modules import nn", "above"),
    ("cross_entropy.py", "import vocab_parallel_ce.cli", "above"),
    ("pipeline.py", "from vocab_parallel_ce.cross_entropy import run", "above"),
    ("reference.py", "from . import pipeline", "above"),
    ("verify.py", "from . import modules", "sibling"),
    ("te_compat.py", "from vocab_parallel_ce import modules", "may import only"),
    ("te_compat.py", "from vocab_parallel_ce.checks import check_labels", "may import only"),
    ("modules.py", "import importlib\nimportlib.import_module('vocab_parallel_ce.cli')", "above"),
    ("spec.py", "import triton.language as tl", "triton"),
    ("cross_entropy.py", "def f():\n    import triton", "triton"),
    ("cli.py", "__import__('triton')", "triton"),
    ("cross_entropy.py", "import torch.distributed as dist", "torch.distributed"),
    ("kernels/blocks.py", "from torch.distributed import ProcessGroup", "torch.distributed"),
    ("modules.py", "from torch import distributed", "torch.distributed"),
    ("checks.py", "def f(group: torch.distributed.ProcessGroup): ...", "torch.distributed"),
    ("spec.py", "import torch as t\nt.distributed.barrier()", "torch.distributed"),
    ("kernels/element_mul.py", "from .cross_entropy import cross_entropy_kernel", "do not share"),
    ("kernels/layout.py", "from vocab_parallel_ce.kernels import element_mul", "do not share"),
    ("kernels/blocks.py", "from vocab_parallel_ce.kernels.launchers import element_mul", "do not share"),
    ("kernels/__init__.py", "from .launchers import element_mul", "do not share"),
    ("kernels/layout.py", "from ..exchange import group_position", "sibling"),
    ("newcomer.py", "import torch", "has no layer"),
    ("integrations/megatron.py", "from vocab_parallel_ce import cli", "sibling"),
]
ALLOWED = [
    ("linear_cross_entropy.py", "from vocab_parallel_ce.cross_entropy import flat"),
    ("linear_cross_entropy.py", "from vocab_parallel_ce.kernels import launchers, layout"),
    ("te_compat.py", "from . import cross_entropy"),
    ("modules.py", "from vocab_parallel_ce import checks, spec"),
    ("kernels/one_pass.py", "import triton\nfrom .primitives import x\nfrom . import blocks, layout"),
    ("kernels/one_pass.py", "from vocab_parallel_ce.shard import VocabShard"),
    ("integrations/transformers/install.py", "from .rewrite import f\nfrom ... import te_compat"),
    ("selection.py", "import importlib.util\nimportlib.util.find_spec('triton')"),
    ("cli.py", "import vocab_parallel_ce\nfrom vocab_parallel_ce.collectives import available_backends"),
]


@pytest.fixture
def copied_package(tmp_path):
    copy = tmp_path / PACKAGE
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def _plant(package, name, source):
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    before = path.read_text() if path.exists() else ""
    path.write_text(f"{before}\n{source}\n")
    return len(before.splitlines())


def test_imports_point_down():
    broken = violations(SOURCES)
    assert not broken, "\n".join(f"{v.path}:{v.line}: {v.rule}" for v in broken)


@pytest.mark.parametrize(("name", "source", "rule"), PLANTED)
def test_a_planted_violation_is_found_with_its_line(copied_package, name, source, rule):
    known = set(violations(copied_package))
    last_line = _plant(copied_package, name, source)
    (found,) = set(violations(copied_package)) - known
    assert found.path == name and rule in found.rule
    assert found.line > last_line or "no layer" in found.rule


@pytest.mark.parametrize(("name", "source"), ALLOWED)
def test_an_import_that_points_down_is_not_a_violation(copied_package, name, source):
    known = set(violations(copied_package))
    _plant(copied_package, name, source)
    if "integrations" in name:
        _plant(copied_package, "integrations/transformers/rewrite.py", "f = 1")
    assert set(violations(copied_package)) == known


def _fresh(source, **environment):
    """What a fresh interpreter prints last, read as JSON."""
    result = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_importing_the_package_imports_torch_and_nothing_heavier():
    loaded = "import json, sys; print(json.dumps(sorted(sys.modules)))"
    bare = set(_fresh(f"import torch, dataclasses, warnings; {loaded}"))
    ours = set(_fresh(f"import vocab_parallel_ce; {loaded}"))
    third_party = {name.partition(".")[0] for name in ours - bare} - sys.stdlib_module_names
    assert {name for name in third_party if not name.startswith("__editable__")} <= {PACKAGE, "torch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.testing")
    assert [name for name in ours - bare if name.startswith(heavy)] == []


USE_WITHOUT_TRITON = """
import builtins, importlib.util, json, sys
import torch

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")

sys.meta_path.insert(0, NoTriton())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: (
    None if name.partition(".")[0] == "triton" else find_spec(name, package)
)

import vocab_parallel_ce as package
from vocab_parallel_ce import cli

logits = torch.randn(2, 3, 7)
labels = torch.randint(0, 7, (2, 3))
expected = torch.nn.functional.cross_entropy(logits.view(-1, 7), labels.view(-1)).item()
values = []
for gradient in ("auto", "in_backward", "out_of_place"):
    leaf = logits.clone().requires_grad_()
    loss = package.vocab_parallel_cross_entropy(leaf, labels, gradient=gradient)
    loss.backward()
    assert leaf.grad.isfinite().all()
    values.append(loss.item())
values.append(package.VocabParallelCrossEntropy()(logits, labels).item())
values.append(package.parallel_cross_entropy(logits.clone(), labels, reduce_loss=True).item())
loss, gradient = package.cross_entropy_forward(logits.clone(), labels, 0.0, True, None, -100)
package.cross_entropy_backward(gradient, torch.tensor(2.0))
values.append(loss.item())
try:
    package.vocab_parallel_cross_entropy(logits, labels, impl="triton")
    refusal = None
except ValueError as error:
    refusal = str(error)
lines = cli.doctor_lines()
print(json.dumps([expected, values, refusal, lines, "triton" in sys.modules]))
"""


@pytest.mark.reference
def test_the_package_is_used_on_a_cpu_with_triton_absent():
    expected, values, refusal, lines, loaded = _fresh(USE_WITHOUT_TRITON)
    assert values == pytest.approx([expected] * len(values))
    assert "triton" in refusal and "not installed" in refusal
    assert any("triton" in line for line in lines)
    assert not loaded


@pytest.mark.reference
def test_the_reference_on_a_cpu_does_not_import_triton():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: nothing to import")
    source = """
import json, sys, torch, vocab_parallel_ce
leaf = torch.randn(3, 5, requires_grad=True)
vocab_parallel_ce.vocab_parallel_cross_entropy(leaf, torch.tensor([0, 4, -100])).backward()
print(json.dumps("triton" in sys.modules))
"""
    assert _fresh(source) is False
