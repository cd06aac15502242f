"""Loss and gradient of whole rows in one launch: every logit is read once and written once.

    loss = log(sum_exp) + row_max - z_y + z_loss * lse^2
    dz_i = p_i * (1 + 2 * z_loss * lse) - [i == y],   p_y - 1 = -others_sum / sum_exp

and what ``labels`` has of the other options. Persistent programs, all at once on the GPU, walk the rows, in pieces of
one 16-byte vector per thread (``rows``). Asynchronous copies fill a circular buffer of STAGES pieces in shared
memory, so the next rows arrive while the program works on this one. The gradient needs each piece a second time. The
first REGISTER_PIECES of a row stay in registers, and their stages are refilled at once. The other pieces stay in the
buffer.

Regime: one rank, rows of 16 to 264 KiB without padding, bound by memory. Ignored rows are not read. No interpreter
runs Gluon.
"""

# mypy: disable-error-code="assignment, misc"
# Tuples grow in loops that the compiler unrolls.

import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from vocab_parallel_ce.blocks import THREADS_PER_WARP
from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.kernels.labels import row_factors, store_token_outputs
from vocab_parallel_ce.kernels.launch import Launch, cache_launches, row_arguments
from vocab_parallel_ce.layout import VECTOR_BYTES, RowLayout
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.one_pass import Config, config_of
from vocab_parallel_ce.one_pass.rows import (
    Cursor,
    Sizes,
    Walk,
    clear_rows,
    fetch,
    label_lanes_of,
    load_remainder,
    locate,
    piece_columns,
    read_row,
    write_label,
    write_row,
)
from vocab_parallel_ce.spec import GradOutputs, LossOptions, RowStats, TokenOutputs

REGISTERS_OF_SM, REGISTERS_OF_THREAD = 65_536, 255


@gluon.jit
def load_label(labels, row, n_rows):
    """Load the label of ``row``; beyond the last row, that of the first."""
    return gl.load(labels + gl.where(row < n_rows, row, 0))


@gluon.jit
def label_column(label, row, n_rows, n_columns, ignore_index):
    """Return the label's column, int32; -1 outside the vocabulary, -2 if the row is ignored or missing."""
    label = label.to(gl.int64)
    column = gl.where((label >= 0) & (label < n_columns), label, -1).to(gl.int32)
    return gl.where((label != ignore_index) & (row < n_rows), column, -2)


@gluon.jit
def known_label(column, n_columns, ignore_index):
    """Return a label with this ``label_column``; loading the row's own would cost a read's latency per row."""
    outside = gl.where(ignore_index == n_columns, n_columns + 1, n_columns)
    return gl.where(column == -2, ignore_index, gl.where(column == -1, outside, column)).to(gl.int64)


@gluon.jit
def loss_weight(labels, divisor, class_weight, n_rows, n_columns, label_lanes, loss_options, COUNTED: gl.constexpr):
    """Return the weight of a row in the loss; 0 for a division by 0.

    If COUNTED, 1 / the number of labels, or 1 / the sum of their class weights. Else 1 / divisor, else 1.
    Every program counts all labels: 8 bytes per row, from the L2 cache.
    """
    weight = 1.0
    if COUNTED:
        counts = gl.zeros_like(label_lanes).to(gl.float32)
        for first_row in range(0, n_rows, label_lanes.numel):
            rows = first_row + label_lanes
            label = load_label(labels, rows, n_rows).to(gl.int64)
            live = (label != loss_options.ignore_index) & (rows < n_rows)
            if class_weight is not None:
                inside = live & (label >= 0) & (label < n_columns)
                weights = gl.load(class_weight + label, mask=inside, other=0.0)
                counts += gl.where(live & (inside == 0), float("nan"), weights)
            else:
                counts += live.to(gl.float32)
        weight = ops.inverse_divisor(gl.sum(counts, axis=0), class_weight)
    elif divisor is not None:
        weight = ops.divisor_weight(divisor, class_weight)
    return weight


