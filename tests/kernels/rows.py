"""Rows that kernels walk, and the shard of one rank."""

from torch import Tensor

from tests.support.cases.layouts import Layout, logits_layouts
from vocab_parallel_ce.shard import VocabShard

COPIED = ("every other column", "column-major")  # layouts that no kernel walks


def whole(logits: Tensor) -> VocabShard:
    """The shard of one rank."""
    return VocabShard(0, logits.shape[-1], logits.shape[-1])


def walked_layouts(columns: int, *, disjoint: bool = False, device: str = "cpu") -> list[Layout]:
    """``logits_layouts`` that kernels walk, and, if ``disjoint``, may write."""
    layouts = [layout for layout in logits_layouts(columns, device=device) if layout.name not in COPIED]
    return [layout for layout in layouts if not (disjoint and layout.shares_elements)]
