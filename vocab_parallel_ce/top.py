"""Among the logits of the whole vocabulary: each token's largest, the label's rank, and a sampler's threshold.

Each rank finds the ``k`` largest z of its columns. They travel in the all_gather of the statistics:

    own statistics [N, K], z [N, k] fp32, ids [N, k] int32 -- packed, all_gather --> the same of every rank

The largest ``k`` of the ``R * k`` are those of the vocabulary. A rank is counted afterwards: how many logits are larger
than the label's. That is a second read of the logits and a second exchange, of 4 bytes per token. With a softcap, scale
or temperature the statistics have z of the label and not its logit, which travels alongside them: 4 bytes.

A sampler has dropped the logits of a row below a threshold:

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

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import spec
from vocab_parallel_ce.beside import at_rows
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_reduce
from vocab_parallel_ce.losses.base import Launchers
from vocab_parallel_ce.losses.labels import Labels
from vocab_parallel_ce.options import Sampling
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import INF, NEG_INF, LossOptions, is_ignored

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of as many bytes
N_BITS = 3  # that a step finds: an H100 compares with 7 thresholds while it reads
LONGEST = (1 << 64 - N_BITS) - 1  # segment: a difference of 64-bit keys has no sign
N_GROUPS = 512  # of a rank's columns


class Top:
    """What one call finds alongside its statistics; rows are those of the statistics."""

    def __init__(self, k: int | None, wants_rank: bool) -> None:
        self.k, self.wants_rank = k, wants_rank
        self.largest: list[tuple[Tensor, Tensor]] = []  # of each chunk of rows: z [n, k] and ids [n, k] int32
        self.z: Tensor | None = None  # [N, k] fp32, of the vocabulary
        self.ids: Tensor | None = None  # [N, k] int64
        self.rank: Tensor | None = None  # [N] int32
        self.label_x: list[Tensor] = []  # of each chunk of rows [n], or of all; none where z is the logit

    def run(self, plan: Any, group: object, logits: Tensor, beside: Any, stats: Tensor) -> None:
        """Find all of a call over logits; fills ``stats [R, N, K]`` from all ranks. ``beside`` has the labels."""
        self.collect(logits, beside.labels, plan.shard, at_rows(plan.options, beside.temperature))
        self.gather(stats, plan.rank, group)
        if self.wants_rank:
            self.add_counts(self.count(plan.launchers, logits, stats), plan.n_ranks, group)

    def collect(self, logits: Tensor, labels: Tensor, shard: VocabShard, options: LossOptions) -> None:
        """Find the largest of this rank's columns of ``logits [..., C]``, the next rows, and the labels' logits."""
        rows = _valid_rows(logits, shard)
        if self.wants_rank and (options.softcap, options.logit_scale, options.temperature) != (None, 1.0, None):
            own = labels.long() - shard.start
            owned = (own >= 0) & (own < shard.n_valid)
            label_x = rows.new_zeros(rows.shape[0], dtype=torch.promote_types(rows.dtype, torch.float32))
            if shard.n_valid:
                label_x += rows.gather(-1, own.clamp(0, shard.n_valid - 1).unsqueeze(-1)).squeeze(-1).where(owned, 0.0)
            self.label_x.append(label_x)
        if self.k is None:
            return
        x, column = rows.topk(min(self.k, shard.n_valid), dim=-1)
        z, _ = spec.transformed(x, options)
        missing = (0, self.k - x.shape[-1])
        ids = F.pad((column + shard.start).int(), missing, value=-1)
        self.largest.append((F.pad(z, missing, value=NEG_INF), ids))

    def gather(self, stats: Tensor, rank: int, group: object) -> None:
        """Exchange ``stats [R, N, K]`` and what was collected, in one all_gather."""
        n_ranks, k = stats.shape[0], self.k or 0
        nothing = (stats.new_empty(0, k), stats.new_empty(0, k, dtype=torch.int32))
        z, ids = (torch.cat(parts) for parts in zip(*self.largest, strict=True)) if self.largest else nothing
        label_x = torch.cat(self.label_x) if self.label_x else stats.new_empty(0)
        if n_ranks > 1:
            own = [stats[rank], label_x, z, ids]
            words = [part.flatten().view(torch.int32) for part in own]
            packed = ids.new_empty(n_ranks, sum(map(len, words)))
            packed[rank] = torch.cat(words)
            all_gather_stats(packed, rank, group)
            of_ranks = (part.flatten() for part in packed.split(list(map(len, words)), dim=1))
            every = [part.view(like.dtype).view(n_ranks, *like.shape) for part, like in zip(of_ranks, own, strict=True)]
            stats.copy_(every[0])
            label_x = every[1].sum(dim=0)  # one rank has it, the others 0
            z, ids = (part.transpose(0, 1).flatten(1) for part in every[2:])
        if self.label_x:
            self.label_x = [label_x]
        if self.k is not None:
            self.z, place = z.topk(self.k, dim=-1)
            self.ids = ids.gather(-1, place).long()

    def count(self, launchers: Launchers, logits: Tensor, stats: Tensor, first: int = 0) -> Tensor:
        """Return ``[n]`` int32: how many logits of this rank are larger than the label's, in rows from ``first`` on.

        ``stats [R, n, K]`` are exchanged already.
        """
        counts = torch.empty_like(stats[0, :, 0], dtype=torch.int32)
        label_x = self.label_x[0][first : first + len(counts)] if self.label_x else stats[:, :, 2].amax(dim=0)
        assert launchers.count_larger is not None
        launchers.count_larger(logits, label_x, counts)
        return counts

    def add_counts(self, counts: Tensor, n_ranks: int, group: object) -> None:
        """Make the label's rank of the counts ``[N]`` of all ranks."""
        if n_ranks > 1 and counts.numel():
            begin_all_reduce(counts, group).wait()
        self.rank = counts

    def reorder(self, to_tokens: Callable[[Tensor, float], Tensor]) -> None:
        """Put what was found of rows into the order of tokens."""
        if self.z is not None and self.ids is not None:
            self.z, self.ids = to_tokens(self.z, NEG_INF), to_tokens(self.ids, -1)
        self.rank = None if self.rank is None else to_tokens(self.rank, -1)

    def results(self, lse: Tensor, is_ignored: Tensor) -> dict[str, Tensor]:
        """Return what was asked for, for tokens ``[...]``. Without a number, rank and ids are -1.

        ``lse`` is NaN or infinite in rows that have none.
        """
        found, shape, lse = {}, lse.shape, lse.detach()
        is_known = lse.isfinite() & ~is_ignored
        if self.rank is not None:
            found["rank"] = self.rank.view(shape).long().masked_fill_(~is_known, -1)
        if self.z is not None and self.ids is not None:
            log_probs = self.z.view(*shape, self.z.shape[-1]) - lse.unsqueeze(-1)
            found["top_log_probs"] = log_probs.masked_fill(is_ignored.unsqueeze(-1), 0.0)
            has_id = is_known.unsqueeze(-1) & log_probs.isfinite()
            found["top_ids"] = torch.where(has_id, self.ids.view(log_probs.shape), -1)
        return found


