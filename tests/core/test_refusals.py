"""Option values that are refused: by the functions and by the module, before anything is changed."""

from __future__ import annotations

import re

import pytest
import torch

from vocab_parallel_ce import (
    VocabParallelCrossEntropy,
    VocabShard,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.reference

COLUMNS = 21
NAN, INF = float("nan"), float("inf")
ITEMS = {"reduction": "sum"}


def _positive(name):
    """Wrong values of a number that must be positive: 0 or less turns a padding of -inf into +inf or NaN.

    Kernels compute in fp32, where 1e39 is infinite and 1e-46 is 0.
    """
    message = f"{name}: must be positive and finite.*, got"
    wrong = (0, -1.5, NAN, INF, 1e39, 1e-46)
    return [
        *(({name: value}, ValueError, f"{message} {re.escape(str(value))}$") for value in wrong),
        ({name: "1"}, TypeError, f"{name}: expected a number, got str"),
        ({name: True}, TypeError, f"{name}: expected a number, got bool"),
        ({name: torch.tensor(1.0)}, TypeError, f"{name}: expected a number, got Tensor"),
    ]


OF_BOTH = [
    *_positive("softcap"),
    *_positive("logit_scale"),
    ({"logit_scale": None}, TypeError, "logit_scale: expected a number, got NoneType"),
    ({"vocab_size": 0}, ValueError, "vocab_size: must be positive, got 0"),
    ({"vocab_size": True}, TypeError, "vocab_size: expected an int, got bool"),
    ({"vocab_size": 22}, ValueError, "logits: last dimension must be .*22.*, got 21"),
    ({"shard": (0, 21, 21)}, TypeError, "shard: expected a VocabShard, got tuple"),
    ({"shard": VocabShard(0, 21, 21), "vocab_size": 21}, ValueError, "shard: has a vocab_size itself"),
    ({"shard": VocabShard(0, 20, 20)}, ValueError, "logits: last dimension must be .*width 20.*, got 21$"),
    ({"shard": VocabShard(21, 42, 42)}, ValueError, "shard: .* one rank, got VocabShard.*start=21"),
    ({"shard": VocabShard(0, 21, 42)}, ValueError, "shard: .* one rank, got VocabShard.*vocab_size=42"),
    ({"shard": VocabShard(-21, 0, 21)}, ValueError, "shard: .*0 <= start < stop, got"),
    ({"shard": VocabShard(21, 0, 21)}, ValueError, "shard: .*0 <= start < stop, got"),
    ({"shard": VocabShard(0, 21, 0)}, ValueError, "shard: must be columns of a vocabulary"),
    ({"shard": VocabShard(0, 21, 21.0)}, TypeError, "shard: vocab_size: expected an int, got float"),
    ({"shard": VocabShard(0.0, 21, 21)}, TypeError, "shard: start: expected an int, got float"),
]
OF_THE_LOSS = [
    ({"label_smoothing": 1.01}, ValueError, r"label_smoothing: must be in \[0, 1\], got 1.01"),
    ({"label_smoothing": INF}, ValueError, r"label_smoothing: must be in \[0, 1\], got inf"),
    ({"smoothing_formula": "tf"}, ValueError, "smoothing_formula: expected one of 'torch', 'megatron'"),
    ({"smoothing_formula": None}, ValueError, "smoothing_formula: expected one of .*, got None"),
    *(
        ({"z_loss": value}, ValueError, f"z_loss: must be at least 0.* got {re.escape(str(value))}$")
        for value in (-0.1, NAN, INF, 1e39)
    ),
    ({"z_loss": None}, TypeError, "z_loss: expected a number, got NoneType"),
    ({"z_loss": torch.tensor(0.1)}, TypeError, "z_loss: expected a number, got Tensor"),
    ({"return_metrics": 1}, TypeError, "return_metrics: expected a bool, got int"),
    ({"num_items": 3}, ValueError, "num_items: expected reduction='sum' with it, got reduction='mean'"),
    ({"num_items": 3, "reduction": "none"}, ValueError, "num_items: .* got reduction='none'"),
    ({"num_items": torch.tensor(3)}, ValueError, "num_items: .* got reduction='mean'"),
    ({"num_items": -1, **ITEMS}, ValueError, "num_items: must be at least 0, got -1"),
    (
        {"num_items": 2.5, **ITEMS},
        TypeError,
        "num_items: expected an int or a tensor of .* got float",
    ),
    (
        {"num_items": True, **ITEMS},
        TypeError,
        "num_items: expected an int or a tensor of .* got bool",
    ),
    (
        {"num_items": "3", **ITEMS},
        TypeError,
        "num_items: expected an int or a tensor of .* got str",
    ),
    ({"num_items": torch.ones(2), **ITEMS}, ValueError, r"num_items: expected 1 element, got .*\(2,\)"),
    ({"num_items": torch.tensor(True), **ITEMS}, TypeError, "num_items: dtype .*torch.bool"),
    ({"num_items": torch.tensor(1j), **ITEMS}, TypeError, "num_items: dtype .*complex64"),
    ({"num_items": torch.ones((), device="meta"), **ITEMS}, ValueError, "num_items: device .*cpu.*meta"),
]
OF_LOG_PROBS = [
    *_positive("temperature"),
    ({"entropy": 1}, TypeError, "entropy: expected a bool, got int"),
    ({"gradient": "in_forward"}, ValueError, "gradient: expected one of 'auto', 'in_backward', .*in_forward"),
]


def _named(function, cases):
    return [(function, *case) for case in cases]


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        *_named(vocab_parallel_cross_entropy, [*OF_BOTH, *OF_THE_LOSS]),
        *_named(token_log_probs, [*OF_BOTH, *OF_LOG_PROBS]),
    ],
)
def test_refused_before_anything_is_changed(function, options, error, message):
    logits = torch.randn(2, 3, COLUMNS).requires_grad_() * 1
    labels = torch.zeros(2, 3, dtype=torch.int64)
    before = logits.detach().clone()
    with pytest.raises(error, match=f"^{message}"):
        function(logits, labels, **options)
    assert torch.equal(logits, before) and logits._version == labels._version == 0


