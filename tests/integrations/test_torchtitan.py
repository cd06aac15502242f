"""torchtitan's losses with this package's core: the numbers and gradients of torchtitan's own, and of fp64."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.support.cases.inputs import batch
from tests.support.cases.logits import Results, assert_right, random_grad_output
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

pytest.importorskip("torchtitan", minversion="0.3")
pytest.importorskip("torchtitan.components.loss", exc_type=ImportError)  # needs spmd_types and tyro too

from torchtitan.components import loss as titan
from torchtitan.config import CompileConfig, Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import spmd_types, utils

from vocab_parallel_ce.integrations import torchtitan as ours

in_two_ranks = in_ranks((2,), (), (2,))
in_four_ranks = in_ranks((4,), (), (4,))
SHAPE = (2, 5)
OWN = {name: getattr(titan, name) for name in ("cross_entropy_loss", "compute_logprobs")}
SUM = {"reduction": "sum"}


@pytest.fixture(autouse=True)
def _torchtitans_own_afterwards():
    yield
    ours.uninstall()
    assert {name: getattr(titan, name) for name in OWN} == OWN


def _inputs(vocab_size, dtype=torch.float32):
    logits, labels = batch("some_ignored", rows=10, vocab_size=vocab_size, dtype=dtype)
    return logits.view(*SHAPE, -1), labels.view(SHAPE)


def _grad_outputs(name):
    return random_grad_output(10).view(SHAPE) if name == "compute_logprobs" else torch.tensor(0.75)


@pytest.mark.reference
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "function", "asked", "options"),
    [
        ("cross_entropy_loss", vocab_parallel_cross_entropy, {}, SUM),
        ("compute_logprobs", token_log_probs, {}, {}),
        ("compute_logprobs", token_log_probs, {"return_entropy": True}, {}),
    ],
)
def test_plain_logits_on_one_rank(name, function, asked, options, dtype):
    """Entropies are those of ignored tokens too, and have no gradient."""
    logits, labels = _inputs(21, dtype)
    leaf = logits.clone().requires_grad_()
    with ours.installed():
        found = getattr(titan, name)(leaf * 1.0, labels, **asked)
    torch.testing.assert_close(found, OWN[name](leaf, labels, **asked), rtol=1e-5, atol=1e-5)
    value, *entropy = found if asked else (found,)
    assert (labels == -100).any() and not any(each.requires_grad for each in entropy)
    value.backward(_grad_outputs(name))
    given = logits, labels, _grad_outputs(name)
    assert_right(Results((value.detach(),), leaf.grad), *given, function=function, **options)
    assert ours.report().calls == {"fused": 1}


def _chunked(hidden, weight, labels):
    """torchtitan's own wrapper around torchtitan's own loss, as its trainer builds and calls them."""
    config = titan.ChunkedLossWrapper.Config(num_chunks=5, loss_fn=titan.CrossEntropyLoss.Config(global_vocab_size=21))
    loss_fn = config.build()
    head = nn.Linear(8, 21, bias=False)
    head.load_state_dict({"weight": weight})
    loss_fn.set_lm_head(head)
    leaf = hidden.clone().requires_grad_()
    loss, _ = loss_fn(leaf * 1.0, labels, torch.tensor(7.0))
    loss.backward()
    return loss.detach(), leaf.grad, head.weight.grad


@pytest.mark.reference
def test_the_chunked_loss_calls_ours_for_each_chunk():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (2 * torch.randn(*shape, generator=generator) for shape in ((*SHAPE, 8), (21, 8)))
    labels = _inputs(21)[1]
    expected = _chunked(hidden, weight, labels)
    with ours.installed() as report:
        assert not report.calls
        found = _chunked(hidden, weight, labels)
        assert ours.report().calls == {"fused": 5}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    leaf, own = hidden.double().requires_grad_(), weight.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy((leaf @ own.t()).flatten(0, 1), labels.flatten(), reduction="sum") / 7
    truth.backward()
    torch.testing.assert_close(found, (truth.detach(), leaf.grad, own.grad), check_dtype=False, rtol=1e-5, atol=1e-6)


@dataclass(kw_only=True, slots=True)
class _Root(Configurable.Config):
    """The part of a trainer's config that has a loss."""

    loss: titan.BaseLoss.Config


def _overridden(loss, **options):
    """The loss that torchtitan's registry puts in the place of ``loss``, and its config."""
    root = _Root(loss=loss)
    apply_overrides(OverrideConfig(imports=[(f"{ours.__name__}_loss.cross_entropy", options)]), root)
    return root.loss


