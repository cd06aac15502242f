"""The steps of a call: statistics -> exchange -> outputs and gradient.

    logits --online_softmax--> statistics [N, K] --all_gather--> [R, N, K] --> loss, grad_logits

``divisor [1]`` is what every loss and its gradient is divided by: the tokens of a mean, or the sum of their labels'
class weights; the items of a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import all_gather_stats
from vocab_parallel_ce.layout import flat, overwritable, per_row
from vocab_parallel_ce.plan import Call, Plan, is_view_in_graph
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.spec_outputs import at_temperature


def new_outputs(call: Call, shape: torch.Size, like: Tensor) -> TokenOutputs:
    """Allocate the outputs that were asked for.

    An unreduced loss is no view of something larger: autograd forbids to change a view that a Function
    returns, as ``loss += auxiliary_loss`` does.
    """
    plan = call.plan
    loss = like.new_empty(*shape, dtype=plan.dtype)  # PyTorch takes microseconds longer to read a torch.Size
    if not plan.other_outputs:
        return TokenOutputs(loss)
    others = {name: like.new_empty(*shape, dtype=dtype) for name, dtype in plan.other_outputs.items()}
    return TokenOutputs(loss, **others)


def local_statistics(
    call: Call, logits: Tensor, labels: Tensor, outputs: TokenOutputs | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return ``[R, N, K]`` statistics, of which this rank's are filled, and the divisor that is known without others'.

    The same launch fills ``outputs``, if given: there must be one rank, and no mean.
    """
    plan = call.plan
    stats = logits.new_empty(plan.n_ranks, labels.shape[0], plan.n_statistics, dtype=plan.dtype)
    counts = plan.reduction == "mean" and not call.divides_by_weights
    count = logits.new_empty(1, dtype=torch.int32) if counts else None
    plan.launchers.online_softmax(
        logits,
        labels,
        stats,
        plan.rank,
        count,
        outputs,
        call.num_items,
        shard=plan.shard,
        options=plan.options,
        class_weight=call.class_weight,
        temperature=call.temperature,
    )
    return stats, call.num_items if count is None else count


def gathered_statistics(call: Call, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the ``[R, N, K]`` statistics of all ranks, and the divisor."""
    stats, divisor = local_statistics(call, logits, labels)
    all_gather_stats(stats, call.plan.rank, call.group)
    return stats, divisor_of(call, stats) if call.divides_by_weights else divisor


def divisor_of(call: Call, stats: Tensor) -> Tensor | None:
    """Return ``[1]``, the items or the sum of the labels' class weights, which has the same bits on all ranks."""
    if not call.divides_by_weights:
        return call.num_items
    return stats[..., call.plan.options.statistics.index("target_weight")].sum().reshape(1)


def forward(
    call: Call, logits: Tensor, labels: Tensor, shape: torch.Size
) -> tuple[TokenOutputs, Tensor, Tensor | None]:
    """Return the outputs, of ``shape`` or reduced, and the statistics and divisor. Reads the logits once."""
    plan, outputs = call.plan, new_outputs(call, shape, logits)
    is_alone = plan.n_ranks == 1 and plan.reduction != "mean"
    stats, divisor = local_statistics(call, logits, labels, outputs if is_alone else None)
    if call.top is None:
        all_gather_stats(stats, plan.rank, call.group)
    else:
        call.top.collect(logits, labels, plan.shard, at_temperature(plan.options, call.temperature))
        call.top.gather(stats, plan.rank, call.group)
        if call.top.wants_rank:
            counts = call.top.count(plan.launchers, logits, stats, plan.shard)
            call.top.add_counts(counts, plan.n_ranks, call.group)
    if not is_alone:
        if call.divides_by_weights:
            divisor = divisor_of(call, stats)
        plan.launchers.token_outputs(stats, labels, divisor, outputs, shard=plan.shard, options=plan.options)
    return _reduced(call, outputs), stats, divisor


def forward_in_place(call: Call, logits: Tensor, labels: Tensor) -> tuple[TokenOutputs, Tensor]:
    """Return the outputs, and the gradient in the memory of ``logits``, or in a copy if they cannot be overwritten."""
    grad = overwritable(logits)
    outputs = new_outputs(call, labels.shape, grad)
    forward_with_gradient(call, grad, flat(labels), outputs)
    raise_version(grad)
    return _reduced(call, outputs), grad


def forward_with_gradient(call: Call, logits: Tensor, labels: Tensor, outputs: TokenOutputs) -> None:
    """Fill ``outputs``; the gradient replaces ``logits``, which must be ``layout.overwritable``."""
    plan = call.plan
    if plan.one_pass is not None:
        counted, losses = plan.reduction == "mean", outputs.loss.view(-1)
        plan.one_pass(logits, labels, call.num_items, losses, counted=counted, options=plan.options)
        return
    stats, divisor = gathered_statistics(call, logits, labels)
    fill_with_gradient(call, stats, divisor, logits, labels, outputs, logits)


def fill_with_gradient(
    call: Call,
    stats: Tensor,
    divisor: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    outputs: TokenOutputs,
    grad_logits: Tensor,
) -> None:
    """Fill ``outputs`` and ``grad_logits``, which may be ``logits``, from the statistics of all ranks."""
    plan = call.plan
    assert not any(plan.options.differentiable[1:]), "their gradients need grad_outputs, which backward knows"
    loss = None
    if plan.options.predictions:
        plan.launchers.token_outputs(stats, labels, divisor, outputs, shard=plan.shard, options=plan.options)
    else:
        loss = outputs.loss.view(-1)
    plan.launchers.cross_entropy(
        logits,
        stats,
        labels,
        divisor,
        GradOutputs(),
        loss,
        grad_logits,
        shard=plan.shard,
        options=plan.options,
        class_weight=call.class_weight,
    )


def write_gradient(
    plan: Plan,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    divisor: Tensor | None,
    grads: GradOutputs,
    grad_logits: Tensor,
    class_weight: Tensor | None = None,
    temperature: Tensor | None = None,
) -> None:
    """Fill ``grad_logits``, a new tensor or the logits themselves, from forward's statistics."""
    if grads.loss is None:
        grads = grads._replace(loss=logits.new_zeros(1, dtype=torch.float32))
    grads = GradOutputs(*[None if grad is None else per_row(grad, logits) for grad in grads])
    plan.launchers.cross_entropy(
        logits,
        stats,
        labels,
        divisor,
        grads,
        None,
        grad_logits,
        shard=plan.shard,
        options=plan.options,
        class_weight=class_weight,
        temperature=temperature,
    )


def raise_version(overwritten: Tensor) -> None:
    """Make autograd refuse to use a saved value that was overwritten."""
    if not is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)


def _reduced(call: Call, outputs: TokenOutputs) -> TokenOutputs:
    """Sum the losses, which are divided already, unless the reduction is none."""
    return outputs if call.plan.reduction == "none" else outputs._replace(loss=outputs.loss.sum())
