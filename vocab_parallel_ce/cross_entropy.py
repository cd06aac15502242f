"""Vocabulary-parallel cross-entropy over logits: the public function and its autograd.

Collectives: forward one (none for one rank), backward none. See ``spec`` for the mathematics and the
legend of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.overwritten import mark_overwritten
from vocab_parallel_ce.pipeline import (
    Call,
    flat,
    overwritable,
    per_row,
    prepare_call,
    source_and_new,
    walkable,
)
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import TokenOutputs, is_ignored

SECOND_BACKWARD = (
    "cross-entropy: backward ran a second time, but the first had its gradient in the logits' "
    "storage and has handed it on; ask for gradient='out_of_place' (TransformerEngine's "
    "overwrite_input=False) to run backward again"
)
DOUBLE_BACKWARD = (
    "cross-entropy: expected backward without create_graph: its gradient cannot be differentiated again"
)
OVERWRITTEN = (
    "cross-entropy: the logits, or the tensor that they are a view of, were overwritten before backward read "
    "them; if another loss did it, ask for gradient='out_of_place' in both"
)

_current_age = torch._C._autograd._get_sequence_nr  # of this thread: the number of the next autograd node

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class LossMetrics(NamedTuple):
    """What a trainer logs beside the loss, from the same read of the logits; none requires a gradient.

    ``predictions`` ``[...]`` int64: global id of the largest capped logit, of equals the lowest; -1 in
    rows that are ignored or have no finite largest one. ``token_accuracy`` ``[]`` fp32: the share of
    labels predicted, of the rows that are not ignored. ``lse`` ``[...]`` fp32: 0 in ignored rows.
    ``z_loss`` fp32: the part of the loss that is ``z_loss * lse^2``, reduced as the loss is.
    """

    predictions: Tensor
    token_accuracy: Tensor
    lse: Tensor
    z_loss: Tensor


def public(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``function`` as a public one: eager under ``torch.compile``, and compared if verification is on.

    The graph of a compiled caller breaks there: the kernels overwrite their input and take tuples, neither of
    which inductor follows.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(call)(*args, **kwargs)
        if verify.is_on:
            return verify.verified(function, args, kwargs)
        return function(*args, **kwargs)

    return call


@public
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: int | Tensor | None = None,
    return_metrics: bool = False,
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool = False,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
) -> Any:
    """Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

    Rank ``r`` of the ``R`` ranks of ``group`` holds the columns ``[r * C, (r + 1) * C)`` of a
    vocabulary of ``V = R * C``, unless ``vocab_size`` or ``shard`` say otherwise. Formula, in fp32:

        z    = softcap * tanh(logit_scale * x / softcap), or logit_scale * x without softcap
        loss = (1 - e) * (lse - z_y) + e * (lse - mean_i z_i) + z_loss * lse^2

    with ``lse`` and the mean over the whole vocabulary. Without the options this is
    ``torch.nn.functional.cross_entropy``.

    Overwrites: by default backward writes the gradient over ``logits``: read what else you need of them
    before it. With ``"in_forward"`` this call does. Nothing is overwritten if no gradient is needed, if
    autograd could not tell who else needs the logits (``"auto"`` below), or with ``"out_of_place"``. Logits
    whose last dimension is not dense, whose leading dimensions have more than three strides that do not
    merge, or that overlap themselves (expanded), are copied and stay as they are.

    Collectives: forward one all_gather of ``4 * K`` bytes a row from each rank, ``K`` = 3, with label
    smoothing 2 more, with metrics 1 more, on the current stream; backward none. No host synchronisation
    unless ``check_labels``; every path can be captured in a CUDA graph. Under ``torch.compile`` the graph
    breaks here.

    Args:
        logits: ``[..., C]`` bf16, fp16 or fp32, at least two dimensions, of any strides.
        labels: ``[...]`` int64 or int32 ids in the *global* vocabulary, the same on every rank.
        group: the ``torch.distributed.ProcessGroup`` of the ranks that share a vocabulary; None for
            logits that hold all of it. All of its ranks call, with the same leading dimensions, dtype,
            labels and options, which :func:`verify_group` can check.
        ignore_index: rows with this label have loss 0 and gradient 0, and do not count in the mean.
        label_smoothing: in [0, 1]; the mean over the vocabulary is over all ``V`` columns.
        smoothing_formula: ``"torch"``: ``e = label_smoothing``; ``"megatron"``: ``e = label_smoothing *
            V / (V - 1)``, Megatron-LM's on one rank (on several it takes V and the mean of a shard).
        z_loss: coefficient of ``lse^2`` (PaLM, arXiv:2204.02311, section 5).
        softcap: bound of the logits (Gemma 2, arXiv:2408.00118, section 2), or None.
        logit_scale: positive factor of the logits.
        reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or
            ``"none"``.
        num_items: with ``"sum"``, what the sum is divided by, in loss and gradient; 0 items give 0. An int,
            or a tensor of one element: on the device of ``logits`` the host never looks at it (nor at its
            sign), one on the CPU is read at the call.
        return_metrics: also return :class:`LossMetrics`; ``V`` at most 2**24.
        gradient: ``"auto"``: ``"in_backward"``, and ``"out_of_place"`` while saved-tensor hooks are active
            (non-reentrant checkpoint, offloading) and for a leaf or a view of one. ``"in_backward"``:
            computed by backward over the logits, with the grad_output folded in. ``"in_forward"``:
            computed by forward over the logits and scaled by backward, which rounds it a second time if the
            grad_output is not 1; for logits that nobody else reads and that are no view in the graph.
            ``"out_of_place"``: computed by backward into a new tensor, so that logits survive and backward
            may run again; a view with gaps costs a copy. The two in place are not checked under saved-tensor
            hooks: there autograd does not notice that another operation needs the logits.
        impl: ``"one_pass"``, ``"triton"``, ``"reference"``, or ``"auto"``: on a GPU one_pass where one
            launch can do it (one rank, gradient in_forward, no option but ``ignore_index`` and ``z_loss``,
            aligned rows of a width that was measured) and triton otherwise, reference elsewhere. Where no
            gradient is needed, one_pass is triton.
        check_labels: raise for a label outside ``[0, V)`` that is not ``ignore_index``, at the price
            of a host synchronisation. Otherwise its row's loss and gradient are NaN.
        vocab_size: ``V``. Ranks have ``ceil(V / R)`` columns each and the last one what is left, or all
            have ``C`` columns of which those beyond ``V`` are padding: no part of the softmax, gradient 0.
        shard: the columns of this rank, where they are neither.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``. With
        ``return_metrics``, ``(loss, LossMetrics)``.

    Raises:
        TypeError: a dtype or type is not one of those above, or the call is inside a ``torch.func`` transform
            or has a tangent of forward-mode AD.
        ValueError: shapes, devices or values do not fit, ``impl`` cannot run here, or an earlier call has
            left its gradient in ``logits``.
        RuntimeError: from backward, if it runs again over a gradient in place, with ``create_graph`` or
            ``is_grads_batched``, or if something else has written to the logits.
    """
    call = prepare_call(
        logits,
        labels,
        group=group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        smoothing_formula=smoothing_formula,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        num_items=num_items,
        metrics=return_metrics,
        gradient=gradient,
        impl=impl,
        check_labels=check_labels,
        vocab_size=vocab_size,
        shard=shard,
    )
    outputs = run(call, logits, labels)
    return (outputs.loss, loss_metrics(call, outputs, labels)) if return_metrics else outputs.loss


def run(call: Call, logits: Tensor, labels: Tensor) -> TokenOutputs:
    """What ``call`` asks for; under autograd where ``logits`` need a gradient."""
    if torch.is_grad_enabled() and logits.requires_grad:
        outputs = _CrossEntropy.apply(logits, labels, call)
        return (
            TokenOutputs(*outputs) if isinstance(outputs, tuple) else TokenOutputs(outputs, None, None, None)
        )
    with torch.no_grad():
        return call.outputs(walkable(logits), flat(labels))[0]


@torch.no_grad()
def loss_metrics(call: Call, outputs: TokenOutputs, labels: Tensor) -> LossMetrics:
    """What was asked for beside the loss, from the outputs of every row."""
    assert outputs.lse is not None and outputs.predictions is not None
    n_valid = (~is_ignored(labels, call.options)).sum()
    is_right = (outputs.predictions == labels) & (outputs.predictions >= 0)
    accuracy = is_right.sum() / n_valid.clamp(min=1)
    if not call.options.z_loss:
        return LossMetrics(outputs.predictions, accuracy, outputs.lse, torch.zeros_like(outputs.loss))
    z_loss = call.options.z_loss * outputs.lse**2
    if call.reduction != "none":
        divisor = n_valid if call.reduction == "mean" else call.num_items
        z_loss = z_loss.sum()
        if divisor is not None:
            n = divisor.float().reshape(())
            z_loss = torch.where(n == 0, 0.0, z_loss / n)
    return LossMetrics(outputs.predictions, accuracy, outputs.lse, z_loss)


class _CrossEntropy(torch.autograd.Function):
    """Collectives: forward one, backward none.

    Saved: in_forward the gradient, in the logits' storage; otherwise the logits (no copy), labels
    and 4 K bytes a row and rank of statistics.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, call: Call) -> Any:
        ctx.call = call
        ctx.handed_on = False
        ctx.age = _current_age()
        ctx.set_materialize_grads(False)
        flat_labels = flat(labels)
        if call.gradient == "in_forward":
            grad = overwritable(logits)
            outputs = call.outputs_and_gradient(grad, flat_labels)
            if grad is logits:
                mark_overwritten(logits, 0, ctx.age)
            ctx.save_for_backward(grad)
        else:
            kept = logits if call.gradient == "out_of_place" else overwritable(logits)
            outputs, stats, divisor = call.outputs(walkable(kept), flat_labels)
            ctx.save_for_backward(kept, flat_labels, stats, divisor)
        if call.options.predictions:
            ctx.mark_non_differentiable(outputs.lse, outputs.predictions)
        elif not call.options.entropy:
            return outputs.loss  # a tuple, and what is None in it, costs autograd microseconds
        return tuple(outputs)

    @staticmethod
    def backward(
        ctx: Any, grad_loss: Tensor | None, grad_entropy: Tensor | None = None, *_: None
    ) -> tuple[Tensor | None, None, None]:
        saved = _compared_backward(ctx, grad_loss, grad_entropy) if verify.is_on else None
        if torch.is_grad_enabled():
            raise RuntimeError(DOUBLE_BACKWARD)
        if grad_loss is None and grad_entropy is None:
            return None, None, None
        if ctx.handed_on:
            raise RuntimeError(SECOND_BACKWARD)
        try:
            saved = ctx.saved_tensors if saved is None else saved
            return _logits_gradient(ctx, saved, grad_loss, grad_entropy), None, None
        except RuntimeError as error:
            _explain(error, grad_loss, grad_entropy)
            raise


