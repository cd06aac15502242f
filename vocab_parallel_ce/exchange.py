"""The one collective of the loss: every rank's row statistics to every rank of the group.

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
