"""One case: each provider is checked, then all of them and the yardstick are timed in turn, round by round.

The loop is the same for both losses. A subject has what differs: its inputs, its yardstick, its check and the
fields of its results.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from bench_lib import oracle
from bench_lib.cases import Case, Inputs, LinearCase, linear_inputs, logits_inputs
from bench_lib.providers import Provider, first_line
from bench_lib.timing import DeviceTimer, Ranks, Run

YARDSTICK = "yardstick"
WARM_UP_ROUNDS = 2
Result: TypeAlias = dict[str, Any]
Times: TypeAlias = dict[str, list[float]]
Call: TypeAlias = Callable[[Inputs], object]
Runs: TypeAlias = dict[str, tuple[Run, Run]]  # what is timed, and what prepares it


class _Head(torch.autograd.Function):
    """Stands for the operation that makes logits; its backward is not part of the loss and never runs."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, buffer: Tensor) -> Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[None, None]:
        raise AssertionError("benchmark: the gradient of logits went further than to the logits")


@cache
def _leaf(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, requires_grad=True)


def as_produced(buffer: Tensor) -> Tensor:
    """Logits as training has them: no leaf and no view, in the memory of ``buffer``.

    Takes no memory and launches nothing. All logits of one buffer share a version with it, so that autograd
    and the losses notice a write.
    """
    logits: Tensor = _Head.apply(_leaf(buffer.device), buffer)
    return logits


class BaseSubject:
    """One case on this rank."""

    inputs_of: Callable[..., Inputs]

    def __init__(self, case: Any, ranks: Ranks, rounds: int) -> None:
        self.case, self.ranks, self.effort = case, ranks, case.effort(rounds)
        self.inputs = type(self).inputs_of(case, ranks.rank, ranks.device)
        self._right: dict[str, list[Tensor]] = {}  # by what is asked of the loss

    def call(self, provider: Provider, inputs: Inputs) -> tuple[Tensor, ...]:
        return provider.step(inputs, self.case.reduction, self.ranks.group)


class LogitsSubject(BaseSubject):
    """The loss over logits, beside ``out.copy_(logits)``. Each call of a round has a buffer of its own."""

    inputs_of = staticmethod(logits_inputs)

    def __init__(self, case: Any, ranks: Ranks, rounds: int) -> None:
        super().__init__(case, ranks, rounds)
        (self.source,) = self.inputs.tensors
        count = max(self.effort.calls, self.effort.eager_calls)
        self.buffers = [self.source.clone() for _ in range(count)]

    def operands(self, count: int, *, fresh: bool) -> list[Inputs]:
        """The inputs of ``count`` calls, unchanged by earlier calls; if ``fresh``, logits for autograd."""
        for buffer in self.buffers:
            buffer.copy_(self.source)
        chosen = self.buffers[:count]
        return [self.inputs._replace(tensors=(as_produced(b) if fresh else b,)) for b in chosen]

    def yardstick(self) -> Call:
        """The copy writes to the buffer that left the cache longest ago."""
        half = len(self.buffers) // 2
        target = {id(b): self.buffers[i - len(self.buffers) + half] for i, b in enumerate(self.buffers)}
        return lambda inputs: target[id(inputs.tensors[0])].copy_(inputs.tensors[0])

    def check(self, provider: Provider) -> Result:
        """Of the first rows."""
        plain = {"reduction": provider.checked_as or self.case.reduction}
        options = plain if provider.options is None else provider.options
        shard = self.source[: oracle.CHECKED_ROWS].clone()
        labels = self.inputs.labels[: oracle.CHECKED_ROWS]
        key = repr(options)
        if key not in self._right:
            self._right[key] = oracle.expected_logits(shard, labels, options, self.ranks.group)
        actual = self.call(provider, Inputs((as_produced(shard),), labels))
        errors = oracle.errors_of(actual, self._right[key], ("gradient",))
        # This project rounds the gradient once. Others may round the loss to bf16 and the gradient often.
        ours = (1e-5, torch.finfo(self.source.dtype).eps + oracle.SUMS)
        oracle.require(errors, ours if provider.is_ours else (0.01, 0.02))
        return {"max_error": float(f"{max(errors.values()):.3g}")}

    def numbers(self, times: Times, name: str, memory: int | None) -> Result:
        calls = self.effort.calls
        return ratio_numbers(times, name, 3) | {
            "microseconds": round(1e3 * statistics.median(times[name]) / calls, 2),
            "copy_microseconds": round(1e3 * statistics.median(times[YARDSTICK]) / calls, 2),
            "extra_peak_bytes_per_row": None if memory is None else round(memory / self.case.rows, 2),
        }


