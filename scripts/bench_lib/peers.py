"""The losses of PyTorch and of other projects, each behind the same call: ``loss(*tensors, labels, reduction, group)``.

Each function is given the imported module. In the lambdas: x logits, h hidden, w weight, y labels, r the reduction,
g the group.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.cases import IGNORE_INDEX, REDUCTIONS, Inputs

QUACK_CHUNK_TOKENS = 4096  # its own default
FLA, ENGINE = "fla.modules.fused_cross_entropy", "transformer_engine.pytorch.cross_entropy"
PARALLEL = "torch.distributed.tensor.parallel"
LossOf: TypeAlias = Callable[..., Any]  # of (*tensors, labels, reduction, group)
Step: TypeAlias = Callable[[Inputs, str, Any], tuple[Tensor, ...]]


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """For a loss without a mean of its own: its user takes it."""
    return losses.mean() if reduction == "mean" else losses


def reduced_over_live(losses: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """The same, of the tokens that are not ignored."""
    return losses.sum() / (labels != IGNORE_INDEX).sum() if reduction == "mean" else losses


def eager(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction=reduction)


def eager_16(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    """Of logits that stay in 16 bits: faster, and the loss is rounded to them."""
    return functional.cross_entropy(logits, labels, reduction=reduction)


def after_linear(loss: LossOf) -> LossOf:
    """A head whose logits are made first."""
    return lambda h, w, y, r, g: loss(functional.linear(h, w), y, r, g)


@cache
def _mesh_of(group: Any, device: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group or group_of_one(), device, mesh_dim_names=("tp",))


def of_dtensor(loss_of: Callable[[Any, Tensor, str], Any]) -> LossOf:
    """A loss of DTensor logits ``[1, N, V]``, of which this rank has its columns, and of labels ``[1, N]``."""
    from torch.distributed.tensor import DTensor, Shard

    def of_shard(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        mesh = _mesh_of(group, logits.device.type)
        return loss_of(DTensor.from_local(logits[None], mesh, [Shard(2)], run_check=False), labels[None], reduction)

    return of_shard


def loss_parallel(parallel: Any, dtype: torch.dtype = torch.float32) -> LossOf:
    """A mean, unreduced, otherwise the sum; in bf16 the log-probabilities are rounded to it."""
    from torch.distributed.tensor import DTensor, Replicate

    def loss_of(logits: Any, labels: Tensor, reduction: str) -> Any:
        replicated = DTensor.from_local(labels.flatten(), logits.device_mesh, [Replicate()])
        reduction = reduction if reduction in REDUCTIONS else "sum"
        loss: Any = functional.cross_entropy(logits.flatten(0, 1).to(dtype), replicated, reduction=reduction)
        return loss.to_local()

    return of_dtensor(loss_of)


def in_loss_parallel() -> Any:
    """Around forward and backward."""
    return importlib.import_module(PARALLEL).loss_parallel()


def torch_linear(nn: Any) -> LossOf:
    """With options given, since only then it works in chunks.

    In an older PyTorch, from 2.13's ``torch/nn/modules/linear_cross_entropy*.py``, if these two files are on the path.
    """
    if hasattr(nn.functional, "linear_cross_entropy"):
        options = nn.LinearCrossEntropyOptions()
        return lambda h, w, y, r, g: nn.functional.linear_cross_entropy(h, w, y, reduction=r, options=options)
    ops, options = (
        imported("linear_cross_entropy"),
        imported("linear_cross_entropy_options").LinearCrossEntropyOptions(),
    )

    def loss(h: Tensor, w: Tensor, y: Tensor, reduction: str, group: Any) -> Any:
        chosen = options._adjust(h.shape[0], h.shape[1], w.shape[0], h.dtype, h.device)
        sums = chosen.batch_chunk_size, chosen.acc_policy, chosen.acc_dtype
        if reduction == "none":
            return ops._linear_cross_entropy_batch_chunked_no_reduction(h, w, y, None, None, IGNORE_INDEX, *sums)
        reduced = h, w, y, None, None, reduction, IGNORE_INDEX, 0.0, *sums, False, True, True, False
        return ops._linear_cross_entropy_batch_chunked(*reduced)[0]

    return loss


def sharded_losses(loss: LossOf) -> LossOf:
    """Of a loss over ``[N, 1, C]`` and a group, which is never None."""
    return lambda x, y, r, g: reduced(loss(x[:, None], y[:, None], g or group_of_one()).view(-1), r)


def liger_loss(liger: Any) -> LossOf:
    sharded = sharded_losses(liger.LigerVocabParallelCrossEntropy())
    whole = {kind: liger.LigerCrossEntropyLoss(reduction=kind) for kind in REDUCTIONS}
    return lambda x, y, r, g: whole[r](x, y) if g is None else sharded(x, y, r, g)


def liger_linear(liger: Any, **options: Any) -> LossOf:
    modules = {kind: liger.LigerFusedLinearCrossEntropyLoss(reduction=kind, **options) for kind in REDUCTIONS}
    return lambda h, w, y, r, g: modules[r](w, h, y)


def liger_sharded(ops: Any) -> LossOf:
    """Its head for several ranks in PyTorch, which it has where the native one does not run."""
    return lambda h, w, y, r, g: reduced_over_live(ops._apply_tp_fallback(h, w, y, 1.0, IGNORE_INDEX, False, g), y, r)


def liger_native(ops: Any) -> LossOf:
    """Its head for several ranks in CUTLASS and NVSHMEM. The symmetric heap is not in the memory that is measured."""
    if ops._load_native_tp_function() is None:
        raise ImportError("liger_cute_kernels has no library that can be loaded")
    begin = cache(importlib.import_module("liger_cute_kernels.nvshmem").init_from_pg)
    losses_of = ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        begin(group)
        return reduced_over_live(losses_of(hidden, weight, labels, group), labels, reduction)

    return loss_of


def quack_loss(quack: Any, in_place: bool) -> LossOf:
    return lambda x, y, r, g: quack.cross_entropy(x, y, reduction=r, inplace_backward=in_place)


def quack_kernel(quack: Any) -> Step:
    """Loss and gradient of one launch: without autograd, and without the mean's weight."""

    @torch.no_grad()
    def step(inputs: Inputs, reduction: str, group: Any) -> Any:
        logits = inputs.tensors[0].detach()
        return quack.cross_entropy_fwd(logits, inputs.labels, return_dx=True, inplace_backward=True)

    return step


