"""The head of a model of transformers: whether the loss can be fused with it, and lazy logits in place of its own."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from vocab_parallel_ce.api.heads import linear_cross_entropy
from vocab_parallel_ce.checks import HEAD_DTYPES, has_no_values
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.head.chunks import choose_chunk_tokens, most_tokens
from vocab_parallel_ce.integrations import logger
from vocab_parallel_ce.integrations.lazy_head import Head
from vocab_parallel_ce.integrations.lazy_logits import Recorded, lazy_logits
from vocab_parallel_ce.integrations.transformers import fsdp
from vocab_parallel_ce.integrations.transformers.targets import name_of
from vocab_parallel_ce.integrations.transformers.tensor_parallel import tensor_parallel_group
from vocab_parallel_ce.options import HeadOptions

_modules = torch.nn.modules.module
GLOBAL_HOOKS = [_modules._global_forward_hooks, _modules._global_forward_pre_hooks]
GLOBAL_HOOKS += [_modules._global_backward_hooks, _modules._global_backward_pre_hooks]
LINEAR_FORWARD = nn.Linear.forward
FEWEST_TOKENS = 2048  # of one of several chunks: less than linear_cross_entropy's, for 0.4 % of a step's time
NOT_USED = "the head was not called, or no cross_entropy of its logits"
calls: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()  # of models, and of classes
_counting = threading.Lock()


def count(counts: Counter[str], event: str) -> bool:
    """Count an event, and return whether it is the first of its kind."""
    with _counting:
        counts[event] += 1
        return counts[event] == 1


class CallRecord:
    """What became of the logits of one call of a model, added to the model's :data:`calls` when the call ends."""

    def __init__(self, model: Any) -> None:
        self.name, self.counts = type(model).__name__, calls.setdefault(model, Counter())
        self.events: list[str] = []
        self.is_over = self.is_inner = False

    def report(self, event: str) -> None:
        """Note ``"fused"``, or what made the logits."""
        if self.is_over:
            count(self.counts, "logits made after the call")
        self.events.append(event)

    def end(self) -> None:
        """Count the call, and log the first of its kind if it was not fused."""
        self.is_over = True
        if self.is_inner:
            return
        made = next((event for event in self.events if event != "fused"), None)
        event = made or ("fused" if self.events else NOT_USED)
        if made is not None and "fused" in self.events:
            event = f"fused, but {made} too"
        if count(self.counts, event) and event != "fused":
            warn(self.name, event)


def warn(name: str, event: str) -> None:
    logger.warning("vocab_parallel_ce: %s: the logits were made: %s", name, event)


def note_unfused(owner: Any, event: str) -> None:
    """Count a call that no record is made of, and log the first of its kind. ``owner``: a model, or a class."""
    if count(calls.setdefault(owner, Counter()), event):
        warn(name_of(owner), event)


class HeadPlan(NamedTuple):
    """A head whose loss can be fused."""

    module: nn.Linear
    group: Any
    options: dict[str, Any]  # fields of HeadOptions
    record: CallRecord


