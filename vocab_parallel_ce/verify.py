"""Compare what the ranks of a group pass, so that a mismatch is an error and not a hang or a wrong loss.

A public function opens a call. When its arguments are checked, the ranks exchange one report each, and raise
the same error if the reports do not fit. A rank that fails earlier sends its error: no rank waits for it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import environment
from vocab_parallel_ce.checks import check_bool
from vocab_parallel_ce.collectives import all_gather_objects, group_position
from vocab_parallel_ce.dtensor import process_group_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.targets import ROLES, present

ERRORS = {error.__name__: error for error in (TypeError, ValueError, RuntimeError)}
TOLERANCE = 0.03  # of the norm: more than bf16 rounds off, far less than another dropout mask changes


class _Call:
    """A call of one thread. It is pending until the other ranks have this rank's report."""

    def __init__(self, group: Any, device: torch.device | None) -> None:
        self.group, self.device, self.thread = group, device, get_ident()
        self.is_pending = group_position(group)[1] > 1

    def exchange(self, facts: dict[str, Any], **others: Any) -> list[dict[str, Any]]:
        """Return the reports of all ranks. Raise the first error of a rank, or ValueError if facts differ.

        Of tensors among the facts the values are compared.
        """
        self.is_pending = False
        facts = {name: shown(fact) if isinstance(fact, Tensor) else fact for name, fact in facts.items()}
        reports = all_gather_objects({"facts": facts, **others}, self.group, self.device)
        errors = [report.get("error") for report in reports]
        for rank, error in enumerate(errors):
            if error is not None:
                who = "" if errors == [error] * len(errors) else f"rank {rank} of {len(errors)}: "
                name, message = error
                what = "" if name in ERRORS else f"{name}: "
                raise ERRORS.get(name, RuntimeError)(who + what + message)
        for subject in dict.fromkeys(subject for report in reports for subject in report["facts"]):  # the call first
            _compare(subject, [report["facts"].get(subject) for report in reports])
        return reports

    def exchange_shards(
        self, facts: dict[str, Any], name: str, tensor: Tensor, shard: VocabShard, vocab_size: Any, **others: Any
    ) -> list[dict[str, Any]]:
        """Return the reports of all ranks as :meth:`exchange` does. Raise the same ValueError unless shards fit.

        ``tensor`` is sharded: without a ``vocab_size``, it may not be equal on all ranks.
        """
        columns = _sampled(tensor) if vocab_size is None else None
        reports = self.exchange(facts, shard=shard, columns=columns, **others)
        _compare_shards([report["shard"] for report in reports])
        _check_not_whole(name, [report["columns"] for report in reports])
        return reports


# Every call reads these two. All threads share them: a checkpoint calls a loss again in a thread of backward.
is_on = environment.switch(environment.VERIFY)
open_calls: list[_Call] = []


@contextmanager
def verify_calls(enabled: bool = True) -> Iterator[None]:
    """Compare what the ranks pass at every call of a loss inside this context.

    For debugging: it waits for the device, and no CUDA graph may be captured meanwhile. All ranks enter it
    together. ``VOCAB_PARALLEL_CE_VERIFY=1``, read at import, does the same for a whole program. It covers all
    losses and their modules, in all threads, and not :func:`copy_to_ranks`. A difference raises the same error on
    every rank, which names the rank and the argument. So does an error in one rank's own checks. docs/options.md says
    what is compared: nothing in backward.

    Collectives: two all_gathers per call, of less than 4 KiB per rank, of pickled objects. Two more with the labels if
    they differ, and two more of an objective's loss or error. None for one rank.

    Example:
        >>> from vocab_parallel_ce import verify_calls, vocab_parallel_cross_entropy
        >>> with verify_calls():  # on every rank of the group
        ...     loss = vocab_parallel_cross_entropy(torch.zeros(2, 4), torch.tensor([1, 2]), group=None)
        >>> round(loss.item(), 4)
        1.3863
    """
    global is_on
    check_bool("enabled", enabled)
    before, is_on = is_on, enabled
    try:
        yield
    finally:
        is_on = before


