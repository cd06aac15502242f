"""Compiled calls: what is refused, what stays eager, and eager calls beside a compilation."""

import threading

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import vocab_parallel_ce
from tests.logits import test_compile
from tests.support.cases.flat import linear_cross_entropy
from tests.support.cases.logits import flat_outputs
from vocab_parallel_ce import VocabShard, top_k, verify_calls, vocab_parallel_cross_entropy


@pytest.mark.reference
def test_a_gradient_of_0_stays_0_under_an_infinite_upstream_gradient():
    def step(x):
        return (linear_cross_entropy(x.hidden, x.weight, x.labels) * float("inf"),)

    x = test_compile.inputs()
    x.labels.fill_(-100)
    d_hidden, d_weight = test_compile.results(torch.compile(step, fullgraph=True, backend="aot_eager"), x)[1:]
    assert not d_hidden.any() and not d_weight.any()


REFUSED = [
    ({"label_smoothing": 2.0}, r"label_smoothing: must be in \[0, 1\], got 2.0"),
    ({"reduction": "sum", "num_items": -2}, "num_items: must be at least 0 and finite in fp32, got -2"),
    ({"smoothing": 0.1}, "unexpected keyword argument 'smoothing'"),
    # An operator gets a number of tokens by itself: no checks see it in a graph for any number.
    ({"chunk_size": 0}, "chunk_size: must be positive.*, got 0"),
    ({"chunk_size": 2**28}, f"chunk_size: a number is one of tokens.*, got {2**28}"),
    ({"chunk_size": "all"}, "chunk_size: expected 'auto', a number of tokens, or bytes as '256MiB' .*, got 'all'"),
    # PyTorch's dispatcher makes a number of a bool, and a bool of a number, before an operator sees it.
    ({"chunk_size": True}, "chunk_size: expected an int, got bool"),
    ({"reduce_hidden_grad": 1}, "reduce_hidden_grad: expected a bool, got int"),
]


@pytest.mark.reference
@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_eager_code_refuses_is_refused(options, message):
    with pytest.raises(Exception, match=message):
        torch.compile(linear_cross_entropy, backend="aot_eager")(*test_compile.inputs(), **options)


@pytest.mark.reference
def test_a_graph_names_the_release():
    """The compiler keeps graphs on disk, by their text: those of another release must not run."""
    texts = []

    def backend(graph, inputs):
        texts.append(graph.print_readable(print_output=False))
        return graph

    torch.compile(vocab_parallel_cross_entropy, backend=backend)(torch.randn(2, 3), torch.tensor([0, 1]))
    assert f"({vocab_parallel_ce.__version__!r}, 'labels'" in texts[0]


@pytest.mark.reference
@pytest.mark.parametrize("option", ["chunk_size", "num_items"])
def test_a_number_of_tokens_that_changes_costs_one_more_graph(option):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, fullgraph=True, backend=counter)
    x, reduction = test_compile.inputs(), {"reduction": "sum"} if option == "num_items" else {}
    for number, graphs in ((3, 1), (5, 2), (4, 2), (6, 2)):
        options = {option: number, **reduction}
        assert torch.equal(compiled(*x, **options), linear_cross_entropy(*x, **options))
        assert counter.frame_count == graphs


