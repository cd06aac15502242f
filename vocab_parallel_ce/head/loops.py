"""A head and its loss chunk by chunk: the loops over chunks, without and with gradients.

logits   [n, C] = hidden @ weight.T + bias      in a buffer that all chunks share, unless they are kept
logits -> statistics -> exchange -> outputs, gradient over the buffer, or in one of 16 bits alongside fp32 logits
d_hidden [n, D] = d_logits @ weight             summed over the ranks while the next chunk's kernels run
d_weight [C, D] = sum over chunks of d_logits.T @ hidden,  d_bias [C] = sum of d_logits
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import run
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_gather
from vocab_parallel_ce.head.chunks import parts_of
from vocab_parallel_ce.head.expected import factor_of
from vocab_parallel_ce.head.plan import LinearCall
from vocab_parallel_ce.head.products import Gradients, Products, Wanted
from vocab_parallel_ce.layout import cut, per_row
from vocab_parallel_ce.plan import Call, Plan
from vocab_parallel_ce.program import make, step
from vocab_parallel_ce.reference import sum_losses
from vocab_parallel_ce.run import Stats
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Head, at


def forward(
    linear: LinearCall, local: Head, targets: Any, *, keeps: bool = False
) -> tuple[TokenOutputs, Stats, Tensor | None]:
    """Return the outputs of all tokens, the statistics of all ranks, and with ``keeps`` the logits that are kept.

    Collectives: one all_gather of statistics, or, of a loss that has a second exchange, two per chunk; with sequence
    parallelism one of hidden states per chunk.
    """
    call, plan, n_rows, kept = linear.call, linear.call.plan, linear.n_rows, None
    outputs, by_row = _new_outputs(linear, local.hidden)
    if keeps and linear.n_kept:
        kept = local.weight.new_empty(linear.n_kept, local.weight.shape[0], dtype=linear.head.logits_dtype)
    products = Products(linear, local, targets, (False, False, False), kept, fills_kept=True)
    stats = run.new_statistics(plan, n_rows, local.hidden)
    local_stats = cut(stats[0], slice(plan.rank, plan.rank + 1))
    for rows, _, logits, _ in products.chunks():
        chunk_targets = plan.loss.at(targets, rows)
        if plan.launchers.second is None:
            run.launched(plan, run.fill_statistics, (logits, cut(local_stats, rows, dim=1), *chunk_targets))
        else:
            # What the second exchange needs is there while the chunk's logits are.
            chunk_stats = run.launched(plan, run.statistics, (logits, *chunk_targets))
            run.exchange(call, logits, chunk_targets, chunk_stats)
            for each, chunk_each in zip(stats, chunk_stats, strict=True):
                each[:, rows] = chunk_each
        del logits, chunk_targets  # a teacher's head makes the next ones
    if plan.launchers.second is None:
        all_gather_stats(stats[0], plan.rank, call.group)
    plan.launchers.outputs(stats, targets, call.divisor, by_row)
    if linear.objective is not None:
        linear.objective.fill(slice(0, n_rows), by_row)
    return _returned(linear, outputs), stats, kept


def forward_with_gradients(
    linear: LinearCall, local: Head, targets: Any, wanted: Wanted
) -> tuple[TokenOutputs, Gradients, Stats]:
    """Return the outputs of all tokens, and the gradients of the sum of the losses, times expected grad_outputs.

    Also return the statistics of all ranks, if backward may recompute.

    Collectives: one or two all_gathers of statistics per chunk, twice as many of a loss with a second exchange, and
    those of :class:`HiddenStates`.
    """
    if linear.is_one_program:
        return *_of_one_program(linear, local, targets, wanted), ()
    return _chunk_by_chunk(linear, local, targets, wanted)


def _chunk_by_chunk(
    linear: LinearCall, local: Head, targets: Any, wanted: Wanted
) -> tuple[TokenOutputs, Gradients, Stats]:
    """Return the same, of a call that may have a program too."""
    outputs, by_row = _new_outputs(linear, local.hidden)
    products = Products(linear, local, targets, wanted)
    stats = run.new_statistics(linear.call.plan, linear.n_rows, local.hidden) if linear.head.recomputes else ()
    grads = GradOutputs() if linear.expected is None else GradOutputs(linear.expected.by_row)
    gradients = _gradients(products, stats, grads, by_row)
    return _returned(linear, outputs), gradients, stats


def _of_one_program(linear: LinearCall, local: Head, targets: Any, wanted: Wanted) -> tuple[TokenOutputs, Gradients]:
    """Return the same of a call that may have a program, which keeps no statistics."""
    shape = local.hidden.shape
    hidden = local.hidden if len(shape) == 2 else local.hidden.reshape(-1, shape[-1])
    tensors = (hidden, local.weight, local.bias, linear.call.divisor, linear.is_valid, *targets)
    *outputs, d_hidden, d_weight, d_bias = run.launched(linear.call.plan, _one_chunk, tensors, linear, wanted)
    if d_hidden is not None and len(shape) > 2:
        d_hidden = d_hidden.view(shape)
    return TokenOutputs(*outputs), (d_hidden, d_weight, d_bias)


def _one_chunk(plan: Plan, linear: LinearCall, wanted: Wanted, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the outputs and the gradients of a call of one chunk and one rank."""
    hidden, weight, bias, divisor, is_valid, *targets = tensors
    linear = linear._replace(call=linear.call._replace(divisor=divisor), is_valid=is_valid)
    local = Head(hidden, weight, bias)  # type: ignore[arg-type]
    outputs, gradients, _ = _chunk_by_chunk(linear, local, plan.loss.Targets(*targets), wanted)
    return *outputs, *gradients


