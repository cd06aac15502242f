"""What is rebound in Megatron-Core, and given back."""

import sys
import types

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel
from megatron.core.models.common.language_module import language_module

from tests.support.frameworks import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron
from vocab_parallel_ce.integrations.megatron import losses

CORE = "megatron.core"
NAMES = {
    f"{CORE}.tensor_parallel.cross_entropy.vocab_parallel_cross_entropy",
    f"{CORE}.tensor_parallel.vocab_parallel_cross_entropy",
    f"{CORE}.fusions.fused_cross_entropy.fused_vocab_parallel_cross_entropy",
    f"{CORE}.models.common.language_module.language_module.fused_vocab_parallel_cross_entropy",
    f"{CORE}.models.common.language_module.language_module.LanguageModule.compute_language_model_loss",
}


@pytest.fixture(autouse=True)
def _megatrons_own_afterwards():
    yield
    megatron.uninstall()
    assert not megatron.report().installed


@pytest.mark.reference
def test_every_name_is_rebound_and_given_back():
    method = language_module.LanguageModule.compute_language_model_loss
    own = tensor_parallel.vocab_parallel_cross_entropy, language_module.fused_vocab_parallel_cross_entropy, method
    report = megatron.install()
    assert report.installed and set(report.rebound) == NAMES and not report.calls
    for module in (tensor_parallel, tensor_parallel.cross_entropy):
        assert module.vocab_parallel_cross_entropy.__wrapped__ is losses.vocab_parallel_cross_entropy
    assert language_module.fused_vocab_parallel_cross_entropy.__wrapped__ is losses.fused_vocab_parallel_cross_entropy
    assert megatron.install() == report
    with pytest.raises(ValueError, match=r"installed with .*linear.*False.*got .*True.*uninstall\(\) first"):
        megatron.install(linear=True)
    megatron.uninstall()
    now = tensor_parallel.vocab_parallel_cross_entropy, language_module.fused_vocab_parallel_cross_entropy
    assert (*now, language_module.LanguageModule.compute_language_model_loss) == own
    assert megatron.report() == (report.framework, (), {}, report.calls)


@pytest.mark.reference
def test_the_linear_loss_rebinds_the_forwards_too(monkeypatch):
    forward = stubs.GPTModel.forward
    monkeypatch.setattr(f"{CORE}.models.mamba.mamba_model.MambaModel", stubs.GPTModel)  # two names: wrapped once
    with megatron.installed(linear=True) as report:
        for name in ("forward", "_postprocess"):
            assert f"{CORE}.models.gpt.gpt_model.GPTModel.{name}" in report.rebound
        assert not any("build_schedule_plan" in left for left in report.left)
        hybrid = f"{CORE}.models.hybrid.hybrid_model.HybridModel.forward"
        assert (hybrid in report.rebound) == (stubs.VERSION >= (0, 18))
        assert stubs.GPTModel.forward.__wrapped__ is forward
    assert stubs.GPTModel.forward is forward


@pytest.mark.reference
def test_a_context_inside_leaves_what_was_installed():
    before = megatron.install(linear=True)
    with megatron.installed(linear=True) as report:
        assert report == before
    with pytest.raises(ValueError, match="installed with"), megatron.installed(z_loss=0.1):
        pass
    assert megatron.report() == before


@pytest.mark.reference
def test_a_loss_that_no_model_in_training_calls_has_no_z_loss(monkeypatch):
    asked = []
    monkeypatch.setattr(losses, "cross_entropy", lambda logits, target, **options: asked.append("z_loss" in options))
    with megatron.installed(z_loss=0.1):
        for model in (None, torch.nn.Module().eval(), torch.nn.Module()):
            monkeypatch.setattr(losses, "_loss_calls", [losses.LossCall(model, None)] if model else [])
            losses.vocab_parallel_cross_entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1).long(), tp_group="a group")
        calls = megatron.report().calls
    assert asked == [False, False, True]
    assert calls == {"loss of logits": 3, "without z_loss: in eval(), or not called by compute_language_model_loss": 2}


