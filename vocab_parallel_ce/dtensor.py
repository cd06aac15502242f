"""Read what PyTorch's tensor parallelism says: the group of a mesh, the rows of a DTensor, the hooks of a head."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel_ce.summed import copied

PROCESS_GROUP: Any = dist.ProcessGroup if dist.is_available() else ()


def is_dtensor(value: Any) -> bool:
    """Return whether ``value`` is a DTensor, without importing DTensor."""
    return isinstance(value, Tensor) and hasattr(value, "placements")  # Dynamo cannot ask a group for an attribute


def process_group_of(group: Any) -> Any:
    """Return the process group of a one-dimensional ``DeviceMesh``; anything else as it is.

    Raises:
        ValueError: the mesh has more dimensions, other ranks, or ranks that do not ascend.
    """
    if group is None or isinstance(group, PROCESS_GROUP) or not dist.is_available():
        return group
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(group, DeviceMesh):
        return group
    mesh = group
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        remedy = "mesh.get_group(dimension)" if names is None else f'mesh["{"tp" if "tp" in names else "its name"}"]'
        got = mesh.ndim if names is None else f"{mesh.ndim}, {names}"
        raise ValueError(
            f"group: expected a mesh of one dimension, got {got}; pass that of the vocabulary, as {remedy}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("group: this rank must be in the mesh, got a mesh of other ranks; call it on its ranks alone")
    ranks, group_of_mesh = ranks_along(mesh, (0,)), mesh.get_group()
    # PyTorch sorts a group's ranks: columns would be cut by another position than that in the mesh.
    if list(ranks) != sorted(ranks):
        raise ValueError(f"group: expected a mesh of ascending ranks, got {ranks}; make it of those")
    return group_of_mesh


def local_rows(name: str, parameter: Tensor, group: object) -> Tensor:
    """Return this rank's rows of ``parameter``, which errors call ``name``.

    A plain tensor holds them already. A DTensor gives its local tensor. The gradient becomes a DTensor on the
    same mesh, with the same placements. Ranks of replicated dimensions have their own tokens, and backward sums
    their gradients: PyTorch's own matmul leaves Partial(), which clip_grad_norm_ of PyTorch 2.11 does not clip.

    Several dimensions with Shard(0) must be those of ``group`` together, in the order of the mesh. Each dimension cuts
    the parts of the one before. Those are the parts of all ranks at once only if all are equal.

    Collectives: in backward, one all_reduce of the gradient for each replicated dimension of several ranks.

    Raises:
        ValueError: a DTensor has another layout, or other ranks than ``group``; or several dimensions cut it into parts
            that are not equal.
    """
    if not is_dtensor(parameter):
        return parameter
    dtensor: Any = parameter
    placements, mesh = dtensor.placements, dtensor.device_mesh
    dims = _sharded_mesh_dims(name, placements)
    remedy = _group_of_dims(name, mesh, dims)
    if group is None:
        raise ValueError(
            f"{name}: expected a group with a DTensor, which does not tell if tensor parallelism or FSDP cut it, got "
            f"None; if tensor parallelism did, pass {remedy}; if FSDP did, call it inside the module that FSDP "
            "wraps"
        )
    ranks = tuple(dist.get_process_group_ranks(group))  # type: ignore[arg-type]
    expected = ranks_along(mesh, dims)
    if ranks != expected:
        remedy = "a mesh of ascending ranks" if sorted(ranks) == sorted(expected) else remedy
        which = f"dimension {dims[0]}" if len(dims) == 1 else f"dimensions {dims}"
        ranks_of_mesh = f"the ranks {expected} of mesh {which} of {name}, in this order"
        raise ValueError(f"group: expected {ranks_of_mesh}, got {ranks}; pass {remedy}")
    if len(dims) > 1 and dtensor.shape[0] % len(expected):
        raise ValueError(
            f"{name}: expected a multiple of {len(expected)} rows, the ranks of mesh dimensions {dims}, got "
            f"{dtensor.shape[0]}; pad them, or cut them over a flattened mesh"
        )
    rows: Tensor = dtensor.to_local()
    if rows.requires_grad:
        for dim in range(len(placements)):
            if dim not in dims and mesh.size(dim) > 1:
                rows = copied(rows, mesh.get_group(dim))
    return rows


def group_of_rows(name: str, parameter: Any) -> Any:
    """Return the group of the one mesh dimension that cuts a DTensor into rows."""
    dims = _sharded_mesh_dims(name, parameter.placements)
    if len(dims) != 1:
        raise ValueError(f"{name}: expected Shard(0) on one dimension of its mesh, got {parameter.placements}")
    return parameter.device_mesh.get_group(dims[0])


def _group_of_dims(name: str, mesh: Any, dims: tuple[int, ...]) -> str:
    """Return how to ask for the group of these dimensions, if tensor parallelism cut ``name`` over all of them."""
    if len(dims) > 1:
        inside = "if FSDP cut one of them, call it inside the module that FSDP wraps"
        return f"the group of the flattened dimensions {dims} of its mesh; {inside}"
    label = dims[0] if mesh.mesh_dim_names is None else f'"{mesh.mesh_dim_names[dims[0]]}"'
    return f"group={name}.device_mesh.get_group({label})"


def _sharded_mesh_dims(name: str, placements: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the dimensions of the mesh that have Shard(0), if all others replicate."""
    from torch.distributed.tensor import Shard

    # Older versions of is_shard(0) accept _StridedShard too, whose rows lie elsewhere.
    sharded = tuple(d for d, placement in enumerate(placements) if type(placement) is Shard and placement.dim == 0)
    if sharded and sum(placement.is_replicate() for placement in placements) == len(placements) - len(sharded):
        return sharded
    remedy = "pass this rank's rows as a plain tensor"
    if sum(getattr(placement, "dim", None) == 0 for placement in placements) > 1:
        remedy = "tensor parallelism and FSDP both cut it: call it inside the module that FSDP wraps"
    layout = "Shard(0) on one or more dimensions of its mesh and Replicate() on the others"
    raise ValueError(f"{name}: expected a DTensor with {layout}, got {placements}; {remedy}")


