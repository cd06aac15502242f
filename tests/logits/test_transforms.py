"""What cannot see through a loss, or has no values: transforms, recorders of graphs, tensors that are a shape alone.

Shapes are right, or the refusal says what to do, alike for every loss and in every implementation.
"""

from functools import partial

import pytest
import torch
from torch import func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import vocab_parallel_ce as vp
from tests.support.cases import flat
from tests.support.cases.pairs import covering

TOKENS, WIDTH, COLUMNS = 4, 5, 12


def rows_like(z):
    """What stands beside the logits: the same row for each token, without values where they have none."""
    return z.detach().new_ones(COLUMNS).expand(z.shape[-2:])


def head(hidden):
    return hidden.new_full((COLUMNS, hidden.shape[-1]), 0.5)


def known(y):
    tokens = y.view(-1, 1)
    return vp.TopKTeacher(tokens, tokens * 0.0 - 0.1)


OF_LOGITS = {
    "mean": vp.vocab_parallel_cross_entropy,
    "none": lambda z, y, **k: vp.vocab_parallel_cross_entropy(z, y, reduction="none", **k).sum(),
    "log-probs": lambda z, y, **k: vp.token_log_probs(z, y, **k).sum(),
    "divergence": lambda z, y, **k: vp.distillation_loss(z, rows_like(z), **k),
    "known tokens": lambda z, y, **k: vp.distillation_loss(z, known(y), **k),
}
OF_HEADS = {
    "linear": lambda h, y, **k: flat.linear_cross_entropy(h, head(h), y, **k),
    "linear log-probs": lambda h, y, **k: flat.linear_token_log_probs(h, head(h), y, **k).sum(),
    "linear divergence": lambda h, y, **k: flat.linear_distillation_loss(
        vp.Head(h, head(h)), vp.Head(h.detach() / 2, head(h)), **k
    ),
}
FUNCTIONS = OF_LOGITS | OF_HEADS
by_function = pytest.mark.parametrize("function", FUNCTIONS)


def forward_mode(f, x):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, torch.ones_like(x)))


TRANSFORMS = {
    "grad": lambda f, x: func.grad(f)(x),
    "vjp": lambda f, x: func.vjp(f, x),
    "jvp": lambda f, x: func.jvp(f, (x,), (torch.ones_like(x),)),
    "vmap": lambda f, x: func.vmap(f)(x.expand(2, *x.shape)),
    "jacrev": lambda f, x: func.jacrev(f)(x),
    "hessian": lambda f, x: func.hessian(f)(x),
    "forward mode": forward_mode,
}
CASES = covering(transform=tuple(TRANSFORMS), function=tuple(FUNCTIONS), requires_grad=(False, True))
RECORDERS = {"meta": torch.device("meta"), "FakeTensor": FakeTensorMode()}
by_recorder = pytest.mark.parametrize("recorder", RECORDERS)


def arguments(function, device="cpu"):
    width = COLUMNS if function in OF_LOGITS else WIDTH
    values = torch.randn(TOKENS, width, generator=torch.Generator().manual_seed(0))
    return values.to(device).requires_grad_(), torch.arange(TOKENS, device=device)


