"""AReaL's log-probabilities and entropies, computed by this package: on request, and undoable.

The functions have the names, parameters, shapes and dtypes of AReaL 1.0. :func:`install` makes its FSDP, Megatron and
Archon engines use them. AReaL 1.0.4 asks for a torch before 2.11; this package needs 2.11 or newer, so install AReaL
without that bound.

What differs: a label outside of the vocabulary is NaN on a GPU, and -100 gives 0 without a gradient; backward may run
again
(``retain_graph``), unless the gradient was written over the logits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vocab_parallel_ce.api.logits import token_log_probs
from vocab_parallel_ce.integrations.log_probs import with_entropies
from vocab_parallel_ce.integrations.rebind import Switch

LEFT = {
    "the head": "the model makes its logits",
    "sums over a tree of sequences": "they are AReaL's code around these functions",
}


def gather_logprobs(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
) -> Tensor:
    """Return ``[...]`` fp32 log-probabilities of ``labels [...]``, for ``logits [..., C]``, this rank's columns.

    AReaL copies the logits to fp32, in chunks, and keeps a softmax of each; here nothing is kept, and ``chunk_size``
    changes nothing.

    Overwrites: backward writes the gradient over the logits if nobody else can see them.

    Collectives: one all_gather of 12 bytes per token over ``tp_group``; AReaL's has three all_reduces per chunk.

    Example:
        >>> from vocab_parallel_ce.integrations import areal
        >>> areal.gather_logprobs(torch.zeros(2, 4), torch.tensor([1, 3]))
        tensor([-1.3863, -1.3863])
    """
    return token_log_probs(logits, labels, temperature=temperature, group=tp_group)


def gather_logprobs_entropy(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, tp_group: Any = None, chunk_size: int = 1024
) -> tuple[Tensor, Tensor]:
    """Return :func:`gather_logprobs` and the fp32 entropies ``[...]`` of all tokens, from one read of the logits.

    Collectives: one all_gather of 16 bytes per token; AReaL's has four all_reduces per chunk.

    Example:
        >>> from vocab_parallel_ce.integrations import areal
        >>> areal.gather_logprobs_entropy(torch.zeros(2, 4), torch.tensor([1, 3]))[1]
        tensor([1.3863, 1.3863])
    """
    return with_entropies(logits, labels, temperature=temperature, group=tp_group)


MODULE = "areal.utils.functional.vocab_parallel"
_switch = Switch(
    "AReaL 1.0",
    {
        f"{MODULE}:gather_logprobs": gather_logprobs,
        f"{MODULE}:gather_logprobs_entropy": gather_logprobs_entropy,
    },
    LEFT,
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
