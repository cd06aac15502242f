"""The bits of a row do not depend on how many rows there are, nor on where it stands, if rows are whole lines.

Other rows are cut into vectors where their memory has a boundary, which is elsewhere in each.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.cases.inputs import batch
from tests.support.cases.logits import flat_outputs
from tests.support.kernels.launch_shapes import programs_by_rows
from vocab_parallel_ce import (
    TopKTeacher,
    distillation_loss,
    sampling_threshold,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from vocab_parallel_ce.losses.divergences import DIVERGENCES

# Rows of several parts and tiles of every table; padded; with a tail.
WIDTHS = ((5056, 5056), (9 * 2048, 9 * 2048), (20544, 20544), (8200, 8320), (8197, 8320))
OUTPUTS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")
Call = Callable[[Tensor, Tensor, Tensor, dict[str, Any]], Any]


def weights(logits: Tensor) -> Tensor:
    return torch.rand(logits.shape[-1], generator=torch.Generator().manual_seed(2)).to(logits.device)


def top_3(teacher: Tensor, vocab_size: int | None) -> TopKTeacher:
    log_probs, ids = teacher[:, :vocab_size].log_softmax(-1).topk(3)
    return TopKTeacher(ids, log_probs)


def on_labels(**options: Any) -> Call:
    return lambda x, labels, other, own: vocab_parallel_cross_entropy(x, labels, reduction="none", **options, **own)


def on_teacher(**options: Any) -> Call:
    def call(x: Tensor, labels: Tensor, other: Tensor, own: dict[str, Any]) -> Any:
        given = {"labels": labels} if "hard_weight" in options else {}
        return distillation_loss(x, other, reduction="none", **options, **given, **own)

    return call


CALLS: dict[str, Call] = {
    "loss": on_labels(),
    "options": on_labels(label_smoothing=0.1, z_loss=0.01, softcap=20.0, outputs=("predictions", "lse")),
    "class weights": lambda x, labels, other, own: vocab_parallel_cross_entropy(
        x, labels, reduction="none", label_smoothing=0.1, class_weight=weights(x), **own
    ),
    "log-probs": lambda x, labels, other, own: token_log_probs(x, labels, outputs=OUTPUTS, **own),
    "sampling": lambda x, labels, other, own: token_log_probs(
        x, labels, threshold=sampling_threshold(x, top_k=50, top_p=0.9, vocab_size=own.get("vocab_size")), **own
    ),
    "given ids": lambda x, labels, other, own: token_log_probs(
        x, labels[:, None] - torch.arange(5).to(x.device), **own
    ),
    **{name: on_teacher(divergence=name) for name in DIVERGENCES},
    **{f"{name}, hard labels": on_teacher(divergence=name, temperature=2.0, hard_weight=0.5) for name in DIVERGENCES},
    "top-k teacher": lambda x, labels, other, own: distillation_loss(
        x, top_3(other, own.get("vocab_size")), reduction="none", **own
    ),
    **{
        f"{name} of a top-k teacher": lambda x, labels, other, own, name=name: distillation_loss(
            x, top_3(other, own.get("vocab_size"))._replace(rest="bucket"), divergence=name, reduction="none", **own
        )
        for name in ("reverse", "js")
    },
}


def results(call: Call, logits: Tensor, labels: Tensor, other: Tensor, own: dict[str, Any]) -> list[Tensor]:
    """The outputs per row, and the gradient."""
    leaf = logits.clone().requires_grad_()
    found = call(leaf * 1, labels, other, own)
    outputs = flat_outputs(found)
    torch.autograd.backward([each.sum() for each in outputs if each.requires_grad])
    return [*(each.detach() for each in outputs), leaf.grad]


def assert_rows_are_alike(call, others, made, own):
    logits, labels, other = made
    whole = results(call, logits, labels, other, own)
    for rows in others:
        for expected, found in zip(whole, results(call, *(each[rows] for each in made), own), strict=True):
            expected = expected[rows]
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7)), rows


def is_interpreted(case):
    """Two widths of each call, another pair for the next."""
    return (list(CALLS).index(case["name"]) + WIDTHS.index(case["width"])) % len(WIDTHS) in (0, 2)


@pytest.mark.interpreted(2 * len(CALLS), among=is_interpreted)
@pytest.mark.parametrize("width", WIDTHS, ids=lambda width: f"{width[0]} of {width[1]}")
@pytest.mark.parametrize("name", CALLS)
def test_rows_alone_few_and_many(impl_device, name, width):
    """Plain PyTorch on a GPU is no case: its sums have an order for each number of rows."""
    impl, device = impl_device
    if impl == "reference":
        device = "cpu"
    vocab_size, n_columns = width
    logits, labels = batch("peaked", rows=7, vocab_size=vocab_size, dtype=torch.bfloat16)
    other = torch.randn(7, n_columns, generator=torch.Generator().manual_seed(1))
    logits = torch.nn.functional.pad(logits, (0, n_columns - vocab_size), value=3.0)
    labels[2] = -100
    made = tuple(each.to(device) for each in (logits, labels, other))
    own = {"impl": impl, "vocab_size": vocab_size}
    with programs_by_rows():
        assert_rows_are_alike(CALLS[name], (slice(5, 6), slice(0, 2), slice(3, 7)), made, own)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("vocab_size", (128256, 50304))
def test_a_row_alone_in_64_and_in_2000(name, vocab_size):
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(2000, vocab_size, device="cuda", dtype=torch.bfloat16, generator=generator) * 3
    labels = torch.randint(0, vocab_size, (2000,), device="cuda", generator=generator)
    other = torch.randn(2000, vocab_size, device="cuda", dtype=torch.bfloat16, generator=generator)
    rows = (slice(11, 12), slice(1900, 1964), slice(0, 700))
    assert_rows_are_alike(CALLS[name], rows, (logits, labels, other), {"impl": "auto"})
