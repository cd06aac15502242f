"""Loss and gradient through the public function: shapes, labels, grad_outputs, and what callers do."""

import pytest
import torch

from tests.support.cases.inputs import IGNORE_INDEX, batch
from tests.support.cases.logits import COLUMNS, GRADIENTS, METRICS, REDUCTIONS, Leaves, check, run
from tests.support.truth.oracle import cross_entropy_fp64
from vocab_parallel_ce import vocab_parallel_cross_entropy


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
