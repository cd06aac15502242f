"""What of a projection and its loss is computed, when, and where the gradients go."""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import vocab_parallel_ce as vp
from tests.support.cases import linear
from tests.support.cases.linear import (
    COLUMNS,
    TWO_WAYS,
    WAYS,
    WIDTH,
    Leaves,
    Results,
    assert_right,
    check,
    record_matmuls,
)
from tests.support.cases.linear import N_LEAVES as ROWS
from tests.support.cases.weights import weights
from vocab_parallel_ce.targets import Role, Tokens, check_target

MOMENTS = ("mean", "mean, in_backward", "none")
AT_ANY_MOMENT = pytest.mark.parametrize("way", [WAYS[name] for name in MOMENTS], ids=MOMENTS)


FROZEN = [
    ((), {"mean": 3, "sum, in_backward": 4, "none": 4}),
    (("weight",), {"mean": 2, "mean, in_backward": 3, "none": 3}),
    (("hidden",), {"mean": 2, "none": 3}),
    (("hidden", "weight"), {"mean": 1, "none": 2}),
    (("hidden", "weight", "bias"), {"mean": 1, "none": 1}),
]


@pytest.mark.interpreted(4)
@pytest.mark.parametrize(
    ("frozen", "way", "expected"), [(frozen, way, n) for frozen, counts in FROZEN for way, n in counts.items()]
)
def test_only_the_matmuls_that_are_needed(impl_device, frozen, way, expected):
    """Gradients that somebody wants: in forward, or after the logits were computed again in backward."""
    case, chunks = Leaves(impl_device, "peaked", frozen=frozen), 2
    with record_matmuls() as in_forward:
        loss = case.loss(chunk_size=ROWS // chunks, **WAYS[way])
    assert loss.requires_grad == bool(case.leaves)
    with record_matmuls() as in_backward:
        if case.leaves:
            loss.backward(case.grad_output(loss))
    gradients_in_forward = WAYS[way].get("gradient") == "in_forward" or not case.leaves
    assert len(in_forward) == chunks * (expected if gradients_in_forward else 1), in_forward
    assert len(in_forward) + len(in_backward) == chunks * expected, in_backward
    check(impl_device, case.inputs, case.grad_output(loss).cpu(), frozen=frozen, **WAYS[way])


@TWO_WAYS
def test_without_a_gradient_there_are_the_logits_and_nothing_else(impl_device, way):
    case = Leaves(impl_device)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), record_matmuls() as matmuls:
            loss = case.loss(**way)
        assert len(matmuls) == 1 and not loss.requires_grad
        case.assert_gradients(loss, (None, None, None), case.grad_output(loss), **way)


@pytest.mark.parametrize(("options", "of_a_logit"), [({}, 2), ({"logits_dtype": torch.float32}, 6)])
def test_a_budget_of_memory_bounds_the_logits_that_exist_at_a_time(impl_device, options, of_a_logit):
    case, of_a_token = Leaves(impl_device, "peaked", dtype=torch.bfloat16), of_a_logit * COLUMNS
    for n_chunks, budget in ((1, ROWS * of_a_token), (2, 3 * of_a_token), (3, 3 * of_a_token - 1), (ROWS, of_a_token)):
        for text in (f"{budget}B", f"{budget / 1e6:.6f} MB", f"{(budget + 0.5) / 2**10:.6f}KiB"):
            with record_matmuls() as matmuls:
                case.loss(chunk_size=text, **options)
            assert len(matmuls) == 3 * n_chunks, text
    with pytest.raises(ValueError, match=f"^chunk_size: .* {of_a_token} bytes"):
        case.loss(chunk_size=f"{of_a_token - 1}B", **options)


@pytest.mark.parametrize(("dtype", "says_so"), [(torch.float32, False), (torch.bfloat16, True)])
@AT_ANY_MOMENT
def test_the_weights_gradient_is_added_to_main_grad(impl_device, way, dtype, says_so):
    """In fp32 and by backward alone; autograd then gets none, so that nobody adds it a second time.

    Or zeros, if the parameter says whether it was added: Megatron's optimizer adds the gradient unless that is True.
    """
    case = Leaves(impl_device, dtype=dtype)
    main_grad = torch.zeros(COLUMNS, WIDTH, device=case.device)
    for step in (1, 2):
        before = main_grad.clone()
        if says_so:
            case.weight.grad_added_to_main_grad = False
        loss = case.loss(main_grad=main_grad, chunk_size=2, **way)
        assert torch.equal(main_grad, before), "written by forward"
        assert not getattr(case.weight, "grad_added_to_main_grad", False)
        grad_output = case.grad_output(loss)
        loss.backward(grad_output)
        assert getattr(case.weight, "grad_added_to_main_grad", False) is says_so
        assert_right(Results((), None, main_grad.to(dtype), None), case.inputs, step * grad_output.cpu(), **way)
    assert not case.weight.grad.any() if says_so else case.weight.grad is None
    assert case.bias.grad is not None and case.hidden.grad is not None
    assert not torch.equal(main_grad, main_grad.bfloat16().float()), "rounded on the way"


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16])
@TWO_WAYS
def test_autocast_multiplies_in_its_dtype_and_leaves_fp32_gradients_unrounded(impl_device, way, hidden_dtype):
    case = Leaves(impl_device)
    case.hidden = case.hidden.detach().to(hidden_dtype).requires_grad_()
    case.inputs = case.inputs._replace(hidden=case.hidden.detach().float().cpu())
    with torch.autocast(case.device, torch.bfloat16):
        loss = case.loss(chunk_size=2, **way)
    grad_output = case.grad_output(loss)
    loss.backward(grad_output)
    truth = linear.linear_fp64(case.inputs, grad_output.cpu(), **way)
    peer = linear.linear_same_dtype(
        case.inputs.to(torch.bfloat16), grad_output.cpu(), weight_dtype=torch.float32, **way
    )
    peer = peer._replace(hidden=peer.hidden.bfloat16().to(hidden_dtype))  # the product is rounded
    linear.assert_results(Results((loss,), case.hidden.grad, case.weight.grad, case.bias.grad), truth, peer)
    assert not torch.equal(case.weight.grad, case.weight.grad.bfloat16().float())


