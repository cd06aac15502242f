"""A student learns from what it writes itself. The teacher is in another process, and ships its last hidden states.

    python scripts/examples/on_policy_distillation.py
    torchrun --nproc-per-node 2 scripts/examples/on_policy_distillation.py

At each step the student writes texts. The teacher's process reads them, and sends a hidden state per token, where
logits would be as wide as the vocabulary. The trainer has the rows of both heads that belong to its columns, and never
makes the logits of more than a chunk of tokens. It minimises KL(student || teacher) with an entropy bonus. Runs on the
CPU, in seconds.
"""

from __future__ import annotations

import argparse
import os
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn

from vocab_parallel_ce import Teacher, linear_objective

VOCABULARY, LENGTH, TEXTS, OF_STUDENT, OF_TEACHER = 256, 12, 32, 48, 96


class LanguageModel(nn.Module):
    """Hidden states of the next tokens, from the two tokens before; the head is the caller's."""

    def __init__(self, width: int, seed: int, scale: float) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.mix = nn.Embedding(VOCABULARY, width), nn.Linear(2 * width, width)
        self.head = nn.Parameter(scale * torch.randn(VOCABULARY, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Return ``[..., T - 1, width]`` for ids ``[..., T]``."""
        pair = torch.cat([self.tokens(ids[..., :-1]), self.tokens(ids[..., 1:])], dim=-1)
        hidden: Tensor = torch.tanh(self.mix(pair))
        return hidden


def serve(connection: Connection) -> None:
    """Be the teacher: send the rows of the head that are asked for, then hidden states of ids, until there is None."""
    torch.set_num_threads(1)
    teacher = LanguageModel(OF_TEACHER, 0, 0.3)
    with torch.no_grad():
        connection.send(teacher.head[connection.recv()].numpy())
        while (ids := connection.recv()) is not None:
            connection.send(teacher(torch.from_numpy(ids)).numpy())


def write(student: LanguageModel) -> Tensor:
    """Return ``[TEXTS, LENGTH + 2]`` ids that the student has drawn, the same on every rank; two are given."""
    ids = torch.arange(2 * TEXTS).view(TEXTS, 2) % VOCABULARY
    for _ in range(LENGTH):  # an engine that writes has all columns
        probs = (student(ids[:, -2:])[:, 0] @ student.head.t()).softmax(-1)
        ids = torch.cat([ids, probs.multinomial(1)], dim=1)
    return ids


def on_policy(log_probs: Tensor, divergence: Tensor, entropy: Tensor) -> Tensor:
    """Return each token's loss. ``log_probs`` of what was drawn would serve a reward."""
    return divergence - 0.01 * entropy


def train(steps: int, rank: int, n_ranks: int, group: Any, teacher: Connection) -> list[float]:
    """Return the mean KL(student || teacher) of each step's texts; the same on every rank."""
    width = VOCABULARY // n_ranks
    columns = slice(rank * width, (rank + 1) * width)
    teacher.send(columns)
    of_teacher = torch.from_numpy(teacher.recv())
    student = LanguageModel(OF_STUDENT, 1, 0.1)
    optimizer, curve = torch.optim.AdamW(student.parameters(), lr=0.01), []
    for _ in range(steps):
        with torch.no_grad():
            ids = write(student)
            teacher.send(ids[:, :-1].numpy())
        hidden, known = student(ids[:, :-1]), torch.from_numpy(teacher.recv())
        found: Any
        loss, found = linear_objective(
            hidden,
            student.head[columns],
            ids[:, 2:],
            on_policy,
            outputs=("divergence", "entropy"),
            teacher=Teacher(known, of_teacher, divergence="reverse"),
            group=group,
        )
        optimizer.zero_grad()
        loss.backward()
        if group is not None:  # each rank has a gradient of its rows alone, and all have a copy
            dist.all_reduce(student.head.grad, group=group)
        optimizer.step()
        curve.append(float(found.divergence.mean()))
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    words = parser.parse_args()
    rank, n_ranks, group = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), None
    if n_ranks > 1:
        dist.init_process_group("gloo")
        group = dist.group.WORLD
    own, others = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(others,), daemon=True)
    process.start()  # one for each rank: they are small
    curve = train(words.steps, rank, n_ranks, group, own)
    own.send(None)
    process.join()
    if rank == 0:
        print("KL(student || teacher), nats:", *(f"{value:.3f}" for value in curve[:: max(1, words.steps // 10)]))
        print(f"of the last step {curve[-1]:.3f}")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
