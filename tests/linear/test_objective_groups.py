"""Objectives of whole groups inside a head: against fp64, one group at a time, on one rank and on several."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.support.cases.flat import linear_objective
from tests.support.cases.groups import (
    CASES,
    COLUMNS,
    IGNORED,
    LENGTH,
    SEQUENCES,
    VALID,
    Case,
    call,
    check,
    dpo,
    gspo,
    gspo_token,
    made,
    truth_of,
)
from tests.support.cases.linear import record_matmuls
from tests.support.host.gpu import assert_host_never_waits
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks, in_several_ranks
from vocab_parallel_ce import Teacher, verify_calls
from vocab_parallel_ce.head.chunks import parts_of
from vocab_parallel_ce.head.groups import chunks_of_groups


@pytest.mark.parametrize(("objective", "kind"), CASES.values(), ids=CASES)
def test_against_fp64(impl_device, objective, kind):
    """In one chunk, in several, and in chunks that are shorter than some groups."""
    impl, device = impl_device
    case = made(kind)
    for chunk_size in ("auto", 60, 12) if impl == "reference" else (60,):
        check([call(case, objective, device, impl=impl, chunk_size=chunk_size)], objective, case)


def _in_rank(rank, group, impl, objective, case, chunk_size):
    options = {"group": group, "impl": impl, "chunk_size": chunk_size}
    found = call(case, objective, device_of(rank, group), group.size(), rank, **options)
    if chunk_size == "auto":  # a DTensor too
        device = device_of(rank, group)
        mesh = init_device_mesh(device.type, (group.size(),))
        weight = distribute_tensor(case.weight.to(device), mesh, [Shard(0)])
        whole = call(case, objective, device, weight=weight, **options | {"group": mesh})
        whole[2] = whole[2].to_local()
        assert all(map(torch.equal, whole, found))
    return found


@pytest.mark.parametrize("chunk_size", ["auto", 150])
@in_several_ranks
def test_on_ranks(rank_pool, impl, chunk_size):
    """Of a chunk of several parts, and of chunks of one."""
    for objective, kind in ((dpo, "pairs"), (gspo_token, "sequences")):
        case = made(kind)
        check(rank_pool.run(_in_rank, impl, objective, case, chunk_size), objective, case)


def of_each(log_probs, entropy, old, groups=None, **_):
    number = (log_probs - old).clamp(max=3).exp() * log_probs.clamp(min=-9) - 0.1 * entropy
    return number if groups is None else groups.sum(number)


def test_options_are_those_of_tokens(impl_device):
    """Groups of one token each are tokens."""
    impl, device = impl_device
    case = made("tokens")
    together = torch.arange(SEQUENCES * LENGTH, device=device).view(SEQUENCES, LENGTH).flip(0, 1)
    labels, tokens = case.labels.to(device), {"old": case.tokens["old"].to(device)}
    by_token, bias = 0.5 + torch.rand(labels.shape, device=device), torch.linspace(-1, 1, COLUMNS, device=device)
    for frozen, options in (
        ("", {"temperature": by_token, "softcap": 9.0, "chunk_size": 60}),
        ("", {"threshold": -by_token, "outputs": ("entropy", "predictions"), "vocab_size": COLUMNS - 1}),
        ("hidden", {"main_grad": True, "chunk_size": 60}),
        ("weight", {"num_items": 3, "logits_dtype": torch.float32, "dtype": torch.bfloat16}),
    )[: None if impl == "reference" else 1]:
        dtype, results = options.pop("dtype", torch.float32), []
        for own in ({}, {"together": together}):
            leaves = {"hidden": case.hidden, "weight": case.weight, "bias": bias}
            leaves = {n: t.to(device, dtype, copy=True).requires_grad_(n != frozen) for n, t in leaves.items()}
            given = {"tokens": tokens, "outputs": ("entropy",), "impl": impl, "logit_scale": 0.3} | options | own
            if "main_grad" in options:
                given["main_grad"] = torch.zeros(case.weight.shape, device=device)
            hidden, weight, given["bias"] = leaves.values()
            loss, found = linear_objective(hidden, weight, labels.clamp(max=COLUMNS - 2), of_each, **given)
            loss.backward()
            grads = [t.grad for t in leaves.values()] + [given.get("main_grad")]
            results.append((loss.detach(), found.log_probs, found.entropy, found.predictions, *grads))
        torch.testing.assert_close(results[0], results[1])


def _compared(rank, group):
    """Errors of what a group cannot have, and of ids and numbers that differ between ranks under verification."""
    case, device = made("pairs"), device_of(rank, group)
    mesh = init_device_mesh(device.type, (group.size(),))
    weight = distribute_tensor(case.weight.to(device), mesh, [Shard(0)])
    other = case._replace(together=case.together + rank * (case.together == 3))
    others = {name: each + rank for name, each in case.numbers.items()}
    run = partial(call, objective=dpo, device=device, n_ranks=group.size(), rank=rank, group=group)
    tensors, together = (case.hidden.to(device), weight, case.labels.to(device), dpo), case.together.to(device)
    errors = [error_of(partial(linear_objective, *tensors, group=mesh, together=together, own_tokens=True))]
    with verify_calls():
        return [*errors, *(error_of(run, each) for each in (other, case._replace(numbers=others), case))]


@in_ranks((2,), (), (2,))
def test_what_is_refused_and_what_differs_between_ranks(rank_pool, impl):
    for own, ids, numbers, none in rank_pool.run(_compared):
        assert own.startswith("ValueError: own_tokens: expected none with together, got True; use a whole weight")
        assert ids.startswith("ValueError: together: rank 1 of 2 has shape (40, 10)")
        assert numbers.startswith("ValueError: numbers['reference']: rank 1 of 2 has shape (400,)")
        assert none is None


@pytest.mark.parametrize("kind", ["teacher", "no labels", "ids"])
def test_of_divergences_and_of_given_ids(impl_device, kind):
    """Whole groups of what else an objective takes."""
    impl, device = impl_device
    case = made("pairs")
    ids = torch.stack([case.labels, (case.labels + 1) % COLUMNS], -1).masked_fill(~VALID[..., None], IGNORED)
    generator = torch.Generator().manual_seed(1)
    of_teacher = torch.randn(SEQUENCES, LENGTH, 4, generator=generator), torch.randn(COLUMNS, 4, generator=generator)

    def objective(log_probs=None, divergence=None, *, groups, **_):
        found = 0.0 if divergence is None else groups.mean(divergence) ** 2
        return found if log_probs is None else found + groups.mean(log_probs).exp().view(len(groups.ids), -1).prod(-1)

    leaves = [t.to(device).requires_grad_() for t in (case.hidden, case.weight)]
    labels = {"teacher": case.labels, "no labels": None, "ids": ids}[kind]
    options = {"teacher": None if kind == "ids" else Teacher(*(t.to(device) for t in of_teacher)), "impl": impl}
    labels = None if labels is None else labels.to(device)
    options |= {"together": case.together.to(device), "reduction": "sum", "chunk_size": 60}
    loss, _ = linear_objective(*leaves, labels, objective, **options)

    exact = [t.detach().cpu().double().requires_grad_() for t in leaves]
    log_probs = F.linear(*exact).log_softmax(-1)
    teacher = F.linear(*(t.double() for t in of_teacher)).log_softmax(-1)
    divergence = (teacher.exp() * (teacher - log_probs)).sum(-1)
    counts = (case.together != -1) & (VALID if labels is not None else True)
    expected = 0.0
    for group in case.together[counts].unique().tolist():
        own = counts & (case.together == group)
        expected += 0.0 if kind == "ids" else divergence[own].mean() ** 2
        if kind != "no labels":
            at = log_probs[own].gather(-1, ids[own] if kind == "ids" else case.labels[own][:, None])
            expected += at.mean(0).exp().prod()
    torch.testing.assert_close(loss.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=0)
    for one, other in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, exact), strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=2e-5, atol=4e-6 * float(other.abs().max()))


def test_the_formula_of_dpo_in_the_layout_of_trl(impl_device):
    """Chosen rows are the first half of a batch, rejected ones the second."""
    impl, device = impl_device
    case = made("pairs")
    half = SEQUENCES // 2
    together = (torch.arange(SEQUENCES) % half)[:, None].expand(SEQUENCES, LENGTH)
    case = case._replace(together=together, numbers={"reference": torch.linspace(-3, 3, half)})
    hidden = case.hidden.double().requires_grad_()
    log_probs = (hidden @ case.weight.double().t() * 0.3).log_softmax(-1)
    of_rows = log_probs.gather(-1, case.labels.clamp(min=0)[..., None]).squeeze(-1).where(VALID, 0.0).sum(1)
    margin = of_rows[:half] - of_rows[half:] - case.numbers["reference"]
    (-F.logsigmoid(0.1 * margin)).mean().backward()
    _, d_hidden, *_ = call(case, dpo, device, impl=impl)
    torch.testing.assert_close(d_hidden.double(), hidden.grad, rtol=2e-5, atol=1e-9)


def test_divisors_and_what_is_of_no_group(impl_device):
    """A sum, ``num_items``, tokens of no group that hold NaN, and no groups at all."""
    impl, device = impl_device
    case = made("pairs")
    n_groups = truth_of(dpo, case)[-1]
    for factor, options in (
        (n_groups, {"reduction": "sum"}),
        (n_groups / 3, {"num_items": 3.0, "chunk_size": 12}),
        (1.0, {"softcap": None, "check_objective": True}),
    ):
        check([call(case, dpo, device, impl=impl, **options)], dpo, case, factor)
    counts = VALID & (case.together != -1)
    spoilt = {name: each.masked_fill(~counts, torch.nan) for name, each in case.tokens.items()}
    hidden = case.hidden.masked_fill(~counts[..., None], torch.nan)
    for size in ("auto", 12):
        found = call(case._replace(hidden=hidden, tokens=spoilt), dpo, device, impl=impl, chunk_size=size)
        check([found], dpo, case)
        assert not any(each.any() for each in call(case, dpo, device, impl=impl, chunk_size=size, num_items=0)[:3])
    for none in (case._replace(together=case.together * 0 - 1), case._replace(labels=case.labels * 0 + IGNORED)):
        assert not any(each.any() for each in call(none, dpo, device, impl=impl))
    empty = Case(*(each[:0] for each in case[:1]), case.weight, case.labels[:0], case.together[:0], {}, case.numbers)
    assert not any(each.any() for each in call(empty, gspo, device, impl=impl))


def test_three_products_and_any_dtype(impl_device):
    impl, device = impl_device
    case = made("pairs")
    with record_matmuls() as products:
        plain = call(case, dpo, device, impl=impl)
    assert len(products) == 3
    for dtype, tolerance in ((torch.bfloat16, 0.04), (torch.float16, 0.01)):
        few = call(case._replace(hidden=case.hidden.to(dtype), weight=case.weight.to(dtype)), dpo, device, impl=impl)
        for one, other in zip(few, plain, strict=True):
            torch.testing.assert_close(one.float(), other, rtol=0, atol=tolerance * float(other.abs().max()))
    options = {"together": case.together.to(device), "impl": impl, "logit_scale": 0.3}
    numbers = {n: t.to(device) for n, t in case.numbers.items()}
    tokens = {n: t.to(device) for n, t in case.tokens.items()}
    tensors = case.hidden.to(device), case.weight.to(device), case.labels.to(device)
    loss, _ = linear_objective(*tensors, dpo, tokens=tokens, numbers=numbers, **options)
    torch.testing.assert_close(loss.cpu(), plain[0])


def test_ids_on_the_host(impl_device, monkeypatch):
    """As those on the device, if no label in a group is ignored; on a CPU, whose ids are always there, by a patch."""
    impl, device = impl_device
    case = made("pairs")
    expected = [call(case, dpo, device, impl=impl, chunk_size=size) for size in ("auto", 12)]
    if device == "cpu":
        monkeypatch.setattr("vocab_parallel_ce.head.groups.knows", lambda ids, device: True)
    run = partial(call, case, dpo, device, impl=impl)
    known = case.together.masked_fill(~VALID, -1)
    for size, right in zip(("auto", 12), expected, strict=True):
        assert all(map(torch.equal, run(together=known, chunk_size=size), right))
    assert all(each.isnan().any() for each in run(together=case.together, check_labels=False))
    with pytest.raises(ValueError, match="together: expected -1 for ignored labels if ids are on the CPU, got groups"):
        run(together=case.together, check_labels=True)


@pytest.mark.cuda
def test_of_ids_on_the_host_nothing_waits():
    case = made("pairs")
    known = case.together.masked_fill(~VALID, -1)
    tokens, numbers = ({n: t.cuda() for n, t in each.items()} for each in (case.tokens, case.numbers))
    leaves = case.hidden.cuda().requires_grad_(), case.weight.cuda().requires_grad_()
    labels, options = case.labels.cuda(), {"together": known, "tokens": tokens, "numbers": numbers, "chunk_size": 12}
    assert_host_never_waits(lambda: linear_objective(*leaves, labels, dpo, **options)[0].backward())


def test_an_objective_of_groups_gets_copies():
    case = made("sequences")

    def writing(log_probs, groups, old, reference, **_):
        return groups.sum(log_probs * old.mul_(2)) * groups.of(reference.mul_(2))

    before = {name: each.clone() for name, each in (case.tokens | case.numbers).items()}
    loss = call(case, writing)[0]
    assert all(torch.equal(each, before[name]) for name, each in (case.tokens | case.numbers).items())
    expected = (
        4
        * call(case, lambda log_probs, groups, old, reference, **_: groups.sum(log_probs * old) * groups.of(reference))[
            0
        ]
    )
    torch.testing.assert_close(loss, expected)


def whitened(log_probs, groups, **_):
    ratio = groups.sum(log_probs)
    return ratio - ratio.mean()


def of_all_tokens(log_probs, groups, **_):
    return groups.mean(log_probs * log_probs.detach().mean())


def softmax_of_groups(log_probs, groups, **_):
    return groups.mean(log_probs).softmax(0)


@pytest.mark.parametrize("objective", [whitened, of_all_tokens, softmax_of_groups])
def test_an_objective_that_mixes_groups_is_refused(objective):
    """Of a single group there is nothing to mix."""
    case = made("pairs")
    with pytest.raises(ValueError, match="objective: expected each group's number .*it mixes groups"):
        call(case, objective, check_objective=True)
    call(case, objective, check_objective=False)
    call(case._replace(together=case.together.clamp(max=0)), objective, check_objective=True)


def test_a_mean_of_tokens_is_refused_of_tokens_and_right_of_groups():
    """A function that was checked with one is not with the other."""
    case = made("sequences")

    def centred(log_probs, groups=None, **_):
        centre = log_probs.mean() if groups is None else groups.to_tokens(groups.mean(log_probs))
        number = (log_probs - centre) ** 2
        return number if groups is None else groups.sum(number)

    check([call(case, centred, check_objective=True)], centred, case)
    with pytest.raises(ValueError, match="it mixes tokens"):
        linear_objective(case.hidden.requires_grad_(), case.weight, case.labels, centred, check_objective=True)


def test_chunks_and_parts_end_where_groups_end():
    assert chunks_of_groups([3, 4, 9], 5) == (slice(0, 4), slice(4, 9))
    assert chunks_of_groups([9], 9) == (slice(0, 9),) and chunks_of_groups([1, 2, 3], 1)[1] == slice(1, 2)
    assert parts_of(300, 2, [100, 280, 300]) == [slice(0, 280), slice(280, 300)]
    assert parts_of(300, 2, [300]) == [slice(0, 300)] == parts_of(300, 1, [100, 300])
    assert parts_of(300, 2) == [slice(0, 256), slice(256, 300)]
