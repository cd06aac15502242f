"""What the products of a head take and give, chunk by chunk.

:class:`HiddenStates` has the tokens of each chunk, which sequence parallelism gathers, and sums their gradients over
the ranks. :class:`WeightGradient` sums the gradient of the weight over the chunks, in fp32, and rounds it once.
:class:`Products` has both, and makes the logits, which may be fp32 products of 16-bit factors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import begin_all_gather, begin_all_reduce, begin_reduce_scatter
from vocab_parallel_ce.head.chunks import part_of_rank
from vocab_parallel_ce.head.plan import LinearCall
from vocab_parallel_ce.layout import INTEGERS, as_dtype, cut
from vocab_parallel_ce.program import make, step
from vocab_parallel_ce.targets import Head

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
Wanted = tuple[bool, bool, bool]  # which of these


class HiddenStates:
    """``hidden [..., D]`` in chunks of the products' dtype, and its gradient ``[..., D]`` in its own dtype.

    With sequence parallelism, ``hidden`` is this rank's part: a chunk is gathered while the chunk
    before it is computed. The gradients of several ranks are summed over the group while the next chunk's gradient is
    written.
    """

    def __init__(self, linear: LinearCall, hidden: Tensor, wants_gradient: bool) -> None:
        self.linear, self.shape, self.wants_gradient = linear, hidden.shape, wants_gradient
        self.hidden = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
        self.group, self.n_ranks = linear.call.group, linear.call.plan.n_ranks
        self.unreduced: tuple[slice, Tensor] | None = None
        self.reducing: tuple[Any, Tensor] | None = None  # a sum over the ranks, with the memory that it uses
        self.d_hidden: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the hidden states of each chunk, after starting to gather the next."""
        chunks = self.linear.chunks
        if not self.linear.head.sequence_parallel:
            for rows in chunks:
                yield rows, self._select(rows)
            return
        gathered = [self._begin_gather(rows) for rows in chunks[:1]]
        for index, rows in enumerate(chunks):
            states, exchange = gathered.pop()
            exchange.wait()
            gathered += [self._begin_gather(following) for following in chunks[index + 1 : index + 2]]
            yield rows, states

    def _select(self, rows: slice) -> Tensor:
        order = self.linear.order
        if order is None:
            return as_dtype(cut(self.hidden, rows), self.linear.head.dtype)
        tokens = order.token_of_row[rows].clamp(max=self.hidden.shape[0] - 1)
        return as_dtype(self.hidden.index_select(0, tokens), self.linear.head.dtype)

    def _begin_gather(self, rows: slice) -> tuple[Tensor, Any]:
        part = as_dtype(cut(self.hidden, part_of_rank(rows, self.n_ranks)), self.linear.head.dtype).contiguous()
        states = part.new_empty(rows.stop - rows.start, part.shape[1])
        return states, begin_all_gather(states, part, self.group)

    def new_gradient(self, rows: slice) -> Tensor | None:
        """Return memory ``[n, D]`` for the gradient of a chunk's rows, in the dtype of ``hidden``, if it is wanted."""
        if not self.wants_gradient:
            return None
        order, (n_tokens, n_features) = self.linear.order, self.hidden.shape
        if self.linear.head.sequence_parallel:
            return make(self.hidden, rows.stop - rows.start, n_features, dtype=self.hidden.dtype)
        if self.d_hidden is None:
            # One more row, for the tokens that have none.
            n_rows = n_tokens if order is None else order.token_of_row.shape[0] + 1
            self.d_hidden = make(self.hidden, n_rows, n_features, dtype=self.hidden.dtype)
        return cut(self.d_hidden, rows)

    def reduce_later(self, rows: slice, d_hidden: Tensor) -> None:
        """Sum over the ranks what :meth:`new_gradient` gave and is filled now, from :meth:`begin_reduce` on.

        The sum of the last chunk begins at once.
        """
        self.unreduced = rows, d_hidden
        if rows.stop == self.linear.n_rows:
            self.begin_reduce()

    def begin_reduce(self) -> None:
        """Begin the sum that waits: while kernels run that are bound by memory.

        A product has a block on each multiprocessor, and would wait for those that the sum has taken.
        """
        assert self.unreduced is not None
        (rows, d_hidden), self.unreduced = self.unreduced, None
        if self.reducing is not None:
            self.reducing[0].wait()  # frees the memory of the chunk before
        if self.linear.head.sequence_parallel:
            if self.d_hidden is None:
                self.d_hidden = self.hidden.new_empty(self.hidden.shape)
            part = cut(self.d_hidden, part_of_rank(rows, self.n_ranks))
            self.reducing = begin_reduce_scatter(part, d_hidden, self.group), d_hidden
        else:
            self.reducing = begin_all_reduce(d_hidden, self.group), d_hidden

    def gradient(self) -> Tensor | None:
        """Wait, and return the gradient of all tokens, if it is wanted; it is 0 for those that were left out."""
        if self.reducing is not None:
            self.reducing[0].wait()
            self.reducing = None
        d_hidden = self.d_hidden
        if d_hidden is None:  # no tokens
            return self.hidden.new_empty(self.shape) if self.wants_gradient else None
        if self.linear.order is not None and not self.linear.head.sequence_parallel:
            d_hidden[-1] = 0.0
            d_hidden = d_hidden.index_select(0, self.linear.order.row_of_token)
        return d_hidden if len(self.shape) == 2 else d_hidden.view(self.shape)


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which products have their factors' dtype: nothing to enter where that is so."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def writes_fp32(factor: Tensor) -> bool:
    """Return whether a product of 16-bit factors on this device can be fp32."""
    return factor.is_cuda and torch.version.hip is None


