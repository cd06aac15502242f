"""Trains on preferences with TRL's DPOTrainer or KTOTrainer, the loss inside the head, beside TRL's own.

    python scripts/examples/preference_trl.py --trainer kto

TRL takes the log-probabilities from its fused head, and its backward makes the logits again: four products. Here one
call of ``linear_objective`` has all tokens of a pair, or of KTO's sequence, when the logits are there: three. TRL's own
method then computes its metrics from the log-probabilities. With ``trl.install()`` those of the reference come from
this package too: rounded alike, so rewards begin at 0. The script prints both losses, the median time of a step and, on
a GPU, the peak memory. It fails if a loss differs by more than ``--tolerance`` times itself. Nothing is downloaded.

For text, in one process or under DDP, also with PEFT; what else changes the loss is refused. A pair, or a sequence,
without a token that counts adds nothing; TRL adds a constant. Tested with TRL 1.16, transformers 5.23 and PEFT 0.21.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import trl
from datasets import Dataset
from grpo_trl import common_options, prepare, small_model, tokenizer
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import Trainer, TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput

from vocab_parallel_ce import linear_objective
from vocab_parallel_ce.integrations.trl import installed

# Of the log-ratios to the reference [k], of the chosen and of the rejected sequence; of beta and label smoothing.
LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": lambda c, r, b, s: -logsigmoid(b * (c - r)),
    "sigmoid_norm": lambda c, r, b, s: -logsigmoid(b * (c - r)),
    "hinge": lambda c, r, b, s: torch.relu(1 - b * (c - r)),
    "ipo": lambda c, r, b, s: (c - r - 1 / (2 * b)) ** 2,
    "robust": lambda c, r, b, s: (s * logsigmoid(b * (r - c)) - (1 - s) * logsigmoid(b * (c - r))) / (1 - 2 * s),
    "exo_pair": lambda c, r, b, s: exo(b * (c - r), math.log1p(-s)) + exo(b * (r - c), math.log(s)),
    "nca_pair": lambda c, r, b, s: -logsigmoid(b * c) - (logsigmoid(-b * c) + logsigmoid(-b * r)) / 2,
    "bco_pair": lambda c, r, b, s: -logsigmoid(b * c) - logsigmoid(-b * r),
    "sppo_hard": lambda c, r, b, s: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "apo_zero": lambda c, r, b, s: torch.sigmoid(-b * c) + torch.sigmoid(b * r),
    "apo_down": lambda c, r, b, s: torch.sigmoid(b * c) + torch.sigmoid(b * (r - c)),
}
OF_MEANS = ("ipo", "sigmoid_norm")  # log-ratios are divided by the completions' lengths
SMOOTHED = ("robust", "exo_pair")
# Options that change the loss or the model, and what they are without a change.
DEFAULTS: dict[str, Any] = {"use_liger_kernel": False, "padding_free": False, "use_weighting": False}
DEFAULTS |= {"ld_alpha": None, "f_divergence_type": "reverse_kl"}


def exo(logit: Tensor, of_label: float) -> Tensor:
    return logit.sigmoid() * (logsigmoid(logit) - of_label)


def of_pairs(log_probs: Tensor, groups: Any, *, losses: Any, **known: Tensor) -> Tensor:
    """Return the loss of each pair. Of ``part [n, 2]`` one is 1: the first, if the token is of the chosen sequence."""
    ratios = groups.sum(log_probs.unsqueeze(1) * known["part"]) - groups.of(known["reference"])
    means = ratios / groups.of(known["length"])
    return sum(weight * loss(*(means if of_means else ratios).unbind(1)) for loss, of_means, weight in losses)


def of_sequences(log_probs: Tensor, groups: Any, numbers: Tensor, *, beta: float, **_: Any) -> Tensor:
    """Return the loss of each sequence; its sign is 1 if it is desirable, -1 otherwise."""
    reference, sign, weight = groups.of(numbers).unbind(1)
    return weight * torch.sigmoid(-beta * sign * (groups.sum(log_probs) - reference))


class FusedTrainer(Trainer):
    """What both trainers share. ``groups_of`` returns ids of sequences, arguments, and attributes for TRL's method."""

    losses: Collection[str]  # what it can compute
    references: tuple[str, str]  # what TRL calls the reference's log-probabilities in a batch
    groups_of: Callable[[Any, dict[str, Any]], tuple[Tensor, dict[str, Any], dict[str, Any]]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        names = self.args.loss_type
        if not {*([names] if isinstance(names, str) else names)} <= {*self.losses}:
            raise ValueError(f"loss_type: expected {', '.join(self.losses)}, got {names}; use TRL's own trainer")
        for name, value in DEFAULTS.items():
            if (got := getattr(self.args, name, value)) != value:
                raise ValueError(f"{name}: expected {value!r}, its default, got {got!r}; use TRL's own trainer")
        if self._is_vlm:
            raise ValueError("model: expected one of text, got one of text and images; use TRL's own trainer")
        prepare(self, ("NO", "MULTI_CPU", "MULTI_GPU"))  # under DDP it is TRL's mean of ranks

    def _compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool) -> Any:
        if not self.precompute_ref_logps:
            found = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | dict(zip(self.references, found, strict=True))
        ids, arguments, known = self.groups_of(model, inputs)
        made = []

        def policy(labels: Tensor, states: Tensor, head: Any) -> Any:
            together, outputs = ids.unsqueeze(1).expand_as(labels), ("entropy", "mean_logit", "predictions")
            options = {"together": together, "bias": head.bias, "outputs": outputs, "reduction": "sum", **arguments}
            loss, got = linear_objective(states[:, -labels.shape[1] - 1 : -1], head.weight, labels, **options)
            numbers = got.log_probs, got.entropy, None, got.mean_logit, got.predictions == labels
            return FusedCausalLMOutput(loss, *numbers)

        def fused(*, fused_lm_head: bool = False, labels: Any = None, use_cache: bool = False, **given: Any) -> Any:
            if not fused_lm_head:  # logits for compute_metrics
                return model(**given, use_cache=use_cache)
            made.append(model(**given, policy=partial(policy, labels[:, 1:])))
            return made[-1]

        with patch.multiple(self, precompute_ref_logps=True, **known):
            own = super()._compute_loss(fused, inputs, return_outputs)  # its metrics
        return (made[0].loss, own[1]) if return_outputs else made[0].loss


