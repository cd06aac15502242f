"""A head and its loss chunk by chunk: the loops over chunks, without and with gradients.

logits   [n, C] = hidden @ weight.T + bias      in a buffer that all chunks share, unless they are kept
logits -> statistics -> exchange -> outputs, gradient over the buffer, or in one of 16 bits alongside fp32 logits
d_hidden [n, D] = d_logits @ weight             summed over the ranks while the next products run
d_weight [C, D] = sum over chunks of d_logits.T @ hidden,  d_bias [C] = sum of d_logits
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import run
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_gather
from vocab_parallel_ce.head.chunks import parts_of
from vocab_parallel_ce.head.expected import factor_of
from vocab_parallel_ce.head.plan import LinearCall
from vocab_parallel_ce.head.products import HiddenStates, WeightGradient, fp32_factor, fp32_product, zero_ignored
from vocab_parallel_ce.plan import Call
from vocab_parallel_ce.run import Stats
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Head

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
Wanted = tuple[bool, bool, bool]  # which of these


class Products:
    """The matrix products of one walk over the chunks, and the gradients."""

    def __init__(
        self,
        linear: LinearCall,
        local: Head,
        targets: Any,
        wanted: Wanted,
        *,
        keeps: bool = False,
        kept: Tensor | None = None,
    ) -> None:
        """``keeps``: allocate memory for logits that are kept. ``kept``: the kept logits."""
        weight, bias, main_grad = local.weight, local.bias, linear.main_grad
        self.weight = weight.to(linear.head.dtype)
        self.bias = None if bias is None else bias.to(linear.head.logits_dtype)
        self.hidden = HiddenStates(linear, local.hidden, wanted[0])
        if keeps and linear.n_kept:
            kept = weight.new_empty(linear.n_kept, weight.shape[0], dtype=linear.head.logits_dtype)
        self.kept = kept  # [n, C]
        n_kept = 0 if kept is None or linear.head.logits_dtype != linear.head.dtype else kept.shape[0]
        longest = max((rows.stop - rows.start for rows in linear.chunks if rows.stop > n_kept), default=0)
        self.buffer = self.weight.new_empty(longest, weight.shape[0], dtype=linear.head.logits_dtype)
        self.d_buffer = self.buffer  # the gradient of the logits
        if linear.head.logits_dtype != linear.head.dtype:
            self.weight_of_logits = fp32_factor(self.weight)
            self.d_buffer = self.weight.new_empty(longest if any(wanted) else 0, weight.shape[0])
        self.d_weight: WeightGradient | None = None
        if wanted[1]:
            # A factor that only backward knows multiplies the fp32 sum.
            is_final = main_grad is None and linear.expected is None
            dtype = weight.dtype if is_final else torch.float32
            if linear.call.plan.gradient == "in_forward":
                main_grad = None  # backward adds to it
            self.d_weight = WeightGradient(self.weight, dtype=dtype, n_chunks=len(linear.chunks), main_grad=main_grad)
            self.ignored = linear.call.plan.loss.ignored(targets, linear.call.plan.options)
        self.d_bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if wanted[2] else None
        self.bias_dtype = None if bias is None else bias.dtype

    def logits_of(self, rows: slice, states: Tensor, *, again: bool = False) -> Tensor:
        """Return the logits of a chunk. Kept ones have memory of their own, which is filled already if ``again``."""
        if self.kept is None or rows.stop > self.kept.shape[0]:
            return self.logits(states)
        if not again:
            return self.logits(states, into=self.kept[rows])
        if self.d_buffer is self.buffer:
            return self.kept[rows]
        # Their gradient has memory of another dtype, laid out as the buffer's.
        return self.buffer[: states.shape[0]].copy_(self.kept[rows])

    def d_logits_of(self, logits: Tensor) -> Tensor:
        """Return memory for the gradient of a chunk's logits: theirs, unless they have another dtype."""
        return logits if self.d_buffer is self.buffer else self.d_buffer[: logits.shape[0]]

    def logits(self, states: Tensor, first: int = 0, into: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states, ``into`` or in the buffer from its row ``first``."""
        logits = self.buffer[first : first + states.shape[0]] if into is None else into
        if logits.dtype != states.dtype:
            fp32_product(states, self.weight_of_logits.t(), logits)
            return logits if self.bias is None else logits.add_(self.bias)
        if self.bias is None:
            return torch.mm(states, self.weight.t(), out=logits)
        return torch.addmm(self.bias, states, self.weight.t(), out=logits)

    def write_d_hidden(self, d_logits: Tensor, d_hidden: Tensor | None) -> None:
        """Fill ``d_hidden [n, D]``, of any dtype, from ``d_logits [n, C]``, if it is wanted."""
        if d_hidden is None:
            return
        if d_hidden.dtype == d_logits.dtype:
            torch.mm(d_logits, self.weight, out=d_hidden)
        else:
            d_hidden.copy_(torch.mm(d_logits, self.weight))

    def finish_chunk(self, rows: slice, states: Tensor, d_hidden: Tensor | None, d_logits: Tensor) -> None:
        """Reduce ``d_hidden``, and meanwhile add the chunk to d_weight and d_bias."""
        if d_hidden is not None:
            self.hidden.begin_reduce(rows, d_hidden)
        if self.d_weight is not None:
            # An ignored token's gradient is 0, and 0 times a NaN in its hidden state would not be.
            counted = states if self.ignored is None else zero_ignored(states, self.ignored[rows])
            self.d_weight.add(d_logits, counted)
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=torch.float32)

    def gradients(self) -> Gradients:
        """Return the gradients of all chunks, each in its tensor's dtype. Drops the buffers."""
        del self.buffer, self.d_buffer, self.kept
        return (
            self.hidden.gradient(),
            None if self.d_weight is None else self.d_weight.rounded(),
            None if self.d_bias is None else self.d_bias.to(self.bias_dtype),
        )


def forward(
    linear: LinearCall, local: Head, targets: Any, *, keeps: bool = False
) -> tuple[TokenOutputs, Stats, Tensor | None]:
    """Return the outputs of all tokens, the statistics of all ranks, and with ``keeps`` the logits that are kept.

    Collectives: one all_gather of statistics, or, of a loss that has a second exchange, two per chunk; with sequence
    parallelism one of hidden states per chunk.
    """
    call, plan, n_rows = linear.call, linear.call.plan, linear.n_rows
    outputs = run.new_outputs(plan, (n_rows,), local.hidden)
    products = Products(linear, local, targets, (False, False, False), keeps=keeps)
    stats = run.new_statistics(plan, n_rows, local.hidden)
    own = stats[0][plan.rank : plan.rank + 1]
    for rows, states in products.hidden.chunks():
        logits, of_rows = products.logits_of(rows, states), plan.loss.at(targets, rows)
        if plan.launchers.second is None:
            plan.launchers.statistics(logits, of_rows, (own[:, rows],), 0)
        else:
            # What the second exchange needs is there while the chunk's logits are.
            found, _ = run.local_statistics(plan, logits, of_rows)
            run.exchange(call, logits, of_rows, found)
            for each, of_chunk in zip(stats, found, strict=True):
                each[:, rows] = of_chunk
        del logits, of_rows  # a teacher's head makes the next ones
    if plan.launchers.second is None:
        all_gather_stats(stats[0], plan.rank, call.group)
    plan.launchers.outputs(stats, targets, call.divisor, outputs)
    return _in_token_order(linear, outputs), stats, products.kept


def forward_with_gradients(
    linear: LinearCall, local: Head, targets: Any, wanted: Wanted
) -> tuple[TokenOutputs, Gradients, Stats]:
    """Return the outputs of all tokens, and the gradients of the sum of the losses, times expected grad_outputs.

    Also return the statistics of all ranks, if backward may recompute.

    Collectives: one or two all_gathers of statistics per chunk, and those of :class:`HiddenStates`.
    """
    outputs = run.new_outputs(linear.call.plan, (linear.n_rows,), local.hidden)
    products = Products(linear, local, targets, wanted)
    stats = run.new_statistics(linear.call.plan, linear.n_rows, local.hidden) if linear.head.recomputes else ()
    for rows, states in products.hidden.chunks():
        _chunk_with_gradients(linear, products, states, targets, outputs, stats, rows)
    gradients = products.gradients()
    return _in_token_order(linear, outputs), gradients, stats


def _chunk_with_gradients(
    linear: LinearCall,
    products: Products,
    states: Tensor,
    targets: Any,
    outputs: TokenOutputs,
    stats: Stats,
    rows: slice,
) -> None:
    """Fill the outputs and the statistics of one chunk, and add its gradients. The buffer is free afterwards."""
    begun, call, expected = [], linear.call, linear.expected
    plan = call.plan
    for part in parts_of(states.shape[0], plan.n_ranks):
        own_rows = slice(rows.start + part.start, rows.start + part.stop)
        given = products.logits(states[part], part.start), plan.loss.at(targets, own_rows)
        begun.append((part, own_rows, given, _begin_exchange(call, *given)))
    d_hidden = products.hidden.new_gradient(rows)
    for part, own_rows, given, exchange in begun:
        found, d_logits = _at(outputs, own_rows), products.d_buffer[part]
        if exchange is None:
            run.one_pass(call, *given, found)  # d_logits are in the memory of the logits
        else:
            of_part, handle = exchange
            run.exchange(call, *given, of_part, handle)
            if stats:
                for each, part_stats in zip(stats, of_part, strict=True):
                    each[:, own_rows] = part_stats
            plan.launchers.outputs(of_part, given[1], call.divisor, found)
            grads = GradOutputs() if expected is None else GradOutputs(expected.of_rows[own_rows])
            plan.launchers.gradient(*given, of_part, call.divisor, grads, d_logits)
        products.write_d_hidden(d_logits, None if d_hidden is None else d_hidden[part])
    products.finish_chunk(rows, states, d_hidden, products.d_buffer[: states.shape[0]])


def _begin_exchange(call: Call, logits: Tensor, targets: Any) -> tuple[Stats, Any] | None:
    """Return a part's statistics, and the handle of their exchange, None for one rank; None if one launch does all."""
    plan = call.plan
    if run.takes_one_pass(plan, logits.shape[0]):
        return None
    stats, _ = run.local_statistics(plan, logits, targets)
    if plan.n_ranks == 1:
        return stats, None
    return stats, begin_all_gather(stats[0], stats[0].narrow(0, plan.rank, 1), call.group)


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
    if linear.overflow is not None:
        grads = GradOutputs(*[None if grad is None else grad * linear.overflow for grad in grads])
    if grads.loss is None:
        grads = grads._replace(loss=stats[0].new_zeros(()))
    n_rows = stats[0].shape[1]
    grads = GradOutputs(*[None if grad is None else to_rows(linear, grad, n_rows) for grad in grads])
    call, products = linear.call, Products(linear, local, targets, wanted, kept=kept)
    plan = call.plan
    for rows, states in products.hidden.chunks():
        logits = products.logits_of(rows, states, again=True)
        of_rows = GradOutputs(*[None if grad is None else grad[rows] for grad in grads])
        own_stats = tuple([each[:, rows].contiguous() for each in stats])
        d_logits = products.d_logits_of(logits)
        run.write_gradient(plan, logits, plan.loss.at(targets, rows), own_stats, call.divisor, of_rows, d_logits)
        d_hidden = products.hidden.new_gradient(rows)
        products.write_d_hidden(d_logits, d_hidden)
        del logits
        products.finish_chunk(rows, states, d_hidden, d_logits)
        del d_logits
    return products.gradients()


def scaled(linear: LinearCall, gradients: Gradients, grad_output: Tensor) -> Gradients:
    """Multiply the gradients of a reduced loss by its grad_output in place; add the weight's to main_grad."""
    if linear.overflow is not None:
        grad_output = grad_output * linear.overflow
    # Of ``data``, autograd counts no versions: a backward after this one may recompute.
    d_hidden, d_weight, d_bias = (None if grad is None else grad.data for grad in gradients)
    for grad in (d_hidden, d_weight, None if d_bias is None else d_bias.unsqueeze(0)):
        if grad is not None:
            linear.call.plan.launchers.element_mul(grad, grad_output.reshape(1).expand(grad.shape[0]))
    if d_weight is not None and linear.main_grad is not None:
        linear.main_grad.add_(d_weight)
    return d_hidden, d_weight, d_bias


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


def _in_token_order(linear: LinearCall, outputs: TokenOutputs) -> TokenOutputs:
    """Return outputs of rows as outputs of tokens; a reduced loss is summed."""

    def of_tokens(values: Tensor | None, of_ignored: float) -> Any:
        return values if values is None or linear.order is None else linear.order.to_tokens(values, of_ignored)

    loss = of_tokens(outputs.loss, 0.0) if linear.call.plan.reduction == "none" else outputs.loss.sum()
    others = [of_tokens(values, 0.0) for values in outputs[1:-1]]
    if linear.overflow is not None:  # tokens were left out whose 0 would be wrong
        loss, *others = (None if values is None else values * linear.overflow for values in (loss, *others))
    return TokenOutputs._make((loss, *others, of_tokens(outputs.predictions, -1)))


def _at(outputs: TokenOutputs, rows: slice) -> TokenOutputs:
    loss, *others = (None if values is None else values[rows] for values in outputs)
    assert loss is not None
    return TokenOutputs(loss, *others)


def to_rows(linear: LinearCall, grad_output: Tensor, n_rows: int) -> Tensor:
    """Return ``[M]``, or ``[M, k]`` of a loss of k values: a grad_output of one element for all, or of each token."""
    if grad_output.dim() == 0:
        return grad_output.reshape(1).expand(n_rows)
    grad_output = grad_output.reshape(-1, *linear.call.plan.row_shape)
    return grad_output if linear.order is None else linear.order.to_rows(grad_output, 0.0)
