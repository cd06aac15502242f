"""transformers.Trainer with and without install(): the same curves, the same metrics; and the example."""

import copy
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Gemma2ForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments

from tests.support.frameworks.transformers_steps import calls_of
from vocab_parallel_ce.integrations.transformers import audit, install
from vocab_parallel_ce.integrations.transformers.patch import COMPILED, WITHOUT_LABELS
from vocab_parallel_ce.integrations.transformers.tiny import tiny_model

pytestmark = pytest.mark.reference
SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS, ACCUMULATION = 3, 2


def examples(count=24, seed=0):
    """Return sequences of 4 to 12 tokens, padded to 12."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        ids = torch.randint(5, 95, (12,), generator=generator)
        mask = (torch.arange(12) < torch.randint(4, 13, (), generator=generator)).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def trainer_of(model, directory, compute_metrics=None, preprocess_logits_for_metrics=None, **options):
    words = {"max_steps": STEPS, "gradient_accumulation_steps": ACCUMULATION, "per_device_train_batch_size": 2}
    words |= {"per_device_eval_batch_size": 3, "learning_rate": 1e-3, "logging_steps": 1, "save_strategy": "no"}
    words |= {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    arguments = TrainingArguments(output_dir=str(directory), **words | options)
    return Trainer(
        model,
        arguments,
        train_dataset=examples(),
        eval_dataset=examples(7, seed=1),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )


def curve(model, directory, **options):
    """Return the losses of training and evaluation, and the norms of the gradients."""
    trainer = trainer_of(model, directory, **options)
    trainer.train()
    names = ("loss", "grad_norm", "eval_loss")
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def same_curve(directory, cls=LlamaForCausalLM, rtol=1e-5, **options):
    """Train with and without install(), compare every logged number, and return the installed model."""
    native = tiny_model(cls)
    fused = copy.deepcopy(native)
    expected = curve(native, directory, **options)
    install(fused)
    found = curve(fused, directory, **options)
    assert len(expected) >= 2 * STEPS and expected[0] > 2.0
    np.testing.assert_allclose(found, expected, rtol=rtol)
    return fused


CURVES = {
    "tokens averaged over devices": {"average_tokens_across_devices": True},
    "tokens of each device": {"average_tokens_across_devices": False},
    "no accumulation": {"gradient_accumulation_steps": 1},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "reentrant": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "evaluated in between": {"eval_strategy": "steps", "eval_steps": 1},
}


@pytest.mark.parametrize(
    "cls,case",
    [(LlamaForCausalLM, case) for case in CURVES] + [(Gemma2ForCausalLM, "gradient checkpointing")],
)
def test_same_curve(tmp_path, cls, case):
    options = CURVES[case]
    model = same_curve(tmp_path, cls, **options)
    calls = STEPS * options.get("gradient_accumulation_steps", ACCUMULATION)
    calls += 3 * STEPS if "eval_strategy" in options else 0
    assert audit(model) == {"fused": calls}  # and no logits were made


def test_same_curve_with_autocast_to_bf16(tmp_path):
    # Both losses see the same bf16 logits, but they round the head's gradients to bf16 at other places.
    model = same_curve(tmp_path, bf16=True, rtol=2**-8)
    assert audit(model) == {"fused": STEPS * ACCUMULATION}


@pytest.mark.parametrize(
    "options,reason",
    [
        ({"torch_compile": True, "torch_compile_backend": "eager", "tf32": False}, COMPILED),
        ({"label_smoothing_factor": 0.1}, WITHOUT_LABELS),  # Trainer takes the labels away
    ],
    ids=["torch_compile", "label smoothing"],
)
def test_what_is_not_fused_is_said_once_and_counted(tmp_path, caplog, options, reason):
    model = same_curve(tmp_path, **options)
    counts = audit(model)
    assert [*counts] == [reason] and (counts[reason] == STEPS * ACCUMULATION or reason == COMPILED)
    said = [record.getMessage() for record in caplog.records if record.name == "vocab_parallel_ce"]
    assert said == [f"vocab_parallel_ce: LlamaForCausalLM: the logits were made: {reason}"]


def test_a_run_that_is_saved_and_resumed(tmp_path):
    native = tiny_model(LlamaForCausalLM)
    fused, again = copy.deepcopy(native), copy.deepcopy(native)
    expected = curve(native, tmp_path / "native")
    install()
    trainer_of(fused, tmp_path, max_steps=STEPS, save_strategy="steps", save_steps=2).train()
    trainer = trainer_of(again, tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert audit(again) == {"fused": (STEPS - 2) * ACCUMULATION}


# Evaluation


def accuracy(prediction, compute_result=True):
    logits, labels = prediction.predictions, prediction.label_ids
    assert logits.shape == (*labels.shape, 99)
    hits = (logits.argmax(-1)[:, :-1] == labels[:, 1:]).sum()
    return {"hits": int(hits), "mean": float(logits.mean()), "shape": len(logits)}


def best(logits, labels):
    return logits.argmax(-1)


def hits_of_best(prediction):
    return {"hits": int((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).sum())}


EVALUATIONS = {
    "metrics": {"compute_metrics": accuracy},
    "batches": {"compute_metrics": accuracy, "batch_eval_metrics": True},
    "preprocessed": {"compute_metrics": hits_of_best, "preprocess_logits_for_metrics": best},
    "bf16": {"compute_metrics": accuracy, "bf16": True},
    "label smoothing": {"compute_metrics": accuracy, "label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("case", EVALUATIONS)
def test_evaluate_and_predict(tmp_path, case):
    options = EVALUATIONS[case]
    model = tiny_model(LlamaForCausalLM)

    def evaluated():
        trainer = trainer_of(copy.deepcopy(model), tmp_path, **options)
        metrics, predicted = trainer.evaluate(), trainer.predict(examples(7, seed=2))
        return metrics, predicted, trainer.model

    (metrics, predicted, _), _ = evaluated(), install(model)
    found_metrics, found, used = evaluated()
    assert calls_of(used) == ({} if "smoothing" in case else {"fused": 6})
    assert found_metrics["eval_hits"] == metrics["eval_hits"] and found_metrics.keys() == metrics.keys()
    assert found_metrics.get("eval_mean") == metrics.get("eval_mean")
    np.testing.assert_allclose(found_metrics["eval_loss"], metrics["eval_loss"], rtol=1e-5)
    assert type(found.predictions) is np.ndarray and np.array_equal(found.predictions, predicted.predictions)
    assert np.array_equal(found.label_ids, predicted.label_ids)


# The example


def run_example(monkeypatch, *arguments):
    path = str(SCRIPTS / "examples" / "transformers_trainer.py")
    monkeypatch.setattr(sys, "argv", [path, "--cpu", "--steps", "2", "--characters", "30000", *arguments])
    runpy.run_path(path, run_name="__main__")


@pytest.mark.parametrize("arguments,calls", [((), {"fused": 4}), (("--native", "--model", "qwen3"), {})])
def test_the_example(monkeypatch, capsys, arguments, calls):
    run_example(monkeypatch, *arguments)
    assert f"calls of the model: {calls}" in capsys.readouterr().out