@pytest.mark.parametrize(
    ("accepted", "refused"),
    [
        ({"z_loss": 1}, {"z_loss": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"return_metrics": True}, {"return_metrics": 1}),
        ({"ignore_index": 1}, {"ignore_index": 1.0}),
    ],
    ids=str,
)
def test_an_equal_value_of_another_type_is_refused_after_one_that_is_accepted(accepted, refused):
    """What was checked once may be remembered, by its type too."""
    logits, labels = torch.randn(3, COLUMNS), torch.zeros(3, dtype=torch.int64)
    vocab_parallel_cross_entropy(logits, labels, **accepted)
    with pytest.raises(TypeError, match=f"^{next(iter(refused))}: expected"):
        vocab_parallel_cross_entropy(logits, labels, **refused)


@pytest.mark.parametrize("function", [vocab_parallel_cross_entropy, token_log_probs])
def test_a_checked_label_of_a_padded_column_is_outside(function):
    labels = torch.tensor([[0, 19, 20]])
    with pytest.raises(ValueError, match=r"^labels: must be in \[0, 20\) .* 1 outside.*\(0, 2\): 20$"):
        function(torch.zeros(1, 3, COLUMNS), labels, vocab_size=20, check_labels=True)
    function(torch.zeros(1, 3, COLUMNS), labels, vocab_size=21, check_labels=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_megatrons_formula_needs_a_second_column(smoothing):
    """It divides by V - 1."""
    options = {"smoothing_formula": "megatron", "label_smoothing": smoothing}
    with pytest.raises(ValueError, match="^smoothing_formula: 'megatron' needs .* at least 2, got 1$"):
        vocab_parallel_cross_entropy(torch.zeros(3, 1), torch.zeros(3).long(), **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        case
        for case in [*OF_BOTH, *OF_THE_LOSS]
        if not {"num_items", "shard"} & set(case[0]) and case[0].get("vocab_size") != 22
    ],
)
def test_the_module_refuses_them_when_it_is_made(options, error, message):
    with pytest.raises(error, match=f"^{message}"):
        VocabParallelCrossEntropy(**options)


@pytest.mark.parametrize("columns", (2, 3, 33))
def test_megatrons_formula_stays_a_mixture(columns):
    """``e = label_smoothing * V / (V - 1)`` above 1 would give the label a negative weight."""
    logits, labels = torch.randn(2, columns), torch.tensor([0, 1])
    largest = (columns - 1) / columns
    options = {"smoothing_formula": "megatron", "vocab_size": columns}
    for loss in (
        lambda e: vocab_parallel_cross_entropy(logits, labels, label_smoothing=e, **options),
        lambda e: VocabParallelCrossEntropy(label_smoothing=e, **options),
    ):
        with pytest.raises(ValueError, match=r"^label_smoothing: must be at most \(V - 1\) / V = "):
            loss(largest + 1e-6)
    uniform = vocab_parallel_cross_entropy(logits, labels, label_smoothing=largest, **options)
    expected = vocab_parallel_cross_entropy(logits, labels, label_smoothing=1.0)
    assert torch.equal(uniform, expected)
