"""Calls and heads that a fused projection and loss refuses, before anything is changed, with the remedy."""

import re

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_map

from tests.support.cases.linear import COLUMNS, WIDTH
from vocab_parallel_ce import LinearCrossEntropy, VocabShard, linear_cross_entropy, linear_token_log_probs

pytestmark = pytest.mark.reference

EITHER = (TypeError, ValueError)
UNITS = r"\(in B, KB, MB, GB, KiB, MiB, GiB\)"


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


def _valid():
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(2, 3, WIDTH, generator=generator),
        "weight": torch.randn(COLUMNS, WIDTH, generator=generator),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
        "bias": torch.randn(COLUMNS, generator=generator),
    }


HIDDEN, WEIGHT, LABELS, BIAS = _valid().values()
QUANTISED = QuantisedWeight(torch.ones(COLUMNS, WIDTH, dtype=torch.int8), torch.tensor(0.1))
META, PADDED = torch.device("meta"), torch.tensor([[0, 19, 20], [-100, 1, 2]])
OF_BOTH = [
    ({"hidden": [1.0]}, TypeError, "hidden: .*Tensor.*list"),
    ({"hidden": HIDDEN.double()}, TypeError, "hidden: dtype .*float64"),
    ({"hidden": HIDDEN[0, 0], "labels": LABELS[0, 0]}, ValueError, r"hidden: .*\(8,\)"),
    ({"hidden": HIDDEN[..., :0], "weight": WEIGHT[:, :0]}, ValueError, r"hidden: .*\(2, 3, 0\)"),
    ({"hidden": HIDDEN.bfloat16()}, TypeError, "weight: dtype .*bfloat16.*float32"),
    ({"weight": nn.Linear(WIDTH, COLUMNS)}, TypeError, "weight: .*Tensor.*Linear"),
    ({"weight": WEIGHT[0]}, ValueError, r"weight: .*\(8,\)"),
    ({"weight": WEIGHT.t()}, ValueError, r"weight: .*8.*\(8, 21\)"),
    ({"weight": WEIGHT[:0], "bias": None}, ValueError, r"weight: .*\(0, 8\)"),
    ({"weight": WEIGHT.to(torch.int8)}, TypeError, "weight: dtype .*int8"),
    ({"weight": WEIGHT.to(torch.float8_e4m3fn)}, TypeError, "weight: dtype .*float8_e4m3fn"),
    ({"weight": QUANTISED}, TypeError, "weight: .*QuantisedWeight"),
    ({"weight": nn.Parameter(QUANTISED, requires_grad=False)}, TypeError, "weight: .*QuantisedWeight"),
    ({"weight": WEIGHT.to(META)}, ValueError, "weight: device .*cpu.*meta"),
    ({"bias": 0.0}, TypeError, "bias: .*Tensor.*float"),
    ({"bias": True}, TypeError, "bias: .*Tensor or None, got bool; pass .*bias.* or None"),
    ({"bias": WEIGHT[0]}, ValueError, r"bias: .*21.*\(8,\)"),
    ({"bias": BIAS.bfloat16()}, TypeError, "bias: dtype .*float32.*bfloat16"),
    ({"bias": BIAS.to(META)}, ValueError, "bias: device .*cpu.*meta"),
    ({"labels": None}, TypeError, "labels: .*Tensor.*NoneType"),
    ({"labels": LABELS.short()}, TypeError, "labels: dtype .*int64.*int16"),
    ({"labels": LABELS.t()}, ValueError, r"labels: .*\(2, 3\).*\(3, 2\)"),
    ({"labels": BIAS.expand(2, 3, COLUMNS)}, TypeError, "labels: dtype .*float32; .*vocab_parallel_cross_entropy"),
    ({"labels": LABELS.to(META)}, ValueError, "labels: device .*cpu.*meta"),
    ({"labels": PADDED, "vocab_size": 20, "check_labels": True}, ValueError, r"labels: .*\[0, 20\) .*\(0, 2\): 20$"),
    ({"main_grad": True}, TypeError, "main_grad: .*Tensor.*bool"),
    ({"main_grad": WEIGHT.bfloat16()}, TypeError, "main_grad: dtype .*float32.*bfloat16"),
    ({"main_grad": WEIGHT.t()}, ValueError, r"main_grad: .*\(21, 8\).*\(8, 21\)"),
    ({"main_grad": WEIGHT.to(META)}, ValueError, "main_grad: .*cpu.*meta"),
    ({"chunk_size": 0}, ValueError, "chunk_size: .* got 0"),
    ({"chunk_size": True}, EITHER, "chunk_size: expected .*got .*(bool|True)"),
    ({"chunk_size": None}, EITHER, "chunk_size: expected .*None"),
    ({"chunk_size": f"{COLUMNS * 4 - 1}B"}, ValueError, "chunk_size: .* 84 bytes, got '83B'"),
    ({"chunk_size": 2.5}, EITHER, "chunk_size: expected .*got .*(float|2.5)"),
    *(
        ({"chunk_size": text}, ValueError, f"chunk_size: expected 'auto', .*bytes as '256MiB' {UNITS}, got '{text}'$")
        for text in ("0KiB", "0.0MB", "0.001B", "1 kB", "256mb", ".5MB", "1e3B", "1.MiB", "-1B", "64", "")
    ),
    (
        {"chunk_size": 2**28},
        ValueError,
        "chunk_size: a number is one of tokens, .*1048576, got 268435456; .*'268435456B'",
    ),
    ({"sequence_parallel": 1}, TypeError, "sequence_parallel: expected a bool, got int"),
    ({"sequence_parallel": True}, ValueError, "sequence_parallel: .*group"),
    ({"reduce_hidden_grad": 0}, TypeError, "reduce_hidden_grad: expected a bool, got int"),
    ({"logits_dtype": torch.bfloat16}, ValueError, "logits_dtype: expected None or torch.float32, got torch.bfloat16"),
    ({"logits_dtype": torch.float32, "impl": "one_pass"}, ValueError, "impl: 'one_pass'"),
    ({"valid_tokens": -1}, ValueError, "valid_tokens: .*got -1"),
    ({"valid_tokens": torch.tensor(3)}, TypeError, "valid_tokens: expected an int.*got Tensor"),
    ({"valid_tokens": True}, TypeError, "valid_tokens: expected an int.*got bool"),
    ({"softcap": 0}, ValueError, "softcap: must be positive"),
    ({"vocab_size": 22}, ValueError, r"(weight|vocab_size): .*22.*21"),
    ({"vocab_size": VocabShard(0, 20, 20)}, ValueError, r"(weight|vocab_size): .*20.*21"),
    ({"vocab_size": VocabShard(0, 21, 42)}, ValueError, "vocab_size: .*one rank"),
    ({"group": "tp"}, TypeError, "group: .*ProcessGroup or None.*str"),
    ({"impl": "cuda"}, ValueError, "impl: .*'reference'.*'cuda'"),
]
OF_ONE = {
    linear_cross_entropy: [
        ({"gradient": "out_of_place"}, ValueError, "gradient: expected one of 'auto', 'in_forward', 'in_backward'"),
        ({"gradient": "in_forward", "reduction": "none"}, ValueError, "gradient: 'in_forward' .*none"),
        ({"label_smoothing": 1.01}, ValueError, "label_smoothing: must be in"),
        ({"num_items": 3, "reduction": "none"}, ValueError, "num_items: expected reduction"),
        ({"labels": LABELS.unsqueeze(-1)}, ValueError, r"labels: .*\(2, 3\), got \(2, 3, 1\); .*id.*probabilities"),
    ],
    linear_token_log_probs: [
        (
            {"labels": LABELS.unsqueeze(-1).expand(2, 3, COLUMNS)},
            ValueError,
            "labels: .*number of given ids.*probabilities",
        ),
        ({"temperature": 0.0}, ValueError, "temperature: must be positive"),
        ({"outputs": "entropy"}, TypeError, "outputs: expected a tuple of names, .* got 'entropy'"),
    ],
}


