"""Compare what the ranks of a group pass, so that a mismatch is an error and not a hang or a wrong loss.

A public function opens a call. When its arguments are checked, each rank makes one report. The ranks exchange them,
and raise the same error if the reports do not fit. A rank that fails earlier reports its error: no rank waits for it.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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


# A call of several ranks that is not compared yet: its group, its device, and the facts that a function adds to this
# rank's report, or has in place of those of the same names.
Call = tuple[Any, torch.device | None, dict[str, Any]]
# Every call reads these two. All threads share the first: a checkpoint calls a loss again in a thread of backward.
is_on = environment.switch(environment.VERIFY)
pending: ContextVar[Call | None] = ContextVar("pending", default=None)  # of this thread


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


def members(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each value, and those of a record in its place."""
    for value in values:
        yield from value if isinstance(value, tuple) else (value,)


def verified(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``function(*args, **kwargs)``, a public function or a forward, which compares its arguments if that is on.

    An error that it raises before it does reaches all ranks.
    """
    if not is_on or pending.get() is not None:
        return function(*args, **kwargs)  # a module calls a function: one call
    group, device = _group_and_device(function, args, kwargs)
    if group_position(group)[1] > 1:
        pending.set((group, device, {}))
    try:
        return function(*args, **kwargs)
    except Exception as error:
        compare({}, error)
        raise
    finally:
        pending.set(None)


def _group_and_device(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, torch.device | None]:
    """Return the group among the arguments, or of their module, and the device of their first tensor."""
    try:
        arguments = inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the function raises it
        arguments = kwargs
    module = arguments.get("self")
    group = arguments.get("group", arguments.get("dist_process_group")) if module is None else module.group
    device = next((value.device for value in members(arguments.values()) if isinstance(value, Tensor)), None)
    return process_group_of(group), device


def compare_call(
    tensors: dict[str, Any], targets: Any, shard: VocabShard, options: dict[str, Any], is_valid: Any = None
) -> None:
    """Raise the same ValueError on every rank unless the arguments of the pending call fit together.

    ``tensors`` are all that may need a gradient, first ``logits [..., C]`` or ``hidden [..., D]``. The roles of
    ``targets`` say how they are compared: ids and numbers of rows must be equal, of columns and grids there must be
    some or none, and hidden states may differ by rounding where ``is_valid [N]``. ``options`` must be equal. Without a
    ``vocab_size`` among them, equal logits or heads on all ranks are an error.
    """
    name, first = next(iter(tensors.items()))
    sharded = "weight" if "weight" in tensors else name
    optional = {each: getattr(targets, field) for field, each, _, is_optional in ROLES[type(targets)] if is_optional}
    ids, states = _of_kind(targets, "ids"), _of_kind(targets, "head", "tokens")
    if name == "hidden" and not options["sequence_parallel"]:
        states[name] = first
    others = _of_kind(targets, "logits") | _of_kind(targets, "head", "tokens")
    facts = {
        "call": " and ".join([f"a loss over {name}", *others]),
        f"{name}.shape[:-1]": tuple(first.shape[:-1]),
        f"{name}.dtype": first.dtype,
        f"{name}.device.type": first.device.type,
        **{each: "None" if tensor is None else "a tensor" for each, tensor in (tensors | optional).items()},
        **{each: value for each, value in options.items() if each != "vocab_size"},  # a shard differs by rank
        **_of_kind(targets, "numbers", "rows"),
        **{f"{each}.dtype": target.dtype for each, target in ids.items()},
        **{f"{each}.shape": tuple(target.shape) for each, target in (ids | states).items()},
        **{f"{each}.requires_grad": _need(tensor) for each, tensor in tensors.items()},
    }
    columns = _of_kind(targets, "numbers", "columns") if shard.n_valid else {}  # else they are padding
    report = {
        "equal": facts,
        "shards": {"vocab_size": shard},
        "different": _sampled(sharded, tensors[sharded], options["vocab_size"]),
        # Others may have their own columns alone, or another dtype.
        "equal if known": {name: each.float() + 0.0 for name, each in columns.items() if len(each) == shard.vocab_size},
        "ids": ids,
        "close": {each: _fingerprint(tensor, is_valid) for each, tensor in states.items()},
    }
    compare(report)


def also(facts: dict[str, Any]) -> None:
    """Add facts to the report of the pending call."""
    call = pending.get()
    if call is not None:
        call[2].update(facts)


def compare_logits(name: str, logits: Tensor, shard: VocabShard, vocab_size: Any, **arguments: Any) -> None:
    """Raise the same ValueError on every rank unless logits, shards and arguments of the pending call fit together."""
    facts = {"call": name, "logits.shape[:-1]": tuple(logits.shape[:-1]), "logits.dtype": logits.dtype, **arguments}
    shards, samples = {"vocab_size": shard}, _sampled("logits", logits, vocab_size)
    compare({"equal": facts, "shards": shards, "different": samples})


def compare_results(name: str, result: Tensor, errors: Sequence[Exception], group: Any) -> None:
    """Raise the same error on every rank if one has ``errors``, or if ``result`` does not have the same bits on all."""
    pending.set((group, result.device, {}))
    compare({"equal": {name: result.detach()}}, errors[0] if errors else None)


def compare(report: dict[str, dict[str, Any]], error: Exception | None = None) -> None:
    """Raise the first error of a rank, or the same ValueError on every rank unless the reports of all fit together.

    A report has what a rank says, by names, for each of ``COMPARISONS``. Of tensors checksums are sent, of an error its
    name and text. Does nothing if no call is pending: the others have this rank's report already.
    """
    # A compiler breaks the graph of a call that is verified, and cannot look at a context variable.
    call = None if torch.compiler.is_dynamo_compiling() else pending.get()
    if call is None:
        return
    group, device, added = call
    report = {**report, "equal": report.get("equal", {}) | added}
    texts = {kind: {name: _shown(each) for name, each in said.items()} for kind, said in report.items()}
    sent = None if error is None else (type(error).__name__, str(error))
    pending.set(None)  # not before: what fails above is this rank's error
    of_ranks = all_gather_objects((texts, sent), group, device)
    _raise_first([each for _, each in of_ranks], error)
    for kind, check in COMPARISONS.items():
        said = [each.get(kind, {}) for each, _ in of_ranks]
        for name in dict.fromkeys(name for each in said for name in each):
            values = [each.get(name) for each in said]  # None of a rank that has none
            if kind == "ids" and len(set(values)) > 1:
                ids = torch.stack(all_gather_objects(report[kind][name].cpu(), group, device))
                position = (ids != ids[0]).any(0).nonzero()[0].tolist()  # the first where ranks differ
                name, values = f"{name}{position}", ids.movedim(0, -1)[tuple(position)].tolist()
            check(name, values)


def _need(tensor: Tensor | None) -> str:
    is_needed = tensor is not None and torch.is_grad_enabled() and tensor.requires_grad
    return "True" if is_needed else "False, or under torch.no_grad"


def _of_kind(targets: Any, kind: str, axis: str = "") -> dict[str, Tensor]:
    """Return the targets that were passed of a kind, with an axis, by the caller's names."""
    return {
        name: target for name, target, role in present(targets) if role.kind == kind and (not axis or axis in role.axes)
    }


def _shown(values: Any) -> Any:
    """Return the same text for tensors of equal values, whatever their strides. Needs no NumPy."""
    if not isinstance(values, Tensor):
        return values
    checksum = hashlib.sha256(str(values.tolist()).encode()).hexdigest()
    return f"shape {tuple(values.shape)}, norm {float(values.float().norm()):g}, checksum {checksum[:12]}"


def _sampled(name: str, rows: Tensor, vocab_size: Any) -> dict[str, Tensor]:
    """Return some elements of ``rows [..., C]`` if no ``vocab_size`` says which columns a rank has.

    Not if those of a row are equal, as in a head of zeros.
    """
    if vocab_size is not None or rows.numel() == 0:
        return {}
    most = (*(4 for _ in rows.shape[:-1]), 256)
    steps = (slice(None, None, -(-size // n)) for size, n in zip(rows.shape, most, strict=True))
    sample = rows.detach()[tuple(steps)].float().nan_to_num(0.0, 0.0, 0.0).cpu()
    return {} if bool((sample == sample[..., :1]).all()) else {name: sample}


def _fingerprint(hidden: Tensor, is_valid: Tensor) -> tuple[float, ...]:
    """Return the norm of the valid rows ``[N]`` of ``hidden [..., D]``, and 4 projections of them."""
    rows = hidden.detach().float().flatten(0, -2).masked_fill(~is_valid.unsqueeze(-1), 0.0)
    n_tokens, n_features = rows.shape
    right = (torch.arange(n_features * 4, device=rows.device, dtype=rows.dtype) * 2.399963).cos()
    left = (torch.arange(n_tokens, device=rows.device, dtype=rows.dtype) * 1.7320508 + 0.5).cos()
    # The mean square of a cosine is 1 / 2: twice a projection is as large as the difference of the rows.
    return (float(rows.norm()), *(2 * (left @ (rows @ right.view(n_features, -1)))).tolist())


def _raise_first(errors: Sequence[tuple[str, str] | None], own: Exception | None) -> None:
    """Raise the first error of a rank, which is named unless all have the same, from this rank's ``own``."""
    for rank, error in enumerate(errors):
        if error is not None:
            who = "" if len(set(errors)) == 1 else f"rank {rank} of {len(errors)}: "
            name, message = error
            what = "" if name in ERRORS else f"{name}: "
            raise ERRORS.get(name, RuntimeError)(who + what + message) from own


def _compare(subject: str, values: list[Any], texts: Sequence[str] = (), remedy: str = "") -> None:
    """Raise ValueError unless all values are equal, with ``texts`` in their place, and name a rank that differs.

    Most ranks are right; of a tie, the side of the lowest rank is.
    """
    most = max(values, key=values.count)
    odd = [rank for rank, value in enumerate(values) if value != most]
    if odd:
        usual, shown = values.index(most), texts or values
        others = "the others have" if len(odd) == 1 and len(values) > 2 else f"rank {usual} has"
        has = f"rank {odd[0]} of {len(values)} has {shown[odd[0]]}, {others} {shown[usual]}"
        raise ValueError(f"{subject}: {has}{remedy}")


def _compare_known(name: str, values: list[Any]) -> None:
    """Raise ValueError unless the values that there are, of some ranks at least, are equal."""
    usual = next(value for value in values if value is not None)
    _compare(name, [value or usual for value in values])


def _compare_shards(name: str, shards: Sequence[VocabShard]) -> None:
    """Raise ValueError unless every column of one vocabulary is in exactly one shard."""
    sizes, vocab_size = [shard.vocab_size for shard in shards], shards[0].vocab_size
    texts = [f"{shard.vocab_size} with a shard of {shard.n_columns} columns" for shard in shards]
    _compare(name, sizes, texts, "; pass the same vocab_size= on every rank, or a VocabShard")
    columns = [(shard.start, shard.start + shard.n_valid) for shard in shards]
    parts = sorted((start, stop) for start, stop in columns if start < stop)
    if [start for start, _ in parts] + [vocab_size] != [0] + [stop for _, stop in parts]:
        expected = f"must have every column of [0, {vocab_size}) on exactly one rank"
        raise ValueError(f"{name}: shards {expected}, got by rank {', '.join(f'[{a}, {b})' for a, b in columns)}")


def _check_not_whole(name: str, samples: Sequence[str | None]) -> None:
    """Raise ValueError if every rank has the same values where no rank says which columns it has."""
    if samples[0] is not None and len(set(samples)) == 1:
        raise ValueError(
            f"{name}: expected other columns on each rank, got equal values on all {len(samples)}; with the whole "
            "vocabulary on every rank pass group=None, and with shards that are equal, as from one seed, vocab_size="
        )


def _compare_hidden(name: str, fingerprints: Sequence[tuple[float, ...]]) -> None:
    """Raise ValueError if fingerprints of hidden states differ by more than rounding."""
    prints = torch.tensor(fingerprints, dtype=torch.float64, device="cpu")
    difference = (prints.unsqueeze(1) - prints).abs().amax(-1)
    is_close = ~(difference > TOLERANCE * prints[:, 0].max())  # nothing differs from NaN or infinity
    usual = int(is_close.sum(1).argmax())  # the first that most are close to
    values = [usual if close else rank for rank, close in enumerate(is_close[usual].tolist())]
    _compare(name, values, [f"values of norm {norm:g}" for norm, *_ in fingerprints])


COMPARISONS: dict[str, Callable[[str, list[Any]], None]] = {  # in this order, by what all ranks' values must be
    "equal": _compare,
    "shards": _compare_shards,
    "different": _check_not_whole,
    "equal if known": _compare_known,
    "ids": _compare,
    "close": _compare_hidden,
}
