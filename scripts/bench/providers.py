"""Who computes the loss: this project's implementations and PyTorch's; ``others`` has the rest.

A provider is loaded when it is first used, and says why where it cannot be. Every one is called alike:
``call(logits [N, C], labels [N], reduction, group)`` returns ``(loss, grad [N, C])``, through
``torch.autograd.grad`` from a fresh graph with ones upstream, which are made before. The logits are no leaf
(``bench.logits``), and may be overwritten.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from bench.cases import Case
from bench.logits import as_produced
from vocab_parallel_ce import pipeline, selection, vocab_parallel_cross_entropy

OURS = "vocab_parallel_ce"
UNREDUCED = "in_forward is for reduced losses: the upstream gradient of each token comes after forward"
Step = Callable[[Tensor, Tensor, str, Any], tuple[Tensor, Tensor]]
AnyStep = TypeVar("AnyStep")


class Traffic(NamedTuple):
    """Bytes that an algorithm reads and writes, a logit: passes in the logits' dtype, and others."""

    passes: int
    other_bytes: int = 0

    @property
    def formula(self) -> str:
        if not self.other_bytes:
            return f"{self.passes} * rows * columns * element_size"
        return f"({self.passes} * element_size + {self.other_bytes}) * rows * columns"

    def bytes_of(self, case: Case) -> int:
        return (self.passes * case.dtype.itemsize + self.other_bytes) * case.rows * case.columns


@functools.cache
def ones(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The gradient upstream, which whatever follows the loss has made."""
    return torch.ones(shape, dtype=dtype, device=device)


def through_autograd(loss_of: Callable[[Tensor, Tensor, str, Any], Tensor]) -> Step:
    """Loss and gradient as a training step gets them."""

    def step(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> tuple[Tensor, Tensor]:
        loss = loss_of(logits, labels, reduction, group)
        return loss, torch.autograd.grad(loss, logits, ones(loss.shape, loss.dtype, loss.device))[0]

    return step


def no_limits(case: Case, reduction: str) -> str | None:
    return None


class Loadable(Generic[AnyStep]):
    """Is imported by ``load`` when it is first used, and says why where it cannot be; a dataclass's base."""

    name: str
    load: Callable[[], AnyStep]
    package: str
    distribution: str
    of_one_rank: bool
    of_several: bool
    is_default: bool
    _loaded: dict[str, Any]

    def available(self, ranks: int) -> str | None:
        """Why it cannot be timed on this host with this number of ranks, or None."""
        if ranks > 1 and not self.of_several:
            return "needs the whole vocabulary on one rank"
        if ranks == 1 and not self.of_one_rank:
            return "needs several ranks"
        try:
            self.step()
        except ImportError as error:
            return f"not installed: {first_line(error)}"
        except Exception as error:  # of another project's import: any, and it is reported
            return f"cannot be imported: {type(error).__name__}: {first_line(error)}"
        return None

    def step(self) -> AnyStep:
        if "step" not in self._loaded:
            self._loaded["step"] = self.load()
        step: AnyStep = self._loaded["step"]
        return step

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(self.package), "__version__", "unknown"))


@dataclass(frozen=True)
class Provider(Loadable[Step]):
    """One way to compute the loss.

    ``load`` imports what it needs and returns the step. ``traffic`` is of (case, reduction).
    ``limits`` says why a case cannot be had, or None; errors of the call itself are reasons too.
    ``checked_as`` is the reduction whose gradient it returns, where that is not the one asked for.
    ``gradient_of`` says when and where this project writes the gradient; None for others.
    """

    name: str
    load: Callable[[], Step]
    traffic: Callable[[Case, str], Traffic]
    in_place: bool
    package: str
    distribution: str
    of_one_rank: bool = True
    of_several: bool = True
    limits: Callable[[Case, str], str | None] = no_limits
    checked_as: str | None = None
    gradient_of: Callable[[Case, str], str] | None = None
    is_ours: bool = False
    is_default: bool = True
    _loaded: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def call(self, logits: Tensor, labels: Tensor, reduction: str, group: Any) -> tuple[Tensor, Tensor]:
        return self.step()(logits, labels, reduction, group)

    def refuses(self, case: Case, reduction: str) -> str | None:
        return self.limits(case, reduction)

    def mode(self, case: Case, reduction: str) -> dict[str, str]:
        """The result's field ``gradient``, which this project's have."""
        return {} if self.gradient_of is None else {"gradient": self.gradient_of(case, reduction)}


