"""OpenRLHF's log-probabilities and entropies, computed by this package: only on request, and undoable.

The functions have the names, parameters, shapes and dtypes of OpenRLHF 0.11. :func:`install` makes it use them. They
differ in this: neither overwrites the logits, so that one may follow the other in any order; a label of -100 has
log-probability 0 and exactly no gradient.
"""

from __future__ import annotations

from torch import Tensor

from vocab_parallel_ce.api.logits import output_of, token_log_probs
from vocab_parallel_ce.integrations.rebind import Switch


def log_probs_from_logits(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return ``[...]`` log-probabilities of ``labels [...]``, for ``logits [..., V]``, in their dtype.

    The arithmetic is fp32. OpenRLHF divides the logits themselves by ``temperature``; here they stay as they are.

    Example:
        >>> from vocab_parallel_ce.integrations import openrlhf
        >>> openrlhf.log_probs_from_logits(torch.zeros(2, 4), torch.tensor([1, 3]), temperature=0.5)
        tensor([-1.3863, -1.3863])
    """
    log_probs = token_log_probs(logits, labels, temperature=temperature, gradient="out_of_place")
    return log_probs.to(logits.dtype)


def compute_entropy(logits: Tensor) -> Tensor:
    """Return the entropies ``[...]`` of ``logits [..., V]``, in their dtype; the arithmetic is fp32.

    Example:
        >>> from vocab_parallel_ce.integrations import openrlhf
        >>> openrlhf.compute_entropy(torch.zeros(2, 4))
        tensor([1.3863, 1.3863])
    """
    return output_of("entropy", logits).to(logits.dtype)


_switch = Switch(
    "OpenRLHF 0.11",
    {
        "openrlhf.models.utils:log_probs_from_logits": log_probs_from_logits,
        "openrlhf.models.utils:compute_entropy": compute_entropy,
    },
    {"the head": "the actor makes fp32 logits itself"},
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
