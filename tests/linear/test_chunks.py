"""How many tokens a chunk has by default."""

import pytest

from vocab_parallel_ce.head.chunks import choose_chunk_tokens, chunks_of, default_tokens, equal_chunk

# (tokens, hidden size, columns, bytes of an element) and the sizes of the chunks.
CHOSEN = [
    ((11264, 4096, 128256, 2), [11264]),  # as much memory as several chunks and their fp32 sum
    ((11265, 4096, 128256, 2), [6144, 5121]),
    ((8192, 2048, 128256, 2), [8192]),
    ((32768, 16384, 128256, 2), [32768]),  # as many logits as the fp32 sum
    ((32769, 16384, 128256, 2), [11008, 11008, 10753]),
    ((16384, 4096, 128256, 2), [6144, 6144, 4096]),
    ((16384, 4096, 64128, 2), [6144, 6144, 4096]),
    ((32768, 4096, 128256, 2), [7168] * 4 + [4096]),
    ((32768, 4096, 16032, 2), [8192] * 4),  # 256 MiB of logits
    ((16384, 2048, 128256, 2), [6144, 6144, 4096]),
    ((4096, 1024, 128256, 4), [4096]),
    ((16384, 5000, 128256, 2), [6144, 6144, 4096]),
]


@pytest.mark.parametrize(("sizes", "expected"), CHOSEN)
def test_default_chunks(sizes, expected):
    n_tokens, hidden_size, n_columns, element_size = sizes
    chunk = choose_chunk_tokens(*sizes, default_tokens(hidden_size, element_size))
    assert [rows.stop - rows.start for rows in chunks_of(n_tokens, chunk)] == expected


@pytest.mark.parametrize("hidden_size", [512, 1000, 2048, 4096, 8192])
@pytest.mark.parametrize("element_size", [2, 4])
def test_memory_is_at_most_a_quarter_more_than_with_4096_tokens(hidden_size, element_size):
    """Of the logits and the fp32 sum, each of any number of columns."""
    n_tokens, n_columns = 2**20, 2**18
    fewest = default_tokens(hidden_size, element_size)
    chunk = choose_chunk_tokens(n_tokens, hidden_size, n_columns, element_size, fewest)
    most = 1.25 * (4 * hidden_size + element_size * 4096)
    assert chunk > 4096 and 4 * hidden_size + element_size * chunk <= most
    for n_tokens in range(4096, 2**15, 32):
        if choose_chunk_tokens(n_tokens, hidden_size, n_columns, element_size, fewest) == n_tokens:
            has_small_logits = element_size * n_tokens <= 4 * hidden_size
            assert has_small_logits or element_size * (hidden_size + n_tokens) <= most


def test_a_wave_takes_no_more_chunks():
    assert equal_chunk(10_000, 5000, 4096) == 5000 and equal_chunk(10_000, 5200, 4096) == 5120
    assert equal_chunk(10_000, 9000, 4096) == 8192
    assert equal_chunk(10, 4, 1) == 4 and equal_chunk(0, 4) == 1
