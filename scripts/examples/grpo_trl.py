"""Trains a policy with TRL's GRPOTrainer, its loss inside the head.

    python scripts/examples/grpo_trl.py --steps 100

TRL takes the log-probabilities from its fused head, and its backward makes the logits again: four products. Here
``linear_objective`` knows each token's loss when the logits are there: three. The model is built from its
configuration, and its reward is the share of even numbers that it writes; nothing is downloaded.

The losses ``grpo``, ``dapo`` and ``cispo`` of text, in one process: what else changes TRL's loss is refused. Of its
metrics it logs the loss, the gradient's norm, the entropy and the rewards. Tested with TRL 1.16 and transformers 5.23.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vocab_parallel_ce import HeadOptions, linear_objective

WORDS = [str(number) for number in range(64)]
SPECIAL = ["<pad>", "<s>", "</s>"]
LOSSES = ("grpo", "dapo", "cispo")
# Options that change the loss, and what they are without a change.
DEFAULTS = {"delta": None, "use_vllm": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
DEFAULTS |= {"use_adaptive_entropy": False}
OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")


def add_policy(model: nn.Module) -> None:
    """Let ``model(..., policy=function)`` return the function of its hidden states ``[B, T, D]`` and of its head.

    It is called inside forward, as the model's own head is.
    """
    own = model.forward

    def forward(self: Any, *args: Any, policy: Callable[[Tensor, nn.Module], Any] | None = None, **inputs: Any) -> Any:
        if policy is None:
            return own(*args, **inputs)
        states = self.base_model(*args, **inputs, use_cache=False).last_hidden_state
        return policy(states, self.get_output_embeddings())

    vars(forward)["__wrapped__"] = own  # generate() looks at the signature
    model.forward = MethodType(forward, model)


def prepare(trainer: Any, modes: tuple[str, ...] = ("NO",)) -> None:
    """Add a policy to the model of one of TRL's trainers. Raise if it has other logits, or accelerate another mode."""
    model, accelerator = trainer.accelerator.unwrap_model(trainer.model), trainer.accelerator
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's
    of_text, mode = model.config.get_text_config(), accelerator.distributed_type.value
    changed = [name for name in OF_LOGITS if getattr(of_text, name, None) not in (None, 1)]
    if changed or trainer.aux_loss_enabled:
        got = ", ".join(changed) or "an auxiliary loss"
        raise ValueError(f"model: expected logits without a scale or softcap, got {got}; use TRL's own trainer")
    if mode not in modes or accelerator.parallelism_config is not None:
        raise ValueError(f"accelerator: expected {' or '.join(modes)}, got {mode}; use TRL's own trainer")
    add_policy(model)


