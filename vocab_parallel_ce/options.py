"""The settings of a call: every keyword that is no tensor and no group, with its default, and most with their checks.

Functions and modules share them. :func:`loss_options` makes of them what the mathematics and the kernels take.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch.compiler import is_dynamo_compiling

from vocab_parallel_ce import checks
from vocab_parallel_ce.shard import LOGITS, VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, TokenOutputs

REDUCTIONS = ("mean", "sum", "none")
GRADIENT_MODES = ("auto", "in_forward", "in_backward", "out_of_place")
IMPLEMENTATIONS = ("reference", "triton", "one_pass")
OUTPUTS = TokenOutputs._fields[1:]  # alongside the loss
DIFFERENTIABLE = GradOutputs._fields[1:]  # those with a gradient of their own
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}

# Types of settings with their checks: functions of a name and a value.
Integer = Annotated[int, checks.check_integer]
FlagOrAuto = Annotated[bool | str, checks.check_flag_or_auto]
NotNegative = Annotated[float, checks.check_number]
Share = Annotated[float, partial(checks.check_number, at_most=1)]
Positive = Annotated[float, partial(checks.check_number, positive=True)]
Reduction = Annotated[str, partial(checks.check_choice, choices=REDUCTIONS)]
GradientMode = Annotated[str, partial(checks.check_choice, choices=GRADIENT_MODES)]


class Settings(NamedTuple):
    """What a caller asks for; :func:`vocab_parallel_cross_entropy` and :func:`token_log_probs` say what."""

    ignore_index: Integer = -100
    label_smoothing: Share = 0.0
    z_loss: NotNegative = 0.0
    softcap: float | None = None
    logit_scale: Positive = 1.0
    temperature: Positive = 1.0
    divergence: str = "forward"
    beta: float = 0.5
    hard_weight: float = 0.0
    outputs: tuple[str, ...] = ()
    n_ids: int = 0  # given ids per token; labels have none
    negated: bool = False  # log-probabilities in place of losses
    reduction: Reduction = "mean"
    gradient: GradientMode = "auto"
    impl: str = "auto"
    check_labels: FlagOrAuto = "auto"
    vocab_size: int | VocabShard | None = None

    @property
    def asks_for_differentiable(self) -> bool:
        """Whether an output is asked for that has a gradient of its own."""
        return any(name in DIFFERENTIABLE for name in self.outputs)


class HeadSettings(NamedTuple):
    """What a caller asks for of a head, besides the loss's :class:`Settings`."""

    sequence_parallel: bool = False
    reduce_hidden_grad: bool = True
    valid_tokens: int | str | None = None
    chunk_size: int | str = "auto"
    logits_dtype: torch.dtype | None = None
    keep_logits: str = "none"


class Known(Settings):
    """Settings that are one object for equal values of equal types: 1, 1.0 and True are equal, but not one type."""

    __slots__ = ()
    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__

    def _replace(self, **changes: Any) -> Settings:  # type: ignore[override]
        return Settings(*self)._replace(**changes)


def settings_of(**values: Any) -> Settings:
    """Return the settings of a caller's keywords, Known if all have a hash."""
    if is_dynamo_compiling():
        return Settings(**values)
    size = values.get("vocab_size")
    try:
        return _known_settings(*(size if isinstance(size, VocabShard) else ()), **values)
    except TypeError:  # the checks name the value
        return Settings(**values)


@functools.lru_cache(maxsize=1024, typed=True)
def _known_settings(*shard: Any, **values: Any) -> Settings:  # by types within a shard too
    return Known(**values)


def known(settings: Settings | HeadSettings) -> object:
    """Return an object, the same for settings of equal values and types.

    Raises TypeError if a value has no hash.
    """
    size = getattr(settings, "vocab_size", None)
    return _known(*settings, *size) if isinstance(size, VocabShard) else _known(*settings)


@functools.lru_cache(maxsize=1024, typed=True)
def _known(*values: Any) -> object:
    return object()


_HINTS = get_type_hints(Settings, include_extras=True)
CHECKS = {name: hint.__metadata__[0] for name, hint in _HINTS.items() if hasattr(hint, "__metadata__")}


