"""The losses of NeMo Automodel's registry, computed by this package: on request, and undoable.

:func:`install` replaces what the modules of ``LOSS_CONFIG_REGISTRY`` compute, those that are built already too: the
recipes, ``build_loss_module`` and ``isinstance`` see the same classes. The methods have the parameters, shapes and
dtypes of NeMo Automodel 0.7.

What differs: logits that tensor parallelism cut (DTensors) are not gathered, and their shards may be uneven; ``labels``
are not written; a mean over no token is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.api.distillation import distillation_loss
from vocab_parallel_ce.api.heads import linear_cross_entropy
from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.integrations import made_once
from vocab_parallel_ce.integrations.columns import local_columns
from vocab_parallel_ce.integrations.rebind import Switch

LOSSES = "nemo_automodel.components.loss"
LEFT = {
    "logits whose tokens are cut, or whose vocabulary is not (DTensors)": "NeMo Automodel gathers them",
    "a head that tensor parallelism cut": "materialize_lm_weight refuses it; use a loss of logits there",
    "KDLoss whose teacher needs a gradient": "this package has none of the teacher",
    "losses outside of the registry (dLLM, MTP, retrieval)": "they have mathematics of their own",
}


def masked_cross_entropy(
    self: Any,
    logits: Any,
    labels: Any,
    mask: Tensor | None = None,
    num_label_tokens: int | None = None,
    loss_weights: Tensor | None = None,
) -> Tensor:
    """Return ``MaskedCrossEntropy``'s fp32 loss of ``logits [..., V]`` and ``labels [...]``; ``[N]`` for ``"none"``.

    Overwrites: backward writes the gradient over plain logits if nobody else can see them.

    Collectives: for DTensors that are cut over the vocabulary one all_gather of 12 bytes per token.

    Args:
        mask: ``[...]``; tokens with 0 are ignored.
        num_label_tokens: divides the sum.
        loss_weights: ``[...]`` multiplies the losses, for reduction ``"sum"``.
    """
    if _is_gathered(logits):
        return _own("masked_ce:MaskedCrossEntropy.forward", self, logits, labels, mask, num_label_tokens, loss_weights)
    local, columns = _columns("logits", logits)
    arguments = (local,), self, labels, mask, num_label_tokens, loss_weights
    loss = _loss(vocab_parallel_cross_entropy, *arguments, **columns)
    return loss.flatten() if self.reduction == "none" else loss


def te_parallel_cross_entropy(
    self: Any, logits: Any, labels: Any, mask: Tensor | None = None, num_label_tokens: int | None = None
) -> Tensor:
    """Return ``TEParallelCrossEntropy``'s loss, as :func:`masked_cross_entropy`; ``tp_group`` is of plain shards.

    Without a gradient the logits stay as they are, which TransformerEngine's kernel overwrites.
    """
    if _is_gathered(logits):
        return _own("te_parallel_ce:TEParallelCrossEntropy.__call__", self, logits, labels, mask, num_label_tokens)
    local, columns = _columns("logits", logits, self.tp_group)
    tokens = num_label_tokens if self.reduction == "sum" else None  # as there
    return _loss(vocab_parallel_cross_entropy, (local,), self, labels, mask, tokens, None, **columns)


def fused_linear_cross_entropy(
    self: Any,
    hidden_states: Tensor,
    labels: Tensor,
    lm_weight: Any,
    num_label_tokens: int | None = None,
    grad_reduce_group: Any = None,
    loss_weights: Tensor | None = None,
) -> Tensor:
    """Return ``FusedLinearCrossEntropy``'s loss of ``hidden_states [..., D]``; it does not need cut-cross-entropy.

    The gradient of ``lm_weight [V, D]`` is summed in fp32 and rounded once. FSDP's parts are gathered as there.
    """
    tensors = _head(self, hidden_states, lm_weight, grad_reduce_group)
    options = {"softcap": self.logit_softcapping or None}
    return _loss(linear_cross_entropy, tensors, self, labels, None, num_label_tokens, loss_weights, **options)


def chunked_cross_entropy(
    self: Any,
    hidden_states: Tensor,
    labels: Tensor,
    lm_weight: Any,
    num_label_tokens: int | None = None,
    grad_reduce_group: Any = None,
    loss_weights: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``ChunkedCrossEntropy``'s loss, as :func:`fused_linear_cross_entropy`; chunks are this package's.

    ``logits_dtype=torch.float32`` keeps products in fp32, where NeMo Automodel casts them afterwards.
    """
    tensors = _head(self, hidden_states.reshape(*labels.shape, -1), lm_weight, grad_reduce_group)
    options = made_once(logits_dtype=torch.float32 if logits_dtype == torch.float32 else None)
    return _loss(linear_cross_entropy, tensors, self, labels, mask, num_label_tokens, loss_weights, options=options)


