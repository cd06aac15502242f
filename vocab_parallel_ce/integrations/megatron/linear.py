"""Megatron-Core's head and loss together: ``output_layer`` returns logits that are made only if somebody looks at them.

A model that is called with labels runs its own forward. Its output layer returns lazy logits, for the main loss and for
each head of multi-token prediction, and the loss of lazy logits is :func:`linear_cross_entropy`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel_ce.api.heads import linear_cross_entropy
from vocab_parallel_ce.checks import HEAD_DTYPES
from vocab_parallel_ce.integrations import of_head
from vocab_parallel_ce.integrations.lazy_head import Head
from vocab_parallel_ce.integrations.lazy_logits import LazyLogits, Recorded, lazy_logits

calls: Counter[str] = Counter()  # of this package's losses, and what made logits


class ModelCall:
    """One call of a model with labels."""

    def __init__(self, model: Any, labels: Tensor, loss_mask: Tensor | None, packed_seq_params: Any) -> None:
        self.model, self.labels, self.loss_mask, self.packed_seq_params = model, labels, loss_mask, packed_seq_params
        self.n_heads = 0  # that were called

    @contextlib.contextmanager
    def lazy_output_layer(self) -> Iterator[None]:
        """Let the output layer return lazy logits. Its hooks run, and see them."""
        layer = self.model.output_layer
        if "forward" in vars(layer):
            raise ValueError("output_layer: has a forward of its own, which the linear loss would skip")
        original = layer.forward

        def forward(
            input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
        ) -> tuple[Tensor, None]:
            weight = layer.weight if weight is None else weight
            reason = refusal(layer, weight, input_)
            if reason is not None:
                raise ValueError(
                    f"output_layer: {reason}, which the linear loss cannot do; install() without linear=True"
                )
            self.n_heads += 1
            gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
            if gathers and layer.tp_group.size() > 1:
                calls["logits gathered over the ranks"] += 1
                return original(input_, weight, runtime_gather_output)
            return HeadCall(self, input_, weight).lazy_logits(), None

        forward.is_lazy = True  # type: ignore[attr-defined]
        layer.forward = forward
        try:
            yield
        finally:
            del layer.forward

    def mask_of_head(self, labels: Tensor | None, number: int) -> Tensor | None:
        """Return what will multiply the losses ``[b, s]`` of the head of this ``number``, except one factor, if known.

        The main head has the labels of the call. Each head of multi-token prediction has them rolled once more.
        """
        mask = self.loss_mask
        if labels is None or mask is None or mask.shape != self.labels.shape:
            return None
        if labels is self.labels:
            return mask
        from megatron.core.transformer.multi_token_prediction import roll_tensor

        group = self.model.pg_collection.cp
        for _ in range(number):
            mask, _ = roll_tensor(mask, -1, -1, cp_group=group, packed_seq_params=self.packed_seq_params)
        return mask


class HeadCall(Head):
    """One call of an output layer."""

    def __init__(self, call: ModelCall, hidden: Tensor, weight: Tensor) -> None:
        super().__init__(hidden, (weight,))
        self.call, self.weight, self.number = call, weight, call.n_heads
        self.predictions: Tensor | None = None  # [s, b], if the loss was computed without the logits
        self.layer = call.model.output_layer
        n_parts = self.layer.tp_group.size() if self.layer.sequence_parallel else 1
        # Of the shape of all tokens' hidden states: an operation that changes tokens makes another tensor of it.
        self.stand_in = hidden.new_empty(()).expand(hidden.shape[0] * n_parts, *hidden.shape[1:])

    def lazy_logits(self) -> LazyLogits:
        return lazy_logits(self, Recorded(self.stand_in, self.weight.shape[0]))

    def logits(self, hidden: Tensor, *parameters: Tensor) -> Tensor:
        layer = copy.copy(self.layer)  # without the forward that is lazy
        layer.gradient_accumulation_fusion = False  # :meth:`gradients` adds to main_grad, as the fused loss does
        return type(layer).forward(layer, hidden, *parameters, False)[0]

    def gradients(self, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        d_hidden, d_weight = super().gradients(grad, needed)
        main_grad = self.main_grad()
        if d_weight is None or main_grad is None:
            return [d_hidden, d_weight]
        main_grad.add_(d_weight)
        if not hasattr(self.weight, "grad_added_to_main_grad"):
            return [d_hidden, None]
        self.weight.grad_added_to_main_grad = True
        return [d_hidden, torch.zeros_like(d_weight)]  # Megatron's hooks wait for a gradient

    def report(self, event: str) -> None:
        calls[event] += 1

    def main_grad(self) -> Tensor | None:
        """Return where backward adds the weight's gradient, as the layer's own backward would."""
        fuses = self.layer.gradient_accumulation_fusion and self.weight.requires_grad
        main_grad = getattr(self.weight, "main_grad", None) if fuses else None
        # Of another dtype: the gradient goes to the hook that adds it.
        return main_grad if main_grad is not None and main_grad.dtype == torch.float32 else None


def linear_loss(lazy: LazyLogits, target: Tensor, labels: Tensor | None, keywords: dict[str, Any]) -> Tensor | None:
    """Return the loss ``[s, b]`` of lazy logits, or None if it needs the logits."""
    head, recorded = lazy._head, lazy._recorded
    if (
        not isinstance(head, HeadCall)
        or head.is_made
        or head.is_watched
        or recorded is None
        or recorded.hidden is not head.stand_in
    ):
        return None
    keywords = keywords | {"logit_scale": recorded.logit_scale, "sequence_parallel": head.layer.sequence_parallel}
    expected, is_auto = None, keywords.pop("gradient", "auto") == "auto"
    if is_auto and head.requires_grad:
        expected = head.call.mask_of_head(labels, head.number)
    if expected is not None:
        keywords["gradient"] = "in_forward"
        keywords["expected_grad_output"] = expected.transpose(0, 1)
    keywords["main_grad"] = head.main_grad()
    tensors = head.hidden, head.weight, target
    head.check_unchanged(freed=False)
    with head.modes.autocasting():
        if labels is head.call.labels:
            loss = linear_cross_entropy(*tensors, **of_head(keywords))
        else:  # Megatron counts which tokens multi-token prediction has right
            outputs: Any = linear_cross_entropy(*tensors, outputs=("predictions",), **of_head(keywords))
            loss, head.predictions = outputs.loss, outputs.predictions
    head.is_fused = True
    calls[f"linear loss, gradients in {'backward' if expected is None else 'forward'}"] += 1
    return loss


def refusal(layer: Any, weight: Tensor, hidden: Tensor) -> str | None:
    """Return what of an output layer the linear loss cannot do, or None."""
    from megatron.core.tensor_parallel import ColumnParallelLinear

    if type(layer) is not ColumnParallelLinear:
        return f"is a {type(layer).__module__}.{type(layer).__name__}, not a ColumnParallelLinear (LoRA, FP8, ...)"
    if type(weight) not in (Tensor, nn.Parameter) or hidden.dtype not in HEAD_DTYPES:
        return f"has a weight that is a {type(weight).__name__}, alongside hidden states of {hidden.dtype}"
    holds = {
        "has a bias": layer.bias is not None,
        "has backward hooks": bool(layer._backward_hooks or layer._backward_pre_hooks),
        "is a layer of experts": layer.is_expert,
        "has disable_grad_reduce": layer.disable_grad_reduce,
        "has config.defer_embedding_wgrad_compute": layer.config.defer_embedding_wgrad_compute,
        "has config.cpu_offloading": layer.config.cpu_offloading,
        "has a weight that is gathered in its forward": getattr(layer, "gtp_remat_size", 1) > 1,
        "has a weight of Megatron-FSDP": hasattr(weight, "__fsdp_param__"),
    }
    return next((reason for reason, is_so in holds.items() if is_so), None)


def with_lazy_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's forward that makes no logits if it is called with labels."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(self, *args, **kwargs).arguments
        layer, labels = getattr(self, "output_layer", None), arguments.get("labels")
        if labels is None or layer is None or hasattr(layer.forward, "is_lazy"):
            return original(self, *args, **kwargs)
        call = ModelCall(self, labels, arguments.get("loss_mask"), arguments.get("packed_seq_params"))
        with call.lazy_output_layer():
            return original(self, *args, **kwargs)

    return forward


def with_predictions(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's count of accepted tokens, which needs no logits after the linear loss."""

    @functools.wraps(original)
    def counts(mtp_logits: Tensor, mtp_labels: Tensor, loss_mask: Tensor, *args: Any, **kwargs: Any) -> Any:
        head = vars(mtp_logits).get("_head")
        if head is None or head.predictions is None:
            return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
        is_valid = loss_mask.transpose(0, 1).bool()
        is_right = (head.predictions == mtp_labels.transpose(0, 1)) & is_valid
        return is_right.sum().float(), is_valid.sum().float()

    return counts
