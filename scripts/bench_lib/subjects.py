"""What differs between logits, heads and whole steps of a model: their inputs, their yardstick and their check."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from bench_lib.calls import Row
from bench_lib.cases import REDUCTIONS, Alongside, Case, Effort, Inputs, inputs_of
from bench_lib.clock import Ranks, Run
from bench_lib.oracle import CHECKED_ROWS, SUMS, Truth, errors_of, require
from bench_lib.providers import Provider

SAME_LOSS = 0.02  # of whole steps, relative to the first provider's
Result: TypeAlias = dict[str, Any]
Call: TypeAlias = Callable[[Any], object]


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

    def __init__(self, name: str, ranks: Ranks, effort: Effort, fields: Result) -> None:
        self.name, self.ranks, self.effort, self.fields = name, ranks, effort, fields

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
        fields = case._asdict() if case.label is None else {"case": case.label}
        super().__init__(str(case), ranks, effort, fields)
        self.case, self.inputs = case, inputs_of(case, ranks.rank, ranks.device)
        self._truth: Truth | None = None
        self._right: dict[str, list[Tensor]] = {}  # by what is asked of the loss

    def call(self, provider: Provider, inputs: Inputs) -> tuple[Tensor, ...]:
        return provider.step(inputs, self.case.kind, self.ranks.group)

    def refusal(self, provider: Provider) -> str | None:
        return provider.refuses(self.case)

    def checked(self) -> tuple[Inputs, int]:
        """What is called for a check, and its number of tokens."""
        return self.inputs, self.case.tokens

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

    def allowed(self, provider: Provider, actual: tuple[Tensor, ...]) -> tuple[float, ...]:
        """Logits are rounded too: of a larger weight, and of a teacher alongside the student, they are further away."""
        eps = torch.finfo(actual[-1].dtype).eps
        times = 1 if self.case.kind in REDUCTIONS else 4
        ours = (times * eps / 16 + SUMS, times * eps + SUMS, times * eps + SUMS)
        return ours if provider.is_ours else (0.05, 0.05, 0.1)


def subject_of(case: Case, ranks: Ranks, rounds: int, *, is_eager: bool = True) -> LossSubject:
    return (HeadSubject if case.is_head else LogitsSubject)(case, ranks, case.effort(rounds, is_eager))


class StepSubject(Subject):
    """Whole steps of a model, alongside those of the first provider.

    ``step`` runs one and returns its loss, and ``forget`` drops the gradients.
    """

    def __init__(self, name: str, ranks: Ranks, rounds: int, step: Callable[[], Tensor], forget: Run) -> None:
        super().__init__(name, ranks, Effort(1, rounds, is_queued=False), {"case": name})
        self.step, self.forget = step, forget
        self._first: float | None = None

    def call(self, provider: Provider, inputs: Any) -> tuple[Tensor, ...]:
        return (self.step(),)

    def operands(self, count: int, *, fresh: bool) -> list[Any]:
        self.forget()
        return [None] * count

    def check(self, provider: Provider) -> Result:
        self.forget()
        loss = float(self.step().detach())
        self._first = loss if self._first is None else self._first
        require({"loss": abs(loss - self._first) / max(abs(self._first), 1e-6)}, (SAME_LOSS,))
        return {"loss": loss}
