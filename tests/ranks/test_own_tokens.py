"""Ranks with tokens of their own, over the shard of a head that FSDP2 cut: what whole heads give, without gathering."""

from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.cases.flat import linear_cross_entropy, linear_objective, linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.ranks.collectives import assert_refused, error_of, messages_of, record_collectives
from tests.support.ranks.pools import device_of, in_four_ranks, in_ranks, in_several_ranks
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Teacher, verify_calls

WIDTH, SCALE = 8, 3.0
COUNTS = {"uneven": (5, 3, 4, 1), "a rank without tokens": (4, 0, 2, 7), "even": (3, 3, 3, 3)}
in_two_ranks = in_ranks((2,), (), (2,))


class Of(NamedTuple):
    """One rank's tokens."""

    hidden: torch.Tensor
    labels: torch.Tensor
    factor: torch.Tensor  # [n]
    teacher: torch.Tensor  # [n, WIDTH]


def _made(counts, n_columns):
    """The tokens of each rank, and the weights of a student and a teacher."""
    generator = torch.Generator().manual_seed(0)
    drawn = partial(torch.randn, generator=generator)
    ranks = []
    for n in counts:
        labels = torch.randint(0, n_columns, (n,), generator=generator)
        labels[1:2] = IGNORE_INDEX
        ranks.append(Of(drawn(n, WIDTH), labels, drawn(n).abs() + 0.5, drawn(n, WIDTH)))
    return ranks, drawn(n_columns, WIDTH) / WIDTH**0.5, drawn(n_columns, WIDTH) / WIDTH**0.5


def _of_rank(kind, of, logits, teacher_logits):
    """The loss of one rank by PyTorch."""
    log_probs, is_valid = logits.log_softmax(-1), of.labels != IGNORE_INDEX
    found = log_probs.gather(1, of.labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    of_teacher = teacher_logits.log_softmax(-1)
    divergence = (log_probs.exp() * (log_probs - of_teacher)).sum(-1)
    numbers = {
        "teacher": of.factor * divergence - found,
        "entropy": -0.1 * entropy - of.factor * found,
        "objective": -of.factor * found.exp() - 0.1 * entropy,
    }
    n = is_valid.sum().clamp(min=1)
    alone = (divergence / of.factor).sum() / max(1, len(of.labels))
    for name, each in numbers.items():
        numbers[name] = each.masked_fill(~is_valid, 0.0).sum() / (1 if name == "entropy" else n)
    losses = -found.masked_fill(~is_valid, 0.0)
    numbers |= {"mean": losses.sum() / n, "in_backward": losses.sum() / n, "items": losses.sum() / 7}
    numbers |= {"none": (losses * of.factor).sum(), "expected": (losses * of.factor).sum()}
    return (numbers | {"no labels": alone})[kind]


def _opd(log_probs, divergence, factor):
    return factor * divergence - log_probs


def _weighted(divergence, factor):
    return divergence / factor  # of padding not a number


def _policy(log_probs, factor, entropy):
    return -factor * log_probs.exp() - 0.1 * entropy


def _called(kind, hidden, weight, of, teacher, **on):
    """The same by the package."""
    given = hidden, weight, of.labels
    if kind == "mean":
        return linear_cross_entropy(*given, **on)
    if kind == "in_backward":
        return linear_cross_entropy(*given, gradient="in_backward", **on)
    if kind == "items":
        return linear_cross_entropy(*given, num_items=7, **on)
    if kind == "none":
        return (linear_cross_entropy(*given, reduction="none", **on) * of.factor).sum()
    if kind == "expected":
        expected = {"reduction": "none", "expected_grad_output": of.factor, "gradient": "in_forward"}
        return (linear_cross_entropy(*given, **expected, **on) * of.factor).sum()
    if kind == "entropy":
        found = linear_token_log_probs(*given, outputs=("entropy",), **on)
        assert found.entropy.shape == of.labels.shape
        return -0.1 * found.entropy.sum() - (of.factor * found.log_probs).sum()
    # The harness's `tokens` are those of linear_objective.
    tokens = {"factor": of.factor}
    if kind == "objective":
        return linear_objective(*given, _policy, tokens=tokens, outputs=("entropy",), **on)[0]
    on["teacher"] = Teacher(of.teacher, teacher, divergence="reverse")
    if kind == "no labels":
        return linear_objective(hidden, weight, None, _weighted, tokens=tokens, **on)[0]
    return linear_objective(*given, _opd, tokens=tokens, **on)[0]


def _own(rank, group, impl, kind, counts, n_columns, options):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (group.size(),))
    ranks, *heads = _made(counts[: group.size()], n_columns)
    of = Of(*(each.to(device) for each in ranks[rank]))
    weight, teacher = (distribute_tensor(each.to(device), mesh, [Shard(0)]) for each in heads)
    hidden, weight = of.hidden.requires_grad_(), weight.requires_grad_()
    on = {"group": mesh, "own_tokens": True, "impl": impl, **options}
    loss = _called(kind, hidden, weight, of, teacher, **on)
    (SCALE * loss).backward()
    assert weight.grad.placements == weight.placements
    return loss, hidden.grad, weight.grad.full_tensor()


