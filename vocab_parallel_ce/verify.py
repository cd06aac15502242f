"""A debugging check of what one rank alone cannot see: that the ranks of a group fit together."""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import outside_graphs, vocab_parallel_cross_entropy
from vocab_parallel_ce.exchange import all_gather_objects, group_position
from vocab_parallel_ce.log_probs import token_log_probs
from vocab_parallel_ce.pipeline import shard_of_logits
from vocab_parallel_ce.shard import VocabShard

OPTIONS = {
    name
    for function in (vocab_parallel_cross_entropy, token_log_probs)
    for name in inspect.signature(function).parameters
}
USER_ERRORS = {"TypeError": TypeError, "ValueError": ValueError}


class _Fact(NamedTuple):
    """Something that must be the same on all ranks, and how a message shows it."""

    subject: str
    value: Hashable
    shown: str


class _Report(NamedTuple):
    """What a rank whose own arguments are valid tells the others."""

    facts: tuple[_Fact, ...]
    shard: VocabShard
    labels_digest: str


class _Refusal(NamedTuple):
    """What a rank tells the others whose own arguments are not."""

    error_type: str
    message: str


class _Difference(NamedTuple):
    """Rank ``odd`` differs from most, of which ``usual`` is the first."""

    odd: int
    usual: int
    n_odd: int
    n_ranks: int

    @classmethod
    def between(cls, values: Sequence[Hashable]) -> _Difference | None:
        """The first rank that differs from most; where there is a tie, from the side of the lowest rank."""
        counts = Counter(values)
        most = max(values, key=counts.__getitem__)
        odd = [rank for rank, value in enumerate(values) if value != most]
        return cls(odd[0], values.index(most), len(odd), len(values)) if odd else None

    def error(self, subject: str, odd_has: str, usual_has: str) -> ValueError:
        all_alike = self.n_odd == 1 and self.n_ranks > 2
        others = "the others have" if all_alike else f"rank {self.usual} has"
        return ValueError(f"{subject}: rank {self.odd} of {self.n_ranks} has {odd_has}, {others} {usual_has}")


@outside_graphs
def verify_group(
    logits: Tensor,
    labels: Tensor,
    group: Any,
    *,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
    ignore_index: int = -100,
    **options: Any,
) -> None:
    """Raise the same error on every rank of ``group`` unless their arguments fit together.

    For debugging, once before training: every rank calls it with what it would pass to
    :func:`vocab_parallel_cross_entropy`, where ranks that do not fit hang or train on a wrong loss. It
    compares leading dimensions, dtypes, device types, labels and their values, ``ignore_index``,
    ``vocab_size`` and other options, and that the shards have every column of the vocabulary once, in
    any order of ranks. Without ``vocab_size`` or ``shard`` it cannot tell whole logits from shards. What
    is invalid on one rank alone is raised on all. Messages name the rank of the group that differs from
    most; in a tie the side of the lowest rank is taken to be right.

    Overwrites: nothing. Waits for the device. With NCCL, what is sent goes by the GPU of ``logits``.

    Collectives: two all_gathers on the current stream, of sizes and of under a kilobyte a rank
    (``torch.distributed.all_gather_object``, which needs NumPy); where labels differ two more, with the
    labels of two ranks. None for a group of one rank, or None: then this rank's arguments are checked.

    Args:
        logits, labels, vocab_size, shard, ignore_index: as in :func:`vocab_parallel_cross_entropy`.
        options: any others of the loss and of :func:`token_log_probs`; only compared.
        group: the ``torch.distributed.ProcessGroup``, or None. A rank that passes no process group, or
            one that it is not in, raises alone.

    Raises:
        TypeError: a dtype or type is not one that the loss takes, on some rank.
        ValueError: shapes, devices or values do not fit on some rank, or differ between ranks; shards
            overlap or leave columns out; or a label is neither in ``[0, V)`` nor ``ignore_index``.
        RuntimeError: a rank could not look at its arguments for another reason.
    """
    rank, n_ranks = group_position(group)
    device = logits.device if isinstance(logits, Tensor) else None
    own: _Report | _Refusal
    try:
        own = _report(logits, labels, rank, n_ranks, vocab_size, shard, ignore_index, options)
    except Exception as error:
        # Raised now, on this rank alone, it would leave the others waiting.
        own = _Refusal(type(error).__name__, str(error))
    reports = _accepted(all_gather_objects(own, group, device))
    for facts in zip(*(report.facts for report in reports), strict=True):
        difference = _Difference.between([fact.value for fact in facts])
        if difference:
            raise difference.error(
                facts[0].subject, facts[difference.odd].shown, facts[difference.usual].shown
            )
    _check_cover([report.shard for report in reports])
    difference = _Difference.between([report.labels_digest for report in reports])
    if difference:
        sends = rank in (difference.odd, difference.usual)
        gathered = all_gather_objects(labels.cpu().clone() if sends else None, group, device)
        raise _labels_error(difference, gathered[difference.odd], gathered[difference.usual])
    checks.check_label_range(labels, reports[0].shard.vocab_size, ignore_index)


