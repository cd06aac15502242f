"""torchtitan's loss and log-probabilities, computed by this package: only on request, and undoable.

:func:`install` replaces ``cross_entropy_loss`` and ``compute_logprobs`` of ``torchtitan.components.loss``, and wherever
a module has them by name. ``CrossEntropyLoss`` takes the loss when it is built, and ``ChunkedLossWrapper`` calls it for
each chunk: install before the trainer builds its loss.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vocab_parallel_ce import checks, token_log_probs, vocab_parallel_cross_entropy
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.integrations import Report, dtensor
from vocab_parallel_ce.integrations.columns import shard_of_local
from vocab_parallel_ce.integrations.log_probs import with_entropies
from vocab_parallel_ce.integrations.rebind import Switch
from vocab_parallel_ce.options import IMPLEMENTATIONS

LOSS = "torchtitan.components.loss"
GRADIENTS = ("auto", "in_backward", "out_of_place")
UNCUT = "DTensors whose vocabulary is not cut"
TYPES = "spmd_types checks types (debug.spmd_typechecking)"
UNKNOWN = "log-probabilities of plain shards without install(vocab_size=)"
LEFT = {
    UNCUT: "nothing is to be gathered there",
    TYPES: "this package's operators have no types to check",
    UNKNOWN: "nothing else says how wide the vocabulary is; torchtitan gathers them",
    "the head": "the model makes its logits",
}
_titan: dict[str, Any] = {}  # what ours need of torchtitan, and its own, for losses that were built while ours were
_options: dict[str, Any] = {}  # of install(); empty: nothing is installed
_calls: Counter[str] = Counter()


def install(*, vocab_size: int | None = None, gradient: str = "auto", impl: str = "auto") -> Report:
    """Replace torchtitan's loss and log-probabilities, and report. A second call changes the options alone.

    The report counts calls as ``"fused"``, or by what of ``left`` they are, except inside a compiled region.

    Args:
        vocab_size: of the model. ``compute_logprobs`` is not told it. Without it, its plain shards (the backend
            ``"spmd_types"`` with tensor parallelism) are left to torchtitan, which gathers them.
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``, as in
            :func:`vocab_parallel_ce.vocab_parallel_cross_entropy`. ``"auto"`` overwrites no
            DTensor.
        impl: as in that function.

    Raises:
        ImportError: torchtitan is not installed.
        ValueError: its functions are not those of torchtitan 0.3.
    """
    if vocab_size is not None:
        vocab_size = checks.checked_count("vocab_size", vocab_size)
    checks.check_choice("gradient", gradient, GRADIENTS)
    checks.check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
    if not _options:
        load()
        _switch.install()
    _options.update(vocab_size=vocab_size, gradient=gradient, impl=impl)
    return report()


def load() -> None:
    """Keep what ours need of torchtitan, and its own functions.

    Raises:
        ValueError: it has no such names.
    """
    module = importlib.import_module(LOSS)
    for name in ("get_spmd_backend", "spmd_mesh_size", "current_spmd_mesh", "spmd"):
        if not hasattr(module, name):
            raise ValueError(f"{LOSS}.{name}: expected that of torchtitan 0.3, got no such name; install 0.3")
        _titan[name] = getattr(module, name)
    _titan.update({name: _switch.original(f"{LOSS}:{name}") for name in ("cross_entropy_loss", "compute_logprobs")})


def uninstall() -> None:
    """Give torchtitan its own functions back, if :func:`install` replaced them; also to losses built meanwhile.

    Raises:
        RuntimeError: something else replaced one of them after :func:`install`.
    """
    _switch.uninstall()
    _options.clear()


@contextmanager
def installed(**options: Any) -> Iterator[Report]:
    """Install inside this context; ``options`` are those of :func:`install`. Undo it afterwards."""
    before = dict(_options)
    try:
        yield install(**options)
    finally:
        if before:
            _options.update(before)
        else:
            uninstall()


def cross_entropy_loss(pred: Any, labels: Any, *, global_vocab_size: int | None = None) -> Any:
    """Compute torchtitan's summed loss, as its function of this name, without copies of the logits in fp32.

    Collectives: with a cut vocabulary one all_gather in the forward pass, where torchtitan has three all_reduces.

    Args:
        pred: ``[B, L, C]`` logits: plain, of this rank's columns under the backend ``"spmd_types"``, or a DTensor.
        labels: ``[B, L]`` global ids, or -100; plain or a DTensor.
        global_vocab_size: ``V``, needed for plain shards.
    """
    return summed_loss(_options, pred, labels, global_vocab_size=global_vocab_size)


def summed_loss(asked: dict[str, Any], pred: Any, labels: Any, *, global_vocab_size: int | None = None) -> Any:
    """Compute :func:`cross_entropy_loss` with these options of :func:`install`; if empty, torchtitan computes it."""
    if _left_to_torchtitan(pred, asked):
        return _titan["cross_entropy_loss"](pred, labels, global_vocab_size=global_vocab_size)
    options = {"reduction": "sum", "gradient": asked["gradient"], "impl": asked["impl"]}
    if is_dtensor(pred):
        return dtensor.cross_entropy(pred, labels, **options)
    group = _vocabulary_group()
    if group is None:
        return vocab_parallel_cross_entropy(pred, labels, **options)
    vocab_size = asked["vocab_size"] if global_vocab_size is None else global_vocab_size
    if vocab_size is None:
        raise TypeError(
            "global_vocab_size: expected the size of the vocabulary with plain shards, got None; give it to "
            "CrossEntropyLoss.Config or to install(vocab_size=)"
        )
    shard = shard_of_local("pred", pred, vocab_size, group.rank(), group.size())
    return vocab_parallel_cross_entropy(pred, labels, group=group, vocab_size=shard, **options)


def compute_logprobs(logits: Any, labels: Any, *, return_entropy: bool = False) -> Any:
    """Compute torchtitan's log-probability of each label, as its function of this name, without gathering logits.

    Collectives: with a cut vocabulary one all_gather of 12 bytes per token and rank, 16 with entropy.

    Args:
        logits: ``[B, L, C]`` as :func:`cross_entropy_loss` takes them.
        labels: ``[B, L]`` global ids, or -100, which has log-probability 0.
        return_entropy: also return the entropies, of ignored tokens too. They have no gradient.
    """
    if _left_to_torchtitan(logits, _options, has_vocab_size=_options.get("vocab_size") is not None):
        return _titan["compute_logprobs"](logits, labels, return_entropy=return_entropy)
    options = {"gradient": _options["gradient"], "impl": _options["impl"]}
    group = None if is_dtensor(logits) else _vocabulary_group()
    function: Any = dtensor.token_log_probs if is_dtensor(logits) else token_log_probs
    if group is not None:
        shard = shard_of_local("logits", logits, _options["vocab_size"], group.rank(), group.size())
        options |= {"group": group, "vocab_size": shard}
    if not return_entropy:
        return function(logits, labels, **options)
    log_probs, entropy = with_entropies(logits, labels, function, **options)
    return log_probs, entropy.detach()


_switch = Switch(
    "torchtitan 0.3",
    {f"{LOSS}:{function.__name__}": function for function in (cross_entropy_loss, compute_logprobs)},
    LEFT,
    _calls,
)
report = _switch.report


def _vocabulary_group() -> Any:
    """Return the group over which plain logits are cut, or None."""
    if _titan["get_spmd_backend"]() != "spmd_types" or _titan["spmd_mesh_size"]("tp") == 1:
        return None
    return _titan["current_spmd_mesh"]().get_group("tp")


def _left_to_torchtitan(logits: Any, asked: dict[str, Any], has_vocab_size: bool = True) -> bool:
    """Return whether torchtitan's own function computes the call, and count the call."""
    if not asked:
        return True
    reason = "fused"
    if is_dtensor(logits):
        last = logits.dim() - 1
        if not any(getattr(placement, "dim", None) == last for placement in logits.placements):
            reason = UNCUT
    elif _titan["spmd"].is_type_checking():
        reason = TYPES
    elif not has_vocab_size and _vocabulary_group() is not None:
        reason = UNKNOWN
    if not torch.compiler.is_dynamo_compiling():
        _calls[reason] += 1
    return reason != "fused"
