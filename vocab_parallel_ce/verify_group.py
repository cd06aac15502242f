"""Check once, without a loss, that the arguments of all ranks fit together."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import public, vocab_parallel_cross_entropy
from vocab_parallel_ce.dtensor import process_group_of
from vocab_parallel_ce.linear.cross_entropy import linear_cross_entropy, split_keywords
from vocab_parallel_ce.linear.plan import Arguments, plan_linear_call
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import DEFAULTS, check_names, divided_by
from vocab_parallel_ce.outputs import settings_of, taken_temperature
from vocab_parallel_ce.plan import plan_call
from vocab_parallel_ce.shift import next_labels
from vocab_parallel_ce.verify import open_call


@public(eager_if=lambda keywords: True)
def verify_group(
    logits: Tensor,
    labels: Tensor,
    group: Any,
    *,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,
) -> None:
    """Raise the same error on every rank of ``group`` unless their arguments fit together. Overwrites nothing.

    For debugging, once before training. Every rank calls it with the arguments of its loss. It compares what
    :func:`verify_calls` compares in forward, by the same collectives, and checks the values of the labels. Without
    ``vocab_size`` or ``shard`` it takes logits or heads for whole that are equal on all ranks. The error names the
    rank that differs from most; of a tie, the side of the lowest rank is right. A rank that is not in ``group``
    raises alone.

    Args:
        logits, labels, group: as in :func:`vocab_parallel_cross_entropy`, or with ``weight`` the hidden
            states, labels and group of :func:`linear_cross_entropy`.
        weight, bias, options: as in that loss, or in its log-probs.

    Raises:
        TypeError, ValueError, RuntimeError: as that loss on some rank; arguments differ; the shards do not
            have every column once; or a label is neither in ``[0, V)`` nor ``ignore_index``.
    """
    function: Any = vocab_parallel_cross_entropy if weight is None else linear_cross_entropy
    known = {**signature(function).parameters, **dict.fromkeys(("temperature", "entropy", "outputs", "top_k"))}
    group = process_group_of(group)
    with open_call(group, logits.device if isinstance(logits, Tensor) else None):
        check_names(options, known, function)
        names = "num_items", "class_weight", "main_grad"
        num_items, class_weight, main_grad = (options.pop(name, None) for name in names)
        temperature = taken_temperature(options)
        if "outputs" in options:
            options |= settings_of(options.pop("entropy", False), options.pop("outputs"))
        if weight is None and bias is not None:
            raise TypeError("bias: must be None without weight")
        settings, head = split_keywords(options, DEFAULTS, function)
        settings = divided_by(num_items, settings)
        if settings.shift:
            labels = next_labels(labels, settings.ignore_index)
        beside = Labels(labels, class_weight, temperature)
        if weight is None:
            plan = plan_call(LABELS, logits, beside, settings, group, num_items)[0].plan
        else:
            given = Arguments(logits, weight, bias, labels, beside, group, num_items, main_grad)
            plan = plan_linear_call(LABELS, given, settings, head)[0].call.plan
    checks.check_label_range(labels, plan.shard.vocab_size, plan.options.ignore_index, shift=settings.shift)
