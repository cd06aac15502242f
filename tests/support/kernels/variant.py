"""A variant of a kernel, and the sizes and options that the variants of several kernels have."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from vocab_parallel_ce.blocks import Block, statistics_shape
from vocab_parallel_ce.kernels.launch import Launch, Rows
from vocab_parallel_ce.layout import RowLayout
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, LossOptions

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALL = LossOptions(-100, 0.1, 1e-4, 0.5, 30.0, True, True, False, True, True, True)  # that calls have together
OF_ROWS = ("temperature", "threshold")  # tensors of a number per row
APART = ("ignore_index", "class_weight", *OF_ROWS)
ALONE = {name: PLAIN._replace(**{name: getattr(ALL, name)}) for name in LossOptions._fields if name not in APART}
WEIGHTED = PLAIN._replace(class_weight=True)
OPTIONS = {"plain": PLAIN, **ALONE, "all": ALL, "class_weight": WEIGHTED}
OPTIONS |= {
    "weighted_smoothing": WEIGHTED._replace(smoothing=0.1),
    "all_weighted": ALL._replace(entropy=False, class_weight=True),
}
N_COLUMNS = 32064
NARROW = 2048  # so few that one program writes a row of a gradient
MEASURED_ROW_BYTES = (64_128, 128_256, 256_512)  # that one launch was timed with


class Variant(NamedTuple):
    """A kernel as one kind of call launches it."""

    name: str
    launch: Launch
    dtypes: tuple[torch.dtype | None, ...]  # of its tensors
    ctas_per_sm: int | None = None
    is_specialised: bool = False  # the compiler knows which integers 16 divides, as in a launch


# Of one tensor, without and with edges.
ROWS = (
    Rows(RowLayout(0, 1, 1, N_COLUMNS, 0, 0), False),
    Rows(RowLayout(0, 1, 1, N_COLUMNS + 3, 0, 0), True),
)


def launch_of(file: str, maker: str, *key: Any) -> Any:
    """Return what ``maker`` of a file of kernels makes for ``key``."""
    return getattr(importlib.import_module(f"vocab_parallel_ce.kernels.{file}"), maker)(*key)


def shard_and_block(dtype: str, edges: bool, units: int) -> tuple[VocabShard, Block]:
    """Return a shard, of units if there are; with ``edges`` the vocabulary ends within a vector of another rank."""
    shard = VocabShard(0, N_COLUMNS, 4 * N_COLUMNS - (edges and units > 0))
    return shard, statistics_shape(1, shard, DTYPES[dtype].itemsize, 1, units)
