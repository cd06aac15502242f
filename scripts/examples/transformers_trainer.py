"""Trains a small model with transformers' Trainer, without its logits: ``install()`` is the only line for that.

The models are built from their configurations and the text is Python's standard library, so nothing is downloaded.

    python scripts/examples/transformers_trainer.py --model gemma2
    python scripts/examples/transformers_trainer.py --cpu --compare scripts/results/transformers_curves

``--compare`` trains every model with and without the fused loss, and writes the curves to ``PATH.json`` and
``PATH.png``.
"""

from __future__ import annotations

import argparse
import json
import random
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.implementations import ByteLevelBPETokenizer

from vocab_parallel_ce.integrations.transformers import install, uninstall
from vocab_parallel_ce.integrations.transformers.audit_models import audit

LENGTH, VOCABULARY = 128, 4000
SMALL: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma2": ("Gemma2", {"query_pre_attn_scalar": 32}),  # with the softcap of its logits
    "mixtral": ("Mixtral", {"num_local_experts": 4, "output_router_logits": True}),  # with its auxiliary loss
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
}


def read_examples(characters: int) -> list[dict[str, torch.Tensor]]:
    """Return windows of files as ids, mask and labels, each int64 [LENGTH]. The padding's labels are -100."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    texts: list[str] = []
    while paths and sum(map(len, texts)) < characters:
        texts.append(paths.pop().read_text(encoding="utf-8", errors="ignore"))
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(iter(texts), VOCABULARY, show_progress=False)
    examples = []
    for text in texts:
        for window in torch.tensor(tokenizer.encode(text).ids).split(LENGTH):
            padding = (0, LENGTH - len(window))
            mask = torch.nn.functional.pad(torch.ones_like(window), padding)
            ids, labels = (torch.nn.functional.pad(window, padding, value=value) for value in (0, -100))
            examples.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return examples


def train(name: str, native: bool, examples: list[dict[str, torch.Tensor]], **arguments: Any) -> dict[str, Any]:
    """Return the loss of each step, and how many calls of the model ran fused."""
    transformers.set_seed(0)
    prefix, options = MODELS[name]
    if not native:
        install()
    config = getattr(transformers, f"{prefix}Config")(**(SMALL | options))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with tempfile.TemporaryDirectory() as directory:
        training = transformers.TrainingArguments(
            output_dir=directory,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **arguments,
        )
        trainer = transformers.Trainer(model, training, train_dataset=examples)
        trainer.train()
    uninstall()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": losses, "calls": audit(model)}


def compare(path: Path, examples: list[dict[str, torch.Tensor]], **arguments: Any) -> None:
    """Write every model's curves, with and without the fused loss, and draw them."""
    import matplotlib.pyplot as plt

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    document: dict[str, Any] = {"kind": "transformers_curves", "versions": versions, "curves": {}}
    figure, axes = plt.subplots(2, 2, figsize=(9, 6), layout="constrained", sharex=True)
    steps = range(1, arguments["max_steps"] + 1)
    for name, axis in zip(MODELS, axes.flat, strict=True):
        native, fused = (train(name, is_native, examples, **arguments) for is_native in (True, False))
        apart = max(abs(a / b - 1) for a, b in zip(fused["losses"], native["losses"], strict=True))
        document["curves"][name] = {"native": native, "fused": fused, "largest_relative_difference": apart}
        axis.plot(steps, native["losses"], label="transformers' own loss", color="0.7", linewidth=5)
        axis.plot(steps, fused["losses"], label="with install()", color="tab:blue", linewidth=1.2)
        axis.set(title=f"{MODELS[name][0]}: at most {apart:.1e} apart", xlabel="step", ylabel="loss")
    axes.flat[0].legend()
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--native", action="store_true", help="transformers' own loss")
    parser.add_argument("--compare", type=Path, metavar="PATH")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--characters", type=int, default=1_000_000, help="of the text")
    words = parser.parse_args()
    examples = read_examples(words.characters)
    arguments = {"max_steps": words.steps, "use_cpu": words.cpu}
    if words.compare is not None:
        compare(words.compare, examples, **arguments)
    else:
        print("calls of the model:", train(words.model, words.native, examples, **arguments)["calls"])


if __name__ == "__main__":
    main()
