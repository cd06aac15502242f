"""Heads that tensor parallelism cuts: by transformers' plan of a model, or by :func:`shard_lm_head`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from vocab_parallel_ce.dtensor import closure, is_dtensor, parallel_hooks


def shard_lm_head(model: Any, mesh: Any) -> Any:
    """Cut the output head of a model, and the embedding tied to it, over the ranks of a mesh.

    Every rank holds the whole model and calls this. Each keeps ``ceil(V / R)`` rows of the head, as a DTensor
    ``Shard(0)``; they come from the mesh's first rank. The head still returns unsharded logits. After
    :func:`install`, the loss needs none. All ranks of the mesh must train on the same tokens.

    Call it before you make the optimizer: the head's parameters are new ones. DTensors and plain parameters need
    ``foreach=False`` in an optimizer, or groups of their own. ``clip_grad_norm_`` raises for a mix of them.

    Args:
        model: a model of transformers on the device of the mesh. Its head is an ``nn.Linear``.
        mesh: a ``DeviceMesh`` of one dimension, or one with a dimension named ``"tp"``.

    Returns:
        The model, whose head and tied embedding are changed in place.

    Raises:
        TypeError: the mesh is not a DeviceMesh, or the head is not exactly an nn.Linear (LoRA, quantisation).
        ValueError: the head is cut already, has hooks, or shares its parameters with something else. Nothing is
            changed then.
    """
    mesh = _tp_mesh(mesh)
    head = _checked_head(model, mesh)
    embedding = _tied_embedding(model, head)

    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()))
    if embedding is not None:
        parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
        embedding.weight = head.weight
    return model


def tensor_parallel_group(head: nn.Linear, hooks: bool = True) -> Any:
    """Return the group that shares the rows of a head whose logits tensor parallelism gathers, or None.

    Args:
        head: the head of a model.
        hooks: whether its hooks count; False if they are known to be those of FSDP.

    Raises:
        ValueError: the head has hooks or a forward that do something else.
    """
    patched = vars(head).get("forward")
    has_hooks = hooks and bool(head._forward_hooks or head._forward_pre_hooks)
    if patched is not None:
        # transformers' tp_plan: a closure over the style and the mesh.
        variables = closure(patched) if getattr(patched, "__name__", "") == "tp_forward" else {}
        style: Any = variables.get("self")
        mesh: Any = variables.get("mesh")
        gathers = type(style).__name__ == "ColwiseParallel" and style.output_layouts.is_replicate()
        if not gathers or not is_dtensor(head.weight) or has_hooks:
            raise ValueError("something replaced the head's forward")
        return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    if not has_hooks:
        return None
    group, layouts = parallel_hooks(head) or (None, ())
    if group is None or not all(layout.is_replicate() for layout in layouts):
        raise ValueError("the head has hooks")
    return group


def _tp_mesh(mesh: Any) -> Any:
    """Return the mesh of one dimension to cut the head over."""
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}; make one with init_device_mesh")
    if mesh.ndim == 1:
        return mesh
    if "tp" not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f'mesh: expected one dimension, or one named "tp", got {mesh.ndim} named {mesh.mesh_dim_names}; '
            "pass the part of it that shares the head, such as mesh[name]"
        )
    return mesh["tp"]


def _checked_head(model: Any, mesh: Any) -> Any:
    """Return the output head of ``model`` if it can be cut."""
    if not (isinstance(model, nn.Module) and hasattr(model, "get_output_embeddings")):
        raise TypeError(f"model: expected a model of transformers, got {type(model).__name__}")
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    if type(head) is not nn.Linear:
        raise TypeError(
            f"head: expected exactly an nn.Linear, got {type(head).__name__}, which may do more than multiply by its "
            "weight (LoRA, quantisation, FSDP); cut the head first, and wrap it afterwards"
        )
    if parametrize.is_parametrized(head):
        raise ValueError("head: expected no parametrizations, got some; remove them")
    _check_no_hooks("head", head)
    parameters = dict(head.named_parameters())
    if "weight" not in parameters or hasattr(head.weight, "ds_id"):
        raise ValueError("head: FSDP or DeepSpeed has its weight; cut the head first, and wrap the model afterwards")
    if any(is_dtensor(parameter) for parameter in parameters.values()):
        raise ValueError("head: expected plain parameters, got a DTensor, which is cut already; leave it as it is")
    if head.weight.device.type != mesh.device_type:
        raise ValueError(f"head: expected a weight on {mesh.device_type}, that of mesh, got {head.weight.device}")
    return head


def _tied_embedding(model: Any, head: nn.Linear) -> nn.Embedding | None:
    """Return the input embedding if it shares the weight of the head, and nothing else shares its parameters."""
    parameters = set(head.parameters())
    others = [(name, module) for name, module in model.named_modules() if module is not head]
    sharing = [(name, module) for name, module in others if parameters & set(module.parameters(recurse=False))]
    if not sharing:
        return None
    embedding = model.get_input_embeddings()
    if [module for _, module in sharing] != [embedding] or type(embedding) is not nn.Embedding:
        names = ", ".join(f"{name} ({type(module).__name__})" for name, module in sharing)
        raise ValueError(f"head: expected to share its weight with an nn.Embedding of the inputs alone, got {names}")
    if embedding.max_norm is not None or embedding.sparse or embedding.scale_grad_by_freq:
        raise ValueError("embedding: expected no max_norm, sparse or scale_grad_by_freq, got one; untie it of the head")
    _check_no_hooks("embedding", embedding)
    return embedding


def _check_no_hooks(name: str, module: nn.Module) -> None:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    if any(hooks) or "forward" in vars(module):
        raise ValueError(f"{name}: has hooks or a patched forward (a tp_plan, offloading); remove them")