@pytest.mark.reference
@pytest.mark.parametrize("compiled", [None, CompileConfig(enable=True, components=["loss"], backend="aot_eager")])
def test_the_override_of_torchtitans_registry_patches_nothing(compiled):
    own = titan.CrossEntropyLoss.Config(global_vocab_size=21)
    config = _overridden(titan.ChunkedLossWrapper.Config(loss_fn=own), gradient="out_of_place")
    assert type(config) is titan.ChunkedLossWrapper.Config and config.loss_fn.global_vocab_size == 21
    logits, labels = _inputs(21)
    leaf, count = logits.clone().requires_grad_(), torch.tensor(7.0)
    found, _ = config.loss_fn.build(compile_config=compiled)(leaf * 1.0, labels, count)
    found.backward()
    expected = titan.CrossEntropyLoss.Config().build()(logits, labels, count)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    given = logits, labels, torch.tensor(1 / 7)
    assert_right(Results((7 * found.detach(),), leaf.grad), *given, **SUM)
    assert OWN["cross_entropy_loss"] is titan.cross_entropy_loss and not ours.report().installed


@pytest.mark.reference
def test_an_override_with_another_gradient_is_refused():
    with pytest.raises(ValueError, match="^gradient: expected one of 'auto', .*, got 'in_forward'"):
        _overridden(titan.CrossEntropyLoss.Config(), gradient="in_forward").build()


@pytest.mark.reference
def test_losses_that_are_built_meanwhile_are_torchtitans_own_again_afterwards():
    logits, labels = _inputs(21)
    before = titan.CrossEntropyLoss.Config().build()
    expected = before(logits, labels)[0]
    with ours.installed(gradient="out_of_place"):
        built = titan.CrossEntropyLoss.Config().build()
        assert before.fn is OWN["cross_entropy_loss"] and built.fn is titan.cross_entropy_loss
        torch.testing.assert_close(built(logits, labels)[0], expected, rtol=1e-5, atol=1e-5)
        assert ours.report().calls == {"fused": 1}
    assert torch.equal(built(logits, labels)[0], expected)
    assert ours.report() == ("torchtitan 0.3", (), {}, {"fused": 1})


@pytest.mark.reference
def test_types_are_checked_by_torchtitans_own_loss():
    from spmd_types.checker import typecheck

    logits, labels = _inputs(21)
    with ours.installed(), typecheck():
        loss = titan.cross_entropy_loss(logits, labels)
    assert torch.equal(loss, OWN["cross_entropy_loss"](logits, labels))
    assert ours.report().calls == {ours.TYPES: 1}


