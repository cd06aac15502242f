"""Triton kernels, and the launchers of each loss, which ``losses`` binds.

Only modules in here import triton, and nothing imports this package before a kernel runs.
"""

from vocab_parallel_ce.kernels import divergences, given_ids, kept, row_loss, row_statistics, soft_labels
from vocab_parallel_ce.kernels.cross_entropy import cross_entropy, element_mul, token_outputs
from vocab_parallel_ce.kernels.online_softmax import online_softmax

__all__ = [
    "cross_entropy",
    "divergences",
    "element_mul",
    "given_ids",
    "kept",
    "online_softmax",
    "row_loss",
    "row_statistics",
    "soft_labels",
    "token_outputs",
]
