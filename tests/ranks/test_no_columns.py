"""Ranks that have no columns, because the vocabulary is cut over more ranks than it has parts: right on every rank.

5 columns on 4 ranks are 2, 2, 1 and 0. A rank that refused its shard alone would leave the others waiting.
"""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import vocab_parallel_ce as vp
from tests.support.cases import flat
from tests.support.cases.logits import flat_outputs
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_four_ranks, in_two_ranks
from vocab_parallel_ce.integrations import dtensor

V, TOKENS, WIDTH = 5, 6, 4
BOUNDS = [(0, 2), (2, 4), (4, 5), (5, 5)]  # as a number of columns is cut
WAYS = {
    "vocab_size": BOUNDS,
    "shards": BOUNDS,
    "the first has none": [(0, 0), (2, 5), (0, 2), (3, 3)],
}
ALL_AND_NONE = [(0, 5), (5, 5)]  # on two ranks


def _made(device):
    generator = torch.Generator().manual_seed(0)
    shapes = {"hidden": (TOKENS, WIDTH), "weight": (V, WIDTH), "bias": (V,), "teacher": (TOKENS, V), "own": (V, WIDTH)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made["weights"] = torch.linspace(0.5, 2.0, V)
    made["labels"] = torch.tensor([0, 4, -100, 3, 1, 2])
    made["ids"] = torch.tensor([[0, 4, -100], [4, 1, 2]]).repeat(3, 1)
    made["known"] = made["teacher"].log_softmax(-1).topk(2)
    return {n: t.to(device) if isinstance(t, torch.Tensor) else tuple(p.to(device) for p in t) for n, t in made.items()}


def _over_logits(m, columns, **on):
    """By name, what a call of every front over ``logits`` of these columns returns."""
    teacher = vp.TopKTeacher(m["known"][1], m["known"][0])
    of = partial(vp.vocab_parallel_cross_entropy, labels=m["labels"], **on)
    log_probs = partial(vp.token_log_probs, labels=m["labels"], **on)
    distil = partial(vp.distillation_loss, **on)
    of_columns = {name: value for name, value in on.items() if name != "impl"}
    return {
        "mean": of,
        "every option": partial(of, label_smoothing=0.1, z_loss=0.1, softcap=3.0, class_weight=m["weights"]),
        "in_forward": lambda logits: of(logits * 1, gradient="in_forward", reduction="sum"),
        "sampling": lambda logits: log_probs(
            logits, threshold=vp.sampling_threshold(logits, top_k=4, top_p=0.95, **of_columns)
        ),
        "given ids": partial(vp.token_log_probs, labels=m["ids"], **on),
        "teacher": partial(distil, teacher=m["teacher"][:, columns], labels=m["labels"], hard_weight=0.5),
        "known tokens": partial(distil, teacher=teacher),
        "known tokens, reverse": partial(distil, teacher=teacher._replace(rest="bucket"), divergence="reverse"),
    }


def _over_heads(m, columns, **on):
    """The same of every front over ``hidden, weight, bias``; that of the same name over logits is the oracle."""
    known = vp.TopKTeacher(m["known"][1], m["known"][0])
    head = vp.Head(m["teacher"], torch.eye(V, device=m["teacher"].device)[columns])

    def linear(function, **more):
        return lambda h, w, b: function(h, w, bias=b, **{"labels": m["labels"], **more}, **on)

    def distil(teacher, **more):
        return lambda h, w, b: flat.linear_distillation_loss(vp.Head(h, w, b), teacher, **more, **on)

    return {
        "mean": linear(flat.linear_cross_entropy, chunk_size=2),
        "every option": linear(
            flat.linear_cross_entropy, label_smoothing=0.1, z_loss=0.1, softcap=3.0, class_weight=m["weights"]
        ),
        "given ids": linear(flat.linear_token_log_probs, labels=m["ids"]),
        "teacher": distil(head, labels=m["labels"], hard_weight=0.5),
        "known tokens": distil(known),
        "known tokens, reverse": distil(known._replace(rest="bucket"), divergence="reverse"),
    }


def _of_logits(logits, call):
    """The outputs, and the gradient by these logits of the sum of all that have one."""
    leaf = logits.clone().requires_grad_()
    outputs = flat_outputs(call(leaf))
    sum(output.sum() for output in outputs if output.requires_grad).backward()
    return outputs, [leaf.grad]


def _of_head(tensors, call):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    outputs = flat_outputs(call(*leaves))
    sum(output.sum() for output in outputs if output.requires_grad).backward()
    return outputs, [leaf.grad for leaf in leaves]


def _fronts(rank, group, impl, bounds, takes_size, backend=None):
    """In a rank: of every front, or compiled of some."""
    m, (start, stop) = _made(device_of(rank, group)), bounds[rank]
    columns = slice(start, stop)
    vocab_size = V if takes_size else vp.VocabShard(start, stop, V)
    on = {"group": group, "vocab_size": vocab_size, "impl": impl}
    logits = (m["hidden"] @ m["weight"].t() + m["bias"])[:, columns]
    head = m["hidden"], m["weight"][columns], m["bias"][columns]
    over_logits, over_heads = _over_logits(m, columns, **on), _over_heads(m, columns, **on)
    if backend is not None:
        torch._dynamo.reset()  # it compiles one lambda for so many calls, and those of an earlier test count
        over_logits, over_heads = (
            {name: _compiled(fronts[name], backend) for name in COMPILED if name in fronts}
            for fronts in (over_logits, over_heads)
        )
    found = {name: _of_logits(logits, call) for name, call in over_logits.items()}
    return found, {name: _of_head(head, call) for name, call in over_heads.items()}


COMPILED = ("every option", "teacher")


def _compiled(call, backend):
    return torch.compile(lambda *tensors: call(*tensors), backend=backend, fullgraph=True)


def _truth():
    """Of the whole vocabulary in fp64, over logits that a head makes."""
    m = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in _made("cpu").items()}
    calls = _over_logits(m, slice(None))

    def of_head(call):
        return lambda h, w, b: call(h @ w.t() + b)

    tensors = m["hidden"], m["weight"], m["bias"]
    logits = tensors[0] @ tensors[1].t() + tensors[2]
    heads = {name: _of_head(tensors, of_head(call)) for name, call in calls.items()}
    return {name: _of_logits(logits, call) for name, call in calls.items()}, heads


