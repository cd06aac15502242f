"""The launch shapes are plain data; no GPU is needed to look at them."""

import pytest

from vocab_parallel_ce.kernels.blocks import READ, READ_AND_WRITE, THREADS_PER_WARP, choose_block

pytestmark = pytest.mark.reference


@pytest.mark.parametrize("table", (READ, READ_AND_WRITE), ids=("read", "read and write"))
@pytest.mark.parametrize("element_size", (2, 4))
def test_every_width_has_a_block_of_16_byte_vectors(table, element_size):
    widest = 0
    for n_columns in (1, 7, 1000, 8192, 32064, 50257, 128256, 2**31 - 1):
        block = choose_block(table, n_columns, element_size)
        assert block.vector * element_size == 16
        assert block.lanes % (THREADS_PER_WARP * block.num_warps) == 0
        assert block.lanes & (block.lanes - 1) == 0
        assert block.num_warps >= widest
        widest = block.num_warps


def test_measured_choices():
    assert choose_block(READ, 128256, 2) == (8, 512, 8)
    assert choose_block(READ_AND_WRITE, 128256, 2) == (16, 1024, 8)
    assert choose_block(READ_AND_WRITE, 64128, 4) == (16, 1024, 4)
