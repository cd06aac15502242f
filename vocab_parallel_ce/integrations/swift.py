"""ms-swift's log-probabilities, entropies and divergences, computed by this package: on request, and undoable.

The functions have the names, parameters and shapes of ms-swift 4.6. :func:`install` makes it use them: GRPO, DPO and
others over Megatron's shards of the vocabulary, and generalized knowledge distillation (GKD) of every backend.

What differs: forward changes no logits, where ms-swift's subtracts from them in place; a label of -100 has exactly no
gradient.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from vocab_parallel_ce.api.distillation import distillation_loss
from vocab_parallel_ce.api.logits import token_log_probs
from vocab_parallel_ce.integrations.log_probs import divergence_of, tensor_parallel_group, with_entropies
from vocab_parallel_ce.integrations.rebind import Switch

SHARDS = "swift.megatron.trainers.vocab_parallel_utils"
GKD = "swift.rlhf_trainers.gkd_loss"
LEFT = {
    "the head": "the model makes its logits",
    "vocab_parallel_log_softmax, vocab_parallel_entropy, vocab_parallel_kl_div": (
        "they return or take log-probabilities of all columns; nothing that is installed calls them"
    ),
    "the student's logits at a teacher's top k": "ms-swift gathers them before the divergence",
    "a divergence whose teacher has fewer columns": "ms-swift fills them with the student's, which need a gradient",
    "the SFT loss of GKD": "it is Megatron-Core's; integrations.megatron computes it",
}


def vocab_parallel_gather_logps(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``[...]`` fp32 log-probabilities, 0 for -100, of ``labels [...]`` for this rank's ``logits [..., C]``.

    Overwrites: backward writes the gradient over the logits if nobody else can see them.

    Collectives: one all_gather of 12 bytes per token over the tensor-parallel group; ms-swift's has three all_reduces.
    """
    return token_log_probs(logits, labels, group=tensor_parallel_group())


def compute_logps_and_entropy_from_logits(
    logits: Tensor, labels: Tensor, compute_entropy: bool = False, entropy_chunk_size: int = 512
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities as :func:`vocab_parallel_gather_logps`, and entropies of all tokens, or None.

    Entropies have the dtype of the logits; the arithmetic is fp32. They need no memory that chunks would save.

    Overwrites: as :func:`vocab_parallel_gather_logps`.

    Collectives: one all_gather, of 16 bytes per token with entropies.
    """
    if not compute_entropy:
        return vocab_parallel_gather_logps(logits, labels), None
    log_probs, entropy = with_entropies(logits, labels, group=tensor_parallel_group())
    return log_probs, entropy.to(logits.dtype)


def jsd_loss(
    s_logits: Tensor,
    t_logits: Tensor,
    beta: float,
    log_softmax_fn: Any = None,
    kl_div_fn: Any = None,
    chunk_size: int = 512,
) -> Tensor:
    """Return the fp32 sum of GKD's divergences of ``[N, C]`` logits: KL(t || s) for ``beta`` 0, KL(s || t) for 1.

    The columns are this rank's if the functions are those over Megatron's shards, and all of them if they are
    ms-swift's defaults, or None. ms-swift's own loss runs with other functions, and if the teacher needs a gradient: a
    teacher with fewer columns gets the student's.

    Overwrites: backward writes the gradient over the student's logits if nobody else can see them.

    Collectives: one all_gather of 20 bytes per token over the tensor-parallel group; two, of 16 and 8, in between.
    """
    functions = log_softmax_fn, kl_div_fn
    is_sharded = functions == _functions(SHARDS, "vocab_parallel_log_softmax", "vocab_parallel_kl_div")
    is_whole = functions in ((None, None), _functions(GKD, "default_log_softmax", "default_kl_div"))
    if t_logits.requires_grad or not (is_sharded or is_whole):
        original: Any = _switch.original(f"{GKD}:jsd_loss")
        keywords = {"log_softmax_fn": log_softmax_fn, "kl_div_fn": kl_div_fn}
        keywords = {name: function for name, function in keywords.items() if function is not None}
        result: Tensor = original(s_logits, t_logits, beta, chunk_size=chunk_size, **keywords)
        return result
    group = tensor_parallel_group() if is_sharded else None
    return distillation_loss(s_logits, t_logits, group=group, reduction="sum", **divergence_of(beta))


def _functions(module: str, *names: str) -> tuple[Any, ...]:
    """Return the functions of a module that has been imported."""
    return tuple(getattr(sys.modules.get(module), name, module) for name in names)


_switch = Switch(
    "ms-swift 4.6",
    {
        f"{SHARDS}:vocab_parallel_gather_logps": vocab_parallel_gather_logps,
        f"{SHARDS}:compute_logps_and_entropy_from_logits": compute_logps_and_entropy_from_logits,
        f"{GKD}:jsd_loss": jsd_loss,
    },
    LEFT,
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