def _check(of_ranks, truth, bounds, cut):
    """Outputs are equal on all ranks; ``cut``: the dimension in which ranks have parts of each gradient, or None."""
    for name, (outputs, _) in of_ranks[0].items():
        expected, grads = truth[name]
        for found, _ in (of_rank[name] for of_rank in of_ranks):
            assert all(map(torch.equal, found, outputs)), name
        for output, value in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.double(), value.double(), rtol=2e-5, atol=2e-5, msg=name)
        parts = zip(*(of_rank[name][1] for of_rank in of_ranks), strict=True)
        for grad, dim, of_each in zip(grads, cut, parts, strict=True):
            assert [part.shape[dim or 0] for part in of_each] == [
                stop - start if dim is not None else len(grad) for start, stop in bounds
            ]
            in_order = sorted(zip(bounds, of_each, strict=True), key=lambda part: part[0])
            whole = of_each[0] if dim is None else torch.cat([part for _, part in in_order], dim)
            torch.testing.assert_close(whole.double(), grad, rtol=2e-5, atol=2e-5, msg=name)


@pytest.mark.parametrize("way", WAYS)
@in_four_ranks
def test_every_front_is_right_on_every_rank(rank_pool, impl, way):
    over_logits, over_heads = zip(*rank_pool.run(_fronts, impl, WAYS[way], way == "vocab_size"), strict=True)
    of_logits, of_heads = _truth()
    _check(over_logits, of_logits, WAYS[way], (-1,))
    _check(over_heads, of_heads, WAYS[way], (None, 0, 0))


@in_two_ranks
def test_compiled_calls_are_right_on_every_rank(rank_pool, impl):
    found = rank_pool.run(_fronts, impl, ALL_AND_NONE, False, "aot_eager", timeout=300.0)
    over_logits, over_heads = zip(*found, strict=True)
    of_logits, of_heads = _truth()
    _check(over_logits, of_logits, ALL_AND_NONE, (-1,))
    _check(over_heads, of_heads, ALL_AND_NONE, (None, 0, 0))