@gluon.jit
def load_label_weight(class_weight, label, column, n_columns, loss_options):
    """Return ``spec.label_weights`` of one row, 0 if there are no class weights."""
    weight = 0.0
    if class_weight is not None:
        weight = gl.load(class_weight + column, mask=column >= 0, other=0.0)
        weight = ops.at_the_edges(weight, label, n_columns, loss_options)
    return weight


@gluon.jit
def first_label_columns(labels, row, step, n_rows, n_columns, ignore_index, N: gl.constexpr):
    """Return ``label_column`` of a program's first N rows."""
    columns = ()
    for i in gl.static_range(N):
        label = load_label(labels, row + i * step, n_rows)
        columns = columns + (label_column(label, row + i * step, n_rows, n_columns, ignore_index),)
    return columns


@gluon.jit
def row_stats(row_max, others_sum, label_logit, label_weight):
    """Return a ``RowStats``; statistics that this kernel does not compute are 0."""
    return RowStats(row_max, others_sum, label_logit, 0.0, 0.0, 0.0, 0.0, label_weight, 0.0)


@gluon.jit(do_not_specialize=["n_rows"])
def one_pass_kernel(
    logits,  # [N, C] bf16|fp16|fp32, in; their gradient, out
    labels,  # [N] int64|int32
    divisor,  # [1] integer or floating point, or None: 1
    class_weight,  # [C] fp32, or None
    loss,  # [N] fp32, out
    lse,  # [N] fp32, out, or None
    layout,  # RowLayout of logits
    n_columns,
    loss_options,  # option_arguments
    n_rows,
    COUNTED: gl.constexpr,  # the divisor is the number of rows that are not ignored, or the sum of their weights
    PIECES: gl.constexpr,  # Sizes
    REGISTER_PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    PIECES_PER_WAIT: gl.constexpr,
    HAS_EDGES: gl.constexpr,
    LANES: gl.constexpr,
    VECTOR: gl.constexpr,
):
    """Example: 2 equal rows, ``x_1 = 8`` and ``x_i = 0`` in 8191 other columns, label 1, mean.

    Loss ``log(1 + 8191 exp(-8)) = 1.3212``. Gradient ``exp(-8) / 3.7478 / 2 = 4.475e-5`` in the other
    columns and ``(0.2668 - 1) / 2 = -0.3666`` at the label.
    """
    unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Rows after this one that a program fetches from while it works on this one.
    AHEAD: gl.constexpr = (PIECES - 1 + STAGES) // PIECES
    lane_columns = piece_columns(LANES, VECTOR)
    if not HAS_EDGES:
        n_columns = n_columns // VECTOR * VECTOR  # unchanged; now the compiler sees that it is a multiple
    buffer = gl.allocate_shared_memory(logits.dtype.element_ty, [STAGES, LANES, VECTOR], unswizzled)
    sizes: gl.constexpr = Sizes(PIECES, REGISTER_PIECES, STAGES, PIECES_PER_WAIT, HAS_EDGES)
    stage = 0
    row = gl.program_id(0)
    walk = Walk(logits, layout, n_columns, lane_columns, buffer)
    step = gl.num_programs(0)
    ignore_index = loss_options.ignore_index
    label_columns = first_label_columns(labels, row, step, n_rows, n_columns, ignore_index, AHEAD + 1)
    # Labels and remaining logits are loaded one row early.
    next_label = load_label(labels, row + (AHEAD + 1) * step, n_rows)
    body = locate(walk, row, label_columns[0], HAS_EDGES)
    next_remainder = load_remainder(walk, body, label_columns[0], HAS_EDGES)
    for i in gl.static_range(STAGES):
        fetch(walk, Cursor(stage, row, step, label_columns), i, sizes)
    label_lanes = label_lanes_of(LANES, VECTOR)
    weight = loss_weight(labels, divisor, class_weight, n_rows, n_columns, label_lanes, loss_options, COUNTED)
    outputs = TokenOutputs(loss, None, lse, None, None, None, None)
    grads = GradOutputs(None, None, None, None)
    while row < n_rows:
        cursor = Cursor(stage, row, step, label_columns)
        column = label_columns[0]
        body = locate(walk, row, column, HAS_EDGES)
        remainder = next_remainder
        label = known_label(column, n_columns, ignore_index)
        label_weight = load_label_weight(class_weight, label, column, n_columns, loss_options)
        new_row = row + (AHEAD + 1) * step
        new_column = label_column(next_label, new_row, n_rows, n_columns, ignore_index)
        others_max, others_sum, pieces = read_row(walk, cursor, body, remainder, loss_options, sizes)
        label_logit = ops.transform(remainder.label_logit.to(gl.float32), loss_options)[0]
        row_max = gl.maximum(others_max, label_logit)
        others_sum *= ops.exp_shifted(others_max, ops.finite_or_zero(row_max))
        stats = row_stats(row_max, others_sum, label_logit, label_weight)
        live = column != -2
        factors = row_factors(stats, label, live, weight, grads, grads, row, n_columns, loss_options)
        # Not earlier: these loads would take registers while the row fills them.
        next_label = load_label(labels, new_row + step, n_rows)
        next_body = locate(walk, row + step, label_columns[1], HAS_EDGES)
        next_remainder = load_remainder(walk, next_body, label_columns[1], HAS_EDGES)
        store_token_outputs(outputs, row, None, stats, label, weight, n_columns, loss_options)
        write_row(walk, cursor, body, remainder.edges, pieces, factors, grads, loss_options, sizes)
        # write_row wrote the label's column like every other.
        write_label(walk, body, remainder.label_logit, column, factors, grads, loss_options, HAS_EDGES)
        stage = (stage + PIECES) % STAGES
        row += step
        label_columns = label_columns[1:] + (new_column,)
    if COUNTED or divisor is not None:
        if weight == 0:
            # The gradient may be NaN. It stays unseen.
            clear_rows(walk, gl.program_id(0), step, n_rows, sizes)


