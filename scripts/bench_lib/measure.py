"""One case: each provider is checked, then all of them and the yardstick are timed in turn, round by round.

A subject has what differs between logits, heads and whole steps of a model: inputs, calls, yardstick and check.
"""

from __future__ import annotations

import gc
import random
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from bench_lib.calls import Row
from bench_lib.cases import OF_COLUMNS, REDUCTIONS, Case, Effort, Inputs, as_produced, inputs_of
from bench_lib.clock import DeviceTimer, Ranks, Run, nothing
from bench_lib.documents import Result
from bench_lib.providers import Provider, first_line
from bench_lib.truth import CHECKED_ROWS, SUMS, errors_of, expected, require

YARDSTICK = "yardstick"
WARM_UP_ROUNDS = 2
SAME_LOSS = 0.02  # of whole steps, relative to the first provider's
Call: TypeAlias = Callable[[Any], object]
Times: TypeAlias = dict[str, list[float]]


class LossSubject:
    """What the cases of logits and of heads share, on this rank; ``fields`` are those of its results that name it."""

    gradients: tuple[str, ...]

    def __init__(self, case: Case, ranks: Ranks, effort: Effort) -> None:
        self.fields = case._asdict() if case.label is None else {"case": case.label}
        self.name, self.case, self.ranks, self.effort = str(case), case, ranks, effort
        self.inputs = inputs_of(case, ranks.rank, ranks.device)
        self._right: dict[str, list[Tensor]] = {}  # by what is asked of the loss

    def call(self, provider: Provider, inputs: Inputs) -> tuple[Tensor, ...]:
        return provider.step(inputs, self.case.kind, self.ranks.group)

    def refusal(self, provider: Provider) -> str | None:
        if provider.only in (None, self.case.kind):
            return None
        return "timed with the means alone" if provider.only == "mean" else "timed without a reduction alone"

    def checked(self) -> tuple[Inputs, int]:
        """What is called for a check, and its number of tokens."""
        return self.inputs, self.case.tokens

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        raise NotImplementedError

    def check(self, provider: Provider) -> Result:
        """How far a provider is from the truth; AssertionError if it is wrong."""
        row = provider.returns or Row("cross_entropy", {"reduction": self.case.kind})
        inputs, n_tokens = self.checked()
        if repr(row) not in self._right:
            self._right[repr(row)] = expected(row, self.inputs, self.ranks.group, n_tokens)
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
        """The inputs of ``count`` calls, unchanged by earlier calls; if ``fresh``, for autograd."""
        for buffer in self.buffers:
            buffer.copy_(self.source)
        chosen = self.buffers[:count]
        return [self.inputs._replace(tensors=(as_produced(b) if fresh else b,)) for b in chosen]

    def captured(self, provider: Provider, inputs: Inputs) -> None:
        """A call on inputs that are made on the stream that captures, where their backward then runs."""
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
            return whole(name) if name in OF_COLUMNS else whole(name)[:first]

        return Inputs((as_produced(self.source[:first].clone()),), self.inputs.labels[:first], alongside), first

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        """This project rounds the gradient once. Others may round the loss to bf16, and the gradient often."""
        if provider.is_ours:
            return 1e-5, torch.finfo(self.source.dtype).eps + SUMS
        return (0.01, 0.02) if self.case.kind in REDUCTIONS else (0.05, 0.1)


class HeadSubject(LossSubject):
    """The loss of hidden states and a weight, alongside the three matmuls that every way needs, with a teacher four.

    ``hidden @ weight.T``, ``grad @ weight`` and ``grad.T @ hidden`` go into memory that is there; several
    ranks then all-reduce the gradient of hidden. The gradient is the softmax: a GPU multiplies zeros faster.
    """

    gradients = ("d_hidden", "d_weight")

    def operands(self, count: int, *, fresh: bool) -> list[Inputs]:
        return [self.inputs] * count  # no provider overwrites them

    @torch.no_grad()
    def yardstick(self) -> Call:
        self._right.clear()  # every check is done
        hidden, weight = (tensor.detach() for tensor in self.inputs.tensors)
        of_teacher = self.inputs.alongside("teacher") if self.case.teacher_size else None
        logits = hidden @ weight.T
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight)
        grad = torch.empty_like(logits)
        for source, target in zip(logits.split(1024), grad.split(1024), strict=True):
            target.copy_(source.float().softmax(-1).div_(self.case.tokens))

        @torch.no_grad()
        def matmuls(_: Inputs) -> None:
            if of_teacher is not None:
                torch.mm(of_teacher[0], of_teacher[1].T, out=logits)
            torch.mm(hidden, weight.T, out=logits)
            torch.mm(grad, weight, out=d_hidden)
            torch.mm(grad.T, hidden, out=d_weight)
            if self.ranks.group is not None:
                dist.all_reduce(d_hidden, group=self.ranks.group)

        return matmuls

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        """Logits are rounded too: of a larger weight, and of a teacher alongside the student, they are further away."""
        eps = torch.finfo(actual[-1].dtype).eps
        times = 1 if self.case.kind in REDUCTIONS else 4
        ours = (times * eps / 16 + SUMS, times * eps + SUMS, times * eps + SUMS)
        return ours if provider.is_ours else (0.05, 0.05, 0.1)