def backward(
    linear: LinearCall,
    local: Head,
    targets: Any,
    stats: Stats,
    wanted: Wanted,
    grads: GradOutputs,
    kept: Tensor | None = None,
) -> Gradients:
    """Return the gradients from forward's statistics and logits: kept ones, or computed again.

    Overwrites ``kept``.
    """
    grads = run.with_loss(grads, stats[0])
    grads = GradOutputs(*[None if grad is None else _to_rows(linear, grad) for grad in grads])
    return _gradients(Products(linear, local, targets, wanted, kept), stats, grads)


def _gradients(products: Products, stats: Stats, grads: GradOutputs, outputs: TokenOutputs | None = None) -> Gradients:
    """Return the gradients of all chunks; ``grads`` are of rows, unless an objective has them.

    Forward has ``outputs`` to fill, and perhaps ``stats``. For backward, ``stats`` are those of forward.
    """
    for rows, states, logits, d_logits in products.chunks():
        _fill_gradient(products, rows, logits, d_logits, stats, grads, outputs)
        products.add_gradients(rows, states, d_logits)
        del logits, d_logits  # the buffers end before the gradients are rounded
    return products.gradients()


class Part(NamedTuple):
    """Some rows of a chunk."""

    of_chunk: slice
    rows: slice  # of all chunks
    logits: Tensor
    targets: Any
    stats: Stats | None  # None for one_pass
    handle: Any  # of their exchange, None for one rank


def _fill_gradient(
    products: Products,
    rows: slice,
    logits: Tensor,
    d_logits: Tensor,
    stats: Stats,
    grads: GradOutputs,
    outputs: TokenOutputs | None,
) -> None:
    """Fill a chunk's ``d_logits``, and its outputs if there are some."""
    linear, parts = products.linear, list[Part]()
    plan, divisor = linear.call.plan, linear.call.divisor
    counts = outputs is not None and linear.head.counts_in_launch
    count = make(logits, 1, dtype=torch.int32) if counts else None
    targets = plan.loss.at(products.targets, rows)
    of_parts = parts_of(logits.shape[0], 1 if outputs is None else plan.n_ranks)
    for of_chunk in of_parts:
        part_rows = slice(rows.start + of_chunk.start, rows.start + of_chunk.stop)
        part_logits = cut(logits, of_chunk)
        part_targets = targets if len(of_parts) == 1 else at(targets, of_chunk)
        if outputs is None:
            exchange: Any = tuple([cut(each, part_rows, dim=1).contiguous() for each in stats]), None
        else:
            exchange = _begin_exchange(linear.call, part_logits, part_targets)
        parts.append(Part(of_chunk, part_rows, part_logits, part_targets, *exchange))
        if products.hidden.unreduced is not None:
            products.hidden.begin_reduce()  # before the other part's exchange: that waits less than a product would
    del targets, part_targets  # they may hold a teacher's logits
    while parts:
        part = parts.pop(0)
        part_grads = None if outputs is None else _fill_part(linear, part, stats, outputs, count)
        if part.stats is not None:
            if part_grads is None:
                of_part = [None if each is None else cut(each, part.rows) for each in grads]
                part_grads = GradOutputs._make(of_part)
            gradient = part.logits if d_logits is logits else cut(d_logits, part.of_chunk)
            part_targets, found = part.targets, (count if counts else divisor, *part.stats)
            if linear.objective is not None:
                part_targets = linear.objective.counted(part_targets, plan.options.ignore_index)
            run.fill_gradient(plan, part.logits, found, part_targets, part_grads, gradient)
            del part_targets
        del part


def _fill_part(
    linear: LinearCall, part: Part, stats: Stats, outputs: TokenOutputs, count: Tensor | None
) -> GradOutputs | None:
    """Fill a part's outputs, and its statistics among ``stats`` if they are kept.

    Return an objective's derivatives by the outputs, if there is one. ``one_pass`` also writes the gradient over the
    logits.
    """
    call, plan = linear.call, linear.call.plan
    part_outputs = TokenOutputs._make([None if each is None else cut(each, part.rows) for each in outputs])
    if part.stats is None:
        run.launched(plan, run.one_pass, (part.logits, call.divisor, *part.targets, *part_outputs))
        return None
    run.exchange(call, part.logits, part.targets, part.stats, part.handle)
    run.launched(plan, run.fill_part, (*part.stats, call.divisor, count, *part.targets, *part_outputs))
    for each, part_each in zip(stats, part.stats, strict=False):  # forward may keep none
        each[:, part.rows] = part_each
    return None if linear.objective is None else linear.objective.fill_and_differentiate(part.rows, part_outputs)


