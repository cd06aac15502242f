"""fp32 logits of 16-bit heads: log-probabilities of an fp32 head, and the memory they take."""

import pytest
import torch

from tests.support import linear
from tests.support.budget import assert_within_budget
from tests.support.linear import BY_WAY, COLUMNS, WIDTH, assert_right, many_tokens, projection, record_matmuls
from vocab_parallel_ce import LinearCrossEntropy, linear_cross_entropy, linear_token_log_probs

FP32 = {"logits_dtype": torch.float32}
TOLERANCE = {"rtol": 1.3e-6, "atol": 1e-5}
ROWS = 6
BY_DTYPE = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@BY_DTYPE
@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_are_those_of_an_fp32_head_and_the_default_ones_are_not(impl_device, dtype, autocast):
    impl, device = impl_device
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((24, 32), (200, 32), (200,)))
    labels = torch.randint(0, 200, (24,), generator=generator).to(device)
    short = [t.to(device, dtype) for t in (hidden, weight, bias)]
    options = {"impl": impl, "temperature": 0.7, "entropy": True}
    *exact, added = (t.float() for t in short)
    added = bias.to(device) if autocast else added  # which autocast need not round
    given = (*exact, added) if autocast else short
    truth = linear_token_log_probs(*exact, labels, bias=added, **options)
    with torch.autocast(device, dtype, enabled=autocast):
        found = linear_token_log_probs(*given[:2], labels, bias=given[2], **options, **FP32)
        rounded = linear_token_log_probs(*given[:2], labels, bias=given[2], **options)
    for value, default, expected in zip(found, rounded, truth, strict=True):
        torch.testing.assert_close(value, expected, **TOLERANCE)
        assert (default - expected).abs().max() > 100 * TOLERANCE["atol"]


@BY_WAY
def test_an_fp32_head_is_as_it_was(impl_device, way):
    inputs = projection("some_ignored", ROWS, bias=True)
    grad_output = linear.grad_output_of(way, ROWS)
    found, same = (linear.run(impl_device, inputs, grad_output, **way, **more) for more in (FP32, {}))
    for value, expected in zip((*found.outputs, *found[1:]), (*same.outputs, *same[1:]), strict=True):
        assert torch.equal(value, expected)


@BY_DTYPE
@BY_WAY
def test_the_gradient_is_rounded_once(impl_device, way, dtype):
    """Also if it is summed over chunks into main_grad."""
    inputs, device = many_tokens(40, COLUMNS, dtype), impl_device[1]
    grad_output = linear.grad_output_of(way, 40)
    linear.check(impl_device, inputs, grad_output, **way, **FP32)
    main_grad = torch.zeros(COLUMNS, WIDTH, device=device)
    linear.run(impl_device, inputs, grad_output, main_grad=main_grad, chunk_tokens=16, **way, **FP32)
    truth = linear.linear_fp64(inputs, grad_output, **way)
    peer = linear.linear_same_dtype(inputs, grad_output, weight_dtype=torch.float32, **way, **FP32)
    assert_within_budget(main_grad, truth.weight, peer.weight)


def test_an_expected_grad_output(impl_device):
    inputs, mask = projection("some_ignored", ROWS, dtype=torch.bfloat16, bias=True), torch.ones(ROWS)
    mask[0] = 0
    options = {"reduction": "none", "gradient": "in_forward", **FP32}
    device = impl_device[1]
    result = linear.run(impl_device, inputs, -0.37 * mask, expected_grad_output=mask.to(device), **options)
    assert_right(result, inputs, -0.37 * mask, **options)


def test_a_budget_counts_6_bytes_of_a_logit(impl_device):
    impl, device = impl_device
    inputs = projection("peaked", ROWS, dtype=torch.bfloat16)
    leaves = [t.to(device).requires_grad_() for t in inputs[:2]]
    for n_chunks, budget in ((2, 3 * 6 * COLUMNS), (3, 3 * 6 * COLUMNS - 1)):
        with record_matmuls() as matmuls:
            options = {"impl": impl, "memory_budget": budget, **FP32}
            linear_cross_entropy(*leaves, inputs.labels.to(device), **options)
        assert len(matmuls) == 3 * n_chunks
    with pytest.raises(ValueError, match=f"memory_budget: must hold a token's logits, {6 * COLUMNS} bytes"):
        linear_cross_entropy(*leaves, inputs.labels.to(device), impl=impl, memory_budget=6 * COLUMNS - 1, **FP32)


def test_the_module_and_one_pass(impl_device):
    impl, device = impl_device
    inputs, head = projection("peaked", ROWS, dtype=torch.bfloat16), torch.nn.Embedding(COLUMNS, WIDTH)
    head.weight = torch.nn.Parameter(inputs.weight.to(device))
    hidden, labels = inputs.hidden.to(device), inputs.labels.to(device)
    module = LinearCrossEntropy(head, impl=impl, **FP32)
    expected = linear_cross_entropy(hidden.float(), head.weight.float(), labels, impl=impl)
    torch.testing.assert_close(module(hidden, labels), expected, **TOLERANCE)
    assert "logits_dtype=torch.float32" in repr(module)
    with pytest.raises(ValueError, match="^impl: 'one_pass' writes no 16-bit gradient of fp32 logits"):
        linear_cross_entropy(hidden, head.weight, labels, impl="one_pass", **FP32)