@pytest.mark.reference
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", ["logit_scale", "vocab_size", "valid_tokens", "chunk_size"])
def test_an_option_that_follows_a_shape_is_seen(name, dynamic):
    """The compiler has a symbol for it, and the text of the other constants has no symbols."""

    def step(x):
        n_tokens, n_rows = x.hidden.shape[0], x.weight.shape[0]
        value = {"logit_scale": 1 / n_tokens, "vocab_size": VocabShard(0, n_rows, n_rows)}
        value |= {"valid_tokens": n_tokens, "chunk_size": n_tokens // 2}
        return (linear_cross_entropy(x.hidden, x.weight, x.labels, **{name: value[name]}),)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for n in (12, 16, 20):
        x = test_compile.inputs(n=n)
        test_compile.assert_same_bits(test_compile.results(compiled, x), test_compile.results(step, x))


@pytest.mark.reference
@pytest.mark.parametrize("step", [test_compile.logits_none, test_compile.linear_mean])
def test_transforms_and_double_backward_are_refused(step):
    x = test_compile.inputs()

    def tangent(hidden):
        def loss_of(hidden):
            return flat_outputs(step(x._replace(hidden=hidden)))[0]

        return torch.func.jvp(loss_of, (hidden,), (hidden * hidden,))

    with pytest.raises(Exception, match="expected a call outside of torch.func transforms"):
        torch.compile(tangent, backend="aot_eager")(x.hidden.detach())
    loss = torch.compile(lambda x: flat_outputs(step(x))[0].sum(), backend="eager")(x)
    with pytest.raises(RuntimeError, match="expected backward without create_graph"):
        torch.autograd.grad(loss, x.hidden, create_graph=True)


@pytest.mark.reference
def test_eager_calls_beside_a_compilation_stay_eager():
    """A compilation anywhere raises a flag of all threads."""
    x, main_grad = test_compile.inputs(), torch.zeros(test_compile.VOCABULARY, test_compile.WIDTH)
    began, ended = threading.Event(), threading.Event()

    def backend(graph, _):
        began.set()
        assert ended.wait(60)
        return graph.forward

    compiling = threading.Thread(target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(3)))
    compiling.start()
    try:
        assert began.wait(60)
        linear_cross_entropy(x.hidden, x.weight, x.labels, main_grad=main_grad).backward()
    finally:
        ended.set()
        compiling.join()
    assert x.weight.grad is None and main_grad.abs().sum() > 0


@pytest.mark.reference
def test_what_overwrites_by_name_and_verification_run_eagerly():
    x = test_compile.inputs()
    main_grad = torch.zeros_like(x.weight)

    def in_backward(x):
        logits = x.hidden @ x.weight.t()
        return vocab_parallel_cross_entropy(logits, x.labels, gradient="in_backward"), logits

    def with_main_grad(x):
        return (linear_cross_entropy(x.hidden, x.weight, x.labels, main_grad=main_grad) + x.weight.sum() * 0,)

    loss, logits = torch.compile(in_backward, backend="aot_eager")(x)
    before = logits.detach().clone()
    loss.backward()
    assert not torch.equal(logits.detach(), before)
    expected = test_compile.results(lambda x: (linear_cross_entropy(x.hidden, x.weight, x.labels),), x)[-1]
    test_compile.results(torch.compile(with_main_grad, backend="aot_eager"), x)
    assert torch.equal(main_grad, expected)

    for name, step in (
        ("vocab_parallel_cross_entropy", in_backward),
        ("linear_cross_entropy", with_main_grad),
    ):
        torch._dynamo.reset()
        message = f"vocab_parallel_ce: {name} has no operator for this call .* compile without fullgraph=True"
        with pytest.raises(torch._dynamo.exc.Unsupported, match=message) as raised:
            torch.compile(step, fullgraph=True, backend="aot_eager")(x)
        assert "file an issue" not in str(raised.value)
    with verify_calls():
        test_compile.assert_same_bits(
            test_compile.results(torch.compile(test_compile.logits_none, backend="aot_eager"), x),
            test_compile.results(test_compile.logits_none, x),
        )


@pytest.mark.reference
def test_options_without_an_operator_hold_where_the_compiler_skips_the_outermost_frame(request):
    code = linear_cross_entropy.__code__  # every public function shares it
    torch._dynamo.eval_frame.skip_code(code)
    request.addfinalizer(lambda: torch._dynamo.eval_frame.reset_code(code))
    x = test_compile.inputs()
    logits, main_grad = (x.hidden @ x.weight.t()).detach(), torch.zeros_like(x.weight)

    def step(logits, hidden):
        linear_cross_entropy(hidden, x.weight, x.labels, main_grad=main_grad).backward()
        return top_k(logits, 2)[0]

    ids = torch.compile(step, backend="eager")(logits, x.hidden)
    assert torch.equal(ids, top_k(logits, 2)[0])
    assert main_grad.any()


@pytest.mark.reference
def test_logits_without_rows_are_refused_by_name():
    x = test_compile.inputs()
    logits = (x.hidden @ x.weight.t()).detach()[0]
    step = torch.compile(vocab_parallel_cross_entropy, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"logits: expected shape \[..., C\] with rows, got"):
        step(logits, x.labels[0])
