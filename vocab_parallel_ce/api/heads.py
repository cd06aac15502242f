"""Losses and log-probabilities of a head, whose logits are made in chunks of tokens: the public functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from vocab_parallel_ce.api.call import TensorOrOutputs, needs_eager, public, record_of, run_head, split_temperature
from vocab_parallel_ce.api.given_ids import ids_or_labels, loss_and_targets
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import HeadOptions, LogProbSettings, LossSettings, Takes, divided_by, head_settings
from vocab_parallel_ce.targets import Head

LOG_PROBS: Takes = {"gradient": ("auto", "in_backward")}


@public(needs_eager, LossSettings)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    main_grad: Tensor | None = None,
    expected_grad_output: Tensor | None = None,
    options: HeadOptions | None = None,
    **keywords: Unpack[LossSettings],
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
        main_grad: ``[C, D]`` fp32, contiguous: backward adds the gradient of ``weight`` to it, and ``weight`` gets
            none, or zeros if it has ``grad_added_to_main_grad``, which becomes True.
        expected_grad_output: ``[...]``, the same on every rank: what will multiply each loss, except one factor for
            all, for reduction ``"none"`` with ``"in_forward"``. If that does not hold in backward, the gradients are
            NaN, and a later call warns.
        options: a :class:`HeadOptions`: where gradients are computed, chunks, what is kept, sequence parallelism.
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
    settings = head_settings(options, **keywords)
    if num_items is not None:
        settings = divided_by(num_items, settings)
    tensors, targets = Head(hidden, weight, bias), Labels(labels, class_weight)
    arguments = Arguments(tensors, targets, group, num_items, main_grad, expected_grad_output)
    losses = run_head(LABELS, arguments, settings)
    return record_of("loss", losses, settings) if settings.outputs else losses.loss


@public(needs_eager, LogProbSettings)
def linear_token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    threshold: Tensor | None = None,
    main_grad: Tensor | None = None,
    options: HeadOptions | None = None,
    **keywords: Unpack[LogProbSettings],
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
    number, tensor = split_temperature(temperature)
    derived = {"temperature": number, "reduction": "none", "gradient": "in_backward", **ids_or_labels(labels, hidden)}
    settings = head_settings(options, takes=LOG_PROBS, **keywords, **derived)
    loss, targets = loss_and_targets(labels, hidden, weight, settings, tensor, threshold, group)
    losses = run_head(loss, Arguments(Head(hidden, weight, bias), targets, group, None, main_grad), settings)
    return record_of("log_probs", losses, settings) if settings.outputs else losses.loss
