"""Launch shapes are data; these tests need no GPU."""

import pytest

from vocab_parallel_ce import blocks, environment
from vocab_parallel_ce.blocks import THREADS_PER_WARP, choose_block
from vocab_parallel_ce.shard import VocabShard

pytestmark = pytest.mark.reference


TABLES = (
    "READ_PAIRS",
    "READ_AND_WRITE",
    "READ_AND_WRITE_EDGES",
    "WRITE_TILES",
    "WRITE_SMALL_TILES",
)


@pytest.mark.parametrize("table", [getattr(blocks, name) for name in TABLES], ids=TABLES)
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


@pytest.mark.parametrize(
    ("shard", "rank", "n_ranks", "size", "units"),
    [
        (VocabShard(0, 64128, 128256), 0, 2, 2, 4),
        (VocabShard(112224, 128256, 128256), 7, 8, 2, 1),
        (VocabShard(25152, 50304, 50257), 1, 2, 2, 4),  # padded
        (VocabShard(0, 25129, 50257), 0, 2, 2, 0),  # an eighth is no whole number
        (VocabShard(0, 20, 40), 0, 2, 2, 0),  # of 10 bytes
        (VocabShard(0, 32, 96), 0, 3, 2, 0),  # three ranks
        (VocabShard(40, 64, 64), 1, 2, 4, 0),  # the first has more columns
        (VocabShard(0, 32, 96), 0, 2, 4, 0),  # the others have more
        (VocabShard(0, 128256, 128256), 0, 1, 2, 0),  # one rank, unless asked
    ],
)
def test_units_are_eighths_of_equal_shards(shard, rank, n_ranks, size, units):
    assert blocks.units_of(shard, rank, n_ranks, size) == units


def test_one_rank_has_units_if_the_environment_asks(monkeypatch):
    monkeypatch.setenv(environment.SAME_BITS, "1")
    blocks.units_of.cache_clear()
    assert blocks.units_of(VocabShard(0, 128256, 128256), 0, 1, 2) == 8
    blocks.units_of.cache_clear()


@pytest.mark.parametrize("units", [1, 2, 4, 8])
def test_a_unit_has_the_same_tiles_on_any_number_of_ranks(units):
    """Also where a rank's last column is within a vector, and elsewhere not."""
    shard = VocabShard(0, units * 6288, 50257)
    block = blocks.statistics_shape(1, shard, 2, 1, units)
    assert (block.lanes // units, block.tiles, block.n_parts) == (32, 2, 13)
    assert block.has_edges(shard, False) is True
    assert block.has_edges(VocabShard(0, units * 6288, 50304), True) is False
