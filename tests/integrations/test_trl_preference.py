"""TRL's DPO and KTO with the loss inside the head: ``scripts/examples/preference_trl.py`` beside TRL's own trainers."""

import os
import sys
from functools import partial, partialmethod
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("trl", minversion="1.16")

import trl
from accelerate.state import AcceleratorState
from transformers import LlamaForCausalLM

from tests.support.ranks.pools import in_ranks
from vocab_parallel_ce.integrations import trl as fused

EXAMPLES = str(Path(__file__).parents[2] / "scripts" / "examples")
STEPS = {"max_steps": 3, "use_cpu": True}
SMOOTHED = {"label_smoothing": 0.1}
TRAININGS = [
    ("dpo", {"max_steps": 10}),
    ("dpo", {"loss_type": "hinge", "gradient_accumulation_steps": 2}),
    ("dpo", {"loss_type": "ipo", "max_length": 6, "pad_to_multiple_of": 16}),
    ("dpo", {"loss_type": "robust", "gradient_checkpointing": True, **SMOOTHED}),
    ("dpo", {"loss_type": "exo_pair", "precompute_ref_log_probs": True, **SMOOTHED}),
    ("dpo", {"loss_type": ["apo_zero", "sigmoid_norm", "nca_pair"], "loss_weights": [0.5, 2.0, 0.3]}),
    ("dpo", {"loss_type": ["apo_down", "bco_pair", "sppo_hard"], "beta": 0.3}),
    ("kto", {"max_steps": 10, "desirable_weight": 1.3, "undesirable_weight": 0.6}),
    ("kto", {"precompute_ref_log_probs": True, "gradient_accumulation_steps": 2, "max_length": 6}),
    ("kto", {"loss_type": "apo_zero_unpaired", "sync_ref_model": True, "ref_model_sync_steps": 1}),
]
REFUSED = [
    ("dpo", {"loss_type": "aot"}),
    ("dpo", {"label_smoothing": 0.1}),
    ("dpo", {"ld_alpha": 0.5}),
    ("dpo", {"use_weighting": True}),
    ("dpo", {"f_divergence_type": "js_divergence"}),
    ("dpo", {"padding_free": True}),
    ("kto", {"loss_type": "bco"}),
]
METRICS = {"loss", "grad_norm", "rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected", "entropy"}
METRICS |= {"rewards/margins", "logits/chosen"}
OF_ONE = {"dpo": {"rewards/accuracies", "mean_token_accuracy"}, "kto": {"kl"}}
TIMES = ("runtime", "per_second")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return import_module("preference_trl")


def _trained(example, kind, folder, given, **options):
    """TRL's trainer and the example's, after three steps; both get what is given."""
    pairs = {"dpo": (trl.DPOTrainer, example.FusedDPOTrainer), "kto": (trl.KTOTrainer, example.FusedKTOTrainer)}[kind]
    pairs = [type(each.__name__, (each,), {"__init__": partialmethod(each.__init__, **given)}) for each in pairs]
    own, _ = example.trained(pairs[0], folder, **STEPS | options)
    with fused.installed():
        return own, example.trained(pairs[1], folder, **STEPS | options)[0]


def _log(trainer):
    history = trainer.state.log_history
    return [{name: value for name, value in step.items() if not name.endswith(TIMES)} for step in history]


def _assert_alike(own, found, names):
    """The same losses, metrics and weights after each step."""
    steps, own_steps = _log(found), _log(own)
    losses = [step["loss"] for step in own_steps if "loss" in step]
    assert len(steps) == len(own_steps) > 3 <= len(losses) and losses[0] != losses[2]
    assert names <= own_steps[1].keys()
    for step, own_step in zip(steps, own_steps, strict=True):
        losses = {name: value for name, value in own_step.items() if name.endswith("loss")}
        assert losses and {name: step[name] for name in losses} == pytest.approx(losses, rel=5e-6)
        if abs(own_step.get("rewards/margins", 1)) < 1e-5:  # of a policy that is its reference: ties
            step = step | {name: own_step[name] for name in own_step if name == "rewards/accuracies"}
        assert step == pytest.approx(own_step, rel=5e-5, abs=2e-6)
    for parameter, own_parameter in zip(found.model.parameters(), own.model.parameters(), strict=True):
        torch.testing.assert_close(parameter, own_parameter, rtol=1e-5, atol=2e-7)


@pytest.mark.reference
@pytest.mark.parametrize(("kind", "options"), TRAININGS, ids=str)
def test_training_has_trls_curve(example, kind, options, tmp_path):
    _assert_alike(*_trained(example, kind, str(tmp_path), {}, **options), METRICS | OF_ONE[kind])


