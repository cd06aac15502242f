"""Trains a small transformer on 2 x 2 ranks, FSDP2 x tensor parallelism, and compares it with one that is not cut.

    torchrun --nproc-per-node 4 scripts/examples/dtensor_fsdp_tp.py                  # DTensor logits
    torchrun --nproc-per-node 4 scripts/examples/dtensor_fsdp_tp.py --loss linear    # no logits

It runs on four GPUs with NCCL if there are so many, and otherwise on the CPU with gloo. Each replica of data
parallelism has half of each batch. The vocabulary is cut over the two ranks of tensor parallelism, unevenly: 502 and
501 columns.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vocab_parallel_ce import LinearCrossEntropy
from vocab_parallel_ce.integrations.dtensor import cross_entropy

VOCABULARY, WIDTH, LAYERS, HEAD_WIDTH = 1003, 64, 2, 16
BATCH, LENGTH, IGNORED = 8, 32, -100


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        x = self.norm(hidden)
        maps = self.query, self.key, self.value
        query, key, value = (f(x).unflatten(-1, (-1, HEAD_WIDTH)).transpose(1, 2) for f in maps)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + self.out(attended)
        return hidden + self.down(F.gelu(self.up(self.mlp_norm(hidden))))


class Model(nn.Module):
    """The loss is inside, because a head that FSDP cut is whole only in the forward of the module that FSDP wraps."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.loss = loss
        self.linear_loss = LinearCrossEntropy(self.head, reduction="sum")  # shares the head

    def forward(self, ids: Tensor, labels: Tensor, num_items: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        if self.loss == "linear":
            return self.linear_loss(hidden, labels, num_items=num_items)
        logits = self.head(hidden)
        if self.loss == "logits":  # a DTensor with Shard(-1)
            return cross_entropy(logits, labels, reduction="sum", num_items=num_items)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / num_items


def cut(model: Model, mesh: Any) -> Model:
    """Cut the layers and the head over "tp", then every parameter over "dp"."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"query": columns, "key": columns, "value": columns, "out": rows, "up": columns, "down": rows}
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], plan)
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model.head, mesh["tp"], logits)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


def batch_of(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and labels, int64 [BATCH, LENGTH]. Most tokens follow from the one before; some are ignored."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    for position in range(LENGTH):
        known = torch.rand(BATCH, generator=generator) < 0.9
        ids[:, position + 1] = torch.where(known, (ids[:, position] * 7 + 3) % VOCABULARY, ids[:, position + 1])
    labels = ids[:, 1:].clone()
    labels[:2, : LENGTH // 2] = IGNORED  # the replicas have different numbers of labels
    return ids[:, :-1].to(device), labels.to(device)


def train(loss: str, steps: int, device: torch.device, mesh: Any = None) -> list[float]:
    """Return the mean loss per token of each step; with a ``mesh``, of a model that is cut over it."""
    torch.manual_seed(0)
    model = Model(loss).to(device)
    part, n_parts = 0, 1
    if mesh is not None:
        model = cut(model, mesh)
        part, n_parts = mesh.get_local_rank("dp"), mesh["dp"].size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(steps):
        ids, labels = batch_of(step, device)
        # FSDP averages over the replicas: the mean of sums / (all / replicas) is the sum of all / all.
        num_items = (labels != IGNORED).sum() / n_parts
        found = model(ids.chunk(n_parts)[part], labels.chunk(n_parts)[part], num_items)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = found.detach() / n_parts
        if mesh is not None:
            dist.all_reduce(mean, group=mesh.get_group("dp"))
        losses.append(float(mean))
    return losses


def compare(loss: str, steps: int, device: torch.device) -> tuple[list[float], list[float]]:
    """Return the curves of the model that is cut, and of the one that is not, of the same seed."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    return train(loss, steps, device, mesh), train("torch", steps, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=("logits", "linear"), default="logits")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--cpu", action="store_true")
    arguments = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= 4 and not arguments.cpu
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    cut_model, whole = compare(arguments.loss, arguments.steps, device)
    difference = max(abs(a - b) for a, b in zip(cut_model, whole, strict=True))
    if dist.get_rank() == 0:
        print(f"{device.type}: loss {cut_model[0]:.4f} -> {cut_model[-1]:.4f} on 2 x 2 ranks ({arguments.loss})")
        print(f"largest difference from the model that is not cut: {difference:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
