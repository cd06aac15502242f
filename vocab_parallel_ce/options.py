"""The settings of a call: every keyword that is no tensor and no group, with its default, and most with their checks.

``Settings`` say what is computed, :class:`HeadOptions` how a head computes it. Functions and modules share them.
:func:`loss_options` makes of them what the mathematics and the kernels take.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Annotated, Any, NamedTuple, TypedDict, get_type_hints

import torch
from torch.compiler import is_dynamo_compiling

from vocab_parallel_ce import checks
from vocab_parallel_ce.shard import LOGITS, VocabShard
from vocab_parallel_ce.spec import GradOutputs, LossOptions, TokenOutputs

REDUCTIONS = ("mean", "sum", "none")
GRADIENT_MODES = ("auto", "in_forward", "in_backward", "out_of_place")
HEAD_GRADIENTS = ("auto", "in_forward", "in_backward")
COUNT = "count"  # valid tokens are counted
MOST_TOKENS = 2**20  # of a chunk: a larger number is one of bytes
IMPLEMENTATIONS = ("reference", "triton", "one_pass")
DIVERGENCE = "divergence"  # the output that needs a teacher
OUTPUTS = tuple(name for name in TokenOutputs._fields[1:] if name != DIVERGENCE)  # the others alongside the loss
DIFFERENTIABLE = tuple(name for name in GradOutputs._fields[1:] if name != DIVERGENCE)  # those with a gradient
BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def check_logits_dtype(name: str, dtype: object) -> None:
    if dtype not in (None, torch.float32):
        remedy = "leave it out for the dtype of the products"
        raise ValueError(f"{name}: expected None or torch.float32, got {dtype!r}; {remedy}")


def check_chunk_size(name: str, size: object) -> None:
    if isinstance(size, str):
        if size != "auto":
            bytes_of(size)
    elif not isinstance(size, torch.SymInt):  # of torch.export: the operator checks the number
        count = checks.checked_count(name, size)
        if count > MOST_TOKENS:
            raise ValueError(
                f"{name}: a number is one of tokens, expected at most {MOST_TOKENS}, got {count}; for bytes of "
                f"logits pass '{count}B', or as '256MiB'"
            )


def check_keep_logits(name: str, kept: object) -> None:
    if not isinstance(kept, str):
        raise TypeError(f"{name}: expected 'none', 'all', or bytes as '2GiB', got {kept!r}")
    if kept not in ("none", "all"):
        bytes_of(kept, name, "'none', 'all'")


def check_valid_tokens(name: str, count: object) -> None:
    if isinstance(count, str):
        if count != COUNT:
            raise ValueError(f"{name}: expected 'count', a number or None, got {count!r}")
    elif count is not None:
        checks.check_integer(name, count)
        if count < 0:  # type: ignore[operator]
            raise ValueError(f"{name}: must be at least 0, got {count}")


# Types of settings with their checks: functions of a name and a value.
Integer = Annotated[int, checks.check_integer]
FlagOrAuto = Annotated[bool | str, checks.check_flag_or_auto]
NotNegative = Annotated[float, checks.check_number]
Share = Annotated[float, partial(checks.check_number, at_most=1)]
Positive = Annotated[float, partial(checks.check_number, positive=True)]
Reduction = Annotated[str, partial(checks.check_choice, choices=REDUCTIONS)]
GradientMode = Annotated[str, partial(checks.check_choice, choices=GRADIENT_MODES)]
Implementation = Annotated[str, partial(checks.check_choice, choices=("auto", *IMPLEMENTATIONS))]
HeadGradient = Annotated[str, partial(checks.check_choice, choices=HEAD_GRADIENTS)]
Flag = Annotated[bool, checks.check_bool]
ChunkSize = Annotated[int | str, check_chunk_size]
LogitsDtype = Annotated[torch.dtype | None, check_logits_dtype]
KeepLogits = Annotated[str, check_keep_logits]
ValidTokens = Annotated[int | str | None, check_valid_tokens]
MostTokens = Annotated[int | None, lambda name, count: None if count is None else checks.checked_count(name, count)]
# Fields that others rule out, and those that only own_tokens has.
RULED_OUT: dict[str, tuple[str, ...]] = {"sequence_parallel": ("reduce_hidden_grad", "valid_tokens")}
RULED_OUT["own_tokens"] = ("sequence_parallel", *RULED_OUT["sequence_parallel"])
OWN_ALONE = ("average", "max_tokens")
Takes = Mapping[str, tuple[Any, ...]]  # values of fields of HeadOptions


def checks_of(record: type) -> dict[str, Callable[[str, Any], None]]:
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class HeadOptions:
    """How a head is computed: ``options=`` of the functions of hidden states, and of their module.

    Checked when it is made. It is frozen, has a hash and no tensors: one record serves all calls.
    docs/linear.md has more on each field.

    Args:
        gradient: ``"in_forward"``: forward computes the gradients, and backward scales them; for reduction ``"none"``
            only with ``expected_grad_output``. ``"in_backward"``: backward recomputes the logits, and may run again.
            ``"auto"``: in_forward for mean and sum, but not for fp16 with class weights. With outputs that have a
            gradient, ``"auto"`` also keeps ``4 * K * R`` bytes per token, ``hidden`` and ``weight``: if backward gets
            a gradient of an output, or runs again, it recomputes the logits. ``"in_forward"`` raises then.
        impl, check_labels: as in :func:`vocab_parallel_cross_entropy`.
        sequence_parallel: ``hidden`` and its gradient are this rank's part along the first dimension, and ``labels``
            are of all tokens; needs a group.
        chunk_size: tokens per chunk, at most 2**20, or the bytes of a chunk's logits as ``"256MiB"`` or ``"0.5GB"``, or
            ``"auto"``.
        logits_dtype: ``torch.float32``: 16-bit products accumulate and stay in fp32, and the gradient of the logits
            is rounded once to 16 bits for the products that follow. None: logits are rounded to 16 bits.
        keep_logits: logits to keep for a backward that computes the gradients, which otherwise makes them again:
            ``"none"``, ``"all"``, or those of the first chunks that fit in so many bytes, as ``"2GiB"``. Backward
            overwrites them. Under saved-tensor hooks none are kept, nor if ``"auto"`` computes in the forward pass,
            except those of :func:`linear_objective`'s groups that are longer than a chunk.
        reduce_hidden_grad: False leaves the gradient of ``hidden`` this rank's share of the sum.
        own_tokens: ``hidden``, labels and results are those of this rank's own tokens, of any number; ``weight`` is a
            DTensor that FSDP2 cut over ``group``, in a unit of its own (docs/linear.md).
        average: with ``own_tokens``, whether the gradient of ``weight`` is the mean over the ranks; else the sum.
        max_tokens: with ``own_tokens``, the most tokens that a rank has, the same on every rank. None: the ranks
            exchange it, for which the host waits.
        valid_tokens: upper bound on labels that are not ``ignore_index``; the rest skip the matmul. Exceeding it
            raises where ``check_labels`` looks, as on a CPU, otherwise it gives a NaN loss. ``"count"`` counts them,
            for which the host waits for the device; in no CUDA graph.

    Example:
        >>> from vocab_parallel_ce import HeadOptions, linear_cross_entropy
        >>> options = HeadOptions(chunk_size=4096, logits_dtype=torch.float32)
        >>> options
        HeadOptions(chunk_size=4096, logits_dtype=torch.float32)
        >>> loss = linear_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]), options=options)
        >>> round(loss.item(), 4)
        1.3863
    """

    gradient: HeadGradient = "auto"
    impl: Implementation = "auto"
    check_labels: FlagOrAuto = "auto"
    sequence_parallel: Flag = False
    chunk_size: ChunkSize = "auto"
    logits_dtype: LogitsDtype = None
    keep_logits: KeepLogits = "none"
    reduce_hidden_grad: Flag = True
    own_tokens: Flag = False
    average: Flag = True
    max_tokens: MostTokens = None
    valid_tokens: ValidTokens = None

    def __post_init__(self) -> None:
        for name, check in HEAD_CHECKS.items():
            check(name, getattr(self, name))
        if self.keep_logits != "none" and self.gradient == "in_forward":
            raise ValueError(
                "keep_logits: expected 'none' with gradient='in_forward', because backward reads no logits then, "
                f"got {self.keep_logits!r}; pass another gradient, or leave it out"
            )
        for mode, names in RULED_OUT.items():
            for name in names if getattr(self, mode) else ():
                default, value = getattr(HeadOptions, name), getattr(self, name)
                if value != default:
                    expected = f"expected {default} with {mode}, whose ranks hold their own parts"
                    raise ValueError(f"{name}: {expected}, got {value!r}; leave it out")
        for name in () if self.own_tokens else OWN_ALONE:
            if getattr(self, name) != getattr(HeadOptions, name):
                raise ValueError(f"{name}: expected own_tokens=True with it, got {getattr(self, name)!r}; leave it out")

    def __repr__(self) -> str:
        """Return the fields that are not their defaults."""
        shown = [f"{name}={value!r}" for name, value in vars(self).items() if value != getattr(HeadOptions, name)]
        return f"HeadOptions({', '.join(shown)})"


HEAD_CHECKS = checks_of(HeadOptions)
DEFAULTS = HeadOptions()
HEAD_FIELDS = tuple(vars(DEFAULTS))


class TeacherOptions(NamedTuple):
    """What is computed of a teacher alongside labels; ``Teacher`` says what the fields are."""

    divergence: str = "forward"
    beta: float = 0.5
    temperature: float = 1.0
    softcap: float | None = None
    logit_scale: float = 1.0


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
    teacher: TeacherOptions | None = None  # None: there is none, or its divergence is the loss
    negated: bool = False  # log-probabilities in place of losses
    reduction: Reduction = "mean"
    gradient: GradientMode = "auto"  # this and the next two: of a head those of its options
    impl: Implementation = "auto"
    check_labels: FlagOrAuto = "auto"
    vocab_size: int | VocabShard | None = None
    head: HeadOptions = DEFAULTS  # how a head computes it; of its first three fields only those above are read

    @property
    def asks_for_differentiable(self) -> bool:
        """Whether an output is asked for that has a gradient of its own."""
        return any(name in GradOutputs._fields for name in self.outputs)


# Settings that public functions take as keywords, over logits and over heads. `public` makes their signatures.


class ObjectiveSettings(TypedDict, total=False):
    ignore_index: int
    softcap: float | None
    logit_scale: float
    vocab_size: int | VocabShard | None


class LogProbSettings(ObjectiveSettings, total=False):
    outputs: Sequence[str]


class LossSettings(LogProbSettings, total=False):
    label_smoothing: float
    z_loss: float
    reduction: str


class DivergenceSettings(TypedDict, total=False):
    divergence: str
    beta: float
    temperature: float
    hard_weight: float
    ignore_index: int
    reduction: str
    vocab_size: int | VocabShard | None


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
    if "outputs" in values:
        values["outputs"] = checked_outputs(values["outputs"])
    if is_dynamo_compiling():
        return Settings(**{"head": DEFAULTS, **values})  # Dynamo of torch 2.11 cannot make the default
    size, teacher = values.get("vocab_size"), values.get("teacher") or ()
    try:
        return _known_settings(*(size if isinstance(size, VocabShard) else ()), *teacher, **values)
    except TypeError:  # the checks name the value
        return Settings(**values)


def head_settings(options: HeadOptions | None, *, takes: Takes | None = None, **values: Any) -> Settings:
    """Return the settings of a head's loss. ``takes`` are the values of fields that not all functions take."""
    options = DEFAULTS if options is None else options
    if type(options) is not HeadOptions:
        raise TypeError(f"options: expected a HeadOptions or None, got {type(options).__name__}; pass HeadOptions(...)")
    for name, choices in (takes or {}).items():
        if getattr(options, name) not in choices:
            expected = " or ".join(map(repr, choices))
            raise ValueError(
                f"options.{name}: expected {expected} in this function, got {getattr(options, name)!r}; leave it out"
            )
    shared = {"gradient": options.gradient, "impl": options.impl, "check_labels": options.check_labels}
    return settings_of(head=options, **(shared | values))


