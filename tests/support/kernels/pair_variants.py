"""The variants of the kernels of distillation, which read two tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.support.kernels.variant import (
    ALL,
    ALONE,
    DTYPES,
    N_COLUMNS,
    OF_ROWS,
    ROWS,
    Variant,
    launch_of,
    shard_and_block,
)
from vocab_parallel_ce.blocks import PARTS_AT_ONCE, READ_PAIRS, choose_block
from vocab_parallel_ce.kernels.rows import NOT_STORED
from vocab_parallel_ce.losses.divergences import DivergenceOptions
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

# What an objective has of labels and of both heads: divergences beside log-probabilities.
OF_OBJECTIVES = {
    "plain": DivergenceOptions(is_alone=False),
    "entropy": DivergenceOptions(labels=ALONE["entropy"], is_alone=False),
    "softcap": DivergenceOptions(
        labels=ALONE["entropy"]._replace(softcap=30.0), teacher=ALONE["softcap"], is_alone=False
    ),
    "all": DivergenceOptions(
        "js", 0.01, 2.0, 4.0, ALL._replace(smoothing=0.0, z_loss=0.0), ALONE["softcap"], is_alone=False
    ),
}


def of_divergence(
    dtype: str,
    edges: bool,
    options: DivergenceOptions,
    of_teacher: str = "",
    units: int = 0,
    padding: int = 0,
    of_rows: tuple[str, ...] = (),
) -> Iterator[Variant]:
    """Yield the kernels of distillation, with labels and ``of_rows`` unless the divergence is alone.

    Rows of both begin at the same position of a line. ``padding``: columns of a shard that is the last one.
    """
    is_js, is_alone, of_labels = options.divergence == "js", options.is_alone, options.labels
    fp32, second = torch.float32, torch.float32 if is_js else None
    given = tuple(fp32 if name in of_rows else None for name in OF_ROWS)
    beside = DTYPES[of_teacher or dtype], None if is_alone else torch.int64
    gathered = 4, 4 + (not is_js) + (0 if is_alone else len(of_labels.statistics))
    name = f"divergence_{{}}-{dtype}{f'-{of_teacher}' * bool(of_teacher)}{'-edges' * edges}-{options.divergence}-"
    name += f"{units}_units" * (units > 0) + "padded" * (padding > 0)
    if not is_alone:
        named = next(key for key, each in OF_OBJECTIVES.items() if each.labels == of_labels)
        name += "-".join((f"labels_{named}", *of_rows))
    rows, logits = ROWS[edges]._replace(other_layout=ROWS[edges].layout, alike=True), DTYPES[dtype]
    shard, block = shard_and_block(dtype, edges, units)
    if padding:
        shard = shard._replace(vocab_size=N_COLUMNS - padding)
    loss = launch_of("divergence_rows" if is_alone else "teacher_rows", "divergence_loss", shard, options)
    outputs = outputs_of(options)
    whole, cut = (block._replace(is_cut=is_cut, at_once=PARTS_AT_ONCE) for is_cut in (False, True))
    tensors = (logits, *beside, *given, None)
    dtypes: tuple[torch.dtype | None, ...]
    for parts in (None, fp32):
        # Of cut rows the parts of the second exchange follow.
        dtypes = (*tensors, parts, fp32, second if parts is None else None)
        shape = whole if parts is None else cut
        launch = launch_of("rows", "_launch", loss, rows, shape, gathered[1])
        yield Variant(name.format("merged" if parts else "statistics"), launch, (*dtypes, *NOT_STORED))
        if second is None:
            stores = f"{name.format('merged' if parts else 'statistics')}stores"
            yield Variant(stores, launch, (*dtypes, *outputs))
    for stats in (None, fp32) if second else (None,):
        dtypes = (*tensors, stats, fp32)
        fields = loss.n_lane_fields or gathered[1]
        launch = launch_of("rows", "_launch_of_parts", loss, rows, cut, *((2, *gathered) if stats else (fields,)))
        yield Variant(name.format("part_second" if stats else "part"), launch, dtypes)
    walk_block = choose_block(READ_PAIRS, N_COLUMNS, logits.itemsize)
    grads = GradOutputs(*(outputs._asdict()[field] for field in GradOutputs._fields))
    # Without one in forward, if the divergence is alone.
    for is_cut, of_loss in ((False, fp32), (True, fp32), *(((False, None),) if is_alone else ())):
        given_grads = grads._replace(loss=of_loss)
        dtypes = (*tensors, fp32, second, None, *given_grads, logits)
        strides = tuple(None if grad is None else 1 for grad in given_grads)
        launch = launch_of("outputs", "_gradient", loss, rows, walk_block, is_cut, strides, *gathered)
        yield Variant(f"{name.format('gradient')}{'few' * is_cut}{'in_forward' * (of_loss is None)}", launch, dtypes)
    dtypes = (fp32, second, beside[1], fp32 if is_alone else None, None, *outputs, None)
    launch = launch_of("outputs", "_outputs", loss, 128, *gathered)
    yield Variant(name.format("outputs"), launch, dtypes)
    for parts in (None, fp32) if second else ():
        dtypes = (logits, *beside, parts, fp32, fp32)
        key = (loss, rows, whole if parts is None else cut, *gathered)
        launch = launch_of("rows", "_second", *key)
        yield Variant(name.format("merged_second" if parts else "second"), launch, dtypes)


def outputs_of(options: DivergenceOptions) -> TokenOutputs:
    """Return the dtypes of the outputs that are stored."""
    fp32 = torch.float32
    if options.is_alone:
        return TokenOutputs(fp32)  # type: ignore[arg-type]
    labels = options.labels
    metrics = {name: fp32 for name in ("entropy", "lse", "sum_sq_probs", "mean_logit") if getattr(labels, name)}
    predictions = torch.int64 if labels.predictions else None
    return TokenOutputs(fp32, divergence=fp32, predictions=predictions, **metrics)  # type: ignore[arg-type]
