"""The collectives: row statistics to every rank, and what a sharded head sends of its hidden states.

The only module that knows ``torch.distributed``. Without a group nothing in here touches it, so that
one GPU or a CPU needs no initialised process group.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

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


def local_rows(name: str, parameter: Tensor, group: object) -> Tensor:
    """This rank's rows of the ``parameter`` of this name, which ``group``, a process group or None, shares.

    A plain tensor is this rank's already. A DTensor gives its local tensor, whose gradient arrives as a
    DTensor on the same mesh: Shard(0) stays, and dimensions that replicate the parameter have Partial. Their
    ranks have their own tokens, and the gradient is the sum over all of them, as for PyTorch's own matmul.

    Raises:
        ValueError: a DTensor is laid out otherwise, or ``group`` is None or has other ranks.
    """
    if not is_dtensor(parameter):
        return parameter
    placements: Any = parameter.placements  # type: ignore[attr-defined]
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    dim = _dim_of_rows(name, placements)
    named = mesh.mesh_dim_names
    remedy = f"group={name}.device_mesh.get_group({dim if named is None else _quoted(named[dim])})"
    if group is None:
        raise ValueError(
            f"{name}: a DTensor does not tell if tensor parallelism or FSDP cut it, expected its group, got "
            f"None; if tensor parallelism did, pass {remedy}; if FSDP did, call it inside the module that "
            "FSDP wraps"
        )
    ranks = tuple(dist.get_process_group_ranks(group))  # type: ignore[arg-type]
    coordinate = mesh.get_coordinate()
    expected = () if coordinate is None else _ranks_along(mesh, dim, tuple(coordinate))
    if ranks != expected:
        if sorted(ranks) == sorted(expected):
            remedy = "a mesh of ascending ranks"
        raise ValueError(
            f"group: expected the ranks {expected} of mesh dimension {dim} of {name}, in this order, got "
            f"{ranks}; pass {remedy}"
        )
    if len(placements) == 1:
        return parameter.to_local()  # type: ignore[attr-defined]
    from torch.distributed.tensor import Partial

    grads = [placement if d == dim else Partial() for d, placement in enumerate(placements)]
    return parameter.to_local(grad_placements=grads)  # type: ignore[attr-defined]


def _dim_of_rows(name: str, placements: tuple[Any, ...]) -> int:
    """The one dimension of the mesh that shards dimension 0, where all others replicate."""
    from torch.distributed.tensor import Shard

    # Not is_shard(0): older versions say it of _StridedShard too, whose rows lie otherwise.
    of_rows = [d for d, placement in enumerate(placements) if type(placement) is Shard and placement.dim == 0]
    others = [placement for d, placement in enumerate(placements) if d not in of_rows[:1]]
    if of_rows and all(placement.is_replicate() for placement in others):
        return of_rows[0]
    cut_twice = sum(getattr(placement, "dim", None) == 0 for placement in placements) > 1
    remedy = (
        "tensor parallelism and FSDP both cut it: call it inside the module that FSDP wraps"
        if cut_twice
        else "pass this rank's rows as a plain tensor"
    )
    raise ValueError(
        f"{name}: expected a DTensor with Shard(0) on one dimension of its mesh and Replicate() on the "
        f"others, got {placements}; {remedy}"
    )


def _quoted(name: str) -> str:
    return f'"{name}"'


@functools.lru_cache(maxsize=64)
def _ranks_along(mesh: Any, dim: int, coordinate: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that differ from this one in dimension ``dim`` alone, in the order of their shards.

    The group of the mesh has them in ascending order instead. Cached: ``mesh.mesh`` takes 0.5 ms.
    """
    ranks = mesh.mesh.movedim(dim, -1)
    for position in coordinate[:dim] + coordinate[dim + 1 :]:
        ranks = ranks[position]
    return tuple(ranks.tolist())


class ParallelHooks(NamedTuple):
    """What the hooks of ``parallelize_module`` say: who shares the module, and the layout of its inputs."""

    group: Any
    input_layouts: tuple[Any, ...]


def parallel_hooks(module: torch.nn.Module) -> ParallelHooks | None:
    """What the hooks of ``module`` say if they are those of ColwiseParallel or RowwiseParallel, or None.

    A hook beside them, or of a style of the user's own, makes it None.
    """
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if len(module._forward_pre_hooks) != 1 or len(module._forward_hooks) != 1:
        return None
    origins = {(getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) for hook in hooks}
    if origins != {("torch.distributed.tensor._api", "distribute_module.<locals>.<lambda>")}:
        return None
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    before, after = (_closure(hook) for hook in hooks)
    prepare_input, prepare_output = before.get("input_fn"), after.get("output_fn")
    if not isinstance(prepare_input, functools.partial) or not isinstance(prepare_output, functools.partial):
        return None
    for style in (ColwiseParallel, RowwiseParallel):
        of_style = (style._prepare_input_fn, style._prepare_output_fn)
        if (prepare_input.func, prepare_output.func) == of_style:
            return ParallelHooks(before["device_mesh"].get_group(), prepare_input.args[0])
    return None


def _closure(function: Any) -> dict[str, Any]:
    """The variables of the enclosing function that ``function`` uses."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


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