@functools.lru_cache(maxsize=1024, typed=True)
def _known_settings(*members: Any, **values: Any) -> Settings:  # by types within a shard and a teacher too
    return Known(**values)


def known(settings: Settings) -> object:
    """Return an object, the same for settings of equal values and types.

    Raises TypeError if a value has no hash.
    """
    size, teacher = settings.vocab_size, settings.teacher or ()
    return _known(*settings, *(size if isinstance(size, VocabShard) else ()), *teacher)


@functools.lru_cache(maxsize=1024, typed=True)
def _known(*values: Any) -> object:
    return object()


CHECKS = checks_of(Settings)


def loss_options(settings: Settings, vocab_size: int | None, *, class_weight: bool = False) -> LossOptions:
    """Check the settings, except of the shard, and return those of the mathematics.

    ``class_weight`` says whether there is one. ``vocab_size`` is None if it is not known yet. A temperature divides z:
    ``softcap * tanh(u / softcap) / T`` is that of ``u / T`` and ``softcap / T``.
    """
    for name, check in CHECKS.items():
        check(name, getattr(settings, name))
    softcap = settings.softcap
    requested = set(checked_outputs(settings.outputs))
    if DIVERGENCE in requested and settings.teacher is None:
        raise ValueError("outputs: expected no 'divergence' without a teacher, got it; pass linear_objective's teacher")
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
    """Return a caller's ``outputs``, a tuple or list of names, as a tuple."""
    if not isinstance(outputs, tuple | list):
        raise TypeError(f"outputs: expected a tuple of names, such as ('entropy',), got {outputs!r}")
    for name in outputs:
        checks.check_choice("outputs", name, (*OUTPUTS, DIVERGENCE))
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


def shard_of_rank(settings: Settings, n_columns: int, rank: int, n_ranks: int, *, subject: str = LOGITS) -> VocabShard:
    """Return the given shard, or that of ``vocab_size``, or an equal one. ``subject`` has the ``n_columns``."""
    size = settings.vocab_size
    if isinstance(size, VocabShard):
        return size.checked(n_columns, n_ranks, subject=subject)
    if size is None:
        return VocabShard(rank * n_columns, (rank + 1) * n_columns, n_ranks * n_columns)
    return VocabShard.for_rank(size, rank, n_ranks, n_columns, subject=subject)
