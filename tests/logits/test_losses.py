"""Loss and gradient through the public function: shapes, labels, grad_outputs, and what callers do."""

import pytest
import torch

from tests.support.cases.inputs import DTYPES, IGNORE_INDEX, batch
from tests.support.cases.logits import COLUMNS, GRADIENTS, METRICS, REDUCTIONS, Leaves, check, run
from tests.support.truth.oracle import cross_entropy_fp64
from vocab_parallel_ce import vocab_parallel_cross_entropy


@pytest.mark.quick
@pytest.mark.parametrize("leading", [(2, 3), (4,), (2, 1, 3), (1, 1), (1,), (0, 3)])
def test_reduced_losses_are_scalars_and_others_have_the_labels_shape(impl_device, leading):
    """Shape (1,) instead of () defeats the comparison with a scalar 1."""
    rows = torch.Size(leading).numel()
    for dtype, reduction in zip(DTYPES, REDUCTIONS, strict=True):
        logits, labels = batch("peaked", rows=rows, vocab_size=COLUMNS, dtype=dtype)
        logits, labels = logits.view(*leading, COLUMNS), labels.view(leading)
        (loss,), grad = run(impl_device, logits, labels, reduction=reduction)
        assert loss.shape == (torch.Size(leading) if reduction == "none" else torch.Size([]))
        assert loss.dtype == torch.float32 and (rows or loss.sum().item() == 0.0)
        assert grad.shape == logits.shape and grad.dtype == dtype


def test_a_long_sum_is_accumulated_in_fp32(impl_device):
    """A bf16 accumulator stops growing at 256 times its terms."""
    rows = 48 if impl_device == ("triton", "cpu") else 8192
    made = batch("far_negative", rows=rows, vocab_size=8, dtype=torch.bfloat16)
    assert check(impl_device, *made, reduction="sum").loss.dtype == torch.float32


@pytest.mark.parametrize("columns", [1000, 1025])
def test_columns_beyond_the_last_add_nothing(impl_device, columns):
    """Padding that counts as a logit of 0 shows where logits are small; softcap would make of it e^-1 each."""
    logits, labels = batch("peaked", rows=2, vocab_size=columns)
    check(impl_device, logits * 1e-3 - 5, labels, label_smoothing=0.1)
    for padding in (0, 7):
        check(impl_device, logits * 1e-3, labels, softcap=1.0, padding=padding)


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("options", [{}, {"class_weight": 0.5}, {"z_loss": 1e-3}], ids=str)
def test_smoothing_keeps_the_digits_of_an_improbable_label(impl_device, options):
    """``p_y - 1 + label_smoothing`` has those of 1: of the gradient ``p_y - 1 / V`` few are left."""
    logits = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(3)
    options = options | {"label_smoothing": 1.0, "reduction": "none"}
    if "class_weight" in options:
        options["class_weight"] = torch.full([4096], options["class_weight"], device=impl_device[1])
    grad = run(impl_device, logits, labels, **options).grad.cpu().gather(1, labels[:, None])
    truth = cross_entropy_fp64(logits, labels, **options).grad.gather(1, labels[:, None])
    torch.testing.assert_close(grad.double(), truth, rtol=1e-5, atol=0)


@pytest.mark.interpreted(1)
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothing_keeps_its_digits_far_from_0(impl_device, smoothing):
    """A mean of logits near -1000 loses three digits of a loss near 10; a mean of shifted logits does not."""
    options = {"label_smoothing": smoothing, "reduction": "none"}
    made = batch("far_negative", rows=10, vocab_size=60)
    loss, truth = run(impl_device, *made, **options).loss, cross_entropy_fp64(*made, **options).loss
    assert float(((loss - truth) / truth).abs().max()) < 4 * torch.finfo(torch.float32).eps


def test_one_column(impl_device):
    """A shard of one column has stride 0 or anything in its last dimension."""
    impl, device = impl_device
    base, labels = torch.randn(4, 3, device=device), torch.tensor([0, 0, IGNORE_INDEX, 0], device=device)
    for logits in (base[:, :1], base[:, 1:2].clone(), base[:1, :1].expand(4, 1)):
        leaf = logits.detach().requires_grad_()
        loss = vocab_parallel_cross_entropy(leaf, labels, impl=impl, reduction="sum")
        loss.backward()
        assert loss.item() == 0.0 and torch.equal(leaf.grad.cpu(), torch.zeros(4, 1))


@pytest.mark.quick
@pytest.mark.interpreted(3)
@pytest.mark.parametrize("ignore_index", [0, COLUMNS + 5, 2**32 + 3, 2**40, -(2**63)])
def test_any_ignore_index(impl_device, ignore_index):
    """One inside the vocabulary, whose column is a logit like any other, and ones that int32 labels cannot hold.

    Compared in int32, 2**32 + 3 is 3, and 2**40 is 0.
    """
    logits, labels = batch("peaked", rows=6, vocab_size=COLUMNS)
    labels[1], labels[2] = 3, 0
    if abs(ignore_index) < 2**31:
        labels[::3] = ignore_index
    for made in (labels.int(), labels):
        check(impl_device, logits, made, ignore_index=ignore_index, outputs=METRICS, check_labels=True)


@pytest.mark.quick
def test_checked_labels_are_counted_and_the_first_is_named(impl_device):
    impl, device = impl_device
    logits = torch.randn(2, 3, COLUMNS, device=device).requires_grad_()
    labels = torch.tensor([[0, 5, IGNORE_INDEX], [COLUMNS - 1, COLUMNS, -1]], device=device)
    before = logits.detach().clone()
    message = rf"labels: must be in \[0, {COLUMNS}\) .*2 outside.*\(1, 1\): {COLUMNS}$"
    with pytest.raises(ValueError, match=f"^{message}"):
        vocab_parallel_cross_entropy(logits, labels, impl=impl, check_labels=True)
    assert torch.equal(logits, before) and logits._version == 0
    labels[1, 1:] = IGNORE_INDEX
    assert vocab_parallel_cross_entropy(logits, labels, impl=impl, check_labels=True).isfinite()


@pytest.mark.parametrize(("reduction", "gradient"), [*zip(REDUCTIONS, GRADIENTS, strict=True)])
def test_an_auxiliary_loss_is_added_in_place(impl_device, gradient, reduction):
    """A loss that autograd takes for a view of something refuses ``+=``."""
    case = Leaves(impl_device)
    loss = case.loss(reduction=reduction, gradient=gradient)
    before = loss.detach().clone()
    loss += 1.5
    assert torch.equal(loss, before + 1.5)
    loss.sum().backward()
    assert case.source.grad.isfinite().all()
