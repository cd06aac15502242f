"""Whether the ranks of a group pass what fits together: compared at every call while verification is on.

A public call opens a :class:`_Call`. Once this rank's arguments are checked, its :class:`Report` travels to
all ranks of the group, and each of them raises the same error if the reports do not fit. A rank whose own
check raises before that sends a :class:`_Refusal` instead, so that nobody waits for it.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import all_gather_objects, group_position
from vocab_parallel_ce.shard import VocabShard

VARIABLE = "VOCAB_PARALLEL_CE_VERIFY"
USER_ERRORS = {"TypeError": TypeError, "ValueError": ValueError, "RuntimeError": RuntimeError}
PROJECTIONS = 4
PROJECTION_TOLERANCE = (
    0.03  # of the norm: above the rounding of bf16, far below what another dropout mask does
)


class Fact(NamedTuple):
    """Something that must be the same on all ranks, and how a message shows it."""

    subject: str
    value: Hashable
    shown: str


class Report(NamedTuple):
    """What a rank whose own arguments are valid tells the others."""

    call: str
    facts: tuple[Fact, ...]
    shard: VocabShard | None = None
    labels_digest: str = ""
    hidden: tuple[float, ...] | None = None  # fingerprint


class _Refusal(NamedTuple):
    """What a rank tells the others if its own arguments are not."""

    error_type: str
    message: str


class _Call:
    """A public call of this rank that has not told the other ranks of ``group`` yet, or has."""

    def __init__(self, group: Any, device: torch.device | None) -> None:
        self.group, self.device, self.has_told = group, device, False

    def tell(self, own: Report | _Refusal, group: Any) -> list[Report]:
        """The reports of all ranks; the same error on each if one of them refused."""
        self.has_told = True
        return _accepted(all_gather_objects(own, group, self.device))


class _State(threading.local):
    """Of this thread: backward runs in threads of its own."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_state = _State()
# Read by every call, so no functions: whether all calls are compared, and how many are open in any thread.
is_on = os.environ.get(VARIABLE, "") not in ("", "0")
n_open = 0
_counting = threading.Lock()


@contextmanager
def verify_calls(enabled: bool = True) -> Iterator[None]:
    """Within it, every call of a loss compares between the ranks what must agree, in forward and backward.

    For debugging; all ranks enter it together. ``VOCAB_PARALLEL_CE_VERIFY=1``, read at import, does the same
    for a whole program. Compared are shapes, dtypes, labels, options, shards, what needs a gradient, the
    hidden states of a linear loss (by a fingerprint), and the grad_outputs in backward. A difference is
    the same error on every rank, and names the rank and the argument. So is an error that one rank alone
    raises in its own checks. It holds for both losses, the modules, the log-probs and TransformerEngine's
    functions, in all threads. A call without a group, or of one rank, compares nothing. Nothing can be
    compared while a CUDA graph is captured. Off, it costs nothing.

    Collectives: two all_gathers a call and two more in backward, of under four kilobytes a rank
    (``torch.distributed.all_gather_object``: it waits for the device and needs NumPy); if labels differ, two
    more.

    Args:
        enabled: False switches it off within a program in which it is on.
    """
    global is_on
    before, is_on = is_on, enabled
    try:
        yield
    finally:
        is_on = before


@contextmanager
def open_call(group: Any, device: torch.device | None) -> Iterator[None]:
    """What :func:`compare` within it speaks for; an error before that reaches the other ranks."""
    if is_pending() or group_position(group)[1] == 1:
        yield  # a module's call of a function, or nobody to tell
        return
    call = _Call(group, device)
    _state.calls.append(call)
    _count(1)
    try:
        yield
    except Exception as error:
        if not call.has_told:
            # Raised now, on this rank alone, it would leave the others waiting.
            call.tell(_Refusal(type(error).__name__, str(error)), group)
        raise
    finally:
        _state.calls.remove(call)
        _count(-1)


def _count(change: int) -> None:
    global n_open
    with _counting:
        n_open += change