@contextmanager
def open_call(group: Any, device: torch.device | None) -> Iterator[None]:
    """Let the ranks of ``group`` compare a call. An error that is raised before they do reaches all ranks."""
    if _pending_call() is not None:
        yield  # a module calls a function: one call
        return
    call = _Call(group, device)
    open_calls.append(call)
    try:
        yield
    except Exception as error:
        if call.is_pending:
            call.exchange({}, error=(type(error).__name__, str(error)))
        raise
    finally:
        open_calls.remove(call)


def _call_of_thread() -> _Call | None:
    """Return the innermost call of this thread."""
    calls = [call for call in tuple(open_calls) if call.thread == get_ident()]
    return calls[-1] if calls else None


def _pending_call() -> _Call | None:
    """Return the innermost call of this thread if the ranks have not compared it yet."""
    call = _call_of_thread()
    return call if call is not None and call.is_pending else None


def is_in_call() -> bool:
    """Return whether this thread is in a call of several ranks, who would wait for one that raises."""
    call = _call_of_thread() if open_calls else None
    return call is not None and group_position(call.group)[1] > 1


def members(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each value, and those of a record in its place."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def verified(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``function(*args, **kwargs)``, run in an open call. It is a public function or a forward."""
    try:
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call below raises it
        arguments = kwargs
    module = arguments.get("self")
    group = arguments.get("group", arguments.get("dist_process_group")) if module is None else module.group
    device = next((value.device for value in members(arguments.values()) if isinstance(value, Tensor)), None)
    with open_call(process_group_of(group), device):
        return function(*args, **kwargs)


def compare_call(tensors: dict[str, Any], targets: Any, shard: VocabShard, options: dict[str, Any]) -> None:
    """Raise the same ValueError on every rank unless the arguments of a pending call fit together.

    ``tensors`` are all that may need a gradient, first ``logits [..., C]`` or ``hidden [..., D]``. The roles of
    ``targets`` say how they are compared: ids and numbers of rows must be equal, of columns and grids there must be
    some or none, and hidden states may differ by rounding. ``options`` must be equal. Without a ``vocab_size`` among
    them, equal logits or heads on all ranks are an error.
    """
    call = _pending_call()
    if call is None:
        return
    name, first = next(iter(tensors.items()))
    others = (each for each, _, role in present(targets) if role.kind == "logits" or "tokens" in role.axes)
    facts: dict[str, Any] = {
        "call": " and ".join([f"a loss over {name}", *others]),
        f"{name}.shape[:-1]": tuple(first.shape[:-1]),
        f"{name}.dtype": first.dtype,
        f"{name}.device.type": first.device.type,
    }
    optional = {each: field for field, each, _, is_optional in ROLES[type(targets)] if is_optional}
    facts |= {each: _presence(getattr(targets, field)) for each, field in optional.items()}
    facts |= {each: value for each, value in options.items() if each != "vocab_size"}  # a shard differs by rank
    ids: dict[str, Tensor] = {}
    states = {"hidden": first} if name == "hidden" and not options["sequence_parallel"] else {}
    for each, target, role in present(targets):
        if role.kind == "ids":
            ids[each] = target
            facts |= {f"{each}.dtype": target.dtype, f"{each}.shape": tuple(target.shape)}
        elif role.kind == "numbers" and "rows" in role.axes:
            facts[each] = target
        elif "tokens" in role.axes:
            states[each] = target
            facts[f"{each}.shape"] = tuple(target.shape)
    for each, tensor in tensors.items():
        facts[each] = _presence(tensor)
        is_needed = tensor is not None and torch.is_grad_enabled() and tensor.requires_grad
        facts[f"{each}.requires_grad"] = "True" if is_needed else "False, or under torch.no_grad"
    labels = ids.get("labels")
    is_valid = None if labels is None else labels.long() != options["ignore_index"]
    if is_valid is not None and is_valid.dim() == first.dim():  # k ids of each token
        is_valid = is_valid.any(dim=-1)
    sharded = "weight" if "weight" in tensors else name
    reports = call.exchange_shards(
        facts,
        sharded,
        tensors[sharded],
        shard,
        options["vocab_size"],
        ids={each: _checksum(values) for each, values in ids.items()},
        hidden={each: _fingerprint(value, is_valid) for each, value in states.items()},
        unsharded=_unsharded(targets, shard),
    )
    _compare_unsharded([report["unsharded"] for report in reports])
    for each, values in ids.items():
        if len({report["ids"][each] for report in reports}) > 1:
            by_rank = torch.stack(all_gather_objects(values.cpu(), call.group, call.device))
            position = (by_rank != by_rank[0]).any(0).nonzero()[0].tolist()
            _compare(f"{each}{position}", [ids_of_rank[tuple(position)].item() for ids_of_rank in by_rank])
    for each in states:
        _compare_hidden(each, [report["hidden"][each] for report in reports])


def _unsharded(targets: Any, shard: VocabShard) -> dict[str, str]:
    """Return what to compare of targets of all columns, which others may have of their own columns alone.

    As fp32 without a negative zero: ranks may have other dtypes. A rank without columns has those of padding.
    """
    return {
        name: shown(target.float() + 0.0)
        for name, target, role in present(targets)
        if role.kind == "numbers" and "columns" in role.axes and len(target) == shard.vocab_size and shard.n_valid
    }


def _compare_unsharded(by_rank: Sequence[dict[str, str]]) -> None:
    for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank):
        usual = next(of_rank[name] for of_rank in by_rank if name in of_rank)
        _compare(name, [of_rank.get(name, usual) for of_rank in by_rank])


