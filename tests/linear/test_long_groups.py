"""Groups that are longer than a chunk: the numbers of one chunk, in the memory of several."""

import gc

import pytest
import torch

from tests.support.cases.flat import linear_objective
from tests.support.cases.groups import (
    COLUMNS,
    IGNORED,
    LENGTH,
    OF_SEQUENCES,
    SEQUENCES,
    VALID,
    Case,
    call,
    check,
    dpo,
    gspo_token,
    made,
)
from tests.support.cases.linear import record_matmuls
from tests.support.ranks.pools import device_of, in_several_ranks
from vocab_parallel_ce import Teacher, verify_calls
from vocab_parallel_ce.head.products import Products, WeightGradient

CHUNK = 13  # longer than some pairs, shorter than others
N_LONG, N_SHORT = 11, 7  # chunks of pairs
TOKEN = 4 * COLUMNS  # bytes of its logits


@pytest.fixture
def rows(monkeypatch):
    """The rows of every product that makes logits."""
    found, fill = [], Products.fill_logits

    def recorded(self, states, logits):
        found.append(len(logits))
        fill(self, states, logits)

    monkeypatch.setattr(Products, "fill_logits", recorded)
    return found


@pytest.mark.parametrize(("keep", "n_kept"), [("none", 0), (f"{3 * CHUNK * TOKEN}B", 3), ("all", N_LONG)])
def test_long_groups_take_a_fourth_product_and_short_ones_three(impl_device, rows, keep, n_kept):
    """Or keep logits; no chunk is longer than it says."""
    impl, device = impl_device
    case, options = made("pairs"), {"impl": impl, "chunk_size": CHUNK}
    with record_matmuls() as products:
        found = call(case, dpo, device, keep_logits=keep, **options)
    check([found], dpo, case)
    assert max(rows) == CHUNK and len(rows) == 2 * N_LONG - n_kept + N_SHORT
    assert len(products) == 3 * (N_LONG + N_SHORT) + N_LONG - n_kept
    assert all(map(torch.equal, found, call(case, dpo, device, **options)))
    rows.clear()
    leaves = case.hidden.to(device), case.weight.to(device), case.labels.to(device)
    given = {
        n: {k: t.to(device) for k, t in each.items()}
        for n, each in (("tokens", case.tokens), ("numbers", case.numbers))
    }
    loss, _ = linear_objective(*leaves, dpo, together=case.together.to(device), logit_scale=0.3, **given, **options)
    torch.testing.assert_close(loss.cpu(), found[0])
    assert max(rows) == CHUNK and len(rows) == N_LONG + N_SHORT


@pytest.mark.reference
@pytest.mark.parametrize(("objective", "kind"), [(gspo_token, "sequences"), (dpo, "all"), (dpo, "tokens")])
def test_chunks_of_one_token(objective, kind):
    case = made(kind)
    check([call(case, objective, chunk_size=1)], objective, case)


@pytest.mark.reference
def test_a_group_that_fits_a_chunk_is_not_long(rows):
    """Though chunks of equal sizes are shorter: of 400 tokens 128, where 133 fit."""
    ids = (VALID.flatten().cumsum(0) > 130).long().view_as(VALID)
    case = made("all")._replace(together=ids)
    check([call(case, dpo, chunk_size=f"{133 * TOKEN}B")], dpo, case)
    assert rows == [130, int(VALID.sum()) - 130]


