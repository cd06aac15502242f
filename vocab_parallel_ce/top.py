"""The threshold of each row below which a sampler has dropped logits.

    top_k   the k-th largest logit: the smallest t with fewer than k logits above it
    top_p   the largest t whose logits of at least t have the share top_p of the exponentials that top_k leaves:
            the smallest one whose logits above it have less

Both are one search, among the logits' bit patterns, which are ordered as the numbers are. It begins with the largest
logit, and for top_k with a number that k logits reach: each rank's share of k, among the largest logits of groups of
its columns. A step takes 7 thresholds per row, counts or sums above all of them in one read of the logits, exchanges
28 bytes per row, and leaves an 8th of the range: 6 steps of 16-bit logits, 11 of fp32. A row whose range is one number
is read no more, and most are after 3 steps of 16-bit logits. Memory is per row. The sums are fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import spec
from vocab_parallel_ce.collectives import all_gather_stats
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.options import Sampling
from vocab_parallel_ce.spec import INF, NEG_INF, is_ignored
from vocab_parallel_ce.targets import at_rows

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes
N_BITS = 3  # that a step finds: an H100 compares with 7 thresholds while it reads
LONGEST = (1 << 64 - N_BITS) - 1  # segment: a difference of 64-bit keys has no sign
N_GROUPS = 512  # of a rank's columns


def fill_thresholds(sampling: Sampling, plan: Any, group: Any, logits: Tensor, targets: Labels) -> None:
    """Fill ``targets.threshold [N]``, the same on all ranks."""
    assert targets.threshold is not None
    search = _Search(plan, group, logits, targets, sampling.top_k)
    if sampling.top_k is not None:
        search.narrow(top_k=sampling.top_k)
    if sampling.top_p < 1:
        search.narrow(top_p=sampling.top_p)
    targets.threshold.copy_(search.value_of(search.least))


class _Search:
    """Searches for ``least [N]``, among keys, which stand for numbers of the logits' dtype."""

    def __init__(self, plan: Any, group: Any, logits: Tensor, targets: Labels, top_k: int | None) -> None:
        self.plan, self.group, self.logits, self.targets = plan, group, logits, targets
        self.dtype, self.integer = logits.dtype, INTEGERS[logits.itemsize]
        self.lowest = self.key_of(NEG_INF)
        self.n_keys = self.key_of(INF) - self.lowest + 1
        low, high = self._bounds(top_k)
        of_rows = at_rows(plan.options, targets.temperature)
        self.row_max = spec.transformed(high.unsqueeze(-1), of_rows)[0].squeeze(-1)
        self.largest = self.keys_of(high)
        self.least = torch.minimum(self.keys_of(low), self.largest)
        # Ignored rows have nothing to search in.
        self.largest = torch.where(is_ignored(targets.labels, plan.options.ignore_index), self.least, self.largest)

    def _bounds(self, top_k: int | None) -> tuple[Tensor, Tensor]:
        """Return ``[N]`` a number that ``top_k`` logits reach, and the largest logit; infinity for NaN.

        Collectives: an all_gather of 8 bytes per row.
        """
        plan, targets = self.plan, self.targets
        x = self.logits[..., : plan.shard.n_valid]
        n_columns = x.shape[-1] // N_GROUPS * N_GROUPS
        largest = x[..., n_columns:]
        if n_columns:
            of_groups = x[..., :n_columns].unflatten(-1, (-1, N_GROUPS)).amax(dim=-2)
            largest = torch.cat([of_groups, largest], dim=-1)
        largest = largest.reshape(len(targets.labels), largest.shape[-1])
        assert targets.threshold is not None
        bounds = targets.threshold.new_full((plan.n_ranks, 2, len(largest)), NEG_INF)
        own = bounds[plan.rank]
        n_of_rank = 0 if top_k is None else -(-top_k // plan.n_ranks)
        if 0 < n_of_rank <= largest.shape[-1]:
            own[0] = largest.topk(n_of_rank, dim=-1, sorted=False).values.amin(dim=-1)
        if largest.shape[-1]:
            own[1] = largest.amax(dim=-1)
        own.nan_to_num_(nan=INF, posinf=INF, neginf=NEG_INF)
        if plan.n_ranks > 1:
            all_gather_stats(bounds, plan.rank, self.group)
        return bounds[:, 0].amin(dim=0), bounds[:, 1].amax(dim=0)

    def key_of(self, value: float) -> int:
        """Return the key of a number."""
        return int(self.keys_of(torch.tensor(value, device="cpu")))

    def keys_of(self, values: Tensor) -> Tensor:
        """Return int64 keys of numbers that the logits' dtype has: the bits, below 0 the negative ones of the positive.

        So zeros of both signs have one key.
        """
        bits = values.to(self.dtype).view(self.integer).long()
        return torch.where(bits < 0, (bits ^ torch.iinfo(self.integer).max) + 1, bits)

    def value_of(self, keys: Tensor) -> Tensor:
        """Return numbers of the logits' dtype."""
        bits = torch.where(keys < 0, (keys - 1) ^ torch.iinfo(self.integer).max, keys)
        return bits.to(self.integer).view(self.dtype)

    def narrow(self, *, top_k: int | None = None, top_p: float = 1.0) -> None:
        """Raise ``least`` to the first key that has fewer logits above it than ``top_k``, or less than ``top_p``.

        Collectives: an all_gather per step.
        """
        below, high, n_keys = self.least[:, None] - 1, self.largest[:, None], self.n_keys
        bound: Tensor | int | None = top_k
        row_max = self.row_max if top_k is None else None
        ends = torch.arange(1, 1 << N_BITS, device=below.device)
        while n_keys > 1:
            # The last keys of 2 ** N_BITS segments, except the last one's.
            step = ((high - below + len(ends)) >> N_BITS) & LONGEST
            keys, is_first = torch.addcmul(below, step, ends).minimum(high), bound is None
            if is_first:  # all that is left; the first segment becomes twice as long
                keys[:, :1] = below.clamp(min=self.lowest)
            sums = self._sums_above(keys, row_max)
            if is_first:
                bound = sums[:, :1] * top_p
            assert bound is not None
            holds = sums < bound
            below = torch.where(holds, below, keys).amax(dim=-1, keepdim=True)
            high = torch.where(holds, keys, high).amin(dim=-1, keepdim=True)
            n_keys = -(-n_keys >> N_BITS) * (1 + is_first)
        self.least = high.squeeze(-1)

    def _sums_above(self, keys: Tensor, row_max: Tensor | None) -> Tensor:
        """Return ``[N, T]`` sums above keys ``[N, T]``, or counts; 0 or the same for rows whose keys are equal."""
        plan, targets = self.plan, self.targets
        thresholds = self.value_of(keys).to(self.row_max.dtype)
        dtype = torch.int32 if row_max is None else thresholds.dtype
        sums = thresholds.new_empty(plan.n_ranks, *keys.shape, dtype=dtype)
        plan.launchers.sums_above(self.logits, thresholds, row_max, targets.temperature, sums[plan.rank])
        if plan.n_ranks == 1:
            return sums[0]
        all_gather_stats(sums, plan.rank, self.group)
        return sums.sum(dim=0)
