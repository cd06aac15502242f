"""Refusals of losses, log-probabilities and modules over logits, and of TransformerEngine's functions."""

import numpy
import torch

import vocab_parallel_ce as vp
from tests.refusals.rows import CONSTANT, NAN, Row, Table, number, tensor

COLUMNS = 21
LOGITS, LABELS = torch.randn(2, 3, COLUMNS), torch.zeros(2, 3, dtype=torch.int64)
ITEMS = {"reduction": "sum"}
ONES, ONE = torch.ones(COLUMNS), torch.ones(())
OF_SHARDS: list[Row] = [
    ({"vocab_size": 22}, ValueError, "logits: last dimension must be .*22.*, got 21"),
    ({"vocab_size": vp.VocabShard(0, 20, 20)}, ValueError, "logits: last dimension must be .*width 20.*, got 21$"),
    ({"vocab_size": vp.VocabShard(21, 42, 42)}, ValueError, "vocab_size: .* one rank, got VocabShard.*start=21"),
    ({"vocab_size": vp.VocabShard(0, 21, 42)}, ValueError, "vocab_size: .* one rank, got VocabShard.*vocab_size=42"),
    ({"vocab_size": vp.VocabShard(-21, 0, 21)}, ValueError, "vocab_size: .*0 <= start <= stop, got"),
    ({"vocab_size": vp.VocabShard(0, 21, 0)}, ValueError, "vocab_size: a shard must be columns of a vocabulary"),
    ({"vocab_size": vp.VocabShard(0, 21, 21.0)}, TypeError, "vocab_size.vocab_size: expected an int, got float"),
]
OF_BOTH: list[Row] = [
    *number("softcap"),
    *number("logit_scale"),
    ({"softcap": torch.tensor(1.0)}, TypeError, "softcap: expected a number, got Tensor"),
    ({"logit_scale": None}, TypeError, "logit_scale: expected a number, got NoneType"),
    ({"ignore_index": -100.0}, TypeError, "ignore_index: expected an int, got float"),
    ({"check_labels": 1}, TypeError, "check_labels: expected 'auto', True or False, got int"),
    ({"check_labels": numpy.bool_(True)}, TypeError, "check_labels: expected 'auto', True or False, got bool_?"),
    ({"gradient": "inplace"}, ValueError, "gradient: expected one of .*, got 'inplace'"),
    ({"vocab_size": 0}, ValueError, "vocab_size: must be positive, got 0"),
    ({"vocab_size": 21.0}, TypeError, "vocab_size: expected an int, got float"),
    ({"vocab_size": (0, 21, 21)}, TypeError, "vocab_size: expected an int, got tuple"),
]
OUTPUTS: list[Row] = [
    ({"outputs": "lse"}, TypeError, "outputs: expected a tuple of names, .* got 'lse'"),
    ({"outputs": ("loss",)}, ValueError, "outputs: expected one of"),
    ({"outputs": True}, TypeError, "outputs: expected a tuple of names"),
    ({"outputs": 1}, TypeError, "outputs: expected a tuple of names, .* got 1"),
    ({"outputs": (1,)}, ValueError, "outputs: expected"),
    ({"outputs": ("divergence",)}, ValueError, "outputs: expected no .divergence. without a teacher, got it; pass"),
]
DIVISORS: list[Row] = [
    ({"num_items": 3, "reduction": "none"}, ValueError, "num_items: expected reduction 'mean' or 'sum' .* got 'none'"),
    *tensor("num_items", ONE, "masked sparse grad meta", **ITEMS),
    ({"num_items": -1, **ITEMS}, ValueError, "num_items: must be at least 0.* got -1"),
    ({"num_items": NAN, **ITEMS}, ValueError, "num_items: must be at least 0.* got nan"),
    ({"num_items": torch.tensor(-2), **ITEMS}, ValueError, "num_items: must be at least 0"),
    ({"num_items": True, **ITEMS}, TypeError, "num_items: expected a number, got bool"),
    ({"num_items": "3", **ITEMS}, TypeError, "num_items: expected a number, got str"),
    ({"num_items": torch.ones(2), **ITEMS}, ValueError, r"num_items: expected 1 element, got .*\(2,\)"),
    ({"num_items": torch.tensor(True), **ITEMS}, TypeError, "num_items: dtype .*torch.bool"),
]
OF_LOSS: list[Row] = [
    *tensor("class_weight", ONES, CONSTANT),
    *(
        ({"label_smoothing": value}, ValueError, rf"label_smoothing: must be in \[0, 1\], got {value}")
        for value in (1.01, NAN)
    ),
    ({"label_smoothing": torch.tensor(0.1)}, TypeError, "label_smoothing: expected a number, got Tensor"),
    *(({"z_loss": value}, ValueError, f"z_loss: must be at least 0.* got {value}$") for value in (-0.1, NAN, 10**400)),
    ({"z_loss": None}, TypeError, "z_loss: expected a number, got NoneType"),
    *OUTPUTS,
    ({"weight": ONES}, TypeError, "weight: expected weights of classes as class_weight, got weight; rename"),
    ({"reduction": "batchmean"}, ValueError, "reduction: expected one of 'mean'.* got 'batchmean'"),
]
# A prediction travels as fp32, which has no 2**24 + 1.
MANY = {"outputs": ("predictions",), "logits": torch.empty(2, 3, 2**24 + 1, device="meta"), "labels": LABELS.to("meta")}
MEAN_LOGIT = ("entropy", "mean_logit")
PADDED = {"labels": torch.tensor([[0, 19, 20], [0, 0, 0]]), "vocab_size": 20, "check_labels": True}
OF_LOSS_AT_CALLS: list[Row] = [
    *DIVISORS,
    ({"class_weight": torch.ones(COLUMNS + 1)}, ValueError, r"class_weight: expected shape \(21,\), got \(22,\)"),
    ({"class_weight": ONE}, ValueError, r"class_weight: expected shape .*, got \(\)"),
    *tensor("class_weight", ONES, "meta"),
    ({"outputs": MEAN_LOGIT, "class_weight": ONES}, ValueError, "outputs: expected no 'mean_logit' with class_weight"),
    (MANY, ValueError, r"vocab_size: must be at most 2\*\*24 .*got 16777217; leave"),
]
TENSORS: list[Row] = [
    *tensor("logits", LOGITS, "list None complex64 masked"),
    *tensor("labels", LABELS, "None masked int16 meta sparse"),
    ({"logits": LOGITS[0, 0], "labels": LABELS[0, 0]}, ValueError, r"logits: .*\(21,\)"),
    ({"logits": LOGITS[..., :0]}, ValueError, r"logits: .*\(2, 3, 0\)"),
    ({"labels": LABELS.t()}, ValueError, r"labels: .*\(2, 3\).*\(3, 2\)$"),
    ({"labels": LABELS.flatten()}, ValueError, r"labels: .*\(6,\); .*pass labels.reshape\(\[2, 3\]\)$"),
    ({"labels": LABELS.new_zeros(2, 21)}, ValueError, r"labels: .* the last dimension: pass logits.movedim\(1, -1\)$"),
    ({"check_labels": "always"}, ValueError, "check_labels: expected 'auto', True or False, got 'always'"),
    ({"labels": LABELS + COLUMNS}, ValueError, "labels: .*6 outside"),
    ({"labels": LABELS + COLUMNS, "check_labels": True}, ValueError, "labels: .*6 outside"),
    (PADDED, ValueError, r"labels: must be in \[0, 20\) .* 1 outside.*\(0, 2\): 20$"),
    ({"impl": "cuda"}, ValueError, "impl: .*'reference'.*'cuda'"),
    ({"impl": "one_pass"}, ValueError, "impl: 'one_pass' needs a GPU and triton's compiler, got cpu"),
    *(
        ({"impl": impl, "logits": LOGITS.double()}, ValueError, f"impl, of fp64 logits.*'reference', got '{impl}'")
        for impl in ("triton", "one_pass")
    ),
    ({"group": "tp"}, TypeError, "group: .*ProcessGroup or None.*str"),
]
PER_COLUMN: Row = (
    {"labels": LABELS.unsqueeze(-1).expand(2, 3, COLUMNS)},
    ValueError,
    r"labels: .*\(2, 3\), got \(2, 3, 21\); .*id.*one-hot",
)
ROWS = torch.ones(2, 3)
TEMPERATURES: list[Row] = [
    *number("temperature"),
    *tensor("temperature", ROWS, "int64 grad meta sparse masked"),
    ({"temperature": ROWS[..., None]}, ValueError, "temperature: .*expected 1 element, or the shape of the labels"),
]
OF_LOG_PROBS: list[Row] = [
    *TEMPERATURES,
    *OUTPUTS,
    ({"gradient": "in_forward"}, ValueError, "gradient: expected one of 'auto', 'in_backward', .*in_forward"),
    ({"temperature": 1e-38, "logit_scale": 4.0}, ValueError, "temperature: must be positive and finite"),
    *tensor("threshold", ROWS, CONSTANT),
    ({"threshold": ROWS[0, :2]}, ValueError, "threshold: expected 1 element, or the shape of the labels"),
    ({"outputs": MEAN_LOGIT, "threshold": ROWS}, ValueError, "outputs: expected no 'mean_logit' with a threshold"),
    ({"labels": LABELS[..., None], "threshold": ROWS}, ValueError, "labels: expected one per token with .*threshold"),
]
WHEN_MADE: list[Row] = [
    ({"vocab_size": vp.VocabShard(0, 12, None)}, TypeError, "vocab_size.vocab_size: expected an int, got NoneType"),
    ({"vocab_size": 2**25, "outputs": ("predictions",)}, ValueError, "vocab_size: must be at most"),
]
WHEN_SET: list[Row] = [
    ({"label_smoothing": 2.0}, ValueError, r"label_smoothing: must be in \[0, 1\], got 2.0"),
    ({"vocab_size": 0}, ValueError, "vocab_size: must be positive"),
    ({"group": 3}, TypeError, "group: expected a torch.distributed.ProcessGroup or None, or a .*, got int"),
    ({"class_weight": torch.ones(3)}, ValueError, "class_weight: expected shape"),
]