def _logits_gradient(
    ctx: Any, saved: tuple[Any, ...], grad_loss: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """In the logits' memory, or in a new tensor."""
    call: Call = ctx.call
    kept, *others = saved
    logits, version = kept.detach(), kept._version
    grad_output = per_row(
        logits.new_zeros(1, dtype=torch.float32) if grad_loss is None else grad_loss, logits
    )
    ctx.handed_on = call.gradient != "out_of_place"
    if call.gradient == "in_forward":
        call.launchers.element_mul(logits, grad_output)
        increment_version(logits)
        mark_overwritten(kept, version, ctx.age)
        return logits
    source, grad = source_and_new(logits) if call.gradient == "out_of_place" else (logits, logits)
    call.write_gradient(
        source,
        *others,
        into=grad,
        grad_output=grad_output,
        grad_entropy=None if grad_entropy is None else per_row(grad_entropy, logits),
    )
    if grad is logits:
        increment_version(logits)
        mark_overwritten(kept, version, ctx.age)
    return grad


def _explain(error: RuntimeError, *grad_output: Tensor | None) -> None:
    """Raise what ``error`` means in a backward, with the remedy, if it is known."""
    if "inplace operation" in str(error):
        raise RuntimeError(f"{OVERWRITTEN} ({error})") from error
    check_backward(*grad_output)


def check_backward(*grad_output: Tensor | None) -> None:
    """That backward is neither recorded nor inside a transform.

    once_differentiable looks at the grad_output alone: with one that requires no gradient it would hand
    out a gradient that is silently a constant.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(DOUBLE_BACKWARD)
    is_batch = torch._C._functorch.is_legacy_batchedtensor  # as is_grads_batched makes them
    in_transform = torch._C._are_functorch_transforms_active()
    if in_transform or any(grad is not None and is_batch(grad) for grad in grad_output):
        raise RuntimeError(checks.IN_TRANSFORM)


def _compared_backward(ctx: Any, grad_loss: Tensor | None, grad_entropy: Tensor | None) -> tuple[Any, ...]:
    """Compare the grad_outputs of all ranks; what this rank alone would raise is raised on all.

    Returns the saved tensors: a checkpoint hands them out once.
    """
    given = [grad for grad in (grad_loss, grad_entropy) if grad is not None]
    with verify.open_call(ctx.call.group, given[0].device if given else None, is_backward=True):
        check_backward(grad_loss, grad_entropy)
        if ctx.handed_on:
            raise RuntimeError(SECOND_BACKWARD)
        try:
            saved: tuple[Any, ...] = ctx.saved_tensors
        except RuntimeError as error:
            _explain(error)
            raise
        verify.compare_backward(loss=grad_loss, entropy=grad_entropy)
    return saved
