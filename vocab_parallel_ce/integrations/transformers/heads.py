"""The head of a model of transformers: whether the loss can be fused with it, and lazy logits in place of its own."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.integrations.lazy_logits import Head, lazy_logits
from vocab_parallel_ce.integrations.transformers import fsdp
from vocab_parallel_ce.integrations.transformers.tensor_parallel import tensor_parallel_group
from vocab_parallel_ce.linear.cross_entropy import linear_cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOT_USED = "the head was not called, or no cross_entropy of its logits"
logger = logging.getLogger("vocab_parallel_ce")
calls: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()


class HeadPlan(NamedTuple):
    """A head whose loss can be fused."""

    module: nn.Linear
    group: Any
    options: dict[str, Any]  # of linear_cross_entropy
    report: Callable[[str], None]


class HeadCall(Head):
    """One call of a head."""

    def __init__(self, plan: HeadPlan, hidden: Tensor) -> None:
        parameters = [parameter for parameter in (plan.module.weight, plan.module.bias) if parameter is not None]
        # FSDP fills the whole weight again without a trace; what an optimizer changes is the shard.
        shards = [fsdp.fsdp_shard(parameter) for parameter in parameters]
        super().__init__(hidden, (*parameters, *(shard for shard in shards if shard is not None)))
        self.plan = plan

    def report(self, event: str) -> None:
        self.plan.report(event)

    def logits(self) -> Tensor:
        # With its hooks and its own forward; only the lazy call is skipped.
        return self.plan.module._call_impl(self.hidden)

    def loss(self, hidden: Tensor, labels: Tensor, n_columns: int, **options: Any) -> Tensor:
        module, group = self.plan.module, self.plan.group
        # PyTorch raises for such labels too; on a GPU the check would wait for the device.
        checks = hidden.device.type == "cpu"
        options |= {"vocab_size": n_columns, "group": group, "check_labels": checks, **self.plan.options}

        def fused(hidden: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, module.weight, labels, bias=module.bias, **options)

        return fsdp.in_forward_of(module, fused, hidden) if fsdp.has_own_group(module) else fused(hidden)


@contextlib.contextmanager
def lazy_head(model: Any, options: dict[str, Any]) -> Iterator[None]:
    """Let the head of ``model`` return lazy logits, and count what became of them."""
    events: list[str] = []
    counts = calls.setdefault(model, Counter())
    is_over = False

    def report(event: str) -> None:
        if is_over:
            counts["logits made after the call"] += 1
        events.append(event)

    head = model.get_output_embeddings()
    reason, group = refusal(head)
    if reason is not None:
        _count(model, counts, reason)
        yield
        return
    if "_compiled_call_impl" in vars(head):  # a call inside a call: the outer one counts
        yield
        return
    plan = HeadPlan(head, group, options, report)

    def call(*args: Any, **kwargs: Any) -> Any:
        why = refusal_of_inputs(head, args, kwargs)
        if why is not None:
            report(why)
            return head._call_impl(*args, **kwargs)
        (hidden,) = args
        autocasts = torch.is_autocast_enabled(hidden.device.type)
        dtype = torch.get_autocast_dtype(hidden.device.type) if autocasts else hidden.dtype
        return lazy_logits(HeadCall(plan, hidden), head.out_features, dtype)

    head._compiled_call_impl = call  # what nn.Module.__call__ runs instead of forward and hooks
    try:
        yield
    finally:
        del head._compiled_call_impl
        is_over = True
    if "fused" in events:
        counts["fused"] += 1
    else:
        _count(model, counts, f"{events[0]} made the logits" if events else NOT_USED)


def refusal(head: Any) -> tuple[str | None, Any]:
    """Return why the loss cannot be fused with ``head``, or None and the group that shares its rows."""
    if head is None:
        return "no output embeddings", None
    reason = refusal_of_module(head) or fsdp.refusal(head)
    if reason is not None or fsdp.has_own_group(head):
        return reason, None
    try:
        group = tensor_parallel_group(head)
    except ValueError as error:
        return str(error), None
    if is_dtensor(head.weight) and group is None:
        return "the head's weight is a DTensor, and no tensor parallelism cut it", None
    return None, group


def refusal_of_module(head: Any) -> str | None:
    """Return why ``head`` may do more than multiply by a weight that it has."""
    if fsdp.class_of(head) is not nn.Linear:
        return f"the head is a {type(head).__module__}.{type(head).__name__}, not an nn.Linear"
    if hasattr(head.weight, "ds_id"):
        return "DeepSpeed ZeRO-3 has partitioned the head"
    if parametrize.is_parametrized(head):
        return "the head is parametrised"
    if head._backward_hooks or head._backward_pre_hooks:
        return "the head has backward hooks"
    if head.weight.dtype not in DTYPES or head.weight.dim() != 2:
        return f"the head's weight is {head.weight.dtype} {tuple(head.weight.shape)}"
    return None


def refusal_of_inputs(head: nn.Linear, args: Any, kwargs: Any) -> str | None:
    """Return why a call of the head with these arguments cannot be fused."""
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return "a head called with other arguments than one tensor"
    (hidden,) = args
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    if is_dtensor(hidden) or hidden.dim() < 2 or hidden.dtype not in DTYPES:
        return f"hidden states that are {type(hidden).__name__} {hidden.dtype} {tuple(hidden.shape)}"
    dtype = fsdp.dtype_in_forward(head) if fsdp.has_own_group(head) else head.weight.dtype
    if hidden.device != head.weight.device or not (autocasts or hidden.dtype == dtype):
        return f"hidden states of {hidden.dtype} on {hidden.device}, beside a head of {dtype}"
    return None


def _count(model: Any, counts: Counter[str], reason: str) -> None:
    """Count a call that was not fused, and say so once per model."""
    counts[reason] += 1
    if counts[reason] == 1:
        logger.warning("%s: the loss was not fused, and the logits were made: %s", type(model).__name__, reason)
