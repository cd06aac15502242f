"""What finds the largest logits of rows, against PyTorch: numbers that are copied and counted, so all are equal."""

import pytest
import torch

from tests.support.cases.inputs import DTYPES

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
def test_how_many_are_equal(kernel_device, dtype, columns):
    from vocab_parallel_ce.kernels.largest import count_equal

    for rows in (rows_of(columns, dtype, kernel_device), rows_of(7, dtype, kernel_device).t()):
        numbers = rows.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).amax(dim=-1)
        assert torch.equal(count_equal(rows, numbers), (rows == numbers[:, None]).sum(dim=-1).int())
