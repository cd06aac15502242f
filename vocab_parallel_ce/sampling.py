"""The threshold of each row below which a sampler has dropped logits, over the whole vocabulary.

    top_k   the k-th largest logit: the smallest t with fewer than k logits above it
    top_p   the largest t whose logits of at least t have the share top_p of the exponentials that top_k leaves

Both are found by bisection of the logits' bit patterns, which are ordered as the numbers are. A step counts, or sums,
in one read of the logits, and exchanges 4 or ``4 * K`` bytes per row: 17 steps of 16-bit logits, 33 of fp32. Memory is
per row. The sums are those of the statistics, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import all_gather_stats
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.options import Sampling
from vocab_parallel_ce.spec import INF, NEG_INF, is_ignored

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes


def fill_thresholds(sampling: Sampling, plan: Any, group: Any, logits: Tensor, beside: Labels) -> None:
    """Fill ``beside.threshold [N]``, the same on all ranks."""
    assert beside.threshold is not None
    search = _Search(plan, group, logits, beside)
    least = search.key_of(NEG_INF)
    k = sampling.top_k
    if k is not None:
        least = search.first(least, lambda key: search.n_larger(key) < k)
    if sampling.top_p < 1:
        enough = search.mass(least) * sampling.top_p
        least = search.first(least + 1, lambda key: search.mass(key) < enough) - 1
    beside.threshold.copy_(search.value_of(least))


class _Search:
    """Numbers of logits that are at least a key, which stands for a number of the logits' dtype."""

    def __init__(self, plan: Any, group: Any, logits: Tensor, beside: Labels) -> None:
        self.plan, self.group, self.logits = plan, group, logits
        self.n_rows, self.dtype = beside.labels.shape[0], logits.dtype
        # A label of nobody: a sum leaves none out. Ignored rows stay ignored.
        nobody = plan.shard.vocab_size + (plan.options.ignore_index == plan.shard.vocab_size)
        labels = beside.labels.long()
        nobodys = torch.where(is_ignored(labels, plan.options.ignore_index), labels, nobody)
        self.threshold = torch.empty_like(beside.threshold)  # type: ignore[arg-type]
        self.beside = Labels(nobodys, None, beside.temperature, self.threshold)
        width = plan.launchers.widths[0]
        self.stats = logits.new_empty(plan.n_ranks, self.n_rows, width, dtype=plan.dtype)
        self.counts = logits.new_empty(plan.n_ranks, self.n_rows, dtype=torch.int32)

    def key_of(self, value: float) -> Tensor:
        """Return ``[N]`` int64 keys of a number."""
        bits = torch.tensor(value, dtype=self.dtype, device="cpu").view(self._integer).long()
        bits = bits.new_full((self.n_rows,), int(bits), device=self.logits.device)
        return self._flipped(bits)

    def value_of(self, key: Tensor) -> Tensor:
        """Return ``[N]`` of the logits' dtype."""
        return self._flipped(key).to(self._integer).view(self.dtype)

    @property
    def _integer(self) -> torch.dtype:
        return INTEGERS[self.dtype.itemsize]

    def _flipped(self, bits: Tensor) -> Tensor:
        """Turn bits into keys, and keys into bits: those of negative numbers fall while the numbers rise."""
        return torch.where(bits < 0, bits ^ torch.iinfo(self._integer).max, bits)

    def first(self, low: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the first key from ``low`` on, at most one beyond that of infinity, for which ``holds``."""
        high = self.key_of(INF) + 1
        for _ in range(8 * self.dtype.itemsize + 1):
            middle = (low >> 1) + (high >> 1) + (low & high & 1)
            found = holds(middle)
            low, high = torch.where(found, low, torch.minimum(middle + 1, high)), torch.where(found, middle, high)
        return high

    def n_larger(self, key: Tensor) -> Tensor:
        """Return ``[N]``: how many logits are larger. Collectives: one all_gather of 4 bytes per row."""
        plan, x = self.plan, self.value_of(key).to(self.threshold.dtype)
        plan.launchers.count_larger(self.logits, x, self.counts[plan.rank])
        if plan.n_ranks > 1:
            all_gather_stats(self.counts, plan.rank, self.group)
        return self.counts.sum(dim=0)

    def mass(self, key: Tensor) -> Tensor:
        """Return ``[N]`` the sum of exp(z - the largest) of the logits that are not smaller; one all_gather."""
        plan = self.plan
        self.threshold.copy_(self.value_of(key))
        plan.launchers.statistics(self.logits, self.beside, (self.stats,), plan.rank)
        if plan.n_ranks > 1:
            all_gather_stats(self.stats, plan.rank, self.group)
        row_max, others = self.stats[..., 0], self.stats[..., 1]
        largest = row_max.amax(dim=0)
        return (others * (row_max - largest).exp()).nan_to_num(0.0).sum(dim=0)
