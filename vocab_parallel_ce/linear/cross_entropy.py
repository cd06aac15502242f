"""Cross-entropy of a head whose logits are made in chunks of tokens: the public functions and their autograd.

A reduced loss of bf16 or fp32 computes its gradients in forward, with three products in all. Others keep 4 K R
bytes per token on each rank, and compute the logits again in backward, with grad_output in the one rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from vocab_parallel_ce.backward import Refusals, run_backward
from vocab_parallel_ce.cross_entropy import LossMetrics, loss_metrics, public
from vocab_parallel_ce.linear import pipeline
from vocab_parallel_ce.linear.expected import expected_with_last
from vocab_parallel_ce.linear.pipeline import Gradients
from vocab_parallel_ce.linear.plan import Arguments, Inputs, LinearCall, plan_linear_call
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import (
    HeadSettings,
    LinearLogProbKeywords,
    LinearLossKeywords,
    Settings,
    check_names,
    divided_by,
    keyword_defaults,
    with_keywords,
)
from vocab_parallel_ce.outputs import TokenLogProbs, asks_for_top, results_of, settings_of, taken_temperature, top_of
from vocab_parallel_ce.run import as_returned, as_token_outputs
from vocab_parallel_ce.shift import next_labels, without_last
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.top import Top

if TYPE_CHECKING:
    from typing_extensions import Unpack

LOSS_KEYWORDS = keyword_defaults(LinearLossKeywords)
LOG_PROB_KEYWORDS = keyword_defaults(LinearLogProbKeywords)
REFUSALS = Refusals(
    "linear cross-entropy: backward ran a second time, but the first has handed its gradients on; ask for "
    "gradient='in_backward' to run backward again"
)


def needs_eager(keywords: dict[str, Any]) -> bool:
    """Return whether backward writes to a tensor of the caller's, or warns, which compilers cannot follow."""
    return keywords.get("main_grad") is not None or keywords.get("expected_grad_output") is not None