KINDS = ("mean", "in_backward", "items", "none", "expected", "entropy", "objective", "teacher", "no labels")
# Each kind with uneven tokens, and with one of the others.
CASES = [(kind, "uneven") for kind in KINDS]
CASES += [(kind, ("a rank without tokens", "even")[number % 2]) for number, kind in enumerate(KINDS)]


def _expected(kind, counts, n_columns, dtype):
    """Each rank's loss and gradient of hidden states, and the mean gradient of the weight."""
    ranks, weight, teacher = _made(counts, n_columns)
    weight, losses, leaves = weight.to(dtype).requires_grad_(), [], []
    for of in ranks:
        of = Of(*(each if each.dtype == torch.int64 else each.to(dtype) for each in of))
        leaves.append(of.hidden.requires_grad_())
        losses.append(_of_rank(kind, of, of.hidden @ weight.t(), of.teacher @ teacher.to(dtype).t()))
    (SCALE * sum(losses)).backward()
    return losses, [leaf.grad for leaf in leaves], weight.grad / len(ranks)


@pytest.mark.parametrize(("kind", "which"), CASES)
@in_several_ranks
def test_each_rank_has_the_loss_of_its_own_tokens(rank_pool, impl, kind, which):
    """Its hidden states have that loss's gradient, the weight the mean. On four ranks one has no rows."""
    n_ranks = rank_pool.world_size
    counts, n_columns = COUNTS[which][:n_ranks], 21 if n_ranks == 2 else 5
    options = {"chunk_size": 2 * n_ranks} if which == "uneven" else {"max_tokens": 9}
    found = rank_pool.run(_own, impl, kind, counts, n_columns, options)
    truth, peer = (_expected(kind, counts, n_columns, dtype) for dtype in (torch.float64, torch.float32))
    # log-probabilities of up to some 4, and numbers of the gradients, are added on the way
    largest = max(4.0, *(float(grad.abs().max()) for grad in truth[1] if grad.numel()))
    for rank, (loss, d_hidden, d_weight) in enumerate(found):
        assert_within_budget(loss, truth[0][rank], peer[0][rank], magnitude=8.0)
        assert_within_budget(d_weight, truth[2], peer[2], magnitude=largest)
        if counts[rank]:
            assert_within_budget(d_hidden, truth[1][rank], peer[1][rank], magnitude=largest)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.lm_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 21)

    def forward(self, inputs, labels=None, **options):
        hidden = self.body(inputs).tanh()
        if labels is None:
            return self.lm_head(hidden)
        head = self.lm_head
        return linear_cross_entropy(hidden, head.weight, labels, bias=head.bias, **options)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def _trained(rank, group, shape, own, dtype):
    """Three steps of SGD over two micro-batches of uneven tokens, clipped; loaded again; then logits."""
    device = device_of(rank, group)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    policy = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    torch.manual_seed(0)
    model = Model().to(device)
    if own == "DDP":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model.lm_head, **policy)
        fully_shard(model, **policy)
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), []
    options = {"group": mesh["shards"], "own_tokens": True}
    for step in range(3):
        norms = []
        for part in range(2):
            n = (5, 3, 0, 4)[(rank + part) % 4] if step else 4
            generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            inputs = torch.randn(n, WIDTH, generator=generator).to(device)
            labels = torch.randint(0, 21, (n,), generator=generator).to(device)
            if own is True:
                loss = model(inputs, labels, num_items=8, **options)
            else:
                loss = nn.functional.cross_entropy(model(inputs).float(), labels, reduction="sum") / 8
            loss.backward()
            seen.append(loss.detach())
        norms = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        seen.append(_whole(norms))
        optimizer.step()
        optimizer.zero_grad()
    state = {name.removeprefix("module."): _whole(value) for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    with torch.no_grad():
        seen.append(model.eval()(torch.ones(2, WIDTH, device=device)).float())
    return seen, state


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=["FSDP", "HSDP"])
@in_four_ranks
def test_three_steps_are_those_of_fsdp_and_ddp(rank_pool, impl, shape):
    """Losses, norms, parameters; with micro-batches, a rank without tokens, clipping, and a whole head afterwards."""
    own, plain, ddp = (rank_pool.run(_trained, shape, own, None) for own in (True, False, "DDP"))
    for (found, state), (expected, of_plain) in zip(own * 2, plain + ddp, strict=True):
        for a, b in zip(found + [*state.values()], expected + [*of_plain.values()], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@in_two_ranks
def test_mixed_precision_multiplies_in_its_dtype(rank_pool, impl):
    own, plain = (rank_pool.run(_trained, (2,), own, torch.bfloat16) for own in (True, False))
    for (found, state), (expected, of_plain) in zip(own, plain, strict=True):
        assert all(value.dtype == torch.float32 for value in state.values())
        for a, b in zip(found + [*state.values()], expected + [*of_plain.values()], strict=True):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2)


