"""Measures a head that FSDP2 cut, whose ranks have tokens of their own: gathered, or used as a vocabulary shard.

    torchrun --nproc-per-node 2 scripts/bench_fsdp.py --json results.json

Forward and backward of a layer and a head, weights in fp32 that FSDP multiplies in bf16, gradients reduced in fp32. The
head is a unit of its own. The providers take turns in every round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_lib.clock import Ranks, joined_ranks
from bench_lib.documents import Result, new_document, parser_of, run
from bench_lib.measure import measured
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from vocab_parallel_ce import HeadOptions, linear_cross_entropy

SHAPE = {"columns": 128256, "width": 4096}
TOKENS = (2048, 8192, 16384)  # of each rank
OWN = "linear, own tokens"
PROVIDERS = ("FSDP2 gathers, PyTorch", "FSDP2 gathers, linear", OWN)


class Head(nn.Linear):
    makes_logits = False

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the loss of hidden states and labels: inside, FSDP has gathered the weight."""
        hidden, labels = inputs
        if self.makes_logits:
            return F.cross_entropy(F.linear(hidden, self.weight).float(), labels)
        return linear_cross_entropy(hidden, self.weight, labels)


class Model(nn.Module):
    def __init__(self, columns: int, width: int, mesh: Any) -> None:
        super().__init__()
        self.mesh, self.provider = mesh, PROVIDERS[0]
        self.body, self.lm_head = nn.Linear(width, width, bias=False), Head(width, columns, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        hidden = self.body(hidden)
        if self.provider != OWN:
            self.lm_head.makes_logits = self.provider == PROVIDERS[0]
            loss: Tensor = self.lm_head(hidden, labels)
            return loss
        options = HeadOptions(own_tokens=True, max_tokens=len(labels))
        return linear_cross_entropy(hidden, self.lm_head.weight, labels, group=self.mesh, options=options)


@contextlib.contextmanager
def provided(name: str, model: Model) -> Iterator[None]:
    model.provider = name
    yield


def measure(model: Model, tokens: int, ranks: Ranks, rounds: int) -> list[Result]:
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    hidden = torch.randn(tokens, SHAPE["width"], device=ranks.device, dtype=torch.bfloat16, generator=generator)
    labels = torch.randint(0, SHAPE["columns"], (tokens,), device=ranks.device, generator=generator)

    def step() -> Tensor:
        loss: Tensor = model(hidden, labels)
        loss.backward()
        return loss.detach()

    forget = partial(model.zero_grad, set_to_none=True)
    return measured(
        f"{tokens} tokens a rank", {n: partial(provided, n, model) for n in PROVIDERS}, step, forget, ranks, rounds
    )


def main() -> None:
    words = parser_of(__doc__).parse_args()
    with joined_ranks() as ranks:
        if ranks.group is None:
            torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(ranks.device, (ranks.size,))
        torch.manual_seed(0)
        with torch.device(ranks.device):
            model = Model(**SHAPE, mesh=mesh)
        for module in (model.lm_head, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        document = new_document("fsdp", words.rounds) | {"shape": SHAPE}
        run(document, list(TOKENS), lambda tokens: measure(model, tokens, ranks, words.rounds), ranks, words.json)


if __name__ == "__main__":
    main()
