"""No dtype and no bit of a result depends on ``torch.set_default_dtype`` or the default device."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import vocab_parallel_ce as vp
from vocab_parallel_ce import verify

pytestmark = pytest.mark.reference
TOKENS, WIDTH, COLUMNS = 6, 5, 24
OUTPUTS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")
LABELS, IDS = torch.tensor([3, -100, 0, 23, 7, 7]), torch.tensor([[1, 4], [0, 2], [3, 9], [8, 1], [5, 6], [2, 7]])
TEACHER = vp.TopKTeacher(IDS, torch.tensor([0.5, 0.3]).log().expand(TOKENS, 2), "bucket")
SCALES, NO_ITEMS = torch.linspace(0.5, 2.0, TOKENS), torch.tensor(0)
LOSSES = {
    "outputs": lambda z, h, w: vp.vocab_parallel_cross_entropy(
        z, LABELS, reduction="none", z_loss=0.1, outputs=OUTPUTS
    ),
    "mean": lambda z, h, w: vp.vocab_parallel_cross_entropy(z, LABELS, z_loss=0.1, outputs=("lse",), softcap=9.0),
    "no items": lambda z, h, w: vp.vocab_parallel_cross_entropy(z, LABELS, num_items=NO_ITEMS),
    "in forward": lambda z, h, w: vp.vocab_parallel_cross_entropy(z * 1, LABELS, gradient="in_forward"),
    "log-probs": lambda z, h, w: vp.token_log_probs(z, LABELS, temperature=SCALES, outputs=("entropy",)),
    "sampler": lambda z, h, w: vp.token_log_probs(
        z, LABELS, threshold=vp.sampling_threshold(z, top_k=5, top_p=0.9)
    ).nan_to_num(neginf=0.0),
    "sampler of a nucleus": lambda z, h, w: vp.token_log_probs(
        z, LABELS, threshold=vp.sampling_threshold(z, top_p=0.9)
    ).nan_to_num(neginf=0.0),
    "ids": lambda z, h, w: vp.token_log_probs(z, IDS),
    "reverse": lambda z, h, w: vp.distillation_loss(z, z.detach() * 2, divergence="reverse"),
    "top k": lambda z, h, w: vp.distillation_loss(z, TEACHER, labels=LABELS),
    "top k, js": lambda z, h, w: vp.distillation_loss(z, TEACHER, divergence="js", num_items=3),
    "head": lambda z, h, w: vp.linear_cross_entropy(
        h, w, LABELS, reduction="none", outputs=OUTPUTS, options=vp.HeadOptions(chunk_size=2)
    ),
    "valid tokens": lambda z, h, w: vp.linear_cross_entropy(h, w, LABELS, options=vp.HeadOptions(valid_tokens=5)),
    "too many valid tokens": lambda z, h, w: vp.linear_cross_entropy(
        h, w, LABELS, options=vp.HeadOptions(valid_tokens=4, check_labels=False)
    ),
    "head, log-probs": lambda z, h, w: vp.linear_token_log_probs(
        h, w, LABELS, options=vp.HeadOptions(keep_logits="all")
    ),
    "objective": lambda z, h, w: vp.linear_objective(
        h, w, LABELS, lambda lp, scales: -lp * scales, tokens={"scales": SCALES}
    ),
    "heads": lambda z, h, w: vp.linear_distillation_loss(vp.Head(h, w), vp.Head(h.detach() / 2, w.detach())),
}


def results(name, dtype):
    """Return the outputs of a call and its gradients."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((TOKENS, COLUMNS), (TOKENS, WIDTH), (COLUMNS, WIDTH))
    leaves = [
        torch.randn(s, generator=generator, dtype=torch.float32, device="cpu").to(dtype).requires_grad_()
        for s in shapes
    ]
    found = LOSSES[name](*leaves)
    outputs = tree_leaves(found)
    differentiable = [output for output in outputs if output.requires_grad]
    grads = torch.autograd.grad(differentiable, leaves, [t.detach().cos() for t in differentiable], allow_unused=True)
    return [*outputs, *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16), ids=str)
def test_results_do_not_depend_on_it(name, default):
    expected = {dtype: results(name, dtype) for dtype in (torch.float32, torch.bfloat16)}
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found = {dtype: results(name, dtype) for dtype in expected}
    finally:
        torch.set_default_dtype(before)
    for dtype, tensors in expected.items():
        assert [t.dtype for t in found[dtype]] == [t.dtype for t in tensors], dtype
        for own, other in zip(found[dtype], tensors, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", LOSSES)
def test_results_do_not_depend_on_the_default_device(name):
    expected = results(name, torch.float32)
    with torch.device("meta"):
        found = results(name, torch.float32)
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0, equal_nan=True)


def test_what_has_no_gradient_does_not_depend_on_the_default_device():
    z, bounds = torch.randn(TOKENS, COLUMNS), torch.tensor([0, 4, TOKENS])
    hidden, is_valid = torch.randn(TOKENS, WIDTH), LABELS != -100

    def found():
        verify._compare_hidden("hidden", [verify._fingerprint(hidden, is_valid)] * 2)
        with vp.verify_calls():
            thresholds = [vp.sampling_threshold(z, **way) for way in ({"top_k": 3}, {"top_p": 0.5}, {})]
        return [*thresholds, *vp.top_k(z, 3, temperature=0.5), vp.next_labels(LABELS, cu_seqlens=bounds)]

    expected = found()
    with torch.device("meta"):
        assert all(map(torch.equal, found(), expected))


@pytest.mark.parametrize("default", (torch.float64, torch.bfloat16), ids=str)
def test_fingerprints_of_hidden_states_do_not_depend_on_it(default):
    hidden, is_valid = torch.randn(TOKENS, WIDTH), LABELS != -100
    expected, before = verify._fingerprint(hidden, is_valid), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert verify._fingerprint(hidden, is_valid) == expected
        verify._compare_hidden("hidden", [expected, expected])
        other = (expected[0] * 1.05, *expected[1:])  # bf16 would still tell; a rounded one must not
        with pytest.raises(ValueError, match="^hidden: rank 1 of 2 has values of norm"):
            verify._compare_hidden("hidden", [expected, other])
    finally:
        torch.set_default_dtype(before)