def quack_linear(quack: Any, **options: bool) -> LossOf:
    """As its module chooses: in chunks, or with the whole logits if nothing is reduced."""
    whole, chunked = quack.linear_cross_entropy_func, quack.chunked_linear_cross_entropy

    def loss_of(h: Tensor, w: Tensor, y: Tensor, r: str, g: Any) -> Any:
        if r == "none":
            return whole(h, w, None, y, reduction=r, inplace_backward=True)
        # Its kernel for scaled exponentials refuses chunks of as many tokens as there are hidden elements.
        chunk = QUACK_CHUNK_TOKENS // (1 if options or h.shape[-1] != QUACK_CHUNK_TOKENS else 2)
        return chunked(h, w, y, chunk, reduction=r, **options)

    return loss_of


def in_place_loss(module: Any) -> LossOf:
    """That of flash-attn and of fla-core: both return a pair, of which the losses are first."""
    loss = partial(module.cross_entropy_loss, inplace_backward=True)
    return lambda x, y, r, g: reduced(loss(x, y, process_group=g)[0], r)


def flash_linear(flash: Any) -> LossOf:
    losses_of = after_linear(in_place_loss(flash))
    return lambda h, w, y, r, g: reduced_over_live(losses_of(h, w, y, "none", g), y, r)


def fla_gluon_loss(kernels: Any) -> LossOf:
    """The same by its kernels in Gluon, which are there if its module of them can be imported."""
    return in_place_loss(importlib.import_module(FLA))


def in_gluon() -> AbstractContextManager[Any]:
    """It looks at the variable in each forward and each backward."""
    return patch.dict(os.environ, {"FLA_CE_GLUON": "1"})


@cache
def engine() -> Any:
    """TransformerEngine's loss, which is Triton: of an installation without the compiled part its files alone.

    What its packages import first would need that part, so empty ones stand for them.
    """
    try:
        return importlib.import_module(ENGINE)
    except (ImportError, OSError, RuntimeError):
        spec = importlib.util.find_spec("transformer_engine")
        if spec is None or not spec.submodule_search_locations:
            raise
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton"):
        package = ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(Path(spec.submodule_search_locations[0], *name.split(".")[1:]))]
        sys.modules[package.__name__] = package
    jit: Any = ModuleType("transformer_engine.pytorch.jit")
    jit.no_torch_dynamo = lambda *_, **__: torch.compiler.disable
    sys.modules[jit.__name__] = jit
    return importlib.import_module(ENGINE)


def imported(name: str) -> Any:
    return engine() if name == ENGINE else importlib.import_module(name)


def engine_loss(engine: Any, **options: bool) -> LossOf:
    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        is_mean = reduction == "mean"
        loss = engine.parallel_cross_entropy(logits[None], labels[None], 0.0, is_mean, group, **options)
        return loss.reshape(() if is_mean else -1)

    return loss_of


@cache
def group_of_one() -> Any:
    """The group of this process alone, for a loss that needs one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def fla_linear(fla: Any) -> LossOf:
    loss = fla.fused_linear_cross_entropy_loss
    return lambda h, w, y, r, g: loss(h, y, w, reduction=r, process_group=g)


def cut_linear(cut: Any, **options: Any) -> LossOf:
    return lambda h, w, y, r, g: cut.linear_cross_entropy(h, w, y, reduction=r, **options)
