"""What finds the largest logits of rows, against PyTorch: numbers that are copied and counted are equal."""

import pytest
import torch

from tests.support.cases.inputs import DTYPES
from vocab_parallel_ce.spec import PLAIN, transformed

NAN, INF = float("nan"), float("inf")
DTYPES_OF_KERNELS = [dtype for dtype in DTYPES if dtype != torch.float64]


def rows_of(columns, dtype, device):
    """Rows with many equal logits, one with NaN, and some of -inf, in every second row of a larger tensor."""
    wide = (torch.randn(14, columns + 3) * 2).round().to(dtype)
    wide[4, columns // 2], wide[6, :] = NAN, -INF
    wide[8, -4] = INF
    return wide[::2, :columns].to(device)


@pytest.mark.parametrize("dtype", DTYPES_OF_KERNELS, ids=str)
@pytest.mark.parametrize("columns", (1, 64, 200, 4097))
def test_maxima_of_tiles(kernel_device, dtype, columns):
    from vocab_parallel_ce.kernels.largest import tile_maxima

    for rows in (rows_of(columns, dtype, kernel_device), rows_of(7, dtype, kernel_device).t()):
        want = torch.stack([tile.amax(dim=-1) for tile in rows.split(64, dim=-1)], dim=-1)
        assert torch.equal(tile_maxima(rows, 64).nan_to_num(nan=1e4), want.nan_to_num(nan=1e4))


@pytest.mark.parametrize("dtype", DTYPES_OF_KERNELS, ids=str)
@pytest.mark.parametrize("columns", (1, 200, 4097))
def test_how_many_are_equal_and_the_largest_below(kernel_device, dtype, columns):
    from vocab_parallel_ce.kernels.largest import equal_and_below

    for rows in (rows_of(columns, dtype, kernel_device), rows_of(7, dtype, kernel_device).t()):
        numbers = rows.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).amax(dim=-1)
        strided = numbers[:, None].expand(-1, 2).contiguous()[:, 0]
        n_equal, below = equal_and_below(rows, strided)
        assert torch.equal(n_equal, (rows == numbers[:, None]).sum(dim=-1).int())
        assert torch.equal(below, torch.where(rows < numbers[:, None], rows, -INF).amax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES_OF_KERNELS, ids=str)
@pytest.mark.parametrize("options", (PLAIN, PLAIN._replace(softcap=3.0, logit_scale=0.5)), ids=("plain", "softcap"))
@pytest.mark.parametrize("has_temperature", (False, True))
def test_sums_above_numbers(kernel_device, dtype, options, has_temperature):
    """Of 7 numbers and of 1, against fp64; the sum over nothing is 0."""
    from vocab_parallel_ce.kernels.largest import sums_above

    rows = (torch.randn(4, 2100) * 3).to(dtype)[:, :2061]
    temperature = torch.tensor([[0.5], [1.0], [2.0], [1.5]]) if has_temperature else None
    options = options._replace(temperature=temperature)
    z = transformed(rows.double(), options._replace(temperature=None if temperature is None else temperature.double()))[
        0
    ]
    there = options._replace(temperature=None if temperature is None else temperature.to(kernel_device))
    row_max = rows.amax(dim=-1)
    for n_numbers in (7, 1):
        numbers = torch.cat([rows[:, : n_numbers - 1], row_max[:, None]], dim=-1)
        above = rows.float()[:, None, :] > numbers.float()[:, :, None]
        exps = (z - z.amax(dim=-1, keepdim=True)).exp() * 2.0**40
        arguments = rows.to(kernel_device), numbers.to(kernel_device), row_max.to(kernel_device), there
        counts = sums_above(*arguments, unit=2.0**40, counts=True).cpu()
        assert torch.equal(counts, above.sum(dim=-1))
        sums = sums_above(*arguments, unit=2.0**40, counts=False).cpu()
        torch.testing.assert_close(sums.double(), (above * exps[:, None, :]).sum(dim=-1), rtol=3e-6, atol=2100.0)
        assert not sums[:, -1].any()
