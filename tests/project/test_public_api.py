"""The public names: signatures, refusals, which implementation runs, the module, the command line."""

from __future__ import annotations

import copy
import inspect
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import vocab_parallel_ce as package
from tests.support.inputs import batch
from vocab_parallel_ce import (
    VocabParallelCrossEntropy,
    cross_entropy_backward,
    cross_entropy_forward,
    parallel_cross_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

COLUMNS = 21


def _parameters(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def test_parallel_cross_entropy_has_transformer_engines_signature():
    parameters = _parameters(parallel_cross_entropy)
    assert list(parameters) == [
        "inp",
        "target",
        "label_smoothing",
        "reduce_loss",
        "dist_process_group",
        "ignore_idx",
        "is_cg_capturable",
        "overwrite_input",
        "_input",
    ]
    assert list(parameters.values())[2:] == [0.0, False, None, -100, False, None, None]
    kinds = [p.kind.name for p in inspect.signature(parallel_cross_entropy).parameters.values()]
    assert kinds == ["POSITIONAL_OR_KEYWORD"] * 7 + ["KEYWORD_ONLY"] * 2


def test_the_two_step_pair_has_transformer_engines_signatures():
    assert list(_parameters(cross_entropy_forward)) == [
        "_input",
        "target",
        "label_smoothing",
        "reduce_loss",
        "dist_process_group",
        "ignore_idx",
    ]
    assert list(_parameters(cross_entropy_backward)) == ["_input", "grad_output", "is_cg_capturable"]
    assert _parameters(cross_entropy_backward)["is_cg_capturable"] is False


def test_vocab_parallel_cross_entropy_takes_options_by_name():
    parameters = inspect.signature(vocab_parallel_cross_entropy).parameters
    assert {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == {
        "group": None,
        "ignore_index": -100,
        "label_smoothing": 0.0,
        "smoothing_formula": "torch",
        "z_loss": 0.0,
        "softcap": None,
        "logit_scale": 1.0,
        "reduction": "mean",
        "num_items": None,
        "return_metrics": False,
        "gradient": "auto",
        "impl": "auto",
        "check_labels": False,
        "vocab_size": None,
        "shard": None,
    }
    assert list(parameters)[:2] == ["logits", "labels"]


def test_token_log_probs_takes_options_by_name():
    parameters = inspect.signature(token_log_probs).parameters
    assert {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == {
        "group": None,
        "temperature": 1.0,
        "entropy": False,
        "ignore_index": -100,
        "softcap": None,
        "logit_scale": 1.0,
        "gradient": "auto",
        "impl": "auto",
        "check_labels": False,
        "vocab_size": None,
        "shard": None,
    }
    assert list(parameters)[:2] == ["logits", "labels"]


def test_the_module_takes_the_options_of_the_function():
    """All but the number of items, which changes from step to step and comes with the logits."""
    function = _parameters(vocab_parallel_cross_entropy)
    for name in ("logits", "labels", "num_items"):
        del function[name]
    assert _parameters(VocabParallelCrossEntropy) == function


def test_public_names_are_documented():
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)), name


@pytest.mark.reference
@pytest.mark.parametrize("reduce_loss", [True, False])
def test_transformer_engines_positional_call_is_the_same_loss(reduce_loss):
    logits, labels = batch("some_ignored", rows=6, vocab_size=COLUMNS)
    expected = vocab_parallel_cross_entropy(
        logits,
        labels,
        ignore_index=labels[1].item(),
        label_smoothing=0.1,
        reduction="mean" if reduce_loss else "none",
    )
    actual = parallel_cross_entropy(
        logits, labels, 0.1, reduce_loss, None, labels[1].item(), True, overwrite_input=False
    )
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.reference
def test_the_deprecated_alias_warns_and_works():
    logits, labels = batch("peaked", rows=3, vocab_size=COLUMNS)
    with pytest.warns(FutureWarning, match="_input is deprecated") as caught:
        actual = parallel_cross_entropy(_input=logits, target=labels)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(actual, parallel_cross_entropy(inp=logits, target=labels))
    with pytest.raises(TypeError, match="^_input: .* both"):
        parallel_cross_entropy(logits, labels, _input=logits)


def _valid():
    return torch.randn(2, 3, COLUMNS), torch.zeros(2, 3, dtype=torch.int64)


LOGITS, LABELS = _valid()
ERRORS = {
    "logits are a list": (([1.0], LABELS), {}, TypeError, "logits: .*Tensor.*list"),
    "logits are fp64": ((LOGITS.double(), LABELS), {}, TypeError, "logits: dtype .*float64"),
    "logits are integers": ((LOGITS.long(), LABELS), {}, TypeError, "logits: dtype .*int64"),
    "logits are 1-D": ((LOGITS[0, 0], LABELS[0, 0]), {}, ValueError, r"logits: .*\(21,\)"),
    "logits are 0-D": ((LOGITS[0, 0, 0], LABELS[0, 0]), {}, ValueError, r"logits: .*\(\)"),
    "no column": ((LOGITS[..., :0], LABELS), {}, ValueError, r"logits: .*\(2, 3, 0\)"),
    "labels are None": ((LOGITS, None), {}, TypeError, "labels: .*Tensor.*NoneType"),
    "labels are int16": ((LOGITS, LABELS.short()), {}, TypeError, "labels: dtype .*int64.*int16"),
    "labels are floats": ((LOGITS, LABELS.float()), {}, TypeError, "labels: dtype .*float32"),
    "labels are bools": ((LOGITS, LABELS.bool()), {}, TypeError, "labels: dtype .*bool"),
    "labels are flat": ((LOGITS, LABELS.view(6)), {}, ValueError, r"labels: .*\(2, 3\).*\(6,\)"),
    "labels are transposed": ((LOGITS, LABELS.t()), {}, ValueError, r"labels: .*\(2, 3\).*\(3, 2\)"),
    "labels are probabilities": (
        (LOGITS, LABELS.unsqueeze(-1).expand(2, 3, COLUMNS)),
        {},
        ValueError,
        r"labels: .*\(2, 3\).*\(2, 3, 21\)",
    ),
    "labels are elsewhere": (
        (LOGITS, LABELS.to("meta")),
        {},
        ValueError,
        "labels: device .*cpu.*meta",
    ),
    "smoothing above 1": ((LOGITS, LABELS), {"label_smoothing": 1.5}, ValueError, "1.5"),
    "smoothing below 0": ((LOGITS, LABELS), {"label_smoothing": -0.1}, ValueError, "-0.1"),
    "smoothing is NaN": ((LOGITS, LABELS), {"label_smoothing": float("nan")}, ValueError, "nan"),
    "smoothing is a tensor": (
        (LOGITS, LABELS),
        {"label_smoothing": torch.tensor(0.1)},
        TypeError,
        "number.*Tensor",
    ),
    "smoothing is a bool": ((LOGITS, LABELS), {"label_smoothing": True}, TypeError, "number.*bool"),
    "ignore_index is a float": ((LOGITS, LABELS), {"ignore_index": -100.0}, TypeError, "int.*float"),
    "reduction": ((LOGITS, LABELS), {"reduction": "batchmean"}, ValueError, "'mean'.*batchmean"),
    "gradient": ((LOGITS, LABELS), {"gradient": "inplace"}, ValueError, "'in_forward'.*inplace"),
    "impl": ((LOGITS, LABELS), {"impl": "cuda"}, ValueError, "'reference'.*'cuda'"),
    "group": ((LOGITS, LABELS), {"group": "tp"}, TypeError, "ProcessGroup or None.*str"),
    "vocab_size": ((LOGITS, LABELS), {"vocab_size": 42}, ValueError, "42.*got 21"),
    "vocab_size is a float": ((LOGITS, LABELS), {"vocab_size": 21.0}, TypeError, "int.*float"),
    "a label": ((LOGITS, LABELS + COLUMNS), {"check_labels": True}, ValueError, "labels: .*6 outside"),
}


@pytest.mark.reference
@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_their_subject_and_leave_the_callers_tensors_alone(name):
    arguments, options, error, message = ERRORS[name]
    tensors = [x for x in arguments if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
    before = [(x.clone(), x._version) for x in tensors]
    with pytest.raises(error) as caught:
        vocab_parallel_cross_entropy(*arguments, **options)
    (subject,) = options or {re.split(r"[ :]", message)[0]: None}
    subject = {"check_labels": "labels", "vocab_size": r"(vocab_size|logits)"}.get(subject, subject)
    if name in ("no column", "a label"):
        subject = message.partition(":")[0]
    assert re.match(f"{subject}: ", str(caught.value)), caught.value
    assert re.search(message, str(caught.value)), caught.value
    for tensor, (values, version) in zip(tensors, before, strict=True):
        assert torch.equal(tensor, values) and tensor._version == version


@pytest.mark.reference
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overwrite_input": "yes"}, TypeError, "overwrite_input: .*'yes'"),
        ({"reduce_loss": "mean"}, TypeError, "reduce_loss: .*str"),
        ({"label_smoothing": 2.0}, ValueError, r"label_smoothing: .*2\.0"),
        ({"dist_process_group": 4}, TypeError, "group: .*int"),
        ({"target": None}, TypeError, "labels: .*NoneType"),
        ({"inp": None}, TypeError, "logits: .*NoneType"),
    ],
)
def test_transformer_engines_signature_refuses_too(options, error, message):
    logits, labels = _valid()
    arguments = {"inp": logits, "target": labels, **options}
    with pytest.raises(error, match=f"^{message}"):
        parallel_cross_entropy(**arguments)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("grad_output", "error", "message"),
    [
        (1.0, TypeError, "grad_output: .*Tensor.*float"),
        (torch.ones(6, dtype=torch.int64), TypeError, "grad_output: dtype .*int64"),
        (torch.ones(5), ValueError, r"grad_output: .*\(2, 3\).*\(5,\)"),
        (torch.ones(2, 3, COLUMNS), ValueError, r"grad_output: .*\(2, 3, 21\)"),
        (torch.ones(2, 3, device="meta"), ValueError, "grad_output: device .*cpu.*meta"),
    ],
)
def test_the_second_step_refuses_what_it_cannot_scale_by(grad_output, error, message):
    logits, labels = _valid()
    _, gradient = cross_entropy_forward(logits, labels, 0.0, False, None, -100)
    before, version = gradient.clone(), gradient._version
    with pytest.raises(error, match=f"^{message}"):
        cross_entropy_backward(gradient, grad_output)
    assert torch.equal(gradient, before) and gradient._version == version