# Steps of a program: they write to their first argument.


def fill_logits(logits: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Fill ``logits [n, C]`` from ``states [n, D]``; fp32 ones of 16-bit states take an fp32 weight where a
    product cannot be fp32.
    """
    weight_t = weight.t()
    if logits.dtype == states.dtype and bias is not None:
        torch.addmm(bias, states, weight_t, out=logits)
    elif logits.dtype == states.dtype:
        torch.mm(states, weight_t, out=logits)
    else:
        if states.dtype == weight_t.dtype:
            torch.mm(states, weight_t, out_dtype=logits.dtype, out=logits)
        else:
            torch.mm(states.float(), weight_t, out=logits)
        if bias is not None:
            logits.add_(bias)


def fill_product(product: Tensor, a: Tensor, b: Tensor) -> None:
    """Fill ``product`` with ``a @ b``, rounded to its dtype."""
    if product.dtype == a.dtype:
        torch.mm(a, b, out=product)
    else:
        product.copy_(torch.mm(a, b))


def fill_first(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Fill ``total [C, D]`` with the product of ``d_logits [n, C]`` and ``hidden [n, D]`` of the first chunk."""
    if total.dtype == hidden.dtype:
        torch.mm(d_logits.t(), hidden, out=total)
    elif writes_fp32(hidden):
        torch.mm(d_logits.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        torch.mm(d_logits.t().to(total.dtype), hidden.to(total.dtype), out=total)


def add_another(total: Tensor, d_logits: Tensor, hidden: Tensor) -> None:
    """Add the product of another chunk to ``total``."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)
    elif writes_fp32(hidden):
        torch.addmm(total, d_logits.t(), hidden, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(d_logits.t().to(total.dtype), hidden.to(total.dtype))


def add_sum(d_bias: Tensor, d_logits: Tensor) -> None:
    """Add the sum of a chunk's ``d_logits [n, C]`` to ``d_bias [C]``, in fp32."""
    d_bias += d_logits.sum(0, dtype=torch.float32)


def fill_valid(valid: Tensor, rows: Tensor, is_valid: Tensor) -> None:
    """Fill ``valid`` with ``rows [n, D]``, with zeros where ``is_valid [n]`` is False, whatever those rows hold."""
    # As integers, since 0 times NaN is NaN. Eight bytes at a time where the memory allows it, for the bandwidth.
    # One row is contiguous whatever its stride, which view looks at all the same.
    n_elements = int(rows.storage_offset()) | rows.shape[1] | rows.stride(0)
    is_whole = rows.is_contiguous() and (rows.data_ptr() | n_elements * rows.itemsize) % 8 == 0
    dtype = torch.int64 if is_whole else INTEGERS[rows.itemsize]
    torch.mul(rows.view(dtype), is_valid.unsqueeze(1), out=valid.view(dtype))


class WeightGradient:
    """Sum over ``n_chunks`` chunks of ``d_logits.T @ hidden``, ``[C, D]`` as ``weight``, at the end of ``dtype``.

    The chunks are added to ``main_grad`` fp32, if given. A single product that has the dtype needs no fp32 sum.
    """

    def __init__(self, weight: Tensor, *, dtype: torch.dtype, n_chunks: int, main_grad: Tensor | None = None) -> None:
        self.weight, self.dtype, self.total = weight, dtype, main_grad
        is_product = main_grad is None and n_chunks == 1 and dtype == weight.dtype
        self.dtype_of_sum = dtype if is_product else torch.float32

    def add(self, d_logits: Tensor, hidden: Tensor) -> None:
        """Add the product of ``d_logits [n, C]`` and ``hidden [n, D]`` of one chunk, of one dtype."""
        if self.total is None:
            self.total = make(self.weight, *self.weight.shape, dtype=self.dtype_of_sum)
            step(fill_first, self.total, d_logits, hidden)
        else:
            step(add_another, self.total, d_logits, hidden)

    def rounded(self) -> Tensor:
        """Return the sum in the parameter's dtype; zeros if there was no chunk."""
        if self.total is None:
            return self.weight.new_zeros(self.weight.shape, dtype=self.dtype)
        return rounded(self.total, self.dtype)


def rounded(total: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``total`` in ``dtype``: itself if it has it."""
    if total.dtype == dtype:
        return total
    made = make(total, *total.shape, dtype=dtype)
    step(Tensor.copy_, made, total)
    return made


class Products:
    """The matrix products of one walk over the chunks, and the gradients."""

    def __init__(
        self,
        linear: LinearCall,
        local: Head,
        targets: Any,
        wanted: Wanted,
        kept: Tensor | None = None,
        *,
        fills_kept: bool = False,
    ) -> None:
        """``kept``: memory of the logits that are kept, of whole chunks from the first on, or that are to be."""
        weight, bias, main_grad = local.weight, local.bias, linear.main_grad
        self.linear, self.targets = linear, targets
        self.weight = as_dtype(weight, linear.head.dtype)
        self.bias = None if bias is None else as_dtype(bias, linear.head.logits_dtype)
        self.hidden = HiddenStates(linear, local.hidden, wanted[0])
        self.kept, self.fills_kept = kept, fills_kept  # [n, C]
        is_fp32 = linear.head.logits_dtype != linear.head.dtype
        self.factor = self.weight.float() if is_fp32 and not writes_fp32(self.weight) else self.weight  # of the logits
        has_d_buffer = is_fp32 and any(wanted)  # the gradient has another dtype
        n_kept = 0 if kept is None or has_d_buffer else kept.shape[0]
        longest = max((rows.stop - rows.start for rows in linear.chunks if rows.stop > n_kept), default=0)
        shape = longest, weight.shape[0]
        self.buffer = make(self.weight, *shape, dtype=linear.head.logits_dtype)
        self.d_buffer = make(self.weight, *shape, dtype=linear.head.dtype) if has_d_buffer else None
        # A factor that only backward knows multiplies fp32 sums.
        is_final = linear.expected is None and linear.scale is None
        self.d_weight: WeightGradient | None = None
        if wanted[1]:
            dtype = weight.dtype if is_final and main_grad is None else torch.float32
            if linear.call.plan.gradient == "in_forward":
                main_grad = None  # backward adds to it
            self.d_weight = WeightGradient(self.weight, dtype=dtype, n_chunks=len(linear.chunks), main_grad=main_grad)
            self.is_valid = linear.is_valid  # [M]
            if self.is_valid is not None and linear.order is not None:
                self.is_valid = linear.order.to_rows(self.is_valid, False)
        self.d_bias = make(weight, weight.shape[0], dtype=torch.float32) if wanted[2] else None
        if self.d_bias is not None:
            step(Tensor.zero_, self.d_bias)
        self.bias_dtype = bias.dtype if bias is not None and is_final else torch.float32

    def chunks(self) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Yield the rows, the hidden states and the logits of each chunk, and memory for the logits' gradient.

        Both are the same memory, unless the gradient has another dtype. Kept logits are then copied, since it is laid
        out as the buffer.
        """
        for rows, states in self.hidden.chunks():
            of_chunk = slice(0, rows.stop - rows.start)
            kept = None if self.kept is None or rows.stop > self.kept.shape[0] else cut(self.kept, rows)
            logits = cut(self.buffer, of_chunk) if kept is None or self.d_buffer is not None else kept
            if kept is None or self.fills_kept:
                self.fill_logits(states, logits)
            elif logits is not kept:
                logits.copy_(kept)
            yield rows, states, logits, logits if self.d_buffer is None else cut(self.d_buffer, of_chunk)

    def fill_logits(self, states: Tensor, logits: Tensor) -> None:
        """Fill ``logits [n, C]`` from hidden states ``[n, D]``."""
        step(fill_logits, logits, states, self.factor, self.bias)

    def add_gradients(self, rows: slice, states: Tensor, d_logits: Tensor) -> None:
        """Fill a chunk's d_hidden, and add the chunk to d_weight and d_bias."""
        d_hidden = self.hidden.new_gradient(rows)
        if d_hidden is not None:
            step(fill_product, d_hidden, d_logits, self.weight)
            if self.linear.head.reduces:
                self.hidden.reduce_later(rows, d_hidden)
        if self.d_weight is not None:
            # An ignored token's gradient is 0, and 0 times a NaN in its hidden state would not be.
            self.d_weight.add(d_logits, states if self.is_valid is None else self.valid(rows, states))
        if self.d_bias is not None:
            step(add_sum, self.d_bias, d_logits)

    def valid(self, rows: slice, states: Tensor) -> Tensor:
        """Return a copy of a chunk's hidden states, with zeros for ignored tokens."""
        assert self.is_valid is not None
        # Laid out alike, on which the bits of a product may depend.
        is_contiguous = states.is_contiguous()
        copy = make(states, *states.shape, dtype=states.dtype) if is_contiguous else torch.empty_like(states)
        step(fill_valid, copy, states, cut(self.is_valid, rows))
        return copy

    def gradients(self) -> Gradients:
        """Return the gradients of all chunks, each in its tensor's dtype. Drops the buffers."""
        del self.buffer, self.d_buffer, self.kept
        return (
            self.hidden.gradient(),
            None if self.d_weight is None else self.d_weight.rounded(),
            None if self.d_bias is None else rounded(self.d_bias, self.bias_dtype),
        )
