"""One case: every provider checked, then all and the bare matmuls timed in turn, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench.linear_cases import LinearCase, LinearEffort, LinearInputs, make_inputs
from bench.linear_oracle import LinearResult, errors, expected, fault, tolerances
from bench.linear_providers import LinearProvider
from bench.measure import WARM_UP_ROUNDS, Result, Times, forget_compiled, of_all_ranks, reason_of
from bench.timing import Run, Timer

YARDSTICK = "three bare matmuls"
ROWS_AT_ONCE = 1024
ALL_REDUCE = "all_reduce of d_hidden"


class BareMatmuls:
    """The yardstick: what no way around it saves, into memory that is there.

    ``hidden @ weight.T``, ``grad @ weight`` and ``grad.T @ hidden``; several ranks then all-reduce
    the gradient of hidden. The softmax stands for the gradient: a GPU multiplies zeros faster.
    """

    @torch.no_grad()
    def __init__(self, case: LinearCase, inputs: LinearInputs, group: Any) -> None:
        self.hidden, self.weight = inputs.hidden.detach(), inputs.weight.detach()
        self.group = group
        self.logits = self.hidden.new_empty(case.tokens, case.columns)
        self.d_hidden, self.d_weight = torch.empty_like(self.hidden), torch.empty_like(self.weight)
        torch.mm(self.hidden, self.weight.T, out=self.logits)
        self.grad = torch.empty_like(self.logits)
        for logits, grad in zip(self.logits.split(ROWS_AT_ONCE), self.grad.split(ROWS_AT_ONCE), strict=True):
            grad.copy_(logits.float().softmax(-1).div_(case.tokens))

    @torch.no_grad()
    def __call__(self) -> None:
        torch.mm(self.hidden, self.weight.T, out=self.logits)
        torch.mm(self.grad, self.weight, out=self.d_hidden)
        torch.mm(self.grad.T, self.hidden, out=self.d_weight)
        if self.group is not None:
            self.all_reduce()

    def all_reduce(self) -> None:
        dist.all_reduce(self.d_hidden, group=self.group)


def measure_linear(
    case: LinearCase,
    group: Any,
    rank: int,
    providers: Sequence[LinearProvider],
    timer: Timer,
    effort: LinearEffort,
    device: str = "cuda",
) -> list[Result]:
    """One result a provider: numbers, or why there are none."""
    forget_compiled()
    inputs = make_inputs(case, rank, device)
    right = expected(case, inputs, rank, group)
    checks: dict[str, Result] = {}
    for provider in providers:
        tried = _tried(case, group, provider, inputs, right, timer)
        checks[provider.name] = _judged(case, provider, of_all_ranks(tried, group, device))
        timer.release()
    del right
    timer.release()
    timed = [provider for provider in providers if "refused" not in checks[provider.name]]
    runs = {p.name: partial(p.call, inputs, case.reduction, group) for p in timed}
    times = linear_times(yardsticks(case, inputs, group) | runs, timer, effort)
    results = []
    for provider in providers:
        result = case._asdict() | {"provider": provider.name}
        if provider in timed:
            result |= time_numbers(case, times, provider.name, effort.calls)
            result["queued"] = timer.was_queued(provider.name)
        results.append(result | checks[provider.name])
    return results


def yardsticks(case: LinearCase, inputs: LinearInputs, group: Any) -> dict[str, Run]:
    """The bare matmuls, and the reduction that is part of them alone."""
    matmuls = BareMatmuls(case, inputs, group)
    return {YARDSTICK: matmuls} | ({} if group is None else {ALL_REDUCE: matmuls.all_reduce})


class Tried(NamedTuple):
    """What a rank saw of a provider's first two calls: why there were none, or errors and peak memory."""

    reason: str | None
    errors: dict[str, float]
    extra_peak_bytes: int


def _tried(
    case: LinearCase,
    group: Any,
    provider: LinearProvider,
    inputs: LinearInputs,
    right: LinearResult,
    timer: Timer,
) -> Tried:
    run = partial(provider.call, inputs, case.reduction, group)
    try:
        return Tried(None, errors(run(), right), timer.extra_peak_bytes(run))
    except Exception as error:
        if provider.is_ours:
            raise
        return Tried(reason_of(error), {}, 0)


def _judged(case: LinearCase, provider: LinearProvider, ranks: Sequence[Tried]) -> Result:
    """The first rank's reason that has one, or the largest error and memory of any.

    Raises:
        AssertionError: this project is wrong.
    """
    for tried in ranks:
        if tried.reason is not None:
            return {"refused": tried.reason}
    largest = {name: max((tried.errors[name] for tried in ranks), key=_nan_last) for name in ranks[0].errors}
    wrong = fault(largest, tolerances(case, provider.is_ours))
    if provider.is_ours and wrong is not None:
        raise AssertionError(f"{case}: {provider.name}: {wrong}")
    memory = max(tried.extra_peak_bytes for tried in ranks)
    return {
        "extra_peak_bytes": memory,
        "bytes_over_fp32_weight_gradient": memory - case.fp32_weight_bytes,
        "errors": {name: _finite(error) for name, error in largest.items()},
        "wrong": wrong,
    }


def _nan_last(error: float) -> tuple[bool, float]:
    return error != error, error


def _finite(error: float) -> float | None:
    """JSON has no other numbers."""
    return float(f"{error:.3g}") if abs(error) < float("inf") else None


def linear_times(runs: dict[str, Run], timer: Timer, effort: LinearEffort) -> Times:
    """Milliseconds of every round's calls; every second round goes the other way: the GPU's clock drifts."""

    def repeated(run: Run) -> None:
        for _ in range(effort.calls):
            run()

    times: Times = {name: [] for name in runs}
    for round_index in range(effort.rounds + WARM_UP_ROUNDS):
        for name in list(runs) if round_index % 2 == 0 else reversed(runs):
            elapsed = timer.queued(name, partial(repeated, runs[name]))
            if round_index >= WARM_UP_ROUNDS:
                times[name].append(elapsed)
    return times


def time_numbers(case: LinearCase, times: Times, name: str, calls: int) -> Result:
    """Of one call; a ratio is that of a round."""
    ratios = [elapsed / bare for elapsed, bare in zip(times[name], times[YARDSTICK], strict=True)]
    milliseconds = statistics.median(times[name]) / calls
    all_reduce = times.get(ALL_REDUCE)
    return {
        "ratio": round(statistics.median(ratios), 4),
        "ratio_spread": [round(min(ratios), 4), round(max(ratios), 4)],
        "milliseconds": round(milliseconds, 4),
        "yardstick_milliseconds": round(statistics.median(times[YARDSTICK]) / calls, 4),
        "all_reduce_milliseconds": round(statistics.median(all_reduce) / calls, 4) if all_reduce else None,
        "teraflops_per_second": round(case.flops / milliseconds / 1e9, 1),
    }