def verified(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` of a public function or a module's forward, in an open call."""
    try:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:
        given = kwargs
    module = given.get("self")
    group = given.get("group", given.get("dist_process_group")) if module is None else module.group
    devices = [value.device for value in given.values() if isinstance(value, Tensor)]
    with open_call(group, devices[0] if devices else None):
        return function(*args, **kwargs)


def is_pending() -> bool:
    """Whether the call that is being prepared has others to compare with."""
    return n_open > 0 and bool(_state.calls) and not _state.calls[-1].has_told


def compare(group: Any, report: Report, labels: Tensor | None = None) -> None:
    """Raise the same error on every rank of the pending call's group unless the reports fit together."""
    call = _state.calls[-1]
    reports = call.tell(report, group)
    subjects = [(r.call, tuple(fact.subject for fact in r.facts)) for r in reports]
    _raise_difference("call", [Fact("call", called, called[0]) for called in subjects])
    for facts in zip(*(r.facts for r in reports), strict=True):
        _raise_difference(facts[0].subject, facts)
    if report.shard is not None:
        _check_cover([r.shard for r in reports if r.shard is not None])
    difference = _Difference.between([r.labels_digest for r in reports])
    if difference and labels is not None:
        sends = group_position(group)[0] in (difference.odd, difference.usual)
        gathered = all_gather_objects(labels.cpu().clone() if sends else None, group, call.device)
        raise _labels_error(difference, gathered[difference.odd], gathered[difference.usual])
    _check_hidden([r.hidden for r in reports if r.hidden is not None])


def labels_digest(labels: Tensor) -> str:
    """Equal for equal labels; bytes of a tensor would need NumPy here, and would depend on strides."""
    return hashlib.sha256(str(labels.tolist()).encode()).hexdigest()


def fingerprint(hidden: Tensor, is_valid: Tensor) -> tuple[float, ...]:
    """The norm of the rows of ``hidden [N, D]`` that count, and their products with fixed vectors."""
    rows = hidden.detach().float().masked_fill(~is_valid.unsqueeze(1), 0.0)
    n_tokens, n_features = rows.shape
    right = (torch.arange(n_features * PROJECTIONS, device=rows.device) * 2.399963).cos().view(n_features, -1)
    left = (torch.arange(n_tokens, device=rows.device) * 1.7320508 + 0.5).cos()
    # A cosine's mean square is 1 / 2: twice the product is as long as the difference of the rows.
    return (float(rows.norm()), *(2 * (left @ (rows @ right))).tolist())


def option_facts(options: dict[str, Any]) -> tuple[Fact, ...]:
    """A fact per option, in an order that all ranks have; 30 and 30.0 are the same."""
    numbers = {name: float(value) for name, value in options.items() if type(value) is int}
    return tuple(
        Fact(name, repr(numbers.get(name, value)), repr(value)) for name, value in sorted(options.items())
    )


def gradient_facts(**tensors: Tensor | None) -> tuple[Fact, ...]:
    """Which tensors need a gradient: it decides which collectives run."""
    facts = []
    for name, tensor in tensors.items():
        needed = tensor is not None and torch.is_grad_enabled() and tensor.requires_grad
        shown = "a gradient to compute" if needed else "none (torch.no_grad or requires_grad=False)"
        facts.append(Fact(name, needed, shown))
    return tuple(facts)


def grad_output_report(**grad_output: Tensor | None) -> Report:
    """Of a backward: the gradients of the outputs, which all ranks must have alike."""
    facts = []
    for name, grad in grad_output.items():
        digest, shown = "", "none"
        if grad is not None:
            digest, norm = labels_digest(grad.detach()), float(grad.detach().float().norm())
            shown = f"shape {tuple(grad.shape)} and norm {norm:g}"
        facts.append(Fact(f"gradient of {name}", (shown, digest), shown))
    return Report("backward", tuple(facts))


class _Difference(NamedTuple):
    """Rank ``odd`` differs from most, of which ``usual`` is the first."""

    odd: int
    usual: int
    n_odd: int
    n_ranks: int

    @classmethod
    def between(cls, values: Sequence[Hashable]) -> _Difference | None:
        """The first rank that differs from most; in a tie, from the side of the lowest rank."""
        counts = Counter(values)
        most = max(values, key=counts.__getitem__)
        odd = [rank for rank, value in enumerate(values) if value != most]
        return cls(odd[0], values.index(most), len(odd), len(values)) if odd else None

    def error(self, subject: str, odd_has: str, usual_has: str) -> ValueError:
        all_alike = self.n_odd == 1 and self.n_ranks > 2
        others = "the others have" if all_alike else f"rank {self.usual} has"
        return ValueError(f"{subject}: rank {self.odd} of {self.n_ranks} has {odd_has}, {others} {usual_has}")


def _raise_difference(subject: str, facts: Sequence[Fact]) -> None:
    difference = _Difference.between([fact.value for fact in facts])
    if difference:
        raise difference.error(subject, facts[difference.odd].shown, facts[difference.usual].shown)


def _accepted(reports: Sequence[Report | _Refusal]) -> list[Report]:
    """``reports``, or the error of the first rank that refused; it names the rank unless all say the same."""
    for rank, report in enumerate(reports):
        if isinstance(report, _Refusal):
            message = report.message
            if report.error_type not in USER_ERRORS:
                message = f"{report.error_type}: {message}"
            if any(other != report for other in reports):
                message = f"rank {rank} of {len(reports)}: {message}"
            raise USER_ERRORS.get(report.error_type, RuntimeError)(message)
    return [report for report in reports if isinstance(report, Report)]


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


def _check_hidden(prints: Sequence[tuple[float, ...]]) -> None:
    """Raise ValueError if the fingerprints of hidden states are further apart than rounding makes them."""
    if not prints or not all(map(math.isfinite, itertools.chain(*prints))):
        return
    bound = PROJECTION_TOLERANCE * max(norm for norm, *_ in prints)

    def alike(rank: int) -> list[bool]:
        return [all(abs(a - b) <= bound for a, b in zip(prints[rank], own, strict=True)) for own in prints]

    usual = max(range(len(prints)), key=lambda rank: sum(alike(rank)))
    odd = [rank for rank, is_alike in enumerate(alike(usual)) if not is_alike]
    if odd:
        difference = _Difference(odd[0], usual, len(odd), len(prints))
        has, have = (f"values of norm {prints[rank][0]:g}" for rank in (odd[0], usual))
        raise difference.error("hidden", has, have)