def _report(
    logits: Tensor,
    labels: Tensor,
    rank: int,
    n_ranks: int,
    vocab_size: int | None,
    shard: VocabShard | None,
    ignore_index: int,
    options: dict[str, Any],
) -> _Report:
    """Checks this rank's arguments first; labels then have the leading dimensions of logits."""
    checks.check_logits(logits)
    checks.check_labels(labels, logits)
    checks.check_integer("ignore_index", ignore_index)
    for name in options.keys() - OPTIONS:
        raise TypeError(f"{name}: expected an option of the loss, got no such name")
    own = shard_of_logits(logits.shape[-1], rank, n_ranks, vocab_size, shard)
    size = str(own.vocab_size)
    if vocab_size is None and shard is None:
        size += f" ({n_ranks} * {own.n_columns} columns, without vocab_size= or shard=)"
    leading = tuple(labels.shape)
    facts = (
        _Fact("logits", leading, f"leading dimensions {leading}"),
        _Fact("logits", str(logits.dtype), f"dtype {logits.dtype}"),
        _Fact("logits", logits.device.type, f"device type {logits.device.type}"),
        _Fact("labels", str(labels.dtype), f"dtype {labels.dtype}"),
        _Fact("ignore_index", int(ignore_index), str(ignore_index)),
        _Fact("vocab_size", own.vocab_size, size),
        _Fact("options", repr(sorted(options.items())), str(dict(sorted(options.items())))),
    )
    # Bytes of a tensor would need NumPy here, and would depend on strides.
    digest = hashlib.sha256(str(labels.tolist()).encode()).hexdigest()
    return _Report(facts, own, digest)


def _accepted(reports: Sequence[_Report | _Refusal]) -> list[_Report]:
    """``reports``, or the error of the first rank that refused; it names the rank unless all say the same."""
    for rank, report in enumerate(reports):
        if isinstance(report, _Refusal):
            message = report.message
            if report.error_type not in USER_ERRORS:
                message = f"{report.error_type}: {message}"
            if any(other != report for other in reports):
                message = f"rank {rank} of {len(reports)}: {message}"
            raise USER_ERRORS.get(report.error_type, RuntimeError)(message)
    return [report for report in reports if isinstance(report, _Report)]


def _check_cover(shards: Sequence[VocabShard]) -> None:
    """Raise ValueError unless every column of the vocabulary is in one shard, and in one only."""
    n_ranks, vocab_size = len(shards), shards[0].vocab_size
    parts = sorted(
        (own.start, own.start + own.n_valid, rank) for rank, own in enumerate(shards) if own.n_valid
    )
    covered, before = 0, -1
    for start, stop, rank in [*parts, (vocab_size, vocab_size, n_ranks)]:
        if start < covered:
            first, second = sorted((before, rank))
            raise ValueError(
                f"shard: ranks {first} and {second} of {n_ranks} both have columns "
                f"[{start}, {min(stop, covered)})"
            )
        if start > covered:
            raise ValueError(
                f"shard: no rank of {n_ranks} has columns [{covered}, {start}) of vocab_size {vocab_size}"
            )
        covered, before = stop, rank


def _labels_error(difference: _Difference, odd: Tensor, usual: Tensor) -> ValueError:
    position = tuple((odd != usual).nonzero()[0].tolist())
    has = f"{int(odd[position])} at position {position}"
    return difference.error("labels", has, str(int(usual[position])))
