"""Log-probabilities of given tokens, and the entropy of their distributions, for reinforcement learning."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import public, run
from vocab_parallel_ce.pipeline import prepare_call
from vocab_parallel_ce.shard import VocabShard

GRADIENTS = ("auto", "in_backward", "out_of_place")


@public
def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    temperature: float = 1.0,
    entropy: bool = False,
    ignore_index: int = -100,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool = False,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
) -> Any:
    """Log-probability of each label, and the entropy of the whole distribution, from one read of the logits.

        p = softmax(z / temperature),  log_prob = log p_y,  entropy = -sum_i p_i log p_i

    in fp32, with ``z`` the scaled and capped logits of :func:`vocab_parallel_cross_entropy`. Both are
    differentiable; their gradients are computed together, in one pass.

    Overwrites: backward writes the gradient over ``logits``, unless ``gradient`` says otherwise. Nothing is
    overwritten if no gradient is needed.

    Collectives: forward one all_gather of 12 bytes a row from each rank, 16 with ``entropy``; backward
    none. No host synchronisation unless ``check_labels``.

    Args:
        logits: ``[..., C]`` bf16, fp16 or fp32, this rank's shard.
        labels: ``[...]`` int64 or int32 global ids of the tokens, the same on every rank.
        temperature: positive; divides ``z``, after the cap.
        entropy: also return the entropy, in nats.
        ignore_index: tokens with this label have log-probability, entropy and gradient 0.
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``, as in
            :func:`vocab_parallel_cross_entropy`.
        group, softcap, logit_scale, impl, check_labels, vocab_size, shard: as in
            :func:`vocab_parallel_cross_entropy`.

    Returns:
        ``[...]`` fp32 log-probabilities, equal bit for bit on all ranks; with ``entropy``,
        ``(log_probs, entropy)``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.
    """
    checks.check_choice("gradient", gradient, GRADIENTS)
    call = prepare_call(
        logits,
        labels,
        group=group,
        ignore_index=ignore_index,
        softcap=softcap,
        logit_scale=logit_scale,
        temperature=temperature,
        entropy=entropy,
        reduction="none",
        gradient=gradient,
        impl=impl,
        check_labels=check_labels,
        vocab_size=vocab_size,
        shard=shard,
    )
    outputs = run(call, logits, labels)
    log_probs = 0.0 - outputs.loss  # a negated 0 would be -0
    return (log_probs, outputs.entropy) if entropy else log_probs
