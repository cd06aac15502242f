"""One case: each provider is checked, then all of them and the yardstick are timed in turn, round by round.

The loop is the same for logits, heads and whole steps of a model. A subject has what differs: its inputs, its
yardstick and its check.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from bench_lib.cases import REDUCTIONS, Alongside, Case, Effort, Inputs, inputs_of, label_of
from bench_lib.documents import quartiles
from bench_lib.oracle import CHECKED_ROWS, SUMS, Truth, errors_of, require
from bench_lib.providers import Provider, first_line
from bench_lib.rows import Row
from bench_lib.timing import DeviceTimer, Ranks, Run, nothing

YARDSTICK = "yardstick"
WARM_UP_ROUNDS = 2
Result: TypeAlias = dict[str, Any]
Times: TypeAlias = dict[str, list[float]]
Call: TypeAlias = Callable[[Any], object]


class Timed(NamedTuple):
    """What is timed, what prepares it, and what is around both."""

    run: Run
    prepare: Run = nothing
    context: Callable[[], AbstractContextManager[Any]] = nullcontext


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


class Subject:
    """One case on this rank; ``fields`` are those of its results that name it."""

    effort: Effort

    def __init__(self, name: str, ranks: Ranks, fields: Result) -> None:
        self.name, self.ranks, self.fields = name, ranks, fields

    def call(self, provider: Provider, inputs: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def operands(self, count: int, *, fresh: bool) -> list[Any]:
        """The inputs of ``count`` calls, unchanged by earlier calls; if ``fresh``, for autograd."""
        raise NotImplementedError

    def captured(self, provider: Provider, inputs: Any) -> None:
        """A call on inputs that are made on the stream that captures, where their backward then runs."""
        self.call(provider, inputs)

    def yardstick(self) -> Call | None:
        """What a ratio is to; None stands for the first provider."""
        return None

    def check(self, provider: Provider) -> Result:
        """How far a provider is from the truth; AssertionError if it is wrong."""
        raise NotImplementedError

    def refusal(self, provider: Provider) -> str | None:
        return None


class LossSubject(Subject):
    """What the cases of logits and of heads share."""

    gradients: tuple[str, ...]

    def __init__(self, case: Case, ranks: Ranks, effort: Effort) -> None:
        label = label_of(case)
        super().__init__(str(case), ranks, case._asdict() if label is None else {"case": label})
        self.case, self.effort = case, effort
        self.inputs = inputs_of(case, ranks.rank, ranks.device)
        self._truth: Truth | None = None
        self._right: dict[str, list[Tensor]] = {}  # by what is asked of the loss

    def call(self, provider: Provider, inputs: Inputs) -> tuple[Tensor, ...]:
        return provider.step(inputs, self.case.kind, self.ranks.group)

    def refusal(self, provider: Provider) -> str | None:
        return provider.refuses(self.case)

    def checked(self) -> tuple[Inputs, int]:
        """What is called for a check, and its number of tokens."""
        raise NotImplementedError

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        raise NotImplementedError

    def check(self, provider: Provider) -> Result:
        row = provider.returns or Row("cross_entropy", {"reduction": self.case.kind})
        inputs, n_tokens = self.checked()
        if repr(row) not in self._right:
            self._truth = self._truth or Truth(self.inputs, self.ranks.group, n_tokens)
            self._right[repr(row)] = self._truth.expected(row)
        actual, right = self.call(provider, inputs), self._right[repr(row)]
        gradients = self.gradients if provider.is_whole else ()
        kept = len(right) - len(self.gradients) + len(gradients)
        errors = errors_of(actual[:kept], right[:kept], gradients)
        require(errors, self.allowed(provider, actual)[: len(errors)])
        return {"errors": {name: float(f"{error:.3g}") for name, error in errors.items()}}


class LogitsSubject(LossSubject):
    """The loss over logits, alongside ``out.copy_(logits)``. Each call of a round has a buffer of its own."""

    gradients = ("gradient",)

    def __init__(self, case: Case, ranks: Ranks, effort: Effort) -> None:
        super().__init__(case, ranks, effort)
        (self.source,) = self.inputs.tensors
        count = max(2, self.effort.calls, self.effort.eager_calls)
        self.buffers = [self.source.clone() for _ in range(count)]

    def operands(self, count: int, *, fresh: bool) -> list[Inputs]:
        for buffer in self.buffers:
            buffer.copy_(self.source)
        chosen = self.buffers[:count]
        return [self.inputs._replace(tensors=(as_produced(b) if fresh else b,)) for b in chosen]

    def captured(self, provider: Provider, inputs: Inputs) -> None:
        self.call(provider, inputs._replace(tensors=(as_produced(inputs.tensors[0]),)))

    def yardstick(self) -> Call:
        """The copy writes to the buffer that left the cache longest ago."""
        half = len(self.buffers) // 2
        target = {id(b): self.buffers[i - len(self.buffers) + half] for i, b in enumerate(self.buffers)}
        return lambda inputs: target[id(inputs.tensors[0])].copy_(inputs.tensors[0])

    def checked(self) -> tuple[Inputs, int]:
        """The first rows."""
        first, whole = min(CHECKED_ROWS, self.case.tokens), self.inputs.alongside

        def alongside(name: str) -> Any:
            return whole(name) if name in Alongside.OF_COLUMNS else whole(name)[:first]

        return Inputs((as_produced(self.source[:first].clone()),), self.inputs.labels[:first], alongside), first

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        """This project rounds the gradient once. Others may round the loss to bf16, and the gradient often."""
        if provider.is_ours:
            return 1e-5, torch.finfo(self.source.dtype).eps + SUMS
        return (0.01, 0.02) if self.case.kind in REDUCTIONS else (0.05, 0.1)


class HeadSubject(LossSubject):
    """The loss of hidden states and a weight, alongside the three matmuls that every way needs.

    ``hidden @ weight.T``, ``grad @ weight`` and ``grad.T @ hidden`` go into memory that is there; several
    ranks then all-reduce the gradient of hidden. The gradient is the softmax: a GPU multiplies zeros faster.
    """

    gradients = ("d_hidden", "d_weight")

    def operands(self, count: int, *, fresh: bool) -> list[Inputs]:
        return [self.inputs] * count  # no provider overwrites them

    @torch.no_grad()
    def yardstick(self) -> Call:
        self._truth = None  # every check is done
        self._right.clear()
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

    def checked(self) -> tuple[Inputs, int]:
        return self.inputs, self.case.tokens

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        """Logits are rounded too: of a larger weight, and of a teacher alongside the student, they are further away."""
        eps = torch.finfo(actual[-1].dtype).eps
        times = 1 if self.case.kind in REDUCTIONS else 4
        ours = (times * eps / 16 + SUMS, times * eps + SUMS, times * eps + SUMS)
        return ours if provider.is_ours else (0.05, 0.05, 0.1)


def subject_of(case: Case, ranks: Ranks, rounds: int, *, is_eager: bool = True) -> LossSubject:
    return (HeadSubject if case.is_head else LogitsSubject)(case, ranks, case.effort(rounds, is_eager))


class Calls:
    """What is timed: calls one after the other, each on inputs that are made before the time is taken."""

    def __init__(self, subject: Subject, call: Call, count: int, *, fresh: bool) -> None:
        self._subject, self._call, self._count, self._fresh = subject, call, count, fresh
        self._operands: list[Any] = []

    def prepare(self) -> None:
        self._operands = self._subject.operands(self._count, fresh=self._fresh)

    def __call__(self) -> None:
        for operand in self._operands:
            self._call(operand)


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
        of: dict[str, Timed] = {}
        if yardstick is not None:
            run = Calls(subject, yardstick, count, fresh=False)
            of[YARDSTICK] = Timed(run, run.prepare)
        for name, provider in timed.items():
            run = Calls(subject, partial(subject.call, provider), count, fresh=True)
            of[name] = Timed(run, run.prepare, provider.context)
        return of

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
    run = Calls(subject, partial(subject.call, provider), 1, fresh=True)
    run.prepare()
    timer.release()
    return {"peak_bytes": timer.extra_peak_bytes(run)}


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
            calls: dict[str, Call] = {YARDSTICK: yardstick, provider.name: partial(subject.captured, provider)}
            restored = partial(subject.operands, count, fresh=False)
            replays = {name: Timed(timer.captured(call, restored()), restored) for name, call in calls.items()}
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
