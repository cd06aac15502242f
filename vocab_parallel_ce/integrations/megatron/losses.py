"""The functions that stand for Megatron-Core's losses, and for the method that calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy as cross_entropy
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.integrations import logger
from vocab_parallel_ce.integrations.lazy_logits import LazyLogits
from vocab_parallel_ce.integrations.log_probs import IGNORED, tensor_parallel_group
from vocab_parallel_ce.integrations.megatron.linear import calls, linear_loss
from vocab_parallel_ce.options import Settings, shard_of_rank

_global_forward_hooks = torch.nn.modules.module._global_forward_hooks

options: dict[str, Any] = {}  # of install(), as the loss over logits takes them
head_options: dict[str, Any] = {}  # of install(linear=True), as the head takes them: they may mean another thing there
fallbacks: list[str] = []  # what made the logits of the first linear loss that is one over logits; logged once


class LossCall(NamedTuple):
    """One call of ``compute_language_model_loss``."""

    model: Any
    labels: Tensor  # [b, s]


_loss_calls: list[LossCall] = []  # the innermost is last


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor:
    """Return Megatron's loss per token, ``[s, b]`` fp32, of logits ``[s, b, C]`` and labels ``[s, b]``.

    Megatron's label smoothing, over the whole vocabulary. A negative label has loss 0 and gradient 0.
    """
    tp_group = tensor_parallel_group() if tp_group is None else tp_group
    target = target.masked_fill(target < 0, IGNORED)
    if label_smoothing:
        # Megatron shares it out over the other V - 1 columns, PyTorch over all V.
        columns = Settings(vocab_size=options.get("vocab_size"))
        n = shard_of_rank(columns, vocab_parallel_logits.shape[-1], *group_position(tp_group)).vocab_size
        if label_smoothing > (n - 1) / n:
            most = f"(V - 1) / V = {(n - 1) / n:g} of the {n} columns"
            raise ValueError(f"label_smoothing: must be at most {most}, got {label_smoothing}")
        label_smoothing = label_smoothing * n / (n - 1)
    keywords = {"group": tp_group, "reduction": "none", "label_smoothing": label_smoothing, **options}
    call = _loss_calls[-1] if _loss_calls else None
    if keywords.get("z_loss") and (call is None or not call.model.training):
        del keywords["z_loss"]  # it is a part of the training loss alone
        calls["without z_loss: in eval(), or not called by compute_language_model_loss"] += 1
    if isinstance(vocab_parallel_logits, LazyLogits):
        labels = None if call is None else call.labels
        loss = linear_loss(vocab_parallel_logits, target, labels, keywords | head_options)
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


def noted(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return ``LanguageModule.compute_language_model_loss`` that says which model calls the loss."""

    @functools.wraps(original)
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
        n_columns = getattr(getattr(self, "output_layer", None), "output_size_per_partition", None)
        if n_columns not in (None, logits.shape[-1]):
            raise ValueError(
                f"logits: expected this rank's columns of output_layer, {n_columns}, got {logits.shape[-1]}, which "
                "were gathered over the ranks; build the model with parallel_output=True"
            )
        _loss_calls.append(LossCall(self, labels))
        try:
            return original(self, labels, logits)
        finally:
            _loss_calls.pop()

    return compute_language_model_loss