def _begin_exchange(call: Call, logits: Tensor, targets: Any) -> tuple[Stats | None, Any]:
    """Return a part's statistics, and the handle of their exchange, None for one rank; no statistics for one_pass."""
    plan = call.plan
    if run.takes_one_pass(plan, logits.shape[0]):
        return None, None
    stats = run.launched(plan, run.statistics, (logits, *targets))
    if plan.n_ranks == 1:
        return stats, None
    return stats, begin_all_gather(stats[0], stats[0].narrow(0, plan.rank, 1), call.group)


def scaled(linear: LinearCall, gradients: Gradients, grad_output: Tensor) -> Gradients:
    """Multiply the gradients of a reduced loss by its grad_output in place; add the weight's to main_grad."""
    if linear.overflow is not None:
        grad_output = grad_output * linear.overflow
    # Of ``data``, autograd counts no versions: a backward after this one may recompute.
    d_hidden, d_weight, d_bias = [None if grad is None else grad.data for grad in gradients]
    run.launched(linear.call.plan, _scale, (grad_output, d_hidden, d_weight, d_bias))
    if d_weight is not None and linear.main_grad is not None:
        linear.main_grad.add_(d_weight)
    return d_hidden, d_weight, d_bias


def _scale(
    plan: Plan, factor: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None
) -> tuple[()]:
    """Multiply gradients by ``factor []`` in place."""
    for grad in (d_hidden, d_weight, None if d_bias is None else d_bias.unsqueeze(0)):
        if grad is not None:
            plan.launchers.element_mul(grad, per_row(factor, grad))
    return ()


def scaled_by_factor(
    linear: LinearCall, gradients: Gradients, grad_output: Tensor, weight_dtype: torch.dtype
) -> Gradients:
    """Multiply the gradients of unreduced losses by what the expected grad_output lacks; the weight's is fp32 still."""
    assert linear.expected is not None
    factor = factor_of(linear.expected, grad_output.reshape(-1))
    if linear.overflow is not None:
        factor = factor * linear.overflow
    d_hidden, d_weight, d_bias = (None if grad is None else grad.detach() for grad in gradients)
    for grad in (d_hidden, d_bias):
        if grad is not None:
            grad.mul_(factor)
    if d_weight is not None and linear.main_grad is not None:
        linear.main_grad.addcmul_(d_weight, factor)
    elif d_weight is not None:
        rounded = torch.empty_like(d_weight, dtype=weight_dtype)
        d_weight = torch.mul(d_weight, factor, out=rounded)
    return d_hidden, d_weight, d_bias


def _new_outputs(linear: LinearCall, like: Tensor) -> tuple[TokenOutputs, TokenOutputs]:
    """Allocate the outputs, and return them as :func:`_returned` takes them, and by rows: the same memory.

    They have the tokens' shape at once if rows are tokens, since a Function should return no view.
    """
    n_rows, shape = linear.n_rows, linear.head.shape
    if linear.order is not None or len(shape) == 1:
        outputs = run.new_outputs(linear.call.plan, (n_rows,), like)
        return outputs, outputs
    outputs = run.new_outputs(linear.call.plan, shape, like)
    rows = [None if each is None else each.view(n_rows, *each.shape[len(shape) :]) for each in outputs]
    return outputs, TokenOutputs._make(rows)


def total_of(linear: LinearCall) -> Tensor:
    """Return the reduced loss ``[]`` of an objective, of which every row's is there."""
    assert linear.objective is not None
    total = linear.objective.total()
    return total if linear.overflow is None else total * linear.overflow


def _returned(linear: LinearCall, outputs: TokenOutputs) -> TokenOutputs:
    """Return the outputs of :func:`_new_outputs` in the order of the tokens; a reduced loss is summed."""
    if linear.call.plan.reduction != "none":
        total = make(outputs.loss, dtype=outputs.loss.dtype)
        step(sum_losses, outputs.loss, total)
        outputs = outputs._replace(loss=total)
    if linear.order is None and linear.overflow is None:
        return outputs
    values = outputs._asdict()
    for name, value in values.items():
        if value is not None and value.dim() and linear.order is not None:
            value = linear.order.to_tokens(value, -1 if name == "predictions" else 0.0, linear.head.shape)
        if value is not None and linear.overflow is not None and name != "predictions":
            value = value * linear.overflow  # tokens were left out whose 0 would be wrong
        values[name] = value
    return TokenOutputs(**values)


def _to_rows(linear: LinearCall, grad_output: Tensor) -> Tensor:
    """Return ``[M]``, or ``[M, k]`` of a loss of k values: a grad_output of one element for all, or of each token."""
    if linear.overflow is not None:
        grad_output = grad_output * linear.overflow
    if grad_output.dim() == 0:
        return grad_output.expand(linear.n_rows)
    if len(linear.head.shape) > 1:
        grad_output = grad_output.reshape(-1, *linear.call.plan.row_shape)
    return grad_output if linear.order is None else linear.order.to_rows(grad_output, 0.0)
