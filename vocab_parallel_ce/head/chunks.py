"""Which tokens go through a head together: the size of a chunk, the chunks, and the order of the tokens in them.

The rows of the chunks are the tokens in their own order, except if ignored tokens are left out, or if sequence
parallelism gives every rank a part of each chunk. A :class:`TokenOrder` then maps between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.options import MOST_TOKENS, bytes_of

SMALL_BYTES = 256 * 2**20  # logits that are worth no more chunks
LARGE_BYTES = 4 * 2**30  # logits that a chunk may have beyond the bytes of the weight's gradient in fp32
MULTIPLE = 128  # tokens: whole tiles of a matrix product
MOST_VALID = 0.9  # share of valid tokens above which it does not pay to leave out the ignored ones
ANY_NUMBER = 2**60  # of tokens: more than a chunk has
WAVE = 2**22  # elements of a product: a tile of 128 x 256 on nearly each of an H100's 132 multiprocessors


def most_tokens(hidden_size: int, n_columns: int, logit_bytes: int) -> int:
    """Return the most tokens of a chunk by default, however many columns there are: from sizes that all ranks share."""
    return (4 * hidden_size + LARGE_BYTES // n_columns) // logit_bytes


def default_tokens(hidden_size: int, n_columns: int, logit_bytes: int, gradient_bytes: int) -> tuple[int, int]:
    """Return the most tokens of one of several chunks, and those of a single one that takes no more memory.

    A quarter more memory than 4096 tokens take with the fp32 sum of the weight's gradient: each chunk reads and
    writes that sum once more. docs/design.md has what fewer tokens cost. At most :func:`most_tokens`.

    Args:
        logit_bytes: of all that a chunk has for each token and column: logits, a gradient apart, a teacher's logits.
        gradient_bytes: of an element of the weight's gradient as one chunk has it; 0 if it is not wanted.
    """
    bound = most_tokens(hidden_size, n_columns, logit_bytes)
    if gradient_bytes == 0:  # no sum
        return min(4096, bound), 0
    most = 5120 + hidden_size // logit_bytes
    return min(most, bound), min(most + (4 - gradient_bytes) * hidden_size // logit_bytes, bound)


def choose_chunk_tokens(
    n_tokens: int, hidden_size: int, n_columns: int, element_size: int, most_of_several: int, most_of_one: int = 0
) -> int:
    """Return the tokens of a chunk by default: ``most_of_several``, or as many as have ``SMALL_BYTES`` of logits.

    All of them, in one chunk, if they are ``most_of_one`` or fewer, or if their logits take no more than the weight's
    gradient in fp32, which one chunk does without.
    """
    if n_tokens <= max(most_of_one, 4 * hidden_size // element_size):
        return max(1, n_tokens)
    most = max(most_of_several, min(MOST_TOKENS, SMALL_BYTES // (n_columns * element_size)))
    return equal_chunk(n_tokens, min(most, MOST_TOKENS), WAVE // hidden_size)


def equal_chunk(n_tokens: int, most: int, wave: int = MULTIPLE) -> int:
    """Return at most ``most`` tokens, for as few chunks as that takes, all of one size except the last.

    Of multiples of ``wave`` tokens if that takes no more chunks, otherwise of ``MULTIPLE``.
    """
    if n_tokens <= most:
        return max(1, n_tokens)
    n_chunks = -(-n_tokens // most)
    even = -(-n_tokens // n_chunks)
    for multiple in (wave // MULTIPLE * MULTIPLE or MULTIPLE, MULTIPLE):
        size = -(-even // multiple) * multiple
        if size <= most:
            return size
    return most


def chunk_of(
    size: int | str,
    keep_logits: str,
    n_tokens: int,
    hidden_size: int,
    n_columns: int,
    element_size: int,
    kept_bytes: int,
    by_default: tuple[int, int],
) -> int:
    """Return the tokens of a chunk of ``size``: ``"auto"``, a number, or bytes for the logits.

    ``kept_bytes`` are those of a token's kept logits: an automatic chunk has as many tokens as may be kept, or fewer.
    ``by_default`` is :func:`default_tokens`.
    """
    token_bytes = n_columns * element_size
    if size == "auto":
        chosen = choose_chunk_tokens(n_tokens, hidden_size, n_columns, element_size, *by_default)
        return min(chosen, max(1, most_kept(keep_logits, kept_bytes, chosen)))
    if not isinstance(size, str):
        return int(size)
    most = bytes_of(size) // token_bytes
    if most == 0:
        raise ValueError(f"chunk_size: must hold a token's logits, {token_bytes} bytes, got {size!r}; pass more")
    return equal_chunk(n_tokens, most)


def chunks_of(n_tokens: int, chunk: int) -> tuple[slice, ...]:
    """Return the rows of every chunk: 5 tokens by 2 are 0:2, 2:4 and 4:5."""
    return tuple(slice(start, min(start + chunk, n_tokens)) for start in range(0, n_tokens, chunk))


def most_kept(keep_logits: str, token_bytes: int, n_tokens: int) -> int:
    """Return how many of ``n_tokens`` tokens' logits may be kept; all, if none are to be."""
    if keep_logits in ("none", "all"):
        return n_tokens
    return min(n_tokens, bytes_of(keep_logits, "keep_logits", "'none', 'all'") // token_bytes)


def kept_rows(keep_logits: str, chunks: Sequence[slice], token_bytes: int) -> int:
    """Return the number of rows whose logits are kept, unless none are to be: of whole chunks, from the first on."""
    if not chunks:
        return 0
    most, first = most_kept(keep_logits, token_bytes, chunks[-1].stop), chunks[0].stop
    if most < first:
        raise ValueError(
            f"keep_logits: must hold the logits of a chunk, {first} tokens of {token_bytes} bytes, got "
            f"{keep_logits!r}; pass more, or a smaller chunk_size"
        )
    return max(rows.stop for rows in chunks if rows.stop <= most)


def parts_of(n_tokens: int, n_ranks: int, ends: Sequence[int] = ()) -> list[slice]:
    """Return the rows of a chunk's parts. The statistics of one are communicated while kernels read the other.

    The first part ends at one of ``ends``, of groups, if there are some.
    """
    half = -(-n_tokens // (2 * MULTIPLE)) * MULTIPLE
    if ends and half < n_tokens:
        half = min(ends, key=lambda end: abs(end - half))
    if n_ranks == 1 or half >= n_tokens:
        return [slice(0, n_tokens)]
    return [slice(0, half), slice(half, n_tokens)]


class TokenOrder(NamedTuple):
    """Permutes tokens into row order and back, dropping ignored ones; one past the end means none."""

    token_of_row: Tensor  # [M] int64
    row_of_token: Tensor  # [N] int64

    def to_rows(self, values: Tensor, fill: float) -> Tensor:
        """Return ``[M, ...]``: ``values [N, ...]`` in row order."""
        return torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])[self.token_of_row]

    def to_tokens(self, values: Tensor, fill: float, shape: Sequence[int]) -> Tensor:
        """Return ``[*shape, ...]``: ``values [M, ...]`` in token order; ``shape`` is that of the tokens."""
        return torch.cat([values, values.new_full((1, *values.shape[1:]), fill)])[self.row_of_token.view(*shape)]