def test_the_module_is_the_function_with_its_options_fixed(impl_device):
    impl, device = impl_device
    logits, labels = (x.to(device) for x in batch("some_ignored", rows=6, vocab_size=COLUMNS))
    options = {
        "label_smoothing": 0.1,
        "smoothing_formula": "megatron",
        "z_loss": 0.02,
        "softcap": 20.0,
        "logit_scale": 0.4,
        "vocab_size": COLUMNS - 2,
        "gradient": "out_of_place",
        "impl": impl,
    }
    labels = labels.clamp(max=COLUMNS - 3)
    for reduction, num_items in (("none", None), ("sum", 4)):
        options["reduction"] = reduction
        module = VocabParallelCrossEntropy(**options)
        expected = vocab_parallel_cross_entropy(logits, labels, num_items=num_items, **options)
        assert torch.equal(module(logits, labels, num_items), expected)
        assert torch.equal(copy.deepcopy(module)(logits, labels, num_items=num_items), expected)
        assert not list(module.parameters()) and not module.state_dict()
    with_metrics = VocabParallelCrossEntropy(return_metrics=True, **options)
    loss, metrics = with_metrics(logits, labels, 4)
    assert torch.equal(loss, expected) and isinstance(metrics, package.LossMetrics)


@pytest.mark.reference
def test_the_module_shows_its_options():
    module = VocabParallelCrossEntropy(label_smoothing=0.1, ignore_index=3, vocab_size=50, softcap=30)
    shown = repr(module)
    assert shown.startswith("VocabParallelCrossEntropy(")
    for part in ("1 rank", "label_smoothing=0.1", "ignore_index=3", "reduction='mean'", "50", "softcap=30"):
        assert part in shown, shown


@pytest.mark.reference
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reduction": "max"}, ValueError),
        ({"gradient": "late"}, ValueError),
        ({"label_smoothing": 3}, ValueError),
        ({"ignore_index": "pad"}, TypeError),
    ],
)
def test_the_module_refuses_wrong_options_when_it_is_made(options, error):
    (subject,) = options
    with pytest.raises(error, match=f"^{subject}: "):
        VocabParallelCrossEntropy(**options)


def test_doctor_says_what_runs_here_and_why_not_the_rest():
    result = subprocess.run(
        [sys.executable, "-m", "vocab_parallel_ce", "doctor"],
        cwd=Path(package.__file__).parent.parent,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert f"torch {torch.__version__}" in result.stdout
    expected = (
        "cpu, impl='auto': reference",
        "cpu, impl='triton': no: impl: 'triton'",
        "gradient='auto': in place",
    )
    for line in expected:
        assert line in result.stdout, result.stdout


def test_the_command_line_refuses_no_command_with_its_usage():
    result = subprocess.run(
        [sys.executable, "-m", "vocab_parallel_ce"],
        cwd=Path(package.__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2 and "usage: python -m vocab_parallel_ce" in result.stderr
