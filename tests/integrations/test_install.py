"""install() of frameworks that are here: what it rebinds, what it gives back, and what it refuses."""

import importlib
from typing import Any, NamedTuple

import pytest
import torch

from vocab_parallel_ce import integrations

pytestmark = pytest.mark.reference
CORE, TITAN, TRL = "megatron.core", "torchtitan.components.loss", "trl.trainer.utils"
LANGUAGE_MODULE = f"{CORE}.models.common.language_module.language_module"


class Installed(NamedTuple):
    """An integration: what of its framework it rebinds, and what it refuses."""

    names: tuple[str, ...]  # first a function
    refused: tuple[tuple[dict[str, Any], type[Exception], str], ...] = ()
    version: str = "expected the parameters of"  # of the error of another function in place of the first


INSTALLED = {
    "trl": Installed(
        (f"{TRL}._ChunkedLogProbFunction", f"{TRL}.DTensor"),
        version=r"trl: expected the fused head of TRL 1\.16, got another in TRL 1\.",
    ),
    "torchtitan": Installed(
        (
            f"{TITAN}.cross_entropy_loss",
            f"{TITAN}.compute_logprobs",
            "torchtitan.models.deepseek_v3.mtp.cross_entropy_loss",
        ),
        (
            ({"gradient": "in_forward"}, ValueError, "gradient: expected one of"),
            ({"impl": "fast"}, ValueError, "impl: expected one of"),
            ({"vocab_size": 0}, ValueError, "vocab_size: must be positive"),
        ),
    ),
    "megatron": Installed(
        (
            f"{CORE}.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
            f"{CORE}.tensor_parallel.vocab_parallel_cross_entropy",
            f"{CORE}.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
            f"{LANGUAGE_MODULE}.fused_vocab_parallel_cross_entropy",
            f"{LANGUAGE_MODULE}.LanguageModule.compute_language_model_loss",
        ),
        (
            ({"reduction": "mean"}, TypeError, "reduction: expected an option of install\\(\\), one of z_loss,"),
            ({"z_loss": -1.0}, ValueError, "z_loss"),
            ({"gradient": "later"}, ValueError, "gradient"),
            ({"linear": True, "chunk_size": 0}, ValueError, "chunk_size"),
            ({"chunk_size": 8}, ValueError, "chunk_size: expected linear=True"),
            ({"linear": True, "gradient": "out_of_place"}, ValueError, "gradient"),
        ),
        "expected that of Megatron",
    ),
}
by_name = pytest.mark.parametrize("name", INSTALLED)


def looked_up(path):
    """The module or class that has a name, and the name."""
    module, _, name = path.rpartition(".")
    try:
        return importlib.import_module(module), name
    except ImportError:
        owner, its_name = looked_up(module)
        return getattr(owner, its_name), name


@pytest.fixture
def framework(name):
    """An integration whose framework is here; its names are the framework's own afterwards."""
    native = {}
    for path in INSTALLED[name].names:
        pytest.importorskip(path.partition(".")[0])
        owner, attribute = looked_up(path)
        native[path] = owner, attribute, getattr(owner, attribute)
    integration = integrations.__getattr__(name)
    yield integration
    integration.uninstall()
    assert all(getattr(owner, attribute) is value for owner, attribute, value in native.values())
    assert not integration.report().installed


def values(name):
    return {path: getattr(*looked_up(path)) for path in INSTALLED[name].names}


@by_name
def test_every_name_is_rebound_and_given_back(framework, name):
    native, before = values(name), framework.report()
    report = framework.install()
    assert report.installed and set(report.rebound) == set(INSTALLED[name].names) and not report.calls
    ours = values(name)
    assert not set(map(id, native.values())) & set(map(id, ours.values()))
    assert framework.install() == report and values(name) == ours
    with framework.installed() as inside:
        assert inside == report
    assert framework.report() == report
    framework.uninstall()
    framework.uninstall()
    assert values(name) == native and framework.report()._replace(calls={}) == before._replace(calls={})
    with pytest.raises(ZeroDivisionError), framework.installed():
        raise ZeroDivisionError
    assert values(name) == native


@by_name
def test_what_something_else_replaced_is_not_undone(framework, name, monkeypatch):
    first, *_, last = INSTALLED[name].names
    framework.install()
    ours = values(name)
    with monkeypatch.context() as patch:
        patch.setattr(*looked_up(first), print)
        with pytest.raises(RuntimeError, match=rf"{first.rpartition('.')[2]}: something else replaced it"):
            framework.uninstall()
        assert values(name)[last] is ours[last]


@by_name
def test_another_version_is_refused_before_anything_is_rebound(framework, name, monkeypatch):
    native = values(name)
    with monkeypatch.context() as patch:
        if name == "megatron":  # which takes any parameters
            patch.delattr(*looked_up(INSTALLED[name].names[-1]))
        else:
            patch.setattr(*looked_up(INSTALLED[name].names[0]), torch.autograd.Function)
        with pytest.raises(ValueError, match=INSTALLED[name].version):
            framework.install()
    assert values(name) == native and not framework.report().installed


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [(name, *each) for name, installed in INSTALLED.items() for each in installed.refused],
)
def test_options_are_checked_before_anything_is_rebound(framework, name, options, error, message):
    with pytest.raises(error, match=message):
        framework.install(**options)
    assert not framework.report().installed
