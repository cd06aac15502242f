"""CONTRIBUTING's recipes for an option and for a loss, followed on a copy of the package."""

import re
import shutil

import pytest

from tests.docs.markdown import table
from tests.docs.test_layers import breaches, order_of
from tests.support.fresh import ROOT, fresh_python

PACKAGE = "vocab_parallel_ce"

# Each edit is (file of the package or page, line to find, lines to put after it). A factor of the loss:
OPTION = [
    ("options.py", "    logit_scale: Positive = 1.0\n", "    loss_weight: Positive = 1.0\n"),
    ("api/logits.py", "    z_loss: float = 0.0,\n", "    loss_weight: float = 1.0,\n"),
    ("api/logits.py", "        z_loss=z_loss,\n", "        loss_weight=loss_weight,\n"),
    ("api/heads.py", "    z_loss: float = 0.0,\n", "    loss_weight: float = 1.0,\n"),
    ("api/heads.py", "        z_loss=z_loss,\n", "        loss_weight=loss_weight,\n"),
    ("api/modules.py", "        *,\n        group: Any = None,\n", "        loss_weight: float = 1.0,\n"),
    ("api/modules.py", "        bias: bool = False,\n", "        loss_weight: float = 1.0,\n"),
    ("spec.py", "    predictions: bool = False\n", "    loss_weight: float = 1.0\n"),
    (
        "spec.py",
        "        value = value + options.z_loss * (stats.row_max + log_sum) ** 2\n",
        "    value = value * options.loss_weight\n",
    ),
    ("spec.py", "        grad = grad + p * (2 * options.z_loss", "    grad = grad * options.loss_weight\n"),
    (
        "kernels/labels.py",
        "        value += loss_options.z_loss * lse * lse\n",
        "    if loss_options.loss_weight is not None:\n        value *= loss_options.loss_weight\n",
    ),
    (
        "kernels/labels.py",
        "        weight = ops.weighted(tl.load(grads.loss + row * strides.loss), weight)\n",
        "    if loss_options.loss_weight is not None:\n        weight *= loss_options.loss_weight\n",
    ),
    ("docs/options.md", "| `z_loss=0.0` |", "| `loss_weight=1.0` | factor of the loss |\n"),
]

USE_OPTION = """
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


# A squared error of the probabilities. Its own files are those in ``recipe/``.
LOSS_FILES = {"brier.py": "losses/brier.py", "api_brier.py": "api/brier.py"}
LOSS = [
    (
        "__init__.py",
        "require_torch(torch",
        "from vocab_parallel_ce.api.brier import brier_score, linear_brier_score\n",
    ),
    ("__init__.py", '    "VocabShard",', '    "brier_score",\n    "linear_brier_score",\n'),
    ("docs/design.md", "| `__init__` | the public names |", "| `api/brier` | a new public loss |\n"),
    ("docs/design.md", "| `kernels/` | the launchers in Triton", "| `losses/brier` | a new loss |\n"),
]

USE_LOSS = """
import itertools
import torch
import vocab_parallel_ce as package
from tests.support.ranks_in_turn import in_turn

assert package.__file__.startswith(PLACE)
torch.manual_seed(0)
TOKENS, WIDTH, COLUMNS, OPTIONS = 6, 5, 12, {"softcap": 4.0, "logit_scale": 0.7}
hidden, weight, bias = torch.randn(TOKENS, WIDTH), torch.randn(COLUMNS, WIDTH) * 2, torch.randn(COLUMNS)
labels, factors = torch.tensor([3, 11, -100, 0, 7, 4]), torch.linspace(-0.5, 1.5, TOKENS)

def oracle(logits, reduction):
    p = (4.0 * (0.7 * logits / 4.0).tanh()).softmax(-1)
    target = torch.nn.functional.one_hot(labels.clamp(min=0), COLUMNS)
    losses = ((p - target) ** 2).sum(-1) * (labels >= 0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / 5}[reduction]

