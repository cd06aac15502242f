"""The largest logits of each token over the whole vocabulary, and the label's rank among all logits.

Each rank finds the ``k`` largest z of its columns. They travel in the all_gather of the statistics:

    own statistics [N, K], z [N, k] fp32, ids [N, k] int32 -- packed, all_gather --> the same of every rank

The largest ``k`` of the ``R * k`` are those of the vocabulary. A rank is counted afterwards: how many z are larger than
the label's, which the statistics have. That is a second read of the logits and a second exchange, of 8 bytes per token;
with a softcap also one of z of the labels, 4 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import spec
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_reduce
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions

CHUNK_BYTES = 64 * 2**20  # of fp32 logits that are counted at a time


class Top:
    """What one call finds beside its statistics; rows are those of the statistics."""

    def __init__(self, k: int | None, wants_rank: bool) -> None:
        self.k, self.wants_rank = k, wants_rank
        self.largest: list[tuple[Tensor, Tensor]] = []  # of each chunk of rows: z [n, k] and ids [n, k] int32
        self.z: Tensor | None = None  # [N, k] fp32, of the vocabulary
        self.ids: Tensor | None = None  # [N, k] int64
        self.rank: Tensor | None = None  # [N] int64
        self.label_z: list[Tensor] = []  # of each chunk of rows [n], or of all; of capped logits alone

    def collect(self, logits: Tensor, labels: Tensor, shard: VocabShard, options: LossOptions) -> None:
        """Find the largest of this rank's columns of ``logits [..., C]``, the next rows, and z of the labels."""
        rows = _valid_rows(logits, shard)
        if self.wants_rank and options.softcap is not None:
            # A kernel's tanh is another than PyTorch's, which the other columns have: equal logits would differ.
            own = labels.long() - shard.start
            owned = (own >= 0) & (own < shard.n_valid)
            at_label = F.pad(rows, (0, 1)).gather(-1, own.where(owned, shard.n_valid).unsqueeze(-1))
            self.label_z.append(spec.transformed(at_label, options)[0].squeeze(-1).where(owned, 0.0))
        if self.k is None:
            return
        x, column = rows.topk(min(self.k, shard.n_valid), dim=-1)
        z, _ = spec.transformed(x, options)
        missing = (0, self.k - x.shape[-1])
        ids = F.pad((column + shard.start).int(), missing, value=-1)
        self.largest.append((F.pad(z, missing, value=spec.NEG_INF), ids))

    def gather(self, stats: Tensor, rank: int, group: object) -> None:
        """Exchange ``stats [R, N, K]`` and what was collected, in one all_gather; z of labels in an all_reduce."""
        if self.label_z:
            label_z = torch.cat(self.label_z)
            if stats.shape[0] > 1 and label_z.numel():
                begin_all_reduce(label_z, group).wait()  # one rank has it, the others 0
            self.label_z = [label_z]
        if self.k is None:
            return all_gather_stats(stats, rank, group)
        n_ranks, n_rows, n_stats = stats.shape
        nothing = stats.new_empty(0, self.k)
        z, ids = (torch.cat(parts) for parts in zip((nothing, nothing.int()), *self.largest, strict=True))
        if n_ranks > 1:
            width = stats.element_size() // ids.element_size()
            sizes = [n_rows * n for n in (n_stats * width, self.k * width, self.k)]
            packed = ids.new_empty(n_ranks, sum(sizes))
            packed[rank] = torch.cat([part.flatten().view(torch.int32) for part in (stats[rank], z, ids)])
            all_gather_stats(packed, rank, group)
            of_stats, of_z, of_ids = (part.contiguous() for part in packed.split(sizes, dim=1))
            stats.copy_(of_stats.view(stats.dtype).view(stats.shape))
            others = of_z.view(stats.dtype), of_ids
            z, ids = (part.view(n_ranks, n_rows, self.k).transpose(0, 1).flatten(1) for part in others)
        self.z, place = z.topk(self.k, dim=-1)
        self.ids = ids.gather(-1, place).long()

    def count(
        self, logits: Tensor, labels: Tensor, stats: Tensor, shard: VocabShard, options: LossOptions, first: int = 0
    ) -> Tensor:
        """Return ``[n]``, how many z of this rank are larger than the label's, in the ``n`` rows from ``first`` on.

        ``stats [R, n, K]`` are exchanged already.
        """
        rows, column = _valid_rows(logits, shard), torch.arange(shard.n_valid, device=labels.device)
        of_rows = slice(first, first + labels.shape[0])
        label_z = self.label_z[0][of_rows] if self.label_z else stats[:, :, 2].amax(dim=0)
        label_z, own = label_z.unsqueeze(-1), (labels.long() - shard.start).unsqueeze(-1)
        counts = torch.zeros_like(labels, dtype=torch.int64)
        t = options.temperature
        step = max(1, CHUNK_BYTES // (4 * shard.n_columns))
        for chunk in (slice(begin, begin + step) for begin in range(0, labels.shape[0], step)):
            # The label's own z may be rounded otherwise here than in the statistics.
            of_chunk = options if t is None else options._replace(temperature=t[chunk])
            is_larger = (spec.transformed(rows[chunk], of_chunk)[0] > label_z[chunk]) & (column != own[chunk])
            counts[chunk] = is_larger.sum(dim=-1)
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
            found["rank"] = torch.where(is_known, self.rank.view(shape), -1)
        if self.z is not None and self.ids is not None:
            log_probs = self.z.view(*shape, self.z.shape[-1]) - lse.unsqueeze(-1)
            found["top_log_probs"] = log_probs.masked_fill(is_ignored.unsqueeze(-1), 0.0)
            has_id = is_known.unsqueeze(-1) & log_probs.isfinite()
            found["top_ids"] = torch.where(has_id, self.ids.view(log_probs.shape), -1)
        return found


def _valid_rows(logits: Tensor, shard: VocabShard) -> Tensor:
    return logits.detach().reshape(-1, logits.shape[-1])[:, : shard.n_valid]
