"""The steps of a call: statistics -> exchange -> outputs and gradient.

    logits --online_softmax--> statistics [N, K] --all_gather--> [R, N, K] --> loss, grad_logits

``divisor [1]`` is what every loss and its gradient is divided by: the tokens of a mean, the items of a sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import all_gather_stats, begin_all_gather
from vocab_parallel_ce.plan import Call, is_view_in_graph
from vocab_parallel_ce.spec import TokenOutputs


def new_outputs(call: Call, shape: torch.Size, like: Tensor) -> TokenOutputs:
    """Allocate the outputs that were asked for.

    An unreduced loss is no view of something larger: autograd forbids to change a view that a Function
    returns, as ``loss += auxiliary_loss`` does.
    """
    wanted = call.plan.options
    loss = like.new_empty(shape, dtype=torch.float32)
    if not (wanted.entropy or wanted.predictions):
        return TokenOutputs(loss, None, None, None)
    return TokenOutputs(
        loss,
        torch.empty_like(loss) if wanted.entropy else None,
        torch.empty_like(loss) if wanted.predictions else None,
        torch.empty_like(loss, dtype=torch.int64) if wanted.predictions else None,
    )


def local_statistics(
    call: Call, logits: Tensor, labels: Tensor, outputs: TokenOutputs | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return ``[R, N, K]`` statistics, of which this rank's are filled, and the divisor.

    The same launch fills ``outputs``, if given: there must be one rank, and no mean.
    """
    plan = call.plan
    shape = (plan.n_ranks, labels.shape[0], len(plan.options.statistics))
    stats = logits.new_empty(shape, dtype=torch.float32)
    n_valid = logits.new_empty(1, dtype=torch.int32) if plan.reduction == "mean" else None
    plan.launchers.online_softmax(
        logits, labels, stats, plan.rank, n_valid, outputs, call.num_items, shard=plan.shard, options=plan.options
    )
    return stats, call.num_items if n_valid is None else n_valid


def statistics(
    call: Call, logits: Tensor, labels: Tensor, outputs: TokenOutputs | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the statistics ``[R, N, K]`` of all ranks and the divisor; see :func:`local_statistics`."""
    stats, divisor = local_statistics(call, logits, labels, outputs)
    if call.plan.n_ranks > 1:
        all_gather_stats(stats, call.plan.rank, call.group)
    return stats, divisor


def begin_exchange(call: Call, stats: Tensor) -> Any:
    """Begin to fill ``stats [R, N, K]``, N > 0, with those of all ranks; its wait() must be called."""
    return begin_all_gather(stats, stats.narrow(0, call.plan.rank, 1), call.group)


def fill_outputs(call: Call, stats: Tensor, labels: Tensor, divisor: Tensor | None, outputs: TokenOutputs) -> None:
    """Fill ``outputs`` from the statistics of all ranks."""
    plan = call.plan
    plan.launchers.token_outputs(stats, labels, divisor, outputs, shard=plan.shard, options=plan.options)


def forward(
    call: Call, logits: Tensor, labels: Tensor, shape: torch.Size
) -> tuple[TokenOutputs, Tensor, Tensor | None]:
    """Return the outputs, of ``shape`` or reduced, and the statistics and divisor. Reads the logits once."""
    outputs = new_outputs(call, shape, logits)
    if call.plan.n_ranks == 1 and call.plan.reduction != "mean":
        stats, divisor = statistics(call, logits, labels, outputs)
    else:
        stats, divisor = statistics(call, logits, labels)
        fill_outputs(call, stats, labels, divisor, outputs)
    return reduced(call, outputs), stats, divisor


def write_gradient(
    call: Call,
    logits: Tensor,
    labels: Tensor,
    stats: Tensor,
    divisor: Tensor | None,
    *,
    into: Tensor,
    grad_output: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    loss: Tensor | None = None,
) -> None:
    """Fill ``into``, laid out as ``logits`` or the same tensor, and ``loss [N]`` if given."""
    plan = call.plan
    plan.launchers.cross_entropy(
        logits, stats, labels, divisor, grad_output, grad_entropy, loss, into, shard=plan.shard, options=plan.options
    )


def forward_with_gradient(call: Call, logits: Tensor, labels: Tensor, outputs: TokenOutputs) -> None:
    """Fill ``outputs``; the gradient replaces ``logits``, which must be ``layout.overwritable``."""
    plan = call.plan
    if plan.one_pass is not None:
        counted, losses = plan.reduction == "mean", outputs.loss.view(-1)
        plan.one_pass(logits, labels, call.num_items, losses, counted=counted, options=plan.options)
        return
    stats, divisor = statistics(call, logits, labels)
    fill_with_gradient(call, stats, divisor, logits, labels, outputs)


def fill_with_gradient(
    call: Call, stats: Tensor, divisor: Tensor | None, logits: Tensor, labels: Tensor, outputs: TokenOutputs
) -> None:
    """Do :func:`forward_with_gradient` from the statistics of all ranks."""
    assert not call.plan.options.entropy, "its gradient needs grad_entropy, so it is written in backward"
    loss = None
    if call.plan.options.predictions:
        fill_outputs(call, stats, labels, divisor, outputs)
    else:
        loss = outputs.loss.view(-1)
    write_gradient(call, logits, labels, stats, divisor, into=logits, loss=loss)


def reduced(call: Call, outputs: TokenOutputs) -> TokenOutputs:
    """Sum the losses, which are divided already, unless the reduction is none."""
    return outputs if call.plan.reduction == "none" else outputs._replace(loss=outputs.loss.sum())


def raise_version(overwritten: Tensor) -> None:
    """Make autograd refuse to use a saved value that was overwritten.

    Leaves out a view in a graph: autograd would rebuild its node, which then is no longer the one in the
    graph, and gradients for the view and hooks on it would be lost.
    """
    if not is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)
