"""Other projects' losses, each called as its users call it, where its package can be imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bench.cases import Case
from bench.providers import (
    OUR_PROVIDERS,
    TORCH_PROVIDERS,
    Loadable,
    Provider,
    Step,
    Traffic,
    fixed,
    through_autograd,
)

AnyLoadable = TypeVar("AnyLoadable", bound=Loadable[Any])


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """For a loss that has no mean of its own: its user takes it."""
    return losses.mean() if reduction == "mean" else losses


def group_of_one(device: str) -> Any:
    """A process group of this process alone, for a loss that cannot do without one."""
    if not dist.is_initialized():
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _load_liger() -> Step:
    liger: Any = importlib.import_module("liger_kernel.transformers")
    sharded = liger.LigerVocabParallelCrossEntropy()
    whole = {reduction: liger.LigerCrossEntropyLoss(reduction=reduction) for reduction in ("mean", "none")}

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        if group is None:
            loss: Tensor = whole[reduction](logits, labels)
            return loss
        losses: Tensor = sharded(logits[:, None], labels[:, None], group)
        return reduced(losses.view(-1), reduction)

    return through_autograd(loss_of)


def _liger_traffic(case: Case, reduction: str) -> Traffic:
    """One rank: read; read, write; an unreduced gradient is then multiplied by the one upstream."""
    if case.ranks == 1:
        return Traffic(3 if reduction == "mean" else 5)
    # Maximum: read. Exponentials: read, write 4. Gradient: read and write 4. To the logits' dtype: read 4,
    # write.
    return Traffic(3, 16)


def _load_quack(in_place: bool) -> Step:
    quack: Any = importlib.import_module("quack.cross_entropy")

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor = quack.cross_entropy(logits, labels, reduction=reduction, inplace_backward=in_place)
        return loss

    return through_autograd(loss_of)


def _load_quack_kernel() -> Step:
    quack: Any = importlib.import_module("quack.cross_entropy")

    @torch.no_grad()
    def step(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> tuple[Tensor, Tensor]:
        loss, grad = quack.cross_entropy_fwd(logits.detach(), labels, return_dx=True, inplace_backward=True)
        return loss, grad

    return step


def _only_mean(case: Case, reduction: str) -> str | None:
    return None if reduction == "mean" else "the kernel takes no upstream gradient: timed beside the means"


def _load_flash_attention() -> Step:
    flash: Any = importlib.import_module("flash_attn.ops.triton.cross_entropy")

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        losses, _ = flash.cross_entropy_loss(logits, labels, inplace_backward=True, process_group=group)
        return reduced(losses, reduction)

    return through_autograd(loss_of)


def _load_transformer_engine(overwrite: bool) -> Step:
    engine: Any = importlib.import_module("transformer_engine.pytorch.cross_entropy")
    options = {"overwrite_input": True} if overwrite else {}

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        is_mean = reduction == "mean"
        loss: Tensor = engine.parallel_cross_entropy(
            logits[None], labels[None], 0.0, is_mean, group, **options
        )
        return loss.reshape(() if is_mean else -1)

    return through_autograd(loss_of)


def _load_megatron() -> Step:
    megatron: Any = importlib.import_module("megatron.core.fusions.fused_cross_entropy")

    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        group = group or group_of_one(logits.device.type)
        losses: Tensor = megatron.fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], group)
        return reduced(losses.view(-1), reduction)

    return through_autograd(loss_of)


def _only_bf16(case: Case, reduction: str) -> str | None:
    if case.dtype == torch.bfloat16:
        return None
    return "its gradient is bfloat16 whatever the logits are, and fp32 logits are overwritten by forward"


_quack = functools.partial(Provider, package="quack", distribution="quack-kernels", of_several=False)
_transformer_engine = functools.partial(
    Provider, package="transformer_engine", distribution="transformer-engine"
)
OTHER_PROVIDERS = (
    Provider(
        "liger-kernel",
        _load_liger,
        _liger_traffic,
        in_place=True,
        package="liger_kernel",
        distribution="liger-kernel",
    ),
    _quack("quack-kernels", lambda: _load_quack(True), fixed(3), in_place=True),
    _quack("quack-kernels (out of place)", lambda: _load_quack(False), fixed(3), in_place=False),
    # Loss and gradient of every row in one launch: no autograd, and the gradient without the mean's weight.
    _quack(
        "quack-kernels (kernel alone)",
        _load_quack_kernel,
        fixed(2),
        in_place=True,
        limits=_only_mean,
        checked_as="none",
    ),
    Provider(
        "flash-attn",
        _load_flash_attention,
        fixed(3),
        in_place=True,
        package="flash_attn",
        distribution="flash-attn",
    ),
    # To fp32: read, write 4. Exponentials, division and gradient: read and write 4 each. To bf16: read 4,
    # write.
    Provider(
        "megatron-core",
        _load_megatron,
        fixed(2, 32),
        in_place=False,
        package="megatron.core",
        distribution="megatron-core",
        limits=_only_bf16,
    ),
    _transformer_engine(
        "transformer-engine", lambda: _load_transformer_engine(False), fixed(4), in_place=False
    ),
    _transformer_engine(
        "transformer-engine (overwrite)", lambda: _load_transformer_engine(True), fixed(3), in_place=True
    ),
)
PROVIDERS = (*OUR_PROVIDERS, *TORCH_PROVIDERS, *OTHER_PROVIDERS)


def chosen_providers(names: str | None) -> list[Provider]:
    return chosen(names, PROVIDERS)


def chosen(names: str | None, known: Sequence[AnyLoadable]) -> list[AnyLoadable]:
    """Those of a comma-separated list, in the order of ``known``; ``all`` stands for the default ones.

    Raises:
        ValueError: a name is unknown.
    """
    by_name = {provider.name: provider for provider in known}
    wanted: set[str] = set()
    for name in (names or "all").split(","):
        name = name.strip()
        if name == "all":
            wanted |= {provider.name for provider in known if provider.is_default}
        elif name in by_name:
            wanted.add(name)
        else:
            raise ValueError(f"providers: expected all or some of {', '.join(by_name)}, got {name!r}")
    return [provider for provider in known if provider.name in wanted]
