"""Tensors that have a shape alone, and recorders of graphs: shapes are right, or the refusal says what to do."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vocab_parallel_ce import (
    distillation_loss,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_token_log_probs,
    soft_cross_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

TOKENS, WIDTH, COLUMNS = 6, 5, 11


def head(hidden, columns=COLUMNS):
    return hidden.new_full((columns, hidden.shape[-1]), 0.5)


OF_LOGITS = {
    "vocab_parallel_cross_entropy": lambda z, y, **k: vocab_parallel_cross_entropy(z, y, **k),
    "token_log_probs": lambda z, y, **k: token_log_probs(z, y, **k).sum(),
    "soft_cross_entropy": lambda z, y, **k: soft_cross_entropy(z, z.detach().softmax(-1), **k),
    "distillation_loss": lambda z, y, **k: distillation_loss(z, z.detach() / 2, **k),
}
OF_HEADS = {
    "linear_cross_entropy": lambda h, y: linear_cross_entropy(h, head(h), y),
    "linear_token_log_probs": lambda h, y: linear_token_log_probs(h, head(h), y).sum(),
    "linear_distillation_loss": lambda h, y: linear_distillation_loss(h, head(h), h.detach() / 2, head(h)),
}
RECORDERS = {"meta": torch.device("meta"), "FakeTensor": FakeTensorMode()}


def arguments(name):
    width = COLUMNS if name in OF_LOGITS else WIDTH
    return torch.randn(TOKENS, width, requires_grad=True), torch.arange(TOKENS)


@pytest.mark.reference
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", OF_LOGITS)
def test_shapes_of_losses_over_logits(name, recorder):
    with RECORDERS[recorder]:
        logits, labels = arguments(name)
        loss = OF_LOGITS[name](logits * 1.0, labels)
        loss.backward()
        assert loss.shape == () and loss.dtype == torch.float32 and loss.device == logits.device
        assert logits.grad.shape == logits.shape and logits.grad.device == logits.device


@pytest.mark.interpreter
@pytest.mark.parametrize("name", OF_LOGITS)
def test_kernels_are_not_launched_on_fake_tensors(name):
    with FakeTensorMode():
        logits, labels = arguments(name)
        OF_LOGITS[name](logits * 1.0, labels).backward()
        assert logits.grad.shape == logits.shape
        with pytest.raises(ValueError, match="impl: 'triton' needs .* got tensors on meta"):
            OF_LOGITS[name](logits, labels, impl="triton")


@pytest.mark.reference
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("name", OF_HEADS)
def test_heads_refuse_hidden_states_without_values(name, recorder):
    with (
        RECORDERS[recorder],
        pytest.raises(TypeError, match="hidden: expected a tensor with values.*compute the logits"),
    ):
        OF_HEADS[name](*arguments(name))


@pytest.mark.reference
@pytest.mark.parametrize("recorder", RECORDERS)
def test_labels_without_values_cannot_be_checked(recorder):
    with RECORDERS[recorder], pytest.raises(TypeError, match="labels: expected values to check.*check_labels=False"):
        OF_LOGITS["vocab_parallel_cross_entropy"](*arguments("vocab_parallel_cross_entropy"), check_labels=True)


@pytest.mark.reference
@pytest.mark.parametrize("name", [*OF_LOGITS, *OF_HEADS])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_jit_trace_is_refused(name):
    with pytest.raises(TypeError, match="expected a call outside of torch.jit.trace.*use torch.compile"):
        torch.jit.trace((OF_LOGITS | OF_HEADS)[name], arguments(name))


@pytest.mark.reference
@pytest.mark.parametrize("name", [*OF_LOGITS, *OF_HEADS])
def test_second_derivatives_are_refused(name):
    tensor, labels = arguments(name)
    loss = (OF_LOGITS | OF_HEADS)[name](tensor * 1.0, labels)
    with pytest.raises(RuntimeError, match="expected backward without create_graph, got one with it.*use torch.nn"):
        torch.autograd.grad(loss, tensor, create_graph=True)
