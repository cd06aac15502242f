"""Cross-entropy with labels: its statistics, outputs and gradient, as ``spec`` has them, as jit functions.

An option's terms are here. ``label_rows`` and the kernel of ``one_pass`` call these functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops
from vocab_parallel_ce.spec import RowStats


class RowFactors(NamedTuple):
    """What the gradient of a row's every column is made of, gradients of the outputs included; 0 if no option needs it.

    ``exp`` is that of the shifted logits. Every term of a column is in ``label_grad`` too.
    """

    shift: tl.tensor  # row_max
    exp_factor: tl.tensor  # of the loss and of lse
    entropy_factor: tl.tensor  # of exp * (mean_shifted - shifted)
    mean_shifted: tl.tensor
    uniform_term: tl.tensor  # of smoothing; subtracted
    label_grad: tl.tensor  # gradient at the label; p - 1 would lose the digits of a confident label


@triton.jit
def label_exp(row_max, label_logit):
    """Return ``exp(z_y - row_max)``: 1 if the label has the largest z, 0 if it is not among the columns."""
    return ops.exp_shifted(label_logit, ops.finite_or_zero(row_max))


@triton.jit
def sum_exp(stats):
    """Return the sum of ``exp(z - row_max)`` over all columns."""
    return stats.others_sum + label_exp(stats.row_max, stats.label_logit)


@triton.jit
def log_sum_exp(stats):
    """Return ``spec.log_sum_exp``."""
    return ops.log1p(stats.others_sum + (label_exp(stats.row_max, stats.label_logit) - 1.0))


@triton.jit
def fields(loss_options):
    """Return which fields of ``RowStats`` are packed: those of ``LossOptions.statistics``."""
    is_smoothed = loss_options.smoothing is not None or loss_options.mean_logit is not None
    return (
        True,
        True,
        True,
        is_smoothed,
        is_smoothed,
        loss_options.entropy is not None,
        loss_options.predictions is not None,
        loss_options.class_weight is not None,
        loss_options.sum_sq_probs is not None,
    )


@triton.jit
def load_stats(pointers, mask, loss_options, step):
    """Return the ``RowStats`` at ``pointers``, ``step`` apart; what ``mask`` excludes has no columns.

    Statistics that no option needs are 0: Triton 3.6 cannot return None in a tuple.
    """
    empty = float("-inf"), 0.0, float("-inf"), 0.0, 0.0, 0.0, float("inf"), 0.0, 0.0
    return RowStats(*ops.load_fields(pointers, mask, fields(loss_options), empty, step))


@triton.jit
def store_stats(pointers, stats, loss_options, step):
    ops.store_fields(pointers, stats, fields(loss_options), step)


@triton.jit
def row_stats(numbers):
    return RowStats(*numbers)


@triton.jit
def merge_pair(a, b, loss_options):
    """Return the ``RowStats`` of two sets of columns. Fused multiplications are written out, as in ``lanes``."""
    row_max = tl.maximum(a.row_max, b.row_max)
    shift = ops.finite_or_zero(row_max)
    # One of the two has the maximum.
    decay = ops.exp_shifted(tl.minimum(a.row_max, b.row_max), shift)
    is_a = a.row_max >= b.row_max
    a_decay, b_decay = tl.where(is_a, 1.0, decay), tl.where(is_a, decay, 1.0)
    others_sum = tl.fma(a.others_sum, a_decay, b.others_sum * b_decay)
    label_logit = tl.maximum(a.label_logit, b.label_logit)
    shifted_sum, n_columns, exp_shifted_sum, argmax, label_weight, sum_exp_sq = a[3:]
    if loss_options.smoothing is not None or loss_options.mean_logit is not None:
        shifted_sum = tl.fma(a.n_columns, ops.raised_by(a.row_max, shift), a.shifted_sum)
        shifted_sum += tl.fma(b.n_columns, ops.raised_by(b.row_max, shift), b.shifted_sum)
        n_columns = a.n_columns + b.n_columns
    if loss_options.entropy is not None:
        a_raised, b_raised = ops.raised_by(a.row_max, shift), ops.raised_by(b.row_max, shift)
        a_sum = tl.fma(sum_exp(a), ops.bounded(a_raised), a.exp_shifted_sum)
        b_sum = tl.fma(sum_exp(b), ops.bounded(b_raised), b.exp_shifted_sum)
        exp_shifted_sum = tl.fma(a_sum, a_decay, b_sum * b_decay)
    if loss_options.predictions is not None:
        a_first = tl.where(a.row_max == row_max, a.argmax, float("inf"))
        argmax = tl.minimum(a_first, tl.where(b.row_max == row_max, b.argmax, float("inf")))
    if loss_options.class_weight is not None:
        label_weight = a.label_weight + b.label_weight
    if loss_options.sum_sq_probs is not None:
        sum_exp_sq = tl.fma(a.sum_exp_sq, a_decay * a_decay, b.sum_exp_sq * (b_decay * b_decay))
    return RowStats(
        row_max, others_sum, label_logit, shifted_sum, n_columns, exp_shifted_sum, argmax, label_weight, sum_exp_sq
    )


@triton.jit
def signed(value, loss_options):
    """Return ``value``, or ``0 - value`` of log-probabilities: an ignored row has no -0."""
    return value if loss_options.negated is None else 0.0 - value


@triton.jit
def loss(stats, label, vocab_size, loss_options):
    """Return the unreduced loss, as ``spec.loss``, for one row or a vector of rows.

    Here and in the gradient, of a sum of two products the fused multiplication is written out: kernels that would
    choose themselves differ.
    """
    log_sum = log_sum_exp(stats)
    value = log_sum + (stats.row_max - stats.label_logit)
    if loss_options.class_weight is not None:
        value = ops.weighted_class(value, stats.label_weight)
    if loss_options.smoothing is not None:
        if loss_options.class_weight is not None:
            smoothed = (stats.n_columns * log_sum - stats.shifted_sum) / vocab_size
        else:
            smoothed = log_sum - stats.shifted_sum / vocab_size
        value = tl.fma(1 - loss_options.smoothing, value, loss_options.smoothing * smoothed)
    if loss_options.z_loss is not None:
        lse = stats.row_max + log_sum
        if loss_options.class_weight is not None:
            value += loss_options.z_loss * lse * lse * stats.label_weight
        else:
            value += loss_options.z_loss * lse * lse
    return signed(ops.at_the_edges(value, label, vocab_size, loss_options), loss_options)


@triton.jit
def store_token_outputs(outputs, rows, inside, stats, label, weight, vocab_size, loss_options):
    """Store ``outputs``, a ``spec.TokenOutputs`` of pointers or None, for one row or a vector of rows.

    ``weight`` multiplies the loss. ``inside`` masks a vector of rows; None is all. Returns the losses.
    """
    all_sum = sum_exp(stats)
    losses = ops.weighted(loss(stats, label, vocab_size, loss_options), weight)
    if outputs.loss is not None:
        tl.store(outputs.loss + rows, losses, inside)
    if outputs.entropy is not None:
        value = log_sum_exp(stats) - stats.exp_shifted_sum / all_sum
        tl.store(outputs.entropy + rows, ops.at_the_edges(value, label, vocab_size, loss_options), inside)
    live = label != loss_options.ignore_index
    if outputs.lse is not None:
        value = stats.row_max + log_sum_exp(stats)
        tl.store(outputs.lse + rows, ops.at_the_edges(value, label, vocab_size, loss_options), inside)
    if outputs.sum_sq_probs is not None:
        value = stats.sum_exp_sq / (all_sum * all_sum)
        tl.store(outputs.sum_sq_probs + rows, ops.at_the_edges(value, label, vocab_size, loss_options), inside)
    if outputs.mean_logit is not None:
        value = stats.row_max + stats.shifted_sum / vocab_size
        tl.store(outputs.mean_logit + rows, ops.at_the_edges(value, label, vocab_size, loss_options), inside)
    if outputs.predictions is not None:
        known = live & (all_sum < float("inf")) & (stats.argmax < float("inf"))
        tl.store(outputs.predictions + rows, tl.where(known, stats.argmax, -1.0).to(tl.int64), inside)
    return losses


@triton.jit
def row_factors(stats, label, live, weight, grads, strides, row, vocab_size, loss_options):
    """Return the ``RowFactors`` of a row; all are 0 if it is not ``live``, so that its NaN stays unseen.

    ``weight`` is 1 / divisor. Where it is 0, so is the loss's part. ``grads`` and ``strides`` are ``GradOutputs`` of
    pointers, and of numbers, or None.
    """
    if grads.loss is not None:
        weight = ops.weighted(tl.load(grads.loss + row * strides.loss), weight)
    weight = tl.where((label < 0) | (label >= vocab_size), float("nan"), signed(weight, loss_options))
    all_sum = sum_exp(stats)
    inverse_sum = tl.div_rn(1.0, all_sum)
    label_term = label_exp(stats.row_max, stats.label_logit)
    p_factor, z_factor, uniform_term = 1.0, 0.0, 0.0
    label_grad = tl.div_rn(-stats.others_sum, all_sum)
    if loss_options.z_loss is not None:
        z_factor = 2 * loss_options.z_loss * (stats.row_max + log_sum_exp(stats))
        p_factor += z_factor
    if loss_options.smoothing is not None and loss_options.class_weight is not None:
        uniform_p = loss_options.smoothing / vocab_size
        uniform_term = uniform_p * weight
        label_factor = (1 - loss_options.smoothing) * stats.label_weight
        all_factor = tl.fma(uniform_p, stats.n_columns, stats.label_weight * z_factor)
        p_factor = label_factor + all_factor
        label_grad = tl.fma(label_factor, label_grad, all_factor * (label_term * inverse_sum))
        label_grad -= uniform_p * stats.label_weight
    else:
        if loss_options.smoothing is not None:
            uniform_p = loss_options.smoothing / vocab_size
            uniform_term = uniform_p * weight
            # Not label_grad + smoothing: if p_y is small and smoothing near 1, that cancels.
            smoothing_p = loss_options.smoothing * (label_term * inverse_sum)
            label_grad = tl.fma(1 - loss_options.smoothing, label_grad, smoothing_p) - uniform_p
        elif loss_options.class_weight is not None:
            weight *= stats.label_weight
        if loss_options.z_loss is not None:
            label_grad += label_term * inverse_sum * z_factor
    exp_factor = inverse_sum * p_factor * weight
    label_grad *= weight
    entropy_factor, mean_shifted = 0.0, 0.0
    if grads.entropy is not None:
        mean_shifted = stats.exp_shifted_sum / all_sum
        entropy_factor = inverse_sum * tl.load(grads.entropy + row * strides.entropy)
        shifted = ops.bounded(stats.label_logit - stats.row_max)
        label_grad = tl.fma(label_term * (mean_shifted - shifted), entropy_factor, label_grad)
    if grads.lse is not None:
        lse_factor = tl.load(grads.lse + row * strides.lse) * inverse_sum
        label_grad = tl.fma(label_term, lse_factor, label_grad)
        exp_factor = tl.fma(inverse_sum * p_factor, weight, lse_factor)
    return RowFactors(
        tl.where(live, stats.row_max, 0.0),
        tl.where(live, exp_factor, 0.0),
        tl.where(live, entropy_factor, 0.0),
        tl.where(live, mean_shifted, 0.0),
        tl.where(live, uniform_term, 0.0),
        tl.where(live, label_grad, 0.0),
    )


@triton.jit
def logits_gradient(x, is_label, uniform, factors, grads, loss_options, temperature=None, threshold=None):
    """Return the gradient of one row at logits ``x``; exactly 0 in an excluded column.

    ``uniform`` is what smoothing takes from it; ``temperature`` and ``threshold`` are the row's, or None. The result
    includes that of each other output that ``grads`` has.
    """
    z, slope = ops.transform(x, loss_options, temperature, threshold)
    exp = ops.exp_shifted(z, factors.shift)
    grad = exp * factors.exp_factor
    if grads.entropy is not None:
        entropy_grad = exp * (factors.mean_shifted - ops.bounded(z - factors.shift))
        grad = tl.fma(entropy_grad, factors.entropy_factor, grad)
    if loss_options.smoothing is not None:
        grad -= tl.where(z == float("-inf"), 0.0, uniform)
    grad = tl.where(is_label, factors.label_grad, grad)
    has_slope = loss_options.softcap is not None or loss_options.logit_scale is not None
    if has_slope or temperature is not None:
        grad *= slope
    return grad


@triton.jit
def tile_gradient(factors, tile, row):
    """Return the gradient of a ``walk.Tile`` of an ``algebra.Row``, as :func:`logits_gradient`."""
    x = tl.load(row.logits + tile.first + tile.at, tile.inside, other=float("-inf"))
    uniform = factors.uniform_term
    if row.class_weight is not None:
        uniform *= tl.load(row.class_weight + tile.column, tile.inside, other=0.0)
    is_label = tile.column == row.label_at
    return logits_gradient(x, is_label, uniform, factors, row.grads, row.loss_options, row.temperature, row.threshold)
