"""Which kernel a call on a GPU runs, as PyTorch's profiler sees it."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vocab_parallel_ce import selection, vocab_parallel_cross_entropy
from vocab_parallel_ce.blocks import ONE_PASS, ONE_PASS_SMOOTHING, fewest_rows_of_one_pass

pytestmark = pytest.mark.cuda


def test_a_hopper_gpu_runs_one_pass_by_itself():
    """The tests of that kernel are skipped where this says that it cannot run."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs compute capability 9.0, got {torch.cuda.get_device_capability()}")
    assert selection.obstacle_of_gpu(torch.cuda.current_device()) is None


@pytest.mark.no_poison
@pytest.mark.parametrize(
    ("bytes_a_row", "dtype", "options", "expected"),
    [
        (ONE_PASS[0][0], torch.bfloat16, {}, True),
        (ONE_PASS[-1][1], torch.bfloat16, {"reduction": "sum"}, True),
        (ONE_PASS[0][0], torch.float32, {"z_loss": 0.1, "ignore_index": 3}, True),
        (ONE_PASS[0][0], torch.float16, {}, True),
        (ONE_PASS[0][0], torch.bfloat16, {"gradient": "auto"}, False),
        (ONE_PASS[0][0], torch.bfloat16, {"logit_scale": 0.5}, True),
        (ONE_PASS[0][0], torch.bfloat16, {"label_smoothing": 0.1}, False),
        (ONE_PASS_SMOOTHING[0][1], torch.bfloat16, {"logit_scale": 0.5, "label_smoothing": 0.1}, True),
        (ONE_PASS[0][0], torch.bfloat16, {"softcap": 30.0}, False),
        (ONE_PASS[0][0] + 2, torch.bfloat16, {"outputs": ("lse",)}, True),
        (ONE_PASS[0][0], torch.bfloat16, {"outputs": ("predictions",)}, False),
        (ONE_PASS[0][0] - 2, torch.bfloat16, {}, False),
        (ONE_PASS[0][0], torch.bfloat16, {"vocab_size": ONE_PASS[0][0] // 2 - 8}, False),
        (ONE_PASS[0][0], torch.bfloat16, {"rows": -1}, False),
        (ONE_PASS[-1][1], torch.bfloat16, {"rows": -1}, False),
        (ONE_PASS[0][0], torch.bfloat16, {"rows": -1, "impl": "one_pass"}, True),
    ],
)
def test_auto_takes_one_pass_where_it_can(bytes_a_row, dtype, options, expected):
    """``test_one_pass`` has every call that ``impl="one_pass"`` refuses."""
    needed = selection.obstacle_of_gpu(torch.cuda.current_device())
    if needed is not None:
        pytest.skip(f"one_pass needs {needed}")
    options = dict(options)
    rows = fewest_rows_of_one_pass(bytes_a_row) + options.pop("rows", 0)
    logits = torch.zeros(rows, bytes_a_row // dtype.itemsize, device="cuda", dtype=dtype).requires_grad_() * 1
    labels = torch.zeros(rows, device="cuda", dtype=torch.int64)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        vocab_parallel_cross_entropy(logits, labels, **{"gradient": "in_forward", **options})
        torch.cuda.synchronize()
    kernels = {event.key for event in profiled.key_averages()}
    assert any("one_pass" in name for name in kernels) == expected, kernels
