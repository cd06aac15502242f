"""What several RL frameworks call the same way: log-probabilities and entropies of one read, and cores with bounds."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce import environment
from vocab_parallel_ce.api.heads import linear_token_log_probs
from vocab_parallel_ce.api.logits import token_log_probs
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import process_group_of
from vocab_parallel_ce.integrations import made_once
from vocab_parallel_ce.options import HeadOptions, bytes_of

IGNORED = -100


def kept_logits() -> str:
    """Return ``keep_logits`` of the heads of RL frameworks, which have no setting for it: the variable's value."""
    kept = environment.text(environment.KEEP_LOGITS, "none")
    if kept not in ("none", "all"):
        bytes_of(kept, environment.KEEP_LOGITS, "'none', 'all'")  # an error that names the variable
    return kept


def head_options(**fields: Any) -> HeadOptions:
    """Return the options of the heads of RL frameworks: ``fields`` and :func:`kept_logits`."""
    return made_once(keep_logits=kept_logits(), **fields)


def tensor_parallel_group() -> Any:
    """Return Megatron-Core's tensor-parallel group."""
    return importlib.import_module("megatron.core.parallel_state").get_tensor_model_parallel_group()


def divergence_of(beta: float) -> dict[str, Any]:
    """Return the divergence that GKD's ``beta`` names: KL(t || s) for 0, KL(s || t) for 1."""
    return {"divergence": "reverse" if beta else "forward"} if beta in (0, 1) else {"divergence": "js", "beta": beta}


def with_entropies(
    logits: Any, labels: Any, function: Callable[..., Any] = token_log_probs, **options: Any
) -> tuple[Any, Any]:
    """Return fp32 ``[...]`` log-probabilities, 0 for -100, and entropies of all tokens, ignored ones too.

    Args:
        function: ``token_log_probs``, or that of DTensors; it takes the options.
    """
    ignored = labels == IGNORED
    outputs = function(logits, labels.masked_fill(ignored, 0), outputs=("entropy",), **options)
    return outputs.log_probs.masked_fill(ignored, 0.0), outputs.entropy


class DistributedLogprob:
    """Has ``apply``, as an autograd Function has."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """Return ``[...]`` fp32 log-probabilities of ``target [...]``, for this rank's ``[..., C]`` logits.

        Overwrites nothing; backward writes the gradient into a new tensor. Nothing of the logits' size is kept for it.

        Collectives: one all_gather of 12 bytes per token; none in backward.

        Args:
            vocab_start_index, vocab_end_index: this rank's columns, ``[rank * C, (rank + 1) * C)``.
            inference_only: build no graph.

        Raises:
            ValueError: these are other columns.
        """
        group = group_of_columns(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1], group)
        with torch.no_grad() if inference_only else nullcontext():
            return token_log_probs(vocab_parallel_logits, target, group=group, gradient="out_of_place")


class ChunkedDistributedLogprob:
    """Has ``apply``, as an autograd Function has."""

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """Return what :class:`DistributedLogprob` does, which needs no memory that chunks would save."""
        columns = vocab_start_index, vocab_end_index
        return DistributedLogprob.apply(vocab_parallel_logits, target, *columns, tp_group, inference_only)


class FusedLinearChunkedDistributedLogprob:
    """Has ``apply``, as an autograd Function has."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """Return ``[...]`` fp32 log-probabilities of ``target [...]``, for ``hidden [..., D]`` and ``weight [C, D]``.

        The gradient of ``hidden`` is this rank's share of a sum: the caller adds the shares. That of ``weight`` is
        summed in fp32 and rounded once. Chunks are this package's.

        Collectives: one all_gather of 12 bytes per token.

        Raises:
            ValueError: the columns are not this rank's of equal shards.
        """
        group = group_of_columns(vocab_start_index, vocab_end_index, weight.shape[0], tp_group)
        with torch.no_grad() if inference_only else nullcontext():
            return linear_token_log_probs(
                hidden.to(weight.dtype), weight, target, group=group, options=head_options(reduce_hidden_grad=False)
            )


def whole_group(group: Any) -> Any:
    """Return the group that torch.distributed takes for ``group``."""
    return process_group_of(dist.group.WORLD if group is None else group)


def group_of_columns(start: int, end: int, n_columns: int, group: Any) -> Any:
    """Return the group, if the shards are equal: of others nobody tells this rank the size of the vocabulary."""
    group = whole_group(group)
    rank = group_position(group)[0]
    expected = rank * n_columns, (rank + 1) * n_columns
    if (start, end) != expected:
        raise ValueError(
            f"vocab_start_index, vocab_end_index: expected {expected}, those of rank {rank} with equal shards of "
            f"{n_columns} columns, got {(start, end)}; call token_log_probs or linear_token_log_probs with vocab_size="
        )
    return group
