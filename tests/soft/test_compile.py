"""Losses against a distribution per token under ``torch.compile``: one graph, the bits of an eager call."""

import pytest
import torch

from tests.support.cases.flat import linear_distillation_loss
from vocab_parallel_ce import Head, TopKTeacher, distillation_loss, linear_token_log_probs, token_log_probs

pytestmark = pytest.mark.reference

N, V, D = 6, 16, 8
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, OTHER, HIDDEN, WEIGHT, THEIRS, HEAD = (
    torch.randn(*shape, generator=GENERATOR) for shape in ((N, V), (N, V), (N, D), (V, D), (N, 5), (V, 5))
)
LABELS = torch.tensor([1, 2, -100, 3, 4, 5])
LOG_PROBS, IDS = OTHER.log_softmax(-1).topk(3)
KNOWN, TEMPERATURE = TopKTeacher(IDS, LOG_PROBS, "bucket"), torch.linspace(0.5, 1.5, N)
TEACHER, THRESHOLD = Head(THEIRS, HEAD), torch.full((N,), -0.5)
JS = {"divergence": "js", "labels": LABELS, "hard_weight": 0.3, "temperature": 2.0}
STEPS = {
    "js": lambda x: distillation_loss(x * 1, OTHER, **JS),
    "k tokens": lambda x: distillation_loss(x * 1, TopKTeacher(IDS, LOG_PROBS, "bucket"), labels=LABELS),
    "head": lambda x: linear_distillation_loss(Head(HIDDEN * x[0, 0], WEIGHT), TEACHER, labels=LABELS, chunk_size=4),
    "head, hard weight": lambda x: linear_distillation_loss(
        Head(HIDDEN * x[0, 0], WEIGHT), TEACHER, labels=LABELS, hard_weight=0.4
    ),
    "head, k tokens": lambda x: linear_distillation_loss(
        Head(HIDDEN * x[0, 0], WEIGHT), TopKTeacher(IDS, LOG_PROBS), reduction="none"
    ).sum(),
    "k tokens, reverse, hard weight": lambda x: distillation_loss(
        x * 1, KNOWN, divergence="reverse", labels=LABELS, hard_weight=0.4, reduction="sum", num_items=3
    ),
    "head, k tokens, js": lambda x: linear_distillation_loss(
        Head(HIDDEN * x[0, 0], WEIGHT), KNOWN, labels=LABELS, divergence="js", chunk_size=4
    ),
    "threshold": lambda x: token_log_probs(x * 1, LABELS, threshold=THRESHOLD).clamp(min=-9.0).sum(),
    "head, threshold": lambda x: (
        linear_token_log_probs(HIDDEN * x[0, 0], WEIGHT, LABELS, threshold=THRESHOLD).clamp(min=-9.0).sum()
    ),
    "given ids": lambda x: (token_log_probs(x * 1, IDS, softcap=5.0, temperature=TEMPERATURE) * LOG_PROBS).sum(),
    "head, given ids": lambda x: (linear_token_log_probs(HIDDEN * x[0, 0], WEIGHT, IDS) * LOG_PROBS).sum(),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", STEPS)
def test_one_graph_and_the_same_bits(name):
    results = []
    for step in (STEPS[name], torch.compile(STEPS[name], fullgraph=True, backend="aot_eager")):
        leaf = LOGITS.clone().requires_grad_()
        loss = step(leaf)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert results[0][1].abs().sum() > 0


def test_refusals():
    with pytest.raises(TypeError, match="teacher: expected a tensor that requires no gradient"):
        torch.compile(distillation_loss, backend="aot_eager")(LOGITS, OTHER.clone().requires_grad_())
    with pytest.raises(ValueError, match="hard_weight: expected labels"):
        torch.compile(linear_distillation_loss, backend="aot_eager")(Head(HIDDEN, WEIGHT), TEACHER, hard_weight=0.5)
    js, known = {"divergence": "js"}, KNOWN._replace(log_probs=LOG_PROBS.clone().requires_grad_())
    with pytest.raises(Exception, match="check_labels: expected False in compiled code with a TopKTeacher"):
        torch.compile(distillation_loss, backend="aot_eager", fullgraph=True)(LOGITS, KNOWN, check_labels=True, **js)
    with pytest.raises(TypeError, match="teacher.log_probs: expected a tensor that requires no gradient"):
        torch.compile(distillation_loss, backend="aot_eager")(LOGITS, known, **js)
