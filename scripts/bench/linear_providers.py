"""Who computes the linear cross-entropy: this project, PyTorch, and other projects as their users call them.

Every one is called alike: ``call(inputs, reduction, group)`` returns loss and both gradients, through
``torch.autograd.grad`` from a fresh graph with upstream gradients that were made before.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench.linear_cases import IGNORE_INDEX, LinearInputs
from bench.linear_oracle import LinearResult
from bench.others import chosen
from bench.providers import OURS, Loadable
from vocab_parallel_ce import vocab_parallel_cross_entropy

LinearStep = Callable[[LinearInputs, str, Any], LinearResult]
LossOf = Callable[[Tensor, Tensor, Tensor, str, Any], Tensor]  # hidden, weight, labels, reduction, group
CHUNK_TOKENS = (1024, 2048, 4096, 8192)
QUACK_CHUNK_TOKENS = 4096  # its own default


def through_autograd(loss_of: LossOf, *, reduces_hidden: bool = True) -> LinearStep:
    """Loss and gradients as a training step gets them.

    ``reduces_hidden`` false: the caller of the loss reduces the gradient of hidden over the ranks afterwards.
    """

    def step(inputs: LinearInputs, reduction: str, group: Any) -> LinearResult:
        loss = loss_of(inputs.hidden, inputs.weight, inputs.labels, reduction, group)
        upstream = inputs.upstreams[loss.dtype]
        d_hidden, d_weight = torch.autograd.grad(loss, (inputs.hidden, inputs.weight), upstream)
        if group is not None and not reduces_hidden:
            dist.all_reduce(d_hidden, group=group)
        return LinearResult(loss.detach(), d_hidden, d_weight)

    return step


@dataclass(frozen=True)
class LinearProvider(Loadable[LinearStep]):
    """One way to compute the linear cross-entropy; errors of the call are why a case cannot be had."""

    name: str
    load: Callable[[], LinearStep]
    package: str
    distribution: str
    of_one_rank: bool = True
    of_several: bool = False
    is_ours: bool = False
    is_default: bool = True
    _loaded: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def call(self, inputs: LinearInputs, reduction: str, group: Any) -> LinearResult:
        return self.step()(inputs, reduction, group)


def _load_ours(chunk_tokens: int | str) -> LinearStep:
    from vocab_parallel_ce import linear_cross_entropy

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor = linear_cross_entropy(
            hidden, weight, labels, group=group, reduction=reduction, chunk_tokens=chunk_tokens
        )
        return loss

    return through_autograd(loss_of)


def _unfused_loss(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    """Nobody else reads the logits: a reduced loss writes their gradient in forward."""
    logits = functional.linear(hidden, weight)
    gradient = "auto" if reduction == "none" else "in_forward"
    loss: Tensor = vocab_parallel_cross_entropy(
        logits, labels, group=group, reduction=reduction, gradient=gradient
    )
    return loss


def _eager_loss(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), labels, reduction=reduction)


def _load_compiled() -> LinearStep:
    return through_autograd(torch.compile(_eager_loss, dynamic=False))


def _load_torch_fused() -> LinearStep:
    """In chunks, which it does not do unless options are given."""
    fused: Any = getattr(functional, "linear_cross_entropy", None)
    if fused is None:
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    options = importlib.import_module("torch.nn").LinearCrossEntropyOptions()

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor = fused(hidden, weight, labels, reduction=reduction, options=options)
        return loss

    return through_autograd(loss_of)


def _load_flash_attention() -> LinearStep:
    flash: Any = importlib.import_module("flash_attn.ops.triton.cross_entropy")

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        logits = functional.linear(hidden, weight)
        losses: Tensor
        losses, _ = flash.cross_entropy_loss(logits, labels, inplace_backward=True, process_group=group)
        return losses.sum() / (labels != IGNORE_INDEX).sum() if reduction == "mean" else losses

    return through_autograd(loss_of, reduces_hidden=False)


def _load_liger() -> LinearStep:
    liger: Any = importlib.import_module("liger_kernel.transformers")
    modules = {kind: liger.LigerFusedLinearCrossEntropyLoss(reduction=kind) for kind in ("mean", "none")}

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor = modules[reduction](weight, hidden, labels)
        return loss

    return through_autograd(loss_of)


def _load_cut(options: dict[str, Any]) -> LinearStep:
    cut: Any = importlib.import_module("cut_cross_entropy")

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor = cut.linear_cross_entropy(hidden, weight, labels, reduction=reduction, **options)
        return loss

    return through_autograd(loss_of)


def _load_quack(tuned: bool) -> LinearStep:
    """As its module chooses: in chunks, and the whole logits where nothing is reduced."""
    quack: Any = importlib.import_module("quack.linear_cross_entropy")

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        loss: Tensor
        if reduction == "none":
            loss = quack.linear_cross_entropy_func(
                hidden, weight, None, labels, reduction=reduction, inplace_backward=True
            )
        else:
            loss = quack.chunked_linear_cross_entropy(
                hidden, weight, labels, QUACK_CHUNK_TOKENS, reduction=reduction, tuned=tuned
            )
        return loss

    return through_autograd(loss_of)


_ours = functools.partial(
    LinearProvider,
    package="vocab_parallel_ce",
    distribution="vocab-parallel-ce",
    of_several=True,
    is_ours=True,
)
_torch = functools.partial(LinearProvider, package="torch", distribution="torch")
_cut = functools.partial(LinearProvider, package="cut_cross_entropy", distribution="cut-cross-entropy")
_quack = functools.partial(LinearProvider, package="quack", distribution="quack-kernels")
LINEAR_PROVIDERS: tuple[LinearProvider, ...] = (
    _ours(OURS, functools.partial(_load_ours, "auto")),
    *(
        _ours(f"{OURS}[chunk_tokens={tokens}]", functools.partial(_load_ours, tokens), is_default=False)
        for tokens in CHUNK_TOKENS
    ),
    _ours(f"F.linear + {OURS}", lambda: through_autograd(_unfused_loss, reduces_hidden=False)),
    _torch("torch eager", lambda: through_autograd(_eager_loss)),
    _torch("torch.compile", _load_compiled),
    _torch("F.linear_cross_entropy", _load_torch_fused),
    LinearProvider(
        "F.linear + flash-attn",
        _load_flash_attention,
        package="flash_attn",
        distribution="flash-attn",
        of_several=True,
    ),
    LinearProvider("liger-kernel", _load_liger, package="liger_kernel", distribution="liger-kernel"),
    # Leaves out blocks of small probabilities from the gradients, unless told not to.
    _cut("cut-cross-entropy", functools.partial(_load_cut, {})),
    _cut("cut-cross-entropy (exact)", functools.partial(_load_cut, {"filter_eps": None})),
    _quack("quack-kernels", functools.partial(_load_quack, False)),
    # Tries out its matmuls' configurations at the first call of a shape: minutes.
    _quack("quack-kernels (tuned)", functools.partial(_load_quack, True), is_default=False),
)


def chosen_linear(names: str | None) -> list[LinearProvider]:
    return chosen(names, LINEAR_PROVIDERS)
