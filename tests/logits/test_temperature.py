"""A tensor temperature, of one element or one per token: the oracle's results, edges, memory."""

import pytest
import torch

from tests.support.cases import linear
from tests.support.cases import logits as of_logits
from tests.support.cases.linear import linear_every_output, projection
from tests.support.cases.logits import ROWS, broad_rows, every_output
from tests.support.host.gpu import assert_host_never_waits
from vocab_parallel_ce import linear_token_log_probs, token_log_probs

NAN, INF = float("nan"), float("inf")
FORMS = {"tokens": torch.float32, "bf16 tokens": torch.bfloat16, "fp64 tokens": torch.float64, "one": torch.float32}


def temperatures(form="tokens", rows=ROWS):
    """Different in every row, on both sides of 1. One is exact: others are those of the number, bit for bit."""
    return torch.tensor(0.5) if form == "one" else torch.linspace(0.4, 1.9, rows).to(FORMS[form])


@pytest.mark.parametrize("module", [of_logits, linear], ids=["logits", "linear"])
def test_one_element_is_the_number_bit_for_bit(impl_device, module):
    inputs, function = (projection(),), linear_every_output
    if module is of_logits:
        inputs, function = broad_rows("peaked"), every_output
    number = torch.tensor(0.7)
    of_number, *others = (
        module.run(impl_device, *inputs, function=function, temperature=t, logit_scale=0.5)
        for t in (float(number), number.to(impl_device[1]), number.view(1, 1).to(impl_device[1]))
    )
    for other in others:
        torch.testing.assert_close(other, of_number, rtol=0, atol=0)


@pytest.mark.reference
def test_leading_dimensions_and_a_changed_temperature():
    logits, labels = broad_rows("peaked", 6)
    strided = (t := temperatures(rows=6)).view(3, 2).t()
    shaped = token_log_probs(logits.view(2, 3, -1), labels.view(2, 3), temperature=strided)
    assert torch.equal(shaped.flatten(), token_log_probs(logits, labels, temperature=strided.flatten()))
    head = torch.randn(4, logits.shape[1])
    for loss in (
        token_log_probs(logits.requires_grad_() * 1, labels, temperature=t),
        linear_token_log_probs(logits, head, labels % 4, temperature=t),
    ):
        t += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.sum().backward()


@pytest.mark.cuda
def test_the_host_never_waits():
    logits, labels = (tensor.cuda() for tensor in broad_rows("peaked"))
    leaf, t = logits.requires_grad_(), temperatures().cuda()

    def step():
        token_log_probs(leaf * 1, labels, outputs=("entropy",), temperature=t).entropy.sum().backward()

    assert_host_never_waits(step)
