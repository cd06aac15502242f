"""The path of a call over logits: statistics -> exchange -> outputs, gradient. One autograd Function for all losses.

    logits [N, C] --statistics--> [N, K] --all_gather--> [R, N, K] --> outputs [N], gradient [N, C]

``divisor [1]`` is what every loss and its gradient is divided by: the tokens of a mean, or the sum of their labels'
class weights; the items of a sum. A loss that needs what the whole vocabulary comes to before it can sum has a second
exchange.

Before its gradient every backward runs :func:`run_backward`, of a head too: it refuses what cannot run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from vocab_parallel_ce import checks, in_place
from vocab_parallel_ce.collectives import all_gather_stats
from vocab_parallel_ce.in_place import counts_of, current_age, keeps_graph, mark_overwritten
from vocab_parallel_ce.layout import overwritable, per_row, source_and_new, walkable
from vocab_parallel_ce.losses.base import Stats
from vocab_parallel_ce.plan import Call, Plan, is_view_in_graph
from vocab_parallel_ce.program import make, step
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs

Found = TypeVar("Found")
N_OUTPUTS, N_GRADS = len(TokenOutputs._fields), len(GradOutputs._fields)  # those after N_GRADS have no gradient

_is_batch = torch._C._functorch.is_legacy_batchedtensor  # as is_grads_batched makes them


HANDED_ON = (
    "cross-entropy: backward ran a second time, but the first had its gradient in the logits' storage and has handed "
    "it on; to run backward again, pass retain_graph=True to the first, with gradient='auto' or 'out_of_place' "
    "(TransformerEngine's overwrite_input=False)"
)
CHANGED = (
    "cross-entropy: the logits, the tensor that they are a view of, or another tensor of the call were overwritten "
    "before backward read them; if another loss wrote over the logits, ask for gradient='out_of_place' there"
)


def new_outputs(plan: Plan, shape: Sequence[int], like: Tensor, *, has_losses: bool = True) -> TokenOutputs:
    """Allocate the outputs that were asked for; without the rows' losses if nobody reads them.

    An unreduced loss is no view of something larger: autograd forbids to change a view that a Function
    returns, as ``loss += auxiliary_loss`` does.
    """
    loss: Any = make(like, *shape, *plan.row_shape, dtype=plan.dtype) if has_losses else None
    return TokenOutputs(loss, **{n: make(like, *shape, dtype=dtype) for n, dtype in plan.other_outputs.items()})


def new_statistics(plan: Plan, n_rows: int, like: Tensor) -> Stats:
    """Allocate the statistics of all ranks."""
    return tuple([make(like, plan.n_ranks, n_rows, width, dtype=plan.dtype) for width in plan.launchers.widths])


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
    dtype = plan.dtype if plan.mean_over == "weights" else torch.int32
    divisor = make(stats[0], 1, dtype=dtype)
    step(partial(_fill_divisor, plan), divisor, stats[0], *targets)
    return divisor


def _fill_divisor(plan: Plan, divisor: Tensor, stats: Tensor, *targets: Tensor | None) -> None:
    if plan.mean_over == "weights":
        index = plan.options.statistics.index("label_weight")
        # One rank has the label. To index with ... takes microseconds longer.
        torch.sum(stats.select(2, index).sum(dim=0), dim=0, keepdim=True, out=divisor)
    elif (ignored := plan.loss.ignored(plan.loss.Targets(*targets), plan.options)) is None:
        divisor.fill_(stats.shape[1])
    else:
        torch.sum(~ignored.reshape(-1), dim=0, keepdim=True, dtype=torch.int32, out=divisor)


def fill_outputs(
    plan: Plan, stats: Stats, targets: Any, divisor: Tensor | None, outputs: TokenOutputs
) -> tuple[TokenOutputs, Tensor | None]:
    """Fill ``outputs`` from the statistics of all ranks, and return them and the divisor, which a mean makes.

    The loss of a reduced call is their sum.
    """
    total = None if plan.reduction == "none" else make(stats[0], dtype=plan.dtype)
    if plan.mean_over == "rows" and 0 < stats[0].shape[1] <= plan.launchers.counted_rows:
        count = make(stats[0], 1, dtype=torch.int32)
        plan.launchers.outputs(stats, targets, None, outputs, total, count)
        divisor = count
    else:
        divisor = divisor_of(plan, targets, stats) if plan.mean_over else divisor
        plan.launchers.outputs(stats, targets, divisor, outputs, total)
    return outputs if total is None else outputs._replace(loss=total), divisor


# Functions that may have programs take tensors and None alone, after the plan, and return a flat tuple of them.


def statistics(plan: Plan, logits: Tensor, *targets: Tensor | None) -> tuple[Any, ...]:
    """Return the statistics of all ranks, of which this rank's are filled."""
    stats = new_statistics(plan, logits.numel() // logits.shape[-1], logits)
    plan.launchers.statistics(logits, plan.loss.Targets(*targets), stats, plan.rank)
    return stats


def fill_statistics(plan: Plan, logits: Tensor, stats: Tensor, *targets: Tensor | None) -> tuple[Any, ...]:
    """Fill ``[1, N, K]``, the statistics of this rank."""
    plan.launchers.statistics(logits, plan.loss.Targets(*targets), (stats,), 0)
    return ()


def fill_part(plan: Plan, *tensors: Any) -> tuple[Any, ...]:
    """Fill a head's outputs of some rows, and a count that divides, if given.

    Statistics, divisor, count and targets are before the outputs.
    """
    n = len(plan.launchers.widths)
    stats, divisor, count = tensors[:n], *tensors[n : n + 2]
    targets, outputs = plan.loss.Targets(*tensors[n + 2 : -N_OUTPUTS]), TokenOutputs(*tensors[-N_OUTPUTS:])
    counted = () if count is None else (None, count)
    plan.launchers.outputs(stats, targets, divisor, outputs, *counted)
    return ()


def one_pass(plan: Plan, logits: Tensor, divisor: Tensor | None, *others: Any) -> tuple[Any, ...]:
    """Fill the outputs, which are last; the gradient replaces the logits, which must be ``layout.overwritable``."""
    assert plan.launchers.one_pass is not None
    targets, outputs = plan.loss.Targets(*others[:-N_OUTPUTS]), TokenOutputs(*others[-N_OUTPUTS:])
    plan.launchers.one_pass(logits, targets, divisor, outputs)
    return ()


def element_mul(plan: Plan, grad: Tensor, factor: Tensor) -> tuple[Any, ...]:
    """Multiply row r of ``grad [..., C]`` by ``factor [N]`` in place."""
    plan.launchers.element_mul(grad, factor)
    return ()


def _outputs(plan: Plan, logits: Tensor, divisor: Tensor | None, *stats_and_targets: Any) -> tuple[Any, ...]:
    n = len(plan.launchers.widths)
    stats, targets = stats_and_targets[:n], plan.loss.Targets(*stats_and_targets[n:])
    has_losses = plan.reduction == "none" or not 0 < stats[0].shape[1] <= plan.launchers.summed_rows
    outputs = new_outputs(plan, logits.shape[:-1], logits, has_losses=has_losses)
    found, divisor = fill_outputs(plan, stats, targets, divisor, outputs)
    return *found[: plan.n_outputs], divisor


def _of_one_rank(plan: Plan, logits: Tensor, divisor: Tensor | None, *targets: Tensor | None) -> tuple[Any, ...]:
    n_rows = logits.numel() // logits.shape[-1]
    if 0 < n_rows <= plan.stored_rows:
        outputs, stats = new_outputs(plan, logits.shape[:-1], logits), new_statistics(plan, n_rows, logits)
        plan.launchers.statistics(logits, plan.loss.Targets(*targets), stats, 0, outputs)
        return *outputs[: plan.n_outputs], None, *stats
    stats = statistics(plan, logits, *targets)
    return *_outputs(plan, logits, divisor, *stats, *targets), *stats


def _gradient(plan: Plan, *tensors: Any) -> tuple[Any, ...]:
    (logits, divisor), new, n = tensors[:2], tensors[-1], 2 + len(plan.launchers.widths)
    stats, targets = tensors[2:n], plan.loss.Targets(*tensors[n : -1 - N_GRADS])
    grads = GradOutputs(*[None if grad is None else per_row(grad, logits) for grad in tensors[-1 - N_GRADS : -1]])
    if plan.row_shape and grads.loss is not None:
        grads = grads._replace(loss=tensors[-1 - N_GRADS].reshape(-1, *plan.row_shape))
    plan.launchers.gradient(logits, targets, stats, divisor, grads, logits if new is None else new)
    return ()


def run_by_form(
    plan: Plan, function: Callable[..., tuple[Any, ...]], tensors: tuple[Any, ...], *others: Any
) -> tuple[Any, ...]:
    """Return ``function(plan, *others, *tensors)``, where the kind of call does not say in which form the tensors are.

    ``others`` are no part of a program's key: what is launched may depend on them only as far as the kind says it.
    """
    return plan.run(None, function, tensors, plan, *others)


def forward(call: Call, logits: Tensor, targets: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the outputs ``[...]`` or reduced, and the divisor and all statistics. Reads the logits once.

    The outputs are the fields of TokenOutputs up to the last that was asked for.
    """
    plan, divisor = call.plan, call.divisor
    of_divisor = None if divisor is None else divisor.dtype
    if plan.n_ranks == 1:
        found = plan.run(("forward", of_divisor), _of_one_rank, (logits, divisor, *targets), plan)
        return found[: plan.n_outputs], found[plan.n_outputs :]
    stats = plan.run("statistics", statistics, (logits, *targets), plan)
    exchange(call, logits, targets, stats)
    found = plan.run(("outputs", of_divisor), _outputs, (logits, divisor, *stats, *targets), plan)
    return found[: plan.n_outputs], (found[plan.n_outputs], *stats)


def forward_in_place(call: Call, logits: Tensor, targets: Any) -> tuple[tuple[Any, ...], Tensor]:
    """Return the outputs, and the gradient in the memory of ``logits``, or in a copy if they cannot be overwritten."""
    plan, grad = call.plan, overwritable(logits)
    if takes_one_pass(plan, grad.numel() // grad.shape[-1]):
        filled = new_outputs(plan, grad.shape[:-1], grad)
        run_by_form(plan, one_pass, (grad, call.divisor, *targets, *filled))
        total = filled.loss if plan.reduction == "none" else filled.loss.sum()
        outputs = total, *filled[1 : plan.n_outputs]
    else:
        outputs, found = forward(call, grad, targets)
        fill_gradient(plan, grad, found, targets, GradOutputs(), grad)
    raise_version(grad)
    return outputs, grad


def takes_one_pass(plan: Plan, n_rows: int) -> bool:
    """Whether one launch computes the outputs and the gradient of ``n_rows`` rows."""
    return plan.launchers.one_pass is not None and n_rows >= plan.launchers.one_pass_rows


def with_loss(grads: GradOutputs, like: Tensor) -> GradOutputs:
    """Return ``grads``, with 0 for a loss that was not used."""
    return grads if grads.loss is not None else grads._replace(loss=like.new_zeros((), dtype=torch.float32))


def fill_gradient(
    plan: Plan, logits: Tensor, found: Sequence[Any], targets: Any, grads: GradOutputs, grad_logits: Tensor
) -> None:
    """Fill ``grad_logits``, a new tensor or the logits themselves, from what forward has ``found``.

    ``grads`` are those of the outputs; None is 1 for the loss, and 0 for the others.
    """
    new = None if grad_logits is logits else grad_logits
    # A hook, as of a checkpoint, may have returned what was saved in another form.
    run_by_form(plan, _gradient, (logits, *found, *targets, *grads, new))


def raise_version(overwritten: Tensor) -> None:
    """Make autograd refuse to use a saved value that was overwritten."""
    if not is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)


def mark_constants(ctx: Any, outputs: Sequence[Tensor | None], plan: Plan) -> None:
    """Tell autograd which outputs have no gradient."""
    ctx.mark_non_differentiable(*[outputs[TokenOutputs._fields.index(name)] for name in plan.constants])


def run_backward(
    gradient: Callable[[Any, tuple[Any, ...], GradOutputs], Found],
    ctx: Any,
    grads: tuple[Any, ...],
    handed_on: str,
    overwritten: str | None = None,
) -> Found | None:
    """Return ``gradient(ctx, saved tensors, grads)``; None if no output was used: then nothing is read.

    It runs eagerly, under compiled autograd too, since it may overwrite.

    Raises:
        RuntimeError: in a recorded backward or a transform, even if no output was used; ``handed_on`` in a second one,
            after one that handed its memory on; ``overwritten``, or PyTorch's own error, if what is saved was.
    """
    if is_dynamo_compiling():
        return torch.compiler.disable(run_backward)(gradient, ctx, grads, handed_on, overwritten)
    if torch.is_grad_enabled():
        raise checks.recorded_backward(handed_on.partition(":")[0])
    # once_differentiable looks at grad_output alone: without requires_grad, a gradient is silently a constant.
    used = [grad for grad in grads if grad is not None]
    if checks.in_transform() or any(map(_is_batch, used)):
        raise RuntimeError(checks.IN_TRANSFORM)
    if any(map(Tensor.is_neg, used)):  # kernels read their memory
        grads = tuple([None if grad is None else grad.resolve_neg() for grad in grads])
    if len(used) > 1 and len(used) > len({*map(id, used)}):  # a kind is found faster if none is given twice
        grads = tuple([None if grad is None else grad.detach() for grad in grads])
    if not used:
        return None
    if ctx.handed_on:
        raise RuntimeError(handed_on)
    try:
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
    except RuntimeError as error:
        if overwritten is not None and "inplace operation" in str(error):
            raise RuntimeError(f"{overwritten} ({error})") from error
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


class OverLogits(torch.autograd.Function):
    """Saved: in_forward the gradient, in the logits' memory; else logits, divisor, statistics, targets."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Any, call: Call) -> Any:
        ctx.call, ctx.handed_on = call, False
        ctx.set_materialize_grads(False)
        plan = call.plan
        if plan.gradient == "auto":
            if not in_place.alone:
                in_place.measure()
        elif plan.gradient != "out_of_place":
            ctx.age = current_age()
        if plan.gradient == "in_forward":
            version = logits._version
            outputs, grad = forward_in_place(call, logits, targets)
            if grad is logits:
                mark_overwritten(logits, version, ctx.age)
            ctx.save_for_backward(grad)
        else:
            kept = source = logits
            if not logits.is_contiguous() or logits.is_neg():
                kept = logits if plan.gradient == "out_of_place" else overwritable(logits)
                source = walkable(kept)
            outputs, found = forward(call, source, targets)
            ctx.save_for_backward(kept, *found, *targets)
        if plan.constants:
            mark_constants(ctx, outputs, plan)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
        return run_backward(_logits_gradient, ctx, grads, HANDED_ON, CHANGED), None, None


# Function.apply without what it does for functorch's transforms, which plan_call refuses. A tensor that one left behind
# has no storage, which plan_call looks at.
over_logits: Callable[..., Any] = super(torch.autograd.Function, OverLogits).apply


def _logits_gradient(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Tensor:
    """Write the gradient over the logits, or into a new tensor."""
    plan: Plan = ctx.call.plan
    if plan.gradient == "in_forward":
        check_loss_alone(grads)
    # "auto": over the logits if nobody else can see them. It counts references: no variable may hold them before.
    if plan.gradient == "auto":
        ctx.handed_on = in_place.alone != [] and counts_of(saved) in in_place.alone and not keeps_graph()
    else:
        ctx.handed_on = plan.gradient != "out_of_place"
    kept: Tensor = saved[0]
    if ctx.handed_on:
        version = kept._version
        source = grad = kept.detach()
    else:
        source, grad = source_and_new(kept)
    if plan.gradient == "in_forward":
        assert grads.loss is not None
        run_by_form(plan, element_mul, (grad, per_row(grads.loss, grad)))
    else:
        new = None if source is grad else grad
        of_outputs = grads if grads.loss is not None else with_loss(grads, grad)
        # As run_by_form does, without its frame.
        plan.run(None, _gradient, (source, *saved[1:], *of_outputs, new), plan)
    if ctx.handed_on:
        increment_version(grad)  # autograd refuses kept; of a view in the graph, kept itself would rebuild the node
        if plan.gradient != "auto":
            mark_overwritten(kept, version, ctx.age)  # later losses refuse it
    return grad