class LinearSubject(BaseSubject):
    """The loss of hidden states and a weight, beside the three matmuls that every way needs.

    ``hidden @ weight.T``, ``grad @ weight`` and ``grad.T @ hidden`` go into memory that is there; several
    ranks then all-reduce the gradient of hidden. The gradient is the softmax: a GPU multiplies zeros faster.
    """

    inputs_of = staticmethod(linear_inputs)

    def operands(self, count: int, *, fresh: bool) -> list[Inputs]:
        return [self.inputs] * count  # no provider overwrites them

    @torch.no_grad()
    def yardstick(self) -> Call:
        self._right.clear()  # every check is done
        hidden, weight = (tensor.detach() for tensor in self.inputs.tensors)
        logits = hidden @ weight.T
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
        grad = torch.empty_like(logits)
        for source, target in zip(logits.split(1024), grad.split(1024), strict=True):
            target.copy_(source.float().softmax(-1).div_(self.case.tokens))

        @torch.no_grad()
        def matmuls(_: Inputs) -> None:
            torch.mm(hidden, weight.T, out=logits)
            torch.mm(grad, weight, out=d_hidden)
            torch.mm(grad.T, hidden, out=d_weight)
            if self.ranks.group is not None:
                dist.all_reduce(d_hidden, group=self.ranks.group)

        return matmuls

    def check(self, provider: Provider) -> Result:
        if not self._right:
            self._right[""] = oracle.expected_linear(self.case, self.inputs, self.ranks.group)
        actual = self.call(provider, self.inputs)
        errors = oracle.errors_of(actual, self._right[""], ("d_hidden", "d_weight"))
        eps = torch.finfo(actual[1].dtype).eps
        ours = (eps / 16 + oracle.SUMS, eps + oracle.SUMS, eps + oracle.SUMS)
        oracle.require(errors, ours if provider.is_ours else (0.05, 0.05, 0.1))
        return {"errors": {name: float(f"{error:.3g}") for name, error in errors.items()}}

    def numbers(self, times: Times, name: str, memory: int | None) -> Result:
        return ratio_numbers(times, name, 4) | {
            "milliseconds": round(statistics.median(times[name]) / self.effort.calls, 4),
            "yardstick_milliseconds": round(statistics.median(times[YARDSTICK]) / self.effort.calls, 4),
            "extra_peak_bytes": memory,
        }


Subject: TypeAlias = LogitsSubject | LinearSubject


def subject_of(case: Case, ranks: Ranks, rounds: int) -> Subject:
    return (LinearSubject if isinstance(case, LinearCase) else LogitsSubject)(case, ranks, rounds)


def ratio_numbers(times: Times, name: str, digits: int) -> Result:
    """The median over the rounds of the ratio to the yardstick of the same round, and its range."""
    ratios = [elapsed / other for elapsed, other in zip(times[name], times[YARDSTICK], strict=True)]
    spread = [round(min(ratios), digits), round(max(ratios), digits)]
    return {"ratio": round(statistics.median(ratios), digits), "ratio_spread": spread}


class Calls:
    """What is timed: calls one after the other, each on inputs that are made before the time is taken."""

    def __init__(self, subject: Subject, call: Call, count: int, *, fresh: bool) -> None:
        self._subject, self._call, self._count, self._fresh = subject, call, count, fresh
        self._operands: list[Inputs] = []

    def prepare(self) -> None:
        self._operands = self._subject.operands(self._count, fresh=self._fresh)

    def __call__(self) -> None:
        for operand in self._operands:
            self._call(operand)


def interleaved(runs: Runs, timed: Callable[[str, Run, Run], float], rounds: int) -> Times:
    """Milliseconds of every round, each in another order: the GPU's clock drifts, and neighbours leave their traces."""
    times: Times = {name: [] for name in runs}
    for index in range(rounds + WARM_UP_ROUNDS):
        for name in random.Random(index).sample(list(runs), len(runs)):  # the same on all ranks
            elapsed = timed(name, *runs[name])
            if index >= WARM_UP_ROUNDS:
                times[name].append(elapsed)
    return times


