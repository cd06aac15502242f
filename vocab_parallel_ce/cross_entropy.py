"""Vocabulary-parallel cross-entropy over logits: the public function and its autograd.

See ``spec`` for the mathematics and the legend of shapes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from vocab_parallel_ce import verify
from vocab_parallel_ce.dtensor import is_dtensor, process_group_of
from vocab_parallel_ce.layout import walkable
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import (
    Function,
    LossKeywords,
    Settings,
    check_names,
    divided_by,
    keyword_defaults,
    with_keywords,
)
from vocab_parallel_ce.plan import plan_call
from vocab_parallel_ce.run import OverLogits, as_token_outputs, forward
from vocab_parallel_ce.shift import next_labels, without_last
from vocab_parallel_ce.spec import TokenOutputs, is_ignored
from vocab_parallel_ce.top import Top

if TYPE_CHECKING:
    from typing_extensions import Unpack

KEYWORDS = keyword_defaults(LossKeywords)
# PyTorch 2.11 fails inside Dynamo.
TRACES_DTENSORS: bool = torch.__version__ >= (2, 13)  # type: ignore[operator]


class LossMetrics(NamedTuple):
    """What a trainer logs beside the loss, from the same read of the logits; none requires a gradient."""

    predictions: Tensor  # [...] int64 global id of the largest z, the lowest of equals; -1: ignored or none
    token_accuracy: Tensor  # [] fp32 share of the labels that are predicted; ignored labels do not count
    lse: Tensor  # [...] fp32 log-sum-exp, 0 in ignored rows
    z_loss: Tensor  # fp32 part of the loss that is z_loss * lse^2, reduced as the loss is


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
                or (not TRACES_DTENSORS and any(map(is_dtensor, (*args, *kwargs.values()))))
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


@overload
def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, return_metrics: Literal[False] = False, **keywords: Unpack[LossKeywords]
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, *, return_metrics: Literal[True], **keywords: Unpack[LossKeywords]
) -> tuple[Tensor, LossMetrics]: ...
@public(overwrites)
@with_keywords(KEYWORDS)
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    return_metrics: bool = False,
    **keywords: Any,
) -> Tensor | tuple[Tensor, LossMetrics]:
    """Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

    In fp32, with ``lse`` and the mean over the whole vocabulary of ``V`` columns, for the ``R`` ranks of ``group``:

        z    = softcap * tanh(logit_scale * x / softcap), or logit_scale * x without softcap
        loss = (1 - e) * (lse - z_y) + e * (lse - mean_i z_i) + z_loss * lse^2

    Without options this is ``torch.nn.functional.cross_entropy``. docs/options.md has every option in detail.

    Overwrites: by default nothing that anybody can still read; see ``gradient``. Nothing is overwritten if no gradient
    is needed. Logits are copied, and stay as they are, if their last dimension is not dense, if they overlap
    themselves (expanded), or if more than three leading strides do not merge.

    Collectives: forward one all_gather of ``4 * K`` bytes per row from each rank, on the current stream; backward
    none. ``K`` is 3, with label smoothing 2 more, with metrics 1 more, with
    class weights 1 more. The host waits for the device only with
    ``check_labels``; every path can be captured in a CUDA graph. Under ``torch.compile`` it is one operator, and the
    gradient is out of place, unless ``gradient`` names another mode: then the graph breaks (docs/compile.md).

    Args:
        logits: ``[..., C]`` bf16, fp16 or fp32, at least two dimensions, of any strides. For fp64, as for a gradient
            check, plain PyTorch runs, in fp64 throughout; so is the loss.
        labels: ``[...]`` int64 or int32 ids in the *global* vocabulary, the same on every rank.
        group: the ``ProcessGroup`` of the ranks that share a vocabulary, or a ``DeviceMesh`` of one dimension; None for
            logits that hold all of it. All of its ranks call, with arguments that fit together; :func:`verify_calls`
            checks that.
        ignore_index: rows with this label have loss 0 and gradient 0, and do not count in the mean.
        label_smoothing: ``e``, in [0, 1].
        smoothing_formula: ``"torch"``, or ``"megatron"``, for which ``e`` is ``V / (V - 1)`` times ``label_smoothing``.
        z_loss: coefficient of ``lse^2`` (PaLM, arXiv:2204.02311, section 5).
        softcap: bound of the logits (Gemma 2, arXiv:2408.00118, section 2), or None.
        logit_scale: positive factor of the logits.
        reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or ``"none"``.
        num_items: divides the sum, also for ``"mean"``, in the place of the number of rows; 0 items give 0. A
            number, or a tensor of one element, which the host reads only on the CPU.
        class_weight: ``[V]``, or ``[C]`` for this rank's columns, of any floating dtype: PyTorch's ``weight``. A mean
            is divided by the sum of the labels' weights.
        return_metrics: also return :class:`LossMetrics`; ``V`` at most 2**24.
        gradient: where it is written. ``"auto"``: over the logits if nobody else can see them when backward runs,
            otherwise into a new tensor (docs/gradients.md). ``"out_of_place"``: into a new tensor. ``"in_backward"``:
            over the logits, whoever holds them. ``"in_forward"``: the same in this call, and backward scales it, which
            rounds again if ``grad_output`` is not 1; for logits that are no view in the graph. The last two are not
            safe under saved-tensor hooks.
        impl: ``"one_pass"``, ``"triton"``, ``"reference"``, or ``"auto"``: the first of them that can run.
        check_labels: raise for a label outside ``[0, V)`` that is not ``ignore_index``; otherwise its row is NaN.
        vocab_size: ``V``. Either each rank has ``ceil(V / R)`` columns and the last has the rest, or all have ``C``
            columns, of which those beyond ``V`` are padding: no part of the softmax, gradient 0. None: ``R * C``.
        shard: the columns of this rank, if neither holds.
        shift: token t predicts the label at t + 1 of the last dimension, ``T``; unreduced losses and metrics are
            ``[..., T - 1]``.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``. With
        ``return_metrics``, ``(loss, LossMetrics)``.

    Raises:
        TypeError: a type or dtype does not fit, or inside a ``torch.func`` transform or forward-mode AD.
        ValueError: shapes, devices or values do not fit, ``impl`` cannot run here, or an earlier call has
            left its gradient in ``logits``.
        RuntimeError: from backward, if it runs again over a gradient in place, with ``create_graph`` or
            ``is_grads_batched``, or if something else has written to the logits.
    """
    check_names(keywords, KEYWORDS, vocab_parallel_cross_entropy)
    settings = divided_by(num_items, Settings(return_metrics=return_metrics, **keywords))
    if settings.shift:
        labels = next_labels(labels, settings.ignore_index)
    outputs, divisor = run(LABELS, logits, Labels(labels, class_weight), settings, group=group, num_items=num_items)
    if settings.shift:
        outputs, labels = without_last(outputs, labels.dim() - 1), labels[..., :-1]
    return (outputs.loss, loss_metrics(outputs, labels, settings, divisor)) if return_metrics else outputs.loss


def run(
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

    ``given`` are the tensors beside the logits, ``loss.Beside``. Fills ``top``. Compiled code gets an operator.
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


@torch.no_grad()
def loss_metrics(outputs: TokenOutputs, labels: Tensor, settings: Settings, divisor: Tensor | None) -> LossMetrics:
    """Compute the metrics from the outputs of every row; ``divisor`` is that of a sum."""
    assert outputs.lse is not None and outputs.predictions is not None
    n_tokens = (~is_ignored(labels, settings.ignore_index)).sum()
    is_right = (outputs.predictions == labels) & (outputs.predictions >= 0)
    accuracy = is_right.sum() / n_tokens.clamp(min=1)
    if not settings.z_loss:
        return LossMetrics(outputs.predictions, accuracy, outputs.lse, torch.zeros_like(outputs.loss))
    z_loss = float(settings.z_loss) * outputs.lse**2
    if settings.reduction != "none":
        divisor = n_tokens if settings.reduction == "mean" else divisor
        z_loss = z_loss.sum()
        if divisor is not None:
            n = divisor.to(z_loss.dtype).reshape(())
            z_loss = torch.where(n == 0, 0.0, z_loss / n)
    return LossMetrics(outputs.predictions, accuracy, outputs.lse, z_loss)
