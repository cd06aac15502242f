"""Saved-tensor hooks: checkpoints, offloading and compilation around a loss whose logits others use too.

Autograd compares no version of a tensor that went through such hooks. What overwrites it then trains on
another gradient without an error: the defaults must not overwrite there. The programs are those of
``support/random/programs.py``, chosen instead of drawn.
"""

import importlib.util

import pytest
import torch
from torch.autograd.graph import save_on_cpu

from tests.support.cases.pairs import covering
from tests.support.random.programs import Package, outcome, problem
from tests.support.random.wrappers import Case, Use
from vocab_parallel_ce import plan, vocab_parallel_cross_entropy

# The outermost first.
SIMPLE = ("checkpoint", "identity", "copies", "save_on_cpu")
COMPILED = ("compiled checkpoint", "compiled identity", "identity compiled")
WITHOUT_HOOKS = ("", "reentrant")
# Who else uses the logits, or the hidden states.
OTHERS = {
    "auxiliary loss": {"before": "lse"},
    "second loss": {},
    "saved output": {"source": "sigmoid"},
    "read afterwards": {"after": "softmax"},
}
# By a gradient mode of the loss, as a module, as log-probabilities, or by TransformerEngine's signature.
OVER_LOGITS = {
    "auto": ("loss", "auto", "mean"),
    "in_backward": ("loss", "in_backward", "mean"),
    "out_of_place": ("loss", "out_of_place", "mean"),
    "module": ("module", "auto", "mean"),
    "log_probs": ("log_probs", "auto", "none"),
    "te": ("te", None, "mean"),
    "te, none": ("te", None, "none"),
}
OVER_HEADS = {name: OVER_LOGITS[name] for name in ("auto", "in_backward", "module", "log_probs")}
LOSSES = tuple(name for name in OVER_LOGITS if name != "in_backward")
HOOKED_CASES = covering(wrapper=SIMPLE, other=tuple(OTHERS), loss=LOSSES)
HOOKED_CASES += covering(wrapper=COMPILED, other=tuple(OTHERS), loss=("auto", "log_probs", "te"))
# Hidden states are never overwritten, so compiled wrappers add nothing to what tests of compiled calls have.
LINEAR_CASES = covering(wrapper=(*WITHOUT_HOOKS, *SIMPLE), other=tuple(OTHERS), loss=tuple(OVER_HEADS))
IN_PLACE = {
    "in_backward": OVER_LOGITS["in_backward"],
    "in_forward": ("loss", "in_forward", "mean"),
    "te, overwriting": ("te", True, "mean"),
}
# Reentrant checkpoints and no wrapper at all: autograd sees what is overwritten by name.
SEEN = ("auto", "in_backward", "log_probs", "te, none")


def program(family, wrapper, other, function, gradient, reduction, **options):
    grad_output = "one" if reduction == "mean" else "random"
    use = Use(function, gradient, {"reduction": reduction, **options}, "", 5, 0.0, grad_output)
    losses = (use, use._replace(labels=6, grad_output="factor")) if other == "second loss" else (use,)
    head = "module" if function == "module" else "leaf"
    features = {"source": "product", **OTHERS[other], "wrappers": tuple(wrapper.split()), "head": head}
    return Case(f"{family}-{other}", family, 1, torch.float32, (7,), 21, losses=losses, **features)


def check(impl_device, case):
    result = outcome(case, Package(*impl_device, case.dtype))
    assert not isinstance(result, str), result
    assert not problem(case, [result], impl_device[1])


def by_case(cases):
    return pytest.mark.parametrize(tuple(cases[0]), [tuple(case.values()) for case in cases])


@pytest.mark.quick(3)
@pytest.mark.interpreted(4)
@by_case(HOOKED_CASES)
def test_under_hooks_the_loss_over_logits_is_right(impl_device, wrapper, other, loss):
    check(impl_device, program("logits", wrapper, other, *OVER_LOGITS[loss]))


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("wrapper", SIMPLE)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("loss", IN_PLACE)
def test_under_hooks_an_explicit_mode_is_refused_by_name(impl_device, wrapper, other, loss):
    """Whoever had saved the logits used the gradient in their place."""
    case = program("logits", wrapper, other, *IN_PLACE[loss])
    result = outcome(case, Package(*impl_device, case.dtype))
    assert result.startswith("ValueError: gradient: 'in_") and "use gradient='auto'" in result


@pytest.mark.reference
@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_a_call_that_ran_before_is_refused_under_hooks_and_changes_nothing(gradient):
    labels, values = torch.tensor([1, 2, 3]), torch.randn(3, 8)
    for _ in range(2):
        logits = values.clone().requires_grad_() * 1
        vocab_parallel_cross_entropy(logits, labels, gradient=gradient).backward()
        logits = values.clone().requires_grad_() * 1
        with save_on_cpu(), pytest.raises(ValueError, match="^gradient: .* got a call inside; use gradient='auto'"):
            vocab_parallel_cross_entropy(logits, labels, gradient=gradient)
        assert torch.equal(logits, values) and logits._version == 0
        with save_on_cpu(), torch.no_grad():  # nothing is overwritten
            vocab_parallel_cross_entropy(logits, labels, gradient=gradient)
        assert torch.equal(logits, values)


@by_case(LINEAR_CASES)
def test_the_linear_loss_is_right_in_every_wrapper(impl_device, wrapper, other, loss):
    """Hidden states and weight are never overwritten."""
    check(impl_device, program("linear", wrapper, other, *OVER_HEADS[loss], chunk_size=3))


@pytest.mark.interpreted(4)
@pytest.mark.parametrize("wrapper", WITHOUT_HOOKS)
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("loss", SEEN)
def test_without_hooks_it_is_right_or_refused_by_name(impl_device, wrapper, other, loss):
    case = program("logits", wrapper, other, *OVER_LOGITS[loss])
    if loss != "in_backward" or other == "read afterwards":
        check(impl_device, case)
    else:
        result = outcome(case, Package(*impl_device, case.dtype))
        assert result.startswith("RuntimeError: ") and "modified by an inplace operation" in result


def overwrites() -> bool:
    """Whether backward of the default writes the gradient over logits that nobody else holds."""
    found = []
    logits = torch.randn(3, 8, requires_grad=True) * 1
    address = logits.data_ptr()
    logits.register_hook(lambda grad: found.append(grad.data_ptr() == address))
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3]))
    del logits
    loss.backward()
    return found == [True]


@pytest.mark.reference
def test_hooks_are_seen_only_while_they_are_active():
    assert overwrites()
    with save_on_cpu():
        assert not overwrites()
    assert overwrites()


@pytest.mark.reference
def test_a_pytorch_that_cannot_say_whether_hooks_are_active_writes_out_of_place(monkeypatch):
    """The package asks for PyTorch's function when it is imported."""
    monkeypatch.delattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
    imported_again = importlib.util.module_from_spec(plan.__spec__)
    plan.__spec__.loader.exec_module(imported_again)
    monkeypatch.setattr(plan, "top_saved_tensor_hooks", imported_again.top_saved_tensor_hooks)
    assert not overwrites()
