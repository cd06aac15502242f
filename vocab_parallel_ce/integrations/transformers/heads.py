"""The head of a model of transformers: whether the loss can be fused with it, and lazy logits in place of its own."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import closure, is_dtensor, parallel_hooks
from vocab_parallel_ce.integrations.lazy_logits import Head, lazy_logits
from vocab_parallel_ce.linear.chunks import choose_chunk_tokens
from vocab_parallel_ce.linear.cross_entropy import linear_cross_entropy

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEWEST_TOKENS = 2048  # of a chunk: half the memory of linear_cross_entropy's default, for 0.4 % of a step
NOT_USED = "the head was not called, or no cross_entropy of its logits"
logger = logging.getLogger("vocab_parallel_ce")
calls: weakref.WeakKeyDictionary[nn.Module, Counter[str]] = weakref.WeakKeyDictionary()


class CallRecord:
    """What became of the logits of one call of a model, added to the model's :data:`calls` when the call ends."""

    def __init__(self, model: Any) -> None:
        self.name, self.counts = type(model).__name__, calls.setdefault(model, Counter())
        self.events: list[str] = []
        self.is_over = False

    def report(self, event: str) -> None:
        """Note ``"fused"``, or what made the logits."""
        if self.is_over:
            self.counts["logits made after the call"] += 1
        self.events.append(event)

    def end(self) -> None:
        """Count the call, and log the first of its kind if it was not fused."""
        self.is_over = True
        event = "fused" if "fused" in self.events else next(iter(self.events), NOT_USED)
        self.counts[event] += 1
        if event != "fused" and self.counts[event] == 1:
            logger.warning("%s: the loss was not fused, and the logits were made: %s", self.name, event)


class HeadPlan(NamedTuple):
    """A head whose loss can be fused."""

    module: nn.Linear
    group: Any
    options: dict[str, Any]  # of linear_cross_entropy
    record: CallRecord


