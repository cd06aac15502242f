"""The same values as views of every layout that a training loop hands to a loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NAN = float("nan")


class Layout(NamedTuple):
    """A view of ``base``; what ``base`` holds outside the view is NaN."""

    name: str
    base: Tensor
    view: Tensor
    shares_elements: bool  # two indices of the view are the same element

    def outside_is_untouched(self) -> bool:
        """Whether no element of ``base`` outside the view was written."""
        inside = torch.zeros(self.base.shape, dtype=torch.bool, device=self.base.device)
        offset = self.view.storage_offset()
        inside.as_strided(self.view.shape, self.view.stride(), offset).fill_(True)
        return bool(self.base.isnan()[~inside].all())


def logits_layouts(
    columns: int, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> list[Layout]:
    """Views ``[..., columns]`` of 2 to 4 dimensions, at most 24 rows; expected values: ``.contiguous()``."""
    c = columns

    def base(*shape: int) -> Tensor:
        return torch.full(shape, NAN, dtype=dtype, device=device)

    flat, transposed, permuted, sliced = base(6, c), base(5, 2, c), base(2, 3, 4, c), base(2, 5, c)
    tail, every_other, shifted = base(2, 5, c), base(12, c), base(1 + 6 * c)
    wide, wide_3d, strided_4d = base(6, c + 11), base(2, 3, c + 5), base(3, 4, 6, c)
    strided_column, column_major, plain_3d = base(6, 2 * c), base(c, 6), base(2, 3, c)
    views = [
        ("contiguous [N, C]", flat, flat),
        ("contiguous [B, S, C]", plain_3d, plain_3d),
        ("transposed [S, B, C] to [B, S, C]", transposed, transposed.transpose(0, 1)),
        ("all but the last token", sliced, sliced[:, :-1]),
        ("all but the first token", tail, tail[:, 1:]),
        ("every other row", every_other, every_other[::2]),
        ("permuted [2, 3, 4, C] to [3, 4, 2, C]", permuted, permuted.permute(1, 2, 0, 3)),
        ("four dimensions, two of them sliced", strided_4d, strided_4d[:, 1:3, ::2][:2]),
        ("rows of a wider tensor", wide, wide[:, :c]),
        ("columns from the middle of a wider tensor", wide_3d, wide_3d[..., 3 : 3 + c]),
        ("storage one element off a boundary", shifted, shifted[1:].view(6, c)),
        ("every other column", strided_column, strided_column[:, ::2]),
        ("column-major", column_major, column_major.t()),
        *_size_one_views(base, c),
    ]
    one_row, one_batch, window = base(1, c), base(2, 1, c), base(5 * max(c // 2, 1) + c)
    sharing = [
        ("one row expanded", one_row, one_row.expand(6, c)),
        ("one row of each batch expanded", one_batch, one_batch.expand(2, 3, c)),
        ("overlapping windows", window, window.unfold(0, c, max(c // 2, 1))),
    ]
    generator = torch.Generator().manual_seed(seed)
    layouts = []
    for name, whole, view in views:
        view.copy_(torch.randn(view.shape, generator=generator) * 4)
        layouts.append(Layout(name, whole, view, shares_elements=False))
    for name, whole, view in sharing:
        whole.copy_(torch.randn(whole.shape, generator=generator) * 4)
        layouts.append(Layout(name, whole, view, shares_elements=True))
    return layouts


def _size_one_views(base, c: int) -> list[tuple[str, Tensor, Tensor]]:  # type: ignore[no-untyped-def]
    """Views whose strides in dimensions of size 1 say nothing of where rows are."""
    one_batch, one_token, one_row = base(1, 4, c), base(4, 1, c), base(1, 1, c)
    swapped, swapped_back, inner, sliced = base(1, 4, c), base(4, 1, c), base(2, 1, 3, c), base(3, 4, c)
    single, odd_stride = base(1, c), base(7 * c)
    return [
        ("one batch [1, S, C]", one_batch, one_batch),
        ("one token [B, 1, C]", one_token, one_token),
        ("one row [1, 1, C]", one_row, one_row),
        ("one row [1, C]", single, single),
        ("[1, S, C] transposed to [S, 1, C]", swapped, swapped.transpose(0, 1)),
        ("[B, 1, C] transposed to [1, B, C]", swapped_back, swapped_back.transpose(0, 1)),
        ("[2, 1, 3, C] transposed to [2, 3, 1, C]", inner, inner.transpose(1, 2)),
        ("one token of each batch, kept as a dimension", sliced, sliced[:, 1:2]),
        ("size 1 with a stride no row has", odd_stride, odd_stride.as_strided((3, 1, c), (2 * c, 1, 1))),
    ]


def label_layouts(labels: Tensor) -> list[tuple[str, Tensor]]:
    """(name, view equal to ``labels`` in value) for ``labels`` of any shape with values above -2^31."""
    shape = labels.shape
    shifted = labels.new_full((1 + labels.numel(),), 10**6)
    wide = labels.new_full((*shape[:-1], shape[-1] + 3), 10**6)
    strided = labels.new_full((*shape, 2), 10**6)
    views = [
        ("one element off a boundary", shifted[1:].view(shape)),
        ("the tail of longer rows", wide[..., 3:]),
        ("every other element", strided[..., 0]),
    ]
    if labels.dim() > 1:
        backwards = labels.new_full(shape[::-1], 10**6)
        views.append(("transposed", backwards.permute(*reversed(range(labels.dim())))))
    for _, view in views:
        view.copy_(labels)
    return [("contiguous", labels.clone()), ("int32", labels.to(torch.int32)), *views]
