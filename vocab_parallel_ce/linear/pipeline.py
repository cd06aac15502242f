"""A head and its loss chunk by chunk: the loops over chunks, without and with gradients.

    hidden [n, D] -> logits [n, C] in a buffer that all chunks share -> statistics -> exchange
                  -> loss, gradient over the buffer -> d_hidden [n, D], d_weight [C, D] += ...

A chunk's statistics travel in two parts, each while the other is computed. Its ``d_hidden`` is summed over
the ranks while ``d_weight`` and the next chunk's logits are computed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import pipeline
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_gather
from vocab_parallel_ce.linear.chunks import parts_of
from vocab_parallel_ce.linear.hidden_states import HiddenStates
from vocab_parallel_ce.linear.matmul import WeightGradient, write_d_hidden, write_logits, zero_ignored
from vocab_parallel_ce.linear.plan import Inputs, LinearCall
from vocab_parallel_ce.spec import TokenOutputs, is_ignored

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
OF_NO_TOKEN = (0.0, 0.0, -1)  # entropy, lse and prediction of an ignored token


class Products:
    """The matrix products of one walk over the chunks, and the sums of their gradients.

    ``wanted`` says of hidden, weight and bias if they need a gradient. The weight's is added to
    ``main_grad``, if given.
    """

    def __init__(
        self,
        linear: LinearCall,
        inputs: Inputs,
        wanted: tuple[bool, bool, bool] = (False, False, False),
        main_grad: Tensor | None = None,
    ) -> None:
        call, (hidden, weight, bias, labels) = linear.call, inputs
        self.weight = weight.to(linear.dtype)
        self.bias = None if bias is None else bias.to(linear.dtype)
        self.hidden = HiddenStates(
            hidden,
            linear.dtype,
            chunks=linear.chunks,
            order=linear.order,
            group=call.group,
            n_ranks=call.plan.n_ranks,
            sequence_parallel=linear.sequence_parallel,
            reduces=linear.reduces,
        )
        longest = max((stop - start for start, stop in linear.chunks), default=0)
        self.buffer = self.weight.new_empty(longest, weight.shape[0])  # logits, then their gradient
        self.wants_hidden = wanted[0]
        self.d_weight: WeightGradient | None = None
        if wanted[1]:
            # What main_grad receives later stays fp32 until then.
            dtype = weight.dtype if linear.main_grad is None else torch.float32
            self.d_weight = WeightGradient(self.weight, dtype=dtype, n_chunks=len(linear.chunks), main_grad=main_grad)
            self.is_ignored = is_ignored(labels, call.plan.options)
        self.d_bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if wanted[2] else None
        self.bias_dtype = None if bias is None else bias.dtype

    def logits(self, states: Tensor, first: int = 0) -> Tensor:
        """Return the logits of hidden states, in the buffer from its row ``first``."""
        logits = self.buffer[first : first + states.shape[0]]
        write_logits(states, self.weight, self.bias, logits)
        return logits

    def new_d_hidden(self, rows: slice) -> Tensor | None:
        """Return memory for the gradient of a chunk's hidden states, if it is wanted."""
        return self.hidden.new_gradient(rows) if self.wants_hidden else None

    def write_d_hidden(self, d_logits: Tensor, d_hidden: Tensor | None, first: int = 0) -> None:
        """Fill ``d_hidden`` from row ``first`` on, if it is wanted."""
        if d_hidden is not None:
            write_d_hidden(d_logits, self.weight, d_hidden[first : first + d_logits.shape[0]])

    def finish_chunk(self, rows: slice, states: Tensor, d_hidden: Tensor | None) -> None:
        """Reduce a filled ``d_hidden`` and meanwhile add the chunk to the gradients of weight and bias.

        The buffer holds the gradient of the chunk's logits.
        """
        if d_hidden is not None:
            self.hidden.begin_reduce(rows, d_hidden)
        d_logits = self.buffer[: states.shape[0]]
        if self.d_weight is not None:
            # An ignored token's gradient is 0, and 0 times a NaN in its hidden state would not be.
            self.d_weight.add(d_logits, zero_ignored(states, self.is_ignored[rows]))
        if self.d_bias is not None:
            self.d_bias += d_logits.sum(0, dtype=torch.float32)

    def gradients(self) -> Gradients:
        """Return the gradients of all chunks, each in its tensor's dtype. Frees the buffer."""
        del self.buffer
        return (
            self.hidden.gradient() if self.wants_hidden else None,
            None if self.d_weight is None else self.d_weight.rounded(),
            None if self.d_bias is None else self.d_bias.to(self.bias_dtype),
        )