def _sent(rank, group, impl):
    """What is sent: with ``max_tokens`` no number of tokens; and gradients of ranks that scale their losses apart."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,))
    weight = distribute_tensor(torch.eye(6, 4, device=device), mesh, [Shard(0)]).requires_grad_()
    hidden = torch.ones(3, 4, device=device).requires_grad_()
    on = {"group": mesh, "own_tokens": True, "impl": impl}
    labels = torch.tensor([0, 1, 5], device=device)
    counts = []
    for options in ({}, {"max_tokens": 3}):
        with record_collectives() as calls:
            loss = linear_cross_entropy(hidden, weight, labels, **on, **options)
        counts.append(len(calls))
    (loss * (1 + rank)).backward()
    objective, _ = linear_objective(hidden, weight, labels, torch.neg, **on)
    alone = torch.autograd.grad(objective * (1 + rank), hidden)[0]
    summed = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, average=False, **on), weight)[0]
    mean = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, **on), weight)[0]
    return counts, hidden.grad.isnan().all(), alone.isnan().all(), summed.full_tensor(), mean.full_tensor()


@pytest.mark.filterwarnings("ignore:expected_grad_output")
@in_two_ranks
def test_scales_that_differ_are_nan_and_max_tokens_sends_less(rank_pool, impl):
    for counts, is_nan, is_nan_of_objective, summed, mean in rank_pool.run(_sent, impl):
        assert is_nan and is_nan_of_objective and counts[0] == counts[1] + 1
        torch.testing.assert_close(summed, 2 * mean)


def _unlike(rank, group, impl):
    """What one rank's own tensors may be: of a group of its own, of other dtypes, without a gradient."""
    device, found = device_of(rank, group), {}
    meshes = init_device_mesh(device.type, (2, 1), mesh_dim_names=("both", "alone"))
    made = partial(torch.randn, generator=torch.Generator().manual_seed(rank))
    heads = [torch.eye(6, width, device=device) for width in (4, 5)]
    of_ranks = {
        name: [distribute_tensor(head, meshes[name], [Shard(0)]) for head in heads] for name in ("both", "alone")
    }
    hidden, of_teacher = made(4, 4).to(device), made(4, 5).to(device)
    labels = torch.tensor([IGNORE_INDEX, IGNORE_INDEX, 3, 5], device=device)
    for n in (1, 4):  # of one token, bytes of odd boundaries
        cut = hidden[-n:].requires_grad_(), labels[-n:]
        teacher = of_teacher[-n:].bfloat16()
        given = {"outputs": ("entropy",), "tokens": {"factor": torch.ones(n, device=device)}, "impl": impl}
        losses = []
        for weight, of_weight, on in (
            (*of_ranks["alone"], {"group": meshes["alone"], "own_tokens": True}),
            (*heads, {}),
        ):
            with_teacher = Teacher(teacher, of_weight.bfloat16())
            calls = (_policy, {}), (_mixed, {"teacher": with_teacher})
            losses.append([linear_objective(cut[0], weight, cut[1], f, **given, **more, **on)[0] for f, more in calls])
        found[f"{n} alone"] = losses
    on = {"group": meshes["both"], "own_tokens": True, "impl": impl}
    ids = labels.int() if rank else labels
    temperature = torch.full((4,), 1.7, device=device, dtype=torch.float64 if rank else torch.float32)
    outputs = ("entropy", "sum_sq_probs")
    own = linear_token_log_probs(
        hidden.requires_grad_(), of_ranks["both"][0], ids, temperature=temperature, outputs=outputs, **on
    )
    plain = linear_token_log_probs(hidden, heads[0], labels, temperature=1.7, outputs=outputs, impl=impl)
    found["dtypes"] = [[each.log_probs, each.entropy, each.sum_sq_probs] for each in (own, plain)]
    return found, (own.entropy.requires_grad, own.sum_sq_probs.requires_grad)


