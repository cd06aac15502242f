"""Refusals of objectives inside a head."""

import functools

import torch

from tests.refusals.heads import FACTORS, LABELS, OF_BOTH, WEIGHT, a_call
from tests.refusals.logits import TEMPERATURES
from tests.refusals.rows import Row, Table, number, tensor
from tests.support.cases.flat import linear_objective
from vocab_parallel_ce import Head, Teacher, TopKTeacher

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
OTHERS: list[Row] = [
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

OF_TEACHER = torch.randn(2, 3, 5), torch.randn(WEIGHT.shape[0], 5), torch.randn(WEIGHT.shape[0])
TEACHER = Teacher(*OF_TEACHER)
OBJECTIVES |= {
    "distilled": lambda log_probs=None, *, divergence, advantage, **_: advantage * divergence,
    "of a divergence alone": lambda divergence: divergence,
    "of no divergence": lambda log_probs, advantage: log_probs,
    "without a gradient": lambda log_probs=None, *, divergence, advantage: divergence.detach(),
    "of both mixed": lambda log_probs=None, *, divergence, advantage: divergence - divergence.mean(),
}
NO_LABELS = {"labels": None}
TEACHERS: list[Row] = [
    ({"teacher": Head(*OF_TEACHER)}, TypeError, r"teacher: expected a Teacher, got Head; pass Teacher\(hidden, weight"),
    ({"teacher": OF_TEACHER[0]}, TypeError, "teacher: expected a Teacher, got Tensor"),
    ({"teacher": TopKTeacher(IDS, IDS * -1.0)}, TypeError, "teacher: expected a Teacher, got TopKTeacher"),
    ({"teacher": tuple(TEACHER)}, TypeError, "teacher: expected a Teacher, got tuple"),
    ({"labels": IDS}, ValueError, r"labels: expected one per token with a teacher, got given ids, \(2, 3, 2\)"),
    *tensor("labels", LABELS, "int16 meta"),
    ({"labels": LABELS.flatten()}, ValueError, "labels: "),
    ({"outputs": ("entropy",), **NO_LABELS}, ValueError, "outputs: expected none but 'divergence' without labels, got"),
    ({"temperature": 2.0, **NO_LABELS}, ValueError, r"temperature: .* without labels, .*Teacher\(temperature="),
    ({"temperature": FACTORS, **NO_LABELS}, ValueError, "temperature: expected none without labels, got one"),
    ({"threshold": FACTORS, **NO_LABELS}, ValueError, "threshold: expected none without labels, got one"),
    ({"outputs": ("rank",), **NO_LABELS}, ValueError, "outputs: "),
    ({"outputs": ("divergence",), "teacher": None}, ValueError, "outputs: expected no 'divergence' without a teacher"),
    ({"labels": None, "teacher": None}, TypeError, "labels: .*got NoneType"),
    ({"tokens": {"divergence": FACTORS}}, ValueError, r"tokens\['divergence'\]: expected a name of its own"),
    ({"tokens": {"divergence": FACTORS}, **NO_LABELS}, ValueError, r"tokens\['divergence'\]: expected a name of"),
    ({"tokens": {"log_probs": FACTORS}, **NO_LABELS}, ValueError, r"tokens\['log_probs'\]: expected a name of its"),
    *tensor("teacher.hidden", OF_TEACHER[0], "None list grad int64 float64 meta sparse"),
    *tensor("teacher.weight", OF_TEACHER[1], "None list grad bfloat16 int8 meta sparse"),
    *tensor("teacher.bias", OF_TEACHER[2], "number grad bfloat16 meta"),
    ({"teacher.hidden": OF_TEACHER[0][:1]}, ValueError, r"teacher.hidden: .* of hidden .*\(2, 3\), got \(1, 3, 5\)"),
    ({"teacher.weight": OF_TEACHER[1][:, :4]}, ValueError, r"teacher.weight: expected shape .*\(21, 4\)"),
    ({"teacher.weight": OF_TEACHER[1][:9], "teacher.bias": None}, ValueError, "teacher.weight: rows .*21, .*got 9"),
    ({"teacher.bias": OF_TEACHER[2][:9]}, ValueError, r"teacher.bias: expected shape \(21,\), got \(9,\)"),
    ({"teacher.divergence": "kl"}, ValueError, "teacher.divergence: expected one of 'forward', .*got 'kl'"),
    ({"teacher.divergence": None}, ValueError, "teacher.divergence: expected one of"),
    ({"teacher.beta": 0.3}, ValueError, "teacher.beta: expected divergence='js'"),
    ({"teacher.beta": 1.0, "teacher.divergence": "js"}, ValueError, "teacher.beta: must be above 0 and below 1, got 1"),
    ({"teacher.beta": 0, "teacher.divergence": "js"}, ValueError, "teacher.beta: must be above 0 and below 1, got 0"),
    ({"teacher.beta": "1", "teacher.divergence": "js"}, TypeError, "teacher.beta: expected a number, got str"),
    *number("teacher.temperature"),
    *number("teacher.logit_scale"),
    *number("teacher.softcap"),
    ({"teacher.temperature": 1e-30, "temperature": 1e30}, ValueError, "teacher.temperature / temperature: must be"),
    (
        {"teacher.temperature": 1e30, "temperature": 1e-30},
        ValueError,
        "(temperature / teacher|teacher).temperature.*: ",
    ),
    *number("softcap"),
    *number("logit_scale"),
    *number("temperature"),
    (
        {"objective": "of no divergence"},
        TypeError,
        r"objective: must take \(log_probs, divergence=..., advantage=...\)",
    ),
    ({"objective": "right", **NO_LABELS}, TypeError, r"objective: must take \(divergence=..., advantage=...\)"),
    ({"objective": "of a divergence alone", **NO_LABELS}, TypeError, "objective: must take .*'advantage'"),
    ({"objective": "without a gradient"}, ValueError, "objective: .*do not detach"),
    ({"objective": "without a gradient", **NO_LABELS}, ValueError, "objective: .*do not detach"),
    ({"objective": "of both mixed"}, ValueError, "objective: .*mixes tokens"),
    ({"objective": "of both mixed", **NO_LABELS}, ValueError, "objective: .*mixes tokens"),
    ({"num_items": -1, **NO_LABELS}, ValueError, "num_items: must be "),
]

TOGETHER, OF_GROUPS = torch.tensor([[0, 2, 0], [-1, 2, 2]]), torch.ones(3)
OBJECTIVES |= {
    "of groups": lambda log_probs, groups, advantage, ref: groups.sum(log_probs * advantage) - groups.of(ref),
    "of each token": lambda log_probs, groups, advantage, ref: log_probs * advantage,
    "of some tokens": lambda log_probs, groups, advantage, ref: groups.sum(log_probs[1:]),
    "all groups": lambda log_probs, groups, advantage, ref: groups.sum(log_probs).mean(),
    "mixed groups": lambda log_probs, groups, advantage, ref: groups.sum(log_probs) * groups.sum(log_probs).sum(),
}


def call_of_groups(ref, numbers=None, **options):
    return call(numbers={"ref": ref} if numbers is None else numbers, **options)


OF_REF = r"numbers\['ref'\]"
GROUPS: list[Row] = [
    *tensor("together", TOGETHER, "list sparse meta float32 int16 bool"),
    ({"together": TOGETHER.flatten()}, ValueError, r"together: shape must be that of the tokens, \(2, 3\), got \(6,\)"),
    ({"together": TOGETHER - 1}, ValueError, "together: ids must be at least 0, or -1 for no group, got -2"),
    ({"ref": OF_GROUPS[:2]}, ValueError, OF_REF + ": expected at least 3 rows, since groups have ids up to 2, got 2"),
    ({"ref": OF_GROUPS[0]}, ValueError, OF_REF + r": expected one of each group, \[G, ...\], got shape \(\)"),
    *tensor("ref", OF_GROUPS, "list sparse meta grad", OF_REF),
    ({"numbers": [OF_GROUPS]}, TypeError, "numbers: expected a dict of tensors by their names, got list"),
    ({"numbers": {2: OF_GROUPS}}, TypeError, "numbers: expected names as keys, got 2"),
    *[({"numbers": {n: OF_GROUPS}}, ValueError, rf"numbers\['{n}'\]: .* own") for n in ("groups", "advantage")],
    ({"tokens": {"groups": FACTORS}}, ValueError, r"tokens\['groups'\]: expected a name of its own"),
    ({"together": None}, ValueError, "numbers: expected none without together, got some; pass each token's group"),
    ({"valid_tokens": 4}, ValueError, "valid_tokens: expected none with together, got 4; leave it out"),
    ({"valid_tokens": "count"}, ValueError, "valid_tokens: expected none with together, got 'count'"),
    (
        {"objective": "right", "numbers": {}},
        TypeError,
        r"objective: must take .*groups=...\)",
    ),
    ({"objective": "of each token"}, ValueError, r"objective: expected a number of each group, \(2,\).*got \(5,\)"),
    ({"objective": "all groups"}, ValueError, r"objective: expected a number of each group, \(2,\).*got \(\)"),
    (
        {"objective": "of some tokens"},
        ValueError,
        r"groups: .* of each token, \[5, ...\], got shape \(4,\)",
    ),
    ({"objective": "mixed groups", "check_objective": True}, ValueError, "objective: .*it mixes groups"),
]

TABLES = [
    Table(
        "linear_objective",
        call,
        lambda: a_call() | {"objective": "right", "advantage": FACTORS},
        [*OF_BOTH, *TEMPERATURES, *RETURNED, *TOKENS, *OTHERS],
    ),
    Table(
        "linear_objective with a teacher",
        call,
        lambda: a_call() | {"objective": "distilled", "advantage": FACTORS, "teacher": TEACHER},
        TEACHERS,
    ),
    Table(
        "linear_objective of groups",
        call_of_groups,
        lambda: a_call() | {"objective": "of groups", "advantage": FACTORS, "together": TOGETHER, "ref": OF_GROUPS},
        GROUPS,
    ),
]
