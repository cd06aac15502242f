"""Everything that is measured: this project, PyTorch and other projects, for logits and for a linear head.

A provider is imported when it is first used. If that fails, it is absent, with the reason. Each is called
alike: ``step(inputs, reduction, group)`` returns the losses and then the gradients of ``inputs.tensors``, as
``torch.autograd.grad`` returns them to a training step. Logits may be overwritten.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.cases import IGNORE_INDEX, IN_FORWARD, OURS, REDUCTIONS, Case, Inputs
from vocab_parallel_ce import linear_cross_entropy, vocab_parallel_cross_entropy

UNREDUCED = "in_forward is for reduced losses: the upstream gradient of each token comes after forward"
QUACK_CHUNK_TOKENS = 4096  # its own default
LossOf: TypeAlias = Callable[..., Any]  # of (*inputs.tensors, labels, reduction, group)
Step: TypeAlias = Callable[[Inputs, str, Any], tuple[Tensor, ...]]


@functools.cache
def ones(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The upstream gradient, which a training step has before it calls the loss's backward."""
    return torch.ones(shape, dtype=dtype, device=device)


def through_autograd(loss_of: LossOf, *, reduces_hidden: bool = True) -> Step:
    """Losses and gradients of ``loss_of``, which may return several losses.

    If not ``reduces_hidden``, the gradient of hidden is summed over the ranks afterwards.
    """

    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        loss = loss_of(*inputs.tensors, inputs.labels, reduction, group)
        losses = loss if isinstance(loss, tuple) else (loss,)
        if inputs.upstreams is None:
            upstream = [ones(each.shape, each.dtype, each.device) for each in losses]
        else:
            upstream = [inputs.upstreams[each.dtype] for each in losses]
        grads = torch.autograd.grad(losses, inputs.tensors, upstream)
        if group is not None and not reduces_hidden:
            dist.all_reduce(grads[0], group=group)
        return (*(each.detach() for each in losses), *grads)

    return step


def no_limits(case: Case) -> str | None:
    return None


@dataclass(frozen=True)
class Provider:
    """One way to compute a loss and its gradients.

    ``limits`` says why a case cannot be had, or None. ``checked_as`` is the reduction whose gradient it
    returns, if that is not the one asked for. ``gradient`` says when this project writes the gradient.
    ``options`` are those of the loss that the check needs.
    """

    name: str
    load: Callable[[], Step]
    package: str
    distribution: str
    of_one_rank: bool = True
    of_several: bool = True
    is_default: bool = True
    limits: Callable[[Case], str | None] = no_limits
    checked_as: str | None = None
    gradient: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    _loaded: list[Step] = field(default_factory=list, compare=False, repr=False)

    @property
    def is_ours(self) -> bool:
        return self.package == OURS

    def absent(self, ranks: int) -> str | None:
        """Why it cannot run here on this number of ranks, or None."""
        if ranks > 1 and not self.of_several:
            return "needs the whole vocabulary on one rank"
        if ranks == 1 and not self.of_one_rank:
            return "needs several ranks"
        try:
            self.step()
        except ImportError as error:
            return f"not installed: {first_line(error)}"
        except Exception as error:  # another project's import may raise anything; it is reported
            return f"cannot be imported: {type(error).__name__}: {first_line(error)}"
        return None

    def step(self) -> Step:
        if not self._loaded:
            self._loaded.append(self.load())
        return self._loaded[0]

    @property
    def version(self) -> str:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return str(getattr(importlib.import_module(self.package), "__version__", "unknown"))


