"""``next_labels``: one ahead in each sequence, of rows and of packed rows, on one rank and on several."""

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.packed import LAYOUTS, Packed, held
from tests.support.ranks.in_turn import in_turn
from vocab_parallel_ce.api import next_labels as module

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
st = hypothesis.strategies
every_cut = hypothesis.settings(max_examples=150, deadline=None, derandomize=True, database=None)

IDS = st.sampled_from([0, 1, 5, 9, IGNORE_INDEX])
WRONG = {  # for 8 labels: [n + 1], and what is said of it
    "late": ([1, 3, 8], "0 at the beginning"),
    "decreasing": ([0, 5, 3, 8], "no value below the one before"),
    "negative": ([0, -4, 8], "no value below the one before"),
    "long": ([0, 3, 9], "at most 8, the labels, at the end"),
    "far": ([0, 2**40], "at most 8, the labels, at the end"),
}


@st.composite
def packed_rows(draw):
    """Sequences whose lengths suit a layout on so many ranks."""
    n_ranks, layout = draw(st.integers(1, 4)), draw(st.sampled_from(LAYOUTS))
    multiple = 1 if n_ranks == 1 else n_ranks * (1 + (layout == "zigzag"))
    lengths = draw(st.lists(st.integers(0, 3).map(lambda n: n * multiple), max_size=5))
    sequences = [draw(st.lists(IDS, min_size=length, max_size=length)) for length in lengths]
    return Packed(sequences, draw(st.integers(0, 2)) if n_ranks == 1 else 0), n_ranks, layout


@pytest.mark.quick
@pytest.mark.reference
@every_cut
@hypothesis.given(
    packed_rows(),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([torch.int32, torch.int64]),
    st.sampled_from([IGNORE_INDEX, 5, module.NO_LABEL]),
    st.booleans(),
    st.booleans(),
)
def test_packed_rows_on_any_number_of_ranks(packed, dtype, of_cu_seqlens, ignore_index, is_flat, is_read):
    row, n_ranks, layout = packed

    def of_rank(rank, group):
        labels = torch.tensor(row.held(layout, rank, n_ranks), dtype=dtype)
        given = {"ignore_index": ignore_index, "group": group, "layout": layout if group else None}
        found = vp.next_labels(labels if is_flat else labels.unsqueeze(0), cu_seqlens=cu_seqlens, **given)
        assert found.shape == (labels.shape if is_flat else (1, *labels.shape)) and found.dtype == torch.int64
        return found.flatten().tolist()

    cu_seqlens = row.cu_seqlens(of_cu_seqlens)
    with pytest.MonkeyPatch.context() as patch:
        if not is_read:
            patch.setattr(module.checks, "has_no_values", lambda tensor: True)
        found = in_turn(n_ranks, of_rank)
    assert found == [row.ahead(ignore_index, layout, rank, n_ranks) for rank in range(n_ranks)]


@pytest.mark.quick
@pytest.mark.reference
@every_cut
@hypothesis.given(
    st.integers(1, 4),
    st.sampled_from(LAYOUTS),
    st.integers(0, 3),
    st.sampled_from([(1,), (3,), (2, 2), (0,)]),
    st.data(),
)
def test_rows_on_any_number_of_ranks(n_ranks, layout, size, leading, data):
    length = size * n_ranks * 2
    n_rows = torch.Size(leading).numel()
    rows = [data.draw(st.lists(IDS, min_size=length, max_size=length)) for _ in range(n_rows)]

    def of_rank(rank, group):
        labels = torch.tensor([held(row, layout, rank, n_ranks) for row in rows]).long()
        labels = labels.view(*leading, length // n_ranks)
        return vp.next_labels(labels, group=group, layout=layout).view(n_rows, length // n_ranks).tolist()

    for rank, found in enumerate(in_turn(n_ranks, of_rank)):
        assert found == [Packed([row]).ahead(IGNORE_INDEX, layout, rank, n_ranks) for row in rows]


@pytest.mark.reference
def test_zigzag_is_the_cut_of_megatron_core(monkeypatch):
    utils = pytest.importorskip("megatron.core.utils")
    monkeypatch.setattr(utils, "get_pg_size", lambda group: group.size())
    monkeypatch.setattr(utils, "get_pg_rank", lambda group: group.rank())
    whole = torch.arange(24).view(2, 12)

    def of_rank(rank, group):
        group = group or torch.distributed.ProcessGroup(0, 1)
        cut = utils.get_batch_on_this_cp_rank({"tokens": whole, "labels": whole + 1}, cp_group=group)
        ahead = vp.next_labels(cut["tokens"], group=group, layout="zigzag")
        expected = cut["labels"].masked_fill(cut["tokens"] % 12 == 11, IGNORE_INDEX)
        return ahead.tolist() == expected.tolist()

    for n_ranks in (1, 2, 3):
        assert all(in_turn(n_ranks, of_rank))


@pytest.mark.quick
@pytest.mark.parametrize("name", WRONG)
def test_wrong_cu_seqlens_raise_or_make_the_loss_nan(impl_device, monkeypatch, name):
    impl, device = impl_device
    values, message = WRONG[name]
    labels, logits = torch.arange(8, device=device), torch.randn(8, 9, device=device)
    with pytest.raises(ValueError, match=rf"^cu_seqlens: expected {message}, got \[{', '.join(map(str, values))}\]$"):
        vp.next_labels(labels, cu_seqlens=torch.tensor(values))
    monkeypatch.setattr(module.checks, "has_no_values", lambda tensor: True)
    for ignore_index in (IGNORE_INDEX, module.NO_LABEL):
        wrong = vp.next_labels(labels, cu_seqlens=torch.tensor(values, device=device), ignore_index=ignore_index)
        monkeypatch.undo()
        given = {"ignore_index": ignore_index, "impl": impl}
        loss = vp.vocab_parallel_cross_entropy(logits, wrong, reduction="none", check_labels=False, **given)
        assert loss.isnan().all()
        with pytest.raises(ValueError, match="8 outside"):
            vp.vocab_parallel_cross_entropy(logits, wrong, check_labels=True, **given)
        monkeypatch.setattr(module.checks, "has_no_values", lambda tensor: True)


@pytest.mark.reference
def test_compiled_code_has_the_same_labels_and_breaks_at_a_group():
    labels, compiled = (
        torch.arange(8),
        torch.compile(lambda labels, **given: vp.next_labels(labels, **given), fullgraph=True, backend="aot_eager"),
    )
    bounds = torch.tensor([0, 3, 3, 7])
    assert torch.equal(compiled(labels, cu_seqlens=bounds), vp.next_labels(labels, cu_seqlens=bounds))
    assert torch.equal(compiled(labels.view(2, 4)), vp.next_labels(labels.view(2, 4)))
    assert (compiled(labels, cu_seqlens=bounds.flip(0)) == module.NO_LABEL).all()
    with pytest.raises(Exception, match="next_labels has no operator for this call"):
        compiled(labels.view(2, 4), group=object())


@pytest.mark.reference
def test_an_ignore_index_beyond_the_integers_of_a_double():
    found = vp.next_labels(torch.tensor([[1, 2, 3]]), ignore_index=2**53 + 1)
    assert found.tolist() == [[2, 3, 2**53 + 1]]
    packed = vp.next_labels(torch.tensor([1, 2, 3]), ignore_index=2**53 + 1, cu_seqlens=torch.tensor([0, 2, 3]))
    assert packed.tolist() == [2, 2**53 + 1, 2**53 + 1]