@pytest.mark.reference
@pytest.mark.parametrize("seed", range(16))
def test_random_calls(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    case, (most, chunk, kept, which, form) = made("sequences"), torch.randint(1, 70, (5,), generator=generator).tolist()
    ids = (torch.rand(VALID.shape, generator=generator) ** 3 * most).long() - 1
    case = case._replace(together=ids, labels=case.labels.roll(which).masked_fill(ids == most // 3, IGNORED))
    objective = list(OF_SEQUENCES.values())[which % len(OF_SEQUENCES)]
    keep = ("none", "all", f"{(chunk + kept) * TOKEN}B")[form % 3]
    check([call(case, objective, chunk_size=chunk, keep_logits=keep)], objective, case)
    assert max(rows) <= chunk


def of_all_outputs(log_probs=None, *, groups, divergence=None, entropy=None, **_):
    found = [each.view(len(each), -1).mean(1) for each in (log_probs, divergence, entropy) if each is not None]
    return sum(groups.mean(each.clamp(-20, 20)) ** 2 for each in found)


generator = torch.Generator().manual_seed(1)
BY_TOKEN = 0.5 + torch.rand(SEQUENCES, LENGTH, generator=generator)
TEACHER = torch.randn(SEQUENCES, LENGTH, 4, generator=generator), torch.randn(COLUMNS, 4, generator=generator)
OPTIONS = {
    "temperature": {"temperature": BY_TOKEN, "softcap": 9.0, "bias": torch.linspace(-1, 1, COLUMNS)},
    "threshold": {"threshold": -BY_TOKEN, "outputs": ("entropy", "predictions"), "vocab_size": COLUMNS - 1},
    "main_grad": {"main_grad": torch.zeros(COLUMNS, 8), "frozen": 0, "num_items": 3},
    "frozen": {"frozen": 1, "reduction": "sum", "keep_logits": f"{2 * CHUNK * TOKEN}B"},
    "fp32 logits": {"dtype": torch.bfloat16, "logits_dtype": torch.float32, "keep_logits": "all"},
    "fp16": {"dtype": torch.float16},
    "ids": {"ids": True},
    "teacher": {"teacher": "forward", "outputs": ("entropy",)},
    "js": {"teacher": "js", "keep_logits": "all"},
    "no labels": {"teacher": "reverse", "labels": False},
}


def called(
    device, *, dtype=torch.float32, frozen=None, ids=False, teacher=None, labels=True, rank=0, n_ranks=1, **options
):
    """Everything that a call gives of this rank's columns."""
    case = made("pairs")
    leaves = [case.hidden.to(device, dtype, copy=True), case.weight.chunk(n_ranks)[rank].to(device, dtype, copy=True)]
    leaves = [leaf.requires_grad_(index != frozen) for index, leaf in enumerate(leaves)]
    given = case.labels
    if ids:
        given = torch.stack([given, (given + 1) % COLUMNS], -1).masked_fill(~VALID[..., None], IGNORED)
    options = {n: t.to(device, copy=True) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
    if teacher is not None:
        of_teacher = TEACHER[0].to(device), TEACHER[1].chunk(n_ranks)[rank].to(device)
        options["teacher"] = Teacher(*of_teacher, divergence=teacher)
    options |= {"together": case.together.to(device), "check_objective": True}
    given = given.clamp(max=COLUMNS - 2).to(device) if labels else None
    loss, found = linear_objective(*leaves, given, of_all_outputs, **options)
    loss.backward()
    outputs = [getattr(found, name) for name in ("log_probs", "divergence", "entropy", "predictions")]
    results = [loss.detach(), *outputs, *[leaf.grad for leaf in leaves], options.get("main_grad")]
    return [None if each is None else each.cpu() for each in results]


def assert_close(found, expected, dtype=torch.float32):
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
        else:
            atol = tolerance * float(other.abs().max())
            torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_as_in_one_chunk(impl_device, name):
    impl, device = impl_device
    options = OPTIONS[name] | {"impl": impl}
    whole = called(device, **options | {"keep_logits": "none"})
    assert_close(called(device, **options, chunk_size=CHUNK), whole, options.get("dtype", torch.float32))


def _in_rank(rank, group, impl):
    device, ranks = device_of(rank, group), {"rank": rank, "n_ranks": group.size(), "group": group}
    options = {"impl": impl, "chunk_size": CHUNK}
    found = call(made("pairs"), dpo, device, group.size(), rank, group=group, **options)
    with verify_calls():
        kept = call(made("pairs"), dpo, device, group.size(), rank, group=group, keep_logits="all", **options)
        teacher = called(device, teacher="js", **ranks, **options)
        part = made("pairs")
        part = part._replace(hidden=part.hidden.chunk(group.size())[rank])
        of_part = call(part, dpo, device, group.size(), rank, group=group, sequence_parallel=True, **options)
        none = Case(*(each[:0] for each in part[:1]), part.weight, part.labels[:0], part.together[:0], {}, part.numbers)
        empty = call(none, dpo, device, group.size(), rank, group=group, sequence_parallel=True, **options)
        assert not any(each.any() for each in empty)
    return found, kept, teacher, of_part


@in_several_ranks
def test_on_ranks(rank_pool, impl):
    found, kept, of_teacher, of_parts = zip(*rank_pool.run(_in_rank, impl), strict=True)
    check(found, dpo, made("pairs"))
    d_hidden = torch.cat([each[1] for each in of_parts])  # with sequence parallelism
    check([[each[0], d_hidden, *each[2:]] for each in of_parts], dpo, made("pairs"))
    assert all(all(map(torch.equal, one, other)) for one, other in zip(found, kept, strict=True))
    whole = called("cpu", teacher="js", impl="reference")
    weights = torch.cat([each[6] for each in of_teacher])
    for each in of_teacher:
        assert_close([*each[:6], weights, None], whole)


@pytest.mark.reference
def test_kept_logits_end_before_the_gradient_is_rounded(monkeypatch):
    alive, rounded = [], WeightGradient.rounded

    def recorded(self, *args):
        alive.append([t.shape for t in gc.get_objects() if type(t) is torch.Tensor and t.shape[1:] == (COLUMNS,)])
        return rounded(self, *args)

    monkeypatch.setattr(WeightGradient, "rounded", recorded)
    for keep in ("none", "all"):
        call(made("all"), dpo, chunk_size=CHUNK, keep_logits=keep)
    assert len(alive) == 2 and alive[0] == alive[1]
