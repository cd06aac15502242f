"""``one_pass``: the loss of labels and its gradient in one launch. Here is when it runs; ``kernel`` has what runs.

    bind(launchers, ...) -> launchers, with one_pass if no condition stands in its way

The kernel is written in Gluon, Triton's language for explicit layouts. It is imported only if it runs.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.blocks import CUT_ROWS, units_of
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.losses.base import Launchers, Loss
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.selection import is_installed, triton_state, triton_version
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions

SHARED_MEMORY = 227 * 1024  # bytes of a multiprocessor that its programs share


class Config(NamedTuple):
    """Launch shape of the kernel. A piece is one 16-byte vector per thread of a program."""

    num_warps: int
    register_pieces: int  # pieces of a row that stay in registers
    stages: int  # pieces in the shared-memory buffer
    pieces_per_wait: int  # pieces that are waited for, and refilled, together
    programs_per_sm: int


# (row bytes from, up to, configuration). The best of 5 to 12 for bf16 rows of nine widths of 16 K to 132 K columns, on
# one H200 with Triton 3.6, among those that spill nothing in plain rows; of about 80 before. A row has at most
# register_pieces + stages pieces.
WIDTHS = (
    (16_384, 40_960, Config(4, 6, 48, 8, 2)),
    (40_961, 94_208, Config(8, 4, 24, 8, 2)),
    (94_209, 102_400, Config(8, 4, 26, 8, 2)),
    (102_401, 122_880, Config(16, 5, 26, 8, 1)),
    (122_881, 212_992, Config(16, 4, 26, 8, 1)),
    (212_993, 270_336, Config(16, 7, 26, 4, 1)),
)

# (row bytes up to, rows). With fewer rows of a reduced loss its three launches, whose programs share a row, were faster
# on one H200 with Triton 3.6 at 7c2b00b. At b06969f they are so with fewer than 32 rows of 64 KB.
FEWEST_ROWS = ((32_768, 1025), (65_536, 129), (1 << 62, CUT_ROWS + 1))


def bind(launchers: Launchers, loss: Loss, options: Any, shard: VocabShard, key: Any, settings: Settings) -> Launchers:
    """Return ``launchers`` with ``one_pass`` if it can run calls of this ``PlanKey``, otherwise as they are.

    Raises:
        ValueError: ``settings.impl`` names it, and a condition is not met.
    """
    obstacle = "another impl" if settings.impl == "triton" else why_not(loss, options, shard, key)
    if obstacle is not None:
        if settings.impl == "one_pass":
            raise ValueError(f"impl: 'one_pass' needs {obstacle}; 'auto' chooses what can run")
        return launchers
    from vocab_parallel_ce.one_pass.kernel import one_pass

    launch = functools.partial(one_pass, counted=settings.reduction == "mean", options=options)
    # A loss per row has the same bits among few rows and many.
    has_one_order = settings.reduction == "none" or settings.impl == "one_pass"
    fewest_rows = 0 if has_one_order else fewest_rows_of(key.n_columns * key.dtype.itemsize)
    return launchers._replace(one_pass=launch, one_pass_rows=fewest_rows)


def why_not(loss: Loss, options: Any, shard: VocabShard, key: Any) -> str | None:
    """Return the first condition that calls of a ``PlanKey`` on a GPU do not meet, and what there is instead."""
    if loss is not LABELS:
        return f"the loss of labels, got {type(loss).__name__}"
    beyond = ", ".join((*lacks(options), *key.extras))
    has_units = units_of(shard, key.rank, key.n_ranks, key.dtype.itemsize) > 0
    row_bytes, (least, *_), (*_, most, _) = key.n_columns * key.dtype.itemsize, WIDTHS[0], WIDTHS[-1]
    conditions = (
        (triton_state() == "compiler", f"triton's compiler, got triton's {triton_state()}"),
        (key.n_ranks == 1, f"one rank, got {key.n_ranks}"),
        (not has_units, f"a row in the order of one rank, got the bits of several ({SAME_BITS})"),
        (key.gradient == "in_forward", f"gradient 'in_forward', got {key.gradient!r}"),
        (not beyond, f"a call without {beyond}"),
        (shard.n_valid == shard.n_columns, "logits without padded columns, got some"),
        (config_of(row_bytes) is not None, f"rows of {least} to {most} bytes, got {row_bytes}"),
    )
    return obstacle_of_gpu(key.device.index) or next((needed for is_met, needed in conditions if not is_met), None)


@functools.cache
def obstacle_of_gpu(index: int) -> str | None:
    """Return what keeps GPU ``index``, or Triton, from ``one_pass``; None if nothing does."""
    memory = getattr(torch.cuda.get_device_properties(index), "shared_memory_per_block_optin", 0)
    if torch.version.hip is not None:
        return "an NVIDIA GPU, got another maker's"
    if not is_installed("triton.experimental.gluon.language.nvidia.ampere"):
        return f"a triton with Gluon's asynchronous copies, got {triton_version()}"
    if memory < SHARED_MEMORY:
        return f"{SHARED_MEMORY} bytes of shared memory a program, got {memory}"
    return None


def lacks(options: LossOptions) -> tuple[str, ...]:
    """Return the names of the options that the kernel does not compute."""
    # It has no statistics for the first five. A softcap needs more registers than a program of wide rows has.
    names = ("entropy", "sum_sq_probs", "mean_logit", "predictions", "smoothing", "softcap")
    return tuple("label_smoothing" if name == "smoothing" else name for name in names if getattr(options, name))


def begins_at_a_boundary(logits: Tensor) -> bool:
    """Whether rows of ``logits`` on a GPU can be walked from a boundary of 16 bytes, as asynchronous copies must."""
    if not logits.is_cuda:
        return False
    misaligned = logits.data_ptr() % VECTOR_BYTES
    return misaligned == 0 or logits.storage_offset() * logits.element_size() >= misaligned


@functools.lru_cache(maxsize=1024)
def config_of(row_bytes: int) -> Config | None:
    """Return the configuration for rows of ``row_bytes``; None if they do not fit, or its launches lose."""
    return next((config for least, most, config in WIDTHS if least <= row_bytes <= most), None)


def fewest_rows_of(row_bytes: int) -> int:
    """Return the rows of a reduced loss from which on one launch runs."""
    return next(rows for most, rows in FEWEST_ROWS if row_bytes <= most)
