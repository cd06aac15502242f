"""What is measured: shapes of the targets, of sweeps and of the command line, and one shard's inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

DTYPES = ("bfloat16", "float16", "float32")
REDUCTIONS = ("mean", "none")
SWEEPS = ("vocabulary", "tokens")
# Ranks -> rows, vocabulary of all ranks, dtype, reductions.
TABLE: dict[int, tuple[tuple[int, int, str, tuple[str, ...]], ...]] = {
    1: (
        (8192, 32064, "bfloat16", REDUCTIONS),
        (4096, 128256, "bfloat16", REDUCTIONS),
        (8192, 50304, "bfloat16", REDUCTIONS),
        (8192, 64128, "bfloat16", REDUCTIONS),
        (4096, 50257, "bfloat16", ("none",)),
        (1024, 32000, "bfloat16", ("none",)),
        (4096, 64128, "float32", ("none",)),
    ),
    2: (
        (16384, 128256, "bfloat16", ("none",)),
        (4096, 128256, "bfloat16", ("none",)),
        (1024, 32000, "bfloat16", ("none",)),
    ),
}
SWEPT_VOCABULARIES = tuple(2**k for k in range(13, 19))
VOCABULARY_SWEEP_ROWS = 4096
SWEPT_ROWS = (64, 256, 1024, 4096, 16384, 32768)
ROWS_SWEEP_VOCABULARY = 128256

FEWEST_BUFFERS, MOST_BUFFERS = 4, 16
BYTES_IN_ROTATION = 256 * 2**20  # several times the L2 cache of any GPU here
HUGE_BYTES = 2 * 2**30  # a shard from which two buffers, and fewer calls and rounds, are enough


class Workload(NamedTuple):
    """What every provider is asked to compute; ``columns`` are those of one rank."""

    rows: int
    columns: int
    dtype: str
    reduction: str

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.columns * getattr(torch, self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.rows} x {self.columns} {self.dtype} {self.reduction}"


class Case(NamedTuple):
    """One rank's shard."""

    rows: int
    columns: int
    dtype: torch.dtype
    group: Any
    ranks: int

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.ranks > 1 else 0

    def inputs(self, device: str = "cuda") -> tuple[Tensor, Tensor]:
        """This rank's logits, different on each rank, and the labels that are the same on all."""
        generator = torch.Generator(device).manual_seed(self.rank)
        logits = torch.randn(self.rows, self.columns, generator=generator, device=device).mul_(3)
        generator.manual_seed(1000)
        labels = torch.randint(0, self.columns * self.ranks, (self.rows,), generator=generator, device=device)
        return logits.to(self.dtype), labels


class Effort(NamedTuple):
    """How often a shard of some size is measured."""

    buffers: int
    rounds: int
    eager_calls: int
    eager_rounds: int

    @classmethod
    def of(cls, shard_bytes: int, rounds: int) -> Effort:
        """Enough buffers that a call finds nothing of its own in the L2 cache."""
        if shard_bytes >= HUGE_BYTES:
            return cls(2, min(rounds, max(3, rounds // 3)), 4, min(rounds, 3))
        wanted = math.ceil(BYTES_IN_ROTATION / max(1, shard_bytes))
        buffers = min(MOST_BUFFERS, max(FEWEST_BUFFERS, wanted))
        # Small shards wait for the host: enough calls that the last one's time on the device is none of it.
        eager_calls = max(20, buffers, min(100, HUGE_BYTES // max(1, shard_bytes)))
        return cls(buffers, rounds, eager_calls, min(rounds, 5))


def columns_of(vocabulary: int, ranks: int) -> int:
    if vocabulary % ranks:
        raise ValueError(f"vocabulary: expected a multiple of the {ranks} ranks, got {vocabulary}")
    return vocabulary // ranks


def table_workloads(ranks: int) -> list[Workload]:
    """The rows of the table of targets: those of one GPU, or those of several."""
    rows = TABLE[max(known for known in TABLE if known <= ranks)]
    return [
        Workload(n_rows, columns_of(vocabulary, ranks), dtype, reduction)
        for n_rows, vocabulary, dtype, reductions in rows
        for reduction in reductions
    ]


def sweep_workloads(sweep: str, ranks: int, dtype: str) -> list[Workload]:
    """One size varies, of all ranks together; both reductions at each."""
    if sweep == "vocabulary":
        shapes = [(VOCABULARY_SWEEP_ROWS, vocabulary) for vocabulary in SWEPT_VOCABULARIES]
    else:
        shapes = [(rows, ROWS_SWEEP_VOCABULARY) for rows in SWEPT_ROWS]
    return [
        Workload(rows, columns_of(vocabulary, ranks), dtype, reduction)
        for rows, vocabulary in shapes
        for reduction in REDUCTIONS
    ]


def parsed_shape(text: str) -> tuple[int, int]:
    """``"4096x128256"`` as rows and columns of a rank."""
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape: expected ROWSxCOLUMNS such as 4096x128256, got {text!r}")
    return int(sizes[0]), int(sizes[1])


def chosen_workloads(
    ranks: int,
    *,
    table: bool = False,
    sweeps: Sequence[str] = (),
    shapes: Sequence[str] = (),
    dtype: str | None = None,
    reduction: str | None = None,
) -> list[Workload]:
    """The table unless something else is asked for; each workload once, in that order.

    ``dtype`` and ``reduction`` leave out the other rows of the table; sweeps and shapes have all
    reductions, and bf16, unless they say otherwise.
    """
    chosen = table_workloads(ranks) if table or not (sweeps or shapes) else []
    for sweep in sweeps:
        chosen += sweep_workloads(sweep, ranks, dtype or "bfloat16")
    for rows, columns in map(parsed_shape, shapes):
        chosen += [Workload(rows, columns, dtype or "bfloat16", kind) for kind in REDUCTIONS]
    kept = [
        workload
        for workload in dict.fromkeys(chosen)
        if dtype in (None, workload.dtype) and reduction in (None, workload.reduction)
    ]
    if not kept:
        raise ValueError(
            f"workloads: expected at least one, got none of dtype {dtype}, reduction {reduction}"
        )
    return kept