def measure(subject: Subject, providers: Sequence[Provider], timer: DeviceTimer, graphs: str = "none") -> list[Result]:
    """One result per provider: numbers, or why it was refused. ``graphs``: ours, all or none."""
    if "torch._dynamo" in sys.modules:  # nothing is compiled before it is imported, which takes seconds
        torch.compiler.reset()  # a function that was compiled for eight shapes is not compiled for a ninth
    found = {provider.name: attempt(subject, provider, timer) for provider in providers}
    timed = {p.name: p for p in providers if "refused" not in found[p.name]}
    effort, copy = subject.effort, subject.yardstick()

    def runs(count: int) -> Runs:
        calls = {YARDSTICK: Calls(subject, copy, count, fresh=False)}
        calls |= {n: Calls(subject, partial(subject.call, p), count, fresh=True) for n, p in timed.items()}
        return {name: (run, run.prepare) for name, run in calls.items()}

    queued = interleaved(runs(effort.calls), timer.queued, effort.rounds)
    if effort.eager_calls:
        eager = interleaved(runs(effort.eager_calls), timer.eager, effort.eager_rounds)
    for name, provider in timed.items():
        found[name] |= subject.numbers(queued, name, found[name].pop("extra_peak_bytes"))
        found[name] |= {"queued": timer.was_queued(name)}
        found[name] |= {} if provider.gradient is None else {"gradient": provider.gradient}
        if effort.eager_calls:
            wanted = graphs == "all" or (graphs == "ours" and provider.is_ours)
            found[name] |= extra_numbers(eager, name, "eager", effort.eager_calls)
            found[name] |= graph_numbers(subject, provider, copy, timer, wanted)
    return [subject.case._asdict() | {"provider": name} | fields for name, fields in found.items()]


def attempt(subject: Subject, provider: Provider, timer: DeviceTimer) -> Result:
    """The error and peak memory of a provider's first calls, or the first rank's reason to refuse it.

    Raises:
        RuntimeError: this project failed, on any rank: a failed measurement is an error.
    """
    reason = limit = provider.refuses(subject.case)
    found: Result = {}
    cause: Exception | None = None
    if reason is None:
        try:
            found = subject.check(provider)
            for inputs in subject.operands(1, fresh=True):
                subject.call(provider, inputs)  # compiles whatever it compiles
            run = Calls(subject, partial(subject.call, provider), 1, fresh=True)
            run.prepare()
            found["extra_peak_bytes"] = timer.extra_peak_bytes(run)
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
        memory = [fields["extra_peak_bytes"] for _, fields in tried]
        return found | {"extra_peak_bytes": None if None in memory else max(memory)}
    # A named implementation may say that it cannot do a case. Nothing else of this project may fail.
    can_refuse = limit is not None or (not provider.is_default and reason.startswith("ValueError"))
    if provider.is_ours and not can_refuse:
        raise RuntimeError(f"{subject.case}: {provider.name}: {reason}") from cause
    return {"refused": reason}


def graph_numbers(subject: Subject, provider: Provider, copy: Call, timer: DeviceTimer, wanted: bool) -> Result:
    """Of replays of the captured calls: one provider at a time, since its graphs hold on to memory."""
    timer.release()
    count, reason = subject.effort.calls, "not asked for"

    def fresh_call(inputs: Inputs) -> None:
        """Logits are made on the stream that captures, where their backward then runs."""
        subject.call(provider, inputs._replace(tensors=(as_produced(inputs.tensors[0]),)))

    def timed(name: str, run: Run, prepare: Run) -> float:
        return timer.queued(f"graph of {name}", run, prepare)

    try:
        if wanted:
            calls: dict[str, Call] = {YARDSTICK: copy, provider.name: fresh_call}
            restored = partial(subject.operands, count, fresh=False)
            replays = {name: (timer.captured(call, restored()), restored) for name, call in calls.items()}
            times = interleaved({**replays}, timed, subject.effort.rounds)
            return extra_numbers(times, provider.name, "graph", count)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
    return {"microseconds_graph": None, "ratio_graph": None, "graph_error": reason}


def extra_numbers(times: Times, name: str, kind: str, calls: int) -> Result:
    # What disturbs a host only adds: to compare two checkouts, take the lower quartile.
    quartiles = statistics.quantiles(times[name], n=4, method="inclusive") if len(times[name]) > 1 else times[name] * 3
    return {
        f"microseconds_{kind}": round(1e3 * statistics.median(times[name]) / calls, 2),
        f"microseconds_{kind}_quartiles": [round(1e3 * each / calls, 2) for each in quartiles],
        f"ratio_{kind}": ratio_numbers(times, name, 3)["ratio"],
    }
