"""``next_labels`` over a context-parallel group of processes, and the loss of such labels."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import vocab_parallel_ce as vp
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.packed import LAYOUTS, Packed, held
from tests.support.ranks.collectives import error_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks

COLUMNS = 11
# In units of what a layout needs. One is empty, and of four ranks with two chunks some are of one token a chunk.
ROWS = [(2,), (1, 0, 3), (1, 2, 0, 0, 1)]


def _packed(layout, n_ranks, lengths):
    multiple = n_ranks * (1 + (layout == "zigzag"))
    generator = torch.Generator().manual_seed(len(lengths))
    ids = [torch.randint(0, COLUMNS, (length * multiple,), generator=generator).tolist() for length in lengths]
    ids[0][-1] = IGNORE_INDEX
    return Packed(ids)


def _packed_and_rows(rank, group):
    """In a rank: what each call returns, and the collectives of all."""
    device, n_ranks, found, given = device_of(rank, group), group.size(), {}, {}
    mesh = init_device_mesh(device.type, (n_ranks,))
    for layout in LAYOUTS:
        for lengths in ROWS:
            row = _packed(layout, n_ranks, lengths)
            labels = torch.tensor(row.held(layout, rank, n_ranks), device=device)
            given[layout, len(lengths)] = (labels, {"cu_seqlens": row.cu_seqlens()})
            given[layout, len(lengths), "on its device"] = (labels, {"cu_seqlens": row.cu_seqlens().to(device)})
        rows = [held(range(10 * i, 10 * i + 2 * n_ranks), layout, rank, n_ranks) for i in range(3)]
        given[layout, "rows"] = (torch.tensor(rows, device=device), {})
    with record_collectives() as calls:
        for name, (labels, bounds) in given.items():
            found[name] = vp.next_labels(labels, group=group, layout=name[0], **bounds).tolist()
    of_mesh = {
        name: vp.next_labels(labels, group=mesh, layout=name[0], **bounds).tolist()
        for name, (labels, bounds) in given.items()
    }
    with vp.verify_calls():
        verified = {
            name: vp.next_labels(labels, group=group, layout=name[0], **bounds).tolist()
            for name, (labels, bounds) in given.items()
        }
    return found, of_mesh, verified, calls


@in_ranks((1, 2, 4), (), (2, 4))
def test_one_exchange_of_the_first_label_of_each_run(rank_pool, impl):
    if impl != "reference":
        pytest.skip("no kernel runs")
    n_ranks = rank_pool.world_size
    for rank, (found, of_mesh, verified, calls) in enumerate(rank_pool.run(_packed_and_rows)):
        expected, sent = {}, []
        for layout in LAYOUTS:
            for lengths in ROWS:
                row = _packed(layout, n_ranks, lengths)
                for name in ((layout, len(lengths)), (layout, len(lengths), "on its device")):
                    expected[name] = row.ahead(IGNORE_INDEX, layout, rank, n_ranks)
                    sent.append(8 * len(lengths) * (1 + (layout == "zigzag")))
            rows = [[range(10 * i, 10 * i + 2 * n_ranks)] for i in range(3)]
            expected[layout, "rows"] = [Packed(row).ahead(IGNORE_INDEX, layout, rank, n_ranks) for row in rows]
            sent.append(8 * 3 * (1 + (layout == "zigzag")))
        assert found == of_mesh == verified == expected
        assert [call.name for call in calls] == ["_allgather_base_"] * (0 if n_ranks == 1 else len(sent))
        assert [call.nbytes for call in calls] == ([] if n_ranks == 1 else sent)


def _disagreeing(rank, group):
    """In a rank: what every rank says if one has other boundaries, and if one has none."""
    labels, bounds = torch.arange(4), [torch.tensor([0, 4, 8]), torch.tensor([0, 8])][rank]
    options = {"group": group, "layout": "contiguous"}
    with vp.verify_calls():
        return (
            error_of(lambda: vp.next_labels(labels, cu_seqlens=bounds, **options)),
            error_of(lambda: vp.next_labels(labels.view(1, 4)[:, rank:], **options)),
            error_of(lambda: vp.next_labels(labels, cu_seqlens=bounds + rank, **options)),
        )


@in_ranks((2,), (), ())
def test_verification_compares_the_arguments_that_say_where_sequences_are(rank_pool, impl):
    first, second = rank_pool.run(_disagreeing)
    assert first == second
    assert first[0].startswith("ValueError: cu_seqlens: rank 1 of 2 has shape (2,)")
    assert first[1].startswith("ValueError: labels.shape: rank 1 of 2 has (1, 3), rank 0 has (1, 4)")
    assert first[2].startswith("ValueError: rank 1 of 2: cu_seqlens: expected 0 at the beginning, got [1, 9]")
