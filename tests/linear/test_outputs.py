"""Outputs beside a reduced loss of a head: read, they cost no product; differentiated, they are right or refused."""

import itertools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.support.cases import linear
from tests.support.cases.linear import COLUMNS, WIDTH, Leaves, record_matmuls
from tests.support.cases.linear import N_LEAVES as ROWS
from tests.support.cases.logits import DIFFERENTIABLE, METRICS, OUTPUTS, grads_of_every_output
from tests.support.cases.weights import weights
from tests.support.ranks import case as on_ranks
from tests.support.ranks.linear import COLUMNS as OF_RANK
from tests.support.ranks.pools import in_several_ranks
from vocab_parallel_ce import HeadOptions, linear_cross_entropy, vocab_parallel_cross_entropy

EACH = tuple((name,) for name in DIFFERENTIABLE)


def objective(found, outputs):
    """The loss, and the squares of outputs."""
    return found.loss.sum() + 0.1 * sum(getattr(found, name).square().sum() for name in outputs)


@pytest.mark.parametrize("outputs", [*EACH, METRICS, ("lse", *METRICS), OUTPUTS], ids="-".join)
def test_outputs_that_are_read_cost_no_product(impl_device, outputs):
    """Three per chunk, and the bits of the loss alone, in every mode in which forward computes the gradients."""
    case = Leaves(impl_device, "peaked")
    expected = torch.autograd.grad(case.loss(chunk_size=3), case.leaves)
    for gradient in ("auto", "in_forward"):
        with record_matmuls() as matmuls:
            found = case.loss(chunk_size=3, outputs=outputs, gradient=gradient)
            assert len(matmuls) == 6
            gradients = torch.autograd.grad(found.loss, case.leaves)
        assert len(matmuls) == 6 and all(map(torch.equal, gradients, expected))


@pytest.mark.parametrize("uses_loss", [False, True])
@pytest.mark.parametrize("outputs", [("entropy", "lse"), OUTPUTS], ids="-".join)
def test_outputs_that_are_differentiated_are_right(impl_device, outputs, uses_loss):
    """Backward recomputes, with three products more; with kept logits there are three in all."""
    grads = [torch.tensor(0.75), *grads_of_every_output(ROWS)[1:]]
    grads[0] = grads[0] if uses_loss else None
    given = {"function": linear.linear_loss_and_outputs, "outputs": outputs, "label_smoothing": 0.1}
    for dtype, kind, options, n_products in (
        (torch.float32, "peaked", {"chunk_size": 3}, 12),
        (torch.bfloat16, "some_ignored", {"reduction": "sum", "num_items": 5}, 6),
        (torch.float32, "some_ignored", {"keep_logits": "all", "class_weight": weights()}, 3),
        (torch.float32, "some_ignored", {"class_weight": weights()}, 6),
        (torch.float32, "peaked", {"gradient": "in_backward", "keep_logits": "none"}, 4),
    ):
        if "class_weight" in options and outputs == OUTPUTS:
            continue  # a mean_logit has no weights
        inputs = linear.projection(kind, ROWS, dtype=dtype, bias=True)
        with record_matmuls() as matmuls:
            on_device = {n: v.to(impl_device[1]) if torch.is_tensor(v) else v for n, v in options.items()}
            found = linear.run(impl_device, inputs, *grads, **given, **on_device)
        assert len(matmuls) == n_products, options
        linear.assert_right(found, inputs, *grads, **given, **options)


ORDERS = (("loss", "lse"), ("lse", "loss"), ("loss", "loss"), ("lse", "both", "loss", "both"))


@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_separate_backwards_add_up(impl_device, order, main_grad):
    """In any order and as often as asked, with ``retain_graph``: what forward computed is used once."""
    sums = []
    for gradient in ("auto", "in_backward"):
        case = Leaves(impl_device, dtype=torch.bfloat16)
        given = {"main_grad": torch.zeros(COLUMNS, WIDTH, device=case.device)} if main_grad else {}
        found = case.loss(outputs=("lse",), chunk_size=4, gradient=gradient, **given)
        parts = {"loss": found.loss * 0.7, "lse": found.lse.square().sum(), "both": objective(found, ("lse",))}
        for name in order:
            parts[name].backward(retain_graph=True)
        assert (case.weight.grad is None) == main_grad
        weight = given["main_grad"] if main_grad else case.weight.grad
        sums.append([each.float() for each in (case.hidden.grad, weight, case.bias.grad)])
    for found, expected in zip(*sums, strict=True):
        bound = 2.0**-7 * len(order) * float(expected.abs().max())  # each backward rounds in its own way
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)


