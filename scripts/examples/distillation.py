"""Distils a small language model from a larger one, on real text. The vocabulary is cut over the ranks.

    torchrun --nproc-per-node 2 scripts/examples/distillation.py --json out/distillation.json
    torchrun --nproc-per-node 2 scripts/examples/distillation.py --linear     # materialises neither model's logits

A teacher learns from the text. Then a smaller student learns from the teacher and the labels. The same student, of the
same weights and batches, learns from the labels alone. The text is the running Python's standard library. It
runs on GPUs with NCCL, one per rank, or without GPUs on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce import Head, distillation_loss, linear_distillation_loss, vocab_parallel_cross_entropy

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

from bench_lib.clock import joined_ranks  # noqa: E402
from bench_lib.documents import host_description, write_document  # noqa: E402
from lm.data import IGNORE_INDEX, TokenIds, even_offsets, load_token_ids, random_offsets, windows  # noqa: E402
from lm.model import LanguageModel, Settings  # noqa: E402
from lm.training import MAX_GRADIENT_NORM, rate_schedule  # noqa: E402

VOCABULARY, CHARACTERS, LENGTH, BATCH = 2048, 2_000_000, 64, 16
TEMPERATURE, SHARE_OF_LABELS = 2.0, 0.5
STEPS_OF_TEACHER, MEASUREMENTS = 4, 10  # for each of the student's; of the held-out text in a run
TEACHER, STUDENT = (128, 2), (64, 1)  # width and layers
CACHE = ROOT / ".cache" / "train_lm"
LossOf = Callable[[LanguageModel, Tensor, Tensor], Tensor]  # of token ids and labels


class Run(NamedTuple):
    losses: list[float]  # of each step
    held_out: dict[int, float]  # after a step: cross-entropy of the labels, in text that no model learns from


def label_loss(model: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
    return vocab_parallel_cross_entropy(model(ids), labels, group=model.vocabulary.group, ignore_index=IGNORE_INDEX)


def distilling_from(teacher: LanguageModel, *, linear: bool) -> LossOf:
    """Return a loss of students: ``(1 - a) * T^2 * KL + a * cross_entropy``, with ``a = SHARE_OF_LABELS``.

    That is a multiple of what one call of ``distillation_loss`` computes.
    """
    multiple = (1 - SHARE_OF_LABELS) * TEMPERATURE**2 + SHARE_OF_LABELS
    options: Any = {"temperature": TEMPERATURE, "hard_weight": SHARE_OF_LABELS / multiple}
    options |= {"ignore_index": IGNORE_INDEX, "group": teacher.vocabulary.group}

    def loss_of(student: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            known = teacher.hidden(ids)
        hidden, own, others = student.hidden(ids), student.vocabulary, teacher.vocabulary
        if linear:
            heads = Head(hidden, own.weight), Head(known, others.weight.detach())
            return multiple * linear_distillation_loss(*heads, labels=labels, **options)
        return multiple * distillation_loss(own.logits(hidden), others.logits(known).detach(), labels=labels, **options)

    return loss_of


@torch.no_grad()
def held_out_loss(model: LanguageModel, text: Tensor) -> float:
    offsets = even_offsets(text, LENGTH, 8 * BATCH).split(BATCH)
    return sum(float(label_loss(model, *windows(text, part, LENGTH))) for part in offsets) / len(offsets)


def train(
    size: tuple[int, int], steps: int, seed: int, text: TokenIds, loss_of: LossOf, group: Any
) -> tuple[LanguageModel, Run]:
    """Train a model of this size. Its weights and batches are those of the ``seed``."""
    torch.manual_seed(seed)
    settings = Settings(VOCABULARY, *size, 4, LENGTH, BATCH, steps, 3e-3)
    model = LanguageModel(settings, group).to(text.train.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_schedule(steps))
    generator, run = torch.Generator().manual_seed(seed), Run([], {})
    for step in range(1, steps + 1):
        offsets = random_offsets(text.train, LENGTH, BATCH, generator)
        loss = loss_of(model, *windows(text.train, offsets, LENGTH))
        optimizer.zero_grad()
        loss.backward()
        model.clip_gradient(MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        run.losses.append(float(loss.detach()))
        if step % max(1, steps // MEASUREMENTS) == 0:
            run.held_out[step] = held_out_loss(model, text.held_out)
    return model, run


def compare(steps: int, text: TokenIds, group: Any, *, linear: bool = False) -> dict[str, Run]:
    """Return the runs of the teacher, of the student that learns from it, and of the one that does not."""
    teacher, first = train(TEACHER, STEPS_OF_TEACHER * steps, 1, text, label_loss, group)
    _, distilled = train(STUDENT, steps, 0, text, distilling_from(teacher, linear=linear), group)
    _, plain = train(STUDENT, steps, 0, text, label_loss, group)
    return {"teacher": first, "student, distilled": distilled, "student, labels alone": plain}


def draw(runs: dict[str, Run], path: Path) -> None:
    from matplotlib.figure import Figure

    left, right = (figure := Figure(figsize=(10, 4), layout="constrained")).subplots(1, 2)
    for name, run in list(runs.items())[1:]:
        left.plot(range(1, len(run.losses) + 1), run.losses, label=name, linewidth=1)
        right.plot([*run.held_out], [*run.held_out.values()], marker="o", label=name)
    steps, end = list(runs["teacher"].held_out.items())[-1]
    right.axhline(end, color="gray", linestyle="--", label=f"the teacher, after {steps} steps")
    left.set(title="what each minimises", xlabel="step", ylabel="loss")
    right.set(title="held-out text", xlabel="step", ylabel="cross-entropy of the labels, nats per token")
    left.legend()
    right.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="of each student")
    parser.add_argument("--linear", action="store_true", help="linear_distillation_loss instead of distillation_loss")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the curves here, and draw them next to it")
    words = parser.parse_args()
    torch.backends.cuda.enable_mem_efficient_sdp(False)  # adds in no fixed order, and ranks must not differ
    with joined_ranks() as ranks:
        if ranks.is_first:
            load_token_ids(CACHE, VOCABULARY, CHARACTERS, show_progress=False)  # for the others to read
        if ranks.group is not None:
            dist.barrier(ranks.group)
        text = TokenIds(*(part.to(ranks.device) for part in load_token_ids(CACHE, VOCABULARY, CHARACTERS, False)))
        runs = compare(words.steps, text, ranks.group, linear=words.linear)
    if ranks.is_first:
        print("training losses (distilled: divergences), then cross-entropy of held-out text:", flush=True)
    for name, run in runs.items() if ranks.is_first else ():
        curve, end = run.losses[:: max(1, words.steps // 10)], [*run.held_out.values()][-1]
        print(f"{name:21}", *(f"{loss:.3f}" for loss in curve), f"held out {end:.3f}", flush=True)
    if words.json is not None and ranks.is_first:
        head = {"kind": "distillation", "host": host_description(), "steps": words.steps, "linear": words.linear}
        write_document(head | {name: run._asdict() for name, run in runs.items()}, words.json)
        draw(runs, words.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
