"""Teachers that are known at their k most probable tokens: log-probabilities that are none make their rows NaN."""

import pytest
import torch

from tests.soft.test_topk import made_of
from tests.support.cases.inputs import IGNORE_INDEX
from vocab_parallel_ce import Head, TopKTeacher, distillation_loss, linear_distillation_loss


@pytest.mark.reference
def test_logits_in_the_place_of_log_probs_are_refused_where_they_count():
    logits, labels = torch.randn(2, 9), torch.tensor([3, -100])
    ids, log_probs = torch.tensor([[1, 2], [3, 4]]), torch.tensor([[-1.0, -2.0], [7.0, float("nan")]])
    options = {"labels": labels, "check_labels": True}
    assert distillation_loss(logits, TopKTeacher(ids, log_probs), **options).isfinite()  # nobody reads an ignored row
    with pytest.raises(ValueError, match="^teacher.log_probs: must be at most 0, got 7; pass log-probabilities"):
        distillation_loss(logits, TopKTeacher(ids, log_probs.flip(0).nan_to_num(-1.0)), **options)


@pytest.mark.quick(2)
@pytest.mark.interpreted(2)
@pytest.mark.parametrize("head", (False, True), ids=("logits", "head"))
@pytest.mark.parametrize("divergence", ("forward", "reverse", "js"))
@pytest.mark.parametrize("rest", ("ignore", "bucket"))
@pytest.mark.usefixtures("unread_labels")
def test_probabilities_in_the_place_of_log_probs_make_their_rows_nan(impl_device, rest, divergence, head):
    """As labels outside of the vocabulary do: the other rows stay what they are, and an ignored one is 0."""
    impl, device = impl_device
    made, of_teacher = made_of()
    logits = made.logits[:4].to(device)
    ids, log_probs = (tensor[:4].to(device) for tensor in of_teacher.values())
    labels = torch.tensor([3, 1, IGNORE_INDEX, 0], device=device)
    wrong = torch.stack([log_probs[0], log_probs[1].exp(), log_probs[2].exp(), log_probs[3] + 3.0])
    options = {"divergence": divergence, "reduction": "none", "labels": labels, "impl": impl}

    def call(log_probs, **options):
        teacher = TopKTeacher(ids, log_probs, rest)
        leaf = (torch.ones(4, 1, device=device) if head else logits.clone()).requires_grad_()
        student = Head(leaf, logits[0].unsqueeze(1).clone().requires_grad_()) if head else leaf
        return (linear_distillation_loss if head else distillation_loss)(student, teacher, **options), leaf

    loss, leaf = call(wrong, **options)
    expected, expected_leaf = call(log_probs, **options)
    (grad,), (expected_grad,) = (torch.autograd.grad(a.sum(), b) for a, b in ((loss, leaf), (expected, expected_leaf)))
    assert loss[[1, 3]].isnan().all() and grad[[1, 3]].isnan().all()
    assert torch.equal(loss[[0, 2]], expected[[0, 2]]) and loss[2] == 0.0
    assert torch.equal(grad[[0, 2]], expected_grad[[0, 2]]) and not grad[2].any()
    assert call(wrong, **options | {"reduction": "mean"})[0].isnan()
    with pytest.raises(
        ValueError, match="^teacher.log_probs: must be at most 0, got .*; pass log-probabilities, not prob"
    ):
        call(wrong, **options, check_labels=True)
    twice = torch.full_like(log_probs, -0.5)  # no number is above 0
    with pytest.raises(ValueError, match="^teacher.log_probs: exponentials of a row must sum to at most 1, got 3[.]6"):
        call(twice, **options, check_labels=True)
    assert call(twice, **options)[0][[0, 1, 3]].isnan().all()


@pytest.mark.reference
@pytest.mark.parametrize("divergence", ("forward", "reverse"))
def test_rounded_log_probs_are_a_distribution(divergence):
    """The sum of 4096 log-probabilities of bf16 is off by less than the bound."""
    student, ids = torch.zeros(2, 4096), torch.arange(4096).expand(2, -1)
    for log_probs in (torch.zeros(2, 4096).log_softmax(-1), torch.randn(2, 4096).mul(4).log_softmax(-1)):
        for dtype in (torch.bfloat16, torch.float16):
            teacher = TopKTeacher(ids, log_probs.to(dtype), "bucket")
            assert distillation_loss(student, teacher, divergence=divergence, check_labels=True).isfinite()


@pytest.mark.usefixtures("unread_labels")
def test_too_much_mass_has_no_finite_gradient_with_a_hard_weight_of_1(impl_device):
    impl, device = impl_device
    leaf, log_probs = torch.zeros(2, 5, device=device).requires_grad_(), torch.tensor([[0.9, 0.9], [0.4, 0.4]]).log()
    teacher = TopKTeacher(torch.tensor([[0, 1]] * 2).to(device), log_probs.to(device))
    labels = torch.tensor([2, 2], device=device)
    distillation_loss(leaf * 1, teacher, labels=labels, hard_weight=1.0, impl=impl).backward()
    assert leaf.grad[0].isnan().all() and leaf.grad[1].isfinite().all()
