"""Multiplying a stored gradient by ``grad_output``."""

import torch


def scale(grad, grad_output):
    from vocab_parallel_ce.kernels.outputs import element_mul

    element_mul(grad, grad_output)


def test_worked_example(kernel_device):
    grad = torch.tensor([[1.0, 2.0, 3.0]], device=kernel_device)
    scale(grad, torch.tensor([0.5], device=kernel_device))
    assert grad.tolist() == [[0.5, 1, 1.5]]


def test_more_rows_than_programs(kernel_device):
    """Each program takes every 512th row; the last has no second one."""
    from vocab_parallel_ce.kernels.outputs import PROGRAMS

    factors = torch.arange(1, 2 * PROGRAMS, device=kernel_device) % 7 - 3.0
    grad = torch.ones(len(factors), 5, device=kernel_device)
    scale(grad, factors)
    assert torch.equal(grad, factors[:, None].expand(-1, 5))


def test_a_factor_of_1_writes_nothing(kernel_device):
    """Any arithmetic quiets a signalling NaN, a product with 1 as well: its bits show a write."""
    signalling = torch.full((4, 40), 0x7F801234, dtype=torch.int32)
    grad = signalling.clone().view(torch.float32).to(kernel_device)
    grad[1] = 2.0
    scale(grad, torch.tensor([1.0, 8.0, 1.0, 1.0], device=kernel_device))
    assert torch.equal(grad[1], torch.full((40,), 16.0, device=kernel_device))
    unchanged = grad.cpu().view(torch.int32)[[0, 2, 3]]
    assert torch.equal(unchanged, signalling[[0, 2, 3]])
