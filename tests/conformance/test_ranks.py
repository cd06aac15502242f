"""Three ranks, which are no power of two, in losses over logits and against a distribution; negative class weights."""

import pytest
import torch

from tests.support.cases.inputs import IGNORE_INDEX, Batch
from tests.support.cases.logits import SMOOTHING, broad_rows
from tests.support.cases.pairs import covering
from tests.support.cases.soft import Pair, divergences, topk_loss, topk_losses
from tests.support.cases.weights import weights
from tests.support.ranks.case import Case, check, run
from tests.support.ranks.pools import in_ranks
from vocab_parallel_ce import distillation_loss
from vocab_parallel_ce.losses.divergences import DIVERGENCES

ROWS, VOCAB = 5, 263
BOUNDS = [(0, 88), (88, 176), (176, 264)]  # the last column is padding
SENT = {"forward": [20], "reverse": [20], "js": [16, 8], "top-k": [24], "top-k js": [24]}  # bytes per row
in_three_ranks = in_ranks((3,), (3,), ())


def each(cases):
    return pytest.mark.parametrize("case", cases, ids=lambda case: "-".join(map(str, case.values())))


def made():
    logits, labels = broad_rows("peaked", ROWS, VOCAB)
    labels[:4] = torch.tensor([VOCAB - 1, 0, IGNORE_INDEX, VOCAB // 4])  # the last has a negative weight
    return Batch(logits, labels)


@pytest.mark.quick(3)
@pytest.mark.interpreted(3)
@each(covering(smoothing=tuple(SMOOTHING), form=("whole", "columns"), gradient=("in_forward", "out_of_place")))
@in_three_ranks
def test_class_weights(rank_pool, impl, case):
    options = {"class_weight": weights(VOCAB), "gradient": case["gradient"]} | SMOOTHING[case["smoothing"]]
    call = Case(made(), impl, options, BOUNDS, "shard", weight_form=case["form"])
    check(call, rank_pool.run(run, call))


@pytest.mark.quick(3)
@pytest.mark.interpreted(6)
@each(covering(loss=tuple(SENT), hard=(None, 0.3), reduction=("mean", "none")))
@in_three_ranks
def test_losses_against_a_distribution(rank_pool, impl, case):
    logits, labels = made()
    teacher = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5)) * 3 + logits * 0.3
    loss, options = case["loss"], {"reduction": case["reduction"]}
    hard = case["hard"] if loss in DIVERGENCES else None
    if loss in ("top-k", "top-k js"):
        log_probs, ids = teacher.log_softmax(-1).topk(3)
        options |= {"teacher_ids": ids, "teacher_log_probs": log_probs, "rest": "bucket"}
        options |= {"divergence": "js", "beta": 0.3} if loss == "top-k js" else {}
        function, pair = topk_loss, Pair(logits, logits, topk_losses)
    else:
        options |= {"divergence": loss} | ({"hard_weight": hard} if hard else {})
        function, pair = distillation_loss, Pair(logits, teacher, divergences, labels if hard else None)
    sent = [SENT[loss][0] + 8 * bool(hard), *SENT[loss][1:]]
    call = Case(pair, impl, options, BOUNDS, "shard", function=function)
    check(call, rank_pool.run(run, call), sent)
