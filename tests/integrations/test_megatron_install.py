"""What is rebound in Megatron-Core, and given back."""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.common.language_module import language_module

from tests.support.frameworks import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron
from vocab_parallel_ce.integrations.megatron import losses

CORE = "megatron.core"


@pytest.fixture(autouse=True)
def _megatrons_own_afterwards():
    yield
    megatron.uninstall()
    assert not megatron.report().installed


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
def test_other_options_are_refused_until_uninstall():
    before = megatron.install(linear=True)
    for options in ({}, {"linear": True, "z_loss": 0.1}):
        with pytest.raises(ValueError, match=r"installed with .*linear.*True.*got .*uninstall\(\) first"):
            megatron.install(**options)
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
@pytest.mark.parametrize(("smoothing", "most"), ((0.1, 0), (0.9, 0.75)))
def test_label_smoothing_that_the_other_columns_cannot_take_is_refused(monkeypatch, smoothing, most):
    """A vocabulary of one column has no others."""
    monkeypatch.setattr(losses, "group_position", lambda group: (0, 1))
    logits, target = torch.zeros(1, 1, 4 if most else 1), torch.zeros(1, 1).long()
    words = rf"label_smoothing: must be at most \(V - 1\) / V = {most:g} .* got {smoothing}$"
    with megatron.installed(), pytest.raises(ValueError, match=words):
        losses.vocab_parallel_cross_entropy(logits, target, smoothing, "a group")


@pytest.mark.reference
def test_transformer_engines_name_is_rebound_if_it_is_there(monkeypatch):
    own = object()
    monkeypatch.setattr(language_module, "te_parallel_cross_entropy", own)
    with megatron.installed():
        assert language_module.te_parallel_cross_entropy.__wrapped__ is losses.te_parallel_cross_entropy
    assert language_module.te_parallel_cross_entropy is own
