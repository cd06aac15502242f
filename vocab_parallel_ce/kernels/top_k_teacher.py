"""The divergence of a row from a top-k teacher, as jit functions: the mathematics of ``losses.top_k_teacher``."""

import triton
import triton.language as tl

from vocab_parallel_ce.kernels import primitives as ops


@triton.jit
def teacher_of_row(log_q, left_out, lane, sizes):
    """Return a teacher's log-probabilities at its ids and of the rest, and whether all ids are left out.

    They are NaN if the probabilities sum to more than ``losses.top_k_teacher.MOST_MASS``.
    """
    is_in = (left_out == 0) & (lane < sizes.k)
    mass = tl.sum(tl.where(is_in, ops.exp_shifted(log_q, 0.0), 0.0))
    log_r = tl.log(tl.maximum(1.0 - mass, 5.960464477539063e-08))  # half an eps
    is_too_much = mass > 1.125
    log_q, log_r = tl.where(is_too_much, float("nan"), log_q), tl.where(is_too_much, float("nan"), log_r)
    return log_q, log_r, tl.max(is_in.to(tl.int32)) == 0


@triton.jit
def log_ratios(log_s, log_q, sizes):
    """Return ``(log(s / m), log(q / m))`` of finite logarithms, with ``m = beta * q + (1 - beta) * s``.

    With the smaller share p, ``log1p(p * (q / s - 1))`` keeps the digits that the logarithm of m rounds away.
    """
    is_teachers = sizes.beta <= sizes.student_share
    share = tl.minimum(sizes.beta, sizes.student_share)
    apart = tl.where(is_teachers, log_q - log_s, log_s - log_q)
    kept = tl.minimum(apart, sizes.most)
    near = ops.log1p(share * (ops.exp_shifted(kept, 0.0) - 1.0))
    small_ratio, large_ratio = kept - near, -(near + (apart - kept))
    small_ratio = tl.where(apart == apart, small_ratio, apart)  # a minimum may pass over a NaN
    return tl.where(is_teachers, large_ratio, small_ratio), tl.where(is_teachers, small_ratio, large_ratio)


@triton.jit
def terms(log_s, log_q, left_out, sizes):
    """Return the terms of a divergence and their derivatives by ``log_s``, 0 where an outcome is left out."""
    log_q, log_s = tl.where(left_out, 0.0, log_q), tl.where(left_out, 0.0, log_s)
    excluded = log_s == float("-inf")
    known = tl.where(excluded, 0.0, log_s)
    q, s = ops.exp_shifted(log_q, 0.0), tl.where(excluded, 0.0, ops.exp_shifted(known, 0.0))
    if sizes.beta is not None:
        student_ratio, teacher_ratio = log_ratios(known, log_q, sizes)
        grad = sizes.student_share * s * student_ratio
        value = sizes.beta * q * tl.where(excluded, -sizes.log_beta, teacher_ratio) + grad
    elif sizes.reverse is not None:
        value, grad = s * (known - log_q), s * (known - log_q + 1.0)
    else:
        value, grad = q * (log_q - log_s), -q
    return tl.where(left_out, 0.0, value), tl.where(left_out, 0.0, grad)


@triton.jit
def row_loss(values, rest, log_q, left_out, has_labels, lane, sizes):
    """Return the divergence of a row from log-probabilities ``values`` at the ids and ``rest`` of the others."""
    log_q, log_r, is_rest_out = teacher_of_row(log_q, left_out, lane, sizes)
    value, _ = terms(values, log_q, left_out | (lane >= sizes.k), sizes)
    loss = tl.sum(value)
    if sizes.rest is not None:
        rest_value, _ = terms(rest, log_r, is_rest_out, sizes)
        loss += rest_value
    if has_labels:
        label_value = tl.sum(tl.where(lane == sizes.k, values, 0.0))
        if sizes.hard_weight is not None:
            h = sizes.hard_weight
            loss = tl.where((h == 1) & (tl.abs(loss) == float("inf")), 0.0, loss)
            loss = (1.0 - h) * loss - h * label_value
        loss = tl.where(label_value == label_value, loss, label_value)  # NaN: a label outside the vocabulary
    return loss


@triton.jit
def row_gradients(values, rest, log_q, left_out, grad_row, lane, sizes):
    """Return the gradients of a row's ``values`` and of its ``rest``."""
    log_q, log_r, is_rest_out = teacher_of_row(log_q, left_out, lane, sizes)
    soft, grad_rest = grad_row, 0.0
    if sizes.hard_weight is not None:
        soft *= 1.0 - sizes.hard_weight
    _, grad = terms(values, log_q, left_out | (lane >= sizes.k), sizes)
    grad *= soft
    if sizes.hard_weight is not None:
        grad = tl.where(lane == sizes.k, -sizes.hard_weight * grad_row, grad)
    if sizes.rest is not None:
        _, grad_rest = terms(rest, log_r, is_rest_out, sizes)
        grad_rest *= soft
    return grad, grad_rest