@pytest.mark.quick(4)
@pytest.mark.interpreted(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_transform_is_refused(impl_device, case):
    """Forward mode gave no tangent in one implementation and the right one in another; vmap likewise."""
    impl, device = impl_device
    transform, function, requires_grad = case.values()
    given, labels = arguments(function, device)
    given.requires_grad_(requires_grad)
    kept = given.detach().clone()
    with pytest.raises(TypeError, match="^cross-entropy: expected .* torch.nn.functional.cross_entropy"):
        TRANSFORMS[transform](lambda t: FUNCTIONS[function](t, labels, impl=impl), given)
    assert torch.equal(given, kept)


def _with_optional(hidden, labels, impl):
    """Of each call: its function, and its tensors that may be left out."""
    x, ones = head(hidden.new_ones(1, TOKENS)), torch.ones(TOKENS, device=hidden.device)
    logits = hidden.detach() @ head(hidden).t()
    return {
        "head": (
            lambda **given: flat.linear_cross_entropy(hidden, labels=labels, impl=impl, **given),
            {
                "weight": head(hidden),
                "bias": x[:, 0].clone(),
                "class_weight": x[:, 1].clone(),
                "main_grad": head(hidden),
            },
        ),
        "items": (
            lambda **given: flat.linear_cross_entropy(hidden, head(hidden), labels, impl=impl, **given),
            {"num_items": torch.tensor(4.0)},
        ),
        "factors": (
            lambda **given: flat.linear_cross_entropy(
                hidden, head(hidden), labels, reduction="none", gradient="in_forward", impl=impl, **given
            ),
            {"expected_grad_output": ones},
        ),
        "objective": (
            lambda advantage, **given: flat.linear_objective(
                hidden,
                head(hidden),
                labels,
                lambda lp, advantage: -lp * advantage,
                tokens={"advantage": advantage},
                **given,
            ),
            {"advantage": ones, "num_items": torch.tensor(4.0)},
        ),
        "logits": (
            lambda **given: vp.vocab_parallel_cross_entropy(logits, labels, reduction="sum", impl=impl, **given),
            {"class_weight": x[:, 1].clone(), "num_items": torch.tensor(4.0)},
        ),
        "log-probs": (
            lambda **given: vp.token_log_probs(logits, labels, impl=impl, **given),
            {"temperature": ones, "threshold": ones - 100},
        ),
        "step": (
            lambda **given: vp.cross_entropy_backward(logits.clone(), **given),
            {"grad_output": ones},
        ),
    }


@pytest.mark.parametrize("call", ("head", "items", "factors", "objective", "logits", "log-probs", "step"))
def test_a_tangent_of_another_tensor_is_refused(impl_device, call):
    impl, device = impl_device
    hidden, labels = arguments("linear", device)
    function, given = _with_optional(hidden, labels, impl)[call]
    with forward_ad.dual_level():
        function(**given)
        for name, tensor in given.items():
            dual = forward_ad.make_dual(tensor, torch.ones_like(tensor))
            with pytest.raises(TypeError, match="without a tangent"):
                function(**given | {name: dual})


@by_function
def test_batched_grad_outputs_and_second_derivatives_are_refused(impl_device, function):
    """``is_grads_batched`` runs backward inside vmap."""
    impl, device = impl_device
    for options, said in (({"is_grads_batched": True}, "is_grads_batched"), ({"create_graph": True}, "create_graph")):
        given, labels = arguments(function, device)
        loss = FUNCTIONS[function](given * 1.0, labels, impl=impl)
        grad_output = torch.ones(3, device=device) if said == "is_grads_batched" else None
        with pytest.raises(RuntimeError, match=said):
            torch.autograd.grad(loss, given, grad_output, **options)


@pytest.mark.reference
@by_recorder
@by_function
def test_shapes_of_losses_over_logits_and_heads_that_need_values(function, recorder):
    with RECORDERS[recorder]:
        given, labels = torch.randn(TOKENS, COLUMNS, requires_grad=True), torch.arange(TOKENS)
        if function in OF_HEADS:
            with pytest.raises(TypeError, match="hidden: expected a tensor with values.*compute the logits"):
                FUNCTIONS[function](given, labels)
            return
        loss = FUNCTIONS[function](given * 1.0, labels)
        loss.backward()
        assert loss.shape == () and loss.dtype == torch.float32 and loss.device == given.device
        assert given.grad.shape == given.shape and given.grad.device == given.device
        if function == "mean":
            with pytest.raises(TypeError, match="labels: expected values to check.*check_labels=False"):
                FUNCTIONS[function](given, labels, check_labels=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("function", OF_LOGITS)
def test_kernels_are_not_launched_on_fake_tensors(function):
    with FakeTensorMode():
        logits, labels = torch.randn(TOKENS, COLUMNS), torch.arange(TOKENS)
        with pytest.raises(ValueError, match="impl: 'triton' needs .* got tensors on meta"):
            FUNCTIONS[function](logits, labels, impl="triton")


@pytest.mark.reference
@by_function
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_jit_trace_is_refused(function):
    with pytest.raises(TypeError, match="expected a call outside of torch.jit.trace.*use torch.compile"):
        torch.jit.trace(FUNCTIONS[function], arguments(function))


@pytest.mark.reference
@pytest.mark.parametrize(
    "function",
    (partial(vp.top_k, k=2), partial(vp.sampling_threshold, top_k=2), partial(vp.sampling_threshold, top_p=0.5)),
)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_jit_trace_of_what_has_no_labels_is_refused(function):
    """It recorded sizes and keys as constants."""
    with pytest.raises(TypeError, match="expected a call outside of torch.jit.trace.*use torch.compile"):
        torch.jit.trace(lambda logits: function(logits), (torch.randn(2, 5),))