class FusedDPOTrainer(FusedTrainer, trl.DPOTrainer):
    """``DPOTrainer`` with ``LOSSES``, also several with weights."""

    losses, references = LOSSES, ("ref_chosen_logps", "ref_rejected_logps")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        names, given = self.loss_types, {"b": self.beta, "s": self.label_smoothing}
        if given["s"] and not set(names) & set(SMOOTHED):
            raise ValueError(f"label_smoothing: expected 0 for {names}, which TRL does not smooth, got {given['s']}")
        weighted = zip(names, self.loss_weights, strict=True)
        losses = [(partial(LOSSES[name], **given), name in OF_MEANS, weight) for name, weight in weighted]
        self.objective = partial(of_pairs, losses=losses)

    def groups_of(self, model: Any, inputs: dict[str, Any]) -> Any:
        mask = inputs["completion_mask"]
        n_pairs, part = len(mask) // 2, torch.eye(2, device=mask.device)  # chosen sequences are first
        part = part.repeat_interleave(n_pairs, 0).unsqueeze(1).expand(-1, mask.shape[1] - 1, -1)
        reference = torch.stack([inputs[name] for name in self.references], 1)
        numbers = {"reference": reference, "length": mask.sum(1).clamp(min=1).view(2, n_pairs).T}
        arguments = {"tokens": {"part": part}, "numbers": numbers, "num_items": n_pairs}
        ids = torch.arange(n_pairs, device=mask.device).repeat(2)
        return ids, {"objective": self.objective, **arguments}, {}


