"""Triton kernels, and the launchers of each loss, which ``losses`` binds.

Only modules in here and in ``one_pass`` import triton, and nothing imports this package before a kernel runs.
"""

from vocab_parallel_ce.kernels import divergence_rows, given_ids, label_rows, launch, outputs, rows, teacher_rows

__all__ = ["divergence_rows", "given_ids", "label_rows", "launch", "outputs", "rows", "teacher_rows"]
