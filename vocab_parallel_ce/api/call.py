"""From a public function to the path of all losses: verification, ``torch.compile``, keywords, autograd.

:class:`Outputs` is what a call returns alongside the loss, if it is asked for more.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Container, Iterable
from contextlib import nullcontext
from typing import Any, NoReturn, TypeAlias, TypeVar, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.utils import _pytree as pytree

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api import own_tokens
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor, process_group_of
from vocab_parallel_ce.head import loops
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.head.plan import LinearCall, plan_linear_call
from vocab_parallel_ce.head.products import without_autocast
from vocab_parallel_ce.head.run import over_head
from vocab_parallel_ce.layout import walkable
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import COUNT, DIFFERENTIABLE, HEAD_FIELDS, HeadOptions, Settings
from vocab_parallel_ce.plan import plan_call
from vocab_parallel_ce.run import forward, over_logits
from vocab_parallel_ce.spec import TokenOutputs
from vocab_parallel_ce.targets import with_padding


@dataclasses.dataclass(eq=False)
class Outputs:
    """The loss or the log-probabilities, and the outputs that were asked for. What was not is None.

    Read its fields by name: it has no positions, and unpacking it raises. PyTorch's trees (compile, DDP, FSDP) see
    the fields that are not None. A reentrant checkpoint sees none: return tensors from it.

    Per token, of the shape of the labels, except where it says otherwise. fp32 (fp64 for fp64 logits) if no other dtype
    is named. ``z`` are the scaled and capped logits, divided by the temperature. In ignored tokens numbers are 0, and
    ids -1. In tokens whose label is outside the vocabulary the first seven are NaN. The first five have a gradient.

    Example:
        >>> from vocab_parallel_ce import vocab_parallel_cross_entropy
        >>> logits, labels = torch.eye(3), torch.tensor([0, 1, 0])
        >>> found = vocab_parallel_cross_entropy(logits, labels, outputs=("predictions",))
        >>> found.predictions
        tensor([0, 1, 2])
        >>> found.entropy is None
        True
    """

    loss: Tensor | None = None  #: as the function returns it without outputs
    log_probs: Tensor | None = None  #: of the labels
    entropy: Tensor | None = None  #: in nats
    lse: Tensor | None = None  #: log-sum-exp of z
    divergence: Tensor | None = None  #: from a teacher, of :func:`linear_objective`
    sum_sq_probs: Tensor | None = None  #: sum_i p_i^2
    mean_logit: Tensor | None = None  #: mean of z over the vocabulary
    predictions: Tensor | None = None  #: int64 global id of the largest z, the lowest of equals; -1 if there is none

    def __getitem__(self, position: object) -> NoReturn:
        # Unpacking comes here too. Of all fields in order, it would take None for what was not asked for.
        raise TypeError(
            f"Outputs: expected a field by name, as outputs.loss or outputs.entropy, got position {position!r}, or an "
            "unpacking; read the names that were asked for"
        )


# Outputs where some are asked for. As Any: a type checker takes the result for the tensor that it mostly is.
TensorOrOutputs: TypeAlias = Tensor | Any
FIELDS = tuple(field.name for field in dataclasses.fields(Outputs))


def _flat(record: Outputs) -> tuple[list[Tensor], tuple[str, ...]]:
    """Return the tensors of a record, and their names."""
    names = tuple([name for name in FIELDS if getattr(record, name) is not None])
    return [getattr(record, name) for name in names], names


def _record(tensors: Iterable[Any], names: Iterable[str]) -> Outputs:
    return Outputs(**dict(zip(names, tensors, strict=True)))


pytree.register_pytree_node(Outputs, _flat, _record, serialized_type_name="vocab_parallel_ce.Outputs")


def split_temperature(temperature: float | Tensor) -> tuple[float, Tensor | None]:
    """Return the setting and the tensor: one that is a tensor is no setting."""
    return (1.0, temperature) if isinstance(temperature, Tensor) else (temperature, None)


def record_of(name: str, found: TokenOutputs, settings: Settings) -> Outputs:
    """Return the record of the loss, as its field ``name``, and of all that was asked for."""
    return Outputs(**{name: found.loss}, **{each: getattr(found, each) for each in settings.outputs})


# Returns None where the compiler traces no frame of this thread. Private: without it, where it is not imported.
_tracer: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: sys.modules.get("torch._dynamo")
)
# PyTorch 2.11 fails inside Dynamo.
TRACES_DTENSORS: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]
Function = TypeVar("Function", bound=Callable[..., Any])


def signature_of(function: Callable[..., Any], settings: type | None) -> inspect.Signature:
    """Return a function's signature, with ``settings`` and their defaults in the place of its ``**keywords``."""
    if settings is None:
        return inspect.signature(function)
    signature = inspect.signature(function, eval_str=True)
    *others, _ = signature.parameters.values()
    hints, kind = get_type_hints(settings), inspect.Parameter.KEYWORD_ONLY
    named = [
        inspect.Parameter(name, kind, default=default, annotation=hints[name])
        for name, default in Settings._field_defaults.items()
        if name in hints
    ]
    return signature.replace(parameters=[*others, *named])


