"""Refusals of thresholds, the most probable tokens, shards, and the labels of next tokens."""

import torch

from tests.refusals.rows import Row, Table, tensor
from tests.support.ranks.in_turn import in_turn
from vocab_parallel_ce import VocabShard, next_labels, sampling_threshold, top_k

LOGITS = torch.randn(4, 9)
OF_THRESHOLDS: list[Row] = [
    *tensor("logits", LOGITS, "list masked"),
    *tensor("temperature", torch.ones(4), "masked"),
    ({"logits": torch.tensor(1.0)}, ValueError, "logits: expected shape"),
    ({"top_p": 0.0}, ValueError, r"top_p: must be in \(0, 1\], got 0.0$"),
    ({"top_p": 1.1}, ValueError, r"top_p: must be in \(0, 1\], got 1.1$"),
    ({"top_k": -2}, ValueError, "top_k: must be at least 1, or None, 0 or -1 for all, got -2$"),
    ({"top_k": 2.0}, TypeError, "top_k: expected an int, got float"),
    ({"top_k": True}, TypeError, "top_k: expected an int, got bool"),
    ({"temperature": 0.0}, ValueError, "temperature: must be positive"),
    ({"temperature": torch.ones(3)}, ValueError, "temperature: expected 1 element"),
]
OF_TOP_K: list[Row] = [
    *tensor("logits", LOGITS, "list int64"),
    ({"k": 2.0}, TypeError, "k: expected an int"),
    ({"k": 0}, ValueError, "k: must be positive"),
    ({"k": 10}, ValueError, "k: must be at most the vocab_size 9, got 10"),
    ({"k": 9, "vocab_size": 8}, ValueError, "k: must be at most the vocab_size 8, got 9"),
    ({"temperature": 0.0}, ValueError, "temperature: must be positive"),
    ({"group": "data"}, TypeError, "group: expected"),
]
OF_SHARDS: list[Row] = [
    ({"vocab_size": 8.0}, TypeError, "vocab_size: expected an int, got float"),
    ({"rank": None}, TypeError, "rank: expected an int, got NoneType"),
    ({"n_ranks": "2"}, TypeError, "n_ranks: expected an int, got str"),
    ({"vocab_size": 0}, ValueError, "vocab_size: must be positive, got 0"),
    ({"rank": 2}, ValueError, "rank: must be in "),
    ({"rank": -1}, ValueError, "rank: must be in "),
    ({"n_ranks": 0}, ValueError, "rank: must be in "),
    ({"n_columns": 7, "n_ranks": 1}, ValueError, "logits: last dimension must be at least vocab_size 8 .* got 7"),
]
ROW, BOUNDS = torch.zeros(6).long(), torch.tensor([0, 6])
PACKED = {"cu_seqlens": BOUNDS}
OF_NEXT_LABELS: list[Row] = [
    ({"labels": ROW}, ValueError, r"labels: expected at least two dimensions.*\(6,\); pass cu_seqlens, or .*\[1, T\]$"),
    ({"labels": ROW[0]}, ValueError, r"labels: expected at least two dimensions.*got shape \(\)"),
    *tensor("labels", ROW, "int16 list masked"),
    *tensor("cu_seqlens", BOUNDS, "list float32 meta"),
    ({"labels": ROW.view(2, 3), **PACKED}, ValueError, r"labels: expected one row.*\(2, 3\)"),
    ({"labels": ROW[0], **PACKED}, ValueError, r"labels: expected one row.*\(\)"),
    ({"cu_seqlens": BOUNDS.view(1, 2)}, ValueError, r"cu_seqlens: expected shape \[n \+ 1\], got \(1, 2\)"),
    ({"cu_seqlens": BOUNDS[:0]}, ValueError, r"cu_seqlens: expected shape \[n \+ 1\], got \(0,\)"),
    ({"cu_seqlens": torch.arange(40)}, ValueError, r"cu_seqlens: .*, got \[0, 1, 2.* 15, ...\]$"),
    ({"ignore_index": None, **PACKED}, TypeError, "ignore_index: expected an int"),
    ({"layout": "ring", **PACKED}, ValueError, "layout: expected one of 'contiguous', 'zigzag', got"),
    ({"group": 3, **PACKED}, TypeError, "group: expected a torch.distributed.ProcessGroup"),
]
ROWS, ZIGZAG, CONTIGUOUS = {"labels": torch.zeros(2, 3).long()}, {"layout": "zigzag"}, {"layout": "contiguous"}
ALL_LABELS = "cu_seqlens: expected 12, the labels of all 2 ranks, also of padding, at the end, got "
PADDED = "cu_seqlens: expected sequences padded to a multiple of"
ON_RANKS: list[Row] = [
    ({"layout": None, **ROWS}, ValueError, "layout: expected 'contiguous' or 'zigzag' with .*2 ranks, got None"),
    ({"layout": None}, ValueError, "layout: expected 'contiguous'"),
    (ROWS | ZIGZAG, ValueError, r"labels: last dimension must be even with layout 'zigzag'.*\(2, 3\)"),
    ({"labels": ROW, **ZIGZAG}, ValueError, "labels: expected at least two dimensions"),
    ({"cu_seqlens": torch.tensor([0, 4, 10]), **ZIGZAG}, ValueError, rf"{PADDED} 4 tokens, got \[0, 4, 10\]"),
    ({"cu_seqlens": torch.tensor([0, 3]), **CONTIGUOUS}, ValueError, f"{PADDED} 2 tokens"),
    ({"cu_seqlens": torch.tensor([0, 16]), **ZIGZAG}, ValueError, rf"{ALL_LABELS}\[0, 16\]"),
    ({"cu_seqlens": torch.tensor([0, 2, 6]), **CONTIGUOUS}, ValueError, rf"{ALL_LABELS}\[0, 2, 6\]"),  # a rank's own
]


def on_ranks(**given):
    return in_turn(2, lambda rank, group: next_labels(**given, group=group))


TABLES = [
    Table("sampling_threshold", sampling_threshold, lambda: {"logits": LOGITS}, OF_THRESHOLDS),
    Table("top_k", top_k, lambda: {"logits": LOGITS, "k": 1}, OF_TOP_K),
    Table("VocabShard.for_rank", VocabShard.for_rank, lambda: {"vocab_size": 8, "rank": 0, "n_ranks": 2}, OF_SHARDS),
    Table("next_labels", next_labels, lambda: {"labels": ROW}, OF_NEXT_LABELS),
    Table("next_labels on ranks", on_ranks, lambda: {"labels": ROW}, ON_RANKS),
]
