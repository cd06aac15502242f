"""The variants of the kernels of a loss of two tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.support.kernels.variant import DTYPES, N_COLUMNS, OPTIONS, ROWS, Variant, launch_of, shard_and_block
from vocab_parallel_ce.blocks import PARTS_AT_ONCE, READ_PAIRS, choose_block
from vocab_parallel_ce.kernels import divergences, soft_labels
from vocab_parallel_ce.kernels.algebra import Algebra, KernelLoss
from vocab_parallel_ce.kernels.rows import NOT_STORED
from vocab_parallel_ce.losses.divergences import DivergenceOptions


def of_soft_labels(dtype: str, target: str, edges: bool, option: str) -> Iterator[Variant]:
    """Yield the kernels of probability targets."""
    options = OPTIONS[option]._replace(entropy=False, predictions=False)
    beside = DTYPES[target], None, torch.float32 if options.class_weight else None
    name = f"target_{{}}-{dtype}-{target}{'-edges' * edges}-{option}-"
    yield from of_algebra(name, soft_labels.ALGEBRA, dtype, beside, edges, (4,), options)


def of_divergence(
    dtype: str, edges: bool, options: DivergenceOptions, units: int = 0, padding: int = 0
) -> Iterator[Variant]:
    """Yield the kernels of distillation, with labels if there is a hard weight."""
    beside = DTYPES[dtype], torch.int64 if options.hard_weight else None, None
    is_js = options.divergence == "js"
    widths = (4 + (not is_js) + 2 * bool(options.hard_weight), *((2,) if is_js else ()))
    name = f"divergence_{{}}-{dtype}{'-edges' * edges}-{options.divergence}-" + f"{units}_units" * (units > 0)
    name += "padded" * (padding > 0)
    own = divergences.kernel_options(options)
    yield from of_algebra(name, divergences.ALGEBRA, dtype, beside, edges, widths, own, units, padding)


def of_algebra(
    name: str,
    algebra: Algebra,
    dtype: str,
    beside: tuple[torch.dtype | None, ...],
    edges: bool,
    widths: tuple[int, ...],
    options: Any,
    units: int = 0,
    padding: int = 0,
) -> Iterator[Variant]:
    """Yield the kernels of a loss of two tensors; rows of both begin at the same position of a line.

    ``beside`` are what stands beside the logits, labels and class weights; ``widths`` those of the exchanges.
    ``padding``: columns of a shard that is the last one.
    """
    rows, logits = ROWS[edges]._replace(other_layout=ROWS[edges].layout, alike=True), DTYPES[dtype]
    shard, block = shard_and_block(dtype, edges, units)
    if padding:
        shard = shard._replace(vocab_size=N_COLUMNS - padding)
    fp32, second, loss = torch.float32, torch.float32 if len(widths) > 1 else None, KernelLoss(algebra, shard, options)
    gathered = (4, widths[0])
    whole, cut = (block._replace(is_cut=is_cut, at_once=PARTS_AT_ONCE) for is_cut in (False, True))
    dtypes: tuple[torch.dtype | None, ...]
    for parts in (None, fp32):
        # Of cut rows the parts of the second exchange follow.
        of_rows = (logits, *beside[:2], None, None, beside[2])
        dtypes = (*of_rows, parts, fp32, second if parts is None else None, *NOT_STORED)
        shape = whole if parts is None else cut
        launch = launch_of("rows", "_launch", loss, rows, shape, widths[0])
        yield Variant(name.format("merged" if parts else "statistics"), launch, dtypes)
        if second is None:
            stores = (*dtypes[:-6], fp32, *NOT_STORED[1:])
            yield Variant(f"{name.format('merged' if parts else 'statistics')}stores", launch, stores)
    for stats in (None, fp32) if second else (None,):
        dtypes = (*of_rows, stats, fp32)
        fields = (2, *gathered) if stats else (widths[0],)
        launch = launch_of("rows", "_launch_of_parts", loss, rows, cut, *fields)
        yield Variant(name.format("part_second" if stats else "part"), launch, dtypes)
    walk_block = choose_block(READ_PAIRS, N_COLUMNS, logits.itemsize)
    for is_cut, grad in ((False, fp32), (True, fp32), (False, None)):  # without one in forward
        dtypes = (*of_rows, fp32, second, None, grad, None, None, None, None, logits)
        strides = (None if grad is None else 1, None, None, None, None)
        launch = launch_of("outputs", "_gradient", loss, rows, walk_block, is_cut, strides, *gathered)
        yield Variant(f"{name.format('gradient')}{'few' * is_cut}{'in_forward' * (grad is None)}", launch, dtypes)
    dtypes = (fp32, second, beside[1], fp32, None, fp32, None, None, None, None, None, None)
    launch = launch_of("outputs", "_outputs", loss, 128, *gathered)
    yield Variant(name.format("outputs"), launch, dtypes)
    for parts in (None, fp32) if second else ():
        dtypes = (logits, *beside, parts, fp32, fp32)
        key = (loss, rows, whole if parts is None else cut, *gathered)
        launch = launch_of("rows", "_second", *key)
        yield Variant(name.format("merged_second" if parts else "second"), launch, dtypes)
