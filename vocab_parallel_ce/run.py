"""The path of a call over logits: statistics -> exchange -> outputs, gradient. One autograd Function for all losses.

    logits [N, C] --statistics--> [N, K] --all_gather--> [R, N, K] --> outputs [N], gradient [N, C]

``divisor [1]`` is what every loss and its gradient is divided by: the tokens of a mean, or the sum of their labels'
class weights; the items of a sum. A loss that needs what the whole vocabulary comes to before it can sum has a second
exchange.

Before its gradient every backward runs :func:`run_backward`, of a head too: it refuses what cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vocab_parallel_ce import checks
from vocab_parallel_ce.collectives import all_gather_stats
from vocab_parallel_ce.in_place import current_age, is_sole_owner, mark_overwritten, measure
from vocab_parallel_ce.layout import overwritable, per_row, source_and_new, walkable
from vocab_parallel_ce.plan import Call, Plan, is_view_in_graph
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

Stats = tuple[Tensor, ...]  # of each exchange, [R, N, K]
Found = TypeVar("Found")
N_GRADS = len(GradOutputs._fields)  # the outputs after these have no gradient

_in_transform = torch._C._are_functorch_transforms_active
_is_batch = torch._C._functorch.is_legacy_batchedtensor  # as is_grads_batched makes them


class Refusals(NamedTuple):
    """Errors of a kind of loss."""

    second: str  # a second backward, after one that handed its memory on
    overwritten: str | None = None  # what is saved was overwritten; None: PyTorch's own error


REFUSALS = Refusals(
    "cross-entropy: backward ran a second time, but the first had its gradient in the logits' storage and has handed "
    "it on; to run backward again, pass retain_graph=True to the first, with gradient='auto' or 'out_of_place' "
    "(TransformerEngine's overwrite_input=False)",
    "cross-entropy: the logits, the tensor that they are a view of, or another tensor of the call were overwritten "
    "before backward read them; if another loss wrote over the logits, ask for gradient='out_of_place' there",
)


def new_outputs(plan: Plan, shape: Sequence[int], like: Tensor) -> TokenOutputs:
    """Allocate the outputs that were asked for.

    An unreduced loss is no view of something larger: autograd forbids to change a view that a Function
    returns, as ``loss += auxiliary_loss`` does.
    """
    # PyTorch takes microseconds longer to read a torch.Size.
    loss = like.new_empty(*shape, *plan.row_shape, dtype=plan.dtype)
    if not plan.other_outputs:
        return TokenOutputs(loss)
    others = {name: like.new_empty(*shape, dtype=dtype) for name, dtype in plan.other_outputs.items()}
    return TokenOutputs(loss, **others)


def new_statistics(plan: Plan, n_rows: int, like: Tensor) -> Stats:
    """Allocate the statistics of all ranks."""
    widths = plan.launchers.widths
    first = like.new_empty(plan.n_ranks, n_rows, widths[0], dtype=plan.dtype)
    return (first,) if len(widths) == 1 else (first, like.new_empty(plan.n_ranks, n_rows, widths[1], dtype=plan.dtype))


def local_statistics(plan: Plan, logits: Tensor, targets: Any) -> tuple[Stats, Tensor | None]:
    """Return the statistics of all ranks, of which this rank's are filled, and ``[1]`` rows that it has counted."""
    stats = new_statistics(plan, logits.numel() // logits.shape[-1], logits)
    count = logits.new_empty(1, dtype=torch.int32) if plan.mean_over == "rows" and plan.loss.counts else None
    plan.launchers.statistics(logits, targets, stats, plan.rank, count)
    return stats, count


def exchange(call: Call, logits: Tensor, targets: Any, stats: Stats, begun: Any = None) -> None:
    """Fill the statistics of all ranks; ``begun`` is the handle of the first all_gather, if it is on its way."""
    plan = call.plan
    if plan.n_ranks == 1:
        return
    if begun is None:
        all_gather_stats(stats[0], plan.rank, call.group)
    else:
        begun.wait()
    if plan.launchers.second is not None:
        plan.launchers.second(logits, targets, stats, plan.rank)
        all_gather_stats(stats[1], plan.rank, call.group)


def divisor_of(plan: Plan, targets: Any, stats: Stats) -> Tensor:
    """Return ``[1]``, what divides the losses of a mean, of the same bits on all ranks."""
    if plan.mean_over == "weights":
        index = plan.options.statistics.index("target_weight")
        # One rank has the label. To index with ... takes microseconds longer.
        return stats[0].select(2, index).sum(dim=0).sum().view(1)
    ignored = plan.loss.ignored(targets, plan.options)
    if ignored is None:
        return stats[0].new_full((1,), stats[0].shape[1], dtype=torch.int64)
    return (~ignored).sum().view(1)


def fill_outputs(plan: Plan, stats: Stats, targets: Any, divisor: Tensor | None, outputs: TokenOutputs) -> TokenOutputs:
    """Fill ``outputs`` from the statistics of all ranks, and return them; the loss of a reduced call is their sum."""
    total = None if plan.reduction == "none" else outputs.loss.new_empty(())
    plan.launchers.outputs(stats, targets, divisor, outputs, total)
    return outputs if total is None else outputs._replace(loss=total)


def forward(
    call: Call, logits: Tensor, targets: Any, shape: Sequence[int]
) -> tuple[TokenOutputs, Stats, Tensor | None]:
    """Return the outputs, of ``shape`` or reduced, and the statistics and divisor. Reads the logits once."""
    plan, outputs, divisor = call.plan, new_outputs(call.plan, shape, logits), call.divisor
    n_rows = logits.numel() // logits.shape[-1]
    if 0 < n_rows <= plan.stored_rows:
        stats = new_statistics(plan, n_rows, logits)
        plan.launchers.statistics(logits, targets, stats, plan.rank, None, outputs)
        return outputs, stats, None
    stats, count = local_statistics(plan, logits, targets)
    exchange(call, logits, targets, stats)
    if plan.mean_over:
        divisor = divisor_of(plan, targets, stats) if count is None else count
    return fill_outputs(plan, stats, targets, divisor, outputs), stats, divisor


def forward_in_place(call: Call, logits: Tensor, targets: Any, shape: Sequence[int]) -> tuple[TokenOutputs, Tensor]:
    """Return the outputs, and the gradient in the memory of ``logits``, or in a copy if they cannot be overwritten."""
    plan, grad = call.plan, overwritable(logits)
    if takes_one_pass(plan, grad.numel() // grad.shape[-1]):
        outputs = new_outputs(plan, shape, grad)
        one_pass(call, grad, targets, outputs)
        if plan.reduction != "none":
            outputs = outputs._replace(loss=outputs.loss.sum())
    else:
        outputs, stats, divisor = forward(call, grad, targets, shape)
        plan.launchers.gradient(grad, targets, stats, divisor, GradOutputs(), grad)
    raise_version(grad)
    return outputs, grad


def takes_one_pass(plan: Plan, n_rows: int) -> bool:
    """Whether one launch computes the outputs and the gradient of ``n_rows`` rows."""
    return plan.launchers.one_pass is not None and n_rows >= plan.launchers.one_pass_rows


def one_pass(call: Call, logits: Tensor, targets: Any, outputs: TokenOutputs) -> None:
    """Fill ``outputs``; the gradient replaces ``logits``, which must be ``layout.overwritable``."""
    plan = call.plan
    assert plan.launchers.one_pass is not None
    counted, is_reduced = plan.mean_over != "", plan.reduction != "none"
    plan.launchers.one_pass(
        logits, targets, call.divisor, outputs, counted=counted, is_reduced=is_reduced, options=plan.options
    )


def write_gradient(
    plan: Plan,
    logits: Tensor,
    targets: Any,
    stats: Stats,
    divisor: Tensor | None,
    grads: GradOutputs,
    grad_logits: Tensor,
) -> None:
    """Fill ``grad_logits``, a new tensor or the logits themselves, from forward's statistics."""
    loss = logits.new_zeros(1, dtype=torch.float32) if grads.loss is None else grads.loss
    loss = loss.reshape(-1, *plan.row_shape) if plan.row_shape else per_row(loss, logits)
    others = [None if grad is None else per_row(grad, logits) for grad in grads[1:]] if plan.other_outputs else ()
    plan.launchers.gradient(logits, targets, stats, divisor, GradOutputs(loss, *others), grad_logits)


def raise_version(overwritten: Tensor) -> None:
    """Make autograd refuse to use a saved value that was overwritten."""
    if not is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)


def as_returned(ctx: Any, outputs: TokenOutputs, plan: Plan) -> tuple[Tensor | None, ...]:
    """Return outputs as an autograd Function does, up to the last that was asked for: a None takes time."""
    if plan.constants:
        ctx.mark_non_differentiable(*[getattr(outputs, name) for name in plan.constants])
    last = next(reversed(plan.other_outputs), "loss")
    return outputs[: 1 + TokenOutputs._fields.index(last)]


def run_backward(
    gradient: Callable[[Any, tuple[Any, ...], GradOutputs], Found],
    ctx: Any,
    grads: tuple[Tensor | None, ...],
    refusals: Refusals,
) -> Found | None:
    """Return ``gradient(ctx, saved tensors, grads)``; None if no output was used: then nothing is read.

    It runs eagerly, under compiled autograd too, since it may overwrite.

    Raises:
        RuntimeError: in a recorded backward or a transform, even if no output was used, and as ``refusals`` says.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.compiler.disable(run_backward)(gradient, ctx, grads, refusals)
    checks.check_no_double_backward(refusals.second.partition(":")[0])
    # once_differentiable looks at grad_output alone: without requires_grad, a gradient is silently a constant.
    used = [grad for grad in grads if grad is not None]
    if _in_transform() or any(map(_is_batch, used)):
        raise RuntimeError(checks.IN_TRANSFORM)
    grads = tuple([None if grad is None else grad.resolve_neg() for grad in grads])  # kernels read their memory
    if not used:
        return None
    if ctx.handed_on:
        raise RuntimeError(refusals.second)
    try:
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
    except RuntimeError as error:
        if refusals.overwritten is not None and "inplace operation" in str(error):
            raise RuntimeError(f"{refusals.overwritten} ({error})") from error
        raise
    return gradient(ctx, saved, GradOutputs(*grads[:N_GRADS]))


def check_loss_alone(grads: GradOutputs) -> None:
    """Raise if an output besides the loss got a gradient, which forward did not compute."""
    for name, grad in grads._asdict().items():
        if name != "loss" and grad is not None:
            raise RuntimeError(
                f"outputs: expected no gradient of {name!r} with gradient='in_forward', which computes that of the "
                "loss alone, got one; use gradient='in_backward', or detach the output"
            )


def mark_written(ctx: Any, kept: Tensor, logits: Tensor, version_before: int) -> None:
    """Make autograd refuse ``kept``, overwritten through ``logits``; of explicit in-place modes, later losses too."""
    increment_version(logits)  # the detached alias: of a view in the graph, it would rebuild the node
    if ctx.call.plan.gradient != "auto":
        mark_overwritten(kept, version_before, ctx.age)


class OverLogits(torch.autograd.Function):
    """Saved: in_forward the gradient, in the logits' memory; else logits, divisor, statistics, targets."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Any, call: Call) -> Any:
        ctx.call, ctx.handed_on = call, False
        ctx.set_materialize_grads(False)
        plan = call.plan
        *shape, _ = logits.shape  # to cut a torch.Size takes longer
        if plan.gradient == "auto":
            measure()
        elif plan.gradient != "out_of_place":
            ctx.age = current_age()
        if plan.gradient == "in_forward":
            version = logits._version
            outputs, grad = forward_in_place(call, logits, targets, shape)
            if grad is logits:
                mark_overwritten(logits, version, ctx.age)
            ctx.save_for_backward(grad)
        else:
            kept = source = logits
            if not logits.is_contiguous() or logits.is_neg():
                kept = logits if plan.gradient == "out_of_place" else overwritable(logits)
                source = walkable(kept)
            outputs, stats, divisor = forward(call, source, targets, shape)
            ctx.save_for_backward(kept, divisor, *stats, *targets)
        return as_returned(ctx, outputs, plan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        return run_backward(_logits_gradient, ctx, grads, REFUSALS), None, None


def _logits_gradient(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Tensor:
    """Write the gradient over the logits, or into a new tensor."""
    plan: Plan = ctx.call.plan
    if plan.gradient == "in_forward":
        check_loss_alone(grads)
    # "auto": over the logits if nobody else can see them. It counts references: no variable may hold them before.
    ctx.handed_on = is_sole_owner(saved) if plan.gradient == "auto" else plan.gradient != "out_of_place"
    kept: Tensor = saved[0]
    if ctx.handed_on:
        version = kept._version
        source = grad = kept.detach()
    else:
        source, grad = source_and_new(kept)
    if plan.gradient == "in_forward":
        assert grads.loss is not None
        plan.launchers.element_mul(grad, per_row(grads.loss, grad))
    else:
        n = 2 + len(plan.launchers.widths)
        write_gradient(plan, source, plan.loss.Targets(*saved[n:]), saved[2:n], saved[1], grads, grad)
    if ctx.handed_on:
        mark_written(ctx, kept, grad, version)
    return grad