def first_line(error: BaseException) -> str:
    """The message's first line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def fixed(passes: int, other_bytes: int = 0) -> Callable[[Case, str], Traffic]:
    return lambda case, reduction: Traffic(passes, other_bytes)


def through_log_softmax(case: Case, reduction: str) -> Traffic:
    """PyTorch's operators one by one, in fp32; their second reads of a row mostly hit a cache.

    To fp32: read, write 4. log_softmax: read 4, write 4. Backward of the loss: write 4. Backward of
    log_softmax: read 4 and 4, write 4. To the logits' dtype: read 4, write. fp32 is not converted.
    """
    return Traffic(6) if case.dtype == torch.float32 else Traffic(2, 32)


def our_call(case: Case, reduction: str, implementation: str, gradient: str) -> pipeline.Call:
    """What the package would run for ``case``: the package itself is asked.

    Raises:
        ValueError: ``implementation`` cannot do it.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = as_produced(torch.empty(1, case.columns, dtype=case.dtype, device=device))
    labels = torch.zeros(1, dtype=torch.int64, device=device)
    return pipeline.prepare_call(
        logits, labels, group=case.group, reduction=reduction, gradient=gradient, impl=implementation
    )


def _our_traffic(implementation: str, gradient: str) -> Callable[[Case, str], Traffic]:
    """A shard is read and written once, or read, read and written."""

    def traffic(case: Case, reduction: str) -> Traffic:
        return Traffic(3 if our_call(case, reduction, implementation, gradient).one_pass is None else 2)

    return traffic


def _our_limits(implementation: str, gradient: str) -> Callable[[Case, str], str | None]:
    """An implementation that is asked for by name says what it cannot do."""

    def limits(case: Case, reduction: str) -> str | None:
        if gradient == "in_forward" and reduction == "none":
            return UNREDUCED
        if implementation == "auto":
            return None
        try:
            our_call(case, reduction, implementation, gradient)
        except ValueError as error:
            return first_line(error)
        return None

    return limits


def _load_ours(implementation: str, gradient: str) -> Step:
    if implementation not in ("auto", *selection.IMPLEMENTATIONS):
        known = ", ".join(selection.IMPLEMENTATIONS)
        raise ImportError(f"this version has no such implementation, only {known}")

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor = vocab_parallel_cross_entropy(
            logits, labels, group=group, reduction=reduction, gradient=gradient, impl=implementation
        )
        return loss

    return through_autograd(loss_of)


def _ours(name: str, *, implementation: str = "auto", gradient: str = "auto") -> Provider:
    return Provider(
        name,
        functools.partial(_load_ours, implementation, gradient),
        _our_traffic(implementation, gradient),
        in_place=True,
        package="vocab_parallel_ce",
        distribution="vocab-parallel-ce",
        of_several=implementation != "one_pass",
        limits=_our_limits(implementation, gradient),
        gradient_of=lambda case, reduction: our_call(case, reduction, implementation, gradient).gradient,
        is_ours=True,
        is_default=implementation == "auto",
    )


def _eager_loss(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction=reduction)


def _load_compiled() -> Step:
    # Other sizes compile anew instead of making them symbols: kernels for the very shape that is timed.
    compiled = torch.compile(_eager_loss, dynamic=False)
    return through_autograd(compiled)


def _load_loss_parallel() -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    @functools.cache
    def mesh_of(group: Any, device: str) -> DeviceMesh:
        return DeviceMesh.from_group(group, device)

    def step(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> tuple[Tensor, Tensor]:
        mesh = mesh_of(group, logits.device.type)
        shards = DTensor.from_local(logits.float(), mesh, [Shard(1)], run_check=False)
        with loss_parallel():
            loss: Any = torch.nn.functional.cross_entropy(shards, labels, reduction=reduction)
            (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))  # a DTensor as it is
        return loss.to_local(), grad

    return step


_torch = functools.partial(Provider, package="torch", distribution="torch", in_place=False)
OUR_PROVIDERS = (
    _ours(OURS),
    _ours(f"{OURS}[in_forward]", gradient="in_forward"),
    _ours(f"{OURS}[triton]", implementation="triton"),
    _ours(f"{OURS}[one_pass]", implementation="one_pass", gradient="in_forward"),
)
TORCH_PROVIDERS = (
    _torch("torch eager", lambda: through_autograd(_eager_loss), through_log_softmax, of_several=False),
    _torch("torch.compile", _load_compiled, fixed(3), of_several=False),
    _torch("loss_parallel", _load_loss_parallel, through_log_softmax, of_one_rank=False),
)