def _of_dtensors(rank, group, impl, vocab_size):
    m = _made(device_of(rank, group))
    mesh = DeviceMesh.from_group(group, m["hidden"].device.type)
    hidden = m["hidden"].requires_grad_()
    head = [distribute_tensor(m[name], mesh, [Shard(0)]).requires_grad_() for name in ("weight", "bias")]
    logits = distribute_tensor(m["hidden"].detach() @ m["weight"].t() + m["bias"], mesh, [Shard(1)]).requires_grad_()
    if vocab_size is None:
        of_logits = dtensor.cross_entropy(logits, m["labels"], impl=impl)
        # Not logits.grad: PyTorch 2.11 replicates what it accumulates in a leaf of unevenly cut columns.
        (grad,) = torch.autograd.grad(of_logits, logits)
        assert grad.placements == logits.placements
        found = {"mean": ((of_logits,), [grad.to_local()])}
    else:
        found = None
    loss = vp.linear_cross_entropy(
        hidden,
        head[0],
        m["labels"],
        bias=head[1],
        group=group,
        vocab_size=vocab_size,
        options=vp.HeadOptions(impl=impl),
    )
    loss.backward()
    return found, {"mean": ((loss,), [hidden.grad, *(part.grad.to_local() for part in head)])}


@in_four_ranks
def test_dtensors_are_right_on_every_rank(rank_pool, impl):
    of_logits, of_heads = _truth()
    over_logits, over_heads = zip(*rank_pool.run(_of_dtensors, impl, None), strict=True)
    _check(over_logits, of_logits, BOUNDS, (-1,))
    _check(over_heads, of_heads, BOUNDS, (None, 0, 0))
    _, with_its_size = zip(*rank_pool.run(_of_dtensors, impl, V), strict=True)
    _check(with_its_size, of_heads, BOUNDS, (None, 0, 0))


def _verified(rank, group, impl):
    """Messages of calls that must be alike on all ranks under verification."""
    m, (start, stop) = _made(device_of(rank, group)), BOUNDS[rank]
    part, weight, labels = m["teacher"][:, start:stop], m["weight"][start:stop], m["labels"]
    te = (labels, 0.0, False, group, -100)
    attempts = {
        "logits": partial(vp.vocab_parallel_cross_entropy, part, labels, group=group, vocab_size=V, impl=impl),
        "head": partial(flat.linear_cross_entropy, m["hidden"], weight, labels, group=group, vocab_size=V, impl=impl),
        "no size": partial(vp.vocab_parallel_cross_entropy, part, labels, group=group, impl=impl),
        "head, no size": partial(flat.linear_cross_entropy, m["hidden"], weight, labels, group=group, impl=impl),
        "TransformerEngine": partial(vp.parallel_cross_entropy, part, *te),
        "the pair": partial(vp.cross_entropy_forward, part.clone(), *te),
    }
    with vp.verify_calls():
        return {name: error_of(attempt) for name, attempt in attempts.items()}


@in_four_ranks
def test_without_a_size_verification_gives_every_rank_the_same_error(rank_pool, impl):
    """TransformerEngine's functions have no vocab_size: their shards are equal."""
    of_ranks = rank_pool.run(_verified, impl)
    assert of_ranks == of_ranks[:1] * 4
    assert [name for name, error in of_ranks[0].items() if error is None] == ["logits", "head"]
    logits = "ValueError: rank 3 of 4: logits: last dimension must have columns, got (6, 0); "
    remedy = "if this rank has none of the vocabulary, pass vocab_size= on every rank"
    expected = {name: logits + remedy for name in ("no size", "TransformerEngine", "the pair")}
    expected["head, no size"] = (
        f"ValueError: rank 3 of 4: weight: expected shape [C, 4] with rows, got (0, 4); {remedy}"
    )
    assert {name: error for name, error in of_ranks[0].items() if error is not None} == expected


def _that_require_a_gradient(rank, group, impl):
    """Messages of targets that require a gradient, which a rank without columns has of none."""
    start, stop = BOUNDS[rank]
    m, on = _made(device_of(rank, group)), {"group": group, "vocab_size": V, "impl": impl}
    logits = m["teacher"][:, start:stop].clone().requires_grad_() * 1
    grid = m["teacher"][:, start:stop].softmax(-1).requires_grad_()
    weights = torch.ones(stop - start, device=logits.device, requires_grad=True)
    return [
        error_of(partial(vp.distillation_loss, logits, grid, **on)),
        error_of(partial(vp.vocab_parallel_cross_entropy, logits, m["labels"], class_weight=weights, **on)),
    ]


@in_four_ranks
def test_targets_that_require_a_gradient_are_refused_on_every_rank(rank_pool, impl):
    """A rank that padded them first forgot it, and waited for the others."""
    expected = "expected a tensor that requires no gradient, got one that does; pass its detach()"
    names = "teacher", "class_weight"
    for errors in rank_pool.run(_that_require_a_gradient, impl):
        assert errors == [f"TypeError: {name}: {expected}" for name in names]
