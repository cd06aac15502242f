"""A head and its loss chunk by chunk: the loop over chunks, without and with gradients.

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
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_gather, begin_reduce_scatter
from vocab_parallel_ce.head.chunks import parts_of
from vocab_parallel_ce.head.expected import factor_of
from vocab_parallel_ce.head.plan import LinearCall
from vocab_parallel_ce.head.products import Gradients, Products, Wanted
from vocab_parallel_ce.layout import cut, per_row, sum_losses
from vocab_parallel_ce.losses.base import Stats
from vocab_parallel_ce.plan import Plan, has_no_hooks
from vocab_parallel_ce.program import make, step
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Head, Record, at

NOTHING: Wanted = (False, False, False)


# The outputs of all tokens; the gradients of the sum of the losses, times expected grad_outputs; the statistics of all
# ranks, if backward may recompute; the logits that are kept for backward.
Found = tuple[TokenOutputs, Gradients, Stats, Tensor | None]


def forward(linear: LinearCall, local: Head, targets: Any, wanted: Wanted = NOTHING) -> Found:
    """Return the outputs, the gradients that are ``wanted``, statistics and logits.

    Collectives: one all_gather of statistics, or, of a loss that has a second exchange, two per chunk. With gradients
    one or two per chunk, or twice as many. Also those of :class:`HiddenStates`.
    """
    if not (linear.head.is_one_program and linear.order is None and linear.overflow is None):
        return _forward(linear, local, targets, wanted)
    plan, shape = linear.call.plan, local.hidden.shape
    hidden = local.hidden if len(shape) == 2 else local.hidden.reshape(-1, shape[-1])
    tensors = (hidden, local.weight, local.bias, linear.call.divisor, linear.is_valid, *targets)
    # As run.run_by_form does, without its frame.
    *outputs, d_hidden, d_weight, d_bias = plan.run(None, _one_chunk, tensors, plan, linear, wanted)
    if d_hidden is not None and len(shape) > 2:
        d_hidden = d_hidden.view(shape)
    return TokenOutputs(*outputs), (d_hidden, d_weight, d_bias), (), None


def _one_chunk(plan: Plan, linear: LinearCall, wanted: Wanted, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the outputs and the gradients of a call that may have a program."""
    hidden, weight, bias, divisor, is_valid, *targets = tensors
    linear = linear._replace(call=linear.call._replace(divisor=divisor), is_valid=is_valid)
    local = Head(hidden, weight, bias)  # type: ignore[arg-type]
    outputs, gradients, *_ = _forward(linear, local, plan.loss.Targets(*targets), wanted)
    return *outputs, *gradients


def _forward(linear: LinearCall, local: Head, targets: Any, wanted: Wanted) -> Found:
    """Return the same, of any call. Long groups have all outputs first, and then their gradients."""
    if linear.head.sequence_parallel and linear.objective is not None and linear.objective.groups is not None:
        return _forward_of_whole(linear, local, targets, wanted)
    kept, n_long = None, linear.n_long
    outputs, outputs_by_row = _new_outputs(linear, local.hidden)
    # Backward overwrites kept logits, which saved-tensor hooks would see.
    if linear.n_kept and linear.head.needs_gradient and has_no_hooks():
        kept = local.weight.new_empty(linear.n_kept, local.weight.shape[0], dtype=linear.head.logits_dtype)
    if not any(wanted):
        stats = _fill_outputs(linear, local, targets, kept, outputs_by_row)
        if linear.objective is not None:
            linear.objective.fill(slice(0, linear.n_rows), outputs_by_row)
        return _returned(linear, outputs), (None, None, None), stats, kept
    expected, order = linear.expected, linear.order
    grads = GradOutputs(expected if expected is None or order is None else order.to_rows(expected, 0.0))
    stats = run.new_statistics(linear.call.plan, linear.n_rows, local.hidden) if linear.head.recomputes else ()
    if n_long:
        assert linear.objective is not None
        rows, chunks = slice(0, n_long), tuple([each for each in linear.chunks if each.stop <= n_long])
        of_long = _rows_of(outputs_by_row, rows)
        stats = _fill_outputs(linear._replace(chunks=chunks), local, at(targets, rows), kept, of_long)
        grads = linear.objective.fill_and_differentiate(rows, of_long, linear.scale)
    products = Products(linear, local, targets, wanted, kept)
    del kept  # the walk is their last reader, and ends before the gradients are rounded
    gradients = _walk(products, stats, grads, outputs_by_row)
    return _returned(linear, outputs), gradients, stats, None


