"""The settings of a head: what can be checked without tensors, and where the gradient is computed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.head.chunks import chunk_of, most_kept
from vocab_parallel_ce.options import REDUCTIONS, HeadSettings, Settings

COUNT = "count"  # valid tokens are counted
GRADIENTS = ("auto", "in_forward", "in_backward")


def check_head_settings(settings: Settings, head: HeadSettings, *, knows_grad_output: bool = False) -> None:
    """Check what can be checked without tensors; ``knows_grad_output`` if there is an ``expected_grad_output``."""
    checks.check_choice("reduction", settings.reduction, REDUCTIONS)
    checks.check_choice("gradient", settings.gradient, GRADIENTS)
    if not isinstance(head.keep_logits, str):
        raise TypeError(f"keep_logits: expected 'none', 'all', or bytes as '2GiB', got {head.keep_logits!r}")
    most_kept(head.keep_logits, 1, 1)
    if head.keep_logits != "none" and settings.gradient == "in_forward":
        raise ValueError(
            "keep_logits: expected 'none' with gradient='in_forward', because backward reads no logits then, "
            f"got {head.keep_logits!r}; pass another gradient, or leave it out"
        )
    checks.check_bool("sequence_parallel", head.sequence_parallel)
    checks.check_bool("reduce_hidden_grad", head.reduce_hidden_grad)
    if head.logits_dtype not in (None, torch.float32):
        remedy = "leave it out for the dtype of the products"
        raise ValueError(f"logits_dtype: expected None or torch.float32, got {head.logits_dtype!r}; {remedy}")
    chunk_of(head, 1, 1, 1, 1, 1, (1, 0))
    if settings.gradient == "in_forward" and settings.reduction == "none" and not knows_grad_output:
        raise ValueError(
            "gradient: 'in_forward' cannot know the grad_output of reduction 'none', got both; use 'in_backward', or "
            "pass expected_grad_output"
        )
    if head.sequence_parallel and not head.reduce_hidden_grad:
        raise ValueError(
            "reduce_hidden_grad: expected True with sequence_parallel, whose ranks hold parts, got False; leave it out"
        )
    if head.valid_tokens is None:
        return
    if not isinstance(head.valid_tokens, str):
        checks.check_integer("valid_tokens", head.valid_tokens)
        if head.valid_tokens < 0:
            raise ValueError(f"valid_tokens: must be at least 0, got {head.valid_tokens}")
    elif head.valid_tokens != COUNT:
        raise ValueError(f"valid_tokens: expected 'count', a number or None, got {head.valid_tokens!r}")
    if head.sequence_parallel:
        raise ValueError(
            "valid_tokens: expected None with sequence_parallel, whose ranks hold parts that are cut "
            f"already, got {head.valid_tokens}; leave it out"
        )


def rounded_dtypes(dtype: torch.dtype, tensors: Iterable[Tensor | None]) -> set[torch.dtype]:
    """Return the dtypes that gradients are rounded to: of the products, and of the tensors that require one."""
    return {dtype, *[t.dtype for t in tensors if t is not None and t.requires_grad]}


def gradient_of(settings: Settings, head: HeadSettings, dtypes: set[torch.dtype]) -> str:
    """Return the mode that runs for :func:`rounded_dtypes`."""
    if settings.gradient != "auto":
        return settings.gradient
    # fp16 has no room for a gradient that the loss scale has not multiplied yet.
    waits = settings.reduction == "none" or torch.float16 in dtypes
    # With kept logits, backward has three products too, and gradients of the outputs as well.
    waits = waits or (settings.asks_for_differentiable and head.keep_logits != "none")
    return "in_backward" if waits else "in_forward"