def _valid_rows(logits: Tensor, shard: VocabShard) -> Tensor:
    return logits.detach().reshape(-1, logits.shape[-1])[:, : shard.n_valid]


def fill_thresholds(sampling: Sampling, plan: Any, group: Any, logits: Tensor, beside: Labels) -> None:
    """Fill ``beside.threshold [N]``, the same on all ranks."""
    assert beside.threshold is not None
    search = _Search(plan, group, logits, beside, sampling.top_k)
    if sampling.top_k is not None:
        search.narrow(top_k=sampling.top_k)
    if sampling.top_p < 1:
        search.narrow(top_p=sampling.top_p)
    beside.threshold.copy_(search.value_of(search.least))


class _Search:
    """Searches for ``least [N]``, among keys, which stand for numbers of the logits' dtype."""

    def __init__(self, plan: Any, group: Any, logits: Tensor, beside: Labels, top_k: int | None) -> None:
        self.plan, self.group, self.logits, self.beside = plan, group, logits, beside
        self.dtype, self.integer = logits.dtype, INTEGERS[logits.itemsize]
        self.lowest = self.key_of(NEG_INF)
        self.n_keys = self.key_of(INF) - self.lowest + 1
        low, high = self._bounds(top_k)
        of_rows = at_rows(plan.options, beside.temperature)
        self.row_max = spec.transformed(high.unsqueeze(-1), of_rows)[0].squeeze(-1)
        self.largest = self.keys_of(high)
        self.least = torch.minimum(self.keys_of(low), self.largest)
        # Ignored rows have nothing to search in.
        self.largest = torch.where(is_ignored(beside.labels, plan.options.ignore_index), self.least, self.largest)

    def _bounds(self, top_k: int | None) -> tuple[Tensor, Tensor]:
        """Return ``[N]`` a number that ``top_k`` logits reach, and the largest logit; infinity for NaN.

        Collectives: an all_gather of 8 bytes per row.
        """
        plan, beside = self.plan, self.beside
        x = self.logits[..., : plan.shard.n_valid]
        n_columns = x.shape[-1] // N_GROUPS * N_GROUPS
        largest = x[..., n_columns:]
        if n_columns:
            of_groups = x[..., :n_columns].unflatten(-1, (-1, N_GROUPS)).amax(dim=-2)
            largest = torch.cat([of_groups, largest], dim=-1)
        largest = largest.reshape(len(beside.labels), largest.shape[-1])
        assert beside.threshold is not None
        bounds = beside.threshold.new_full((plan.n_ranks, 2, len(largest)), NEG_INF)
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
        plan, beside = self.plan, self.beside
        thresholds = self.value_of(keys).to(self.row_max.dtype)
        dtype = torch.int32 if row_max is None else thresholds.dtype
        sums = thresholds.new_empty(plan.n_ranks, *keys.shape, dtype=dtype)
        plan.launchers.sums_above(self.logits, thresholds, row_max, beside.temperature, sums[plan.rank])
        if plan.n_ranks == 1:
            return sums[0]
        all_gather_stats(sums, plan.rank, self.group)
        return sums.sum(dim=0)
