"""One case: each provider is checked, then all of them and the yardstick are timed in turn, round by round.

The loop is the same for logits, heads and whole steps of a model: a subject has what differs.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from bench_lib.clock import DeviceTimer, Ranks, Run, nothing
from bench_lib.documents import quartiles
from bench_lib.providers import Provider, first_line
from bench_lib.subjects import Call, Result, StepSubject, Subject

YARDSTICK = "yardstick"
WARM_UP_ROUNDS = 2
Times: TypeAlias = dict[str, list[float]]


class Timed(NamedTuple):
    """What is timed, what prepares it, and what is around both."""

    run: Run
    prepare: Run = nothing
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


def calls(subject: Subject, call: Call, count: int, *, fresh: bool, context: Any = nullcontext) -> Timed:
    """Calls one after the other, each on inputs that are made before the time is taken."""
    operands: list[Any] = []

    def prepare() -> None:
        operands[:] = subject.operands(count, fresh=fresh)

    def run() -> None:
        for operand in operands:
            call(operand)

    return Timed(run, prepare, context)


def interleaved(runs: dict[str, Timed], timed: Callable[[str, Run, Run], float], rounds: int) -> Times:
    """Milliseconds of every round, each in another order: the GPU's clock drifts, and neighbours leave their traces."""
    times: Times = {name: [] for name in runs}
    for index in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(index).sample(list(runs), len(runs)):  # the same on all ranks
            with runs[name].context():
                elapsed = timed(name, runs[name].run, runs[name].prepare)
            if index >= WARM_UP_ROUNDS:
                times[name].append(elapsed)
    return times


def measure(subject: Subject, providers: Sequence[Provider], timer: DeviceTimer, graphs: str = "none") -> list[Result]:
    """One result per provider: numbers, or why it was refused. ``graphs``: ours, all or none."""
    if "torch._dynamo" in sys.modules:  # nothing is compiled before it is imported, which takes seconds
        torch.compiler.reset()  # a function that was compiled for eight shapes is not compiled for a ninth
    with only_new_garbage(timer):
        found = {provider.name: attempt(subject, provider, timer) for provider in providers}
    timed = {p.name: p for p in providers if "refused" not in found[p.name]}
    effort, yardstick = subject.effort, subject.yardstick()
    base = next(iter(timed), "") if yardstick is None else YARDSTICK

    def runs(count: int) -> dict[str, Timed]:
        first = {} if yardstick is None else {YARDSTICK: calls(subject, yardstick, count, fresh=False)}
        return first | {
            name: calls(subject, partial(subject.call, provider), count, fresh=True, context=provider.context)
            for name, provider in timed.items()
        }

    clock = timer.queued if effort.is_queued else timer.eager
    times = interleaved(runs(effort.calls), clock, effort.rounds)
    eager = interleaved(runs(effort.eager_calls), timer.eager, effort.eager_rounds) if effort.eager_calls else {}
    for name, provider in timed.items():
        found[name] |= numbers(times, name, base, effort.calls)
        found[name] |= {"queued": effort.is_queued and timer.was_queued(name)}
        found[name] |= {} if provider.gradient is None else {"gradient": provider.gradient}
        other = provider.baseline or ""
        if other in timed:
            found[name]["over_baseline"] = ratio_numbers(times, name, other)
        if eager:
            wanted = graphs == "all" or (graphs == "ours" and provider.is_ours)
            found[name] |= extra_numbers(eager, name, base, "eager", effort.eager_calls)
            with provider.context():
                found[name] |= graph_numbers(subject, provider, yardstick, timer, wanted)
        if eager and other in timed:
            found[name]["over_baseline_eager"] = ratio_numbers(eager, name, other)
    return [subject.fields | {"provider": name} | fields for name, fields in found.items()]


