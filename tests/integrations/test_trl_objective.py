"""TRL's GRPO with its loss inside the head: the trainer of ``scripts/examples/grpo_trl.py`` has TRL's own curves."""

from importlib import import_module
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", minversion="1.16")

import trl

from tests.integrations.test_trl import STEPS, _sft
from vocab_parallel_ce.integrations import transformers
from vocab_parallel_ce.integrations.transformers import heads

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
OBJECTIVES = [
    {"loss_type": "dapo", "entropy_coef": 0.01},
    {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "epsilon": 0.01, "temperature": 0.7},
    {"loss_type": "cispo", "epsilon_high": 1.01, "num_iterations": 2, "gradient_accumulation_steps": 2},
]
REFUSED = [{"loss_type": "sapo"}, {"importance_sampling_level": "sequence"}, {"delta": 2.0}]
REFUSED += [{"off_policy_mask_threshold": 0.1}, {"use_adaptive_entropy": True, "entropy_coef": 0.1}]
COMMON = {"max_steps": STEPS, "optim": "sgd", "learning_rate": 0.5, "use_cpu": True}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return import_module("examples.grpo_trl")


@pytest.mark.reference
@pytest.mark.parametrize("options", OBJECTIVES, ids=lambda options: options["loss_type"])
def test_training_has_trls_curve(example, options, tmp_path):
    """Of what both log: the example logs no clipped ratios."""
    trainers = (trl.GRPOTrainer, example.ObjectiveTrainer)
    own, found = [example.trained(trainer, str(tmp_path), **COMMON, **options) for trainer in trainers]
    own_steps, steps = [[s for s in made.state.log_history if "loss" in s] for made in (own, found)]
    assert len(own_steps) == len(steps) == STEPS and own_steps[0]["loss"] != own_steps[-1]["loss"]
    for step, own_step in zip(steps, own_steps, strict=True):
        of_both = {name: own_step[name] for name in step.keys() - {"step_time"}}
        assert {"loss", "grad_norm", "entropy"} <= of_both.keys()
        assert {name: step[name] for name in of_both} == pytest.approx(of_both, rel=1e-4, abs=2e-6)
    for parameter, own_parameter in zip(found.model.parameters(), own.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, own_parameter, rtol=1e-4, atol=1e-5)


@pytest.mark.reference
@pytest.mark.parametrize("options", REFUSED)
def test_what_is_no_loss_of_each_token_is_refused(example, options, tmp_path):
    with pytest.raises(ValueError, match="expected"):
        example.trained(example.ObjectiveTrainer, str(tmp_path), **COMMON, **options)


@pytest.mark.reference
def test_the_report_of_transformers_says_that_a_trainer_has_trls_head(tmp_path):
    """Of ``transformers.install()`` without ``trl.install()``."""
    given = {"output_dir": str(tmp_path), "report_to": "none", "save_strategy": "no", "bf16": False} | COMMON
    heads.calls.clear()  # of models of other tests
    transformers.install()
    trainer = _sft(given | {"max_steps": 1})
    trainer.train()
    made = transformers.report()
    assert made.calls == {"fused": 0} and "fused: 0" in str(made)
    said = "TRL gave it a head of its own, which trl.install() computes from TRL 1.16 on"
    assert f"{type(trainer.model).__name__} (one model): {said}" in str(made)
    assert transformers.audit(trainer.model) == {said: 0}
    forward = trainer.model.forward
    transformers.uninstall(trainer.model)
    assert trainer.model.forward == forward
