"""Counts and sums of exponentials above several thresholds at once."""

import pytest
import torch

from tests.kernels.rows import walked_layouts
from tests.support.inputs import DTYPES
from vocab_parallel_ce import reference
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN


def found(logits, thresholds, shift=None, temperature=None, options=PLAIN, n_valid=None, impl=None):
    """Return ``[N, T]``, of the kernel or of ``impl``."""
    from vocab_parallel_ce.kernels import sums_above

    columns = logits.shape[-1]
    sums = torch.empty_like(thresholds, dtype=torch.int32 if shift is None else torch.float32)
    shard = VocabShard(0, columns, columns if n_valid is None else n_valid)
    (impl or sums_above)(logits, thresholds, shift, temperature, sums, shard=shard, options=options)
    return sums


def test_worked_example(kernel_device):
    x, thresholds = (torch.tensor(values, device=kernel_device) for values in ([[1.0, 3.0, 2.0]], [[1.0, 2.5]]))
    assert found(x, thresholds).tolist() == [[2, 1]]
    sums = found(x, thresholds, torch.tensor([3.0], device=kernel_device))
    torch.testing.assert_close(sums.cpu(), torch.tensor([[1.3679, 1.0]]), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", (3, 64, 2051))
def test_numbers(kernel_device, dtype, columns):
    """Equal logits are not above, nor are -inf and padding; options and temperatures are those of z."""
    x = (torch.randn(5, columns) * 3).to(dtype)
    x[0], x[1, 0] = x[0, 0], -float("inf")
    thresholds = x.float()[:, torch.tensor([0, 1, columns - 1, 2, 0])].sort(dim=-1).values
    thresholds[2], thresholds[3, 0] = 100.0, -float("inf")
    options, row_max = PLAIN._replace(logit_scale=0.5, softcap=8.0), x.float().amax(dim=-1)
    temperature = torch.rand(5) + 0.5
    for ways in (
        {},
        {"n_valid": columns - 1},
        {"shift": row_max},
        {"shift": row_max, "temperature": temperature},
        {"shift": 0.5 * row_max, "options": options, "temperature": temperature},
    ):
        there = {name: w.to(kernel_device) if torch.is_tensor(w) else w for name, w in ways.items()}
        got = found(x.to(kernel_device), thresholds.to(kernel_device), **there).cpu()
        want = found(x, thresholds, **ways, impl=reference.sums_above)
        is_open = thresholds[:, 0] != thresholds[:, -1]
        torch.testing.assert_close(got[is_open], want[is_open], rtol=1e-5, atol=1e-6)
        assert not got[~is_open].any()


def test_every_layout(kernel_device):
    for layout in walked_layouts(67, disjoint=True, device=kernel_device):
        rows = layout.view.shape[:-1].numel()
        thresholds = torch.tensor([-0.5, 0.0, 0.25], device=kernel_device).repeat(rows, 1)
        want = (layout.view.reshape(rows, 1, 67) > thresholds.unsqueeze(-1)).sum(dim=-1)
        assert torch.equal(found(layout.view, thresholds).long(), want)
