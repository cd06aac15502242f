"""Refusals of distillation: teachers that are logits, heads, or known at their k most probable tokens."""

import torch

from tests.refusals.rows import EITHER, Row, Table, tensor
from tests.support.cases.flat import linear_distillation_loss
from vocab_parallel_ce import Head, TopKTeacher, VocabShard, distillation_loss

STUDENT, TEACHER, LABELS = torch.randn(2, 6), torch.randn(2, 6), torch.tensor([1, 2])
with torch.inference_mode():
    OF_INFERENCE = TEACHER.clone()
HARD, JS, CHECKED = {"hard_weight": 0.5, "labels": LABELS}, {"divergence": "js"}, {"check_labels": True}
SHARD = VocabShard(0, 6, 5)
OF_LOGITS: list[Row] = [
    *tensor("teacher", TEACHER, "grad int64"),
    *tensor("student_logits", STUDENT, "list"),
    ({"teacher": OF_INFERENCE}, ValueError, "teacher: expected .*clone"),
    ({"teacher": TEACHER[:1]}, ValueError, "teacher: shape"),
    ({"teacher": TEACHER[:, :5]}, ValueError, "teacher: last dimension must be the student's, 6, without vocab_size"),
    ({"teacher": TEACHER[:, :4], "vocab_size": 5}, ValueError, "teacher: last dimension"),
    ({"teacher": TEACHER[:, :4], "vocab_size": SHARD}, ValueError, "teacher: last dimension must give"),
    (
        {"teacher": Head(STUDENT, STUDENT)},
        TypeError,
        "teacher: expected logits or a TopKTeacher, got Head; call",
    ),
    ({"teacher": STUDENT.topk(2)}, TypeError, r"teacher: .*; pass TopKTeacher\(ids, log_probs\)"),
    ({"teacher": (LABELS, STUDENT)}, TypeError, r"teacher: .* got tuple; pass TopKTeacher\(ids, log_probs\)"),
    ({"vocab_size": 7}, ValueError, "student_logits: last dimension must be"),
    ({"divergence": "kl"}, ValueError, "divergence: "),
    ({"beta": 1.0, **JS}, ValueError, "beta: must be above 0"),
    ({"beta": 0.3}, ValueError, "beta: expected divergence='js'"),
    ({"hard_weight": 0.5}, ValueError, "hard_weight: expected labels"),
    ({"hard_weight": 2, "labels": LABELS}, ValueError, "hard_weight: must be"),
    ({"labels": LABELS[:1]}, ValueError, "labels: shape"),
    ({"labels": LABELS + 5, **CHECKED}, ValueError, "labels: must be in"),
    ({"temperature": 0.0}, ValueError, "temperature: "),
    ({"gradient": "forward"}, ValueError, "gradient: "),
    ({"softcap": 3.0}, TypeError, ".*unexpected keyword argument 'softcap'"),
]
IDS, LOG_PROBS = torch.tensor([[1, 2], [3, 3]]), -torch.rand(2, 2) - 1
TOP_K = TopKTeacher(IDS, LOG_PROBS)
OUTSIDE = TopKTeacher(torch.tensor([[1, 2], [3, 6]]), -torch.ones(2, 2))
OF_TOP_K: list[Row] = [
    *tensor("teacher.ids", IDS, "None float32"),
    *tensor("teacher.log_probs", LOG_PROBS, "None int64 grad"),
    *tensor("teacher.log_probs", LOG_PROBS, "grad", **HARD),
    ({"teacher.ids": IDS[:1]}, ValueError, "teacher.ids: shape"),
    ({"teacher.ids": IDS[:, :1]}, ValueError, "teacher.ids: shape"),
    ({"teacher.rest": "drop"}, ValueError, "teacher.rest: expected one of"),
    ({"teacher": TOP_K, **CHECKED}, ValueError, "teacher.ids: must be different"),
    ({"teacher": TOP_K, **CHECKED, **JS}, ValueError, "teacher.ids: must be different"),
    ({"teacher": OUTSIDE, **CHECKED}, ValueError, "teacher.ids: must be in"),
    ({"teacher": OUTSIDE, **CHECKED, **JS}, ValueError, "teacher.ids: must be in"),
    ({"divergence": "backward"}, ValueError, "divergence: expected one of"),
    ({"hard_weight": 0.5}, ValueError, "hard_weight: expected labels"),
    ({"temperature": 2.0}, ValueError, r"teacher.temperature: expected 2, .* got 1; .*\(..., temperature=2\)"),
    ({"teacher.temperature": 2.0}, ValueError, "teacher.temperature: expected 1, the loss's temperature, got 2"),
    ({"teacher.temperature": "1"}, TypeError, "teacher.temperature: expected a number"),
    ({"temperature": 0.0}, ValueError, "temperature: must be"),
    ({"teacher.temperature": 2.0, "temperature": 2.0, **HARD}, ValueError, "hard_weight: expected temperature=1"),
    ({"beta": 1.0, **JS}, ValueError, "beta: must be above 0"),
    ({"reduction": "max", **JS}, ValueError, "reduction: expected one of"),
    *tensor("student_logits", STUDENT, "None", **JS),
]
TOKENS, COLUMNS = 9, 40
OF_STUDENT = Head(torch.randn(TOKENS, 12), torch.randn(COLUMNS, 12).requires_grad_(), torch.randn(COLUMNS))
OF_TEACHER = Head(torch.randn(TOKENS, 7), torch.randn(COLUMNS, 7), torch.randn(COLUMNS))
HIDDEN, WEIGHT, BIAS = OF_TEACHER
OF_TOKENS = torch.arange(TOKENS)
OF_HEADS: list[Row] = [
    *tensor("teacher.weight", WEIGHT, "grad bfloat16"),
    *tensor("teacher.hidden", HIDDEN, "list"),
    ({"teacher.hidden": HIDDEN[:3]}, ValueError, "teacher.hidden: shape must be that of student.hidden"),
    ({"teacher.weight": WEIGHT[:, :3]}, ValueError, "teacher.weight: expected shape"),
    ({"teacher.bias": BIAS[:3]}, ValueError, "teacher.bias: expected shape"),
    ({"teacher.weight": WEIGHT[:9], "teacher.bias": None}, ValueError, "teacher.weight: rows"),
    ({"teacher": OF_TOKENS}, TypeError, "teacher: expected a Head or a TopKTeacher, got Tensor"),
    ({"student": OF_TOKENS}, TypeError, "student: expected a Head, got Tensor"),
    ({"student.bias": 1}, TypeError, "student.bias: expected a torch.Tensor"),
    ({"vocab_size": 999}, ValueError, "student.weight: rows must be"),
    ({"ignore_index": "x"}, TypeError, "ignore_index: "),
    *(({"reduction": value}, EITHER, "reduction: expected one of 'mean'") for value in ("batchmean", "Mean", None)),
    ({"hard_weight": 0.5}, ValueError, "hard_weight: expected labels"),
    ({"gradient": "out_of_place"}, ValueError, "gradient: expected one of 'auto', 'in_forward', 'in_backward'"),
    ({"gradient": "in_forward", "reduction": "none"}, ValueError, "gradient: 'in_forward' .*none"),
    ({"labels": OF_TOKENS[:2]}, ValueError, "labels: shape must be"),
    ({"valid_tokens": 3}, ValueError, "options.valid_tokens: expected None in this function, got 3"),
    ({"sequence_parallel": True}, ValueError, "options.sequence_parallel: expected False .*got True"),
]
SMALL = Head(torch.randn(2, 3), torch.eye(3))


def a_call():
    return {"student_logits": STUDENT.clone().requires_grad_() * 1, "teacher": TEACHER}


TABLES = [
    Table("distillation_loss", distillation_loss, a_call, OF_LOGITS),
    Table("distillation_loss of top-k", distillation_loss, lambda: a_call() | {"teacher": TOP_K}, OF_TOP_K),
    Table(
        "linear_distillation_loss",
        linear_distillation_loss,
        lambda: {"student": OF_STUDENT, "teacher": OF_TEACHER},
        OF_HEADS,
    ),
    Table(
        "linear_distillation_loss of top-k",
        linear_distillation_loss,
        lambda: {"student": SMALL, "teacher": TOP_K, **JS},
        tensor("student.hidden", SMALL.hidden, "None"),
    ),
]
