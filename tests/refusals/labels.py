"""Refusals of labels that are probabilities, or several given ids per token."""

import torch

from tests.refusals.rows import Row, Table, masked
from vocab_parallel_ce import linear_token_log_probs, logits_at, token_log_probs, vocab_parallel_cross_entropy

LOGITS, TARGETS, ONES = torch.randn(2, 5), torch.rand(2, 5), torch.ones(5)
OF_PROBABILITIES: list[Row] = [
    ({"labels": TARGETS.clone().requires_grad_()}, TypeError, "labels: .*requires no gradient"),
    ({"labels": TARGETS.long()}, ValueError, "labels: .*shape"),  # ids, which have no columns
    ({"labels": TARGETS[:, :4]}, ValueError, "labels: shape"),
    ({"labels": TARGETS[:, 0]}, ValueError, r"labels: shape of probabilities .*of logits, \(2, 5\), got \(2,\)"),
    ({"labels": 3}, TypeError, "labels: expected a torch.Tensor"),
    masked("labels", TARGETS),
    ({"gradient": "forward"}, ValueError, "gradient: "),
    ({"reduction": "batchmean"}, ValueError, "reduction: "),
    *(
        ({name: value}, ValueError, f"{name}: has no use with probabilities as labels, got ")
        for name, value in (("ignore_index", 3), ("ignore_index", 0), ("check_labels", True), ("outputs", ("lse",)))
    ),
    ({"outputs": ("entropy",)}, ValueError, "outputs: "),
    ({"class_weight": torch.ones(4)}, ValueError, "class_weight: expected shape"),
    ({"class_weight": ONES.clone().requires_grad_()}, TypeError, "class_weight: .*no gradient"),
    ({"num_items": -1, "reduction": "sum"}, ValueError, "num_items: "),
    ({"vocab_size": 9}, ValueError, "logits: last dimension"),
    ({"impl": "one_pass"}, ValueError, "impl: 'one_pass'"),
]
IDS = torch.randint(0, 9, (4, 2))
NOT_IN_FORWARD: Row = ({"gradient": "in_forward"}, ValueError, "gradient: expected one of")
OF_IDS: list[Row] = [
    ({"outputs": ("lse",)}, ValueError, r"labels: expected one per token with outputs or a threshold, \(4,\), got"),
    ({"outputs": ("entropy",)}, ValueError, r"labels: expected one per token with outputs or a threshold, \(4,\), got"),
    ({"labels": IDS[:3]}, ValueError, "labels: shape must be"),
    (
        {"labels": IDS[:, :0]},
        ValueError,
        r"labels: shape must be \[4, k\] with at least one id per token, got \(4, 0\)$",
    ),
    ({"labels": IDS.to_sparse()}, TypeError, "labels: expected a dense tensor, got layout torch.sparse_coo"),
    ({"labels": torch.zeros(4, 9).long()}, ValueError, "labels: expected another number of given ids"),
    (
        {"labels": IDS + 9, "check_labels": True},
        ValueError,
        r"labels: must be in \[0, 9\) or ignore_index -100, got 8 outside",
    ),
    ({"labels": IDS.float()}, TypeError, "labels: dtype"),
    masked("labels", IDS),
    ({"temperature": torch.ones(3)}, ValueError, "temperature"),
]


OF_LOGITS_AT: list[Row] = [
    ({"ids": IDS[:3]}, ValueError, r"ids: shape must be \[4, k\] with at least one id per token, got \(3, .*\)$"),
    ({"ids": IDS[:, 0]}, ValueError, r"ids: shape must be .*, got \(4,\); for one id pass ids.unsqueeze\(-1\)$"),
    ({"ids": IDS[:, :0]}, ValueError, "ids: shape must be"),
    ({"ids": IDS.float()}, TypeError, "ids: dtype"),
    ({"ids": [1]}, TypeError, "ids: expected a torch.Tensor"),
    ({"ids": IDS + 9}, ValueError, r"ids: must be in \[0, 9\), got .* outside"),
    ({"logits": [1]}, TypeError, "logits: expected a torch.Tensor"),
    ({"logits": torch.zeros(4, 9).long()}, TypeError, "logits: dtype"),
    ({"vocab_size": 10}, ValueError, "logits: last dimension must be at least vocab_size 10 "),
]


def a_call():
    return {"logits": LOGITS.clone().requires_grad_() * 1, "labels": TARGETS.clone()}


TABLES = [
    Table("logits_at", logits_at, lambda: {"logits": torch.randn(4, 9), "ids": IDS}, OF_LOGITS_AT),
    Table("vocab_parallel_cross_entropy of probabilities", vocab_parallel_cross_entropy, a_call, OF_PROBABILITIES),
    Table(
        "token_log_probs of ids",
        token_log_probs,
        lambda: {"logits": torch.randn(4, 9), "labels": IDS},
        [*OF_IDS, NOT_IN_FORWARD],
    ),
    Table(
        "linear_token_log_probs of ids",
        linear_token_log_probs,
        lambda: {"hidden": torch.randn(4, 5), "weight": torch.randn(9, 5), "labels": IDS},
        OF_IDS,
    ),
]