class HeadCall(Head):
    """One call of a head."""

    def __init__(self, plan: HeadPlan, hidden: Tensor) -> None:
        weight, bias = plan.module.weight, plan.module.bias
        self.parameters = (weight,) if bias is None else (weight, bias)
        super().__init__(hidden, self.parameters)
        self.plan = plan

    def report(self, event: str) -> None:
        self.plan.record.report(event)

    def check_unchanged(self) -> None:
        super().check_unchanged()
        weight, bias = self.plan.module.weight, self.plan.module.bias
        if weight is not self.parameters[0] or (bias is not None and bias is not self.parameters[1]):
            raise RuntimeError(
                "logits: looked at after the head was given another weight (functional_call, or an assignment), which "
                "would give other logits; look at them before, or call the model again"
            )

    def logits(self) -> Tensor:
        # With its hooks and its own forward; only the lazy call is skipped.
        return self.plan.module._call_impl(self.hidden)

    def loss(self, hidden: Tensor, labels: Tensor, n_columns: int, **options: Any) -> Tensor:
        module, group = self.plan.module, self.plan.group
        if not {"chunk_tokens", "memory_budget"} & self.plan.options.keys():
            width = -(-module.out_features // group_position(group)[1])
            size = self.modes.dtype_of(hidden).itemsize
            options["chunk_tokens"] = choose_chunk_tokens(hidden.shape[0], hidden.shape[1], width, size, FEWEST_TOKENS)
        # PyTorch raises for such labels too; on a GPU the check would wait for the device.
        checks = hidden.device.type == "cpu"
        options |= {"vocab_size": n_columns, "group": group, "check_labels": checks, **self.plan.options}
        return linear_cross_entropy(hidden, module.weight, labels, bias=module.bias, **options)


@contextlib.contextmanager
def lazy_head(model: Any, options: dict[str, Any]) -> Iterator[CallRecord]:
    """Let the head of ``model`` return lazy logits; the record of the call is to be ended with the call."""
    head, record = model.get_output_embeddings(), CallRecord(model)
    if hasattr(getattr(head, "_compiled_call_impl", None), "is_lazy"):  # a call inside a call: the outer one counts
        record.counts = Counter()
        yield record
        return
    reason, group = refusal(model, head)
    plan = HeadPlan(head, group, options, record)

    def call(*args: Any, **kwargs: Any) -> Any:
        why = refusal_of_inputs(head, args, kwargs)
        if why is not None:
            record.report(why)
            return head._call_impl(*args, **kwargs)
        return lazy_logits(HeadCall(plan, args[0]), head.out_features)

    call.is_lazy = True  # type: ignore[attr-defined]
    if reason is None:
        head._compiled_call_impl = call  # what nn.Module.__call__ runs instead of forward and hooks
    else:
        record.report(reason)
    try:
        yield record
    finally:
        if reason is None:
            del head._compiled_call_impl


def refusal(model: Any, head: Any) -> tuple[str | None, Any]:
    """Return why the loss cannot be fused with ``head``, or None and the group that shares its rows."""
    if head is None:
        return "no output embeddings", None
    bases = {base.__name__ for base in type(model).__mro__}
    if "FSDPModule" in bases and not torch.is_grad_enabled():
        return "FSDP may free the head's weight after an evaluation, before the logits are looked at", None
    if any(base.__name__ in ("FSDPModule", "FullyShardedDataParallel") for base in type(head).__mro__):
        return "FSDP wraps the head itself: its weight is whole only in the head's own forward", None
    if type(head) is not nn.Linear:
        return f"the head is a {type(head).__module__}.{type(head).__name__}, not an nn.Linear", None
    if hasattr(head.weight, "ds_id"):
        return "DeepSpeed ZeRO-3 has partitioned the head", None
    if head._compiled_call_impl is not None:
        return "the head is compiled", None
    if parametrize.is_parametrized(head):
        return "the head is parametrised", None
    if head._backward_hooks or head._backward_pre_hooks:
        return "the head has backward hooks", None
    is_plain = type(head.weight) in (Tensor, nn.Parameter) or is_dtensor(head.weight)
    if not is_plain or head.weight.dtype not in DTYPES or head.weight.dim() != 2:
        return (
            f"the head's weight is a {type(head.weight).__name__} {head.weight.dtype} {tuple(head.weight.shape)}",
            None,
        )
    try:
        group = tensor_parallel_group(head)
    except ValueError as error:
        return str(error), None
    if is_dtensor(head.weight) and group is None:
        return "the head's weight is a DTensor, and no tensor parallelism cut it", None
    return None, group


def refusal_of_inputs(head: nn.Linear, args: Any, kwargs: Any) -> str | None:
    """Return why a call of the head with these arguments cannot be fused."""
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return "a head called with other arguments than one tensor"
    (hidden,) = args
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    if is_dtensor(hidden) or hidden.dim() < 2 or hidden.dtype not in DTYPES:
        return f"hidden states that are {type(hidden).__name__} {hidden.dtype} {tuple(hidden.shape)}"
    if hidden.device != head.weight.device or not (autocasts or hidden.dtype == head.weight.dtype):
        return f"hidden states of {hidden.dtype} on {hidden.device}, beside a head of {head.weight.dtype}"
    return None


def tensor_parallel_group(head: nn.Linear) -> Any:
    """Return the group that shares the rows of a head whose logits tensor parallelism gathers, or None.

    Raises:
        ValueError: the head has hooks or a forward that do something else.
    """
    patched = vars(head).get("forward")
    if patched is not None:
        # transformers' tp_plan: a closure over the style and the mesh.
        variables = closure(patched) if getattr(patched, "__name__", "") == "tp_forward" else {}
        style: Any = variables.get("self")
        mesh: Any = variables.get("mesh")
        gathers = type(style).__name__ == "ColwiseParallel" and style.output_layouts.is_replicate()
        if not gathers or not is_dtensor(head.weight) or head._forward_hooks or head._forward_pre_hooks:
            raise ValueError("something replaced the head's forward")
        return mesh.get_group() if mesh.ndim == 1 else mesh.get_group("tp")
    if not head._forward_hooks and not head._forward_pre_hooks:
        return None
    hooks = parallel_hooks(head)
    if hooks is None or not all(layout.is_replicate() for layout in hooks.input_layouts):
        raise ValueError("the head has hooks")
    return hooks.group