def a_call():
    return {"logits": LOGITS.clone().requires_grad_() * 1, "labels": LABELS.clone()}


def with_attributes(logits, labels, **attributes):
    """A call of a module whose attributes are set after it was made."""
    module = vp.VocabParallelCrossEntropy(label_smoothing=0.3)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module(logits, labels)


def of_positions(positions):
    return vp.VocabParallelCrossEntropy(*positions)


KEYWORDS = "VocabParallelCrossEntropy: expected keywords alone, got 1 .*class_weight="
POSITIONS: Row = ({"positions": (ONES,)}, TypeError, KEYWORDS)
OF_ENGINE: list[Row] = [
    ({"overwrite_input": "yes"}, TypeError, "overwrite_input: expected a bool, got str"),
    ({"overwrite_input": None}, TypeError, "overwrite_input: expected a bool, got NoneType"),
    ({"reduce_loss": "mean"}, TypeError, "reduce_loss: .*str"),
    ({"label_smoothing": 2.0}, ValueError, r"label_smoothing: .*2\.0"),
    ({"dist_process_group": 4}, TypeError, "group: .*int"),
    *tensor("target", LABELS, "None", "labels"),
    *tensor("target", LABELS, "float32"),
    *tensor("inp", LOGITS, "None", "logits"),
]
OF_SECOND_STEP: list[Row] = [
    *tensor("grad_output", torch.ones(2, 3), "number int64 meta"),
    ({"grad_output": torch.ones(5)}, ValueError, r"grad_output: .*\(2, 3\).*\(5,\)"),
    ({"grad_output": torch.ones(2, 3, COLUMNS)}, ValueError, r"grad_output: .*\(2, 3, 21\)"),
]


