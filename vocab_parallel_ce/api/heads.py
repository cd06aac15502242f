"""Losses and log-probabilities of a head, whose logits are made in chunks of tokens: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.api.call import (
    TensorOrOutputs,
    keeps_logits,
    label_targets,
    public,
    record_of,
    run_head,
    split_temperature,
)
from vocab_parallel_ce.api.given_ids import are_given_ids, check_given_ids, head_log_probs_at, rows_of_all
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.head.settings import COUNT
from vocab_parallel_ce.losses.given_ids import Ids
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import DIFFERENTIABLE, HeadSettings, checked_outputs, divided_by, settings_of
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.targets import Head


def needs_eager(keywords: dict[str, Any]) -> bool:
    """Return whether a call waits for the device, its backward writes, warns or raises, or it has no operator."""
    writes = keywords.get("main_grad") is not None or keywords.get("expected_grad_output") is not None
    outputs = keywords.get("outputs", ())
    is_named = keywords.get("gradient") == "in_forward" and isinstance(outputs, tuple | list)
    raises = is_named and any(name in DIFFERENTIABLE for name in outputs)
    return writes or raises or keywords.get("valid_tokens") == COUNT or keeps_logits(keywords)


@public(needs_eager)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    outputs: Sequence[str] = (),
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool | str = "auto",
    vocab_size: int | VocabShard | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | str = "auto",
    logits_dtype: torch.dtype | None = None,
    keep_logits: str = "none",
    main_grad: Tensor | None = None,
    reduce_hidden_grad: bool = True,
    expected_grad_output: Tensor | None = None,
    valid_tokens: int | str | None = None,
) -> TensorOrOutputs:
    """:func:`vocab_parallel_cross_entropy` of ``hidden @ weight.T + bias``, which is made in chunks of tokens.

    Overwrites nothing. Under ``torch.autocast`` the products have its dtype, and each gradient has its tensor's.
    docs/linear.md has more on every argument, on memory, DTensor, FSDP and Megatron-LM.

    Collectives: all_gathers of ``4 * K`` bytes per token from each rank: with gradients in the forward pass two per
    chunk (one for 128 tokens or fewer), otherwise one in all. The pass that computes gradients also runs one all_reduce
    of ``d_hidden`` per chunk. With ``sequence_parallel`` that is a reduce_scatter, and each pass all_gathers
    ``hidden``. With ``class_weight`` a mean all_gathers 4 bytes more. All ranks must agree on what needs a gradient.

    Args:
        hidden: ``[..., D]`` bf16, fp16 or fp32, at least two dimensions, the same on every rank, or its part.
        weight: ``[C, D]``, this rank's rows of the head, of the dtype of ``hidden``, or a DTensor. Its gradient is
            summed in fp32 and rounded once.
        labels: ``[...]`` int64 or int32 ids in the global vocabulary, the same on every rank.
        bias: ``[C]``, this rank's, or a DTensor as ``weight`` is, or None.
        group: the ranks that share the vocabulary, or None; a DTensor needs it.
        gradient: ``"in_forward"``: forward computes the gradients, and backward scales them; for ``"none"`` only with
            ``expected_grad_output``.
            ``"in_backward"``: backward recomputes the logits, and may run again. ``"auto"``: in_forward for mean
            and sum of bf16 and fp32, otherwise in_backward. With outputs that have a
            gradient, ``"auto"`` also keeps ``4 * K * R`` bytes per token, ``hidden`` and ``weight``: if backward gets
            a gradient of an output, or runs again, it recomputes the logits. ``"in_forward"`` raises then.
        sequence_parallel: ``hidden`` and its gradient are this rank's part along the first dimension, and ``labels``
            are of all tokens; needs a group.
        chunk_size: tokens per chunk, at most 2**20, or the bytes of a chunk's logits as ``"256MiB"`` or ``"0.5GB"``, or
            ``"auto"``.
        keep_logits: logits to keep for a backward that computes the gradients, which otherwise makes them again:
            ``"none"``, ``"all"``, or those of the first chunks that fit in so many bytes, as ``"2GiB"``. Backward
            overwrites them. Under saved-tensor hooks none are kept, nor if ``"auto"`` computes in the forward pass.
        logits_dtype: ``torch.float32``: 16-bit products accumulate and stay in fp32, and the gradient of the logits
            is rounded once to 16 bits for the products that follow. None: logits are rounded to 16 bits.
        outputs: as in :func:`vocab_parallel_cross_entropy`.
        main_grad: ``[C, D]`` fp32, contiguous: backward adds the gradient of ``weight`` to it, and ``weight`` gets
            none, or zeros if it has ``grad_added_to_main_grad``, which becomes True.
        reduce_hidden_grad: False leaves the gradient of ``hidden`` this rank's share of the sum.
        expected_grad_output: ``[...]``, the same on every rank: what will multiply each loss, except one factor for
            all, for reduction ``"none"`` with ``"in_forward"``. If that does not hold in backward, the gradients are
            NaN, and a later call warns.
        valid_tokens: upper bound on labels that are not ``ignore_index``; the rest skip the matmul. Exceeding it
            raises where ``check_labels`` looks, as on a CPU, otherwise it gives a NaN loss. ``"count"`` counts them,
            for which the host waits for the device; in no CUDA graph.
        others: as in :func:`vocab_parallel_cross_entropy`, of these logits. A DTensor brings its shard.

    Returns:
        as :func:`vocab_parallel_cross_entropy`.

    Raises:
        TypeError, ValueError: as there; also for a quantised weight.
        RuntimeError: from backward, if it runs again over gradients of ``"in_forward"``, or gets a gradient of another
            output than the loss there, or with ``create_graph``.

    Example:
        >>> from vocab_parallel_ce import linear_cross_entropy
        >>> hidden, head = torch.ones(2, 3, requires_grad=True), torch.eye(4, 3, requires_grad=True)
        >>> loss = linear_cross_entropy(hidden, head, torch.tensor([0, 3]))
        >>> round(loss.item(), 4)
        1.7143
        >>> loss.backward()
        >>> hidden.grad.shape, head.grad.shape
        (torch.Size([2, 3]), torch.Size([4, 3]))
    """
    settings = settings_of(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        logit_scale=logit_scale,
        reduction=reduction,
        gradient=gradient,
        impl=impl,
        check_labels=check_labels,
        vocab_size=vocab_size,
        outputs=outputs if type(outputs) is tuple and not outputs else checked_outputs(outputs),
    )
    if num_items is not None:
        settings = divided_by(num_items, settings)
    head = HeadSettings(sequence_parallel, reduce_hidden_grad, valid_tokens, chunk_size, logits_dtype, keep_logits)
    tensors, targets = Head(hidden, weight, bias), Labels(labels, class_weight)
    arguments = Arguments(tensors, targets, group, num_items, main_grad, expected_grad_output)
    losses = run_head(LABELS, arguments, settings, head)
    return record_of("loss", losses, settings) if settings.outputs else losses.loss


@public(needs_eager)
def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float | Tensor = 1.0,
    threshold: Tensor | None = None,
    outputs: Sequence[str] = (),
    impl: str = "auto",
    check_labels: bool | str = "auto",
    vocab_size: int | VocabShard | None = None,
    sequence_parallel: bool = False,
    chunk_size: int | str = "auto",
    logits_dtype: torch.dtype | None = None,
    keep_logits: str = "none",
    main_grad: Tensor | None = None,
    reduce_hidden_grad: bool = True,
    valid_tokens: int | str | None = None,
) -> TensorOrOutputs:
    """:func:`token_log_probs` of ``hidden @ weight.T + bias``, which is made in chunks of tokens.

    Backward recomputes the logits, and computes the gradients of all outputs together.

    Collectives, errors: those of :func:`linear_cross_entropy` with reduction ``"none"``.

    Args:
        temperature, outputs, threshold: as in :func:`token_log_probs`, of the logits that you made for it.
        others: as in :func:`linear_cross_entropy`.

    Returns:
        as :func:`token_log_probs`.

    Example:
        >>> from vocab_parallel_ce import linear_token_log_probs
        >>> hidden, head = torch.ones(2, 3), torch.zeros(4, 3)
        >>> linear_token_log_probs(hidden, head, torch.tensor([0, 3]))
        tensor([-1.3863, -1.3863])
    """
    requested, (number, tensor) = checked_outputs(outputs), split_temperature(temperature)
    has_ids = are_given_ids(labels, hidden)
    settings = settings_of(
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=number,
        negated=not has_ids,
        reduction="none",
        gradient="in_backward",
        impl=impl,
        check_labels=check_labels,
        vocab_size=vocab_size,
        outputs=requested,
    )
    head = HeadSettings(sequence_parallel, reduce_hidden_grad, valid_tokens, chunk_size, logits_dtype, keep_logits)
    tensors = Head(hidden, weight, bias)
    if has_ids:
        check_given_ids(labels, hidden, rows_of_all(weight, group), settings, threshold, group)
        return head_log_probs_at(tensors, Ids(labels, tensor), settings, head, group=group, main_grad=main_grad)
    targets = label_targets(labels, tensor, threshold, requested)
    arguments = Arguments(tensors, targets, group, None, main_grad)
    losses = run_head(LABELS, arguments, settings, head)
    return record_of("log_probs", losses, settings) if requested else losses.loss
