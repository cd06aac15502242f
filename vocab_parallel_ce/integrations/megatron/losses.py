"""The functions that stand for Megatron-Core's losses, and for the method that calls them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy as cross_entropy
from vocab_parallel_ce.checks import check_choice
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.integrations import check_known, logger
from vocab_parallel_ce.integrations.lazy_logits import LazyLogits
from vocab_parallel_ce.integrations.log_probs import IGNORED, tensor_parallel_group
from vocab_parallel_ce.integrations.megatron.linear import ModelCall, calls, linear_loss
from vocab_parallel_ce.options import HEAD_FIELDS, HeadOptions, Settings, check_settings, shard_of_rank

_global_forward_hooks = torch.nn.modules.module._global_forward_hooks

OPTIONS = ("z_loss", "gradient", "impl", "check_labels", "vocab_size", "chunk_size")
OF_THE_HEAD = ("gradient", "chunk_size")  # of OPTIONS, with linear=True
options: dict[str, Any] = {}  # of install(), as the loss over logits takes them
head_options: dict[str, Any] = {}  # of install(linear=True), as the head takes them: they may mean another thing there
fallbacks: list[str] = []  # what made the logits of the first linear loss that is one over logits; logged once


class LossCall(NamedTuple):
    """One call of ``compute_language_model_loss``, or of an output processor."""

    model: Any
    labels: Tensor  # [b, s]
    options: dict[str, Any] = options
    head_options: dict[str, Any] = head_options


_loss_calls: list[LossCall] = []  # the innermost is last


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Return Megatron's loss per token, ``[s, b]`` fp32, of logits ``[s, b, C]`` and labels ``[s, b]``.

    Megatron's label smoothing, over the whole vocabulary. A negative label has loss 0 and gradient 0.
    """
    call = _loss_calls[-1] if _loss_calls else None
    of_logits, of_head = (options, head_options) if call is None else (call.options, call.head_options)
    tp_group = tensor_parallel_group() if tp_group is None else tp_group
    target = target.masked_fill(target < 0, IGNORED)
    if label_smoothing:
        # Megatron shares it out over the other V - 1 columns, PyTorch over all V.
        columns = Settings(vocab_size=of_logits.get("vocab_size"))
        n = shard_of_rank(columns, vocab_parallel_logits.shape[-1], *group_position(tp_group)).vocab_size
        if label_smoothing > (n - 1) / n:
            most = f"(V - 1) / V = {(n - 1) / n:g} of the {n} columns"
            raise ValueError(f"label_smoothing: must be at most {most}, got {label_smoothing}")
        label_smoothing = label_smoothing * n / (n - 1)
    keywords = {"group": tp_group, "reduction": "none", "label_smoothing": label_smoothing, **of_logits}
    if keywords.get("z_loss") and (call is None or not call.model.training):
        del keywords["z_loss"]  # it is a part of the training loss alone
        calls["without z_loss: in eval(), or not called by compute_language_model_loss"] += 1
    if isinstance(vocab_parallel_logits, LazyLogits):
        labels = None if call is None else call.labels
        loss = linear_loss(vocab_parallel_logits, target, labels, keywords | of_head)
        if loss is not None:
            return loss
        vocab_parallel_logits = vocab_parallel_logits.make("another reader")
        if not fallbacks:
            made = ", ".join(event for event in calls if event.endswith("made the logits"))
            logger.warning("vocab_parallel_ce: Megatron-Core: the loss is over logits, not the linear one: %s", made)
            fallbacks.append(made)
    calls["loss of logits"] += 1
    return cross_entropy(vocab_parallel_logits, target, **keywords)


def fused_vocab_parallel_cross_entropy(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """Return :func:`vocab_parallel_cross_entropy`, with the signature of Megatron's fused loss."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def te_parallel_cross_entropy(logits: Tensor, labels: Tensor, tp_group: Any, is_cg_capturable: bool = False) -> Tensor:
    """Return :func:`vocab_parallel_cross_entropy`, with the signature of Megatron's call of TransformerEngine."""
    return vocab_parallel_cross_entropy(logits, labels, tp_group=tp_group)


def noted(original: Callable[..., Tensor], *asked: dict[str, Any]) -> Callable[..., Tensor]:
    """Return ``LanguageModule.compute_language_model_loss`` that says which model calls the loss.

    ``asked`` are the options over logits and of the head, in place of those of ``install()``.
    """

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        n_columns = getattr(getattr(self, "output_layer", None), "output_size_per_partition", None)
        if n_columns not in (None, logits.shape[-1]):
            raise ValueError(
                f"logits: expected this rank's columns of output_layer, {n_columns}, got {logits.shape[-1]}, which "
                "were gathered over the ranks; build the model with parallel_output=True"
            )
        _loss_calls.append(LossCall(self, labels, *asked))
        try:
            return original(self, labels, logits)
        finally:
            _loss_calls.pop()

    return compute_language_model_loss


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    packed_seq_params: Any,
    runtime_gather_output: bool | None,
    context: Any,
    compute_language_model_loss: Any,
    scale_logits: Callable[[Tensor], Tensor],
    **others: Any,
) -> Tensor:
    """Return the losses ``[b, s]``, head and loss together, for ``GPTModel.forward(output_processor=)`` of Megatron.

    Nothing is patched. Heads of multi-token prediction keep Megatron's loss, without ``install(linear=True)``.

    Args:
        context: ``output_processor_context=`` of ``forward``: None, or the options of ``install(linear=True)`` in a
            mapping. Without it those of :func:`install` hold, if it was called.
        others: as Megatron-Core 0.18 and 0.19 pass them.

    Raises:
        ValueError: no labels, or an output layer that ``install(linear=True)`` refuses.
    """
    if labels is None:
        raise ValueError("labels: expected those of training, got None; leave output_processor out of this call")
    model = compute_language_model_loss.__self__
    is_lazy = hasattr(output_layer.forward, "is_lazy")  # by install(linear=True)
    call = ModelCall(model, labels, loss_mask, packed_seq_params)
    with contextlib.nullcontext() if is_lazy else call.lazy_output_layer():
        logits, _ = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
        asked = () if context is None else split_options(True, **context)
        return noted(_losses, *asked)(model, labels, scale_logits(logits))


def _losses(model: Any, labels: Tensor, logits: Tensor) -> Tensor:
    loss = vocab_parallel_cross_entropy(logits, labels.transpose(0, 1), tp_group=model.output_layer.tp_group)
    return loss.transpose(0, 1).contiguous()


def split_options(linear: bool, /, **asked: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check options of ``install()``; return those of the loss over logits, and of the head, where names differ."""
    check_known(asked, OPTIONS)
    check_settings(Settings(**{name: value for name, value in asked.items() if name != "chunk_size"}), 1)
    if "chunk_size" in asked and not linear:
        raise ValueError("chunk_size: expected linear=True with it, got linear=False")
    known = ("auto", "in_backward") if linear else ("auto", "in_backward", "out_of_place")
    check_choice("gradient", asked.get("gradient", "auto"), known)
    if not linear:
        return asked, {}
    HeadOptions(**{name: value for name, value in asked.items() if name in HEAD_FIELDS})  # checks them
    of_logits, of_head = ({n: asked[n] for n in asked if (n in OF_THE_HEAD) is head} for head in (False, True))
    if of_head.get("gradient") == "in_backward":  # of logits that name is "overwrite them"
        of_logits["gradient"] = "out_of_place"
    return of_logits, of_head