@pytest.mark.parametrize("use_reentrant", [False, True])
@TWO_WAYS
def test_checkpointed_recomputation(impl_device, way, use_reentrant):
    """Forward runs twice, once without a graph where it is reentrant; main_grad is added to once."""
    expected, got = [], []
    for results in (expected, got):
        case = Leaves(impl_device, dtype=torch.bfloat16)
        main_grad = torch.zeros(COLUMNS, WIDTH, device=case.device)
        for options in ({}, {"main_grad": main_grad}):

            def head(hidden, case=case, options=options):
                return case.loss(hidden * 2, **options, **way)

            plain = results is expected
            loss = head(case.hidden) if plain else checkpoint(head, case.hidden, use_reentrant=use_reentrant)
            loss.backward(case.grad_output(loss))
            results.append(loss)
        results += [case.hidden.grad, case.weight.grad, case.bias.grad, main_grad]
    for value, same in zip(got, expected, strict=True):
        assert torch.equal(value, same)


@AT_ANY_MOMENT
def test_a_second_backward_gives_the_same_again_or_names_the_remedy(impl_device, way):
    """Others scale their saved buffer twice, silently."""
    case = Leaves(impl_device, dtype=torch.bfloat16)
    loss = case.loss(**way)
    grad_output = case.grad_output(loss)
    first = torch.autograd.grad(loss, case.leaves, grad_output, retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    try:
        second = torch.autograd.grad(loss, case.leaves, grad_output, retain_graph=True)
    except RuntimeError as error:
        if way.get("gradient") != "in_forward" or "in_backward" not in str(error):
            raise
        second = first
    for before, gradient, again in zip(kept, first, second, strict=True):
        assert torch.equal(gradient, before) and torch.equal(again, before)
    case.assert_gradients(loss, first, grad_output, **way)
    if way.get("gradient") != "in_forward":
        third = torch.autograd.grad(loss, case.leaves, 2 * grad_output)
        case.assert_gradients(loss, third, grad_output, times=2, **way)
    # A gradient that pretends to be a constant would be silently wrong.
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        torch.autograd.grad(case.loss(**way), case.leaves, grad_output, create_graph=True)


@pytest.mark.parametrize("name", ["weight", "num_items", "class_weight"])
def test_what_changes_before_backward_is_noticed(impl_device, name):
    """By an optimizer's step, or counted up in place over a step's batches."""
    case = Leaves(impl_device)
    given = {"num_items": torch.tensor(5.0, device=case.device), "class_weight": weights().to(case.device)}
    loss = case.loss(reduction="sum", gradient="in_backward", label_smoothing=0.1, **given)
    with torch.no_grad():
        {"weight": case.weight, **given}[name].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.reference
def test_a_selective_checkpoint_may_save_products_that_return_new_memory():
    aten = torch.ops.aten
    hidden, weight, labels = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.arange(6)

    def gradient(products):
        contexts = functools.partial(create_selective_checkpoint_contexts, products)
        loss = checkpoint(
            lambda h: vp.linear_cross_entropy(h, weight, labels), hidden, use_reentrant=False, context_fn=contexts
        )
        return torch.autograd.grad(loss, hidden)[0]

    plain = torch.autograd.grad(vp.linear_cross_entropy(hidden, weight, labels), hidden)[0]
    assert torch.equal(gradient([aten.mm.default, aten.addmm.default]), plain)
    with pytest.raises(RuntimeError, match="has been mutated"):
        gradient([aten.mm.default, aten.mm.out])


@pytest.mark.reference
def test_labels_of_a_part_of_the_tokens_under_sequence_parallelism():
    tokens = Tokens(torch.zeros(2, 4), "hidden", (4,))  # two ranks have two each
    with pytest.raises(ValueError, match=r"^labels: shape must be that of all ranks' tokens, \(4,\), got \(2,\)"):
        check_target("labels", torch.zeros(2, dtype=torch.int64), Role("ids", ("rows",)), tokens)