class HeadCall(Head):
    """One call of a head."""

    def __init__(self, plan: HeadPlan, hidden: Tensor) -> None:
        self.plan, module = plan, plan.module
        parameters = tuple(parameter for parameter in (module.weight, module.bias) if parameter is not None)
        # FSDP fills the whole weight again without a trace; what an optimizer changes is the shard.
        shards = [shard for shard in map(fsdp.fsdp_shard, parameters) if shard is not None]
        # The memory that FSDP frees is that of the local tensor.
        held: list[Any] = [parameter for parameter in (*parameters, *shards) if is_dtensor(parameter)]
        super().__init__(hidden, parameters, (*shards, *(dtensor._local_tensor for dtensor in held)))

    def report(self, event: str) -> None:
        self.plan.record.report(event)

    def logits(self, hidden: Tensor, *parameters: Tensor) -> Tensor:
        module = self.plan.module
        if not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)):
            return F.linear(hidden, *parameters)
        named = dict(zip(("head.weight", "head.bias"), parameters, strict=False))
        return functional_call(_NotLazy(module), named, (hidden,))

    def loss(self, hidden: Tensor, labels: Tensor, n_columns: int, **options: Any) -> Tensor:
        module, group = self.plan.module, self.plan.group
        if self.plan.options.get("own_tokens"):
            return self._own_loss(hidden, labels, vocab_size=n_columns, **options)
        # Trainer waits for the device too, to count the labels of a batch. A captured CUDA graph cannot.
        captures = hidden.is_cuda and torch.cuda.is_current_stream_capturing()
        valid_tokens = "count" if self.requires_grad and not captures else None
        fields = {"valid_tokens": valid_tokens, **self.plan.options}
        if fields.get("chunk_size", "auto") == "auto":
            width = -(-module.out_features // group_position(group)[1])
            size = self.modes.dtype_of(hidden).itemsize
            n_tokens, hidden_size = hidden.shape
            most = min(FEWEST_TOKENS, most_tokens(hidden_size, width, size))
            fields["chunk_size"] = choose_chunk_tokens(n_tokens, hidden_size, width, size, most)
        options |= {"vocab_size": n_columns, "group": group, "options": HeadOptions(**fields)}

        def fused(hidden: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, module.weight, labels, bias=module.bias, **options)

        is_gathered = fsdp.has_own_group(module) or is_partitioned(module)
        return fsdp.in_forward_of(module, fused, hidden) if is_gathered else fused(hidden)

    def _own_loss(self, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
        """Return the loss of this rank's tokens over FSDP's shard. Those that are ignored are not sent."""
        module, group = self.plan.module, self.plan.group
        if options["reduction"] != "none":
            is_valid = labels != options["ignore_index"]
            hidden, labels = hidden[is_valid], labels[is_valid]
        options |= {"group": group, "bias": module.bias, "options": HeadOptions(**self.plan.options)}
        return linear_cross_entropy(hidden, module.weight, labels, **options)


class GatheredHeadCall(HeadCall):
    """One call of a head that FSDP gathers for its forward: FSDP's hooks give its parameters their gradients."""

    def logits(self, hidden: Tensor, *parameters: Tensor) -> Tensor:
        self._leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        return self.plan.module._call_impl(self._leaf)

    def gradients(self, grad: Tensor, needed: Sequence[bool]) -> list[Tensor | None]:
        if torch.is_grad_enabled():
            raise RuntimeError("logits: of a head that FSDP gathers by itself, which has no second derivatives")
        torch.autograd.backward(self.graph()[0], grad, retain_graph=True)
        d_hidden, self._leaf.grad = self._leaf.grad, None
        return [d_hidden, *[None] * len(self.parameters)]


class PartitionedHeadCall(GatheredHeadCall):
    """One call of a head that DeepSpeed ZeRO-3 has partitioned: the hooks of its forward gather its parameters."""

    def __init__(self, plan: HeadPlan, hidden: Tensor) -> None:
        self.plan = plan
        Head.__init__(self, hidden, ())  # the memory of its parameters comes and goes

    def logits(self, hidden: Tensor, *parameters: Tensor) -> Tensor:
        if self.plan.record.is_over:
            raise RuntimeError(
                "logits: looked at after the forward of a model whose head ZeRO-3 has partitioned, where nobody tells "
                "if its weight has changed; look at them inside of the forward, or uninstall() for this call"
            )
        return super().logits(hidden, *parameters)


class _NotLazy(nn.Module):
    """Calls a head with its hooks and its own forward, and skips the lazy call."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Any:
        return self.head._call_impl(hidden)


class LazyCall:
    """What the head of a model runs in place of its own call: lazy in a thread that is in a forward with labels.

    In every other thread it is the head's own call.
    """

    def __init__(self, head: nn.Linear) -> None:
        self.head, self.plans = head, dict[int, HeadPlan]()  # of the threads that are in such a forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plan = self.plans.get(threading.get_ident())
        if plan is None:
            return self.head._call_impl(*args, **kwargs)
        why = refusal_of_inputs(self.head, args, kwargs)
        if why is not None:
            plan.record.report(why)
            return self.head._call_impl(*args, **kwargs)
        kind = GatheredHeadCall if fsdp.has_own_group(self.head) else HeadCall
        kind = PartitionedHeadCall if is_partitioned(self.head) else kind
        return lazy_logits(kind(plan, args[0]), Recorded(args[0], self.head.out_features))


class _Patches:
    """The heads that are patched, until no thread is in a forward: one may have read the patch and not called it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # of this record, never held while a model runs
        self.n_forwards = 0
        self.heads: list[nn.Linear] = []

    def patch(self, head: nn.Linear, plan: HeadPlan) -> LazyCall:
        with self.lock:
            call: Any = head._compiled_call_impl
            if not isinstance(call, LazyCall):
                call = head._compiled_call_impl = LazyCall(head)  # what nn.Module.__call__ runs
                self.heads.append(head)
            call.plans[threading.get_ident()] = plan
        return call

    @contextlib.contextmanager
    def forward_under_way(self) -> Iterator[None]:
        with self.lock:
            self.n_forwards += 1
        try:
            yield
        finally:
            with self.lock:
                self.n_forwards -= 1
                while self.heads and not self.n_forwards:
                    head = self.heads.pop()
                    if isinstance(head._compiled_call_impl, LazyCall):
                        del head._compiled_call_impl


_patches = _Patches()
forward_under_way = _patches.forward_under_way


def is_lazy_here(head: Any) -> bool:
    """Return whether a call of the head would be lazy in this thread."""
    call = getattr(head, "_compiled_call_impl", None)
    return isinstance(call, LazyCall) and threading.get_ident() in call.plans


@contextlib.contextmanager
def lazy_head(model: Any, options: dict[str, Any], *heads: Any) -> Iterator[CallRecord]:
    """Let the head of ``model`` return lazy logits to this thread; the record is to be ended with the call.

    The head is the first that can be fused: of ``heads``, which may hold it, and the model's output embeddings.
    """
    record, thread = CallRecord(model), threading.get_ident()
    for head in (*heads, model.get_output_embeddings()):
        if is_lazy_here(head):  # a call inside a call: the outer one counts
            record.is_inner = True
            yield record
            return
        keep_partitioned(head)
        reason, group = refusal(head)
        if reason is None and options.get("own_tokens"):
            reason, group = fsdp.shard_group(head)
        if reason is None:
            break
    if reason is not None:
        record.report(reason)
        yield record
        return
    with forward_under_way():
        call = _patches.patch(head, HeadPlan(head, group, options, record))
        try:
            yield record
        finally:
            del call.plans[thread]


def refusal(head: Any) -> tuple[str | None, Any]:
    """Return why the loss cannot be fused with ``head``, or None and the group that shares its rows."""
    if head is None:
        return "no output embeddings", None
    reason = refusal_of_module(head) or fsdp.refusal(head)
    if reason is not None:
        return reason, None
    own_group = fsdp.has_own_group(head)
    hooks = [*head._forward_hooks.values(), *head._forward_pre_hooks.values()]
    of_engine = is_partitioned(head) and all(getattr(h, "__module__", "").startswith("deepspeed.") for h in hooks)
    try:
        group = tensor_parallel_group(head, hooks=not (own_group or of_engine))
    except ValueError as error:
        return str(error), None
    if is_dtensor(head.weight) and group is None and not own_group:
        return "the head's weight is a DTensor, and no tensor parallelism cut it", None
    return None, group


def is_partitioned(head: Any) -> bool:
    """Return whether DeepSpeed ZeRO-3 has partitioned the head."""
    return hasattr(dict.get(head._parameters, "weight"), "ds_id")


def keep_partitioned(head: Any) -> None:
    """Let ZeRO-3 not gather a weight that is read in a forward, until the next forward of the engine."""
    parameters = getattr(head, "_parameters", None)
    if hasattr(parameters, "_in_forward"):
        parameters._in_forward = False  # type: ignore[union-attr]


def refusal_of_module(head: Any) -> str | None:
    """Return why ``head`` may do more than multiply by a weight that it has."""
    if any(GLOBAL_HOOKS) or nn.Linear.forward is not LINEAR_FORWARD:
        return "hooks of all modules, or another nn.Linear.forward, which the fused loss would skip"
    if fsdp.class_of(head) is not nn.Linear:
        return f"the head is a {type(head).__module__}.{type(head).__name__}, not an nn.Linear"
    if is_partitioned(head) and not torch.is_grad_enabled():
        return "DeepSpeed ZeRO-3 has partitioned the head, whose logits may be looked at later without gradients"
    if not isinstance(head._compiled_call_impl, LazyCall | None):
        return "the head is compiled"
    if head._backward_hooks or head._backward_pre_hooks:
        return "the head has backward hooks"
    weight = head.weight
    is_plain = type(weight) in (Tensor, nn.Parameter) or is_dtensor(weight)
    shape = tuple(getattr(weight, "ds_shape", weight.shape))
    if not is_plain or weight.dtype not in HEAD_DTYPES or len(shape) != 2:
        return f"the head's weight is a {type(weight).__name__} {weight.dtype} {shape}"
    return None


def refusal_of_inputs(head: nn.Linear, args: Any, kwargs: Any) -> str | None:
    """Return why a call of the head with these arguments cannot be fused."""
    if kwargs or len(args) != 1 or not isinstance(args[0], Tensor):
        return "a head called with other arguments than one tensor"
    (hidden,) = args
    if is_partitioned(head) and not hidden.requires_grad:
        return "hidden states without a gradient, of a head that DeepSpeed ZeRO-3 has partitioned"
    if has_no_values(hidden):
        return f"hidden states without values, {type(hidden).__name__} on {hidden.device}"
    autocasts = torch.is_autocast_enabled(hidden.device.type)
    if is_dtensor(hidden) or hidden.dim() < 2 or hidden.dtype not in HEAD_DTYPES:
        return f"hidden states that are {type(hidden).__name__} {hidden.dtype} {tuple(hidden.shape)}"
    dtype = fsdp.dtype_in_forward(head) if fsdp.has_own_group(head) else head.weight.dtype
    if hidden.device != head.weight.device or not (autocasts or hidden.dtype == dtype):
        return f"hidden states of {hidden.dtype} on {hidden.device}, alongside a head of {dtype}"
    return None
