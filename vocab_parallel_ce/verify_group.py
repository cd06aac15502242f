"""Check once, without a loss, that the arguments of all ranks fit together."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import public, vocab_parallel_cross_entropy
from vocab_parallel_ce.linear.cross_entropy import linear_cross_entropy
from vocab_parallel_ce.linear.plan import HeadOptions, prepare_linear_call
from vocab_parallel_ce.pipeline import prepare_call
from vocab_parallel_ce.verify import open_call

OF_LOG_PROBS = {"temperature": 1.0, "entropy": False}
ARGUMENTS = ("logits", "hidden", "weight", "labels", "bias", "group")


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

    For debugging, once before training. Every rank calls it with the arguments of its loss. It compares what
    :func:`verify_calls` compares in forward, and it checks the values of the labels. The shards may have any
    order. Without ``vocab_size`` or ``shard`` it cannot tell whole logits from shards. The error names the
    rank that differs from most; of a tie, the side of the lowest rank is right. Overwrites nothing.

    Collectives: as :func:`verify_calls` in forward. None for one rank: then it checks this rank's arguments.

    Args:
        logits, labels: as in :func:`vocab_parallel_cross_entropy`. With ``weight``, the hidden states and
            labels of :func:`linear_cross_entropy`.
        group: the ``torch.distributed.ProcessGroup``, or None. If it is neither, or if this rank is not in
            it, this rank raises alone.
        weight, bias: as in :func:`linear_cross_entropy`; None for a loss over logits.
        options: all others of the loss, and those of its log-probs.

    Raises:
        TypeError, ValueError: as the loss, on some rank; or arguments differ between ranks, shards overlap or
            leave out columns, or a label is neither in ``[0, V)`` nor ``ignore_index``.
        RuntimeError: a rank failed to check its arguments for another reason.
    """
    function: Any = vocab_parallel_cross_entropy if weight is None else linear_cross_entropy
    defaults = {name: option.default for name, option in signature(function).parameters.items()}
    given = {name: value for name, value in defaults.items() if name not in ARGUMENTS} | OF_LOG_PROBS
    with open_call(group, logits.device if isinstance(logits, Tensor) else None):
        for name in sorted(options.keys() - given.keys()):
            raise TypeError(f"{name}: expected an option of {function.__name__} or its log-probs")
        given |= options
        metrics = given.pop("return_metrics")
        if weight is None:
            call = prepare_call(logits, labels, group=group, metrics=metrics, **given)
        else:
            head, num_items = HeadOptions(*map(given.pop, HeadOptions._fields)), given.pop("num_items")
            linear, _ = prepare_linear_call(
                logits, weight, labels, bias, num_items, head, group=group, metrics=metrics, **given
            )
            call = linear.call
    checks.check_label_range(labels, call.shard.vocab_size, call.options.ignore_index)