@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    return_metrics: Literal[False] = False,
    **keywords: Unpack[LinearLossKeywords],
) -> Tensor: ...
@overload
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    return_metrics: Literal[True],
    **keywords: Unpack[LinearLossKeywords],
) -> tuple[Tensor, LossMetrics]: ...
@public(needs_eager)
@with_keywords(LOSS_KEYWORDS)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    return_metrics: bool = False,
    main_grad: Tensor | None = None,
    expected_grad_output: Tensor | None = None,
    **keywords: Any,
) -> Tensor | tuple[Tensor, LossMetrics]:
    """:func:`vocab_parallel_cross_entropy` of ``hidden @ weight.T + bias``, which is made in chunks of tokens.

    Overwrites nothing. Under ``torch.autocast`` the products have its dtype, and each gradient has its tensor's.
    docs/linear.md has more on every argument, on memory, DTensor, FSDP and Megatron-LM.

    Collectives: all_gathers of ``4 * K`` bytes per token from each rank: with gradients in forward two per chunk (one
    for 128 tokens or fewer), otherwise one in all. The pass that computes gradients also runs one all_reduce of
    ``d_hidden`` per chunk. With ``sequence_parallel`` that is a reduce_scatter, and each pass all_gathers ``hidden``.
    With ``class_weight`` a mean with gradients in forward all_gathers 4 bytes. All ranks must agree on what needs a
    gradient.

    Args:
        hidden: ``[..., D]`` bf16, fp16 or fp32, at least two dimensions, the same on every rank, or its part.
        weight: ``[C, D]``, this rank's rows of the head, of the dtype of ``hidden``, or a DTensor. Its gradient is
            summed in fp32 and rounded once.
        labels: ``[...]`` int64 or int32 ids in the global vocabulary, the same on every rank.
        bias: ``[C]``, this rank's, or a DTensor as ``weight`` is, or None.
        group: the ranks that share the vocabulary, or None; a DTensor needs it.
        main_grad: ``[C, D]`` fp32, contiguous: backward adds the gradient of ``weight`` to it, and ``weight``
            gets none, or zeros if it has ``grad_added_to_main_grad``, which becomes True.
        gradient: ``"in_forward"``: forward computes the gradients, and backward scales them; for ``"none"`` only with
            ``expected_grad_output``.
            ``"in_backward"``: backward makes the logits again, and may run again. ``"auto"``: in_forward for mean
            and sum of bf16 and fp32, otherwise in_backward.
        expected_grad_output: ``[...]``, the same on every rank: what will multiply each loss, except one factor for
            all, for reduction ``"none"`` with ``"in_forward"``. If that does not hold in backward, the gradients
            are NaN, and a later call warns.
        sequence_parallel: ``hidden`` and its gradient are this rank's part along dimension ``sequence_dim``, by
            default the first, and ``labels`` are of all tokens; needs a group.
        reduce_hidden_grad: False leaves the gradient of ``hidden`` this rank's share of the sum.
        valid_tokens: upper bound on labels that are not ``ignore_index``; the rest skip the matmul. Exceeding
            it gives a NaN loss.
        chunk_tokens, memory_budget: tokens per chunk, or instead bytes for a chunk's logits.
        logits_dtype: ``torch.float32``: 16-bit products accumulate and stay in fp32, and the gradient of the logits
            is rounded once to 16 bits for the products that follow. None: logits are rounded to 16 bits.
        others: as in :func:`vocab_parallel_cross_entropy`, of these logits. A DTensor brings its ``shard``.

    Returns:
        as :func:`vocab_parallel_cross_entropy`.

    Raises:
        TypeError, ValueError: as there; also for a quantised weight.
        RuntimeError: from backward, if it runs again over gradients of ``"in_forward"``, or with ``create_graph``.
    """
    settings, head = split_keywords(keywords, LOSS_KEYWORDS, linear_cross_entropy, return_metrics=return_metrics)
    settings = divided_by(num_items, settings)
    if settings.shift:
        labels = next_labels(labels, settings.ignore_index)
        expected_grad_output = expected_with_last(expected_grad_output, labels)
    beside = Labels(labels, class_weight)
    given = Arguments(hidden, weight, bias, labels, beside, group, num_items, main_grad, expected_grad_output)
    outputs, divisor, overflow = run(LABELS, given, settings, head)
    if settings.shift:
        outputs, labels = without_last(outputs, labels.dim() - 1), labels[..., :-1]
    if not return_metrics:
        return outputs.loss
    metrics = loss_metrics(outputs, labels, settings, divisor)
    if overflow is not None:
        predictions, *values = metrics  # ids cannot be NaN
        metrics = LossMetrics(predictions, *(value * overflow for value in values))
    return outputs.loss, metrics


@overload
def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    entropy: Literal[False] = False,
    **keywords: Unpack[LinearLogProbKeywords],
) -> Tensor: ...
@overload
def linear_token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, entropy: Literal[True], **keywords: Unpack[LinearLogProbKeywords]
) -> tuple[Tensor, Tensor]: ...
@overload
def linear_token_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, outputs: Sequence[str], **keywords: Unpack[LinearLogProbKeywords]
) -> TokenLogProbs: ...
@public(lambda keywords: needs_eager(keywords) or asks_for_top(keywords))
@with_keywords(LOG_PROB_KEYWORDS)
def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    entropy: bool = False,
    outputs: Sequence[str] = (),
    main_grad: Tensor | None = None,
    **keywords: Any,
) -> Tensor | tuple[Tensor, Tensor] | TokenLogProbs:
    """:func:`token_log_probs` of ``hidden @ weight.T + bias``, which is made in chunks of tokens.

    Backward computes the logits again and the gradients of all outputs together. The output ``"rank"`` computes them
    again in forward.

    Collectives, errors: those of :func:`linear_cross_entropy` with reduction ``"none"``; of ``"rank"`` and ``top_k``
    those of :func:`token_log_probs`.

    Args:
        temperature, entropy, outputs, top_k: as in :func:`token_log_probs`.
        others: as in :func:`linear_cross_entropy`.

    Returns:
        as :func:`token_log_probs`.
    """
    fixed = {**settings_of(entropy, outputs), "reduction": "none", "gradient": "in_backward"}
    temperature = taken_temperature(keywords)
    beside = Labels(labels, temperature=temperature)
    given = Arguments(hidden, weight, bias, labels, beside, group, None, main_grad)
    settings, head = split_keywords(keywords, LOG_PROB_KEYWORDS, linear_token_log_probs, **fixed)
    top = top_of(settings)
    found, _, _ = run(LABELS, given, settings, head, top)
    return results_of(found, labels, outputs, settings.ignore_index, top)