def knowledge_distillation(
    self: Any, student_logits: Any, teacher_logits: Any, labels: Any, num_batch_labels: int | None = None
) -> Tensor:
    """Return ``KDLoss``: ``T^2 * KL(teacher || student)``, summed over ``num_batch_labels`` or averaged, in fp32.

    Overwrites nothing.

    Collectives: one all_gather of 20 bytes per token over the ranks that share the vocabulary.
    """
    if _is_gathered(student_logits) or _is_gathered(teacher_logits) or teacher_logits.requires_grad:
        return _own("kd_loss:KDLoss.forward", self, student_logits, teacher_logits, labels, num_batch_labels)
    student, columns = _columns("student_logits", student_logits, self.tp_group)
    loss = distillation_loss(
        student,
        _columns("teacher_logits", teacher_logits)[0],
        labels=_local(labels).reshape(student.shape[:-1]),
        ignore_index=self.ignore_index,
        temperature=self.temperature,
        reduction="mean" if num_batch_labels is None else "sum",
        num_items=num_batch_labels,
        **columns | {"gradient": "out_of_place"},
    )
    return loss * self.temperature**2


def _loss(
    function: Any,
    tensors: tuple[Tensor, ...],
    module: Any,
    labels: Any,
    mask: Tensor | None,
    num_label_tokens: int | None,
    loss_weights: Tensor | None,
    **options: Any,
) -> Tensor:
    """Return the loss as the module reduces it, or as weights and a number of tokens ask."""
    reduction, ignored = module.reduction, module.ignore_index
    for name, value in {"num_label_tokens": num_label_tokens, "loss_weights": loss_weights}.items():
        if value is not None and reduction != "sum":
            raise ValueError(f"{name}: expected reduction='sum' with it, got {reduction!r}")
    labels = _local(labels).to(tensors[0].device)
    if loss_weights is not None and loss_weights.shape != labels.shape:
        raise ValueError(f"loss_weights: expected the shape of labels, {labels.shape}, got {loss_weights.shape}")
    labels = labels.masked_fill(labels == -100, ignored)  # as datasets mark padding
    if mask is not None:
        labels = labels.masked_fill(mask.to(labels.device).reshape(labels.shape) == 0, ignored)
    shape = tensors[0].shape[:-1]
    if labels.numel() == shape.numel():  # packed logits are [1, T, V] with labels [T]
        labels = labels.reshape(shape)
    weighs = loss_weights is not None
    options |= {"ignore_index": ignored, "reduction": "none" if weighs else reduction}
    loss: Tensor = function(*tensors, labels, num_items=None if weighs else num_label_tokens, **options)
    if loss_weights is None:
        return loss
    loss = (loss * loss_weights.to(loss).reshape(loss.shape)).sum()
    return loss if num_label_tokens is None else loss * (1 / num_label_tokens if num_label_tokens else 0.0)


def _head(module: Any, hidden: Tensor, weight: Any, grad_reduce_group: Any) -> tuple[Tensor, Tensor]:
    """Return hidden states and the whole weight, of one dtype."""
    weight = module.materialize_lm_weight(weight, grad_reduce_group=grad_reduce_group)
    is_cast = torch.is_autocast_enabled(hidden.device.type)
    return (hidden if is_cast else hidden.to(weight.dtype)), weight


def _own(target: str, *arguments: Any) -> Tensor:
    """Return what NeMo Automodel's own method computes."""
    result: Tensor = _switch.original(f"{LOSSES}.{target}")(*arguments)
    return result


def _is_gathered(logits: Any) -> bool:
    """Whether a DTensor is not cut over the vocabulary alone."""
    if not is_dtensor(logits):
        return False
    cut = [placement for placement in logits.placements if not placement.is_replicate()]
    return len(cut) != 1 or not cut[0].is_shard() or cut[0].dim not in (-1, logits.dim() - 1)


def _columns(name: str, logits: Any, group: Any = None) -> tuple[Tensor, dict[str, Any]]:
    """Return this rank's columns, and which these are."""
    if not is_dtensor(logits):
        return logits, {"group": group}
    columns = local_columns(name, logits)
    return columns.logits, {"group": columns.group, "vocab_size": columns.shard, "gradient": "out_of_place"}


def _local(labels: Any) -> Tensor:
    """Return all labels, which every rank has."""
    tensor: Tensor = labels.full_tensor() if is_dtensor(labels) else labels
    return tensor


_switch = Switch(
    "NeMo-Automodel 0.7",
    {
        f"{LOSSES}.masked_ce:MaskedCrossEntropy.forward": masked_cross_entropy,
        f"{LOSSES}.te_parallel_ce:TEParallelCrossEntropy.__call__": te_parallel_cross_entropy,
        f"{LOSSES}.linear_ce:FusedLinearCrossEntropy.forward": fused_linear_cross_entropy,
        f"{LOSSES}.chunked_ce:ChunkedCrossEntropy.forward": chunked_cross_entropy,
        f"{LOSSES}.kd_loss:KDLoss.forward": knowledge_distillation,
    },
    LEFT,
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
