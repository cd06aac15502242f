"""Launch shapes are data; these tests need no GPU."""

import re
from pathlib import Path

import pytest

from vocab_parallel_ce import blocks, environment
from vocab_parallel_ce.blocks import ONE_PASS, THREADS_PER_WARP, choose_block, one_pass_config
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.selection import ONE_PASS_SHARED_MEMORY
from vocab_parallel_ce.shard import VocabShard

pytestmark = pytest.mark.reference


WIDTHS = (*ONE_PASS, *((least, most, config) for least, most, _, config in blocks.ONE_PASS_CLUSTERS))
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


def test_every_width_of_the_one_pass_table_has_one_configuration():
    """The ranges follow each other; there is none outside them."""
    edges = [(least, most) for least, most, _ in ONE_PASS]
    assert all(least <= most for least, most in edges)
    assert [least for least, _ in edges[1:]] == [most + 1 for _, most in edges[:-1]]
    for least, most, config in ONE_PASS:
        assert one_pass_config(least, ONE_PASS) == one_pass_config(most, ONE_PASS) == config
    for row_bytes in (1, edges[0][0] - 1, edges[-1][1] + 1, 1 << 40):
        assert one_pass_config(row_bytes, ONE_PASS) is None


def test_few_rows_have_a_cluster_each():
    """A row's bits do not depend on their number where that is not given."""
    for least, most, rows, config in blocks.ONE_PASS_CLUSTERS:
        for row_bytes in (least, most):
            many = one_pass_config(row_bytes, ONE_PASS)
            found = [one_pass_config(row_bytes, ONE_PASS, n) for n in (1, rows, rows + 1, 1 << 30)]
            assert found == [config, config, many, many] and many.ctas < config.ctas
    for row_bytes in (ONE_PASS[0][0] - 1, ONE_PASS[-1][1] + 1):
        assert one_pass_config(row_bytes, ONE_PASS, 1) is None


def test_the_fewest_rows_of_one_launch_are_those_of_the_page():
    """Of every width; docs/options.md has the numbers."""
    found = [blocks.fewest_rows_of_one_pass(row_bytes) for row_bytes in (1, 32_768, 32_769, 65_536, 65_537, 1 << 40)]
    assert found == [1025, 1025, 129, 129, 97, 97]
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text(encoding="utf-8")
    assert re.search(r"for 1025 tokens .* up to 32 KB each, for 129 up to 64 KB,\s+and for 97 above", page)


def chunks_of(least, most, config):
    """Yield ``(chunks, register_chunks)`` of every row in the range."""
    chunk_bytes = THREADS_PER_WARP * config.num_warps * config.ctas * VECTOR_BYTES
    for chunks in range(-(-least // chunk_bytes), -(-most // chunk_bytes) + 1):
        yield chunks, min(config.register_chunks, chunks)


@pytest.mark.parametrize("least, most, config", WIDTHS, ids=str)
def test_a_buffer_holds_its_widest_row_and_fits_a_multiprocessor(least, most, config):
    for chunks, register_chunks in chunks_of(least, most, config):
        # At least one chunk of the next row is on its way.
        assert 1 <= chunks - register_chunks <= config.stages or chunks == register_chunks
    buffer_bytes = config.stages * THREADS_PER_WARP * config.num_warps * VECTOR_BYTES
    # Besides the buffer, a thread block needs memory for its reductions, and the system 1 KB.
    assert config.ctas_per_sm * (buffer_bytes + 1536) <= ONE_PASS_SHARED_MEMORY
    assert config.num_warps & (config.num_warps - 1) == 0 and config.ctas in (1, 2, 4, 8)
    assert config.stages >= config.chunks_per_wait >= 1


@pytest.mark.parametrize("least, most, config", WIDTHS, ids=str)
def test_no_stage_is_refilled_before_it_was_read_and_no_chunk_is_read_before_it_arrived(least, most, config):
    pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")
    for chunks, register_chunks in chunks_of(least, most, config):
        Buffer(config, chunks, register_chunks).walk(rows=7)


class Buffer:
    """The kernel's stages, in the order in which a row waits for, reads and refills them.

    Chunk ``i`` of row ``r`` is number ``r * chunks + i``.
    """

    def __init__(self, config, chunks, register_chunks):
        self.chunks_per_wait, self.n_stages = config.chunks_per_wait, config.stages
        self.chunks, self.register_chunks = chunks, register_chunks
        self.stages = list(range(config.stages))
        self.committed, self.arrived, self.done = config.stages - 1, -1, set()

    def refill(self, *done):
        for number in done:
            stage = number % self.n_stages
            assert self.stages[stage] in self.done, "the stage's last chunk is still needed"
            self.committed += 1
            assert number + self.n_stages == self.committed, "copies arrive in the order of the rows"
            self.stages[stage] = self.committed

    def wait(self, chunk):
        from vocab_parallel_ce.kernels.one_pass_rows import copies_in_flight

        sizes = (self.chunks, self.register_chunks, self.n_stages, self.chunks_per_wait)
        in_flight = copies_in_flight(chunk, *sizes)
        assert in_flight >= 0
        self.arrived = self.committed - in_flight

    def read(self, number):
        assert number <= self.arrived and self.stages[number % self.n_stages] == number

    def walk(self, rows):
        for first in range(0, rows * self.chunks, self.chunks):
            self.read_row(first)
            self.write_row(first)

    def read_row(self, first):
        for i in range(self.chunks):
            if i % self.chunks_per_wait == 0:
                self.wait(i)
                before = range(max(i - self.chunks_per_wait, 0), min(i, self.register_chunks))
                self.refill(*(first + chunk for chunk in before))
            self.read(first + i)
            if i < self.register_chunks:
                self.done.add(first + i)
        last = (self.chunks - 1) // self.chunks_per_wait * self.chunks_per_wait
        self.refill(*range(first + last, first + min(self.chunks, self.register_chunks)))

    def write_row(self, first):
        waiting = []
        for i in range(self.register_chunks, self.chunks):
            self.read(first + i)
            self.done.add(first + i)
            waiting.append(first + i)
            if len(waiting) == self.chunks_per_wait or i == self.chunks - 1:
                self.refill(*waiting)
                waiting = []


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