def _presence(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"


def compare_results(name: str, result: Tensor, errors: Sequence[Exception]) -> None:
    """Raise the same error on every rank if one has ``errors``, or if ``result`` does not have the same bits on all."""
    others = {"error": (type(errors[0]).__name__, str(errors[0]))} if errors else {}
    try:
        _call_of_thread().exchange({name: result.detach()}, **others)  # type: ignore[union-attr]
    except Exception as error:
        raise error from (errors[0] if errors else None)


def compare_arguments(name: str, **arguments: Any) -> None:
    """Raise the same ValueError on every rank unless the arguments of the pending call ``name`` are equal."""
    if (call := _pending_call()) is not None:
        call.exchange({"call": name, **arguments})


def compare_logits(name: str, logits: Tensor, shard: VocabShard, vocab_size: Any, **arguments: Any) -> None:
    """Raise the same ValueError on every rank unless logits, shards and arguments of the pending call fit together."""
    if (call := _pending_call()) is not None:
        facts = {"call": name, "logits.shape[:-1]": tuple(logits.shape[:-1]), "logits.dtype": logits.dtype, **arguments}
        call.exchange_shards(facts, "logits", logits, shard, vocab_size)


def shown(values: Tensor) -> str:
    """Return a text about ``values`` that is the same if they are equal."""
    return f"shape {tuple(values.shape)}, norm {float(values.float().norm()):g}, checksum {_checksum(values)[:12]}"


def _checksum(values: Tensor) -> str:
    """Return the same text for equal values, whatever their strides. Needs no NumPy."""
    return hashlib.sha256(str(values.tolist()).encode()).hexdigest()


def _sampled(rows: Tensor) -> str | None:
    """Return a checksum of some elements of ``rows [..., C]``; None if a row's are equal, as in a head of zeros."""
    if rows.numel() == 0:
        return None
    most = (*(4 for _ in rows.shape[:-1]), 256)
    steps = (slice(None, None, -(-size // n)) for size, n in zip(rows.shape, most, strict=True))
    sample = rows.detach()[tuple(steps)].float().nan_to_num(0.0, 0.0, 0.0)
    return None if bool((sample == sample[..., :1]).all()) else _checksum(sample)


def _fingerprint(hidden: Tensor, is_valid: Tensor | None) -> tuple[float, ...]:
    """Return the norm of the valid rows of ``hidden [..., D]`` and 4 projections of them; all are without a mask."""
    rows = hidden.detach().float().flatten(0, -2)
    if is_valid is not None:
        rows = rows.masked_fill(~is_valid.reshape(-1, 1), 0.0)
    n_tokens, n_features = rows.shape
    right = (torch.arange(n_features * 4, device=rows.device, dtype=rows.dtype) * 2.399963).cos()
    left = (torch.arange(n_tokens, device=rows.device, dtype=rows.dtype) * 1.7320508 + 0.5).cos()
    # The mean square of a cosine is 1 / 2: twice a projection is as large as the difference of the rows.
    return (float(rows.norm()), *(2 * (left @ (rows @ right.view(n_features, -1)))).tolist())


def _compare(subject: str, values: Sequence[Any], shown: Sequence[Any] = (), remedy: str = "") -> None:
    """Raise ValueError unless all values are equal, with ``shown`` in their place, and name a rank that differs.

    Most ranks are right; of a tie, the side of the lowest rank is.
    """
    most = max(values, key=Counter(values).__getitem__)
    odd = [rank for rank, value in enumerate(values) if value != most]
    if odd:
        usual, shown = values.index(most), shown or values
        others = "the others have" if len(odd) == 1 and len(values) > 2 else f"rank {usual} has"
        has = f"rank {odd[0]} of {len(values)} has {shown[odd[0]]}, {others} {shown[usual]}"
        raise ValueError(f"{subject}: {has}{remedy}")


def _compare_shards(shards: Sequence[VocabShard]) -> None:
    """Raise ValueError unless every column of one vocabulary is in exactly one shard."""
    sizes, vocab_size = [shard.vocab_size for shard in shards], shards[0].vocab_size
    shown = [f"{shard.vocab_size} with a shard of {shard.n_columns} columns" for shard in shards]
    _compare("vocab_size", sizes, shown, "; pass the same vocab_size= on every rank, or a VocabShard")
    columns = [(shard.start, shard.start + shard.n_valid) for shard in shards]
    parts = sorted((start, stop) for start, stop in columns if start < stop)
    if [start for start, _ in parts] + [vocab_size] != [0] + [stop for _, stop in parts]:
        expected = f"must have every column of [0, {vocab_size}) on exactly one rank"
        raise ValueError(f"vocab_size: shards {expected}, got by rank {', '.join(f'[{a}, {b})' for a, b in columns)}")


def _check_not_whole(name: str, sampled: Sequence[str | None]) -> None:
    """Raise ValueError if every rank has the same values where no rank says which columns it has."""
    if sampled[0] is not None and len(set(sampled)) == 1:
        raise ValueError(
            f"{name}: expected other columns on each rank, got equal values on all {len(sampled)}; with the whole "
            "vocabulary on every rank pass group=None, and with shards that are equal, as from one seed, vocab_size="
        )


def _compare_hidden(name: str, fingerprints: Sequence[tuple[float, ...]]) -> None:
    """Raise ValueError if fingerprints of hidden states differ by more than rounding."""
    prints = torch.tensor(fingerprints, dtype=torch.float64, device="cpu")
    difference = (prints.unsqueeze(1) - prints).abs().amax(-1)
    is_close = ~(difference > TOLERANCE * prints[:, 0].max())  # nothing differs from NaN or infinity
    usual = max(range(len(prints)), key=is_close.sum(1).tolist().__getitem__)
    values = [usual if close else rank for rank, close in enumerate(is_close[usual].tolist())]
    _compare(name, values, [f"values of norm {norm:g}" for norm, *_ in fingerprints])