def results(call, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    loss = call(*leaves)
    loss.backward(factors.to(loss) if loss.dim() else loss.new_tensor(0.75))
    return [loss.detach(), *(leaf.grad for leaf in leaves)]

def over_logits(logits, **keywords):
    return package.brier_score(logits * 1, labels, **OPTIONS, **keywords)

def over_head(hidden, weight, bias, **keywords):
    return package.linear_brier_score(hidden, weight, labels, bias=bias, chunk_size=4, **OPTIONS, **keywords)

def check(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)

def on_ranks(n_ranks, function, reduction, gradient):
    def of_rank(rank, group):
        own = slice(rank * COLUMNS // n_ranks, (rank + 1) * COLUMNS // n_ranks)
        tensors = (hidden, weight[own], bias[own]) if function is over_head else (logits[:, own],)
        return results(lambda *t: function(*t, group=group, reduction=reduction, gradient=gradient), *tensors)
    losses, *grads = zip(*in_turn(n_ranks, of_rank), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    if function is over_logits:
        return losses[0], torch.cat(grads[0], -1)
    return losses[0], grads[0][-1], torch.cat(grads[1]), torch.cat(grads[2])  # d_hidden is summed over the ranks

logits = torch.nn.functional.linear(hidden, weight, bias)
MODES = ("auto", "in_forward", "in_backward")
modes = {over_logits: (*MODES, "out_of_place"), over_head: MODES}
for function, reduction in itertools.product(modes, ("mean", "sum", "none")):
    tensors = (hidden, weight, bias) if function is over_head else (logits,)
    as_logits = torch.nn.functional.linear if function is over_head else torch.clone
    truth = results(lambda *t: oracle(as_logits(*t), reduction), *(t.double() for t in tensors))
    for n_ranks, gradient in itertools.product((1, 2, 3), modes[function]):
        if function is over_head and (reduction, gradient) == ("none", "in_forward"):
            continue  # a head refuses it
        check(on_ranks(n_ranks, function, reduction, gradient), truth)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    check(results(lambda *t: compiled(*t, reduction=reduction), *tensors), truth)

OF_OTHERS = {"label_smoothing": 0.1, "z_loss": 0.1, "temperature": 2.0, "num_items": 2, "outputs": (), "impl": "triton"}
for (function, tensors), (name, value) in itertools.product(
    {over_logits: (logits,), over_head: (hidden, weight, bias)}.items(), OF_OTHERS.items()
):
    try:
        function(*tensors, **{name: value})
    except (TypeError, ValueError) as error:
        assert name in str(error), error
    else:
        raise AssertionError(f"{name}, which the loss has no use for, was taken")
print("done")
"""


def recipe(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text[text.index(f"## Adding {title}") :].partition("\n\n## ")[0]


def assert_works(folder, edits, program):
    """Make the edits on a copy of the package in ``folder``, and run ``program`` with it."""
    shutil.copytree(ROOT / PACKAGE, folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name, line, added in edits:
        path = folder / (name if name.startswith("docs/") else f"{PACKAGE}/{name}")
        text = path.read_text(encoding="utf-8")
        assert text.count(line) == 1, f"{name}: expected one line {line!r}, found {text.count(line)}"
        end = text.index("\n", text.index(line)) + 1
        path.write_text(text[:end] + added + text[end:], encoding="utf-8")
    for own, name in LOSS_FILES.items() if edits is LOSS else ():
        shutil.copy(ROOT / "tests/project/recipe" / own, folder / PACKAGE / name)
    variables = {"PYTHONPATH": f"{folder}:{ROOT}", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = fresh_python("-c", f"PLACE = {str(folder)!r}\n{program}", cwd=folder, **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "done"


@pytest.mark.reference
def test_the_recipe_names_the_files_that_an_option_touches():
    """Edits of the recipe are in the order of its list, and it names no other file of the package."""
    files = list(dict.fromkeys(name for name, _, _ in OPTION))
    assert len(OPTION) <= 13
    assert len(files) <= 7
    named = re.findall(
        r"`((?:options|spec|api/logits|api/heads|api/modules|kernels/\w+|plan|run|checks|modules)\.py|docs/options\.md)`",
        recipe("an option"),
    )
    assert list(dict.fromkeys(named)) == files


@pytest.mark.interpreter
def test_an_option_added_by_the_recipe_works_everywhere(tmp_path):
    assert_works(tmp_path, OPTION, USE_OPTION)


@pytest.mark.reference
def test_a_loss_added_by_the_recipe_works_everywhere(tmp_path):
    """Over logits and heads, on ranks, in each reduction and mode, compiled; it refuses settings of other losses.

    And it stands in the table of layers.
    """
    assert len(LOSS) + len(LOSS_FILES) - 1 <= 5  # elsewhere than in its file in losses/
    assert_works(tmp_path, LOSS, USE_LOSS)
    rows = table((tmp_path / "docs/design.md").read_text(encoding="utf-8"), "| module | what it has |")
    assert not breaches(tmp_path / PACKAGE, order_of(rows))
