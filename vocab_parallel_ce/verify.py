"""A debugging check of what one rank alone cannot see: that the ranks of a group fit together."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.agreement import open_call
from vocab_parallel_ce.cross_entropy import public, vocab_parallel_cross_entropy
from vocab_parallel_ce.linear.cross_entropy import (
    linear_cross_entropy,
    linear_token_log_probs,
    split_keywords,
)
from vocab_parallel_ce.linear.plan import Arguments, plan_linear_call
from vocab_parallel_ce.log_probs import token_log_probs
from vocab_parallel_ce.options import HeadSettings, Settings
from vocab_parallel_ce.plan import Call, plan_call

FUNCTIONS = (vocab_parallel_cross_entropy, token_log_probs)
LINEAR_FUNCTIONS = (linear_cross_entropy, linear_token_log_probs)
ARGUMENTS = {"hidden", "weight", "labels", "bias", "group"}


@public
def verify_group(
    logits: Tensor,
    labels: Tensor,
    group: Any,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> None:
    """Raise the same error on every rank of ``group`` unless their arguments fit together.

    For debugging, once before training: every rank calls it with what it would pass to a loss. Ranks that do
    not fit wait for each other there, or train on a wrong loss. :func:`verify_calls` does the same at every
    call. It compares leading dimensions, dtypes, device types, labels and their values, every option, what
    needs a gradient, and that the shards have every column of the vocabulary once, in any order of ranks.
    Without ``vocab_size`` or ``shard`` it cannot tell whole logits from shards. What is invalid on one rank
    alone is raised on all. Messages name the rank of the group that differs from most; in a tie the side of
    the lowest rank is taken to be right.

    Overwrites: nothing. Waits for the device. With NCCL, what is sent goes by the GPU of ``logits``.

    Collectives: two all_gathers on the current stream, of sizes and of under four kilobytes a rank
    (``torch.distributed.all_gather_object``, which needs NumPy); if labels differ two more, with the
    labels of two ranks. None for a group of one rank, or None: then this rank's arguments are checked.

    Args:
        logits, labels: as in :func:`vocab_parallel_cross_entropy`; with ``weight`` the hidden states and
            labels of :func:`linear_cross_entropy`.
        group: the ``torch.distributed.ProcessGroup``, or None. A rank that passes no process group, or
            one that it is not in, raises alone.
        weight, bias: as in :func:`linear_cross_entropy`; None for a loss over logits.
        options: any others of the loss and of its log-probs.

    Raises:
        TypeError: a dtype or type is not one that the loss takes, on some rank.
        ValueError: shapes, devices or values do not fit on some rank, or differ between ranks; shards
            overlap or leave columns out; or a label is neither in ``[0, V)`` nor ``ignore_index``.
        RuntimeError: a rank could not look at its arguments for another reason.
    """
    with open_call(group, logits.device if isinstance(logits, Tensor) else None):
        if weight is None:
            call = _prepared(logits, labels, group, options)
        else:
            call = _prepared_linear(logits, weight, labels, bias, group, options)
    checks.check_label_range(labels, call.plan.shard.vocab_size, call.plan.options.ignore_index)


def _prepared(logits: Tensor, labels: Tensor, group: Any, options: dict[str, Any]) -> Call:
    _check_names(options, FUNCTIONS)
    num_items = options.pop("num_items", None)
    return plan_call(logits, labels, Settings(**options), group=group, num_items=num_items)


def _prepared_linear(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, group: Any, options: dict[str, Any]
) -> Call:
    _check_names(options, LINEAR_FUNCTIONS)
    num_items, main_grad = (options.pop(name, None) for name in ("num_items", "main_grad"))
    given = Arguments(hidden, weight, labels, bias, group, num_items, main_grad)
    settings, head = split_keywords(options, Settings._field_defaults | HeadSettings._field_defaults)
    return plan_linear_call(given, settings, head)[0].call


def _check_names(options: dict[str, Any], functions: tuple[Any, ...]) -> None:
    known = {name for function in functions for name in inspect.signature(function).parameters}
    for name in sorted(options.keys() - known):
        raise TypeError(f"{name}: expected an option of the loss, got no such name")