class ObjectiveTrainer(trl.GRPOTrainer):
    """``GRPOTrainer`` with a ratio of each token: the losses ``grpo``, ``dapo`` and ``cispo``, k3 and entropy bonus."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        config = self.args
        if config.loss_type not in LOSSES or config.importance_sampling_level != "token":
            raise ValueError(f"loss_type: expected {', '.join(LOSSES)} with ratios of tokens, got {config.loss_type!r}")
        for name, value in DEFAULTS.items():
            if getattr(config, name) != value:
                raise ValueError(f"{name}: expected {value!r}, its default, got {getattr(config, name)!r}")
        prepare(self)

    def _shares(self, mask: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Return ``[B, T]`` fp32, what each token's loss counts in the sum."""
        n_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        if self.loss_type == "grpo":
            return (1 / (mask.sum(-1, keepdim=True).clamp(min=1) * mask.shape[0] * n_batches)).expand(mask.shape)
        n_tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            n_tokens = n_tokens * n_batches / self.args.steps_per_generation
        return (1 / n_tokens).expand(mask.shape)

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        if {"tool_mask", "pixel_values"} & inputs.keys() or inputs["advantages"].dim() > 1:
            raise ValueError("inputs: expected text without tools and an advantage for each sequence, got others")
        completion, mask = inputs["completion_ids"], inputs["completion_mask"]
        n, n_tokens = completion.shape[1], mask.sum().clamp(min=1)
        tokens = {
            "advantage": inputs["advantages"].unsqueeze(1).expand(mask.shape),
            "share": self._shares(mask, inputs),
        }
        known = {"old": inputs.get("old_per_token_logps"), "reference": inputs.get("ref_per_token_logps")}
        tokens |= {name: value for name, value in known.items() if value is not None}
        n_batches = self.current_gradient_accumulation_steps if self.model.training else 1
        bonus = self.entropy_coef / (n_tokens * n_batches)

        def objective(
            log_probs: Tensor,
            entropy: Tensor,
            advantage: Tensor,
            share: Tensor,
            old: Tensor | None = None,
            reference: Tensor | None = None,
        ) -> Tensor:
            # A far token's exponential would make the whole gradient infinite.
            ratio = (log_probs - (log_probs.detach() if old is None else old)).clamp(max=20).exp()
            if self.loss_type == "cispo":
                loss = -ratio.clamp(max=self.epsilon_high).detach() * advantage * log_probs
            else:
                clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
                loss = -torch.minimum(ratio * advantage, clipped * advantage)
            if reference is not None:
                difference = (reference - log_probs).clamp(max=20)
                k3 = difference.exp() - difference - 1
                loss = loss + self.beta * (k3 * ratio if self.args.use_bias_correction_kl else k3)
            return share * loss - bonus * entropy

        def policy(states: Tensor, head: Any) -> Any:
            return linear_objective(
                states[:, -n - 1 : -1],
                head.weight,
                completion.masked_fill(mask == 0, -100),
                objective,
                tokens=tokens,
                bias=head.bias,
                outputs=("entropy",),
                temperature=self.temperature,
                reduction="sum",
                options=HeadOptions(valid_tokens="count"),
            )

        loss, found = model(
            input_ids=torch.cat([inputs["prompt_ids"], completion], dim=1),
            attention_mask=torch.cat([inputs["prompt_mask"], mask], dim=1),
            policy=policy,
        )
        mode = "train" if self.model.training else "eval"
        of_all = self.accelerator.reduce(torch.stack([found.entropy.sum(), n_tokens]), reduction="sum")
        self._metrics[mode]["entropy"].append(float(of_all[0] / of_all[1]))
        return loss


def even_numbers(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: the share of its words that are even numbers."""
    texts = [text.split() for text in completions]
    return [sum(int(word) % 2 == 0 for word in words if word in WORDS) / max(len(words), 1) for words in texts]


def tokenizer() -> PreTrainedTokenizerFast:
    of_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token=SPECIAL[0]))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pad, begin, end = SPECIAL
    return PreTrainedTokenizerFast(tokenizer_object=of_words, pad_token=pad, bos_token=begin, eos_token=end)


def small_model(folder: str, hidden: int = 64, vocabulary: int = len(SPECIAL + WORDS)) -> Any:
    """Return a model that lies in the folder: TRL makes the reference from its name."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, num_attention_heads=4)).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def common_options() -> dict[str, Any]:
    """Return options of TRL's configs: fp32, and a log of each step."""
    quiet = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1}
    return {**quiet, "bf16": False, "use_cpu": not torch.cuda.is_available(), "gradient_checkpointing": False}


def trained(trainer: type[trl.GRPOTrainer], folder: str, **options: Any) -> Any:
    """Return the trainer after training, of a small model and with options of TRL's ``GRPOConfig``."""
    model = small_model(folder)
    sampled = {"num_generations": 8, "per_device_train_batch_size": 32, "max_completion_length": 8}
    common = {**common_options(), **sampled, "learning_rate": 3e-3}
    config = trl.GRPOConfig(output_dir=folder, **{**common, **options})
    prompts = Dataset.from_list([{"prompt": word} for word in WORDS])
    made = trainer(model, even_numbers, config, train_dataset=prompts, processing_class=tokenizer())
    made.train()
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--loss", choices=LOSSES, default="dapo")
    parser.add_argument("--own", action="store_true", help="TRL's own loss")
    words = parser.parse_args()
    trainer = trl.GRPOTrainer if words.own else ObjectiveTrainer
    with tempfile.TemporaryDirectory() as folder:
        history = trained(
            trainer, folder, max_steps=words.steps, loss_type=words.loss, entropy_coef=0.01
        ).state.log_history
    rewards = [step["reward"] for step in history if "reward" in step]
    for step in range(0, len(rewards), 10):
        print(f"step {step}: reward {rewards[step]:.3f}")
    print(f"last: reward {rewards[-1]:.3f}")


if __name__ == "__main__":
    main()
