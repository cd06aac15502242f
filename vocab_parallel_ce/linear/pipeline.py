"""A head and its loss chunk by chunk: the loops over chunks, without and with gradients.

    hidden [n, D] -> logits [n, C] in a buffer that all chunks share -> statistics -> exchange
                  -> loss, gradient over the buffer -> d hidden [n, D], d weight [C, D] += ...

A chunk's statistics travel in two parts, each while the other is worked on; its ``d hidden`` is summed over
the ranks while ``d weight`` and the next chunk's logits are computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import all_gather_stats
from vocab_parallel_ce.linear.chunks import parts_of
from vocab_parallel_ce.linear.hidden_states import Order, Tokens
from vocab_parallel_ce.linear.matmul import WeightGradient, cleared, write_hidden_gradient, write_logits
from vocab_parallel_ce.pipeline import Call
from vocab_parallel_ce.spec import TokenOutputs, is_ignored

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
OTHERS_OF_NO_TOKEN = (0.0, 0.0, -1)  # entropy, lse and prediction of an ignored row


class Inputs(NamedTuple):
    """The tensors of a call; labels of every place, the others as the caller has them."""

    hidden: Tensor  # [N, D], with sequence parallelism [N / R, D]
    weight: Tensor  # [C, D]
    bias: Tensor | None  # [C]
    labels: Tensor  # [M]


class LinearCall(NamedTuple):
    """One validated call: the loss of a chunk's logits, and how hidden states and weight take part."""

    call: Call  # of a sum or of none; a mean is a sum that is divided by the tokens that count
    dtype: torch.dtype  # of the products and the logits
    chunks: tuple[tuple[int, int], ...]  # places
    order: Order | None  # of the tokens at the places, where it is not their own
    sequence_parallel: bool
    reduces: bool
    main_grad: Tensor | None
    parameter: Tensor | None  # the weight as the caller has it, where it says what main_grad has

    def finished(self, outputs: TokenOutputs) -> TokenOutputs:
        """In the order of the tokens; a reduced loss summed."""
        order, (loss, *others) = self.order, outputs
        if self.call.reduction != "none":
            loss = loss.sum()
        elif order is not None:
            loss = order.put_back(loss, 0.0)
            if self.call.num_items is not None:
                # 1, or NaN where tokens that count were left out, whose 0 would be wrong.
                loss = loss * self.call.num_items
        if order is not None:
            others = [
                None if values is None else order.put_back(values, nothing)
                for values, nothing in zip(others, OTHERS_OF_NO_TOKEN, strict=True)
            ]
        return TokenOutputs(loss, *others)


class Chunks:
    """The chunks of a call one after the other, and what is wanted of their gradients.

    ``wanted`` says it of hidden, weight and bias. ``main_grad``, where given, is added to by the weight's.
    """

    def __init__(
        self,
        linear: LinearCall,
        inputs: Inputs,
        wanted: tuple[bool, bool, bool] = (False, False, False),
        main_grad: Tensor | None = None,
    ) -> None:
        self.linear = linear
        self.inputs = inputs
        call, (hidden, weight, bias, _) = linear.call, inputs
        self.weight = weight.to(linear.dtype)
        self.bias = None if bias is None else bias.to(linear.dtype)
        self.tokens = Tokens(
            hidden,
            linear.dtype,
            order=linear.order,
            group=call.group,
            n_ranks=call.n_ranks,
            sequence_parallel=linear.sequence_parallel,
            reduces=linear.reduces,
        )
        longest = max((stop - start for start, stop in linear.chunks), default=0)
        self.buffer: Tensor | None = self.weight.new_empty(longest, weight.shape[0])
        self.wants_hidden = wanted[0]
        self.d_weight: WeightGradient | None = None
        if wanted[1]:
            # What main_grad is to receive later stays fp32 until then.
            dtype = weight.dtype if linear.main_grad is None else torch.float32
            self.d_weight = WeightGradient(
                self.weight, dtype=dtype, n_chunks=len(linear.chunks), main_grad=main_grad
            )
            self.is_ignored = is_ignored(inputs.labels, call.options)
        self.d_bias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if wanted[2] else None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Places and hidden states of every chunk, with the next chunk's on their way."""
        chunks = self.linear.chunks
        self.tokens.prefetch(*chunks[:1])
        for index, (start, stop) in enumerate(chunks):
            rows = self.tokens.rows(start, stop)
            self.tokens.prefetch(*chunks[index + 1 : index + 2])
            yield slice(start, stop), rows

    def logits(self, rows: Tensor, first: int = 0) -> Tensor:
        """Logits of hidden states, in the buffer from its row ``first``."""
        assert self.buffer is not None
        logits = self.buffer[first : first + rows.shape[0]]
        write_logits(rows, self.weight, self.bias, logits)
        return logits

    def add_gradients(self, parts: Iterator[tuple[int, Tensor]], rows: Tensor, places: slice) -> None:
        """Those of one chunk, whose parts have the gradients of their logits when they are asked for.

        Each is ``(first row in the chunk, gradient of logits)``. The gradient of hidden comes first: it
        travels while that of the weight is computed.
        """
        assert self.buffer is not None
        of_rows = self.tokens.rows_of_gradient(places.start, places.stop) if self.wants_hidden else None
        for first, grad_logits in parts:
            if of_rows is not None:
                out = of_rows[first : first + grad_logits.shape[0]]
                write_hidden_gradient(grad_logits, self.weight, out)
        if of_rows is not None:
            self.tokens.reduce(places.start, places.stop, of_rows)
        grad_logits = self.buffer[: rows.shape[0]]
        if self.d_weight is not None:
            # An ignored token's gradient is 0, and 0 times a NaN in its hidden state would not be.
            self.d_weight.add(grad_logits, cleared(rows, self.is_ignored[places]))
        if self.d_bias is not None:
            self.d_bias += grad_logits.sum(0, dtype=torch.float32)

    def gradients(self) -> Gradients:
        """Of all chunks, each in its own tensor's dtype. There are no logits after it."""
        self.buffer = None
        bias = self.inputs.bias
        return (
            self.tokens.gradient() if self.wants_hidden else None,
            None if self.d_weight is None else self.d_weight.rounded(),
            None if self.d_bias is None or bias is None else self.d_bias.to(bias.dtype),
        )