def forward(linear: LinearCall, inputs: Inputs) -> tuple[TokenOutputs, Tensor]:
    """Return the outputs of all rows, and the ``[R, M, K]`` statistics of all ranks.

    Collectives: one all_gather of statistics; with sequence parallelism one of hidden states per chunk.
    """
    call, labels, plan = linear.call, inputs.labels, linear.call.plan
    outputs = pipeline.new_outputs(call, labels.shape, inputs.hidden)
    products = Products(linear, inputs)
    shape = (plan.n_ranks, labels.shape[0], len(plan.options.statistics))
    stats = inputs.hidden.new_empty(shape, dtype=torch.float32)
    own = stats[plan.rank : plan.rank + 1]
    for rows, states in products.hidden.chunks():
        logits, of_chunk = products.logits(states), own[:, rows]
        plan.launchers.online_softmax(logits, labels[rows], of_chunk, 0, None, shard=plan.shard, options=plan.options)
    all_gather_stats(stats, plan.rank, call.group)
    plan.launchers.token_outputs(stats, labels, call.num_items, outputs, shard=plan.shard, options=plan.options)
    return outputs, stats


def forward_with_gradients(
    linear: LinearCall, inputs: Inputs, wanted: tuple[bool, bool, bool]
) -> tuple[TokenOutputs, Gradients]:
    """Return the outputs of all rows, and the gradients of the sum of the losses.

    Collectives: one or two all_gathers of statistics per chunk, and those of :class:`HiddenStates`.
    """
    outputs = pipeline.new_outputs(linear.call, inputs.labels.shape, inputs.hidden)
    products = Products(linear, inputs, wanted)
    for rows, states in products.hidden.chunks():
        _chunk_with_gradients(linear, products, states, inputs.labels[rows], _at(outputs, rows), rows)
    return outputs, products.gradients()


def _chunk_with_gradients(
    linear: LinearCall, products: Products, states: Tensor, labels: Tensor, outputs: TokenOutputs, rows: slice
) -> None:
    """Fill the outputs of one chunk and add its gradients. Nothing of it refers to the buffer afterwards."""
    d_hidden = products.new_d_hidden(rows)
    parts = [
        _begin(linear, products, states, labels, slice(*part))
        for part in parts_of(states.shape[0], linear.call.plan.n_ranks)
    ]
    for part in parts:
        _finish(linear, part, _at(outputs, part.rows))
        products.write_d_hidden(part.logits, d_hidden, part.rows.start)
    products.finish_chunk(rows, states, d_hidden)


class _Part(NamedTuple):
    """A part of a chunk whose statistics are on their way."""

    rows: slice  # in the chunk
    logits: Tensor
    labels: Tensor
    exchange: Any  # None: one rank, no statistics yet
    stats: Tensor | None
    divisor: Tensor | None


def _begin(linear: LinearCall, products: Products, states: Tensor, labels: Tensor, rows: slice) -> _Part:
    """Compute a part's logits, and send its statistics."""
    call, labels = linear.call, labels[rows]
    logits = products.logits(states[rows], rows.start)
    if call.plan.n_ranks == 1:
        return _Part(rows, logits, labels, None, None, None)
    stats, divisor = pipeline.local_statistics(call, logits, labels)
    exchange = begin_all_gather(stats, stats.narrow(0, call.plan.rank, 1), call.group)
    return _Part(rows, logits, labels, exchange, stats, divisor)


