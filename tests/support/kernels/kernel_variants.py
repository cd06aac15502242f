"""Variants of every kernel, as calls launch them: what ``compile_kernels`` compiles."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from triton.backends.compiler import GPUTarget

from tests.support.kernels.pair_variants import OF_OBJECTIVES, of_divergence
from tests.support.kernels.variant import (
    ALONE,
    DTYPES,
    MEASURED_ROW_BYTES,
    N_COLUMNS,
    NARROW,
    OF_ROWS,
    OPTIONS,
    ROWS,
    Variant,
    launch_of,
    shard_and_block,
)
from vocab_parallel_ce.api.sampling import N_BITS
from vocab_parallel_ce.blocks import PARTS_AT_ONCE, UNIT_PARTS_AT_ONCE, gradient_shape
from vocab_parallel_ce.kernels.rows import NOT_STORED
from vocab_parallel_ce.layout import RowLayout
from vocab_parallel_ce.losses.divergences import DivergenceOptions
from vocab_parallel_ce.losses.given_ids import IdsOptions
from vocab_parallel_ce.one_pass import WIDTHS, config_of
from vocab_parallel_ce.one_pass.kernel import _launch
from vocab_parallel_ce.options import OUTPUTS
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, TokenOutputs


def variants(target: GPUTarget) -> Iterator[Variant]:
    """Yield what calls launch: for sm_90 every option alone, for other targets all options together."""
    is_sm_90 = target.backend == "cuda" and target.arch == 90
    if has_one_pass(target):
        # The slowest to compile are first.
        yield from of_one_launch(is_sm_90)
    yield stats("bf16", True, "all")
    yield gradient("bf16", True, "all", call="padded")
    yield scaled("bf16", edges=True)
    yield finish("all", 4)
    yield part("bf16", True, "all")
    yield stats("bf16", True, "all", merged=True)
    yield finish("all", 4, summed=True)
    yield from of_divergence("bf16", False, DivergenceOptions(), "fp32")
    yield from of_divergence("bf16", True, DivergenceOptions("js", 0.01, 2.0, 2.0))  # a small share
    yield from of_divergence("bf16", True, OF_OBJECTIVES["all"], of_rows=OF_ROWS)
    yield stats("bf16", True, "all_weighted")
    yield stats("bf16", True, "all", rows=("temperature",))
    yield gradient("bf16", True, "all_weighted", call="padded")
    yield gradient("bf16", True, "all", rows=("temperature",))
    yield finish("all_weighted", 4)
    yield from of_largest("bf16")
    yield from of_ids("bf16")
    if not is_sm_90:
        return
    for divergence in ("forward", "js"):
        yield from of_divergence("bf16", False, DivergenceOptions(divergence))
    yield from of_divergence("bf16", False, DivergenceOptions("reverse", 0.5, 2.0, 2.0))
    for of_labels in ("plain", "entropy", "softcap"):
        yield from of_divergence("bf16", False, OF_OBJECTIVES[of_labels])
    yield from of_divergence("bf16", False, OF_OBJECTIVES["entropy"]._replace(divergence="reverse"), "fp32")
    yield from of_divergence("bf16", False, DivergenceOptions("js"), padding=3)
    weighted = ("class_weight", "weighted_smoothing")
    for option in ("smoothing", "softcap", "entropy", "sum_sq_probs", "mean_logit", "predictions", "all", *weighted):
        yield stats("bf16", False, option)
    yield from of_gradients()
    yield from (variant._replace(is_specialised=True) for variant in of_units())
    yield stats("bf16", False, "plain", rows=("temperature",))
    yield stats("bf16", False, "entropy", rows=("threshold",))
    yield finish("plain", 1, counted=True)
    yield stats("bf16", True, "plain")
    yield stats("bf16", False, "plain", at_once=8)
    yield stats("bf16", False, "entropy", at_once=8)
    yield stats("bf16", False, "all", at_once=8)
    yield part("bf16", False, "plain")
    yield stats("bf16", False, "plain", merged=True)
    for option in ("plain", "entropy", "all"):
        yield stats("bf16", False, option, stores=True)
    yield stats("bf16", False, "plain", at_once=8, stores=True)
    yield stats("bf16", False, "plain", merged=True, stores=True)
    yield finish("plain", 1, summed=True)
    yield finish("plain", 1, summed=True, counted=True)
    yield finish("plain", 1, counted=True, few=True)
    yield scaled("fp32", edges=False)
    yield scaled("bf16", edges=False)


def of_gradients() -> Iterator[Variant]:
    """Yield gradients of each number of tiles: it depends on the options, and on whether there is one rank."""
    for option in (name for name in OPTIONS if name != "predictions"):
        yield gradient("bf16", False, option)
    for option in ("plain", "z_loss", "logit_scale", "class_weight", "lse", "entropy"):
        yield gradient("bf16", False, option, ranks=1)
    for option in ("plain", "smoothing", "softcap", "all"):
        yield gradient("bf16", True, option, n_columns=NARROW)
    for call in ("in_forward", "padded"):
        yield gradient("bf16", False, "plain", call=call, ranks=1)
    yield gradient("bf16", False, "plain", rows=("temperature",))
    yield gradient("bf16", False, "entropy", rows=("threshold",))
    yield gradient("bf16", True, "plain")
    yield gradient("bf16", False, "plain", ranks=1, few=True)
    yield gradient("fp32", False, "plain", ranks=1, of="bf16")
    yield gradient("fp32", False, "plain", of="bf16")
    yield gradient("fp32", True, "all", of="bf16")


def of_one_launch(is_sm_90: bool) -> Iterator[Variant]:
    for _, most, _ in reversed(WIDTHS if is_sm_90 else WIDTHS[:1]):
        yield one_pass("bf16", most, "z_loss" if most > 200_000 else "plain", "mean")
    if is_sm_90:
        for row_bytes in MEASURED_ROW_BYTES:
            yield one_pass("bf16", row_bytes, "plain", "mean")
        yield one_pass("bf16", 102_400, "class_weight", "mean", edges=True)


def of_units() -> Iterator[Variant]:
    """Yield the statistics of rows that are whole units."""
    for units in (1, 2, 4, 8):
        yield stats("bf16", False, "plain", at_once=UNIT_PARTS_AT_ONCE, units=units)
        yield stats("bf16", True, "entropy", at_once=UNIT_PARTS_AT_ONCE, units=units)
    yield stats("bf16", True, "all_weighted", at_once=UNIT_PARTS_AT_ONCE, units=8)
    yield stats("bf16", False, "plain", merged=True, units=8)
    yield part("bf16", False, "plain", units=8)
    yield from of_divergence("bf16", False, DivergenceOptions("js"), units=8)
    yield from of_divergence("bf16", True, DivergenceOptions("reverse", 0.5, 2.0, 2.0), units=4)
    yield from of_divergence("bf16", True, OF_OBJECTIVES["entropy"], units=4)


def has_one_pass(target: GPUTarget) -> bool:
    """Return whether the target has asynchronous copies and enough shared memory: sm_120 has 99 KB per program."""
    return target.backend == "cuda" and 90 <= target.arch < 120


def output_dtypes(options: LossOptions) -> TokenOutputs:
    others = {name: torch.float32 for name in OUTPUTS if getattr(options, name, False)}
    others |= {"predictions": torch.int64} if options.predictions else {}
    return TokenOutputs(torch.float32, **others)  # type: ignore[arg-type]


def given_of(rows: tuple[str, ...]) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of ``OF_ROWS``, of which ``rows`` are given."""
    return tuple(torch.float32 if name in rows else None for name in OF_ROWS)


