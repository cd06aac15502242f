"""Which columns a rank owns: torch.chunk's cut, equal shards with padding, and widths that fit neither."""

from __future__ import annotations

import pytest
import torch

from vocab_parallel_ce.shard import VocabShard

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies

pytestmark = pytest.mark.reference

every_cut = hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)


def _accepted(vocab_size, n_ranks, widths):
    """The shards of all ranks, or None where a rank refuses."""
    try:
        return [VocabShard.for_rank(vocab_size, rank, n_ranks, widths[rank]) for rank in range(n_ranks)]
    except ValueError:
        return None


@pytest.mark.parametrize("vocab_size", (1, 7, 8, 1003))
@pytest.mark.parametrize("n_ranks", (1, 2, 3, 16))
def test_the_cut_is_that_of_torch_chunk(vocab_size, n_ranks):
    """Ranks for which no column is left have none, as a DTensor's do."""
    chunks = torch.arange(vocab_size).chunk(n_ranks)
    nothing = torch.arange(0)
    for rank, chunk in enumerate((*chunks, *[nothing] * (n_ranks - len(chunks)))):
        start = int(chunk[0]) if len(chunk) else vocab_size
        expected = (start, start + len(chunk), vocab_size)
        assert VocabShard.for_rank(vocab_size, rank, n_ranks) == expected
        shard = VocabShard.for_rank(vocab_size, rank, n_ranks, len(chunk))
        assert shard == expected
        assert shard.n_columns == shard.n_valid == len(chunk)
        assert shard.checked(len(chunk), n_ranks) == shard


@pytest.mark.parametrize(
    "vocab_size, n_ranks, width, valid",
    [
        (1003, 3, 342, [342, 342, 319]),
        (50257, 4, 12672, [12672, 12672, 12672, 12241]),
        (10, 4, 3, [3, 3, 3, 1]),
        (9, 4, 3, [3, 3, 3, 0]),
        (5, 4, 4, [4, 1, 0, 0]),
        (5, 4, 2, [2, 2, 1, 0]),
        (1, 4, 1, [1, 0, 0, 0]),
        (7, 1, 8, [7]),
        (1000, 1, 1000, [1000]),
        (1000, 1, 1024, [1000]),
    ],
)
def test_equal_shards_are_padded_behind_the_vocabulary(vocab_size, n_ranks, width, valid):
    """A last shard may be partly or wholly padding."""
    for rank, n_valid in enumerate(valid):
        shard = VocabShard.for_rank(vocab_size, rank, n_ranks, width)
        assert shard == (rank * width, (rank + 1) * width, vocab_size)
        assert (shard.n_columns, shard.n_valid) == (width, n_valid)
        assert shard.checked(width, n_ranks) == shard


@every_cut
@hypothesis.given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 400))
def test_accepted_shards_have_every_column_once(vocab_size, n_ranks, width):
    padded = _accepted(vocab_size, n_ranks, [width] * n_ranks)
    cut = _accepted(vocab_size, n_ranks, [None] * n_ranks)
    for shards in filter(None, (padded, cut)):
        owned = [column for shard in shards for column in range(shard.start, shard.start + shard.n_valid)]
        assert owned == list(range(vocab_size))
        assert all(shard.vocab_size == vocab_size for shard in shards)
    holds_all = n_ranks > 1 and width >= max(vocab_size, 2)
    assert cut is not None and (padded is not None) == (width * n_ranks >= vocab_size and not holds_all)


@pytest.mark.quick
@pytest.mark.parametrize("vocab_size, width", [(1000, 1000), (1000, 1024), (1000, 249), (1003, 240), (5, 5), (1, 2)])
def test_a_width_that_fits_no_cut_is_refused_on_every_rank(vocab_size, width):
    """The whole vocabulary on each of several ranks gave a loss that was log(R) too large."""
    for rank in range(4):
        with pytest.raises(ValueError, match=f"^logits: last dimension must be .* got {width}"):
            VocabShard.for_rank(vocab_size, rank, 4, width)
