"""Sums of groups, in pieces: those of each group alone, and their gradients."""

import pytest
import torch

from vocab_parallel_ce.head.groups import PIECE, Groups

pytestmark = pytest.mark.reference
LENGTHS = ([1], [PIECE], [PIECE + 1], [3, 64, 128, 1, 200], [5000, 1, 1, 63], [1] * 300, [127, 129])


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} of {max(lengths)}")
@pytest.mark.parametrize("shape", [(), (3,)], ids=str)
def test_a_sum_in_pieces_is_that_of_the_group(lengths, shape):
    generator, of = torch.Generator().manual_seed(0), torch.tensor(lengths)
    group = torch.arange(len(of)).repeat_interleave(of)
    groups = Groups(torch.arange(len(of)), of, group)
    values = torch.randn(len(group), *shape, dtype=torch.float64, generator=generator).requires_grad_()
    sums, expected = groups.sum(values), torch.stack([each.sum(0) for each in values.split(lengths)])
    torch.testing.assert_close(sums, expected)
    weights = torch.randn(sums.shape, dtype=torch.float64, generator=generator)
    (gradient,) = torch.autograd.grad((sums * weights).sum(), values)
    assert torch.equal(gradient, weights[group])
    pieces, _ = groups._pieces()
    assert pieces.max() <= PIECE and pieces.sum() == len(group)
