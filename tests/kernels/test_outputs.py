"""Outputs and gradients by kernels on their own, where no public function goes."""

import math

import torch

from tests.kernels.rows import whole
from vocab_parallel_ce.losses.divergences import DIVERGENCE, DivergenceOptions
from vocab_parallel_ce.spec import GradOutputs


def test_a_gradient_of_16_bits_of_two_fp32_tensors_has_the_edges_of_its_own_lines(kernel_device):
    """96 columns are whole lines of fp32, and not of 16 bits."""
    from vocab_parallel_ce import kernels

    logits, teacher = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(0)).to(kernel_device)
    targets = DIVERGENCE.Targets(teacher)
    launchers = DIVERGENCE.launchers(DivergenceOptions("forward"), whole(logits), kernels)
    stats = logits.new_empty(1, 3, launchers.widths[0])
    launchers.statistics(logits, targets, (stats,), 0)
    truth = logits.double().softmax(-1) - teacher.double().softmax(-1)
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        grad = torch.full_like(logits, math.nan, dtype=dtype)
        launchers.gradient(logits, targets, (stats,), None, GradOutputs(), grad)
        torch.testing.assert_close(grad.double(), truth, rtol=tolerance, atol=1e-7)
