"""One training run with a given loss function, sharded or not, and what is known of it afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lm.data import IGNORE_INDEX, TokenIds, even_offsets, random_offsets, windows
from lm.model import LanguageModel, Settings

HELD_OUT_BATCHES = 8
# A long warm-up and the model's initial sizes keep the optimiser from amplifying rounding. With 0.1 and
# an initial deviation of 0.02, two fp32 runs drifted 1.5e-3 apart within 60 steps; so, some 1e-6.
WARM_UP_SHARE = 0.3
MAX_GRADIENT_NORM = 1.0
# The first steps compile kernels and fill allocators; tokens/s leaves them out.
UNTIMED_STEPS = 3
LossFunction = Callable[[LanguageModel, Tensor, Tensor], Tensor]  # of token ids and labels


@dataclass(frozen=True)
class Run:
    losses: list[float]
    held_out_loss: float
    ignored_labels: int
    tokens_per_second: float
    parameters: int  # on this rank

    @property
    def final_loss(self) -> float:
        """Mean of the last tenth of the steps: one batch's loss is noise."""
        last = self.losses[-max(1, len(self.losses) // 10) :]
        return sum(last) / len(last)


def rate_schedule(steps: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a tenth."""
    warm_up = max(1, int(steps * WARM_UP_SHARE))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))

    return factor


def train(
    name: str,
    settings: Settings,
    seed: int,
    ids: TokenIds,
    loss_function: LossFunction,
    group: dist.ProcessGroup | None,
    show_progress: bool,
) -> Run:
    """Train from `seed`, then evaluate on held-out text. Same seed: same weights, same batches."""
    torch.manual_seed(seed)
    device = ids.train.device
    model = LanguageModel(settings, group).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_schedule(settings.steps))
    generator = torch.Generator().manual_seed(seed)
    length, batch_size = settings.sequence_length, settings.batch_size
    losses: list[Tensor] = []
    ignored = torch.zeros((), dtype=torch.int64, device=device)
    untimed = min(UNTIMED_STEPS, settings.steps - 1)
    started = time.perf_counter()
    bar = tqdm(total=settings.steps, desc=name, unit="step", disable=not show_progress)
    for step in range(settings.steps):
        if step == untimed:
            synchronize(device)
            started = time.perf_counter()
        offsets = random_offsets(ids.train, length, batch_size, generator)
        inputs, labels = windows(ids.train, offsets, length)
        ignored += (labels == IGNORE_INDEX).sum()
        loss = loss_function(model, inputs, labels)
        optimizer.zero_grad()
        loss.backward()
        model.clip_gradient(MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        done = step + 1
        if done % 10 == 0 or done == settings.steps:
            # Reading the loss waits for the device, hence not at every step.
            speed = (done - untimed) * settings.tokens_per_step / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s", refresh=False)
        bar.update()
    synchronize(device)
    elapsed = time.perf_counter() - started
    bar.close()
    with torch.no_grad():
        offsets = even_offsets(ids.held_out, length, HELD_OUT_BATCHES * batch_size)
        batches = [windows(ids.held_out, part, length) for part in offsets.split(batch_size)]
        held_out = torch.stack([loss_function(model, inputs, labels) for inputs, labels in batches])
    values = torch.stack(losses).tolist()
    for step, value in enumerate(values, 1):
        if not math.isfinite(value):
            raise RuntimeError(f"{name}: expected a finite loss, got {value} at step {step}")
    return Run(
        losses=values,
        held_out_loss=held_out.mean().item(),
        ignored_labels=int(ignored),
        tokens_per_second=(settings.steps - untimed) * settings.tokens_per_step / elapsed,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def equal_on_all_ranks(run: Run, device: torch.device, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return True
    mine = torch.tensor([*run.losses, run.held_out_loss], device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return all(torch.equal(mine, other) for other in gathered)
