"""CONTRIBUTING's recipe for an option, followed on a copy of the package: at most 10 edits in 5 files."""

import re
import shutil

import pytest

from tests.support.fresh import ROOT, fresh_python

PACKAGE = "vocab_parallel_ce"

# A factor of the loss. Each edit is (file of the package or page, line to find, lines to put after it).
EDITS = [
    ("options.py", "    logit_scale: float = 1.0\n", "    loss_weight: float = 1.0\n"),
    ("options.py", "    label_smoothing: float\n", "    loss_weight: float\n"),
    (
        "options.py",
        '    checks.check_number("z_loss", settings.z_loss)\n',
        '    checks.check_number("loss_weight", settings.loss_weight, positive=True)\n',
    ),
    ("options.py", "        z_loss=float(settings.z_loss),\n", "        loss_weight=float(settings.loss_weight),\n"),
    ("spec.py", "    predictions: bool = False\n", "    loss_weight: float = 1.0\n"),
    (
        "spec.py",
        "        value = value + options.z_loss * (stats.row_max + log_sum) ** 2\n",
        "    value = value * options.loss_weight\n",
    ),
    ("spec.py", "        grad = grad + p * (2 * options.z_loss", "    grad = grad * options.loss_weight\n"),
    (
        "kernels/primitives.py",
        "        value += loss_options.z_loss * lse * lse\n",
        "    if loss_options.loss_weight is not None:\n        value *= loss_options.loss_weight\n",
    ),
    (
        "kernels/cross_entropy.py",
        "        weight *= tl.load(grads.loss + row * strides.loss)\n",
        "    if loss_options.loss_weight is not None:\n        weight *= loss_options.loss_weight\n",
    ),
    ("docs/options.md", "| `z_loss=0.0` |", "| `loss_weight=1.0` | factor of the loss |\n"),
]

USE = """
import torch
import vocab_parallel_ce as package
from tests.support import interpreter

interpreter.mend()
assert package.__file__.startswith(PLACE)
torch.manual_seed(0)
hidden, weight, labels = torch.randn(2, 8), torch.randn(7, 8), torch.randint(0, 7, (2,))

def results(call):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = call(*leaves)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]

def logits_loss(**keywords):
    return lambda h, w: package.vocab_parallel_cross_entropy(h @ w.t(), labels, **keywords)

def module(**keywords):
    return lambda h, w: package.VocabParallelCrossEntropy(**keywords)(h @ w.t(), labels)

def linear(**keywords):
    return lambda h, w: package.linear_cross_entropy(h, w, labels, **keywords)

for others in ({}, {"label_smoothing": 0.1, "softcap": 3.0}):
    for way in (logits_loss, module, linear):
        plain = results(way(impl="reference", **others))
        for impl in ("reference", "triton"):
            for a, b in zip(plain, results(way(impl=impl, loss_weight=2.5, **others))):
                torch.testing.assert_close(b, 2.5 * a, rtol=1e-5, atol=1e-6)
try:
    logits_loss(loss_weight=-1)(hidden, weight)
except ValueError as error:
    assert "loss_weight: must be positive" in str(error), error
else:
    raise AssertionError("a negative loss_weight was taken")
print("done")
"""


def recipe() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text[text.index("## Adding an option") : text.index("## Adding a loss")]


@pytest.mark.reference
def test_the_recipe_names_the_files_that_an_option_touches():
    """Edits of the recipe are in the order of its list, and it names no other file of the package."""
    files = list(dict.fromkeys(name for name, _, _ in EDITS))
    assert len(EDITS) <= 10
    assert len(files) <= 5
    named = re.findall(r"`((?:options|spec|kernels/\w+|plan|run|checks|modules)\.py|docs/options\.md)`", recipe())
    assert list(dict.fromkeys(named)) == files


@pytest.mark.interpreter
def test_an_option_added_by_the_recipe_works_everywhere(tmp_path):
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name, line, added in EDITS:
        path = tmp_path / (name if name.startswith("docs/") else f"{PACKAGE}/{name}")
        text = path.read_text(encoding="utf-8")
        assert text.count(line) == 1, f"{name}: expected one line {line!r}, found {text.count(line)}"
        end = text.index("\n", text.index(line)) + 1
        path.write_text(text[:end] + added + text[end:], encoding="utf-8")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = fresh_python("-c", f"PLACE = {str(tmp_path)!r}\n{USE}", cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "done"