def _mixed(log_probs, divergence, entropy, factor):
    return factor * divergence - log_probs + entropy


@in_two_ranks
def test_ranks_may_be_alone_or_unlike(rank_pool, impl):
    for found, gradients in rank_pool.run(_unlike, impl):
        assert gradients == (True, False)
        for own, plain in found.values():
            for a, b in zip(own, plain, strict=True):
                torch.testing.assert_close(a, b)


def _refusals(rank, group, impl):
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,))
    both = init_device_mesh(device.type, (1, 2), mesh_dim_names=("fsdp", "tp"))
    head, hidden = torch.eye(6, 4, device=device), torch.ones(3, 4, device=device)
    weight, labels = distribute_tensor(head, mesh, [Shard(0)]), torch.zeros(3, dtype=torch.int64, device=device)
    copies = distribute_tensor(head, mesh, [Replicate()])
    twice = DTensor.from_local(head, both, [Shard(0), Shard(0)], run_check=False)
    on = {"group": mesh, "own_tokens": True, "impl": impl}
    of = partial(linear_cross_entropy, hidden, weight, labels)
    ones = torch.ones(6, device=device)
    attempts = {
        "whole": partial(linear_cross_entropy, hidden, head, labels, **on),
        "copies": partial(linear_cross_entropy, hidden, copies, labels, **on),
        "twice": partial(linear_cross_entropy, hidden, twice, labels, **(on | {"group": both["fsdp"]})),
        "no group": partial(of, own_tokens=True),
        "main_grad": partial(of, main_grad=torch.zeros(3, 4, device=device), **on),
        "bias": partial(of, bias=ones[:3], **on),
        "class_weight": partial(of, class_weight=ones, **on),
        "max_tokens": partial(of, max_tokens=2, **on),
        "labels": partial(linear_cross_entropy, hidden, weight, labels[:2], **on),
        "parts": partial(of, sequence_parallel=True, **on),
        "alone": partial(of, average=False, group=mesh),
        "reduction": partial(of, reduction="batchmean", **on),
    }
    found, calls = messages_of(attempts)
    with verify_calls():
        found["one rank"] = error_of(partial(linear_cross_entropy, hidden, weight, labels[: 3 - rank], **on))
    return found, calls


@in_two_ranks
def test_refusals(rank_pool, impl):
    assert_refused(
        rank_pool.run(_refusals, impl),
        {
            "whole": r"TypeError: weight: expected a DTensor with own_tokens, got Tensor; wrap the head alone",
            "copies": r"ValueError: weight: expected a DTensor with Shard\(0\)",
            "twice": r"ValueError: group: expected the ranks",
            "no group": r"ValueError: own_tokens: expected the group",
            "bias": r"TypeError: bias: expected a DTensor with own_tokens, got Tensor",
            "main_grad": r"ValueError: main_grad: expected None with own_tokens",
            "class_weight": r"ValueError: class_weight: expected None for a mean with own_tokens",
            "max_tokens": r"ValueError: max_tokens: must be at least the number of this rank's tokens, 3, got 2",
            "labels": r"ValueError: labels: shape must be that of hidden",
            "parts": r"ValueError: sequence_parallel: expected False with own_tokens, .* own parts, got True",
            "alone": r"ValueError: average: expected own_tokens=True with it, got False",
            "reduction": r"ValueError: reduction: expected one of 'mean', 'sum', 'none', got 'batchmean'",
            "one rank": r"ValueError: rank 1 of 2: labels: shape must be",
        },
    )
