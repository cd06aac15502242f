"""Row layouts against the positions that the views themselves give."""

import pytest
import torch

from tests.support.cases.layouts import logits_layouts
from vocab_parallel_ce.layout import VECTOR_BYTES, RowLayout, aligned_base, row_layout, rows_are_disjoint

COLUMNS = 21
LAYOUTS = logits_layouts(COLUMNS)
COPIED = ("every other column", "column-major")  # layouts that no kernel walks
WALKED = [layout for layout in LAYOUTS if layout.name not in COPIED]

pytestmark = pytest.mark.reference


def begin_of(row: int, layout: RowLayout) -> int:
    outer, i2 = divmod(row, layout.size2)
    i0, i1 = divmod(outer, layout.size1)
    return layout.offset + i0 * layout.stride0 + i1 * layout.stride1 + i2 * layout.stride2


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rows_begin_where_the_view_says(layout):
    positions = torch.arange(layout.base.untyped_storage().nbytes() // 4)
    in_rows = positions.as_strided(layout.view.shape, layout.view.stride(), layout.view.storage_offset()).reshape(
        -1, COLUMNS
    )
    rows = row_layout(layout.view)
    if layout.name in COPIED:
        assert rows is None
        return
    first = layout.view.storage_offset()
    for row, found in enumerate(in_rows.tolist()):
        assert found == list(range(found[0], found[0] + COLUMNS))
        assert first + begin_of(row, rows) == found[0]


def test_worked_example():
    view = torch.zeros(2, 5, 8)[:, :-1]
    assert row_layout(view) == RowLayout(0, 4, 1, 40, 8, 0)
    assert [begin_of(row, row_layout(view)) for row in range(8)] == [0, 8, 16, 24, 40, 48, 56, 64]


def test_more_levels_than_three_are_left_to_a_copy():
    view = torch.zeros(2, 3, 4, 5, 6, 7).permute(4, 2, 0, 3, 1, 5)
    assert row_layout(view) is None


@pytest.mark.parametrize("layout", WALKED, ids=lambda layout: layout.name)
def test_rows_that_share_memory_are_found(layout):
    assert rows_are_disjoint(layout.view) != layout.shares_elements


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_base_is_aligned_and_the_offset_leads_back(dtype):
    storage = torch.arange(64).to(dtype)
    for offset in range(20):
        view = storage[offset : offset + 10].view(2, 5)
        base, misaligned = aligned_base(view)
        assert base.data_ptr() % VECTOR_BYTES == 0
        assert base.data_ptr() + misaligned * base.element_size() == view.data_ptr()


def test_storage_that_begins_off_a_boundary_is_left_alone():
    foreign = torch.frombuffer(bytearray(128), dtype=torch.float32, offset=4)
    assert foreign.data_ptr() % VECTOR_BYTES != 0
    base, misaligned = aligned_base(foreign)
    assert (base.data_ptr(), misaligned) == (foreign.data_ptr(), 0)


def test_two_tensors_are_alike_if_their_rows_begin_at_the_same_position_of_a_line():
    """At other multiples of 16 bytes the numbers would be right, and the second tensor's loads cross lines."""
    from vocab_parallel_ce.kernels.launch import pair_arguments

    columns, line = 256, 64  # bf16
    logits = torch.zeros(4, columns, dtype=torch.bfloat16)
    for added, is_alike in ((0, True), (line, True), (8, False), (line // 2, False), (1, False)):
        other = torch.zeros(4, columns + added, dtype=torch.bfloat16)[:, :columns]
        *_, rows = pair_arguments(logits, other)
        assert rows.alike == is_alike, added