def order_of_valid(
    is_valid: Tensor, count: Tensor, valid_tokens: int | str | None, check_labels: bool | str
) -> tuple[TokenOrder | None, Tensor | None]:
    """Return the order of the valid tokens of ``is_valid [N]``, None if too many are to leave others out.

    ``valid_tokens`` are the most that are valid. For a number the host does not wait for the device; also return the
    factor of the loss ``[]``, NaN if more are valid, in whose place ValueError is raised where ``check_labels`` looks.
    Otherwise it waits for ``count``, as that of a CPU always is.
    """
    n_tokens, overflow = is_valid.shape[0], None
    if valid_tokens is None or isinstance(valid_tokens, str):
        if count.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("valid_tokens: expected a number in a CUDA graph, got 'count', which waits for the device")
        n_rows = int(count)
    else:
        if checks.looks_at(count, check_labels) and int(count) > valid_tokens:
            raise ValueError(
                f"valid_tokens: must be at least the number of labels that are not ignored, {int(count)}, got "
                f"{valid_tokens}; pass an upper bound, or 'count'"
            )
        n_rows, overflow = valid_tokens, count.new_ones((), dtype=torch.float32)
        overflow.masked_fill_(count[0] > valid_tokens, float("nan"))
    if n_tokens == 0 or n_rows > MOST_VALID * n_tokens:
        return None, overflow
    n_rows = max(1, n_rows)
    counted = is_valid.cumsum(0)
    row = torch.where(is_valid & (counted <= n_rows), counted - 1, n_rows)
    token = row.new_full((n_rows + 1,), n_tokens)
    token.scatter_(0, row, torch.arange(n_tokens, device=row.device))
    return TokenOrder(token[:n_rows], row), overflow


def order_of_ranks(chunks: Sequence[slice], n_tokens: int, n_ranks: int, device: torch.device) -> TokenOrder | None:
    """Return the order in which a chunk has the same part of each rank's tokens: 0 1 4 5, 2 3 6 7 on 2 ranks.

    None of a single chunk, whose tokens have it.
    """
    if len(chunks) < 2:
        return None
    tokens = torch.arange(n_tokens, device=device)
    by_rank = tokens.view(n_ranks, -1)
    token = torch.cat([by_rank[:, part_of_rank(rows, n_ranks)].reshape(-1) for rows in chunks])
    return TokenOrder(token, torch.empty_like(token).scatter_(0, token, tokens))


def part_of_rank(rows: slice, n_ranks: int) -> slice:
    """Return which of its tokens each rank has in a chunk, with sequence parallelism."""
    return slice(rows.start // n_ranks, rows.stop // n_ranks)