def a_first_step():
    given = LOGITS.clone(), LABELS, 0.0, False, None, -100
    return {"_input": vp.cross_entropy_forward(*given)[1], "grad_output": torch.ones(2, 3)}


TABLES = [
    Table("parallel_cross_entropy", vp.parallel_cross_entropy, lambda: {"inp": LOGITS, "target": LABELS}, OF_ENGINE),
    Table("cross_entropy_backward", vp.cross_entropy_backward, a_first_step, OF_SECOND_STEP),
    Table(
        "vocab_parallel_cross_entropy",
        vp.vocab_parallel_cross_entropy,
        a_call,
        [*OF_BOTH, *OF_SHARDS, *TENSORS, PER_COLUMN, *OF_LOSS, *OF_LOSS_AT_CALLS],
    ),
    Table("token_log_probs", vp.token_log_probs, a_call, [*OF_BOTH, *OF_SHARDS, *TENSORS, *OF_LOG_PROBS]),
    Table("VocabParallelCrossEntropy", vp.VocabParallelCrossEntropy, dict, [*OF_BOTH, *OF_LOSS, *WHEN_MADE]),
    Table("VocabParallelCrossEntropy misplaced", of_positions, lambda: {"positions": ()}, [POSITIONS]),
    Table("VocabParallelCrossEntropy set", with_attributes, a_call, WHEN_SET),
]
