"""The variants of the kernels of distillation, which read two tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.support.kernels.variant import DTYPES, N_COLUMNS, ROWS, Variant, launch_of, shard_and_block
from vocab_parallel_ce.blocks import PARTS_AT_ONCE, READ_PAIRS, choose_block
from vocab_parallel_ce.kernels.divergence_rows import divergence_loss
from vocab_parallel_ce.kernels.rows import NOT_STORED
from vocab_parallel_ce.losses.divergences import DivergenceOptions


def of_divergence(
    dtype: str, edges: bool, options: DivergenceOptions, of_teacher: str = "", units: int = 0, padding: int = 0
) -> Iterator[Variant]:
    """Yield the kernels of distillation, with labels if there is a hard weight.

    Rows of both begin at the same position of a line. ``padding``: columns of a shard that is the last one.
    """
    is_js = options.divergence == "js"
    beside = DTYPES[of_teacher or dtype], torch.int64 if options.hard_weight else None
    gathered = 4, 4 + (not is_js) + 2 * bool(options.hard_weight)
    name = f"divergence_{{}}-{dtype}{f'-{of_teacher}' * bool(of_teacher)}{'-edges' * edges}-{options.divergence}-"
    name += f"{units}_units" * (units > 0) + "padded" * (padding > 0)
    rows, logits = ROWS[edges]._replace(other_layout=ROWS[edges].layout, alike=True), DTYPES[dtype]
    shard, block = shard_and_block(dtype, edges, units)
    if padding:
        shard = shard._replace(vocab_size=N_COLUMNS - padding)
    fp32, second, loss = torch.float32, torch.float32 if is_js else None, divergence_loss(shard, options)
    whole, cut = (block._replace(is_cut=is_cut, at_once=PARTS_AT_ONCE) for is_cut in (False, True))
    dtypes: tuple[torch.dtype | None, ...]
    for parts in (None, fp32):
        # Of cut rows the parts of the second exchange follow.
        of_rows = (logits, *beside, None, None, None)
        dtypes = (*of_rows, parts, fp32, second if parts is None else None, *NOT_STORED)
        shape = whole if parts is None else cut
        launch = launch_of("rows", "_launch", loss, rows, shape, gathered[1])
        yield Variant(name.format("merged" if parts else "statistics"), launch, dtypes)
        if second is None:
            stores = (*dtypes[:-6], fp32, *NOT_STORED[1:])
            yield Variant(f"{name.format('merged' if parts else 'statistics')}stores", launch, stores)
    for stats in (None, fp32) if second else (None,):
        dtypes = (*of_rows, stats, fp32)
        fields = (2, *gathered) if stats else gathered[1:]
        launch = launch_of("rows", "_launch_of_parts", loss, rows, cut, *fields)
        yield Variant(name.format("part_second" if stats else "part"), launch, dtypes)
    walk_block = choose_block(READ_PAIRS, N_COLUMNS, logits.itemsize)
    for is_cut, grad in ((False, fp32), (True, fp32), (False, None)):  # without one in forward
        dtypes = (*of_rows, fp32, second, None, grad, None, None, logits)
        strides = (None if grad is None else 1, None, None)
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
