"""The hidden states of a call, chunk by chunk, and where the gradient of each chunk goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import begin_all_gather, begin_all_reduce, begin_reduce_scatter
from vocab_parallel_ce.head.chunks import part_of_rank
from vocab_parallel_ce.head.plan import LinearCall


class HiddenStates:
    """``hidden [N, D]`` in chunks of the products' dtype, and its gradient ``[N, D]`` in its own dtype.

    With sequence parallelism, ``hidden [N / R, D]`` is this rank's part: a chunk is gathered while the chunk
    before it is computed. The gradients of several ranks are summed over the group while the next product runs.
    """

    def __init__(self, linear: LinearCall, hidden: Tensor, wants_gradient: bool) -> None:
        self.linear, self.hidden, self.wants_gradient = linear, hidden.detach(), wants_gradient
        self.group, self.n_ranks = linear.call.group, linear.call.plan.n_ranks
        self.pending: list[tuple[Any, Tensor]] = []  # sums over the ranks, with the memory they use
        self.d_hidden: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the hidden states of each chunk, after starting to gather the next."""
        chunks = self.linear.chunks
        if not self.linear.sequence_parallel:
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
            return self.hidden[rows].to(self.linear.dtype)
        tokens = order.token_of_row[rows].clamp(max=self.hidden.shape[0] - 1)
        return self.hidden.index_select(0, tokens).to(self.linear.dtype)

    def _begin_gather(self, rows: slice) -> tuple[Tensor, Any]:
        own = self.hidden[part_of_rank(rows, self.n_ranks)].to(self.linear.dtype).contiguous()
        states = own.new_empty(rows.stop - rows.start, own.shape[1])
        return states, begin_all_gather(states, own, self.group)

    def new_gradient(self, rows: slice) -> Tensor | None:
        """Return memory ``[n, D]`` for the gradient of a chunk's rows, in the dtype of ``hidden``, if it is wanted."""
        if not self.wants_gradient:
            return None
        order, (n_tokens, n_features) = self.linear.order, self.hidden.shape
        if self.linear.sequence_parallel:
            return self.hidden.new_empty(rows.stop - rows.start, n_features)
        if self.d_hidden is None:
            # One more row, for the tokens that have none.
            n_rows = n_tokens if order is None else order.token_of_row.shape[0] + 1
            self.d_hidden = self.hidden.new_empty(n_rows, n_features)
        return self.d_hidden[rows]

    def begin_reduce(self, rows: slice, d_hidden: Tensor) -> None:
        """Begin to sum over the ranks what :meth:`new_gradient` gave and the caller filled."""
        while len(self.pending) > 1:  # frees the memory of the chunk before last
            self.pending.pop(0)[0].wait()
        if self.linear.sequence_parallel:
            if self.d_hidden is None:
                self.d_hidden = self.hidden.new_empty(self.hidden.shape)
            own = self.d_hidden[part_of_rank(rows, self.n_ranks)]
            self.pending.append((begin_reduce_scatter(own, d_hidden, self.group), d_hidden))
        elif self.linear.reduces:
            self.pending.append((begin_all_reduce(d_hidden, self.group), d_hidden))

    def gradient(self) -> Tensor | None:
        """Wait, and return the gradient of all tokens, if it is wanted; it is 0 for those that were left out."""
        while self.pending:
            self.pending.pop(0)[0].wait()
        if self.d_hidden is None:  # no tokens
            return torch.empty_like(self.hidden) if self.wants_gradient else None
        if self.linear.order is None or self.linear.sequence_parallel:
            return self.d_hidden
        self.d_hidden[-1] = 0.0
        return self.d_hidden.index_select(0, self.linear.order.row_of_token)