def _finish(linear: LinearCall, part: _Part, outputs: TokenOutputs) -> None:
    """Fill a part's outputs, and write the gradient over its logits."""
    if part.stats is None:
        pipeline.forward_with_gradient(linear.call, part.logits, part.labels, outputs)
        return
    part.exchange.wait()
    pipeline.fill_with_gradient(linear.call, part.stats, part.divisor, part.logits, part.labels, outputs)


def backward(
    linear: LinearCall,
    inputs: Inputs,
    stats: Tensor,
    divisor: Tensor | None,
    wanted: tuple[bool, bool, bool],
    grad_loss: Tensor | None,
    grad_entropy: Tensor | None,
) -> Gradients:
    """Return the gradients from logits that are computed again, and forward's statistics and divisor."""
    plan, labels = linear.call.plan, inputs.labels
    if grad_loss is None:
        grad_loss = stats.new_zeros(())
    elif linear.overflow is not None:
        grad_loss = grad_loss * linear.overflow
    grad_output = _to_rows(linear, grad_loss, labels)
    of_entropy = None if grad_entropy is None else _to_rows(linear, grad_entropy, labels)
    products = Products(linear, inputs, wanted, linear.main_grad)
    for rows, states in products.hidden.chunks():
        logits = products.logits(states)
        plan.launchers.cross_entropy(
            logits,
            stats[:, rows].contiguous(),
            labels[rows],
            divisor,
            grad_output[rows],
            None if of_entropy is None else of_entropy[rows],
            None,
            logits,
            shard=plan.shard,
            options=plan.options,
        )
        d_hidden = products.new_d_hidden(rows)
        products.write_d_hidden(logits, d_hidden)
        del logits
        products.finish_chunk(rows, states, d_hidden)
    return products.gradients()


def scaled(linear: LinearCall, gradients: Gradients, grad_output: Tensor) -> Gradients:
    """Multiply the gradients of a reduced loss by its grad_output in place; add the weight's to main_grad."""
    if linear.overflow is not None:
        grad_output = grad_output * linear.overflow
    d_hidden, d_weight, d_bias = (None if grad is None else grad.detach() for grad in gradients)
    for grad in (d_hidden, d_weight, None if d_bias is None else d_bias.unsqueeze(0)):
        if grad is not None:
            linear.call.plan.launchers.element_mul(grad, grad_output.reshape(1).expand(grad.shape[0]))
    if d_weight is not None and linear.main_grad is not None:
        linear.main_grad.add_(d_weight)
    return d_hidden, d_weight, d_bias


def in_token_order(linear: LinearCall, outputs: TokenOutputs) -> TokenOutputs:
    """Return outputs of rows as outputs of tokens; a reduced loss is summed."""
    order, (loss, *others) = linear.order, outputs
    if linear.call.plan.reduction != "none":
        loss = loss.sum()
    elif order is not None:
        loss = order.to_tokens(loss, 0.0)
    if linear.overflow is not None:
        loss = loss * linear.overflow  # tokens were left out whose 0 would be wrong
    if order is not None:
        others = [
            None if values is None else order.to_tokens(values, nothing)
            for values, nothing in zip(others, OF_NO_TOKEN, strict=True)
        ]
    return TokenOutputs(loss, *others)


def _at(outputs: TokenOutputs, rows: slice) -> TokenOutputs:
    loss, *others = (None if values is None else values[rows] for values in outputs)
    assert loss is not None
    return TokenOutputs(loss, *others)


def _to_rows(linear: LinearCall, grad_output: Tensor, labels: Tensor) -> Tensor:
    """Return ``[M]``: a grad_output of one element for all rows, or of one per token."""
    if grad_output.dim() == 0:
        return grad_output.reshape(1).expand(labels.shape[0])
    grad_output = grad_output.reshape(-1)
    return grad_output if linear.order is None else linear.order.to_rows(grad_output, 0.0)
