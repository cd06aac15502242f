"""The same values as views of every layout that a training loop hands to a loss."""

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


def logits_layouts(columns: int, *, device: str | torch.device = "cpu") -> list[Layout]:
    """Views ``[..., columns]`` of 2 to 4 dimensions, at most 12 rows; expected values: ``.contiguous()``."""
    c = columns

    def base(*shape: int) -> Tensor:
        return torch.full(shape, NAN, device=device)

    bases_and_views = {
        "contiguous [N, C]": (base(6, c), lambda x: x),
        "contiguous [B, S, C]": (base(2, 3, c), lambda x: x),
        "transposed [S, B, C] to [B, S, C]": (base(3, 2, c), lambda x: x.transpose(0, 1)),
        "all but the last token": (base(2, 3, c), lambda x: x[:, :-1]),
        "all but the first token": (base(2, 3, c), lambda x: x[:, 1:]),
        "every other row": (base(8, c), lambda x: x[::2]),
        "permuted [2, 3, 2, C] to [3, 2, 2, C]": (base(2, 3, 2, c), lambda x: x.permute(1, 2, 0, 3)),
        "four dimensions, two of them sliced": (base(3, 4, 6, c), lambda x: x[:, 1:3, ::2][:2]),
        "rows of a wider tensor": (base(6, c + 11), lambda x: x[:, :c]),
        "columns from the middle of a wider tensor": (base(2, 3, c + 5), lambda x: x[..., 3 : 3 + c]),
        "storage one element off a boundary": (base(1 + 6 * c), lambda x: x[1:].view(6, c)),
        "every other column": (base(6, 2 * c), lambda x: x[:, ::2]),
        "column-major": (base(c, 6), lambda x: x.t()),
        # The strides in dimensions of size 1 say nothing of where rows are.
        "one batch [1, S, C]": (base(1, 4, c), lambda x: x),
        "one token [B, 1, C]": (base(4, 1, c), lambda x: x),
        "one row [1, 1, C]": (base(1, 1, c), lambda x: x),
        "one row [1, C]": (base(1, c), lambda x: x),
        "[1, S, C] transposed to [S, 1, C]": (base(1, 4, c), lambda x: x.transpose(0, 1)),
        "[B, 1, C] transposed to [1, B, C]": (base(4, 1, c), lambda x: x.transpose(0, 1)),
        "[2, 1, 3, C] transposed to [2, 3, 1, C]": (base(2, 1, 3, c), lambda x: x.transpose(1, 2)),
        "one token of each batch, kept as a dimension": (base(3, 4, c), lambda x: x[:, 1:2]),
        "size 1 with a stride no row has": (base(7 * c), lambda x: x.as_strided((3, 1, c), (2 * c, 1, 1))),
    }
    half = max(c // 2, 1)
    sharing = {
        "one row expanded": (base(1, c), lambda x: x.expand(6, c)),
        "one row of each batch expanded": (base(2, 1, c), lambda x: x.expand(2, 3, c)),
        "overlapping windows": (base(5 * half + c), lambda x: x.unfold(0, c, half)),
    }
    generator = torch.Generator().manual_seed(0)
    layouts = []
    for name, (whole, view_of) in {**bases_and_views, **sharing}.items():
        view = view_of(whole)
        filled = whole if name in sharing else view
        filled.copy_(torch.randn(filled.shape, generator=generator) * 4)
        layouts.append(Layout(name, whole, view, shares_elements=name in sharing))
    return layouts
