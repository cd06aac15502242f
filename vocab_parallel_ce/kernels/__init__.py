"""Triton kernels, and the launchers of each loss, which ``losses`` binds.

Only modules in here and in ``one_pass`` import triton, and nothing imports this package before a kernel runs.
"""

from vocab_parallel_ce.kernels import divergences, given_ids, label_rows, launch, outputs, rows, soft_labels
from vocab_parallel_ce.kernels.algebra import KernelLoss

__all__ = ["KernelLoss", "divergences", "given_ids", "label_rows", "launch", "outputs", "rows", "soft_labels"]
