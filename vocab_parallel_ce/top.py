"""The largest logits of each token over the whole vocabulary, and the label's rank among all logits.

Each rank finds the ``k`` largest z of its columns. They travel in the all_gather of the statistics:

    own statistics [N, K], z [N, k] fp32, ids [N, k] int32 -- packed, all_gather --> the same of every rank

The largest ``k`` of the ``R * k`` are those of the vocabulary. A rank is counted afterwards: how many logits are larger
than the label's. That is a second read of the logits and a second exchange, of 4 bytes per token. With a softcap, scale
or temperature the statistics have z of the label and not its logit, which travels alongside them: 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import spec
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_reduce
from vocab_parallel_ce.losses.base import Launchers
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions
from vocab_parallel_ce.spec_outputs import at_rows


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
        self.largest.append((F.pad(z, missing, value=spec.NEG_INF), ids))

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
            self.z, self.ids = to_tokens(self.z, spec.NEG_INF), to_tokens(self.ids, -1)
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