def stats(
    dtype: str,
    edges: bool,
    option: str,
    rows: tuple[str, ...] = (),
    merged: bool = False,
    at_once: int = 1,
    units: int = 0,
    stores: bool = False,
) -> Variant:
    """``merged``: of parts that other programs have read; ``at_once``: parts that a program loads together.

    ``units``: the row is so many, side by side. ``stores``: the outputs, of an unreduced loss.
    """
    options = OPTIONS[option]
    of_parts = torch.float32 if merged else None
    weights = torch.float32 if options.class_weight else None
    dtypes = (DTYPES[dtype], None, torch.int64, *given_of(rows), weights, of_parts, torch.float32, None)
    dtypes += output_dtypes(options) if stores else NOT_STORED
    shard, block = shard_and_block(dtype, edges, units)
    block = block._replace(is_cut=merged, at_once=PARTS_AT_ONCE if merged else at_once)
    loss = launch_of("label_rows", "label_loss", shard, options)
    launch = launch_of("rows", "_launch", loss, ROWS[edges], block, len(options.statistics))
    name = "merged" if merged else "statistics"
    name += f"-{dtype}{'-edges' * edges}-{option}"
    name += f"-{at_once}" * (at_once > 1) + f"-{units}_units" * (units > 0) + "-stores" * stores
    return Variant("-".join((name, *rows)), launch, dtypes)