class StepSubject:
    """Whole steps of a model, alongside those of the first provider.

    ``step`` runs one and returns its loss, and ``forget`` drops the gradients.
    """

    def __init__(self, name: str, ranks: Ranks, rounds: int, step: Callable[[], Tensor], forget: Run) -> None:
        self.name, self.ranks, self.fields = name, ranks, {"case": name}
        self.effort = Effort(1, rounds, is_queued=False)
        self.step, self.forget = step, forget
        self._first: float | None = None

    def call(self, provider: Provider, inputs: Any) -> tuple[Tensor, ...]:
        return (self.step(),)

    def operands(self, count: int, *, fresh: bool) -> list[Any]:
        self.forget()
        return [None] * count

    def yardstick(self) -> Call | None:
        """None stands for the first provider."""
        return None

    def refusal(self, provider: Provider) -> str | None:
        return None

    def check(self, provider: Provider) -> Result:
        self.forget()
        loss = float(self.step().detach())
        self._first = loss if self._first is None else self._first
        require({"loss": abs(loss - self._first) / max(abs(self._first), 1e-6)}, (SAME_LOSS,))
        return {"loss": loss}


Subject: TypeAlias = LogitsSubject | HeadSubject | StepSubject


def subject_of(case: Case, ranks: Ranks, rounds: int) -> LogitsSubject | HeadSubject:
    return (HeadSubject if case.is_head else LogitsSubject)(case, ranks, case.effort(rounds))


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


def measure(
    subject: Subject, providers: Sequence[Provider], timer: DeviceTimer, *, graphs: bool = False
) -> list[Result]:
    """One result per provider: numbers, or why it was refused; with ``graphs`` those of CUDA graphs of logits too."""
    if "torch._dynamo" in sys.modules:  # nothing is compiled before it is imported, which takes seconds
        torch.compiler.reset()  # a function that was compiled for eight shapes is not compiled for a ninth
    timer.release()
    gc.freeze()  # imports are half a million objects, at which each release would look: 0.3 s
    found = {provider.name: attempt(subject, provider, timer) for provider in providers}
    gc.unfreeze()
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
        for field, each in (("over_baseline", times), ("over_baseline_eager", eager)):
            if provider.baseline in each:
                found[name][field] = ratio_numbers(each, name, provider.baseline)
        if eager:
            found[name] |= extra_numbers(eager, name, base, "eager", effort.eager_calls)
        if graphs and isinstance(subject, LogitsSubject):
            with provider.context():
                found[name] |= graph_numbers(subject, provider, timer)
    return [subject.fields | {"provider": name} | fields for name, fields in found.items()]


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
            except Exception as error:
                kind = "wrong" if isinstance(error, AssertionError) else type(error).__name__
                reason, cause = f"{kind}: {first_line(error)}", error
        timer.release()
        tried = subject.ranks.gathered((reason, found))
        reason = next((why for why, _ in tried if why is not None), None)
    if reason is None:
        memory = [fields["peak_bytes"] for _, fields in tried]
        return found | {"peak_bytes": None if None in memory else max(memory)}
    if provider.is_ours and limit is None:
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


def quartiles(times: Sequence[float]) -> list[float]:
    """The lower and the upper one. What disturbs a host only adds: to compare two checkouts, take the lower."""
    both = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return [float(each) for each in both]


def ratio_numbers(times: Times, name: str, base: str) -> list[float]:
    """The median over the rounds of the ratio to ``base`` in the same round, and its range."""
    ratios = [elapsed / other for elapsed, other in zip(times[name], times[base], strict=True)]
    return [round(each, 4) for each in (statistics.median(ratios), min(ratios), max(ratios))]


def graph_numbers(subject: LogitsSubject, provider: Provider, timer: DeviceTimer) -> Result:
    """Of replays of the captured calls: one provider at a time, since its graphs hold on to memory."""
    count = subject.effort.calls

    def timed(name: str, run: Run, prepare: Run) -> float:
        return timer.queued(f"graph of {name}", run, prepare)

    try:
        timer.release()
        both: dict[str, Call] = {YARDSTICK: subject.yardstick(), provider.name: partial(subject.captured, provider)}
        restored = partial(subject.operands, count, fresh=False)
        replays = {name: Timed(timer.captured(call, restored()), restored) for name, call in both.items()}
        times = interleaved(replays, timed, subject.effort.rounds)
        return extra_numbers(times, provider.name, YARDSTICK, "graph", count)
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error)}"
        return {"microseconds_graph": None, "ratio_graph": None, "graph_error": said}


def extra_numbers(times: Times, name: str, base: str, kind: str, calls: int) -> Result:
    return {
        f"microseconds_{kind}": round(1e3 * statistics.median(times[name]) / calls, 2),
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
