"""Refusals of losses and log-probabilities of heads, and of the heads that a module takes."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_map

from tests.refusals.logits import OUTPUTS, TEMPERATURES, WHEN_SET
from tests.refusals.rows import EITHER, Row, Table, tensor
from tests.support.cases.flat import LinearCrossEntropy, linear_cross_entropy, linear_token_log_probs
from vocab_parallel_ce import HeadOptions, VocabShard

UNITS = r"\(in B, KB, MB, GB, KiB, MiB, GiB\)"
COLUMNS, WIDTH = 21, 8


class QuantisedWeight(torch.Tensor):
    """Integers and a scale that pass for a weight of another dtype, as torchao's and others' do."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values, scale):
        self.values, self.scale = values, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].scale)
        args, kwargs = tree_map(lambda x: x.values * x.scale if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


HIDDEN, WEIGHT, BIAS = torch.randn(2, 3, WIDTH), torch.randn(COLUMNS, WIDTH), torch.randn(COLUMNS)
LABELS = torch.zeros(2, 3, dtype=torch.int64)
QUANTISED = QuantisedWeight(torch.ones(COLUMNS, WIDTH, dtype=torch.int8), torch.tensor(0.1))
PADDED = torch.tensor([[0, 19, 20], [-100, 1, 2]])
OPTIONS: list[Row] = [
    ({"chunk_size": 0}, ValueError, "chunk_size: .* got 0"),
    ({"chunk_size": True}, TypeError, "chunk_size: expected .*got bool"),
    ({"chunk_size": None}, EITHER, "chunk_size: expected .*None"),
    ({"chunk_size": 2.5}, EITHER, "chunk_size: expected .*got .*(float|2.5)"),
    ({"chunk_size": torch.tensor(4)}, TypeError, "chunk_size: expected an int, got Tensor"),
    *(
        ({"chunk_size": text}, ValueError, f"chunk_size: expected 'auto', .*bytes as '256MiB' {UNITS}, got '{text}'$")
        for text in ("0KiB", "0.0MB", "0.001B", "1 kB", "256mb", ".5MB", "1e3B", "1.MiB", "-1B", "64", "")
    ),
    ({"chunk_size": 2**28}, ValueError, "chunk_size: a number is .*tokens, .*1048576, got 268435456; .*'268435456B'"),
    ({"gradient": "out_of_place"}, ValueError, "gradient: expected one of 'auto', 'in_forward', 'in_backward', got"),
    ({"impl": "cuda"}, ValueError, "impl: expected one of 'auto', 'reference', 'triton', 'one_pass', got 'cuda'"),
    ({"check_labels": 1}, TypeError, "check_labels: expected 'auto', True or False, got int"),
    ({"sequence_parallel": 1}, TypeError, "sequence_parallel: expected a bool, got int"),
    ({"logits_dtype": torch.float64}, ValueError, "logits_dtype: expected None or torch.float32, got torch.float64"),
    ({"keep_logits": "much"}, ValueError, "keep_logits: expected 'none', 'all', or bytes as '256MiB' .*, got 'much'"),
    ({"keep_logits": 5}, TypeError, "keep_logits: expected 'none', 'all', or bytes as '2GiB', got 5"),
    ({"reduce_hidden_grad": 0}, TypeError, "reduce_hidden_grad: expected a bool, got int"),
    ({"valid_tokens": -1}, ValueError, "valid_tokens: must be at least 0, got -1"),
    ({"valid_tokens": torch.tensor(3)}, TypeError, "valid_tokens: expected an int.*got Tensor"),
    ({"valid_tokens": "all"}, ValueError, "valid_tokens: expected 'count', a number or None, got 'all'"),
    ({"valid_tokens": True}, TypeError, "valid_tokens: expected an int.*got bool"),
    ({"keep_logits": "all", "gradient": "in_forward"}, ValueError, "keep_logits: expected 'none' with gradient='in_"),
    ({"reduce_hidden_grad": False, "sequence_parallel": True}, ValueError, "reduce_hidden_grad: expected True with se"),
    ({"valid_tokens": 3, "sequence_parallel": True}, ValueError, "valid_tokens: expected None with sequence_parallel"),
    ({"chunks": 4}, TypeError, r".*__init__\(\) got an unexpected keyword argument 'chunks'$"),
]
OF_BOTH: list[Row] = [
    *tensor("hidden", HIDDEN, "list None float64"),
    *tensor("weight", WEIGHT, "int8 float8_e4m3fn meta"),
    *tensor("bias", BIAS, "number bool bfloat16 meta"),
    *tensor("labels", LABELS, "None int16 meta"),
    *tensor("main_grad", WEIGHT, "bool bfloat16 meta"),
    ({"hidden": HIDDEN[0, 0], "labels": LABELS[0, 0]}, ValueError, r"hidden: .*\(8,\)"),
    ({"hidden": HIDDEN[..., :0], "weight": WEIGHT[:, :0]}, ValueError, r"hidden: .*\(2, 3, 0\)"),
    ({"hidden": HIDDEN.bfloat16()}, TypeError, "weight: dtype .*bfloat16.*float32"),
    ({"weight": nn.Linear(WIDTH, COLUMNS)}, TypeError, "weight: .*Tensor.*Linear"),
    ({"weight": WEIGHT[0]}, ValueError, r"weight: .*\(8,\)"),
    ({"weight": WEIGHT.t()}, ValueError, r"weight: .*8.*\(8, 21\); pass its t\(\)$"),
    (
        {"hidden": WEIGHT, "weight": HIDDEN[0], "labels": LABELS[0]},
        ValueError,
        r"labels: .*; hidden \[..., D\] is the first",
    ),
    ({"labels": LABELS.flatten()}, ValueError, r"labels: .*, got \(6,\); .* order .* pass labels.reshape\(\[2, 3\]\)$"),
    ({"weight": WEIGHT[:0], "bias": None}, ValueError, r"weight: .*\(0, 8\)"),
    ({"weight": QUANTISED}, TypeError, "weight: .*QuantisedWeight"),
    ({"weight": nn.Parameter(QUANTISED, requires_grad=False)}, TypeError, "weight: .*QuantisedWeight"),
    ({"bias": WEIGHT[0]}, ValueError, r"bias: .*21.*\(8,\)"),
    ({"labels": LABELS.t()}, ValueError, r"labels: .*\(2, 3\).*\(3, 2\)"),
    ({"labels": BIAS.expand(2, 3, COLUMNS)}, TypeError, "labels: dtype .*float32; .*distillation_loss"),
    ({"labels": PADDED, "vocab_size": 20, "check_labels": True}, ValueError, r"labels: .*\[0, 20\) .*\(0, 2\): 20$"),
    ({"main_grad": WEIGHT.t()}, ValueError, r"main_grad: .*\(21, 8\).*\(8, 21\)"),
    ({"chunk_size": f"{COLUMNS * 4 - 1}B"}, ValueError, "chunk_size: .* 84 bytes, got '83B'"),
    ({"sequence_parallel": True}, ValueError, "sequence_parallel: .*group"),
    ({"logits_dtype": torch.float32, "impl": "one_pass"}, ValueError, "impl: 'one_pass'"),
    ({"softcap": 0}, ValueError, "softcap: must be positive"),
    ({"vocab_size": 22}, ValueError, r"(weight|vocab_size): .*22.*21"),
    ({"vocab_size": VocabShard(0, 20, 20)}, ValueError, r"(weight|vocab_size): .*20.*21"),
    ({"vocab_size": VocabShard(0, 21, 42)}, ValueError, "vocab_size: .*one rank"),
    ({"group": "tp"}, TypeError, "group: .*ProcessGroup or None.*str"),
]
NONE, IN_FORWARD = {"reduction": "none"}, {"gradient": "in_forward"}
WAY, ONE_PASS = NONE | IN_FORWARD, IN_FORWARD | {"impl": "one_pass"}
FACTORS = torch.ones(2, 3)
EXPECTED: list[Row] = [
    ({"reduction": "sum"}, ValueError, ".*reduction='none' and gradient='in_forward', got reduction='sum'"),
    ({"gradient": "in_backward"}, ValueError, ".*got reduction='none' and gradient='in_backward'"),
    ({"expected_grad_output": torch.ones(7)}, ValueError, r"expected_grad_output: .*\(2, 3\).*got \(7,\)"),
    ({"expected_grad_output": FACTORS.to(torch.complex64)}, TypeError, "expected_grad_output: .*got torch.complex64"),
    *tensor("expected_grad_output", FACTORS, "list masked sparse"),
    ({"expected_grad_output": None}, ValueError, "gradient: .*'none', got both.*pass expected_grad_output"),
]
OF_LOSS: list[Row] = [
    ({"gradient": "in_forward", **NONE}, ValueError, "gradient: 'in_forward' .*none"),
    ({"label_smoothing": 1.01}, ValueError, "label_smoothing: must be in"),
    *(({"reduction": value}, EITHER, "reduction: expected one of 'mean'") for value in ("batchmean", "Mean", None)),
    ({"num_items": 3, **NONE}, ValueError, "num_items: expected reduction"),
    ({"labels": LABELS.unsqueeze(-1)}, ValueError, r"labels: .*\(2, 3\), got \(2, 3, 1\); .*id.*one-hot"),
    (ONE_PASS, ValueError, "impl: 'one_pass' needs a GPU"),
    ({"keep_logits": "83B", "chunk_size": 2, **NONE}, ValueError, "keep_logits: must hold .*, 2 tokens of 84 bytes"),
]
OF_LOG_PROBS: list[Row] = [
    ({"labels": LABELS[..., None].expand(2, 3, COLUMNS)}, ValueError, "labels: .*number of given ids.*one-hot"),
    *TEMPERATURES,
    *OUTPUTS,
]


def a_call():
    leaves = {"hidden": HIDDEN, "weight": WEIGHT, "bias": BIAS}
    return {"labels": LABELS.clone()} | {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}


class LoraLinear(nn.Module):
    """An adapter around a frozen head, of which the head's weight is not all, named as peft names it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)

    @property
    def weight(self):
        return self.base_layer.weight


class Int8Linear(nn.Linear):
    """A head whose weight is stored as integers."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)
        self.weight = nn.Parameter(self.weight.to(torch.int8), requires_grad=False)


class ScaledLinear(nn.Linear):
    """A head whose forward is not that of its weight, as in older adapters that subclass ``nn.Linear``."""

    def forward(self, hidden):
        return super().forward(hidden) / 8


REMEDY = "(?=.*(vocab_parallel_cross_entropy|linear_cross_entropy|merge|remove|expected))"
SHAPE = {"in_features": WIDTH, "columns": COLUMNS}
# Reading ``head.weight`` would train nothing of an adapter.
HEADS: list[Row] = [
    ({"head": LoraLinear(nn.Linear(WIDTH, COLUMNS))}, EITHER, f"{REMEDY}head: .*LoraLinear"),
    ({"head": ScaledLinear(WIDTH, COLUMNS)}, EITHER, f"{REMEDY}head: .*ScaledLinear"),
    ({"head": Int8Linear(WIDTH, COLUMNS)}, EITHER, f"{REMEDY}(head|weight): .*(Int8Linear|int8)"),
    ({"head": nn.Sequential(nn.Linear(WIDTH, COLUMNS))}, EITHER, f"{REMEDY}head: .*Sequential"),
    ({"head": nn.Parameter(WEIGHT)}, EITHER, f"{REMEDY}head: .*Parameter.*linear_cross_entropy"),
    ({"head": WEIGHT}, EITHER, f"{REMEDY}head: .*Tensor.*linear_cross_entropy"),
    ({"head": None}, EITHER, "(head|in_features|columns): "),
    ({"head": None, "in_features": WIDTH}, EITHER, "(head|in_features|columns): "),
    ({"head": WIDTH}, TypeError, "head: expected an nn.Linear.*, got int; .*in_features.*columns"),
    ({"head": None, **SHAPE, "in_features": 0}, ValueError, "in_features: .*0"),
    ({"head": None, **SHAPE, "columns": -1}, ValueError, "columns: .*-1"),
    ({"head": None, **SHAPE, "in_features": 8.0}, TypeError, "in_features: .*float"),
    (SHAPE, EITHER, "(head|in_features|columns): "),
    ({"bias": True}, EITHER, "(head|bias): "),
    ({"reduction": "max"}, ValueError, "reduction: "),
    ({"soft_cap": 3.0}, TypeError, ".*soft_cap"),
]
# Adapters and hooks are added to a head that exists; wrappers replace ``forward`` in the instance. Reading
# ``head.weight`` would skip whatever they do.
CHANGES = {
    "forward hook": lambda head: head.register_forward_hook(lambda *_: None),
    "forward pre-hook": lambda head: head.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda head: head.register_full_backward_hook(lambda *_: None),
    "backward pre-hook": lambda head: head.register_full_backward_pre_hook(lambda *_: None),
    "patched forward": lambda head: setattr(head, "forward", lambda hidden: hidden),
    "parametrised": lambda head: parametrize.register_parametrization(head, "weight", nn.Identity()),
    "weight norm": parametrizations.weight_norm,
    "quantised weight": lambda head: setattr(head, "weight", nn.Parameter(QUANTISED, requires_grad=False)),
}
WORDS = {"patched forward": "patched forward", "quantised weight": "QuantisedWeight"}
WORDS |= {"parametrised": "[Pp]arametri[sz]", "weight norm": "[Pp]arametri[sz]"}
CHANGED: list[Row] = [
    ({"change": name}, EITHER, f"{REMEDY}(head|weight): .*{WORDS.get(name, 'hook')}") for name in CHANGES
]


def made_of_changed(change):
    CHANGES[change](head := nn.Linear(WIDTH, COLUMNS))
    LinearCrossEntropy(head)


def used_when_changed(change):
    module = LinearCrossEntropy(head := nn.Linear(WIDTH, COLUMNS))
    module(HIDDEN, LABELS)
    CHANGES[change](head)
    module(HIDDEN, LABELS)


def a_head():
    return {"head": nn.Linear(WIDTH, COLUMNS)}


def of_positions(positions, **keywords):
    return LinearCrossEntropy(*positions, **keywords)


MISPLACED: list[Row] = [
    *(
        (
            {"positions": positions},
            TypeError,
            f"LinearCrossEntropy: .* got {len(positions)} .* {said} and",
        )
        for positions, said in (
            ((16, 50), "in_features=16, columns=50"),
            ((16, 50, True), "in_features=16, columns=50, bias=True"),
            ((nn.Linear(2, 3), "sum"), "in_features=D, columns=C"),
        )
    ),
    ({"weight": torch.ones(3)}, TypeError, "weight: expected weights of classes as class_weight, got weight; .*head"),
]


def with_attributes(hidden, labels, **attributes):
    """A call of a module whose attributes are set after it was made."""
    module = LinearCrossEntropy(nn.Linear(WIDTH, COLUMNS), label_smoothing=0.3)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module(hidden, labels)


TABLES = [
    Table("HeadOptions", HeadOptions, dict, OPTIONS),
    Table("linear_cross_entropy", linear_cross_entropy, a_call, [*OF_BOTH, *OF_LOSS]),
    Table(
        "linear_cross_entropy with expected_grad_output",
        linear_cross_entropy,
        lambda: a_call() | {"expected_grad_output": FACTORS} | WAY,
        EXPECTED,
    ),
    Table("linear_token_log_probs", linear_token_log_probs, a_call, [*OF_BOTH, *OF_LOG_PROBS]),
    Table("LinearCrossEntropy", LinearCrossEntropy, a_head, HEADS),
    Table("LinearCrossEntropy misplaced", of_positions, lambda: {"positions": ()}, MISPLACED),
    Table("LinearCrossEntropy made", made_of_changed, dict, CHANGED),
    Table("LinearCrossEntropy used", used_when_changed, dict, CHANGED),
    Table("LinearCrossEntropy set", with_attributes, lambda: {"hidden": HIDDEN, "labels": LABELS}, WHEN_SET),
]