def first_line(error: BaseException) -> str:
    """The first line of the message that is not empty."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def chosen(names: str | None, known: Sequence[Provider]) -> list[Provider]:
    """Those of a comma-separated list, in the order of ``known``; ``all`` stands for the default ones."""
    by_name = {provider.name: provider for provider in known}
    wanted: set[str] = set()
    for name in (names or "all").split(","):
        if name.strip() == "all":
            wanted |= {provider.name for provider in known if provider.is_default}
        elif name.strip() in by_name:
            wanted.add(name.strip())
        else:
            raise ValueError(f"providers: expected all or some of {', '.join(by_name)}; got {name!r}")
    return [provider for provider in known if provider.name in wanted]


# This project.


def _in_forward(case: Case) -> str | None:
    return UNREDUCED if case.reduction == "none" else None


def _ours(name: str, *, impl: str = "auto", gradient: str = "auto") -> Provider:
    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        return vocab_parallel_cross_entropy(
            logits, labels, group=group, reduction=reduction, gradient=gradient, impl=impl
        )

    in_forward = gradient == "in_forward"
    return Provider(
        name,
        lambda: through_autograd(loss_of),
        OURS,
        "vocab-parallel-ce",
        of_several=impl != "one_pass",
        is_default=impl == "auto",
        limits=_in_forward if in_forward else no_limits,
        gradient="in_forward" if in_forward else "in_backward",
    )


def _ours_linear(name: str, loss_of: LossOf, **how: bool) -> Provider:
    return Provider(name, lambda: through_autograd(loss_of, **how), OURS, "vocab-parallel-ce")


def _fused(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
    return linear_cross_entropy(hidden, weight, labels, group=group, reduction=reduction)


def _unfused(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
    """Nobody else reads the logits, so a reduced loss may write their gradient in forward."""
    logits = functional.linear(hidden, weight)
    gradient = "auto" if reduction == "none" else "in_forward"
    return vocab_parallel_cross_entropy(logits, labels, group=group, reduction=reduction, gradient=gradient)


# PyTorch.


def _eager(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction=reduction)


def _eager_linear(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), labels, reduction=reduction)


def _compiled(loss_of: LossOf) -> Callable[[], Step]:
    # Without dynamic=False a second shape gets kernels for any number of rows.
    return lambda: through_autograd(torch.compile(loss_of, dynamic=False))


def _loss_parallel() -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh_of = functools.cache(DeviceMesh.from_group)

    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        (logits,) = inputs.tensors
        mesh = mesh_of(group, logits.device.type)
        shards = DTensor.from_local(logits.float(), mesh, [Shard(1)], run_check=False)
        with loss_parallel():
            loss: Any = functional.cross_entropy(shards, inputs.labels, reduction=reduction)
            (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))  # the loss is a DTensor
        return loss.to_local(), grad

    return step


def _torch_fused() -> Step:
    """With options given, since only then it works in chunks."""
    fused: Any = getattr(functional, "linear_cross_entropy", None)
    if fused is None:
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    options = importlib.import_module("torch.nn").LinearCrossEntropyOptions()
    return through_autograd(
        lambda h, w, y, reduction, group: fused(h, w, y, reduction=reduction, options=options)
    )


# Other projects, each called as its users call it. In the lambdas: x logits, y labels, h hidden, w weight.


def imported(module: str, loss_from: Callable[[Any], LossOf], **how: bool) -> Callable[[], Step]:
    """A provider's ``load``: the step of what ``loss_from`` makes of ``module``."""
    return lambda: through_autograd(loss_from(importlib.import_module(module)), **how)


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """For a loss without a mean of its own: its user takes it."""
    return losses.mean() if reduction == "mean" else losses


def _liger(liger: Any) -> LossOf:
    sharded = liger.LigerVocabParallelCrossEntropy()
    whole = {kind: liger.LigerCrossEntropyLoss(reduction=kind) for kind in REDUCTIONS}

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        if group is None:
            return whole[reduction](logits, labels)
        return reduced(sharded(logits[:, None], labels[:, None], group).view(-1), reduction)

    return loss_of


def _liger_linear(liger: Any) -> LossOf:
    modules = {kind: liger.LigerFusedLinearCrossEntropyLoss(reduction=kind) for kind in REDUCTIONS}
    return lambda h, w, y, reduction, group: modules[reduction](w, h, y)


def _quack(in_place: bool) -> Callable[[], Step]:
    return imported(
        "quack.cross_entropy",
        lambda quack: (
            lambda x, y, reduction, group: quack.cross_entropy(
                x, y, reduction=reduction, inplace_backward=in_place
            )
        ),
    )


def _quack_kernel() -> Step:
    """Loss and gradient of one launch: without autograd, and without the mean's weight."""
    quack: Any = importlib.import_module("quack.cross_entropy")

    @torch.no_grad()
    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        logits = inputs.tensors[0].detach()
        loss, grad = quack.cross_entropy_fwd(logits, inputs.labels, return_dx=True, inplace_backward=True)
        return loss, grad

    return step


def _only_mean(case: Case) -> str | None:
    return None if case.reduction == "mean" else "the kernel takes no upstream gradient: timed with the means"


def _quack_linear(quack: Any) -> LossOf:
    """As its module chooses: in chunks, or with the whole logits if nothing is reduced."""
    whole, chunked = quack.linear_cross_entropy_func, quack.chunked_linear_cross_entropy
    return lambda h, w, y, reduction, group: (
        whole(h, w, None, y, reduction=reduction, inplace_backward=True)
        if reduction == "none"
        else chunked(h, w, y, QUACK_CHUNK_TOKENS, reduction=reduction, tuned=False)
    )


