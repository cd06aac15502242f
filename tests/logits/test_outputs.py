"""What losses and log-probabilities return beside themselves: values, one gradient for all, edges, names."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.support.cases import logits as of_logits
from tests.support.cases.logits import (
    COLUMNS,
    OUTPUTS,
    broad_rows,
    flat_outputs,
    random_grad_output,
)
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Outputs, token_log_probs, verify_calls, vocab_parallel_cross_entropy

INF = float("inf")
of_pair = partial(of_logits.check, function=token_log_probs, outputs=("entropy",))


@pytest.mark.parametrize("leading", [(2, 3), (4,), (2, 1, 2), (1, 1), (0, 3)])
def test_shapes_and_dtypes_and_the_value_of_the_loss(impl_device, leading):
    impl, device = impl_device
    logits = torch.randn(*leading, COLUMNS, device=device, dtype=torch.bfloat16)
    labels = torch.zeros(leading, dtype=torch.int32, device=device)
    options = {"softcap": 10.0, "logit_scale": 0.4, "impl": impl}
    log_probs = token_log_probs(logits, labels, **options)
    found = token_log_probs(logits, labels, outputs=("entropy",), **options)
    assert isinstance(log_probs, torch.Tensor) and torch.equal(found.log_probs, log_probs)
    for output in (log_probs, found.entropy):
        assert output.shape == leading and output.dtype == torch.float32
    loss = vocab_parallel_cross_entropy(logits, labels, reduction="none", **options)
    assert torch.equal(log_probs, -loss)


def test_each_output_by_itself_has_the_values_of_all_together(impl_device):
    """None for what was not asked for. Those of p alone are what is asked of the logits divided by the temperature."""
    impl, device = impl_device
    logits, labels = (tensor.to(device) for tensor in broad_rows("peaked"))
    every = token_log_probs(logits, labels, outputs=OUTPUTS, impl=impl)
    assert type(every) is Outputs and tuple(vars(every))[2:7] == OUTPUTS
    for name in OUTPUTS:
        alone = token_log_probs(logits, labels, outputs=[name], impl=impl)
        assert [field for field, value in vars(alone).items() if value is not None] == ["log_probs", name]
        torch.testing.assert_close(getattr(alone, name), getattr(every, name), rtol=1e-6, atol=1e-6)


@pytest.mark.reference
def test_fields_are_read_by_name_alone():
    """By position, or unpacked, they gave None for what was not asked for: here ``loss`` before ``log_probs``."""
    logits, labels = broad_rows("peaked")
    found = token_log_probs(logits, labels, outputs=("entropy",))
    for read in (lambda: found[:2], lambda: found[0], lambda: [*found], lambda: dict(zip("ab", found, strict=False))):
        with pytest.raises(TypeError, match="^Outputs: expected a field by name.*read the names that were asked for$"):
            read()
    leaves, structure = tree_flatten(found)
    assert len(leaves) == 2 and leaves[0] is found.log_probs and leaves[1] is found.entropy
    same = tree_unflatten(leaves, structure), pickle.loads(pickle.dumps(found)), copy.deepcopy(found)
    for other in same:
        assert type(other) is Outputs and all(map(torch.equal, flat_outputs(other), leaves)) and other.loss is None


@pytest.mark.reference
def test_names_are_checked_before_ranks_are_compared():
    logits, labels = torch.randn(2, 5), torch.tensor([1, 2])
    with verify_calls():
        with pytest.raises(ValueError, match=r"^outputs: expected one of"):
            token_log_probs(logits, labels, outputs=("loss",))
        assert token_log_probs(logits, labels, outputs=("lse",), temperature=0.7).lse.shape == (2,)


def test_outputs_without_a_gradient_are_constants(impl_device):
    impl, device = impl_device
    leaf = torch.tensor([[1.0, 3.0, 2.0]], device=device, requires_grad=True)
    found = token_log_probs(leaf * 1, torch.tensor([1], device=device), outputs=OUTPUTS, impl=impl)
    names = ("sum_sq_probs", "mean_logit", "predictions")
    assert not any(getattr(found, name).requires_grad for name in names)
    with pytest.raises(RuntimeError, match="does not require grad"):
        found.mean_logit.sum().backward()
    (found.log_probs * torch.inf + found.mean_logit + found.sum_sq_probs).sum().backward()
    assert leaf.grad.tolist() == [[-torch.inf, torch.inf, -torch.inf]]


def test_entropy_of_distributions_that_are_known(impl_device):
    """Uniform, one-hot, uniform over a few columns, and two columns of 3/4 and 1/4."""
    logits = torch.zeros(6, 64)
    logits[1] = -700.0
    logits[2, 5] = 1e4
    logits[3, 7:] = -INF
    logits[4] = -INF
    logits[4, 63] = -5.0
    logits[5], logits[5, 1], logits[5, 2] = -INF, math.log(3.0) - 9, -9.0
    labels = torch.tensor([0, 1, 5, 2, 63, 2])
    mixed = 0.75 * math.log(4 / 3) + 0.25 * math.log(4)
    known = torch.tensor([math.log(64), math.log(64), 0.0, math.log(7), 0.0, mixed]).double()
    (_, entropy), grad = of_pair(impl_device, logits, labels, None, torch.ones(6))
    assert_within_budget(entropy, known, known.float())
    assert float(grad[5].abs().max()) > 0.1 and not grad[logits == -INF].any()


def test_entropy_of_rows_far_from_zero_keeps_its_digits(impl_device):
    """``lse - sum p x`` would subtract two numbers near 10000."""
    logits, labels = broad_rows("peaked", 4)
    steps = (logits * 64).round() / 64
    grads = random_grad_output(), random_grad_output(seed=1)
    near = of_pair(impl_device, steps, labels, *grads)
    for shift in (-8192.0, 8192.0):
        far = of_pair(impl_device, steps + shift, labels, *grads)
        torch.testing.assert_close(far, near, rtol=0, atol=0)


def _predictions(impl_device, logits):
    impl, device = impl_device
    labels = torch.zeros(len(logits), dtype=torch.int64, device=device)
    found = vocab_parallel_cross_entropy(logits.to(device), labels, impl=impl, outputs=("predictions",))
    assert found.predictions.dtype == torch.int64 and not found.predictions.requires_grad
    return found.predictions.tolist()


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_first_of_equal_logits_is_predicted(impl_device, dtype, offset):
    """Over threads, over steps of one thread, and over the columns before and after whole vectors."""
    columns, firsts = 531, (0, 2, 7, 8, 127, 128, 300, 513, 524, 530)
    storage = torch.empty(offset + len(firsts) * columns, dtype=dtype)
    logits = storage[offset:].view(len(firsts), columns)
    logits.copy_(torch.randn(len(firsts), columns) - 9)
    generator = torch.Generator().manual_seed(0)
    for row, first in enumerate(firsts):
        later = torch.randint(first, columns, (40,), generator=generator)
        logits[row, first] = logits[row, later] = -1.5
    moved = storage.to(impl_device[1])[offset:].view(len(firsts), columns)
    assert _predictions(impl_device, moved) == list(firsts)


def test_rows_of_one_value_and_signed_zeros(impl_device):
    """-0 and 0 are equal, and so are all columns of a constant row: the first is predicted."""
    logits = torch.full((4, COLUMNS), -3.0)
    logits[0] = 2.5
    logits[1, 7], logits[1, 9] = -0.0, 0.0
    logits[2] = -INF
    logits[2, 20] = -1000.0
    logits[3, 0], logits[3, 20] = 0.0, -0.0
    assert _predictions(impl_device, logits) == [0, 7, 20, 0]
