"""The launch shapes are plain data; no GPU is needed to look at them."""

import pytest

from vocab_parallel_ce.blocks import (
    ONE_PASS,
    READ,
    READ_AND_WRITE,
    THREADS_PER_WARP,
    choose_block,
    choose_ring,
)
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.selection import ONE_PASS_SHARED_MEMORY

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
    assert choose_block(READ_AND_WRITE, 128256, 2) == (16, 2048, 8)
    assert choose_block(READ_AND_WRITE, 64128, 4) == (16, 2048, 4)


def test_every_width_of_the_one_pass_table_has_one_ring():
    """The ranges follow each other without a gap; outside them there is none."""
    edges = [(least, most) for least, most, _ in ONE_PASS]
    assert all(least <= most for least, most in edges)
    assert [least for least, _ in edges[1:]] == [most + 1 for _, most in edges[:-1]]
    for least, most, ring in ONE_PASS:
        assert choose_ring(least) == choose_ring(most) == choose_ring((least + most) // 2) == ring
    for row_bytes in (1, edges[0][0] - 1, edges[-1][1] + 1, 1 << 40):
        assert choose_ring(row_bytes) is None


@pytest.mark.parametrize("least, most, ring", ONE_PASS, ids=str)
def test_a_ring_holds_its_widest_row_and_fits_a_multiprocessor(least, most, ring):
    chunk_bytes = THREADS_PER_WARP * ring.num_warps * VECTOR_BYTES
    for row_bytes in (least, most):
        chunks = -(-row_bytes // chunk_bytes)
        keep = min(ring.keep, chunks)
        # What does not stay in registers stays in the ring, and at least one chunk is on its way.
        assert 1 <= chunks - keep <= ring.slots or chunks == keep
    # Beside the ring a program needs room for its reductions.
    assert ring.programs * (ring.slots * chunk_bytes + 2048) <= ONE_PASS_SHARED_MEMORY
    assert ring.num_warps & (ring.num_warps - 1) == 0 and ring.slots >= ring.group >= 1


@pytest.mark.parametrize("least, most, ring", ONE_PASS, ids=str)
def test_no_slot_is_filled_before_it_was_read_and_no_chunk_is_read_before_it_came(least, most, ring):
    """The order in which a row waits for, reads and frees chunks, with every chunk in its slot."""
    pytest.importorskip("triton.experimental.gluon.language.nvidia.ampere")
    from vocab_parallel_ce.kernels.one_pass import copies_in_flight

    chunk_bytes = THREADS_PER_WARP * ring.num_warps * VECTOR_BYTES
    for chunks in range(-(-least // chunk_bytes), -(-most // chunk_bytes) + 1):
        keep = min(ring.keep, chunks)
        RingOfChunks(ring, chunks, keep, copies_in_flight).walk(rows=7)


class RingOfChunks:
    """The kernel's slots: chunk ``i`` of row ``r`` is number ``r * chunks + i``."""

    def __init__(self, ring, chunks, keep, copies_in_flight):
        self.group, self.n_slots, self.chunks, self.keep = ring.group, ring.slots, chunks, keep
        self.copies_in_flight = copies_in_flight
        self.committed = list(range(ring.slots))
        self.slots = dict(enumerate(self.committed))
        self.arrived, self.freed = -1, set()

    def fetch(self, number):
        slot = number % self.n_slots
        assert self.slots[slot] in self.freed, "the slot's last chunk is still needed"
        assert number == self.committed[-1] + 1, "copies arrive in the order in which rows need them"
        self.committed.append(number)
        self.slots[slot] = number

    def wait(self, outstanding):
        assert outstanding >= 0
        self.arrived = self.committed[-1] - outstanding

    def read(self, number):
        assert number <= self.arrived and self.slots[number % self.n_slots] == number

    def walk(self, rows):
        for first in range(0, rows * self.chunks, self.chunks):
            self.read_row(first)
            for i in range(self.keep, self.chunks):
                self.read(first + i)
                self.freed.add(first + i)
                last = (i + 1 - self.keep) % self.group == 0 or i == self.chunks - 1
                if last:
                    begin = self.keep + (i - self.keep) // self.group * self.group
                    for freed in range(begin, i + 1):
                        self.fetch(first + freed + self.n_slots)

    def read_row(self, first):
        for i in range(self.chunks):
            if i % self.group == 0:
                self.wait(self.copies_in_flight(i, self.group, self.chunks, self.keep, self.n_slots))
                for freed in range(max(i - self.group, 0), min(i, self.keep)):
                    self.fetch(first + freed + self.n_slots)
            self.read(first + i)
            if i < self.keep:
                self.freed.add(first + i)
        for freed in range((self.chunks - 1) // self.group * self.group, min(self.chunks, self.keep)):
            self.fetch(first + freed + self.n_slots)
