"""The hidden states of a call, chunk by chunk, and where the gradient of each chunk goes.

The rows of the chunks are the tokens in their own order, except if ignored tokens are left out, or if
sequence parallelism gives every rank a part of each chunk. A :class:`TokenOrder` then maps between the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import begin_all_gather, begin_all_reduce, begin_reduce_scatter


class TokenOrder(NamedTuple):
    """Permutes tokens into row order and back, dropping ignored ones; one past the end means none."""

    token_of_row: Tensor  # [M] int64
    row_of_token: Tensor  # [N] int64

    def to_rows(self, values: Tensor, fill: float) -> Tensor:
        """Return ``[M]``: ``values [N]`` in row order."""
        return torch.cat([values, values.new_full((1,), fill)])[self.token_of_row]

    def to_tokens(self, values: Tensor, fill: float) -> Tensor:
        """Return ``[N]``: ``values [M]`` in token order."""
        return torch.cat([values, values.new_full((1,), fill)])[self.row_of_token]


def order_of_valid(is_valid: Tensor, n_rows: int) -> TokenOrder:
    """Return the order of the first ``n_rows`` valid tokens of ``is_valid [N]``; the last rows may be empty.

    Does not wait for the device: the caller knows how many tokens are valid.
    """
    n_tokens = is_valid.shape[0]
    counted = is_valid.cumsum(0)
    row = torch.where(is_valid & (counted <= n_rows), counted - 1, n_rows)
    token = row.new_full((n_rows + 1,), n_tokens)
    token.scatter_(0, row, torch.arange(n_tokens, device=row.device))
    return TokenOrder(token[:n_rows], row)


def order_of_ranks(chunks: Sequence[tuple[int, int]], n_tokens: int, n_ranks: int, device: torch.device) -> TokenOrder:
    """Return the order in which a chunk has the same part of each rank's tokens.

    2 ranks with 8 tokens in chunks of 4 have 0 1 4 5, then 2 3 6 7.
    """
    tokens = torch.arange(n_tokens, device=device)
    of_rank = tokens.view(n_ranks, -1)
    token = torch.cat([of_rank[:, start // n_ranks : stop // n_ranks].reshape(-1) for start, stop in chunks])
    return TokenOrder(token, torch.empty_like(token).scatter_(0, token, tokens))


class HiddenStates:
    """``hidden [N, D]`` in chunks of the products' dtype, and its gradient ``[N, D]`` in its own dtype.

    With ``sequence_parallel``, ``hidden`` is this rank's part: a chunk is gathered while the chunk before
    it is computed. The gradients of several ranks are summed over the group while the next product runs.
    """

    def __init__(
        self,
        hidden: Tensor,
        dtype: torch.dtype,
        *,
        chunks: tuple[tuple[int, int], ...],
        order: TokenOrder | None,
        group: Any,
        n_ranks: int,
        sequence_parallel: bool,
        reduces: bool,
    ) -> None:
        self.hidden = hidden.detach()
        self.dtype = dtype
        self.all_chunks = chunks
        self.order = order
        self.group = group
        self.n_ranks = n_ranks
        self.sequence_parallel = sequence_parallel
        self.reduces = reduces and n_ranks > 1
        self.gathered: dict[int, tuple[Tensor, Any]] = {}
        self.pending: list[Any] = []
        self.d_hidden: Tensor | None = None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows and the hidden states of each chunk, after starting to gather the next."""
        self._begin_gather(self.all_chunks[:1])
        for index, (start, stop) in enumerate(self.all_chunks):
            states = self._states(start, stop)
            self._begin_gather(self.all_chunks[index + 1 : index + 2])
            yield slice(start, stop), states

    def _begin_gather(self, chunks: Sequence[tuple[int, int]]) -> None:
        for start, stop in chunks if self.sequence_parallel else ():
            own = self.hidden[start // self.n_ranks : stop // self.n_ranks].to(self.dtype).contiguous()
            states = own.new_empty(stop - start, own.shape[1])
            self.gathered[start] = states, begin_all_gather(states, own, self.group)

    def _states(self, start: int, stop: int) -> Tensor:
        if self.sequence_parallel:
            states, exchange = self.gathered.pop(start)
            exchange.wait()
            return states
        if self.order is None:
            return self.hidden[start:stop].to(self.dtype)
        tokens = self.order.token_of_row[start:stop].clamp(max=self.hidden.shape[0] - 1)
        return self.hidden.index_select(0, tokens).to(self.dtype)

    def new_gradient(self, rows: slice) -> Tensor:
        """Return memory ``[n, D]`` for the gradient of a chunk's rows, in the dtype of ``hidden``."""
        n_features = self.hidden.shape[1]
        if self.sequence_parallel:
            return self.hidden.new_empty(rows.stop - rows.start, n_features)
        if self.d_hidden is None:
            # One more row, for the tokens that have none.
            n_rows = self.hidden.shape[0] if self.order is None else self.order.token_of_row.shape[0] + 1
            self.d_hidden = self.hidden.new_empty(n_rows, n_features)
        return self.d_hidden[rows]

    def begin_reduce(self, rows: slice, filled: Tensor) -> None:
        """Begin to sum over the ranks what :meth:`new_gradient` gave and the caller filled.

        Waits for the chunk before last, whose memory is then free again.
        """
        for exchange, _ in self.pending[:-1]:
            exchange.wait()
        del self.pending[:-1]
        if self.sequence_parallel:
            if self.d_hidden is None:
                self.d_hidden = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
            own = self.d_hidden[rows.start // self.n_ranks : rows.stop // self.n_ranks]
            self.pending.append((begin_reduce_scatter(own, filled, self.group), filled))
        elif self.reduces:
            self.pending.append((begin_all_reduce(filled, self.group), filled))

    def gradient(self) -> Tensor:
        """Wait, and return the gradient of all tokens; it is 0 for those that were left out."""
        for exchange, _ in self.pending:
            exchange.wait()
        self.pending.clear()
        if self.d_hidden is None:
            return torch.zeros_like(self.hidden, memory_format=torch.contiguous_format)
        if self.order is None or self.sequence_parallel:
            return self.d_hidden
        self.d_hidden[-1] = 0.0
        return self.d_hidden.index_select(0, self.order.row_of_token)
