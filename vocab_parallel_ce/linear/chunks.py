"""How many tokens go through a head at a time: pure arithmetic on sizes.

A chunk's logits take memory, and each chunk but the first reads and writes the fp32 gradient of the weight
once more: 8 bytes against ``6 * tokens`` operations for each of its elements, so that fewer than about 4096
tokens cost time on any GPU whose matrix units outrun its memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from vocab_parallel_ce import checks

FEWEST_TOKENS = 4096  # 2.5 % of the three products' time on one H200, where 2048 cost 7 % and 1024 17 %
SMALL_BYTES = 256 * 2**20  # logits that are worth no more chunks
MULTIPLE = 128  # tokens: whole tiles of a matrix product


def choose_chunk_tokens(n_tokens: int, hidden_size: int, n_columns: int, element_size: int) -> int:
    """Tokens of a chunk for ``[n_tokens, hidden_size]`` hidden states and ``n_columns`` rows of the weight.

    All of them where their logits take no more than the fp32 gradient of the weight, which a single chunk
    does without; else ``FEWEST_TOKENS``, or as many as have ``SMALL_BYTES`` of logits, in equal chunks.
    """
    if n_tokens * element_size <= 4 * hidden_size:
        return max(1, n_tokens)
    most = max(FEWEST_TOKENS, SMALL_BYTES // (n_columns * element_size))
    return equal_chunk(n_tokens, most)


def equal_chunk(n_tokens: int, most: int) -> int:
    """At most ``most`` tokens, in as few chunks as that takes, all but the last of a size."""
    if n_tokens <= most:
        return max(1, n_tokens)
    n_chunks = -(-n_tokens // most)
    even = -(-n_tokens // n_chunks)
    return min(most, -(-even // MULTIPLE) * MULTIPLE)


def chunk_of(
    chunk_tokens: object, memory_budget: object, n_tokens: int, hidden_size: int, n_columns: int, element_size: int
) -> int:
    """Tokens of a chunk as a caller asks for them: ``"auto"``, a number, or bytes for the logits.

    Raises:
        TypeError: one is no integer.
        ValueError: one is not positive, both are given, or a budget holds no token's logits.
    """
    if memory_budget is None:
        if chunk_tokens == "auto":
            return choose_chunk_tokens(n_tokens, hidden_size, n_columns, element_size)
        if isinstance(chunk_tokens, str):
            raise ValueError(f"chunk_tokens: expected 'auto' or a number of tokens, got {chunk_tokens!r}")
        return checks.checked_count("chunk_tokens", chunk_tokens)
    if chunk_tokens != "auto":
        raise ValueError(f"memory_budget: expected chunk_tokens='auto' with it, got {chunk_tokens!r}")
    budget = checks.checked_count("memory_budget", memory_budget)
    most = budget // (n_columns * element_size)
    if most == 0:
        raise ValueError(f"memory_budget: must hold a token's logits, {n_columns * element_size} bytes, got {budget}")
    return equal_chunk(n_tokens, most)


def chunks_of(n_tokens: int, chunk: int) -> Iterator[tuple[int, int]]:
    """``(start, stop)`` of every chunk: 5 tokens by 2 are (0, 2), (2, 4), (4, 5)."""
    for start in range(0, n_tokens, chunk):
        yield start, min(start + chunk, n_tokens)


def parts_of(n_tokens: int, n_ranks: int) -> list[tuple[int, int]]:
    """A chunk's parts, whose statistics travel apart: one travels while the other is computed."""
    half = -(-n_tokens // (2 * MULTIPLE)) * MULTIPLE
    if n_ranks == 1 or half >= n_tokens:
        return [(0, n_tokens)]
    return [(0, half), (half, n_tokens)]