def part(dtype: str, edges: bool, option: str, rows: tuple[str, ...] = (), units: int = 0) -> Variant:
    options = OPTIONS[option]
    weights = torch.float32 if options.class_weight else None
    dtypes = (DTYPES[dtype], None, torch.int64, *given_of(rows), weights, None, torch.float32)
    shard, block = shard_and_block(dtype, edges, units)
    block = block._replace(is_cut=True, at_once=PARTS_AT_ONCE)
    loss = launch_of("label_rows", "label_loss", shard, options)
    launch = launch_of("rows", "_launch_of_parts", loss, ROWS[edges], block, loss.n_lane_fields)
    name = f"part-{dtype}{'-edges' * edges}-{option}" + f"-{units}_units" * (units > 0)
    return Variant("-".join((name, *rows)), launch, dtypes)


def gradient(
    dtype: str,
    edges: bool,
    option: str,
    call: str = "in_backward",
    ranks: int = 4,
    of: str | None = None,
    rows: tuple[str, ...] = (),
    n_columns: int = N_COLUMNS,
    few: bool = False,
) -> Variant:
    """``in_forward`` divides; ``padded`` too, and its shard has padding; ``of`` is the gradient's dtype.

    ``few``: rows, whose launches overlap.
    """
    options = OPTIONS[option]
    fp32, in_forward = torch.float32, call == "in_forward"
    others = (options.entropy, options.lse, False) if call == "in_backward" else (False, False, False)
    grads = [fp32 if is_given else None for is_given in (not in_forward, *others)]
    divisor = None if call == "in_backward" else torch.int32
    weights = fp32 if options.class_weight and options.smoothing else None
    pointers = (weights, fp32, None, divisor, *grads, DTYPES[of or dtype])
    dtypes = (DTYPES[dtype], None, torch.int64, *given_of(rows), *pointers)
    shard = VocabShard(0, n_columns, n_columns - 100 if call == "padded" else 4 * n_columns)
    strides = GradOutputs(*(None if grad is None else 3 for grad in grads))
    of_grad = DTYPES[of or dtype]
    loss = launch_of("label_rows", "label_loss", shard, options)
    table, tiles = launch_of("outputs", "_table", loss, ranks, rows != ())
    block, programs = gradient_shape(8192, shard, of_grad.itemsize, table, tiles)
    key = (loss, ROWS[edges], block, programs > 1, strides, ranks, len(options.statistics))
    launch = launch_of("outputs", "_gradient", *key, few)
    name = f"gradient-{dtype}{'-edges' * edges}-{option}-{call}-R{ranks}"
    name = "-".join((name, *rows, *(("narrow",) * (programs == 1)), *(("few",) * few)))
    return Variant(name if of is None else f"{name}-to-{of}", launch, dtypes)


