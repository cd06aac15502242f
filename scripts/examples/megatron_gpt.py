"""Trains a small GPTModel of Megatron-Core with tensor parallelism: Megatron's own loss alongside this package's.

    torchrun --nproc-per-node 2 scripts/examples/megatron_gpt.py --steps 20

Megatron-Core needs GPUs. ``install(linear=True)`` is the only line that this package asks for.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from vocab_parallel_ce.integrations import megatron

SMALL = {"columns": 512, "width": 64, "heads": 4, "length": 64}


def build(*, columns: int, width: int, heads: int, length: int, layers: int = 2, **options: Any) -> Any:
    """Return a GPTModel in bf16, built from Megatron's local modules."""
    torch.manual_seed(0)
    if not options.get("use_cpu_initialization"):
        model_parallel_cuda_manual_seed(0)  # every model begins alike
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        params_dtype=torch.bfloat16,
        bf16=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **options,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), columns, length, position_embedding_type="rope")
    return model.bfloat16().to(model.embedding.word_embeddings.weight.device).train()  # norms are made on the CPU


def batch(columns: int, shape: tuple[int, int], device: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return tokens that repeat with a period of 7, so that there is something to learn, and a mask of every fourth."""
    generator = torch.Generator().manual_seed(seed)
    rows, length = shape
    period = torch.randint(columns, (rows, 7), generator=generator)
    tokens = period.repeat(1, length // 7 + 2)[:, : length + 1]
    made = {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(length).expand(rows, -1),
        "attention_mask": torch.ones(1, 1, length, length).triu(1).bool(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.arange(length) % 4 > 0).float().expand(rows, -1).contiguous(),
    }
    return {name: value.to(device) for name, value in made.items()}


def loss_of(model: Any, inputs: dict[str, torch.Tensor], mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the losses that the mask leaves, as Megatron's training script does."""
    losses = model(**inputs)
    return (losses.float() * mask).sum() / mask.sum()


def train(steps: int, device: Any, shape: dict[str, Any], **options: Any) -> list[float]:
    """Return the loss of each step."""
    model = build(**shape, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        inputs = batch(shape["columns"], (4, shape["length"]), device, step % 4)
        loss = loss_of(model, inputs, inputs["loss_mask"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(steps: int, device: Any, shape: dict[str, Any] = SMALL, **options: Any) -> dict[str, list[float]]:
    """Return the curves of Megatron's loss, of this package's over logits, and of its linear loss."""
    ways: dict[str, Any] = {
        "native": nullcontext(),
        "logits": megatron.installed(),
        "linear": megatron.installed(linear=True),
    }
    curves = {}
    for name, way in ways.items():
        with way:
            curves[name] = train(steps, device, shape, **options)
    return curves


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    words = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("Megatron-Core needs GPUs")
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(dist.get_world_size())
    for name, losses in compare(words.steps, device).items():
        if dist.get_rank() == 0:
            print(f"{name:7}", *(f"{loss:.4f}" for loss in losses), flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
