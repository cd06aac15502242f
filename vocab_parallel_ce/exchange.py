"""The collectives: row statistics to every rank, and what a sharded head sends of its hidden states.

The only module that knows ``torch.distributed``. Without a group nothing in here touches it, so that
one GPU or a CPU needs no initialised process group.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def group_position(group: object) -> tuple[int, int]:
    """``(rank in the group, ranks)``; ``(0, 1)`` for None.

    Raises:
        TypeError: ``group`` is not a process group.
        ValueError: this rank is not a member of it.
    """
    if group is None:
        return 0, 1
    if dist.is_available():
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this rank must be a member of it, got a group of other ranks")
        if isinstance(group, dist.ProcessGroup):
            return group.rank(), group.size()
    raise TypeError(f"group: expected a torch.distributed.ProcessGroup or None, got {type(group).__name__}")


def all_gather_stats(gathered: Tensor, rank: int, group: Any) -> None:
    """Fill ``gathered [R, N, K]``, of which this rank has written ``gathered[rank]``.

    Collectives: one all_gather of ``4 * K * N`` bytes a rank, in place, on the current stream; none
    where there is one rank or no row.
    """
    if gathered.shape[0] == 1 or gathered.numel() == 0:
        return
    # The group's own method: a third of the host time of torch.distributed's function around it. PyTorch
    # 2.13 renamed it.
    all_gather = getattr(group, "all_gather_single", None) or group._allgather_base
    work = all_gather(gathered, gathered.narrow(0, rank, 1), _on_the_current_stream())
    if work is not None:
        work.wait()


@functools.cache
def _on_the_current_stream() -> Any:
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    return options


def begin_all_gather(gathered: Tensor, own: Tensor, group: Any) -> Any:
    """Fill ``gathered``, of R times the rows of ``own``, with those of all ranks; its wait() must be called.

    The current stream goes on meanwhile. Collectives: one all_gather of ``own``.
    """
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return all_gather(gathered, own, group=group, async_op=True)


def begin_all_reduce(summed: Tensor, group: Any) -> Any:
    """Replace ``summed`` by its sum over the ranks; its wait() must be called.

    Collectives: one all_reduce of ``summed``.
    """
    return dist.all_reduce(summed, group=group, async_op=True)


def begin_reduce_scatter(own: Tensor, summed: Tensor, group: Any) -> Any:
    """Fill ``own`` with this rank's rows of the sum of ``summed`` over the ranks; its wait() must be called.

    Collectives: one reduce_scatter of ``summed``.
    """
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce_scatter(own, summed, group=group, async_op=True)


def is_dtensor(tensor: Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "placements")


def local_rows(name: str, parameter: Tensor, group: object) -> tuple[Tensor, object]:
    """This rank's rows of the ``parameter`` of this name, and the group that shares the others.

    A plain tensor is this rank's already. Of a DTensor that is cut along dimension 0 over a mesh of one
    dimension the local tensor, through which gradients arrive as a DTensor again, and the mesh's group.

    Raises:
        ValueError: a DTensor is laid out otherwise, or ``group`` is another than its mesh's.
    """
    if not is_dtensor(parameter):
        return parameter, group
    placements = parameter.placements  # type: ignore[attr-defined]
    if len(placements) != 1 or not placements[0].is_shard(0):
        raise ValueError(
            f"{name}: expected a DTensor with the placement Shard(0) on a mesh of one dimension, got "
            f"{tuple(placements)}; pass this rank's rows as a plain tensor"
        )
    mesh_group = parameter.device_mesh.get_group()  # type: ignore[attr-defined]
    if group is not None and group is not mesh_group:
        raise ValueError(f"group: expected that of the mesh of {name}, or None, got another")
    return parameter.to_local(), mesh_group  # type: ignore[attr-defined]


def all_gather_objects(own: Any, group: object, device: torch.device | None) -> list[Any]:
    """``own`` of every rank of ``group``, in the order of its ranks. For debugging: it waits for the device.

    ``device`` is made current where it is a GPU: NCCL sends objects from the current one.

    Collectives: two all_gathers, of sizes and of pickled bytes; none where there is one rank.
    """
    n_ranks = group_position(group)[1]
    if n_ranks == 1:
        return [own]
    gathered = [None] * n_ranks
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
        dist.all_gather_object(gathered, own, group=group)
    return gathered


def available_backends() -> list[str]:
    """Names of the communication backends in this build of torch."""
    if not dist.is_available():
        return []
    present = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    return [name for name, available in present.items() if available]
