"""Triton kernels, and the launchers of each loss, which ``losses`` binds.

Only modules in here import triton, and nothing imports this package before a kernel runs.
"""

from vocab_parallel_ce.kernels import divergences, row_loss, row_statistics, targets
from vocab_parallel_ce.kernels.count_larger import count_larger
from vocab_parallel_ce.kernels.cross_entropy import cross_entropy
from vocab_parallel_ce.kernels.element_mul import element_mul
from vocab_parallel_ce.kernels.loss import summed_outputs, token_outputs
from vocab_parallel_ce.kernels.online_softmax import online_softmax
from vocab_parallel_ce.kernels.sums_above import sums_above

__all__ = [
    "count_larger",
    "cross_entropy",
    "divergences",
    "element_mul",
    "online_softmax",
    "row_loss",
    "row_statistics",
    "summed_outputs",
    "sums_above",
    "targets",
    "token_outputs",
]
