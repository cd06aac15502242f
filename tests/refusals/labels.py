"""Refusals of labels that are probabilities, or several given ids per token."""

import torch

from tests.refusals.rows import Row, Table, tensor
from tests.support.cases.flat import linear_token_log_probs
from vocab_parallel_ce import logits_at, token_log_probs, vocab_parallel_cross_entropy

LOGITS, PROBABILITIES = torch.randn(2, 5), torch.rand(2, 5)
A_TEACHER = (
    r"labels: dtype must be .*; pass integer ids; of probabilities, distillation_loss\(logits, labels.log\(\)\) has"
)
OF_PROBABILITIES: list[Row] = [
    ({"labels": PROBABILITIES.to(dtype)}, TypeError, A_TEACHER)
    for dtype in (torch.float32, torch.float64, torch.bfloat16)
]
OF_PROBABILITIES += [
    ({"labels": PROBABILITIES.clone().requires_grad_()}, TypeError, A_TEACHER),
    ({"labels": PROBABILITIES.long()}, ValueError, r"labels: shape .*; pass the global id of each token; of one-hot"),
    ({"labels": 3}, TypeError, "labels: expected a torch.Tensor"),
    *tensor("labels", PROBABILITIES, "masked"),
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
        r"labels: shape must be \[4, k\] with at least one id .*, got \(4, 0\)$",
    ),
    *tensor("labels", IDS, "sparse float32 masked"),
    ({"labels": torch.zeros(4, 9).long()}, ValueError, "labels: expected another number of given ids"),
    ({"labels": IDS + 9, "check_labels": True}, ValueError, r"labels: must be in \[0, 9\) or .* -100, got 8 outside"),
    ({"temperature": torch.ones(3)}, ValueError, "temperature"),
]


OF_LOGITS_AT: list[Row] = [
    ({"ids": IDS[:3]}, ValueError, r"ids: shape must be \[4, k\] with at least one id per token, got \(3, .*\)$"),
    ({"ids": IDS[:, 0]}, ValueError, r"ids: shape must be .*, got \(4,\); for one id pass ids.unsqueeze\(-1\)$"),
    ({"ids": IDS[:, :0]}, ValueError, "ids: shape must be"),
    *tensor("ids", IDS, "float32 list"),
    ({"ids": IDS + 9}, ValueError, r"ids: must be in \[0, 9\), got .* outside"),
    *tensor("logits", torch.zeros(4, 9), "list int64"),
    ({"vocab_size": 10}, ValueError, "logits: last dimension must be at least vocab_size 10 "),
]


TABLES = [
    Table("logits_at", logits_at, lambda: {"logits": torch.randn(4, 9), "ids": IDS}, OF_LOGITS_AT),
    Table(
        "vocab_parallel_cross_entropy of probabilities",
        vocab_parallel_cross_entropy,
        lambda: {"logits": LOGITS.clone(), "labels": torch.tensor([0, 4])},
        OF_PROBABILITIES,
    ),
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
