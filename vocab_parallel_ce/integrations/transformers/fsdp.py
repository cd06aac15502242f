"""Heads whose weight FSDP2 gathers: which shard it comes from, and how to use it while it is whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel_ce.dtensor import group_of_rows

HOOKS = "torch.distributed.fsdp._fully_shard._fsdp_state"
STATES = "torch.distributed._composable_state"
UNKNOWN = f"torch {torch.__version__} does not say which weights FSDP gathers"


def fsdp_shard(parameter: Tensor) -> Tensor | None:
    """Return the shard that FSDP2 gathers ``parameter`` from, which optimizers change. None if it does not."""
    states = sys.modules.get(STATES)
    for reference in list(getattr(states, "_module_state_mapping", {}).values()):
        for group in _groups_of(reference()):
            for shard in group.fsdp_params:
                if parameter is shard.sharded_param or parameter is getattr(shard, "_unsharded_param", None):
                    return shard.sharded_param
    return None


def _groups_of(state: Any) -> list[Any]:
    """Return the parameter groups of an FSDP2 state; no other state has any."""
    if type(state).__module__ != HOOKS:
        return []
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    if not hasattr(state, "_fsdp_param_group"):  # the only one before PyTorch 2.12
        raise ValueError(f"{UNKNOWN}: FSDPState has no _fsdp_param_groups; uninstall() trains with the logits")
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def has_own_group(head: nn.Module) -> bool:
    """Return whether ``fully_shard`` was called with the head itself, alone or in a list."""
    return any(base.__name__ == "FSDPModule" for base in type(head).__mro__)


def class_of(head: nn.Module) -> type:
    """Return the head's class before ``fully_shard`` changed it."""
    return type(head).__mro__[2] if has_own_group(head) else type(head)


def refusal(head: Any) -> str | None:
    """Return why FSDP rules out the fused loss."""
    if "weight" not in head._parameters:
        return "the head's weight is not its parameter: FSDP1 has flattened it, use fully_shard"
    if HOOKS in sys.modules and not hasattr(sys.modules.get(STATES), "_module_state_mapping"):
        return f"{UNKNOWN}: {STATES} has no _module_state_mapping"
    if not torch.is_grad_enabled() and fsdp_shard(head.weight) is not None:
        return "FSDP may free the head's weight after an evaluation, before the logits are looked at"
    if not has_own_group(head):
        return None
    hooks = [*head._forward_pre_hooks.values(), *head._forward_hooks.values()]
    if len(hooks) != 2 or {getattr(hook, "__module__", "") for hook in hooks} != {HOOKS}:
        return "the head is in an FSDP group of its own, and has other hooks"
    if head._get_fsdp_state()._mp_policy.output_dtype is not None:
        return "FSDP casts what the head returns"
    return None


def shard_group(head: Any) -> tuple[str | None, Any]:
    """Return why FSDP's shard of the head is no vocabulary shard, or None and the group that it is cut over."""
    if not has_own_group(head):
        return "own_tokens: the head is in no FSDP unit of its own; call fully_shard(model.lm_head) first", None
    if fsdp_shard(head.weight) is not head.weight:  # whole, or parts that reshard_after_forward=<number> left
        return "own_tokens: FSDP has gathered the head's weight outside of its forward", None
    try:
        return None, group_of_rows("own_tokens: weight", head.weight)
    except ValueError as error:  # tensor parallelism cut it too
        return str(error), None


def dtype_in_forward(head: Any) -> torch.dtype:
    """Return the dtype that the weight of a head in a group of its own has in its forward."""
    return head._get_fsdp_state()._mp_policy.param_dtype or head.weight.dtype


def in_forward_of(head: nn.Module, function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Call ``function(hidden)`` in place of the head's forward: FSDP's hooks gather the weight, and free it."""
    before = vars(head).get("forward")
    head.forward = function
    try:
        return head._call_impl(hidden)
    finally:
        del head.forward
        if before is not None:
            head.forward = before