def test_forward_by_name_refuses_the_gradient_of_an_output(impl_device):
    """Never a loss whose gradient lacks a part; nothing is changed, and the loss alone has its gradient."""
    mask = torch.ones(ROWS)
    for reduction, name in itertools.product(("mean", "none"), DIFFERENTIABLE):
        case = Leaves(impl_device)
        main_grad = torch.zeros(COLUMNS, WIDTH, device=case.device)
        own = {"expected_grad_output": mask.to(case.device)} if reduction == "none" else {}
        options = {"reduction": reduction, "gradient": "in_forward", "main_grad": main_grad, **own}
        found = case.loss(outputs=(name,), **options)
        expected = f"^outputs: expected no gradient of '{name}' with gradient='in_forward'.*use gradient='in_backward'"
        for each in (objective(found, (name,)), getattr(found, name).sum()):
            with pytest.raises(RuntimeError, match=expected):
                each.backward(retain_graph=True)
        assert not main_grad.any() and case.hidden.grad is None
        found.loss.sum().backward()
        linear.assert_right(
            linear.Results((), case.hidden.grad, main_grad, case.bias.grad),
            case.inputs,
            *([mask] if reduction == "none" else []),
            reduction=reduction,
        )


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_so_does_a_loss_over_logits(impl_device, name):
    impl, device = impl_device
    values = torch.randn(4, 24, generator=torch.Generator().manual_seed(0)).to(device)
    labels, grads = torch.tensor([3, 0, -100, 23], device=device), []
    for gradient in ("in_forward", "out_of_place"):
        leaf = values.clone().requires_grad_()
        found = vocab_parallel_cross_entropy(leaf * 1, labels, outputs=(name,), gradient=gradient, impl=impl)
        if gradient == "in_forward":
            with pytest.raises(RuntimeError, match=f"^outputs: expected no gradient of '{name}' with gradient='in_f"):
                objective(found, (name,)).backward(retain_graph=True)
        (grad,) = torch.autograd.grad(found.loss, leaf)
        grads += [getattr(found, name), grad]
    torch.testing.assert_close(grads[:2], grads[2:], rtol=1e-6, atol=1e-7)


@pytest.mark.reference
def test_statistics_are_kept_only_if_an_output_may_be_differentiated():
    case, shapes = Leaves(("reference", "cpu"), "peaked"), {}
    for outputs in ((), METRICS, ("lse",), ("entropy",)):
        saved: list[torch.Tensor] = []
        with saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
            case.loss(outputs=outputs)
        shapes[outputs] = [t.shape for t in saved]
    gradients = [leaf.shape for leaf in case.leaves]
    assert shapes[()] == shapes[METRICS] == gradients
    of_call = [*gradients, torch.Size([1])]  # with the divisor
    for name, k in (("lse", 3), ("entropy", 4)):
        assert sorted(shapes[(name,)]) == sorted([*gradients, *of_call, torch.Size([1, ROWS, k]), case.labels.shape])


@pytest.mark.parametrize("wrapper", ["reentrant", "not reentrant", "hooks"])
def test_wrappers(impl_device, wrapper):
    """A reentrant checkpoint gives a gradient of 0 to what is not used."""
    results = []
    for used in itertools.product((("lse",), ()), (None, wrapper)):
        case, (outputs, how) = Leaves(impl_device), used

        def call(hidden, case=case):
            found = case.loss(hidden * 2, outputs=("lse",))
            return found.loss, found.lse

        if how == "hooks":
            with saved_tensors_hooks(torch.clone, lambda t: t):
                loss, lse = call(case.hidden)
        else:
            loss, lse = call(case.hidden) if how is None else checkpoint(call, case.hidden, use_reentrant=how[0] == "r")
        (loss + lse.square().sum() if outputs else loss).backward()
        results.append([leaf.grad for leaf in case.leaves])
    for found, expected in ((results[1], results[0]), (results[3], results[2])):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.reference
def test_compiled_code_recomputes_or_leaves_the_mode_by_name_to_eager_code():
    def step(hidden, weight, labels, gradient):
        return linear_cross_entropy(hidden, weight, labels, outputs=("lse",), options=HeadOptions(gradient=gradient))

    case = Leaves(("reference", "cpu"))
    tensors = case.hidden, case.weight, case.labels
    expected = torch.autograd.grad(objective(step(*tensors, "in_backward"), ("lse",)), tensors[:2])
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(objective(compiled(*tensors, "auto"), ("lse",)), tensors[:2])
    assert all(map(torch.equal, found, expected))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="has no operator for this call"):
        compiled(*tensors, "in_forward")
    found = torch.compile(step, backend="aot_eager")(*tensors, "in_forward")
    with pytest.raises(RuntimeError, match="^outputs: expected no gradient of 'lse'"):
        objective(found, ("lse",)).backward()


PARTS = ({}, {"reduce_hidden_grad": False}, {"sequence_parallel": True})


@pytest.mark.parametrize("uses_outputs", [False, True])
@pytest.mark.parametrize("part", PARTS, ids=str)
@in_several_ranks
def test_ranks(rank_pool, impl, part, uses_outputs):
    """Nothing is sent in backward if outputs are read; otherwise what a backward that recomputes sends."""
    world, rows = rank_pool.world_size, 2 * rank_pool.world_size
    inputs = linear.many_tokens(rows, OF_RANK * world, torch.bfloat16)
    grads = (torch.tensor(0.75), *grads_of_every_output(rows)[1:]) if uses_outputs else (torch.tensor(0.75),)
    options = {"outputs": ("entropy", "lse"), "chunk_size": world, **part}
    function = linear.linear_loss_and_outputs
    case = on_ranks.Case(inputs, impl, options, grad_outputs=grads, function=function, main_grad=not uses_outputs)
    results = rank_pool.run(on_ranks.run, case)
    on_ranks.check(case, results)
    recomputing = rank_pool.run(on_ranks.run, case._replace(options={**options, "gradient": "in_backward"}))
    for result, other in zip(results, recomputing, strict=True):
        sent = [[(call.name, call.nbytes) for call in each.in_backward] for each in (result, other)]
        assert sent[0] == (sent[1] if uses_outputs else [])