def loss_options(settings: Settings, vocab_size: int | None, *, class_weight: bool = False) -> LossOptions:
    """Check the settings, except of the shard and ``impl``, and return those of the mathematics.

    ``class_weight`` says whether there is one. ``vocab_size`` is None if it is not known yet. A temperature divides z:
    ``softcap * tanh(u / softcap) / T`` is that of ``u / T`` and ``softcap / T``.
    """
    for name, check in CHECKS.items():
        check(name, getattr(settings, name))
    softcap = settings.softcap
    requested = set(checked_outputs(settings.outputs))
    if "predictions" in requested and vocab_size is not None and vocab_size > 2**24:  # fp32 cannot hold all ids
        raise ValueError(f"vocab_size: must be at most 2**24 with predictions, got {vocab_size}; leave them out")
    if class_weight and "mean_logit" in requested:  # the sum of logits has the weights
        raise ValueError(
            "outputs: expected no 'mean_logit' with class_weight, which is a factor in its sum, got both; leave one out"
        )
    logit_scale = settings.logit_scale / settings.temperature
    checks.check_number("logit_scale / temperature", logit_scale, positive=True)
    if softcap is not None:
        checks.check_number("softcap", softcap, positive=True)
        softcap = float(softcap / settings.temperature)
        checks.check_number("softcap / temperature", softcap, positive=True)
    derived: dict[str, Any] = {
        "smoothing": float(settings.label_smoothing),
        "logit_scale": float(logit_scale),
        "softcap": softcap,
        "temperature": None,  # in logit_scale and softcap
        "threshold": None,
        "class_weight": class_weight,
        **{name: name in requested for name in OUTPUTS},
    }
    same = {
        # NumPy's numbers become Python's.
        name: getattr(settings, name) if default is None else type(default)(getattr(settings, name))
        for name, default in LossOptions._field_defaults.items()
        if name not in derived
    }
    return LossOptions(**derived, **same)


def checked_outputs(outputs: object) -> tuple[str, ...]:
    """Return a caller's ``outputs``, a tuple or list of names in ``OUTPUTS``, as a tuple."""
    if not isinstance(outputs, tuple | list):
        raise TypeError(f"outputs: expected a tuple of names, such as ('entropy',), got {outputs!r}")
    for name in outputs:
        checks.check_choice("outputs", name, OUTPUTS)
    return tuple(outputs)


def bytes_of(text: str, name: str = "chunk_size", others: str = "'auto', a number of tokens") -> int:
    """Return the bytes that a text such as ``"256MiB"`` or ``"0.5GB"`` says; ``others`` are what else it may be."""
    match = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*({'|'.join(BYTES)})", text)
    n_bytes = 0 if match is None else int(Fraction(match[1]) * BYTES[match[2]])
    if not n_bytes:
        raise ValueError(f"{name}: expected {others}, or bytes as '256MiB' (in {', '.join(BYTES)}), got {text!r}")
    return n_bytes


def divided_by(num_items: object, settings: Settings) -> Settings:
    """Return ``settings``; those of a sum for a mean if ``num_items`` takes the place of the number of tokens."""
    return settings if num_items is None or settings.reduction != "mean" else settings._replace(reduction="sum")


def check_settings(settings: Settings, n_ranks: int) -> None:
    """Check all that needs no tensor, for a module's constructor."""
    size = settings.vocab_size
    if isinstance(size, VocabShard):
        size = size.checked(None, n_ranks).vocab_size
    elif size is not None:
        size = checks.checked_count("vocab_size", size)
    loss_options(settings, size)
    checks.check_choice("impl", settings.impl, ("auto", *IMPLEMENTATIONS))


def shard_of_rank(settings: Settings, n_columns: int, rank: int, n_ranks: int, *, subject: str = LOGITS) -> VocabShard:
    """Return the given shard, or that of ``vocab_size``, or an equal one. ``subject`` has the ``n_columns``."""
    size = settings.vocab_size
    if isinstance(size, VocabShard):
        return size.checked(n_columns, n_ranks, subject=subject)
    if size is None:
        return VocabShard(rank * n_columns, (rank + 1) * n_columns, n_ranks * n_columns)
    return VocabShard.for_rank(size, rank, n_ranks, n_columns, subject=subject)
