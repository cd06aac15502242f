"""The inputs have the property they are named for, and layouts hold the values they claim."""

from __future__ import annotations

import pytest
import torch

from tests.support.inputs import (
    DTYPES,
    IGNORE_INDEX,
    KINDS,
    batch,
    padded_shard,
    shard_of,
    upstream_gradients,
    with_a_broad_row,
)
from tests.support.layouts import label_layouts, logits_layouts
from tests.support.oracle import cross_entropy_fp64, token_outputs_fp64

ROWS, VOCAB, SHARDS = 12, 48, 3


def _label_probability(made):
    return made.logits.double().softmax(-1).gather(1, made.labels.unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_reproducible_and_has_a_finite_loss(kind, dtype):
    made = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=SHARDS, dtype=dtype, seed=3)
    again = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=SHARDS, dtype=dtype, seed=3)
    other = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=SHARDS, dtype=dtype, seed=4)
    assert torch.equal(made.logits, again.logits) and torch.equal(made.labels, again.labels)
    assert not torch.equal(made.logits, other.logits)
    assert made.logits.dtype == dtype and made.labels.dtype == torch.int64
    assert made.logits.shape == (ROWS, VOCAB) and made.labels.shape == (ROWS,)
    in_vocabulary = (made.labels >= 0) & (made.labels < VOCAB)
    assert bool((in_vocabulary | (made.labels == IGNORE_INDEX)).all())
    oracle = cross_entropy_fp64(made.logits, made.labels, reduction="none")
    assert oracle.loss.isfinite().all() and oracle.grad.isfinite().all()


@pytest.mark.parametrize("rows", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_few_rows_and_one_shard(kind, rows):
    assert batch(kind, rows=rows, vocab_size=7).logits.shape == (rows, 7)


def test_no_kind_is_nearly_uniform():
    for kind in KINDS:
        made = batch(kind, rows=ROWS, vocab_size=VOCAB, shards=SHARDS)
        assert float(made.logits.softmax(-1).max()) > 10 / VOCAB, kind


def test_confident_rows_have_the_probability_of_their_gap():
    made = batch("confident", rows=3, vocab_size=VOCAB, gaps=(2.2, 6.9, 11.5))
    expected = torch.tensor([2.2, 6.9, 11.5], dtype=torch.float64).sigmoid()
    torch.testing.assert_close(_label_probability(made), expected, atol=1e-6, rtol=0)


def test_a_broad_row_has_a_loss_an_entropy_and_a_gradient_near_1():
    made = batch("confident", rows=3, vocab_size=VOCAB, dtype=torch.float16)
    logits, labels = with_a_broad_row(made)
    assert logits.dtype == torch.float16 and torch.equal(logits[:3], made.logits)
    loss, grad = cross_entropy_fp64(logits, labels, reduction="none")
    assert torch.equal(labels[:3], made.labels) and 1 < loss[3] < 20 and float(grad[3].min()) < -0.9
    assert token_outputs_fp64(logits, labels).entropy[3] > 1


def test_excluded_shards_are_excluded_throughout_and_hold_no_label():
    made = batch("excluded_shard", rows=ROWS, vocab_size=VOCAB, shards=SHARDS)
    lost = [shard_of(made.logits, shard, SHARDS).eq(float("-inf")).all(1) for shard in range(SHARDS)]
    assert torch.stack(lost).sum(0).eq(1).all()
    assert bool(lost[-1][::2].all()) and all(bool(shard.any()) for shard in lost)
    assert bool((_label_probability(made) > 0).all())


def test_excluded_columns_include_the_edges_of_shards():
    made = batch("excluded_columns", rows=ROWS, vocab_size=VOCAB, shards=SHARDS)
    width = VOCAB // SHARDS
    not_labels = made.labels != width
    assert bool(made.logits[not_labels, width].eq(float("-inf")).all())


def test_shard_edges_are_all_there():
    made = batch("shard_edges", rows=ROWS, vocab_size=VOCAB, shards=SHARDS)
    assert set(made.labels.tolist()) == {0, 15, 16, 31, 32, 47}


def test_some_ignored_ignores_the_first_and_last_row_and_not_all():
    labels = batch("some_ignored", rows=ROWS, vocab_size=VOCAB).labels
    assert labels[0] == labels[-1] == IGNORE_INDEX and labels[1] != IGNORE_INDEX


def test_padding_begins_where_the_vocabulary_ends():
    logits = torch.arange(20.0).view(2, 10)
    shards = [padded_shard(logits, start, start + 4, fill=-1.0) for start in (0, 4, 8, 12)]
    assert torch.equal(torch.cat(shards, dim=1)[:, :10], logits)
    assert bool((torch.cat(shards, dim=1)[:, 10:] == -1).all()) and bool((shards[3] == -1).all())
    assert padded_shard(logits, 0, 10).data_ptr() != logits.data_ptr()
    assert padded_shard(logits, 5, 11)[:, 5:].isnan().all()


def test_upstream_gradients_are_named_for_their_layout():
    made = dict(upstream_gradients((3, 4)))
    assert made["expanded from one value"].stride() == (0, 0)
    assert made["expanded rows"].stride()[0] == 0
    assert made["transposed"].stride() == (1, 3)
    assert made["every other element"].stride() == (8, 2)
    assert made["zero in the first token"].flatten()[0] == 0
    assert 0 < float(made["tiny"].abs().max()) < 1e-5
    assert all(gradient.shape == (3, 4) for gradient in made.values())
    assert all(gradient.shape == (5,) for _, gradient in upstream_gradients((5,)))


@pytest.mark.parametrize("columns", [37, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_are_different_views_of_finite_values_in_nan_surroundings(columns, dtype):
    layouts = logits_layouts(columns, dtype=dtype)
    assert len({layout.name for layout in layouts}) == len(layouts)
    for layout in layouts:
        assert layout.view.shape[-1] == columns and layout.view.dtype == dtype, layout.name
        assert layout.view.data_ptr() >= layout.base.data_ptr(), layout.name
        assert layout.view.isfinite().all() and layout.outside_is_untouched(), layout.name
    shared = {layout.name for layout in layouts if layout.shares_elements}
    assert shared == {
        "one row expanded", "one row of each batch expanded", "overlapping windows"
    }  # fmt: skip
    dimensions = {layout.view.dim() for layout in layouts}
    assert dimensions == {2, 3, 4}
    assert any(layout.view.storage_offset() == 1 for layout in layouts)
    assert any(layout.view.stride(-1) != 1 for layout in layouts)


def test_a_write_outside_the_view_is_seen():
    layout = next(x for x in logits_layouts(8) if x.name == "all but the last token")
    layout.view.zero_()
    assert layout.outside_is_untouched()
    layout.base[0, -1, 0] = 0.0
    assert not layout.outside_is_untouched()


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 1, 3)])
def test_label_layouts_hold_the_same_labels(shape):
    labels = torch.randint(0, 50, shape)
    views = label_layouts(labels)
    assert all(torch.equal(view.long(), labels) for _, view in views)
    assert dict(views)["int32"].dtype == torch.int32
    assert dict(views)["every other element"].stride(-1) == 2
    assert dict(views)["one element off a boundary"].storage_offset() == 1
    assert ("transposed" in dict(views)) == (len(shape) > 1)