@pytest.mark.parametrize("function", OF_ONE)
def test_refused_before_anything_is_changed(function):
    for changed, error, message in OF_BOTH + OF_ONE[function]:
        arguments = _valid() | changed
        tensors = [value for value in arguments.values() if type(value) is torch.Tensor and not value.is_meta]
        before = [(tensor.clone(), tensor._version) for tensor in tensors]
        with pytest.raises(error, match=f"^{message}") as raised:
            function(**arguments)
        assert raised.value.__suppress_context__ or raised.value.__context__ is None, changed
        for tensor, (values, version) in zip(tensors, before, strict=True):
            assert tensor._version == version and torch.equal(tensor, values), changed


@pytest.mark.parametrize("function", OF_ONE)
def test_parameters_and_their_views_are_plain_tensors(function):
    parameter = nn.Parameter(WEIGHT.clone())
    for weight in (parameter, parameter * 2, parameter[:, :], parameter.t().contiguous().t()):
        parameter.grad = None
        function(**_valid() | {"weight": weight}).sum().backward()
        assert parameter.grad.any()


class LoraLinear(nn.Module):
    """An adapter around a frozen head, of which the head's weight is not all, named as peft names it."""

    def __init__(self, base_layer, rank=2):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False)})

    @property
    def weight(self):
        return self.base_layer.weight

    def forward(self, hidden):
        added = self.lora_B["default"](self.lora_A["default"](hidden))
        return self.base_layer(hidden) + added


