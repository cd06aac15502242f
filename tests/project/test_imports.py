"""What importing and using the package loads, in fresh interpreters."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "vocab_parallel_ce"
ROOT = Path(__file__).parents[2]


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