def split_keywords(
    keywords: dict[str, Any], known: dict[str, Any], function: Callable[..., Any], **fixed: Any
) -> tuple[Settings, HeadSettings]:
    """Return the settings of the loss, with ``fixed``, and those of the head, of ``function``'s keywords."""
    check_names(keywords, known, function)
    of_head = {name: value for name, value in keywords.items() if name in HeadSettings._fields}
    of_loss = {name: value for name, value in keywords.items() if name not in of_head}
    return Settings(**of_loss, **fixed), HeadSettings(**of_head)


def run(
    loss: Loss, given: Arguments, settings: Settings, head: HeadSettings, top: Top | None = None
) -> tuple[TokenOutputs, Tensor | None, Tensor | None]:
    """Compute the outputs, those per token of the shape of the labels; under autograd if something needs a gradient.

    Also return ``num_items`` as a tensor, and the factor NaN or 1 that tells if more than ``valid_tokens`` are valid.
    """
    if torch.compiler.is_dynamo_compiling():
        from vocab_parallel_ce.linear.operators import linear_losses

        return linear_losses(loss, given, settings, head)
    linear, inputs, beside = plan_linear_call(loss, given, settings, head)
    linear = linear._replace(call=linear.call._replace(top=top))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        outputs = as_token_outputs(_OverHead.apply(*inputs, beside, linear), linear.call.plan)
    else:
        with torch.no_grad(), torch.autocast(inputs.hidden.device.type, enabled=False):
            outputs, _ = pipeline.forward(linear, inputs, beside)
    value, *others = (v if v is None or v.dim() == 0 else v.view(given.labels.shape) for v in outputs)
    assert value is not None
    return TokenOutputs(value, *others), linear.call.divisor, linear.overflow


class _OverHead(torch.autograd.Function):
    """Saved: in_forward the gradients; otherwise the head, labels, divisor, statistics of all ranks, what is beside."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, beside: Any, linear: LinearCall) -> Any:
        ctx.linear, ctx.handed_on, ctx.device, ctx.weight_dtype = linear, False, hidden.device, weight.dtype
        ctx.record = type(beside)
        ctx.set_materialize_grads(False)
        inputs, plan = Inputs(hidden, weight, bias), linear.call.plan
        with torch.autocast(hidden.device.type, enabled=False):
            if plan.gradient == "in_forward":
                outputs, gradients = pipeline.forward_with_gradients(linear, inputs, beside, ctx.needs_input_grad[:3])
                ctx.save_for_backward(*gradients)
            else:
                outputs, stats = pipeline.forward(linear, inputs, beside)
                kept = plan.loss.saved(beside, plan.options)
                ctx.save_for_backward(*inputs, linear.labels, linear.call.divisor, *stats, *kept)
        return as_returned(ctx, outputs, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gradients = run_backward(_gradients, ctx, grads, REFUSALS, ctx.linear.call.group, ctx.device)
        return *(gradients or (None, None, None)), None, None


def _gradients(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Gradients:
    """Return the gradients of hidden, weight and bias."""
    linear: LinearCall = ctx.linear
    with torch.autocast(ctx.device.type, enabled=False):
        if linear.call.plan.gradient == "in_forward":
            assert grads.loss is not None
            ctx.handed_on = True
            if linear.expected is None:
                gradients = pipeline.scaled(linear, saved, grads.loss)
            else:
                gradients = pipeline.scaled_by_factor(linear, saved, grads.loss, ctx.weight_dtype)
        else:
            inputs, linear, divisor = Inputs(*saved[:3]), linear._replace(labels=saved[3]), saved[4]
            n, wanted = 5 + len(linear.call.plan.launchers.widths), ctx.needs_input_grad[:3]
            gradients = pipeline.backward(linear, inputs, ctx.record(*saved[n:]), saved[5:n], divisor, wanted, grads)
    d_hidden, d_weight, d_bias = gradients
    if d_weight is None or linear.main_grad is None:
        return gradients
    if linear.parameter is None:
        return d_hidden, None, d_bias
    # Megatron-LM's hooks wait for a gradient.
    linear.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return d_hidden, torch.zeros_like(d_weight, dtype=linear.parameter.dtype), d_bias
