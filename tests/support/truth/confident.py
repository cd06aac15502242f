"""Labels with p_y near 1: rows of them, the truth in fp64, and how exact fp32 can be.

PyTorch rounds p_y and the sum of exponentials next to 1: at p_y = 0.99999 its gradient and its loss are
about 1 % off. Whether a single row of PyTorch's is right is luck, so errors are compared as root mean squares
over the rows of one p_y. Besides, each row's error must be a few roundings.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.cases.inputs import batch
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype

EPS = torch.finfo(torch.float32).eps
# 1 - p_y of the rows in turn.
REMAINDERS = (0.1, 1e-3, 1e-5, 1e-7)
ROWS = 8 * len(REMAINDERS)


class Rows(NamedTuple):
    """Loss and gradient of each row."""

    loss: Tensor  # [N]
    grad: Tensor  # [N, V]


def confident_rows(vocab_size, rows=ROWS, dtype=torch.float32):
    """``(logits, labels)`` with ``1 - p_y`` about :data:`REMAINDERS`, in rows that are not about 0."""
    gaps = tuple(math.log((1 - q) / q) for q in REMAINDERS)
    logits, labels = batch("confident", rows=rows, vocab_size=vocab_size, gaps=gaps)
    return (logits - 7).to(dtype), labels


def truth_of(logits, labels):
    """In fp64, whose digits are enough for a 1 - p_y of 1e-7."""
    return Rows(*cross_entropy_fp64(logits.cpu(), labels.cpu(), reduction="none"))


def relative_errors(actual, truth, labels):
    """``[N]`` each: of the loss, of the label's gradient, the worst of the other columns', and of the row's.

    A row's is its largest error by its largest element, the others' are by the true values.
    """
    at_label = labels.cpu().unsqueeze(1)
    error = (actual.grad.double().cpu() - truth.grad).abs()
    relative = error / truth.grad.abs()
    return {
        "loss": (actual.loss.double().cpu() / truth.loss - 1).abs(),
        "label": relative.gather(1, at_label).squeeze(1),
        "others": relative.scatter(1, at_label, 0.0).amax(dim=1),
        "row": error.amax(dim=1) / truth.grad.abs().amax(dim=1),
    }


def assert_as_exact_as_fp32(actual, logits, labels):
    """At most twice PyTorch's error in rows of one p_y, and a few roundings in every row.

    An exponential of a difference d is within about ``d / 2`` eps, and the differences are up to 30. The
    columns with the smallest gradients are held to that alone.
    """
    truth = truth_of(logits, labels)
    errors = relative_errors(actual, truth, labels)
    peer = Rows(*cross_entropy_same_dtype(logits.float(), labels, reduction="none"))
    peer_errors = relative_errors(peer, truth, labels)
    for name, error in errors.items():
        assert float(error.max()) <= 32 * EPS, (name, int(error.argmax()), float(error.max()))
        for turn, remainder in enumerate(REMAINDERS if name != "others" else ()):
            own, peer = (float(e[turn :: len(REMAINDERS)].square().mean().sqrt()) for e in (error, peer_errors[name]))
            assert own <= 2 * (peer + EPS), (name, remainder, own, peer)
