"""This rank's columns of logits that PyTorch's tensor parallelism has cut."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce.dtensor import ranks_along
from vocab_parallel_ce.shard import VocabShard


class LocalColumns(NamedTuple):
    """This rank's columns of logits that are a DTensor."""

    logits: Tensor  # [..., C] local tensor
    shard: VocabShard  # which columns these are
    group: Any  # of the ranks that share the vocabulary
    placements_of_tokens: tuple[Any, ...]  # Replicate() in the place of Shard(-1)


def local_columns(name: str, logits: Any) -> LocalColumns:
    """Return this rank's columns of ``logits [..., V]``, a DTensor that errors call ``name``.

    The columns follow from ``V`` and the position in the mesh, so that all ranks agree on them; see
    :func:`shard_of_local`. The gradient has the placements of ``logits``.

    Raises:
        ValueError: the placements are not ``Shard(-1)`` on exactly one dimension of the mesh, and ``Replicate()`` or
            ``Shard`` of the tokens on the others; or its ranks do not ascend.
    """
    from torch.distributed.tensor import Replicate

    mesh, placements, vocab_size = logits.device_mesh, logits.placements, logits.shape[-1]
    dim = _vocabulary_mesh_dim(name, placements, logits.dim())
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{name}: this rank must be in the mesh of the DTensor, got {mesh}")
    group = mesh.get_group(dim)
    # PyTorch sorts a group's ranks, and then cuts by the position in the group, not in the mesh.
    ranks = ranks_along(mesh, (dim,))
    if tuple(dist.get_process_group_ranks(group)) != ranks:
        raise ValueError(
            f"{name}: expected a mesh of ascending ranks along dimension {dim}, got {ranks}; make it of those"
        )
    local = _arrived(logits.to_local())
    shard = shard_of_local(name, local, vocab_size, coordinate[dim], mesh.size(dim))
    token_placements = tuple(Replicate() if d == dim else placement for d, placement in enumerate(placements))
    return LocalColumns(local, shard, group, token_placements)


def _arrived(local: Any) -> Tensor:
    """Return a local tensor that may still be under way, because redistribute was asked not to wait for it."""
    return _Arrived.apply(local) if hasattr(local, "trigger_wait") else local


class _Arrived(torch.autograd.Function):
    """Waits. The tensor's own wait() loses its gradient."""

    @staticmethod
    def forward(ctx: Any, local: Any) -> Tensor:
        tensor: Tensor = local.wait()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def shard_of_local(name: str, local: Tensor, vocab_size: int, rank: int, n_ranks: int) -> VocabShard:
    """Return which columns ``local [..., C]`` has, if ``vocab_size`` columns are cut as DTensor cuts.

    Raises:
        ValueError: ``C`` is another number.
    """
    shard = VocabShard.for_rank(vocab_size, rank, n_ranks)
    if local.shape[-1] != shard.n_columns:
        expected = f"{shard.n_columns} of {vocab_size} columns at position {rank} of {n_ranks}"
        raise ValueError(f"{name}: expected a local tensor with {expected}, as DTensor cuts, got {local.shape[-1]}")
    return shard


def _vocabulary_mesh_dim(name: str, placements: tuple[Any, ...], ndim: int) -> int:
    """Return the only dimension of the mesh that cuts the last of ``ndim``, if the others cut tokens or replicate."""
    from torch.distributed.tensor import Shard

    # Other classes of a shard (_StridedShard) have other columns.
    plain = [type(placement) is Shard and 0 <= placement.dim < ndim for placement in placements]
    cuts = [d for d, placement in enumerate(placements) if plain[d] and placement.dim == ndim - 1]
    if len(cuts) == 1 and all(plain[d] or placement.is_replicate() for d, placement in enumerate(placements)):
        return cuts[0]
    if any(placement.is_partial() for placement in placements):
        remedy = "redistribute it first: its values are sums that are still to be taken"
    elif not cuts and all(plain[d] or placement.is_replicate() for d, placement in enumerate(placements)):
        remedy = (
            "every rank has the whole vocabulary of its tokens: pass its to_local(), and their labels, to the function "
            "in vocab_parallel_ce"
        )
    elif len(cuts) > 1:
        remedy = "flatten these dimensions of the mesh into one, or redistribute it first"
    else:
        remedy = "redistribute it first"
    layout = "Shard(-1) on exactly one dimension of its mesh, and Replicate() or Shard of its tokens on the others"
    raise ValueError(f"{name}: expected a DTensor with {layout}, got {placements}; {remedy}")