class FusedKTOTrainer(FusedTrainer, trl.KTOTrainer):
    """``KTOTrainer`` with the loss ``kto``, and ``apo_zero_unpaired``, which is that of a KL of 0."""

    losses, references = ("kto", "apo_zero_unpaired"), ("ref_logps", "ref_KL_logps")

    def groups_of(self, model: Any, inputs: dict[str, Any]) -> Any:
        desirable, of_kl, kl = inputs["label"].bool(), self._compute_kl_logps(model, inputs), 0.0
        if of_kl is not None:
            kl = self.accelerator.gather_for_metrics((of_kl - inputs["ref_KL_logps"]).mean()).mean().clamp(min=0)
        weight = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        numbers = torch.stack([inputs["ref_logps"] + kl, 2.0 * desirable - 1, weight], 1)
        arguments = {"objective": partial(of_sequences, beta=self.beta), "numbers": {"numbers": numbers}}
        ids = torch.arange(len(desirable), device=desirable.device)
        return ids, {"num_items": len(ids), **arguments}, {"_compute_kl_logps": lambda *_: of_kl}


class Clock(TrainerCallback):
    """Has the times at which steps end."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def preferences(of_pairs: bool, longest: int) -> Dataset:
    """Return prompts of a number, and completions of several lengths: even numbers are better than odd ones."""
    rows: list[dict[str, Any]] = []
    for i in range(64):
        lengths = longest - i % 4, longest - i % 3
        good, bad = ("".join(f" {(2 * (i + j) + odd) % 64}" for j in range(n)) for odd, n in enumerate(lengths))
        one = {"completion": bad if i % 3 else good, "label": i % 3 == 0}
        rows.append({"prompt": str(i)} | ({"chosen": good, "rejected": bad} if of_pairs else one))
    return Dataset.from_list(rows)


def trained(trainer: Any, folder: str, hidden: int = 64, vocabulary: int = 67, longest: int = 8, **options: Any) -> Any:
    """Return the trainer after training, of a small model and with options of TRL's config, and its clock."""
    of_pairs, clock = issubclass(trainer, trl.DPOTrainer), Clock()
    common = {**common_options(), "per_device_train_batch_size": 8, "optim": "sgd", "learning_rate": 0.1}
    config = (trl.DPOConfig if of_pairs else trl.KTOConfig)(output_dir=folder, **{**common, **options})
    data = {"train_dataset": preferences(of_pairs, longest), "processing_class": tokenizer(), "callbacks": [clock]}
    made = trainer(small_model(folder, hidden, vocabulary), args=config, **data)
    made.train()
    return made, clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trainer", choices=("dpo", "kto"), default="dpo")
    parser.add_argument("--loss", help="TRL's loss_type; by default sigmoid or kto")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sizes", type=int, nargs=3, default=(64, 67, 8), help="hidden, vocabulary, completion")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    asked, has_gpu = parser.parse_args(), torch.cuda.is_available()
    trainers = (trl.DPOTrainer, FusedDPOTrainer) if asked.trainer == "dpo" else (trl.KTOTrainer, FusedKTOTrainer)
    options = {"max_steps": asked.steps} | ({"loss_type": asked.loss} if asked.loss else {})
    options |= {"label_smoothing": 0.1} if asked.loss in SMOOTHED else {}
    losses = []
    for trainer in trainers:
        if has_gpu:
            torch.cuda.reset_peak_memory_stats()
        with tempfile.TemporaryDirectory() as folder, installed() if trainer is trainers[1] else nullcontext():
            made, clock = trained(trainer, folder, *asked.sizes, **options)
        losses.append([step["loss"] for step in made.state.log_history if "loss" in step])
        took = median(end - start for start, end in zip(clock.ends, clock.ends[1:], strict=False))
        peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if has_gpu else ""
        print(f"{trainer.__name__}: {1000 * took:.1f} ms a step{peak}")
        del made
    for step, (own, found) in enumerate(zip(*losses, strict=True)):
        print(f"step {step}: TRL {own:.7f}, fused {found:.7f}")
    largest = max(abs(found - own) / abs(own) for own, found in zip(*losses, strict=True))
    print(f"largest difference {largest:.1e}")
    if not largest <= asked.tolerance:
        sys.exit(f"losses: expected a difference of at most {asked.tolerance}, got {largest:.1e}")


if __name__ == "__main__":
    main()