# Ranks by dimensions and position: mesh.mesh takes 0.5 ms. A mesh keeps its groups alive, so nothing here keeps a mesh.
_RANKS: WeakKeyDictionary[Any, dict[Any, tuple[int, ...]]] = WeakKeyDictionary()


def ranks_along(mesh: Any, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ranks that differ from this one only in dimensions ``dims``, in the order of their shards."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return ()
    known, key = _RANKS.setdefault(mesh, {}), (dims, tuple(coordinate))
    if key not in known:
        index = tuple(slice(None) if d in dims else position for d, position in enumerate(coordinate))
        known[key] = tuple(mesh.mesh[index].flatten().tolist())
    return known[key]


# As torch.compiler.assume_constant_result marks it, without importing the compiler: it reads a tensor of the mesh.
ranks_along._dynamo_marked_constant = True  # type: ignore[attr-defined]


def parallel_hooks(module: torch.nn.Module) -> tuple[Any, tuple[Any, ...]] | None:
    """Return the group that shares a module, and the layouts of its inputs, as ColwiseParallel or RowwiseParallel have
    hooked it. None if it has any other hooks.
    """
    if len(module._forward_pre_hooks) != 1 or len(module._forward_hooks) != 1:
        return None
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    origins = {(getattr(hook, "__module__", ""), getattr(hook, "__qualname__", "")) for hook in hooks}
    if origins != {("torch.distributed.tensor._api", "distribute_module.<locals>.<lambda>")}:
        return None
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    before, after = (closure(hook) for hook in hooks)
    partials: list[Any] = [before.get("input_fn"), after.get("output_fn")]  # functools.partial of a style's functions
    functions = [getattr(partial, "func", None) for partial in partials]
    for style in (ColwiseParallel, RowwiseParallel):
        if functions == [style._prepare_input_fn, style._prepare_output_fn]:
            return before["device_mesh"].get_group(), partials[0].args[0]
    return None


def closure(function: Any) -> dict[str, Any]:
    """Return the variables of the enclosing function that ``function`` uses."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))
