"""Refusals of objectives inside a head."""

import functools

import torch

from tests.refusals.heads import FACTORS, HALF, LABELS, OF_BOTH, a_call
from tests.refusals.logits import TEMPERATURES
from tests.refusals.rows import Row, Table, tensor
from tests.support.cases.flat import linear_objective

IDS = torch.stack([LABELS, LABELS], -1)
PARAMETER = torch.tensor(2.0, requires_grad=True)
OBJECTIVES = {
    "right": lambda log_probs, advantage: -advantage * log_probs,
    "a sum": lambda log_probs, advantage: log_probs.sum(),
    "fewer": lambda log_probs, advantage: log_probs[1:],
    "elsewhere": lambda log_probs, advantage: log_probs.to("meta"),
    "a number": lambda log_probs, advantage: 1.0,
    "bool": lambda log_probs, advantage: log_probs > 0,
    "constant": lambda log_probs, advantage: advantage,
    "detached": lambda log_probs, advantage: log_probs.detach(),
    "learnt": lambda log_probs, advantage: log_probs * PARAMETER.exp(),
    "other names": lambda log_probs: log_probs,
    "more names": lambda log_probs, advantage, old: log_probs,
    "wrong itself": lambda log_probs, advantage: advantage + None,
    "of each id": lambda log_probs, advantage: log_probs * 1,
    "mixed ids": lambda log_probs, advantage: log_probs.sum(-1) - log_probs.mean(),
    "mixed": lambda log_probs, advantage: log_probs - log_probs.mean(),
}


# A wrapper of a function with other names, as inspect.signature would see it.
OBJECTIVES["wraps another"] = functools.wraps(OBJECTIVES["more names"])(lambda log_probs, advantage: advantage + None)


def call(objective, advantage, tokens=None, **options):
    tokens = {"advantage": advantage} if tokens is None else tokens
    return linear_objective(objective=OBJECTIVES.get(objective, objective), tokens=tokens, **options)


RETURNED: list[Row] = [
    ({"objective": "a sum"}, ValueError, r"objective: expected a number of each token, \(6,\).*got \(\)"),
    ({"objective": "fewer"}, ValueError, r"objective: .*\(6,\) on cpu, got \(5,\) on cpu; return that shape"),
    ({"objective": "elsewhere"}, ValueError, "objective: .*on cpu, got .*on meta"),
    ({"objective": "a number"}, TypeError, "objective: expected floating-point numbers in a tensor, got float"),
    ({"objective": "bool"}, TypeError, "objective: .*got torch.bool"),
    ({"objective": "constant"}, ValueError, "objective: expected a function of log_probs.*got numbers without one"),
    ({"objective": "detached"}, ValueError, "objective: .*do not detach"),
    ({"objective": "learnt"}, ValueError, r"objective: .*its arguments, got one of shape \(\).*lost"),
    ({"objective": "other names"}, TypeError, r"objective: must take \(log_probs, advantage=...\), .* 'advantage'"),
    ({"objective": "more names"}, TypeError, "objective: must take .*missing a required .*'old'"),
    ({"objective": "wrong itself"}, TypeError, "unsupported operand"),
    ({"objective": "wraps another"}, TypeError, "unsupported operand"),
    ({"objective": None}, TypeError, "objective: expected a function of .*, got NoneType"),
    ({"objective": "mixed", "check_objective": True}, ValueError, "objective: .*mixes tokens.*two steps"),
]
OF_TOKENS = r"tokens\['advantage'\]: "
TOKENS: list[Row] = [
    ({"advantage": torch.ones(6)}, ValueError, OF_TOKENS + r"shape must be that of the tokens, \(2, 3\), got \(6,\)"),
    *tensor("advantage", FACTORS, "list sparse meta grad", OF_TOKENS.removesuffix(": ")),
    ({"tokens": ["advantage"]}, TypeError, "tokens: expected a dict of tensors by their names, got list"),
    ({"tokens": {"log_probs": 1}}, ValueError, r"tokens\['log_probs'\]: expected a name of its own"),
    ({"tokens": {"entropy": 1}, "outputs": ("entropy",)}, ValueError, r"tokens\['entropy'\]: expected a name"),
    ({"tokens": {1: 1}}, TypeError, "tokens: expected names as keys, got 1"),
]
TRAINED_HALF = {name: tensor.clone().requires_grad_() for name, tensor in HALF.items()}
OTHERS: list[Row] = [
    (
        TRAINED_HALF,
        ValueError,
        "objective: expected products and gradients of .*, got fp16; use linear_token",
    ),
    ({"reduction": "none"}, ValueError, "reduction: expected one of 'mean', 'sum'"),
    ({"num_items": -1}, ValueError, "num_items: must be "),
    ({"num_items": "3"}, TypeError, "num_items: expected a number, got str"),
    ({"check_objective": 1}, TypeError, "check_objective: "),
    ({"outputs": ("rank",)}, ValueError, "outputs: "),
    ({"gradient": "in_backward"}, ValueError, "options.gradient: expected 'auto' or 'in_forward' .*got 'in_b"),
    ({"labels": IDS, "objective": "of each id"}, ValueError, r"objective: .* \(6,\) on cpu, got \(6, 2\) on cpu"),
    ({"labels": IDS, "objective": "mixed ids", "check_objective": True}, ValueError, "objective: .*mixes tokens"),
    ({"labels": IDS, "outputs": ("entropy",)}, ValueError, "labels: expected one per token with outputs or a"),
    ({"labels": IDS, "threshold": torch.tensor(0.0)}, ValueError, "labels: expected one per token with outputs or a"),
]

TABLES = [
    Table(
        "linear_objective",
        call,
        lambda: a_call() | {"objective": "right", "advantage": FACTORS},
        [*OF_BOTH, *TEMPERATURES, *RETURNED, *TOKENS, *OTHERS],
    )
]
