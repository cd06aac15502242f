"""A small decoder-only language model whose vocabulary is sharded over the ranks of a group.

One weight serves as embedding and as head (tied): a small model spends most of its parameters there, and the shard
then receives gradient from both of its uses. Rank r of R owns its rows `[r * V/R, (r + 1) * V/R)`. Everything between
is replicated: all ranks see the same tokens, and the two all_reduces below give all of them the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel_ce import copy_to_ranks


@dataclass(frozen=True)
class Settings:
    """The model and its training."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    sequence_length: int
    batch_size: int
    steps: int
    learning_rate: float

    @property
    def initial_std(self) -> float:
        """Gives the first logits a standard deviation of about 0.5: their inputs are normalised."""
        return 0.5 * self.width**-0.5

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.sequence_length


class _SumOverRanks(torch.autograd.Function):
    """Forward: all_reduce. Backward: identity, as every rank holds the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Vocabulary(nn.Module):
    """Token embedding and output head over one `[V/R, D]` shard; `group=None`: all of it."""

    def __init__(self, settings: Settings, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        ranks = 1 if group is None else dist.get_world_size(group)
        if settings.vocab_size % ranks:
            raise ValueError(f"world size: expected a divisor of the vocabulary {settings.vocab_size}, got {ranks}")
        self.group = group
        self.columns = settings.vocab_size // ranks
        self.start = 0 if group is None else dist.get_rank(group) * self.columns
        # Every rank draws the whole weight: its shard is a slice of what a single rank would hold.
        whole = torch.randn(settings.vocab_size, settings.width) * settings.initial_std
        self.weight = nn.Parameter(whole[self.start : self.start + self.columns].clone())

    def embed(self, ids: Tensor) -> Tensor:
        if self.group is None:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.columns)
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere[..., None], 0.0)
        return _SumOverRanks.apply(rows, self.group)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(copy_to_ranks(hidden, self.group), self.weight)


class Block(nn.Module):
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.heads, self.attention_norm = settings.heads, nn.RMSNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        for linear in (self.query_key_value, self.mlp_in, self.attention_out, self.mlp_out):
            nn.init.normal_(linear.weight, std=settings.initial_std)
        # Each layer adds two terms to the residual stream; this keeps their sum's size at any depth.
        for linear in (self.attention_out, self.mlp_out):
            linear.weight.data.mul_(1 / math.sqrt(2 * settings.layers))

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        projected = self.query_key_value(self.attention_norm(hidden))
        query, key, value = projected.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(_rotate(query, rotation), _rotate(key, rotation), value, is_causal=True)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        return hidden + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(hidden))))


def _rotate(vectors: Tensor, rotation: Tensor) -> Tensor:
    """Rotary position embedding; `rotation` is `[2, T, head width / 2]`, cosines and sines."""
    cosine, sine = rotation[:, : vectors.shape[-2]]
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class LanguageModel(nn.Module):
    """Token ids `[B, T]` to this rank's logits `[B, T, V/R]`.

    Collectives: one all_reduce of `[B, T, D]` in forward and one in backward; none without a group.
    """

    rotation: Tensor

    def __init__(self, settings: Settings, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.vocabulary = Vocabulary(settings, group)
        self.blocks = nn.ModuleList(Block(settings) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width)
        pairs = settings.width // settings.heads // 2
        angles = torch.outer(torch.arange(settings.sequence_length), 10000.0 ** (-torch.arange(pairs) / pairs))
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.vocabulary.logits(self.hidden(ids))

    def hidden(self, ids: Tensor) -> Tensor:
        """The head's input, `[B, T, D]`, the same on all ranks. Its gradient must come summed over them."""
        hidden = self.vocabulary.embed(ids)
        for block in self.blocks:
            hidden = block(hidden, self.rotation)
        return self.norm(hidden)

    @torch.no_grad()
    def clip_gradient(self, max_norm: float) -> None:
        """Scale the gradient so that its norm over all ranks' parameters is at most `max_norm`."""
        shard = self.vocabulary.weight
        assert shard.grad is not None
        square = shard.grad.square().sum()
        if self.vocabulary.group is not None:
            dist.all_reduce(square, group=self.vocabulary.group)
        gradients = [p.grad for p in self.parameters() if p.grad is not None and p is not shard]
        for gradient in gradients:
            square += gradient.square().sum()
        scale = (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        for gradient in (shard.grad, *gradients):
            gradient.mul_(scale)
