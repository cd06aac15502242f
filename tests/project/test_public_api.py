"""The public names: signatures, documentation, the module of the loss, the command line."""

import dataclasses
import inspect
import re

import pytest
import torch

import vocab_parallel_ce as package
from tests.docs.markdown import PAGES
from tests.support.host.fresh import fresh_python
from vocab_parallel_ce import integrations
from vocab_parallel_ce.__main__ import doctor_lines, main
from vocab_parallel_ce.options import HeadOptions, Settings

OF_BOTH = {"group": None, "ignore_index": -100, "softcap": None, "logit_scale": 1.0, "vocab_size": None, "outputs": ()}
OF_THE_LOSS = {"label_smoothing": 0.0, "z_loss": 0.0, "reduction": "mean", **OF_BOTH, "num_items": None}
OF_THE_LOSS |= {"class_weight": None}
OF_LOG_PROBS = {**OF_BOTH, "temperature": 1.0, "threshold": None}
OVER_LOGITS = {"gradient": "auto", "impl": "auto", "check_labels": "auto"}
OF_HEADS = {"bias": None, "main_grad": None, "options": None}
OF_OBJECTIVES = {"tokens": None, "teacher": None, "reduction": "mean", "num_items": None, "check_objective": True}
OF_OBJECTIVES |= {"together": None, "numbers": None}
OF_DISTILLATION = {"divergence": "forward", "beta": 0.5, "labels": None, "hard_weight": 0.0, "num_items": None}
OF_DISTILLATION |= {"group": None, "ignore_index": -100, "temperature": 1.0, "reduction": "mean", "vocab_size": None}
LOGITS, LINEAR = ["logits", "labels"], ["hidden", "weight", "labels"]
OF_LEAVES = {"group": None, "vocab_size": None, "temperature": 1.0}
SIGNATURES = [
    (package.vocab_parallel_cross_entropy, LOGITS, OF_THE_LOSS | OVER_LOGITS),
    (package.token_log_probs, LOGITS, OF_LOG_PROBS | OVER_LOGITS),
    (package.linear_cross_entropy, LINEAR, OF_THE_LOSS | OF_HEADS | {"expected_grad_output": None}),
    (package.linear_token_log_probs, LINEAR, OF_LOG_PROBS | OF_HEADS),
    (package.distillation_loss, ["student_logits", "teacher"], OF_DISTILLATION | OVER_LOGITS),
    (package.linear_objective, [*LINEAR, "objective"], OF_LOG_PROBS | OF_HEADS | OF_OBJECTIVES),
    (package.linear_distillation_loss, ["student", "teacher"], {**OF_DISTILLATION, "options": None}),
    (
        package.sampling_threshold,
        ["logits"],
        {"top_k": None, "top_p": 1.0, "softcap": None, "logit_scale": 1.0, **OF_LEAVES},
    ),
    (package.top_k, ["logits", "k"], OF_LEAVES),
    (package.copy_to_ranks, ["hidden", "group"], {}),
    (package.next_labels, ["labels"], {"ignore_index": -100, "cu_seqlens": None, "group": None, "layout": None}),
]
RECORDS = {
    package.Head: ("hidden", "weight", "bias"),
    package.TopKTeacher: ("ids", "log_probs", "rest", "temperature"),
    package.Teacher: ("hidden", "weight", "bias", "softcap", "logit_scale", "temperature", "divergence", "beta"),
}
PER_TOKEN = ("entropy", "lse", "divergence", "sum_sq_probs", "mean_logit", "predictions")