@pytest.mark.reference
@pytest.mark.parametrize("kind", OF_ONE)
def test_evaluation_has_trls_numbers(example, kind, tmp_path):
    shapes = []

    def metrics(prediction):
        shapes.append([part.shape for part in (prediction.predictions, prediction.label_ids)])
        return {"mean": float(prediction.predictions.mean())}

    given = {"eval_dataset": example.preferences(kind == "dpo", 5), "compute_metrics": metrics}
    own, found = _trained(example, kind, str(tmp_path), given, eval_strategy="steps", eval_steps=2)
    _assert_alike(own, found, METRICS)
    assert shapes[0] == shapes[1] and {"eval_mean", "eval_loss", "eval_rewards/margins"} <= _log(found)[2].keys()


@pytest.mark.reference
@pytest.mark.parametrize("kind", OF_ONE)
@pytest.mark.parametrize("is_pretrained", [False, True], ids=["new", "pretrained"])
def test_the_reference_of_an_adapter_is_the_model_without_it_or_its_copy(example, kind, is_pretrained, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=not is_pretrained)
    small, given = example.small_model, {} if is_pretrained else {"peft_config": config}

    def model(*sizes):
        return peft.get_peft_model(small(*sizes), config) if is_pretrained else small(*sizes)

    with patch.object(example, "small_model", model):
        own, found = _trained(example, kind, str(tmp_path), given, learning_rate=1.0)
    assert ("ref" in found.model.peft_config) == is_pretrained
    _assert_alike(own, found, METRICS)


@pytest.mark.reference
@pytest.mark.parametrize("kind", OF_ONE)
def test_what_has_no_token_that_counts_adds_only_a_constant(example, kind, tmp_path):
    """Gradients are TRL's, and the loss is without the constant of the group that is empty."""
    losses = []
    for made in _trained(example, kind, str(tmp_path), {}):
        inputs = made._prepare_inputs(next(iter(made.get_train_dataloader())))
        inputs["completion_mask"][1::8] = 0
        made.model.zero_grad()
        loss = made.compute_loss(made.model, inputs)
        loss.backward()
        losses.append((loss.detach(), [p.grad for p in made.model.parameters()], inputs, made))
    (own, own_grads, inputs, made), (loss, grads, _, _) = losses
    torch.testing.assert_close(grads, own_grads, rtol=1e-4, atol=1e-6)
    kl = made._metrics["train"]["kl"][-1] if kind == "kto" else 0.0
    sign = 1 if kind == "dpo" or inputs["label"][1] else -1
    z = torch.tensor(made.beta * sign * kl)
    constant = torch.tensor(2.0).log() / 8 if kind == "dpo" else z.sigmoid() / 8
    torch.testing.assert_close(own - loss, constant, rtol=1e-4, atol=0)


@pytest.mark.reference
@pytest.mark.parametrize(("kind", "options"), REFUSED, ids=str)
def test_another_loss_is_refused(example, kind, options, tmp_path):
    trainer = example.FusedDPOTrainer if kind == "dpo" else example.FusedKTOTrainer
    with pytest.raises(ValueError, match=f"{next(iter(options))}: expected .*, got"):
        example.trained(trainer, str(tmp_path), **STEPS | options)


@pytest.mark.reference
def test_logits_with_a_scale_are_refused(example, tmp_path):
    def scaled(*sizes):
        model = small(*sizes)
        model.config.logit_scale = 0.5
        return model

    small = example.small_model
    with patch.object(example, "small_model", scaled), pytest.raises(ValueError, match="model: .* got logit_scale"):
        example.trained(example.FusedDPOTrainer, str(tmp_path), **STEPS)


@pytest.mark.reference
def test_the_script_compares_both(example, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["preference_trl.py", "--loss", "exo_pair", "--steps", "3"])
    example.main()
    assert capsys.readouterr().out.count(", fused ") == 3
    monkeypatch.setattr(sys, "argv", ["preference_trl.py", "--trainer", "kto", "--steps", "3", "--tolerance", "-1"])
    with pytest.raises(SystemExit, match="losses: expected a difference of at most -1.0, got"):
        example.main()


def _trained_in_rank(rank, group, folder):
    """The records and weights of both, under DDP."""
    sys.path.insert(0, EXAMPLES)
    example, found = import_module("preference_trl"), []
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group.size()), "MASTER_ADDR": "none"}
    model = partial(LlamaForCausalLM.from_pretrained, folder)
    AcceleratorState._reset_state(True)
    with patch.dict(os.environ, ranks), patch.object(example, "small_model", lambda *_: model()):
        for kind in OF_ONE:
            own, ours = _trained(example, kind, folder, {}, gradient_accumulation_steps=2)
            assert type(ours.model_wrapped).__name__ == "DistributedDataParallel"
            _assert_alike(own, ours, METRICS)
            found.append(_log(ours)[0]["loss"])
    AcceleratorState._reset_state(True)
    return found


@in_ranks((2,), (), ())
def test_under_ddp_too(rank_pool, impl, example, tmp_path):
    example.small_model(str(tmp_path))
    one, other = rank_pool.run(_trained_in_rank, str(tmp_path))
    assert one == other