# It imports the compiler: not before the first call that needs it.
untraced = functools.cache(lambda: torch.compiler.disable(verify.verified))


def public(
    eager_if: Callable[[dict[str, Any]], bool] | None = None, settings: Any = None
) -> Callable[[Function], Function]:
    """Decorate a public function: verified if verification is on, and eager if that is what its keywords ask for.

    ``settings`` is the TypedDict of its ``**keywords``.

    ``torch.compile`` traces the function up to an operator of ``compile``. Where ``eager_if`` says so, under
    verification, and for DTensors that this PyTorch cannot trace, its graph breaks instead.
    """

    def decorate(function: Function) -> Function:
        signature = signature_of(function, settings)
        known = frozenset(signature.parameters)
        swallows = settings is not None  # unknown keywords too, in its ``**keywords``
        takes_class_weight = {"class_weight", "weight"} & known == {"class_weight"}

        @functools.wraps(function)
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise unexpected(function, kwargs, known)

        why = (
            f"vocab_parallel_ce: {function.__qualname__} has no operator for this call (docs/compile.md says which "
            "calls have one), so the graph must break here; compile without fullgraph=True"
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "group" in kwargs:
                kwargs["group"] = process_group_of(kwargs["group"])
            if takes_class_weight and "weight" in kwargs:
                raise TypeError(checks.NOT_WEIGHT)
            called = function if not swallows or known.issuperset(kwargs) else refuse
            compiles = is_dynamo_compiling()
            if not compiles and is_exporting() and eager_if and eager_if(kwargs):
                raise RuntimeError(f"{why}, not torch.export")
            if (compiles or _tracer() is not None) and (
                verify.is_on
                or (eager_if and eager_if(kwargs))
                or (not TRACES_DTENSORS and any(map(is_dtensor, verify.members((*args, *kwargs.values())))))
            ):
                if compiles:
                    torch._dynamo.graph_break(msg=why)  # with fullgraph=True the compiler raises this
                # If it does not compile: Dynamo can leave this frame alone and still trace those below.
                return (torch.compiler.disable(verify.verified) if compiles else untraced())(called, args, kwargs)
            return verify.verified(called, args, kwargs) if verify.is_on else called(*args, **kwargs)

        if swallows:
            call.__signature__ = signature  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return decorate


def unexpected(called: Callable[..., Any], keywords: Iterable[str], known: Container[str]) -> TypeError:
    """Return Python's error for keywords that are not ``known``, and say where the first one goes."""
    name = next(each for each in keywords if each not in known)
    remedy = f"; pass options=HeadOptions({name}=...)" if "options" in known and name in HEAD_FIELDS else ""
    return TypeError(f"{called.__name__}() got an unexpected keyword argument {name!r}{remedy}")


def overwrites(keywords: dict[str, Any]) -> bool:
    """Return whether the caller asks for a gradient in the memory of the logits, which compilers cannot follow."""
    return keywords.get("gradient") in ("in_forward", "in_backward")


def needs_eager(keywords: dict[str, Any]) -> bool:
    """Return whether a head's call has no operator, waits for the device, or its backward writes, warns or raises.

    An operator would have to return the logits that are kept.
    """
    options, outputs = keywords.get("options"), keywords.get("outputs", ())
    writes = keywords.get("main_grad") is not None or keywords.get("expected_grad_output") is not None
    if type(options) is not HeadOptions:
        return writes
    is_named = options.gradient == "in_forward" and isinstance(outputs, tuple | list)
    raises = is_named and any(name in DIFFERENTIABLE for name in outputs)
    waits = options.valid_tokens == COUNT or options.own_tokens
    return writes or raises or waits or options.keep_logits != "none"


def run_logits(
    loss: Loss, logits: Tensor, targets: Any, settings: Settings, *, group: Any, num_items: float | Tensor | None = None
) -> TokenOutputs:
    """Compute the outputs, under autograd if ``logits`` need a gradient.

    Compiled code gets an operator.
    """
    if settings.vocab_size is not None and isinstance(logits, Tensor) and logits.dim() > 1 and not logits.shape[-1]:
        targets, settings = with_padding(targets, settings, *group_position(group))
        logits = F.pad(logits, (0, 1))
    if is_dynamo_compiling() or is_exporting():  # is_traced, without its frame
        from vocab_parallel_ce.compile import losses

        return losses(loss, logits, targets, settings, group, num_items)
    call, targets = plan_call(loss, logits, targets, settings, group, num_items)
    has_graph = torch.is_grad_enabled()
    if has_graph and logits.requires_grad:
        return TokenOutputs(*over_logits(logits, targets, call))
    with torch.no_grad() if has_graph else nullcontext():  # to enter the first takes microseconds
        return TokenOutputs(*forward(call, walkable(logits), targets)[0])


def run_objective(loss: Loss, arguments: Arguments, settings: Settings) -> tuple[Tensor, TokenOutputs]:
    """Compute the reduced loss of an objective, and the outputs, which have no gradient."""
    if settings.head.own_tokens:
        return own_tokens.objective_of(loss, arguments, settings, _run_objective)
    return _run_objective(loss, arguments, settings)[:2]


def _run_objective(loss: Loss, arguments: Arguments, settings: Settings) -> tuple[Tensor, TokenOutputs, LinearCall]:
    linear, local, targets = plan_linear_call(loss, arguments, settings)
    if linear.head.needs_gradient:
        total, *outputs = over_head(*local, targets, linear)
        found = TokenOutputs(*outputs)
    else:
        with torch.no_grad(), without_autocast(local.hidden.device):
            found, *_ = loops.forward(linear, local, targets)
            total = loops.total_of(linear)
    assert linear.objective is not None
    if linear.objective.errors is not None:
        verify.compare_results("objective's loss", total, linear.objective.errors, linear.call.group)
    return total, found, linear


def run_head(loss: Loss, arguments: Arguments, settings: Settings) -> TokenOutputs:
    """Compute the outputs, those per token of their shape; under autograd if something needs a gradient."""
    if is_dynamo_compiling() or is_exporting():
        from vocab_parallel_ce.compile import linear_losses

        return linear_losses(loss, arguments, settings)
    if settings.head.own_tokens:
        return own_tokens.losses(loss, arguments, settings, run_head)
    linear, local, targets = plan_linear_call(loss, arguments, settings)
    if linear.head.needs_gradient:
        return TokenOutputs(*over_head(*local, targets, linear))
    with torch.no_grad(), without_autocast(local.hidden.device):
        return loops.forward(linear, local, targets)[0]
