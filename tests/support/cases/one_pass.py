"""Calls of the one-pass kernel on this host's GPU, and what each element of them is compared with."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases.inputs import batch
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import vocab_parallel_cross_entropy
from vocab_parallel_ce.one_pass import WIDTHS, obstacle_of_gpu

EPS_32 = torch.finfo(torch.float32).eps
# bf16 columns of the narrowest rows, of the widest of the middle configuration, and of the widest.
NARROW = -(-WIDTHS[0][0] // 16) * 8
MIDDLE = WIDTHS[len(WIDTHS) // 2][1] // 16 * 8
WIDE = WIDTHS[-1][1] // 16 * 8

# "weights": random class weights, some of them 0.
OPTIONS = {
    "plain": {},
    "z_loss": {"z_loss": 1e-3},
    "scale": {"logit_scale": 0.3},
    "weights": {"weights": True},
    "all with weights": {"weights": True, "logit_scale": 0.5, "z_loss": 1e-3},
}


def options_of(name, columns):
    options = dict(OPTIONS[name])
    if options.pop("weights", False):
        weights = torch.rand(columns, generator=torch.Generator().manual_seed(5)) * 2
        weights[::7] = 0
        options["class_weight"] = weights.cuda()
    return options


def require_one_pass():
    """Skip where it cannot run: never on a Hopper GPU."""
    if (needed := obstacle_of_gpu(torch.cuda.current_device())) is not None:
        assert torch.cuda.get_device_capability() != (9, 0), needed
        pytest.skip(f"one_pass needs {needed}")


def made(kind, rows, columns, dtype=torch.bfloat16):
    return tuple(t.cuda() for t in batch(kind, rows=rows, vocab_size=columns, dtype=dtype))


def run(logits, labels, grad_output=None, **options):
    """(loss, gradient), which replaces ``logits``."""
    options = {"impl": "one_pass", "gradient": "in_forward"} | options
    leaf = logits.detach().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels, **options)
    (grad,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss) if grad_output is None else grad_output)
    assert grad.data_ptr() == logits.data_ptr()
    return loss.detach(), grad


def assert_equal(actual, expected):
    """Equal bits of loss and gradient, or NaN in both."""
    for value, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, want, rtol=0, atol=0, equal_nan=True)


def check(logits, labels, grad_output=None, impl="one_pass", **options):
    """:func:`run` against the oracle; ``logits`` are overwritten."""
    values = logits.clone(memory_format=torch.contiguous_format)
    loss, grad = run(logits, labels, grad_output, impl=impl, **options)
    oracle = cross_entropy_fp64(values, labels, grad_output=grad_output, **options)
    peer = cross_entropy_same_dtype(values, labels, grad_output=grad_output, **options)
    assert_within_budget(loss, oracle.loss, peer.loss)
    # Backward multiplies what forward has written.
    assert_within_budget(grad, oracle.grad, peer.grad, roundings=1 + (grad_output is not None))
    assert_every_element(grad, oracle.grad, labels)
    ignored = labels.long() == options.get("ignore_index", -100)
    assert not grad[ignored].any()
    if options.get("reduction") == "none":
        assert not loss[ignored].any()
    return loss, grad


def assert_every_element(grad, truth, labels):
    """Each column's gradient but the label's, which is a difference, is right to two roundings.

    Next to its own size, not to the label's: beside that, all others could be missing unseen.
    """
    columns, info = grad.shape[-1], torch.finfo(grad.dtype)
    rows, truth, labels = grad.reshape(-1, columns), truth.reshape(-1, columns), labels.reshape(-1).long()
    least = 2 * info.tiny * info.eps if grad.dtype == torch.float16 else info.tiny
    # A probability below tiny is 0, times the row's factor, of which the largest gradient of the row is most.
    least = least * truth.nan_to_num(0.0, 0.0, 0.0).abs().amax(-1, keepdim=True).clamp(min=1.0)
    excess = (rows.double() - truth).abs() - truth.abs() * (info.eps + 256 * EPS_32) - least
    excess[~truth.isfinite()] = -1
    (owned,) = ((labels >= 0) & (labels < columns)).nonzero(as_tuple=True)
    excess[owned, labels[owned]] = -1
    worst = int(excess.argmax())
    at = divmod(worst, columns)
    assert float(excess.flatten()[worst]) <= 0, (at, float(rows[at]), float(truth[at]))