@contextmanager
def only_new_garbage(timer: DeviceTimer) -> Iterator[None]:
    """Let each release look only at what is made from now on: imports are half a million objects, 0.3 s each time."""
    timer.release()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def attempt(subject: Subject, provider: Provider, timer: DeviceTimer) -> Result:
    """The error and peak memory of a provider's first calls, or the first rank's reason to refuse it.

    Raises:
        RuntimeError: this project failed, on any rank: a failed measurement is an error.
    """
    reason = limit = subject.refusal(provider)
    found: Result = {}
    cause: Exception | None = None
    # The ranks agree after each step: one that had failed alone would leave the others waiting in the next.
    for step in (subject.check, partial(_peak_of_calls, subject, timer=timer)):
        if reason is None:
            try:
                with provider.context():
                    found |= step(provider)
            except torch.OutOfMemoryError as error:
                reason, cause = "out of memory", error
            except AssertionError as error:
                reason, cause = f"wrong: {first_line(error)}", error
            except Exception as error:
                reason, cause = f"{type(error).__name__}: {first_line(error)}", error
        timer.release()
        tried = subject.ranks.gathered((reason, found))
        reason = next((why for why, _ in tried if why is not None), None)
    if reason is None:
        memory = [fields["peak_bytes"] for _, fields in tried]
        return found | {"peak_bytes": None if None in memory else max(memory)}
    # A named implementation may say that it cannot do a case. Nothing else of this project may fail.
    can_refuse = limit is not None or (not provider.is_default and reason.startswith("ValueError"))
    if provider.is_ours and not can_refuse:
        raise RuntimeError(f"{subject.name}: {provider.name}: {reason}") from cause
    return {"refused": reason}


def _peak_of_calls(subject: Subject, provider: Provider, timer: DeviceTimer) -> Result:
    for inputs in subject.operands(1, fresh=True):
        subject.call(provider, inputs)  # compiles whatever it compiles
    one = calls(subject, partial(subject.call, provider), 1, fresh=True)
    one.prepare()
    timer.release()
    return {"peak_bytes": timer.extra_peak_bytes(one.run)}


def numbers(times: Times, name: str, base: str, calls: int) -> Result:
    """Milliseconds of one call, and the ratio to the yardstick."""
    ratio, *spread = ratio_numbers(times, name, base)
    return {
        "ratio": ratio,
        "ratio_spread": spread,
        "ms": round(statistics.median(times[name]) / calls, 5),
        "ms_quartiles": [round(each / calls, 5) for each in quartiles(times[name])],
        "yardstick_ms": round(statistics.median(times[base]) / calls, 5),
    }


def ratio_numbers(times: Times, name: str, base: str) -> list[float]:
    """The median over the rounds of the ratio to ``base`` in the same round, and its range."""
    ratios = [elapsed / other for elapsed, other in zip(times[name], times[base], strict=True)]
    return [round(each, 4) for each in (statistics.median(ratios), min(ratios), max(ratios))]


def graph_numbers(
    subject: Subject, provider: Provider, yardstick: Call | None, timer: DeviceTimer, wanted: bool
) -> Result:
    """Of replays of the captured calls: one provider at a time, since its graphs hold on to memory."""
    count, reason = subject.effort.calls, "not asked for"

    def timed(name: str, run: Run, prepare: Run) -> float:
        return timer.queued(f"graph of {name}", run, prepare)

    try:
        if wanted and yardstick is not None:
            timer.release()
            both: dict[str, Call] = {YARDSTICK: yardstick, provider.name: partial(subject.captured, provider)}
            restored = partial(subject.operands, count, fresh=False)
            replays = {name: Timed(timer.captured(call, restored()), restored) for name, call in both.items()}
            times = interleaved(replays, timed, subject.effort.rounds)
            return extra_numbers(times, provider.name, YARDSTICK, "graph", count)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    return {"microseconds_graph": None, "ratio_graph": None, "graph_error": reason}


def extra_numbers(times: Times, name: str, base: str, kind: str, calls: int) -> Result:
    return {
        f"microseconds_{kind}": round(1e3 * statistics.median(times[name]) / calls, 2),
        f"microseconds_{kind}_quartiles": [round(1e3 * each / calls, 2) for each in quartiles(times[name])],
        f"ratio_{kind}": ratio_numbers(times, name, base)[0],
    }


def measured(
    case: str,
    contexts: Mapping[str, Callable[[], AbstractContextManager[Any]]],
    step: Callable[[], Tensor],
    forget: Run,
    ranks: Ranks,
    rounds: int,
) -> list[Result]:
    """Return the results of one case: steps in the context of each provider, by name.

    Args:
        step: runs one step and returns its loss.
        forget: drops the gradients; not timed.
    """
    made = partial(Provider, loss_from=lambda m: None, module="torch", distribution="torch", is_step=True)
    providers = [made(name, context=context) for name, context in contexts.items()]
    return measure(StepSubject(case, ranks, rounds, step, forget), providers, ranks.timer())