def _flash(flash: Any) -> LossOf:
    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss = flash.cross_entropy_loss(logits, labels, inplace_backward=True, process_group=group)
        return reduced(loss[0], reduction)

    return loss_of


def _flash_linear(flash: Any) -> LossOf:
    losses_of = _flash(flash)

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        losses: Tensor = losses_of(functional.linear(hidden, weight), labels, "none", group)
        return losses.sum() / (labels != IGNORE_INDEX).sum() if reduction == "mean" else losses

    return loss_of


def _engine(**options: Any) -> Callable[[], Step]:
    def loss_from(engine: Any) -> LossOf:
        def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
            is_mean = reduction == "mean"
            loss = engine.parallel_cross_entropy(logits[None], labels[None], 0.0, is_mean, group, **options)
            return loss.reshape(() if is_mean else -1)

        return loss_of

    return imported("transformer_engine.pytorch.cross_entropy", loss_from)


def _megatron(megatron: Any) -> LossOf:
    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        losses = megatron.fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], group)
        return reduced(losses.view(-1), reduction)

    return loss_of


def _only_bf16(case: Case) -> str | None:
    return (
        None if case.dtype == "bfloat16" else "its gradient is bfloat16, and forward overwrites fp32 logits"
    )


def _cut(**options: Any) -> Callable[[], Step]:
    return imported(
        "cut_cross_entropy",
        lambda cut: (
            lambda h, w, y, reduction, group: cut.linear_cross_entropy(
                h, w, y, reduction=reduction, **options
            )
        ),
    )


FLASH, LIGER = "flash_attn.ops.triton.cross_entropy", "liger_kernel.transformers"
MEGATRON = "megatron.core.fusions.fused_cross_entropy"
_torch = functools.partial(Provider, package="torch", distribution="torch", of_several=False)
_quacks = functools.partial(Provider, package="quack", distribution="quack-kernels", of_several=False)
_ligers = functools.partial(Provider, package="liger_kernel", distribution="liger-kernel")
_flashes = functools.partial(Provider, package="flash_attn", distribution="flash-attn")
_engines = functools.partial(Provider, package="transformer_engine", distribution="transformer-engine")
_cuts = functools.partial(
    Provider, package="cut_cross_entropy", distribution="cut-cross-entropy", of_several=False
)

LOGITS_PROVIDERS: tuple[Provider, ...] = (
    _ours(OURS),
    _ours(IN_FORWARD, gradient="in_forward"),
    _ours(f"{OURS}[triton]", impl="triton"),
    _ours(f"{OURS}[one_pass]", impl="one_pass", gradient="in_forward"),
    _torch("torch eager", lambda: through_autograd(_eager)),
    _torch("torch.compile", _compiled(_eager)),
    Provider("loss_parallel", _loss_parallel, "torch", "torch", of_one_rank=False),
    _ligers("liger-kernel", imported(LIGER, _liger)),
    _quacks("quack-kernels", _quack(True)),
    _quacks("quack-kernels (out of place)", _quack(False)),
    _quacks("quack-kernels (kernel alone)", _quack_kernel, limits=_only_mean, checked_as="none"),
    _flashes("flash-attn", imported(FLASH, _flash)),
    # megatron-core must be imported before transformer-engine, which it looks for.
    Provider(
        "megatron-core",
        imported(MEGATRON, _megatron),
        "megatron.core",
        "megatron-core",
        of_one_rank=False,
        limits=_only_bf16,
    ),
    _engines("transformer-engine", _engine()),
    _engines("transformer-engine (overwrite)", _engine(overwrite_input=True)),
)
LINEAR_PROVIDERS: tuple[Provider, ...] = (
    _ours_linear(OURS, _fused),
    _ours_linear(f"F.linear + {OURS}", _unfused, reduces_hidden=False),
    _torch("torch eager", lambda: through_autograd(_eager_linear)),
    _torch("torch.compile", _compiled(_eager_linear)),
    _torch("F.linear_cross_entropy", _torch_fused),
    _flashes("F.linear + flash-attn", imported(FLASH, _flash_linear, reduces_hidden=False)),
    _ligers("liger-kernel", imported(LIGER, _liger_linear), of_several=False),
    # It leaves blocks of small probabilities out of the gradients, unless told not to.
    _cuts("cut-cross-entropy", _cut()),
    _cuts("cut-cross-entropy (exact)", _cut(filter_eps=None)),
    _quacks("quack-kernels", imported("quack.linear_cross_entropy", _quack_linear)),
)
