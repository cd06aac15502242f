"""Trains a small model with its loss inside torch.compile, as one graph, and without; prints both curves.

python scripts/examples/compiled_step.py
torchrun --nproc-per-node 2 scripts/examples/compiled_step.py     # each rank has half of the vocabulary
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel_ce import LinearCrossEntropy

VOCABULARY, WIDTH, TOKENS = 512, 32, 64


class Model(nn.Module):
    def __init__(self, rank: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        n_ranks = 1 if group is None else group.size()
        whole = torch.randn(VOCABULARY, WIDTH) / WIDTH**0.5
        self.embedding, self.body = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY // n_ranks, bias=False)
        self.head.weight.data = whole.chunk(n_ranks)[rank].clone()
        self.loss = LinearCrossEntropy(self.head, group=group)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return self.loss(torch.tanh(self.body(self.embedding(tokens))), labels)


def train(compiles: bool, steps: int, rank: int, group: dist.ProcessGroup | None, backend: str) -> list[float]:
    torch.manual_seed(0)
    model = Model(rank, group)
    step = torch.compile(model, fullgraph=True, backend=backend) if compiles else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    curve = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCABULARY, (TOKENS,))
        loss = step(tokens, (3 * tokens + 1) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(loss.item())
    return curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    words = parser.parse_args()
    n_ranks, rank, group = int(os.environ.get("WORLD_SIZE", "1")), 0, None
    if n_ranks > 1:
        dist.init_process_group("gloo")
        rank, group = dist.get_rank(), dist.group.WORLD
    curves = [train(compiles, words.steps, rank, group, words.backend) for compiles in (False, True)]
    if rank == 0:
        for number, (eager, compiled) in enumerate(zip(*curves, strict=True)):
            print(f"step {number}: eager {eager:.6f}, compiled {compiled:.6f}")
        largest = max(abs(eager - compiled) for eager, compiled in zip(*curves, strict=True))
        print(f"the curves differ by at most {largest:.1e}")
    if n_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
