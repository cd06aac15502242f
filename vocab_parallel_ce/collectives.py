"""Send statistics, hidden states and their gradients between the ranks of a group.

Only this module and ``dtensor`` use ``torch.distributed``. Without a group no function here touches it, so
one GPU or a CPU needs no process group.
"""

from __future__ import annotations

import functools
import pickle
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


def group_position(group: object) -> tuple[int, int]:
    """Return ``(rank in the group, number of ranks)``; ``(0, 1)`` for None. Raise if this rank is not in it."""
    if group is None:
        return 0, 1
    if dist.is_available():
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            remedy = "call it on its ranks alone"
            raise ValueError(f"group: this rank must be a member of it, got a group of other ranks; {remedy}")
        if isinstance(group, dist.ProcessGroup):
            return group.rank(), group.size()
    raise TypeError(
        "group: expected a torch.distributed.ProcessGroup or None, or a DeviceMesh of one dimension, got "
        f"{type(group).__name__}"
    )


def group_named(name: str | None) -> Any:
    """Return the group that has this ``group_name``; None for None."""
    return None if name is None else dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


class NamedGroup(NamedTuple):
    """What stands for a process group in a copy or a pickle of a module, because no group can be copied."""

    name: str
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, group: Any) -> NamedGroup | None:
        return None if group is None else cls(group.group_name, tuple(dist.get_process_group_ranks(group)))

    def resolve(self) -> Any:
        """Return this process's group of that name. Raise ValueError if it has none, or one of other ranks."""
        ranks: object = "no such group"
        with suppress(RuntimeError, LookupError):
            group = group_named(self.name)
            ranks = tuple(dist.get_process_group_ranks(group))
        if ranks != self.ranks:
            raise ValueError(
                f"group: expected the process group {self.name!r} of the ranks {self.ranks}, which a module that is "
                f"copied or unpickled looks up by name, got {ranks}; make the same groups before, or set module.group "
                "to None before it is pickled"
            )
        return group


def all_gather_stats(gathered: Tensor, rank: int, group: Any) -> None:
    """Fill ``gathered [R, N, K]`` from all ranks. This rank has already written ``gathered[rank]``.

    Collectives: one all_gather, in place, on the current stream. None for one rank or no rows.
    """
    if gathered.shape[0] == 1 or gathered.numel() == 0:
        return
    # The group's own method takes a third of the host time of the public function. PyTorch 2.13 renamed it.
    all_gather = getattr(group, "all_gather_single", None) or group._allgather_base
    work = all_gather(gathered, gathered.narrow(0, rank, 1), _on_the_current_stream())
    if work is not None:
        work.wait()


@functools.cache
def _on_the_current_stream() -> Any:
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    return options


def gathered(part: Tensor, rank: int, n_ranks: int, group: Any) -> Tensor:
    """Return ``[R, ...]``, the ``part [...]`` of all ranks. Collectives: those of :func:`all_gather_stats`."""
    parts = part.new_empty(n_ranks, *part.shape)
    parts[rank] = part
    all_gather_stats(parts, rank, group)
    return parts


# Each begin_ function starts one collective and returns a handle at once. Call its wait() before you use the result.


def begin_all_gather(gathered: Tensor, part: Tensor, group: Any) -> Any:
    """Begin to fill ``gathered [R * N, ...]`` with ``part [N, ...]`` of all ranks."""
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return all_gather(gathered, part, group=group, async_op=True)


def begin_all_reduce(summed: Tensor, group: Any) -> Any:
    """Begin to replace ``summed`` by its sum over the ranks."""
    return dist.all_reduce(summed, group=group, async_op=True)


def summed_over_ranks(part: Tensor, group: Any) -> Tensor:
    """Return the sum of ``part`` over the ranks, in a new tensor."""
    total = part.clone(memory_format=torch.contiguous_format)
    begin_all_reduce(total, group).wait()
    return total


def begin_reduce_scatter(part: Tensor, summed: Tensor, group: Any) -> Any:
    """Begin to fill ``part`` with this rank's rows of the sum of ``summed``."""
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce_scatter(part, summed, group=group, async_op=True)


def all_gather_objects(value: Any, group: Any, device: torch.device | None) -> list[Any]:
    """Return ``value`` of every rank, in the order of the ranks. For debugging: it waits for the device.

    ``torch.distributed.all_gather_object`` would need NumPy. NCCL sends objects through the current GPU, so ``device``
    becomes current if it is one.

    Collectives: two all_gathers, of sizes and of pickled bytes; none for one rank.
    """
    rank, n_ranks = group_position(group)
    if n_ranks == 1:
        return [value]
    with torch.cuda.device(device) if device is not None and device.type == "cuda" else nullcontext():
        sends_from = dist.distributed_c10d._get_object_coll_device(group)
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(sends_from)
        sizes = gathered(torch.tensor(len(pickled), device=sends_from), rank, n_ranks, group).tolist()
        padded = torch.nn.functional.pad(pickled, (0, max(sizes) - len(pickled)))
        rows = gathered(padded, rank, n_ranks, group).tolist()
    return [pickle.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]


def available_backends() -> list[str]:
    """Return the names of the communication backends in this build of torch."""
    if not dist.is_available():
        return []
    present = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    return [name for name, available in present.items() if available]