def forward(linear: LinearCall, inputs: Inputs) -> tuple[TokenOutputs, Tensor]:
    """Outputs of every place, and the ``[R, M, K]`` statistics of all ranks.

    Collectives: one all_gather of statistics; with sequence parallelism one of hidden states a chunk.
    """
    call, labels = linear.call, inputs.labels
    outputs, chunks = call.unfilled(inputs.hidden), Chunks(linear, inputs)
    shape = (call.n_ranks, labels.shape[0], len(call.options.statistics))
    stats = inputs.hidden.new_empty(shape, dtype=torch.float32)
    own = stats[call.rank : call.rank + 1]
    for places, rows in chunks:
        call.launchers.online_softmax(
            chunks.logits(rows),
            labels[places],
            own[:, places],
            0,
            None,
            shard=call.shard,
            options=call.options,
        )
    all_gather_stats(stats, call.rank, call.group)
    call.launchers.token_outputs(
        stats, labels, call.num_items, outputs, shard=call.shard, options=call.options
    )
    return outputs, stats


def forward_with_gradients(
    linear: LinearCall, inputs: Inputs, wanted: tuple[bool, bool, bool]
) -> tuple[TokenOutputs, Gradients]:
    """Outputs of every place, and the gradients of the sum of the losses.

    Collectives: one or two all_gathers of statistics a chunk, and those of ``tokens``.
    """
    outputs = linear.call.unfilled(inputs.hidden)
    chunks = Chunks(linear, inputs, wanted)
    for places, rows in chunks:
        parts = _filled_parts(linear, chunks, inputs.labels[places], rows, _at(outputs, places))
        chunks.add_gradients(parts, rows, places)
    return outputs, chunks.gradients()


def _filled_parts(
    linear: LinearCall, chunks: Chunks, labels: Tensor, rows: Tensor, outputs: TokenOutputs
) -> Iterator[tuple[int, Tensor]]:
    """The parts of a chunk when their outputs and the gradients of their logits are there."""
    call, sent = linear.call, []
    for first, last in parts_of(rows.shape[0], call.n_ranks):
        logits = chunks.logits(rows[first:last], first)
        part = logits, labels[first:last], _at(outputs, slice(first, last))
        if call.n_ranks == 1:
            call.fill(*part)
            yield first, logits
        else:
            stats, divisor = call.local_statistics(*part[:2])
            sent.append((first, call.begin_gather(stats), stats, divisor, part))
    for first, arrival, stats, divisor, part in sent:
        arrival.wait()
        call.fill_from(stats, divisor, *part)
        yield first, part[0]


def backward(
    linear: LinearCall,
    inputs: Inputs,
    stats: Tensor,
    divisor: Tensor | None,
    wanted: tuple[bool, bool, bool],
    grad_loss: Tensor | None,
    grad_entropy: Tensor | None,
) -> Gradients:
    """The gradients, from logits that are computed again, and the statistics and divisor of forward."""
    call, labels = linear.call, inputs.labels
    grad_output = _at_places(linear, grad_loss, labels)
    if grad_output is None:
        grad_output = stats.new_zeros(1).expand(labels.shape[0])
    of_entropy = _at_places(linear, grad_entropy, labels)
    chunks = Chunks(linear, inputs, wanted, linear.main_grad)
    for places, rows in chunks:
        logits = chunks.logits(rows)
        call.write_gradient(
            logits,
            labels[places],
            stats[:, places].contiguous(),
            divisor,
            into=logits,
            grad_output=grad_output[places],
            grad_entropy=None if of_entropy is None else of_entropy[places],
        )
        chunks.add_gradients(iter([(0, logits)]), rows, places)
        del logits
    return chunks.gradients()


def scaled(linear: LinearCall, gradients: Gradients, grad_output: Tensor) -> Gradients:
    """The gradients of a reduced loss times its grad_output, in place; the weight's to main_grad."""
    d_hidden, d_weight, d_bias = (None if grad is None else grad.detach() for grad in gradients)
    for grad in (d_hidden, d_weight, None if d_bias is None else d_bias.unsqueeze(0)):
        if grad is not None:
            linear.call.launchers.element_mul(grad, grad_output.reshape(1).expand(grad.shape[0]))
    if d_weight is not None and linear.main_grad is not None:
        linear.main_grad.add_(d_weight)
    return d_hidden, d_weight, d_bias


def _at(outputs: TokenOutputs, places: slice) -> TokenOutputs:
    loss, *others = (None if values is None else values[places] for values in outputs)
    assert loss is not None
    return TokenOutputs(loss, *others)


def _at_places(linear: LinearCall, grad_output: Tensor | None, labels: Tensor) -> Tensor | None:
    """``[M]``: an grad_output of one element for all, or of one for each token."""
    if grad_output is None:
        return None
    if grad_output.dim() == 0:
        return grad_output.reshape(1).expand(labels.shape[0])
    grad_output = grad_output.reshape(-1)
    return grad_output if linear.order is None else linear.order.take(grad_output, 0.0)
