"""One workload: every provider checked, then all of them and the copy timed in turn, round by round."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import oracle
from bench.cases import Case, Effort, Workload
from bench.logits import as_produced
from bench.providers import Provider, first_line
from bench.timing import Run, Timer
from vocab_parallel_ce.collectives import all_gather_objects

COPY = "copy"
WARM_UP_ROUNDS = 2
Result = dict[str, Any]
Times = dict[str, list[float]]


class Workbench:
    """The buffers of one workload, and the calls on them; what ``copy_`` moves is the yardstick."""

    def __init__(self, case: Case, workload: Workload, effort: Effort, device: str) -> None:
        self.case, self.workload, self.effort, self.device = case, workload, effort, device
        self.source, self.labels = case.inputs(device)
        self.buffers = [self.source.clone() for _ in range(effort.buffers)]

    def call(self, provider: Provider, logits: Tensor) -> tuple[Tensor, Tensor]:
        return provider.call(logits, self.labels, self.workload.reduction, self.case.group)

    def call_on(self, provider: Provider, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """The call on new logits in ``buffer``."""
        return self.call(provider, as_produced(buffer))

    def restore(self) -> None:
        for buffer in self.buffers:
            buffer.copy_(self.source)

    def step(self, provider: Provider | None) -> Callable[[Tensor], object]:
        """The call on given logits: of ``provider``, or the copy to a buffer that left the cache long ago."""
        if provider is not None:
            return partial(self.call, provider)
        half = len(self.buffers) // 2
        targets = {
            id(buffer): self.buffers[(index + half) % len(self.buffers)]
            for index, buffer in enumerate(self.buffers)
        }
        return lambda buffer: targets[id(buffer)].copy_(buffer)

    def graph_step(self, provider: Provider | None) -> Callable[[Tensor], object]:
        """As :meth:`step`, on a buffer; logits are made on the stream that captures, where backward goes."""
        return self.step(None) if provider is None else partial(self.call_on, provider)


class Calls:
    """Calls one after the other, over all buffers in turn: what is timed once it is prepared."""

    def __init__(self, bench: Workbench, provider: Provider | None, count: int) -> None:
        self._bench, self._count = bench, count
        self._step, self._is_copy = bench.step(provider), provider is None
        self._operands: list[Tensor] = []

    def prepare(self) -> None:
        """Restore the buffers, and give every call logits of its own; none is reused by a later call."""
        self._bench.restore()
        buffers = self._bench.buffers
        chosen = [buffers[index % len(buffers)] for index in range(self._count)]
        self._operands = chosen if self._is_copy else [as_produced(buffer) for buffer in chosen]

    def __call__(self) -> None:
        step = self._step
        for operand in self._operands:
            step(operand)


def measure(
    case: Case,
    workload: Workload,
    providers: Sequence[Provider],
    timer: Timer,
    effort: Effort,
    *,
    graphs_of: Callable[[Provider], bool],
    device: str = "cuda",
) -> list[Result]:
    """One result a provider: numbers, or why there are none."""
    forget_compiled()
    bench = Workbench(case, workload, effort, device)
    refused, errors = _checked(bench, providers)
    forget_compiled()
    extra: dict[str, int] = {}
    for provider in providers:
        if provider.name not in refused:
            reason = _warmed_up(bench, provider, timer, extra)
            if reason is not None:
                refused[provider.name] = reason
    timed = [provider for provider in providers if provider.name not in refused]
    queued, eager = _times(bench, timed, timer)
    graphs, graph_errors = graph_times(bench, [p for p in timed if graphs_of(p)], timer)
    results = []
    for provider in providers:
        result = described(workload, case.ranks, provider)
        if provider.name in refused:
            results.append(result | {"refused": refused[provider.name]})
            continue
        traffic = provider.traffic(case, workload.reduction)
        numbers = device_numbers(queued, provider.name, effort.buffers, traffic.bytes_of(case))
        numbers |= eager_numbers(eager, provider.name, effort.eager_calls)
        numbers |= graph_numbers(graphs, graph_errors, provider.name, effort.buffers)
        results.append(
            result
            | numbers
            | {
                "in_place": provider.in_place,
                **provider.mode(case, workload.reduction),
                "queued": timer.was_queued(provider.name),
                "bytes_formula": traffic.formula,
                "extra_peak_bytes_per_row": round(extra[provider.name] / case.rows, 2),
                "max_error": float(f"{errors[provider.name]:.3g}"),
            }
        )
    return results


def measure_graphs(
    case: Case,
    workload: Workload,
    providers: Sequence[Provider],
    timer: Timer,
    effort: Effort,
    device: str = "cuda",
) -> dict[str, Result]:
    """The numbers of CUDA graphs alone, by provider."""
    forget_compiled()
    bench = Workbench(case, workload, effort, device)
    numbers = {}
    for provider in providers:  # one at a time: graphs hold on to the memory of what they captured
        bench.call_on(provider, bench.buffers[0])
        graphs, errors = graph_times(bench, [provider], timer)
        numbers[provider.name] = graph_numbers(graphs, errors, provider.name, effort.buffers)
    return numbers


def forget_compiled() -> None:
    """For ``torch.compile``: a second shape compiles for any number of rows, and an eighth not at all."""
    torch.compiler.reset()


def _checked(bench: Workbench, providers: Sequence[Provider]) -> tuple[dict[str, str], dict[str, float]]:
    """Why a provider is not timed, and the error of those that are; this project's own must be right."""
    case, reduction = bench.case, bench.workload.reduction
    kinds = sorted({reduction} | {provider.checked_as or reduction for provider in providers})
    right = {kind: oracle.expected(case, bench.source, bench.labels, kind) for kind in kinds}
    refused: dict[str, str] = {}
    errors: dict[str, float] = {}
    for provider in providers:
        reason = provider.refuses(case, reduction)
        if reason is None:
            try:
                expected = right[provider.checked_as or reduction]
                errors[provider.name] = oracle.check(provider, case, expected, reduction)
            except Exception as error:
                if provider.is_ours:
                    raise
                reason = reason_of(error)
        reason = _agreed(reason, bench)
        if reason is not None:
            refused[provider.name] = reason
    return refused, errors


