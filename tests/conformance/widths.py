"""Rows of every kind as factors of a covering array: how many tiles they have, where they lie, what pads them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases.inputs import DTYPES, IGNORE_INDEX, NAN
from tests.support.cases.logits import broad_rows
from tests.support.kernels.launch_shapes import ONE, SEVERAL

ROWS, LINE = 5, 64
WIDTHS = {  # vectors of 16 bytes, and columns more. The tiles of the tables in blocks.py are up to 2048 vectors.
    "no vector": (0, 3),
    "a tile": (32, 0),
    "two tiles of 32 and a tail": (65, 3),
    "three tiles of 32": (96, 0),
    "two tiles of 256": (2 * 256 + 8, 0),
    "two tiles of 512 and a tail": (2 * 512 + 64, 1),
    "two tiles of 2048": (2 * 2048 + 64, 0),
}
PLACE = {
    "width": tuple(WIDTHS),
    "dtype": DTYPES,
    "layout": ("dense", "off a boundary", "three levels"),
    "padding": (0, 5, "in a vector"),
    "programs": (ONE, SEVERAL),
}
HARD = ("peaked", "confident")  # rows of tests/support/cases/inputs.py


def each(cases: list[dict[str, Any]], interpreted: int = 10**4, **among: Any) -> Any:
    """Every case; under the interpreter so many, ``among`` those with parameters that it takes."""
    mark = pytest.mark.parametrize("case", cases, ids=lambda case: f"{case['width']}-{str(case['dtype'])[6:]}")
    return lambda test: pytest.mark.interpreted(min(interpreted, len(cases)), **among)(mark(test))


def columns_of(case: dict[str, Any]) -> tuple[int, int]:
    """The vocabulary, and the columns that the logits have."""
    vectors, more = WIDTHS[case["width"]]
    n = vectors * (16 // case["dtype"].itemsize) + more
    if case["padding"] != "in a vector":
        return n, n + case["padding"]
    n -= 2 if n > 3 else 0  # the rows are whole lines, and the padding begins inside a vector
    return n, -(-n // LINE) * LINE


def rows_of(case: dict[str, Any]) -> tuple[int, ...]:
    """The shape of the tokens; rows of three levels have strides that do not merge."""
    return (2, 2, 2) if case["layout"] == "three levels" else (ROWS,)


def made_of(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """``[N, V]`` logits and labels: at both ends, ignored, of a negative weight, and random."""
    rows, vocab_size = torch.Size(rows_of(case)).numel(), columns_of(case)[0]
    logits, labels = broad_rows(case.get("kind", "peaked"), rows, vocab_size, dtype=case["dtype"])
    labels[:4] = torch.tensor([vocab_size - 1, 0, case.get("ignore_index", IGNORE_INDEX), vocab_size // 4])
    return logits, labels


class _Placed(torch.autograd.Function):
    """``[N, V]`` in memory of its own. What lies beside the vocabulary is hostile, and must get no gradient."""

    @staticmethod
    def forward(ctx, values, n_columns, layout, shape):
        vocab_size, offset = values.shape[-1], int(layout == "off a boundary")
        strides = values.new_empty(*shape, n_columns, device="meta").stride()[:-1]
        if layout == "three levels":
            vector = 16 // values.element_size()
            inner = (n_columns // vector + 1) * vector
            inner += vector * (inner % (8 * vector) == 0)  # whole vectors and no whole line
            middle = (2 * inner // LINE + 2) * LINE
            strides = (2 * middle + LINE, middle, inner)
        ctx.memory = values.new_full((offset + (shape[0] + 1) * strides[0] + n_columns,), NAN)
        ctx.within, ctx.vocab_size = ((*shape, n_columns), (*strides, 1), offset), vocab_size
        placed = values.new_empty(0).set_(ctx.memory.untyped_storage(), offset, *ctx.within[:2])
        placed[..., :vocab_size] = values.view(*shape, vocab_size)
        placed[..., vocab_size:] = torch.tensor([NAN, 3e4]).to(values)[torch.arange(n_columns - vocab_size) % 2]
        return placed

    @staticmethod
    def backward(ctx, grad):
        outside = torch.ones_like(ctx.memory, dtype=torch.bool)
        outside.as_strided(*ctx.within).fill_(False)
        assert ctx.memory[outside].isnan().all(), "memory between the rows was written"
        assert not grad[..., ctx.vocab_size :].any(), "gradient of padded columns"
        return grad[..., : ctx.vocab_size].reshape(-1, ctx.vocab_size), None, None, None


def placed(values: Tensor, case: dict[str, Any], device: str) -> tuple[Tensor, Tensor]:
    """A leaf ``[N, V]``, and logits ``[..., C]`` of it as the case places them."""
    leaf = values.to(device, copy=True).requires_grad_()
    return leaf, _Placed.apply(leaf, columns_of(case)[1], case["layout"], rows_of(case))