def one_pass(
    logits: Tensor,
    targets: Labels,
    divisor: Tensor | None,
    outputs: TokenOutputs,
    *,
    counted: bool,
    options: LossOptions,
) -> None:
    """Fill ``outputs`` and write the gradient over ``logits [..., C]``, the whole vocabulary.

    If ``counted``, the number of rows that are not ignored, or the sum of their labels' class weights, divides the loss
    and the gradient, else ``divisor [1]`` if given.
    """
    n_rows, n_columns = targets.labels.shape[0], logits.shape[-1]
    if n_rows == 0:
        return
    base, (layout, *_) = row_arguments(logits)
    size = logits.element_size()
    config = config_of(n_columns * size)
    assert config is not None, "why_not leaves rows that do not fit to other kernels"
    launch = _launch(size, n_columns, layout, counted, options, config)
    programs = min(config.programs_per_sm * _multiprocessors(logits.get_device()), n_rows)
    launch(programs, (base, targets.labels, divisor, targets.class_weight, outputs.loss, outputs.lse), (n_rows,))


@cache_launches
def _launch(
    element_size: int, n_columns: int, layout: RowLayout, counted: bool, options: LossOptions, config: Config
) -> Launch:
    vector = VECTOR_BYTES // element_size
    lanes = THREADS_PER_WARP * config.num_warps
    pieces = -(-n_columns // vector * vector // (lanes * vector))
    has_edges = n_columns % vector != 0 or layout.pitch % vector != 0
    register_pieces = min(config.register_pieces, pieces)
    sizes = Sizes(pieces, register_pieces, config.stages, config.pieces_per_wait, has_edges)
    constants = {"COUNTED": counted, **sizes._asdict(), "LANES": lanes, "VECTOR": vector}
    values = (layout, n_columns, options)
    # All programs of a multiprocessor must fit at once; the compiler does not know how many there are.
    threads = THREADS_PER_WARP * config.num_warps * config.programs_per_sm
    registers = min(REGISTERS_OF_SM // threads // 8 * 8, REGISTERS_OF_THREAD)  # a warp gets eights of them
    return Launch(one_pass_kernel, values, constants, num_warps=config.num_warps, maxnreg=registers)


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
