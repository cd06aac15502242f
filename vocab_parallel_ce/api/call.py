"""From a public function to the path of all losses: verification, ``torch.compile``, keywords, autograd."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import verify
from vocab_parallel_ce.dtensor import is_dtensor, process_group_of
from vocab_parallel_ce.head import loops
from vocab_parallel_ce.head.plan import Arguments, plan_linear_call
from vocab_parallel_ce.head.run import OverHead
from vocab_parallel_ce.layout import walkable
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import Advanced, Function, HeadSettings, Settings, check_names
from vocab_parallel_ce.plan import plan_call
from vocab_parallel_ce.run import OverLogits, as_token_outputs, forward
from vocab_parallel_ce.spec import TokenOutputs
from vocab_parallel_ce.top import Top

# PyTorch 2.11 fails inside Dynamo.
TRACES_DTENSORS: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]
DEFAULTS = Advanced()


def public(
    eager_if: Callable[[dict[str, Any]], bool] | None = None, *, verifies: bool = True
) -> Callable[[Function], Function]:
    """Decorate a public function: verified if verification is on, and eager if that is what its keywords ask for.

    ``torch.compile`` traces the function up to an operator of ``operators``. Where ``eager_if`` says so, under
    verification, and for DTensors that this PyTorch cannot trace, its graph breaks instead. ``verifies=False`` is for
    functions that call another public one.
    """

    def decorate(function: Function) -> Function:
        def run(*args: Any, **kwargs: Any) -> Any:
            if verify.is_on and verifies:
                return verify.verified(function, args, kwargs)
            return function(*args, **kwargs)

        # It imports the compiler: not before the first call that needs it.
        untraced_run = functools.cache(functools.partial(torch.compiler.disable, run))
        why = (
            f"vocab_parallel_ce: {function.__qualname__} has no operator for this call (docs/compile.md says which "
            "calls have one), so the graph must break here; compile without fullgraph=True"
        )

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "group" in kwargs:
                kwargs["group"] = process_group_of(kwargs["group"])
            compiles = torch.compiler.is_dynamo_compiling()
            if (compiles or "torch._dynamo" in sys.modules) and (
                verify.is_on
                or (eager_if and eager_if(kwargs))
                or (not TRACES_DTENSORS and any(map(is_dtensor, verify.members((*args, *kwargs.values())))))
            ):
                if compiles:
                    torch._dynamo.graph_break(msg=why)  # with fullgraph=True the compiler raises this
                # If it does not compile: Dynamo can leave this frame alone and still trace those below.
                return (torch.compiler.disable(run) if compiles else untraced_run())(*args, **kwargs)
            return run(*args, **kwargs) if verify.is_on and verifies else function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def overwrites(keywords: dict[str, Any]) -> bool:
    """Return whether the caller asks for a gradient in the memory of the logits, which compilers cannot follow."""
    return keywords.get("gradient") in ("in_forward", "in_backward")


def keeps_logits(keywords: dict[str, Any]) -> bool:
    """Return whether backward finds logits, which an operator would have to return."""
    return keywords.get("keep_logits", "none") != "none"


def settings_of(
    keywords: dict[str, Any], known: dict[str, Any], function: Callable[..., Any], advanced: Advanced, **fixed: Any
) -> tuple[Settings, HeadSettings]:
    """Return the settings of the loss, with ``fixed``, and those of the head, of ``function``'s keywords."""
    check_names(keywords, known, function)
    of_head = {name: value for name, value in keywords.items() if name in HeadSettings._fields}
    of_loss = {name: value for name, value in keywords.items() if name not in of_head}
    of_head |= {"reduce_hidden_grad": advanced.reduce_hidden_grad, "valid_tokens": advanced.valid_tokens}
    return Settings(**of_loss, **fixed), HeadSettings(**of_head)


def checked_advanced(advanced: object, *used: str) -> Advanced:
    """Return the record, or that of the defaults for None; raise for a field that is set and not among ``used``."""
    if advanced is None:
        return DEFAULTS
    if not isinstance(advanced, Advanced):
        got = type(advanced).__name__
        raise TypeError(
            f"advanced: expected an Advanced or None, got {got}; pass vocab_parallel_ce.options.Advanced(...)"
        )
    for name, value in advanced._asdict().items():
        default = Advanced._field_defaults[name]
        if name not in used and value is not default and (isinstance(value, Tensor) or value != default):
            raise ValueError(f"advanced: {name} has no use in this function, expected one of {', '.join(used)}, got it")
    return advanced


def over_logits(
    loss: Loss,
    logits: Tensor,
    given: Any,
    settings: Settings,
    *,
    group: Any,
    num_items: float | Tensor | None = None,
    top: Top | None = None,
) -> tuple[TokenOutputs, Tensor | None]:
    """Compute the outputs, under autograd if ``logits`` need a gradient; also return ``num_items`` as a tensor.

    ``given`` are the tensors alongside the logits, ``loss.Beside``. Fills ``top``. Compiled code gets an operator.
    """
    if torch.compiler.is_dynamo_compiling():  # of this frame; is_compiling() is of all threads
        from vocab_parallel_ce.operators import losses

        return losses(loss, logits, given, settings, group, num_items)
    call, beside = plan_call(loss, logits, given, settings, group, num_items, top)
    divisor = None if num_items is None else call.divisor
    if torch.is_grad_enabled() and logits.requires_grad:
        return as_token_outputs(OverLogits.apply(logits, beside, call), call.plan), divisor
    with torch.no_grad():
        return forward(call, walkable(logits), beside, logits.shape[:-1])[0], divisor


def over_head(
    loss: Loss, given: Arguments, settings: Settings, head: HeadSettings, top: Top | None = None
) -> tuple[TokenOutputs, Tensor | None, Tensor | None]:
    """Compute the outputs, those per token of the shape of the labels; under autograd if something needs a gradient.

    Also return ``num_items`` as a tensor, and the factor NaN or 1 that tells if more than ``valid_tokens`` are valid.
    """
    if torch.compiler.is_dynamo_compiling():
        from vocab_parallel_ce.head.operators import linear_losses

        return linear_losses(loss, given, settings, head)
    linear, local, beside = plan_linear_call(loss, given, settings, head)
    linear = linear._replace(call=linear.call._replace(top=top))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in local):
        outputs = as_token_outputs(OverHead.apply(*local, beside, linear), linear.call.plan)
    else:
        with torch.no_grad(), torch.autocast(local.hidden.device.type, enabled=False):
            outputs, *_ = loops.forward(linear, local, beside)
    shape = given.labels.shape
    value, *others = (v if v is None or v.dim() == 0 else v.view(*shape, *v.shape[1:]) for v in outputs)
    assert value is not None
    return TokenOutputs(value, *others), linear.call.divisor, linear.overflow