def _with_gradient(function, leaf, labels, grad, **options):
    with record_collectives() as forward:
        outputs = function(leaf * 1.0, labels, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with record_collectives() as backward:
        outputs[0].backward(grad)
    whole = [output.full_tensor() if isinstance(output, DTensor) else output for output in outputs]
    gradient, leaf.grad = leaf.grad, None
    return [output.detach() for output in whole], gradient, ([call.name for call in forward], len(backward))


def _on_shards(rank, group, impl, backend, name, vocab_size, options):
    """Ours, and torchtitan's own, of logits that are cut over both ranks; and the override has ours."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    logits, labels = (tensor.to(device) for tensor in _inputs(vocab_size))
    cut = distribute_tensor(logits, mesh, [Shard(2)])
    plain = backend == "spmd_types"
    leaf = cut.to_local().clone().requires_grad_() if plain else cut.requires_grad_()
    if backend == "full_dtensor" and name == "cross_entropy_loss":
        labels = distribute_tensor(labels, mesh, [Replicate()])
    grad = _grad_outputs(name).to(device)
    if isinstance(labels, DTensor):
        grad = distribute_tensor(grad, mesh, [Replicate()])
    if plain and name == "cross_entropy_loss":
        options = {"global_vocab_size": vocab_size}
    utils.set_spmd_backend(backend)
    try:
        with spmd_types.set_current_spmd_mesh(mesh) if plain else torch.enable_grad():
            with ours.installed(vocab_size=vocab_size, impl=impl):
                found = _with_gradient(getattr(titan, name), leaf, labels, grad, **options)
                assert ours.report().calls == {"fused": 1}
            if name == "cross_entropy_loss":
                loss = _overridden(titan.CrossEntropyLoss.Config(global_vocab_size=vocab_size), impl=impl).build()
                again = _with_gradient(lambda *args, **_: loss(*args)[0], leaf, labels, grad)
                assert torch.equal(again[0][0], found[0][0]) and again[2] == found[2]
            own = None
            # torchtitan's own takes no empty shards, and gathers no uneven ones.
            if vocab_size > 1 and not (plain and name == "compute_logprobs" and vocab_size % 2):
                own = _with_gradient(getattr(titan, name), leaf, labels, grad, **options)
    finally:
        utils.set_spmd_backend("spmd_types")

    def whole(gradient):
        assert isinstance(gradient, DTensor) is not plain
        if plain:
            shape = logits.shape
            gradient = DTensor.from_local(gradient, mesh, [Shard(2)], shape=shape, stride=logits.stride())
        assert gradient.placements == (Shard(2),)
        return gradient.full_tensor()

    return tuple(None if made is None else (made[0], whole(made[1]), made[2]) for made in (found, own))


BACKENDS = ("spmd_types", "partial_dtensor", "full_dtensor")


@pytest.mark.parametrize("vocab_size", [22, 21, 1])
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("backend", BACKENDS)
@in_two_ranks
def test_logits_cut_over_the_vocabulary(rank_pool, impl, backend, name, vocab_size):
    logits, labels = _inputs(vocab_size)
    log_probs = name == "compute_logprobs"
    options = {"return_entropy": True} if log_probs else {}
    function = token_log_probs if log_probs else vocab_parallel_cross_entropy
    results = rank_pool.run(_on_shards, impl, backend, name, vocab_size, options)
    for (outputs, grad, collectives), own in results:
        given = logits, labels, _grad_outputs(name)
        assert_right(Results((outputs[0],), grad), *given, function=function, **({} if log_probs else SUM))
        assert collectives == (["_allgather_base_"], 0)
        if own is not None:
            torch.testing.assert_close((outputs, grad), own[:2], rtol=1e-5, atol=1e-5)


def _left_to_torchtitan(rank, group, impl):
    """Plain shards of an unknown vocabulary, and DTensors that are not cut over it."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2,), mesh_dim_names=("tp",))
    logits, labels = (tensor.to(device) for tensor in _inputs(22))
    shard = logits.chunk(2, dim=-1)[rank].contiguous()
    whole, of_all = (distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (logits, labels))
    with ours.installed(impl=impl):
        with spmd_types.set_current_spmd_mesh(mesh):
            found = titan.compute_logprobs(shard, labels)
            with pytest.raises(TypeError, match="global_vocab_size: expected the size"):
                titan.cross_entropy_loss(shard, labels)
        loss = titan.cross_entropy_loss(whole, of_all)
        report = ours.report()
    assert loss.placements == (Partial(),)
    return found, loss.full_tensor(), report.calls


@in_two_ranks
def test_what_is_left_to_torchtitan_is_reported(rank_pool, impl):
    logits, labels = _inputs(22)
    for log_probs, loss, calls in rank_pool.run(_left_to_torchtitan, impl):
        torch.testing.assert_close(log_probs, OWN["compute_logprobs"](logits, labels))
        torch.testing.assert_close(loss, OWN["cross_entropy_loss"](logits, labels))
        assert calls == {"fused": 1, ours.UNCUT: 1, ours.UNKNOWN: 1}


def _on_a_mesh(rank, group, impl):
    """The backend "full_dtensor": tokens over one dimension, the vocabulary over the other."""
    device = device_of(rank, group)
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    logits, labels = (tensor.to(device) for tensor in _inputs(21))
    leaf = distribute_tensor(logits, mesh, [Shard(0), Shard(2)]).requires_grad_()
    labels = distribute_tensor(labels, mesh, [Shard(0), Replicate()])
    results = []
    utils.set_spmd_backend("full_dtensor")
    try:
        for function in (titan.cross_entropy_loss, ours.cross_entropy_loss):
            with ours.installed(impl=impl):
                loss = function(leaf * 1.0, labels)
            loss.backward()
            results.append(
                (loss.detach().full_tensor(), leaf.grad.full_tensor(), (loss.placements, leaf.grad.placements))
            )
            leaf.grad = None
    finally:
        utils.set_spmd_backend("spmd_types")
    return results


@in_four_ranks
def test_tokens_and_vocabulary_are_cut(rank_pool, impl):
    logits, labels = _inputs(21)
    for own, found in rank_pool.run(_on_a_mesh, impl):
        torch.testing.assert_close(found[:2], own[:2], rtol=1e-5, atol=1e-5)
        assert found[2] == own[2] == ((Partial(), Replicate()), (Shard(0), Shard(2)))
        assert_right(Results(found[:1], found[1]), logits, labels, **SUM)