def _warmed_up(bench: Workbench, provider: Provider, timer: Timer, extra: dict[str, int]) -> str | None:
    """Why the whole shard cannot be had, or None, and the peak memory of a call that compiles nothing."""
    reason = None
    try:
        bench.call_on(provider, bench.buffers[0])
        bench.restore()
        extra[provider.name] = timer.extra_peak_bytes(partial(bench.call_on, provider, bench.buffers[0]))
    except Exception as error:
        if provider.is_ours:
            raise
        reason = reason_of(error)
    if reason is not None:
        timer.release()
    return _agreed(reason, bench)


def _agreed(reason: str | None, bench: Workbench) -> str | None:
    """The first rank's that has one: a provider is timed on all ranks or on none."""
    return next(filter(None, of_all_ranks(reason, bench.case.group, bench.device)), None)


def of_all_ranks(own: Any, group: Any, device: str) -> list[Any]:
    """What every rank has, in their order."""
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else None
    return all_gather_objects(own, group, place)


def reason_of(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    if isinstance(error, AssertionError) and str(error).startswith(("loss: ", "gradient: ")):
        return f"wrong: {first_line(error)}"
    return f"{type(error).__name__}: {first_line(error)}"


def _times(bench: Workbench, providers: Sequence[Provider], timer: Timer) -> tuple[Times, Times]:
    """Milliseconds of every round: of all buffers with the calls queued, and of a loop of eager calls."""
    effort = bench.effort
    compared: dict[str, Provider | None] = {COPY: None, **{p.name: p for p in providers}}
    queued: Times = {name: [] for name in compared}
    eager: Times = {name: [] for name in compared}
    calls = {name: Calls(bench, provider, effort.buffers) for name, provider in compared.items()}
    for round_index in range(effort.rounds + WARM_UP_ROUNDS):
        for name, run in calls.items():
            elapsed = timer.queued(name, run, run.prepare)
            if round_index >= WARM_UP_ROUNDS:
                queued[name].append(elapsed)
    calls = {name: Calls(bench, provider, effort.eager_calls) for name, provider in compared.items()}
    for round_index in range(effort.eager_rounds + 1):
        for name, run in calls.items():
            run.prepare()
            elapsed = timer.eager(run)
            if round_index >= 1:
                eager[name].append(elapsed)
    return queued, eager


def graph_times(
    bench: Workbench, providers: Sequence[Provider], timer: Timer
) -> tuple[Times, dict[str, str]]:
    """Milliseconds of replaying the captured calls of all buffers, and why a provider has none."""
    replays: dict[str, Run] = {}
    errors: dict[str, str] = {}
    for name, provider in {COPY: None, **{p.name: p for p in providers}}.items() if providers else ():
        bench.restore()
        try:
            replays[name] = timer.captured(bench.graph_step(provider), bench.buffers)
        except Exception as error:
            if provider is None:
                raise
            errors[name] = f"{type(error).__name__}: {first_line(error)}"
    times = _replay_times(bench, replays, timer)
    replays.clear()
    timer.release()
    return times, errors


def _replay_times(bench: Workbench, replays: dict[str, Run], timer: Timer) -> Times:
    times: Times = {name: [] for name in replays}
    for round_index in range(bench.effort.rounds + WARM_UP_ROUNDS if replays else 0):
        for name, replay in replays.items():
            bench.restore()
            elapsed = timer.queued(f"graph of {name}", replay)
            if round_index >= WARM_UP_ROUNDS:
                times[name].append(elapsed)
    return times


def described(workload: Workload, ranks: int, provider: Provider) -> Result:
    return workload._asdict() | {"ranks": ranks, "provider": provider.name}


def ratios_of(times: Times, name: str) -> list[float]:
    """Over the copy of the same round."""
    return [elapsed / copy for elapsed, copy in zip(times[name], times[COPY], strict=True)]


def _microseconds(times: Sequence[float], calls: int) -> float:
    return 1e3 * statistics.median(times) / calls


def device_numbers(times: Times, name: str, calls: int, moved_bytes: int) -> Result:
    ratios = ratios_of(times, name)
    microseconds = _microseconds(times[name], calls)
    return {
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "microseconds": round(microseconds, 2),
        "copy_microseconds": round(_microseconds(times[COPY], calls), 2),
        "terabytes_per_second": round(moved_bytes / microseconds / 1e6, 3),
    }


def eager_numbers(times: Times, name: str, calls: int) -> Result:
    return {
        "microseconds_eager": round(_microseconds(times[name], calls), 2),
        "ratio_eager": round(statistics.median(ratios_of(times, name)), 3),
    }


def graph_numbers(times: Times, errors: dict[str, str], name: str, calls: int) -> Result:
    if name not in times:
        reason = errors.get(name, "not asked for")
        return {"microseconds_graph": None, "ratio_graph": None, "graph_error": reason}
    return {
        "microseconds_graph": round(_microseconds(times[name], calls), 2),
        "ratio_graph": round(statistics.median(ratios_of(times, name)), 3),
    }
