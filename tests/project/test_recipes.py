"""CONTRIBUTING's recipes: an option, by edits of a copy of the package, and a loss, the one in ``recipe/``."""

import itertools
import re
import shutil

import pytest
import torch
from torch.nn.functional import linear, one_hot

from tests.project.recipe.api_brier import brier_score, linear_brier_score
from tests.support.host.fresh import ROOT, fresh_python
from tests.support.ranks.in_turn import in_turn
from vocab_parallel_ce import HeadOptions

PACKAGE = "vocab_parallel_ce"

# A factor of the loss: (file of the package or page, line to find, lines to put after it).
OPTION = [
    ("options.py", "    logit_scale: Positive = 1.0\n", "    loss_weight: Positive = 1.0\n"),
    ("options.py", "    z_loss: float\n", "    loss_weight: float\n"),
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
from tests.support.kernels import interpreter

interpreter.mend()
assert package.__file__.startswith(PLACE)
torch.manual_seed(0)
hidden, weight, labels = torch.randn(2, 8), torch.randn(7, 8), torch.randint(0, 7, (2,))
ways = [
    lambda h, w, **keywords: package.vocab_parallel_cross_entropy(h @ w.t(), labels, **keywords),
    lambda h, w, **keywords: package.VocabParallelCrossEntropy(**keywords)(h @ w.t(), labels),
    lambda h, w, impl, **keywords: package.linear_cross_entropy(
        h, w, labels, options=package.HeadOptions(impl=impl), **keywords
    ),
]

def results(way, **keywords):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    loss = way(*leaves, label_smoothing=0.1, softcap=3.0, **keywords)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]

for way in ways:
    for impl in ("reference", "triton"):
        for a, b in zip(results(way, impl="reference"), results(way, impl=impl, loss_weight=2.5)):
            torch.testing.assert_close(b, 2.5 * a, rtol=1e-5, atol=1e-6)
def refused(message, call):
    try:
        call()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")

for way in ways:
    refused("loss_weight: must be positive", lambda: results(way, impl="auto", loss_weight=-1))
"""


@pytest.mark.reference
def test_the_recipe_names_the_files_that_an_option_touches():
    """Edits of the recipe are in the order of its list, and it names no other file of the package."""
    files = list(dict.fromkeys(name for name, _, _ in OPTION))
    assert len(OPTION) <= 8
    assert len(files) <= 4
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    recipe = page.partition("## Adding an option")[2].partition("\n## ")[0]
    names = r"options|spec|api/logits|api/heads|api/modules|kernels/\w+|plan|run|checks|modules"
    pattern = rf"`((?:{names})\.py|docs/options\.md)`"
    assert list(dict.fromkeys(re.findall(pattern, recipe))) == files


@pytest.mark.interpreter
def test_an_option_added_by_the_recipe_works_everywhere(tmp_path):
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name, line, added in OPTION:
        path = tmp_path / (name if name.startswith("docs/") else f"{PACKAGE}/{name}")
        text = path.read_text(encoding="utf-8")
        assert text.count(line) == 1, f"{name}: expected one line {line!r}, found {text.count(line)}"
        end = text.index("\n", text.index(line)) + 1
        path.write_text(text[:end] + added + text[end:], encoding="utf-8")
    variables = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    result = fresh_python("-c", f"PLACE = {str(tmp_path)!r}\n{USE_OPTION}", cwd=tmp_path, **variables)
    assert result.returncode == 0, result.stderr


TOKENS, WIDTH, COLUMNS = 6, 5, 12
LABELS = torch.tensor([3, 11, -100, 0, 7, 4])
MODES = {"logits": ("auto", "in_forward", "in_backward", "out_of_place"), "head": ("auto", "in_forward", "in_backward")}
OF_OTHERS = {"label_smoothing": 0.1, "z_loss": 0.1, "temperature": 2.0, "num_items": 2, "outputs": (), "impl": "triton"}


def tensors_of(kind):
    """Logits, or hidden states, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator) for shape in ((TOKENS, 5), (COLUMNS, 5), (COLUMNS,))
    )
    return (hidden, weight * 2, bias) if kind == "head" else (linear(hidden, weight * 2, bias),)


def oracle(*tensors, reduction):
    logits = linear(*tensors) if len(tensors) == 3 else tensors[0]
    p = (4.0 * (0.7 * logits / 4.0).tanh()).softmax(-1)
    losses = ((p - one_hot(LABELS.clamp(min=0), COLUMNS)) ** 2).sum(-1) * (LABELS >= 0)
    return {"none": losses, "sum": losses.sum(), "mean": losses.sum() / 5}[reduction]


def score(*tensors, **keywords):
    keywords |= {"softcap": 4.0, "logit_scale": 0.7}
    if len(tensors) == 1:
        return brier_score(tensors[0] * 1, LABELS, **keywords)
    options = HeadOptions(chunk_size=4, gradient=keywords.pop("gradient", "auto"))
    return linear_brier_score(*tensors[:2], LABELS, bias=tensors[2], options=options, **keywords)


def results(function, tensors, **keywords):
    """The loss, and the gradients of the tensors."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    loss = function(*leaves, **keywords)
    grad_output = torch.linspace(-0.5, 1.5, TOKENS) if loss.dim() else torch.tensor(0.75)
    return [loss.detach(), *torch.autograd.grad(loss, leaves, grad_output.to(loss))]


def results_on_ranks(n_ranks, tensors, **keywords):
    """The same of the whole vocabulary, from ranks that have a part of it each."""

    def of_rank(rank, group):
        columns = slice(rank * COLUMNS // n_ranks, (rank + 1) * COLUMNS // n_ranks)
        head = (tensors[0], *(tensor[columns] for tensor in tensors[1:]))
        return results(score, head if len(tensors) == 3 else (tensors[0][:, columns],), group=group, **keywords)

    losses, *grads = zip(*in_turn(n_ranks, of_rank), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    if len(tensors) == 1:
        return losses[0], torch.cat(grads[0], -1)
    return losses[0], grads[0][-1], torch.cat(grads[1]), torch.cat(grads[2])  # d_hidden is summed over the ranks


@pytest.mark.reference
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
def test_a_loss_of_the_recipe_works_everywhere(kind, reduction):
    """Over logits and heads, on ranks, in each mode, compiled."""
    tensors = tensors_of(kind)
    truth = results(oracle, [tensor.double() for tensor in tensors], reduction=reduction)

    def check(actual):
        for a, b in zip(actual, truth, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)

    for n_ranks, gradient in itertools.product((1, 2, 3), MODES[kind]):
        if (kind, reduction, gradient) != ("head", "none", "in_forward"):  # a head refuses it
            check(results_on_ranks(n_ranks, tensors, reduction=reduction, gradient=gradient))
    check(results(torch.compile(score, fullgraph=True, backend="aot_eager"), tensors, reduction=reduction))


@pytest.mark.reference
@pytest.mark.parametrize("kind", MODES)
@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_loss_of_the_recipe_refuses_what_it_has_no_use_for(kind, name):
    with pytest.raises(TypeError, match=name):
        score(*tensors_of(kind), **{name: OF_OTHERS[name]})
