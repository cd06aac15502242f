"""Logits that backward finds: the bits of those that it makes again, with a product less."""

from functools import partial

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.support.cases.flat import linear_cross_entropy, linear_distillation_loss
from tests.support.cases.flat import linear_token_log_probs as log_probs
from tests.support.cases.linear import record_matmuls
from tests.support.cases.logits import flat_outputs
from vocab_parallel_ce import Head, HeadOptions, LinearCrossEntropy

pytestmark = pytest.mark.reference

ROWS, COLUMNS, WIDTH = 7, 24, 5
TOKEN = 4 * COLUMNS  # bytes of the logits of a token
CHUNKED = {"chunk_size": 2}
KEPT = ("all", f"{2 * TOKEN}B", f"{5 * TOKEN}B", f"{70 * TOKEN}B")
N_KEPT = dict(zip(KEPT, (3, 1, 2, 3), strict=True))  # of the 3 chunks of tokens that are not ignored


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden, weight, bias = (
        (torch.randn(*shape, generator=generator) * 2).to(dtype).requires_grad_()
        for shape in ((ROWS, WIDTH), (COLUMNS, WIDTH), (COLUMNS,))
    )
    labels = torch.randint(0, COLUMNS, (ROWS,), generator=generator)
    labels[3] = -100
    return (hidden, weight, bias), labels


CALLS = {
    "none": lambda h, w, b, labels, **own: linear_cross_entropy(h, w, labels, bias=b, reduction="none", **own),
    "mean": lambda h, w, b, labels, **own: linear_cross_entropy(
        h, w, labels, bias=b, gradient="in_backward", label_smoothing=0.1, class_weight=torch.arange(24.0), **own
    ),
    "log-probs": lambda h, w, b, labels, **own: log_probs(
        h, w, labels, bias=b, outputs=("entropy",), softcap=9.0, **own
    ),
    "valid tokens": lambda h, w, b, labels, **own: linear_cross_entropy(
        h, w, labels, bias=b, reduction="none", valid_tokens=6, **own
    ),
    "distillation": lambda h, w, b, labels, **own: linear_distillation_loss(
        Head(h, w, b), Head(h.detach().flip(0), w.detach().flip(1)), divergence="js", reduction="none", **own
    ),
}


def results(name, *, times=1, dtype=torch.float32, **own):
    """The outputs, and the gradients of each of so many backward passes."""
    leaves, labels = inputs(dtype)
    found = CALLS[name](*leaves, labels, **own)
    outputs = flat_outputs(found)
    differentiable = [t for t in outputs if t.requires_grad]
    made = [t.detach() for t in outputs]
    for index in range(times):
        grads = [torch.linspace(-1, 2, t.numel()).view_as(t) if t.dim() else torch.tensor(0.7) for t in differentiable]
        made += torch.autograd.grad(differentiable, leaves, grads, retain_graph=index + 1 < times)
    return made


def assert_equal(found, expected):
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize("name", CALLS)
def test_the_bits_are_those_of_logits_that_are_made_again(name, keep, dtype):
    expected = results(name, dtype=dtype, **CHUNKED)
    assert_equal(results(name, dtype=dtype, **CHUNKED, keep_logits=keep), expected)


def test_fp32_logits_of_16_bit_heads():
    options = {"dtype": torch.bfloat16, "logits_dtype": torch.float32, **CHUNKED}
    assert_equal(results("log-probs", **options, keep_logits="all"), results("log-probs", **options))


@pytest.mark.parametrize("keep", KEPT)
def test_a_kept_chunk_is_a_product_less(keep):
    counts = []
    for kept in ("none", keep):
        with record_matmuls() as products:
            results("none", **CHUNKED, keep_logits=kept)
        counts.append(len(products))
    assert counts == [12, 12 - N_KEPT[keep]]


def test_an_automatic_chunk_is_what_may_be_kept():
    with record_matmuls() as products:
        results("none", keep_logits=f"{4 * TOKEN}B")
    assert len(products) == 7  # of gradients four; chunks of 4 and 2 tokens, of which the second is made again


@pytest.mark.parametrize("name", ("none", "log-probs"))
def test_later_backwards_make_the_logits_again(name):
    expected = results(name, **CHUNKED, times=4)
    assert_equal(results(name, **CHUNKED, times=4, keep_logits="all"), expected)


def test_what_hooks_see_is_not_overwritten():
    seen, (leaves, labels) = [], inputs()
    with saved_tensors_hooks(lambda t: seen.append((t, t.clone())) or t, lambda t: t):
        losses = CALLS["none"](*leaves, labels, **CHUNKED, keep_logits="all")
    losses.sum().backward()
    assert all(torch.equal(now, before) for now, before in seen)


@pytest.mark.parametrize("wrapper", ("hooks", "checkpoint", "reentrant", "compiled checkpoint"))
def test_wrappers(wrapper):
    def gradients(keep):
        leaves, labels = inputs()

        def call(h, w, b):
            return CALLS["none"](h, w, b, labels, **CHUNKED, keep_logits=keep) * 2

        if wrapper == "hooks":
            with save_on_cpu():
                losses = call(*leaves)
        else:
            run = partial(checkpoint, use_reentrant=wrapper == "reentrant")
            if wrapper == "compiled checkpoint":
                run = torch.compile(run, backend="aot_eager")
            losses = run(call, *leaves)
        return torch.autograd.grad(losses.sum(), leaves) if wrapper != "reentrant" else backward(losses, leaves)

    assert_equal(gradients("all"), gradients("none"))


def backward(losses, leaves):
    losses.sum().backward()
    return [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("keep", ("all", f"{TOKEN}B"))
@pytest.mark.parametrize(("outputs", "n_kept"), (((), 0), (("predictions",), 0), (("entropy",), 3)), ids=str)
def test_auto_keeps_logits_of_a_reduced_loss_if_its_outputs_may_be_differentiated(outputs, n_kept, keep):
    """They are in forward's way otherwise: three products without them."""
    (leaves, labels), results = inputs(), []
    hidden, weight, bias = leaves
    own = {"bias": bias, "outputs": outputs, "chunk_size": 1 if n_kept else 2}
    for options in ({"keep_logits": keep}, {"gradient": "in_backward" if n_kept else "in_forward"}):
        with record_matmuls() as products:
            found = linear_cross_entropy(hidden, weight, labels, **own, **options)
            differentiable = [t for t in flat_outputs(found) if t.requires_grad]
            results.append([*flat_outputs(found), *torch.autograd.grad([t.sum() for t in differentiable], leaves)])
        if "keep_logits" in options:
            assert len(products) == (9 if not n_kept else 18 if keep == "all" else 23)
    assert_equal(*results)


def test_compiled_code_leaves_it_to_eager_code(monkeypatch):
    name = "log-probs"
    expected, call = results(name, keep_logits="all"), CALLS[name]
    monkeypatch.setitem(CALLS, name, torch.compile(call, backend="aot_eager", fullgraph=True))
    with pytest.raises(Exception, match="has no operator for this call"):
        results(name, keep_logits="all")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setitem(CALLS, name, torch.compile(call, backend="aot_eager"))
    assert_equal(results(name, keep_logits="all"), expected)
    # Of the call and of what wraps the function, and none of the package's inside.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_a_module_has_it_and_needs_no_gradient():
    (hidden, weight, bias), labels = inputs()
    head = torch.nn.Linear(WIDTH, COLUMNS)
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(bias)
        module = LinearCrossEntropy(head, reduction="none", options=HeadOptions(keep_logits="all"))
        expected = linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="none")
        assert torch.equal(module(hidden, labels), expected)
    assert module.options.keep_logits == "all"
