"""The hidden states of a call, chunk by chunk, and where the gradient of each chunk goes.

Rows are taken in an order of their own where tokens are left out, or where sequence parallelism gives every
rank a part of each chunk: :class:`Order` puts what there is of each token into it, and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce.collectives import begin_all_gather, begin_all_reduce, begin_reduce_scatter


class Order(NamedTuple):
    """``taken`` is the token at each place, ``place`` the place of each token; one past the end: none."""

    taken: Tensor  # [M] int64
    place: Tensor  # [N] int64

    def take(self, values: Tensor, nothing: float) -> Tensor:
        """``values [N]`` in this order, ``[M]``."""
        return torch.cat([values, values.new_full((1,), nothing)])[self.taken]

    def put_back(self, values: Tensor, nothing: float) -> Tensor:
        """``values [M]`` in the order of the tokens, ``[N]``."""
        return torch.cat([values, values.new_full((1,), nothing)])[self.place]


def order_of_valid(is_valid: Tensor, most: int) -> Order:
    """The first ``most`` valid ones of ``is_valid [N]``, as they come; places without a token at the end.

    Does not wait for the device: how many there are is for the caller to know.
    """
    n_tokens = is_valid.shape[0]
    counted = is_valid.cumsum(0)
    place = torch.where(is_valid & (counted <= most), counted - 1, most)
    taken = place.new_full((most + 1,), n_tokens)
    taken.scatter_(0, place, torch.arange(n_tokens, device=place.device))
    return Order(taken[:most], place)


def order_of_ranks(
    chunks: Sequence[tuple[int, int]], n_tokens: int, n_ranks: int, device: torch.device
) -> Order:
    """Each chunk holds the same rows of every rank's part: 2 ranks, 8 tokens by 4 are 0 1 4 5, 2 3 6 7."""
    of_ranks = torch.arange(n_tokens, device=device).view(n_ranks, -1)
    taken = torch.cat([of_ranks[:, start // n_ranks : stop // n_ranks].reshape(-1) for start, stop in chunks])
    return Order(taken, torch.empty_like(taken).scatter_(0, taken, torch.arange(n_tokens, device=device)))


class Tokens:
    """Rows of ``hidden [N, D]`` in the compute dtype, and their gradient ``[N, D]`` in that of ``hidden``.

    ``order`` says which row is at which place where it is not all of them in turn. With
    ``sequence_parallel`` ``hidden`` is this rank's rows, and each chunk is gathered while the one before is
    worked on. Gradients of several ranks are summed over the group while the next product runs.
    """

    def __init__(
        self,
        hidden: Tensor,
        dtype: torch.dtype,
        *,
        order: Order | None,
        group: Any,
        n_ranks: int,
        sequence_parallel: bool,
        reduces: bool,
    ) -> None:
        self.hidden = hidden.detach()
        self.dtype = dtype
        self.order = order
        self.group = group
        self.n_ranks = n_ranks
        self.sequence_parallel = sequence_parallel
        self.reduces = reduces and n_ranks > 1
        self.gathered: dict[int, tuple[Tensor, Any]] = {}
        self.pending: list[Any] = []
        self.grad: Tensor | None = None

    def prefetch(self, *chunks: tuple[int, int]) -> None:
        """Begin to gather chunks, none or one, from the ranks that have their rows."""
        for start, stop in chunks if self.sequence_parallel else ():
            own = self.hidden[start // self.n_ranks : stop // self.n_ranks].to(self.dtype).contiguous()
            rows = own.new_empty(stop - start, own.shape[1])
            self.gathered[start] = rows, begin_all_gather(rows, own, self.group)

    def rows(self, start: int, stop: int) -> Tensor:
        """Hidden states at the places ``[start, stop)``, of the compute dtype."""
        if self.sequence_parallel:
            rows, work = self.gathered.pop(start)
            work.wait()
            return rows
        if self.order is None:
            return self.hidden[start:stop].to(self.dtype)
        taken = self.order.taken[start:stop].clamp(max=self.hidden.shape[0] - 1)
        return self.hidden.index_select(0, taken).to(self.dtype)

    def rows_of_gradient(self, start: int, stop: int) -> Tensor:
        """Memory for the gradient of the places ``[start, stop)``, in the dtype of ``hidden``."""
        n_features = self.hidden.shape[1]
        if self.sequence_parallel:
            return self.hidden.new_empty(stop - start, n_features)
        if self.grad is None:
            # Behind the places a row for tokens that have none.
            n_rows = self.hidden.shape[0] if self.order is None else self.order.taken.shape[0] + 1
            self.grad = self.hidden.new_empty(n_rows, n_features)
        return self.grad[start:stop]

    def reduce(self, start: int, stop: int, rows: Tensor) -> None:
        """Begin to sum over the ranks what :meth:`rows_of_gradient` gave and was filled.

        What the chunk before last sent has arrived by then, or is waited for: its memory is free again.
        """
        for work, _ in self.pending[:-1]:
            work.wait()
        del self.pending[:-1]
        if self.sequence_parallel:
            if self.grad is None:
                self.grad = torch.empty_like(self.hidden, memory_format=torch.contiguous_format)
            own = self.grad[start // self.n_ranks : stop // self.n_ranks]
            self.pending.append((begin_reduce_scatter(own, rows, self.group), rows))
        elif self.reduces:
            self.pending.append((begin_all_reduce(rows, self.group), rows))

    def gradient(self) -> Tensor:
        """That of all chunks, when it has arrived; 0 for tokens that were left out."""
        for work, _ in self.pending:
            work.wait()
        self.pending.clear()
        if self.grad is None:
            return torch.zeros_like(self.hidden, memory_format=torch.contiguous_format)
        if self.order is None or self.sequence_parallel:
            return self.grad
        self.grad[-1] = 0.0
        return self.grad.index_select(0, self.order.place)
