"""What no loss can save of its eager time on this host: autograd's own, and a collective's way to the GPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.cases import Case
from bench.logits import as_produced
from bench.timing import DeviceTimer, Timer
from vocab_parallel_ce import vocab_parallel_cross_entropy
from vocab_parallel_ce.collectives import all_gather_stats

CALLS, ROUNDS = 100, 7
COLUMNS = 32000  # of all ranks, with 1024 rows: the table's case that waits for the host


class _Nothing(torch.autograd.Function):
    """Takes logits, returns a row's worth of memory; the gradient is the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(logits.shape[0], dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        logits: Tensor = ctx.saved_tensors[0]
        return logits.detach()


def measured_host(
    ranks: int, group: Any, timer: Timer | None = None, device: str = "cuda"
) -> dict[str, float]:
    """The document's ``host_microseconds``: of eager calls back to back, forward and backward.

    ``nothing`` is an autograd Function without a launch, ``all_gather`` the exchange alone. Those of
    ``one_thread`` are with ``torch.autograd.set_multithreading_enabled(False)``: backward runs in the
    caller's thread.
    """
    timer = timer or DeviceTimer(ranks)
    case = Case(1024, COLUMNS // ranks, torch.bfloat16, group, ranks)
    buffer, labels = case.inputs(device)
    upstream = torch.ones(case.rows, device=device)

    def nothing(logits: Tensor) -> None:
        torch.autograd.grad(_Nothing.apply(logits), logits, upstream)

    def loss(logits: Tensor) -> None:
        value = vocab_parallel_cross_entropy(logits, labels, group=group, reduction="none")
        torch.autograd.grad(value, logits, upstream)

    logits_of = partial(as_produced, buffer)
    times = {
        "nothing": _microseconds(timer, nothing, logits_of),
        "loss": _microseconds(timer, loss, logits_of),
    }
    with torch.autograd.set_multithreading_enabled(False):
        times["nothing_one_thread"] = _microseconds(timer, nothing, logits_of)
        times["loss_one_thread"] = _microseconds(timer, loss, logits_of)
    if ranks > 1:
        stats = torch.zeros(ranks, case.rows, 3, device=device)
        times["all_gather"] = _microseconds(
            timer, lambda stats: all_gather_stats(stats, case.rank, group), lambda: stats
        )
    return times


def _microseconds(timer: Timer, call: Callable[[Tensor], object], operand_of: Callable[[], Tensor]) -> float:
    """Of one call, each on an operand of its own, which is made before."""
    times = []
    for _ in range(ROUNDS + 1):
        operands = [operand_of() for _ in range(CALLS)]

        def run(operands: list[Tensor] = operands) -> None:
            for operand in operands:
                call(operand)

        times.append(timer.eager(run))
    return round(1e3 * statistics.median(times[1:]) / CALLS, 2)