def _defaults(function):
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("function", "tensors", "expected"), SIGNATURES)
def test_the_functions_take_tensors_by_position_and_options_by_name(function, tensors, expected):
    parameters = inspect.signature(function).parameters
    assert {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == expected
    assert [name for name, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == tensors


def test_the_fields_of_the_records():
    """In this order: callers pass them by position."""
    assert {record: record._fields for record in RECORDS} == RECORDS
    fields = [field.name for field in dataclasses.fields(package.Outputs)]
    assert fields == ["loss", "log_probs", *PER_TOKEN]


def test_the_modules_take_the_options_of_the_functions():
    """All except the number of items, which changes from step to step and comes with the logits."""
    expected = {name: value for name, value in OF_THE_LOSS.items() if name != "num_items"}
    assert _defaults(package.VocabParallelCrossEntropy) == expected | OVER_LOGITS
    own = {"head": None, "in_features": None, "columns": None, "bias": False}
    expected |= {**OF_HEADS, "expected_grad_output": None, **own}
    assert _defaults(package.LinearCrossEntropy) == expected


DERIVED = {"n_ids", "negated", "head", "teacher"}  # from labels, a teacher, the function, or its options
OF_DISTILLATION_ALONE = {"divergence", "beta", "hard_weight"}
ABSENT = {  # fields of Settings that a function has no parameter for
    package.vocab_parallel_cross_entropy: {"temperature", *OF_DISTILLATION_ALONE},
    package.token_log_probs: {"label_smoothing", "z_loss", "reduction", *OF_DISTILLATION_ALONE},
    package.distillation_loss: {"label_smoothing", "z_loss", "softcap", "logit_scale", "outputs"},
}
ABSENT[package.linear_cross_entropy] = ABSENT[package.vocab_parallel_cross_entropy] | OVER_LOGITS.keys()
ABSENT[package.linear_token_log_probs] = ABSENT[package.token_log_probs] | OVER_LOGITS.keys()
ABSENT[package.linear_distillation_loss] = ABSENT[package.distillation_loss] | OVER_LOGITS.keys()


@pytest.mark.parametrize("function", ABSENT)
def test_each_setting_is_a_parameter_with_its_default(function):
    """Of every function that has a use for it. An option that is added is in all of them, or named above."""
    settings = Settings._field_defaults
    found = {name: value for name, value in _defaults(function).items() if name in settings.keys() - DERIVED}
    assert settings.keys() - DERIVED - found.keys() == ABSENT[function]
    assert found == {name: settings[name] for name in found}


def test_completion_offers_public_names_alone():
    assert set(dir(package)) == {*package.__all__, "__version__", "integrations"}


@pytest.mark.reference
def test_the_module_shows_its_options():
    """Only those that are not the defaults, so that they are seen."""
    options = {"label_smoothing": 0.1, "ignore_index": 3, "reduction": "mean", "z_loss": 0.0, "softcap": 30}
    module = package.VocabParallelCrossEntropy(class_weight=torch.ones(5), **options)
    shown = "1 rank, class_weight=(5,), ignore_index=3, label_smoothing=0.1, softcap=30"
    assert repr(module) == f"VocabParallelCrossEntropy({shown})"
    module.label_smoothing = 0.0
    assert "label_smoothing" not in repr(module)
    owner = torch.nn.ModuleList([torch.nn.Linear(4, 7)])
    module = package.LinearCrossEntropy(owner[0], options=HeadOptions(chunk_size=8, valid_tokens=2))
    shown = "1 rank, weight=(7, 4), options=HeadOptions(chunk_size=8, valid_tokens=2)"
    assert repr(module) == f"LinearCrossEntropy({shown})"


@pytest.mark.quick
def test_doctor_says_what_runs_here_and_why_not_the_rest():
    result = fresh_python("-m", "vocab_parallel_ce", "doctor", TRITON_INTERPRET="0")
    assert result.returncode == 0, result.stderr
    of_cpu = ("cpu, impl='auto': reference", "cpu, impl='triton': no: impl: 'triton'")
    for line in (f"torch {torch.__version__}", *of_cpu, "gradient='auto': over the logits if nobody"):
        assert line in result.stdout, result.stdout


@pytest.mark.reference
def test_doctor_says_that_a_device_without_kernels_takes_plain_pytorch(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("mps"))
    lines = doctor_lines()
    assert "mps, impl='auto': reference (mps tensors: plain PyTorch runs on any device)" in lines
    assert any(
        line.startswith("mps, impl='triton': no: impl: 'triton' needs tensors on a CUDA or ROCm") for line in lines
    )


@pytest.mark.reference
def test_names_that_completion_offers_and_pages_have_are_attributes():
    """In a fresh process, where no other test has imported a module."""
    names = {name for page in PAGES for name in re.findall(r"`(vocab_parallel_ce(?:\.\w+)+)", page.read_text("utf-8"))}
    assert "vocab_parallel_ce.integrations" in names
    code = f"""
import sys, vocab_parallel_ce
loaded = {{name for name in sys.modules if name.startswith("vocab_parallel_ce.integrations.")}}
assert loaded == {{"vocab_parallel_ce.integrations.transformer_engine"}}
for name in dir(vocab_parallel_ce):
    getattr(vocab_parallel_ce, name)
assert callable(vocab_parallel_ce.integrations.openrlhf.install)
for name in {sorted(names)}:
    eval(name)
assert not hasattr(vocab_parallel_ce, "no_such_name")
"""
    result = fresh_python("-c", code)
    assert result.returncode == 0, result.stderr


@pytest.mark.reference
def test_doctor_calls_tested_only_what_ran(monkeypatch):
    monkeypatch.setattr(integrations, "TESTED", {"megatron-core": ("0.16.1", "0.19.2")})
    expected = dict.fromkeys(("0.16.1", "0.16.0rc1", "0.19.2", "0.19.10"), "tested")
    expected |= dict.fromkeys(("0.15.9", "0.17.0", "0.18.2", "0.20.0", "1.19.2"), "not tested, only 0.16.1, 0.19.2")
    for version, words in expected.items():
        monkeypatch.setattr(integrations.metadata, "version", {"megatron-core": version}.__getitem__)
        assert integrations.framework_lines() == [f"megatron-core {version}: {words}"]


@pytest.mark.reference
@pytest.mark.parametrize("name", ["transformers", "trl", "megatron-core"])
def test_install_warns_once_of_versions_newer_than_the_tests(monkeypatch, caplog, name):
    module = integrations.__getattr__(name.partition("-")[0])
    pytest.importorskip("megatron.core" if name == "megatron-core" else name)
    module.install()  # imports all of it while versions are what they are
    module.uninstall()
    said = {}
    for version in (integrations.TESTED[name][-1], "99.1.0"):
        integrations.warn_if_newer.cache_clear()
        monkeypatch.setattr(integrations.metadata, "version", lambda _, version=version: version)
        for _ in range(2):
            caplog.clear()
            module.install()
            module.uninstall()
            said.setdefault(version, []).extend(record.getMessage() for record in caplog.records)
    integrations.warn_if_newer.cache_clear()
    assert [len(messages) for messages in said.values()] == [0, 1]
    assert said["99.1.0"][0].startswith(f"vocab_parallel_ce: {name} 99.1.0 is newer than the newest tested, ")
    assert f"{name} 99.1.0: not tested, only" in "\n".join(integrations.framework_lines())


def assert_fits_a_screen(report):
    lines = str(report).splitlines()
    assert lines[0] == f"{report.framework}: installed" and len(lines) <= 24 and max(map(len, lines)) <= 120, lines
    assert not re.search("error|fail|cannot|None|not installed", str(report)), lines


@pytest.mark.reference
def test_a_report_of_any_length_fits_a_screen():
    names = tuple(f"a.module.of_a_framework.name_{number}" for number in range(400))
    left, calls = {name: "it is long " * 30 for name in names}, dict.fromkeys(names, 3)
    report = integrations.Report("a framework", names, left, calls)
    assert_fits_a_screen(report)
    assert repr(report) == str(report) and str(report).count("and 395 more") == 3 and names[0] in str(report)


@pytest.mark.reference
@pytest.mark.parametrize("name", integrations.MODULES)
def test_install_says_in_one_line_what_it_leaves_to_the_framework(caplog, name):
    if name == "dtensor":
        pytest.skip("it has nothing to install")
    module = integrations.__getattr__(name)
    caplog.set_level("INFO", "vocab_parallel_ce")
    try:
        made = module.install()
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported: {error}")
    assert type(made) is integrations.Report and made == module.report() and made.installed
    assert_fits_a_screen(made)
    module.uninstall()
    assert not module.report().installed and str(module.report()) == f"{made.framework}: not installed"
    (said,) = [line for record in caplog.records if "computes" in (line := record.getMessage())]
    assert said.startswith("vocab_parallel_ce: ") and re.search(r"; left to the framework: \w.+ \(.+\)", said), said


def test_the_command_line_refuses_no_command_with_its_usage(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        main([])
    assert "usage: python -m vocab_parallel_ce" in capsys.readouterr().err