def _forward_of_whole(linear: LinearCall, local: Head, targets: Any, wanted: Wanted) -> Found:
    """Return the same with sequence parallelism, whose ranks have parts of groups: of all hidden states, gathered."""
    part, group = local.hidden.contiguous(), linear.call.group
    whole = part.new_empty(*linear.head.shape, part.shape[-1])
    begin_all_gather(whole, part, group).wait()
    head = linear.head._replace(sequence_parallel=False, reduces=False)
    found = _forward(linear._replace(head=head), local._replace(hidden=whole), targets, wanted)
    outputs, (d_hidden, d_weight, d_bias), stats, kept = found
    if d_hidden is not None:
        summed, d_hidden = d_hidden, torch.empty_like(part)
        begin_reduce_scatter(d_hidden, summed, group).wait()
    return outputs, (d_hidden, d_weight, d_bias), stats, kept


def _fill_outputs(linear: LinearCall, local: Head, targets: Any, kept: Tensor | None, outputs: TokenOutputs) -> Stats:
    """Fill the outputs of all rows, and the logits to be kept. Return the statistics of all ranks."""
    plan = linear.call.plan
    stats = run.new_statistics(plan, linear.n_rows, local.hidden)
    _walk(Products(linear, local, targets, NOTHING, kept, fills_kept=True), stats, None)
    if plan.launchers.second is None:
        all_gather_stats(stats[0], plan.rank, linear.call.group)
    plan.launchers.outputs(stats, targets, linear.call.divisor, outputs)
    return stats


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
    return _walk(Products(linear, local, targets, wanted, kept), stats, grads)


def _walk(
    products: Products, stats: Stats, grads: GradOutputs | None, outputs: TokenOutputs | None = None
) -> Gradients:
    """Walk over all chunks, and return the gradients; ``grads`` are of rows, unless an objective has them.

    Forward has ``outputs`` to fill, and perhaps ``stats``; ``grads`` are None if it is to fill ``stats`` alone. For
    backward, and of long groups, ``stats`` are those of forward.
    """
    linear, plan = products.linear, products.linear.call.plan
    for rows, states, logits, d_logits in products.chunks():
        if grads is None:
            _fill_statistics(linear, rows, logits, plan.loss.at(products.targets, rows), stats)
        else:
            to_fill = None if rows.stop <= linear.n_long else outputs
            parts = _parts(products, rows, logits, d_logits, stats if to_fill is None else None)
            while parts:
                _fill_part(linear, parts.pop(0), stats, grads, to_fill)
            products.add_gradients(rows, states, d_logits)
        del logits, d_logits  # the buffers end before the gradients are rounded
    return products.gradients()


def _fill_statistics(linear: LinearCall, rows: slice, logits: Tensor, targets: Any, stats: Stats) -> None:
    """Fill a chunk's rows of ``stats``: those of this rank, or of all if there is a second exchange."""
    call, plan = linear.call, linear.call.plan
    if plan.launchers.second is None:
        own = cut(stats[0], slice(plan.rank, plan.rank + 1))
        run.run_by_form(plan, run.fill_statistics, (logits, cut(own, rows, dim=1), *targets))
        return
    # What the second exchange needs is there while the chunk's logits are.
    of_chunk = run.run_by_form(plan, run.statistics, (logits, *targets))
    run.exchange(call, logits, targets, of_chunk)
    for each, of_rows in zip(stats, of_chunk, strict=True):
        each[:, rows] = of_rows


class Part(NamedTuple):
    """Some rows of a chunk."""

    rows: slice  # of all chunks
    logits: Tensor
    d_logits: Tensor  # memory of their gradient
    targets: Any
    stats: Stats | None  # None for one_pass
    handle: Any  # of their exchange, None for one rank


