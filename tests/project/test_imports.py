"""What importing and using the package loads, in fresh interpreters."""

import json
import sys

import pytest

from tests.support.host.fresh import fresh_python

PACKAGE = "vocab_parallel_ce"


def _fresh(source):
    """What a fresh interpreter prints last, read as JSON."""
    result = fresh_python("-c", source)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.reference
def test_importing_the_package_imports_torch_and_nothing_heavier_and_the_reference_no_triton():
    bare = set(_fresh("import json, sys, torch, dataclasses, warnings; print(json.dumps(sorted(sys.modules)))"))
    source = """
import json, sys, vocab_parallel_ce
imported = sorted(sys.modules)
leaf = sys.modules["torch"].randn(3, 5, requires_grad=True)
vocab_parallel_ce.vocab_parallel_cross_entropy(leaf, sys.modules["torch"].tensor([0, 4, -100])).backward()
print(json.dumps([imported, "triton" in sys.modules]))
"""
    imported, has_triton_after_a_loss = _fresh(source)
    ours = set(imported) - bare
    third_party = {name.partition(".")[0] for name in ours} - sys.stdlib_module_names
    assert {name for name in third_party if not name.startswith("__editable__")} <= {PACKAGE, "torch"}
    heavy = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.testing")
    assert [name for name in ours if name.startswith(heavy)] == []
    assert not has_triton_after_a_loss


USE_WITHOUT_TRITON = """
import json, sys
import torch

sys.modules["triton"] = None  # neither imported nor found

import vocab_parallel_ce as package
from vocab_parallel_ce import __main__ as cli

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
print(json.dumps([expected, values, refusal, cli.doctor_lines()]))
"""


@pytest.mark.reference
def test_the_package_is_used_on_a_cpu_with_triton_absent():
    expected, values, refusal, lines = _fresh(USE_WITHOUT_TRITON)
    assert values == pytest.approx([expected] * len(values))
    assert "triton" in refusal and "not installed" in refusal
    assert any("triton" in line for line in lines)