@pytest.mark.reference
@pytest.mark.parametrize(("options", "n"), (({}, 8), ({"vocab_size": 5}, 5)))
def test_label_smoothing_is_shared_out_over_the_other_columns(monkeypatch, options, n):
    """Of the whole vocabulary, which two ranks have here."""
    passed = []
    monkeypatch.setattr(losses, "group_position", lambda group: (0, 2))
    monkeypatch.setattr(losses, "cross_entropy", lambda logits, target, **k: passed.append(k["label_smoothing"]))
    with megatron.installed(**options):
        losses.vocab_parallel_cross_entropy(torch.zeros(1, 1, 4), torch.zeros(1, 1).long(), 0.1, "a group")
    assert passed == [0.1 * n / (n - 1)]


@pytest.mark.reference
@pytest.mark.parametrize(("smoothing", "most"), ((0.1, 0), (0.9, 0.75)))
def test_label_smoothing_that_the_other_columns_cannot_take_is_refused(monkeypatch, smoothing, most):
    """A vocabulary of one column has no others."""
    monkeypatch.setattr(losses, "group_position", lambda group: (0, 1))
    logits, target = torch.zeros(1, 1, 4 if most else 1), torch.zeros(1, 1).long()
    words = rf"label_smoothing: must be at most \(V - 1\) / V = {most:g} .* got {smoothing}$"
    with megatron.installed(), pytest.raises(ValueError, match=words):
        losses.vocab_parallel_cross_entropy(logits, target, smoothing, "a group")


@pytest.mark.reference
def test_modules_that_are_imported_later(monkeypatch):
    """They bind our function, and get Megatron's own at the end."""
    own = tensor_parallel.vocab_parallel_cross_entropy
    megatron.install()
    late = types.ModuleType("megatron.late")
    late.vocab_parallel_cross_entropy = tensor_parallel.vocab_parallel_cross_entropy
    monkeypatch.setitem(sys.modules, "megatron.late", late)
    megatron.uninstall()
    assert late.vocab_parallel_cross_entropy is own


@pytest.mark.reference
def test_somebody_else_removed_or_replaced_a_name(monkeypatch):
    with monkeypatch.context() as patched:
        patched.delattr(language_module.LanguageModule, "compute_language_model_loss")
        with pytest.raises(ValueError, match=r"LanguageModule\.compute_language_model_loss: expected that of Megatron"):
            megatron.install(linear=True)
        assert tensor_parallel.vocab_parallel_cross_entropy.__module__ != losses.__name__
    megatron.install()
    with monkeypatch.context() as patched:
        patched.setattr(tensor_parallel, "vocab_parallel_cross_entropy", print)
        with pytest.raises(RuntimeError, match="tensor_parallel.vocab_parallel_cross_entropy: something else"):
            megatron.uninstall()
        assert language_module.fused_vocab_parallel_cross_entropy.__module__ == losses.__name__


@pytest.mark.reference
def test_transformer_engines_name_is_rebound_if_it_is_there(monkeypatch):
    own = object()
    monkeypatch.setattr(language_module, "te_parallel_cross_entropy", own)
    with megatron.installed():
        assert language_module.te_parallel_cross_entropy.__wrapped__ is losses.te_parallel_cross_entropy
    assert language_module.te_parallel_cross_entropy is own


@pytest.mark.reference
@pytest.mark.parametrize(
    "options,kind,message",
    [
        ({"reduction": "mean"}, TypeError, "reduction: expected an option of install\\(\\), one of z_loss,"),
        ({"z_loss": -1.0}, ValueError, "z_loss"),
        ({"gradient": "later"}, ValueError, "gradient"),
        ({"linear": True, "chunk_size": 0}, ValueError, "chunk_size"),
        ({"chunk_size": 8}, ValueError, "chunk_size: expected linear=True"),
        ({"linear": True, "gradient": "out_of_place"}, ValueError, "gradient"),
    ],
)
def test_options_are_checked_before_anything_is_rebound(options, kind, message):
    with pytest.raises(kind, match=message):
        megatron.install(**options)
    assert not megatron.report().installed