def _parts(products: Products, rows: slice, logits: Tensor, d_logits: Tensor, known: Stats | None) -> list[Part]:
    """Return a chunk's parts, whose exchanges have begun; with statistics that are ``known`` one part."""
    call, plan, parts = products.linear.call, products.linear.call.plan, list[Part]()
    targets = plan.loss.at(products.targets, rows)
    groups = None if products.linear.objective is None else products.linear.objective.groups
    ends = () if groups is None else groups.ends_in(rows)
    of_parts = parts_of(logits.shape[0], plan.n_ranks if known is None else 1, ends)
    for of_chunk in of_parts:
        part_rows = slice(rows.start + of_chunk.start, rows.start + of_chunk.stop)
        part_targets = targets if len(of_parts) == 1 else at(targets, of_chunk)
        part_logits, stats, handle = cut(logits, of_chunk), None, None
        gradient = part_logits if d_logits is logits else cut(d_logits, of_chunk)
        if known is not None:
            stats = tuple([cut(each, part_rows, dim=1).contiguous() for each in known])
        elif not run.takes_one_pass(plan, part_logits.shape[0]):
            stats = run.run_by_form(plan, run.statistics, (part_logits, *part_targets))
            if plan.n_ranks > 1:
                handle = begin_all_gather(stats[0], stats[0].narrow(0, plan.rank, 1), call.group)
        parts.append(Part(part_rows, part_logits, gradient, part_targets, stats, handle))
        if products.hidden.unreduced is not None:
            products.hidden.begin_reduce()  # before the other part's exchange: that waits less than a product would
    return parts


def _fill_part(linear: LinearCall, part: Part, stats: Stats, grads: GradOutputs, outputs: TokenOutputs | None) -> None:
    """Fill a part's gradient; before that its outputs, and its rows of ``stats``, if there are some to fill."""
    call, plan, targets, divisor = linear.call, linear.call.plan, part.targets, linear.call.divisor
    if outputs is not None:
        part_outputs = _rows_of(outputs, part.rows)
        if part.stats is None:
            run.run_by_form(plan, run.one_pass, (part.logits, divisor, *targets, *part_outputs))
            return
        run.exchange(call, part.logits, targets, part.stats, part.handle)
        count = make(part.logits, 1, dtype=torch.int32) if linear.head.counts_in_launch else None
        run.run_by_form(plan, run.fill_part, (*part.stats, divisor, count, *targets, *part_outputs))
        for each, part_each in zip(stats if linear.head.recomputes else (), part.stats, strict=False):
            each[:, part.rows] = part_each
        divisor = divisor if count is None else count
    if linear.objective is None or outputs is None:
        grads = _rows_of(grads, part.rows)
    else:
        grads = linear.objective.fill_and_differentiate(part.rows, part_outputs, linear.scale)
    if linear.objective is not None:
        targets = linear.objective.counted(targets, grads, plan.options.ignore_index)
    elif linear.scale is not None:
        divisor = linear.scale.reciprocal() if divisor is None else divisor / linear.scale
    assert part.stats is not None
    run.fill_gradient(plan, part.logits, (divisor, *part.stats), targets, grads, part.d_logits)


def _rows_of(record: Record, rows: slice) -> Record:
    """Return outputs, or gradients of them, of some rows."""
    return record._make([None if each is None else cut(each, rows) for each in record])


def scaled(linear: LinearCall, gradients: Gradients, grad_output: Tensor) -> Gradients:
    """Multiply the gradients of a reduced loss by its grad_output in place; add the weight's to main_grad."""
    if linear.overflow is not None:
        grad_output = grad_output * linear.overflow
    # Of ``data``, autograd counts no versions: a backward after this one may recompute.
    d_hidden, d_weight, d_bias = [None if grad is None else grad.data for grad in gradients]
    plan = linear.call.plan
    # As run.run_by_form does, without its frame.
    plan.run(None, _scale, (grad_output, d_hidden, d_weight, d_bias), plan)
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
    linear: LinearCall, gradients: Gradients, grad_output: Tensor, dtypes: tuple[torch.dtype, torch.dtype | None]
) -> Gradients:
    """Multiply by what the expected grad_output lacks, or by the quotient of grad_output and forward's scale.

    The gradients of weight and bias are fp32 still, and get their ``dtypes``.
    """
    factor = grad_output.reshape(-1)
    if linear.expected is not None:
        assert linear.is_valid is not None
        factor = factor_of(linear.expected, factor, linear.is_valid)
    if linear.scale is not None:
        factor = factor / linear.scale
    if linear.overflow is not None:
        factor = factor * linear.overflow
    # Of ``data``, autograd counts no versions: a backward after this one may recompute.
    d_hidden, d_weight, d_bias = (None if grad is None else grad.data for grad in gradients)
    if d_hidden is not None:
        d_hidden.mul_(factor)
    if d_bias is not None:
        d_bias = torch.mul(d_bias, factor).to(dtypes[1])
    if d_weight is not None and linear.main_grad is not None:
        linear.main_grad.addcmul_(d_weight, factor)
    elif d_weight is not None:
        rounded = torch.empty_like(d_weight, dtype=dtypes[0])
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