class Int8Linear(nn.Linear):
    """A head whose weight is stored as integers with a scale a row."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)
        self.weight = nn.Parameter(torch.ones(out_features, in_features, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(out_features, 1))

    def forward(self, hidden):
        return hidden @ (self.weight * self.scale).T


class ScaledLinear(nn.Linear):
    """A head whose forward is not that of its weight, as in older adapters that subclass ``nn.Linear``."""

    def forward(self, hidden):
        return super().forward(hidden) / 8


def _linear():
    return nn.Linear(WIDTH, COLUMNS)


HEADS = {
    "LoRA around the head": (lambda: LoraLinear(_linear()), "LoraLinear"),
    "another forward": (lambda: ScaledLinear(WIDTH, COLUMNS), "ScaledLinear"),
    "int8 weight": (lambda: Int8Linear(WIDTH, COLUMNS), "Int8Linear|int8"),
    "a sequence": (lambda: nn.Sequential(_linear()), "Sequential"),
    "a parameter": (lambda: _linear().weight, "Parameter.*linear_cross_entropy"),
    "a tensor": (lambda: WEIGHT, "Tensor.*linear_cross_entropy"),
}
# Adapters and hooks are added to a head that exists; wrappers replace ``forward`` in the instance.
CHANGES = {
    "forward hook": (lambda head: head.register_forward_hook(lambda *_: None), "hook"),
    "forward pre-hook": (lambda head: head.register_forward_pre_hook(lambda *_: None), "hook"),
    "backward hook": (lambda head: head.register_full_backward_hook(lambda *_: None), "hook"),
    "backward pre-hook": (lambda head: head.register_full_backward_pre_hook(lambda *_: None), "hook"),
    "patched forward": (lambda head: setattr(head, "forward", lambda hidden: hidden), "patched forward"),
    "parametrised": (
        lambda head: parametrize.register_parametrization(head, "weight", nn.Identity()),
        "[Pp]arametri[sz]",
    ),
    "weight norm": (parametrizations.weight_norm, "[Pp]arametri[sz]"),
    "quantised weight": (
        lambda head: setattr(head, "weight", nn.Parameter(QUANTISED, requires_grad=False)),
        "QuantisedWeight",
    ),
}
REMEDY = r"(vocab_parallel_cross_entropy|linear_cross_entropy|merge|remove|expected)"


def _refused_head(named, use):
    with pytest.raises(EITHER, match=f"^(head|weight): .*({named})") as raised:
        use()
    assert re.search(REMEDY, str(raised.value)), raised.value


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_more_than_its_weight_is_refused_when_the_module_is_made(name):
    """Reading ``head.weight`` would train nothing of an adapter."""
    make, named = HEADS[name]
    _refused_head(named, lambda: LinearCrossEntropy(make()))


@pytest.mark.parametrize("name", CHANGES)
def test_a_head_that_becomes_more_than_its_weight_is_refused_when_it_is_used(name):
    """Reading ``head.weight`` would skip whatever a hook does."""
    change, named = CHANGES[name]
    head = _linear()
    module = LinearCrossEntropy(head)
    module(HIDDEN, LABELS)
    change(head)
    _refused_head(named, lambda: LinearCrossEntropy(head))
    _refused_head(named, lambda: module(HIDDEN, LABELS))


OWN = {"in_features": WIDTH, "columns": COLUMNS}
MODULE_SETTINGS = [
    (None, {}, EITHER, "(head|in_features|columns): "),
    (None, {"in_features": WIDTH}, EITHER, "(head|in_features|columns): "),
    (WIDTH, {}, TypeError, "head: expected an nn.Linear.*, got int; .*in_features.*columns"),
    (None, OWN | {"in_features": 0}, ValueError, "in_features: .*0"),
    (None, OWN | {"columns": -1}, ValueError, "columns: .*-1"),
    (None, OWN | {"in_features": 8.0}, TypeError, "in_features: .*float"),
    (_linear(), OWN, EITHER, "(head|in_features|columns): "),
    (_linear(), {"bias": True}, EITHER, "(head|bias): "),
    (_linear(), {"reduction": "max"}, ValueError, "reduction: "),
    (_linear(), {"gradient": "out_of_place"}, ValueError, "gradient: "),
    (_linear(), {"chunk_size": 0}, ValueError, "chunk_size: "),
    (_linear(), {"chunk_size": 2**20 + 1}, ValueError, "chunk_size: a number is one of tokens"),
    (_linear(), {"soft_cap": 3.0}, TypeError, ".*soft_cap"),
]


def test_the_module_refuses_wrong_settings_when_it_is_made():
    for head, settings, error, message in MODULE_SETTINGS:
        with pytest.raises(error, match=f"^{message}"):
            LinearCrossEntropy(head, **settings)