def scaled(dtype: str, edges: bool) -> Variant:
    dtypes = (DTYPES[dtype], torch.float32)
    launch = launch_of("outputs", "_scaled", ROWS[edges], N_COLUMNS, DTYPES[dtype].itemsize, 3)
    return Variant(f"element_mul-{dtype}{'-edges' * edges}", launch, dtypes)


def of_largest(dtype: str) -> Iterator[Variant]:
    x, row = DTYPES[dtype], (N_COLUMNS, N_COLUMNS)
    yield Variant(f"tile_maxima-{dtype}", launch_of("largest", "_tile_maxima", *row, 64), (x, x))
    yield Variant(f"equal_and_below-{dtype}", launch_of("largest", "_equal_and_below", *row), (x, x, torch.int32, x))
    for counts, option in ((False, "plain"), (True, "plain"), (False, "softcap")):
        launch = launch_of("largest", "_sums_above", *row, 2**N_BITS - 1, 2.0**40, OPTIONS[option], counts)
        yield Variant(f"sums_above-{dtype}-{option}{'-counts' * counts}", launch, (x, x, x, torch.float32, torch.int64))


def of_ids(dtype: str) -> Iterator[Variant]:
    """The kernels of 64 ids."""
    x, f, i, label = DTYPES[dtype], torch.float32, torch.int32, torch.int64
    shard, softmax, rows = VocabShard(0, N_COLUMNS, 4 * N_COLUMNS), ALONE["softcap"], ROWS[0]
    key, name = (IdsOptions(64, -100, softmax), shard), dtype
    launch = launch_of("given_ids", "_statistics", rows, *key)
    yield Variant(f"ids_statistics-{name}", launch, (x, label, f, f, label))
    launch = launch_of("given_ids", "_outputs", *key, 4)
    yield Variant(f"ids_outputs-{name}", launch, (f, label, f))
    launch = launch_of("given_ids", "_gradient", rows, *key, 4)
    yield Variant(f"ids_gradient-{name}", launch, (x, label, f, f, f, i, f, f, f, label))
    yield Variant(f"write_columns-{name}", launch_of("given_ids", "_write", rows, 64), (i, f, x))


def finish(option: str, ranks: int, summed: bool = False, counted: bool = False, few: bool = False) -> Variant:
    outputs = output_dtypes(OPTIONS[option])
    dtypes = (
        torch.float32,
        None,
        torch.int64,
        *((None, torch.int32) if counted else (torch.int32, None)),
        *((None, *outputs[1:], outputs.loss) if summed else (*outputs, None)),
    )
    loss = launch_of("label_rows", "label_loss", VocabShard(0, 131072, 131072), OPTIONS[option])
    key = (loss, 1024 if summed else 128, ranks, len(OPTIONS[option].statistics))
    launch = launch_of("outputs", "_outputs", *key, few)
    name = f"outputs-{option}-R{ranks}{'-summed' * summed}{'-mean' * counted}{'-few' * few}"
    return Variant(name, launch, dtypes)


def one_pass(dtype: str, row_bytes: int, option: str, call: str, edges: bool = False) -> Variant:
    """Rows of at most ``row_bytes``; with ``edges``, of one column less."""
    options, config, fp32 = OPTIONS[option], config_of(row_bytes), torch.float32
    assert config is not None
    outputs = (fp32, fp32 if options.lse else None)
    divisor = torch.int32 if call == "num_items" else None
    dtypes = (DTYPES[dtype], torch.int64, divisor, fp32 if options.class_weight else None, *outputs)
    n_columns = row_bytes // 16 * 16 // DTYPES[dtype].itemsize - edges
    layout = RowLayout(0, 1, 1, n_columns, 0, 0)
    launch = _launch(DTYPES[dtype].itemsize, n_columns, layout, call == "mean", options, config)
    name = f"one_pass-{dtype}{'-edges' * edges}-{option}-{call}-{row_bytes}"
    return Variant(name, launch, dtypes, config.programs_per_sm)
