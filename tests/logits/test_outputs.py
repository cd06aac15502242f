"""What losses and log-probabilities return beside themselves: values, one gradient for all, edges, names."""

import copy
import pickle

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.support.cases.logits import (
    COLUMNS,
    OUTPUTS,
    broad_rows,
    flat_outputs,
)
from vocab_parallel_ce import Outputs, token_log_probs, vocab_parallel_cross_entropy


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
    logits[2] = -torch.inf
    logits[2, 20] = -1000.0
    logits[3, 0], logits[3, 20] = 0.0, -0.0
    assert _predictions(impl_device, logits) == [0, 7, 20, 0]
