"""The losses of NeMo Automodel's registry: fp64, and its own if it is there.

It requires versions of other packages and is not in CI. The tests that need it skip and say so; the formulas do not.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.cases import soft
from tests.support.cases.inputs import DTYPES, batch
from tests.support.cases.logits import Results
from tests.support.frameworks.rl import (
    Found,
    assert_right,
    backward,
    curve,
    in_two_ranks,
    leaves_of,
    on_devices,
    policy,
    real_module,
    summed_grad,
)
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import nemo_automodel as ours

LOSSES = ours.LOSSES
COLUMNS = 21


def _module(**options):
    defaults = {"ignore_index": -100, "reduction": "none", "tp_group": None, "logit_softcapping": 0.0}
    return SimpleNamespace(**defaults | options, materialize_lm_weight=lambda weight, grad_reduce_group: weight)


def _from_logits(function, inputs, *args, grads=None):
    """Log-probabilities of this rank's or all columns, and the gradient."""
    (leaf,) = leaves_of(inputs)
    losses = function(leaf * 1, inputs.labels, *args).view(inputs.labels.shape)
    backward([losses], [-inputs.grads[0]])
    return Found(-losses.detach(), None, (leaf.grad,))


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [ours.masked_cross_entropy, ours.te_parallel_cross_entropy])
def test_losses_of_logits(device, dtype, function):
    inputs = policy(dtype, device=device)
    assert_right(_from_logits(lambda *given: function(_module(), *given), inputs), inputs)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("function", [ours.fused_linear_cross_entropy, ours.chunked_cross_entropy])
def test_losses_of_heads(device, dtype, function):
    inputs = policy(dtype, head=True, device=device)
    hidden, weight = leaves_of(inputs)
    losses = function(_module(), hidden, inputs.labels, weight)
    backward([losses], [-inputs.grads[0]])
    assert_right(Found(-losses.detach(), None, (hidden.grad, weight.grad)), inputs)


@pytest.mark.reference
def test_masks_weights_and_numbers_of_tokens():
    inputs = policy()
    logits, labels, weights = inputs.leaves[0], inputs.labels, inputs.grads[0].abs()
    mask = torch.ones_like(labels)
    mask[0, 1] = 0
    before = labels.clone()
    each = ours.masked_cross_entropy(_module(), logits, labels, mask)
    assert each.shape == (labels.numel(),)
    each = each.view(labels.shape)
    call = ours.masked_cross_entropy
    assert torch.equal(labels, before) and not each[0, 1] and each[1].any()
    of_sum = _module(reduction="sum")
    torch.testing.assert_close(call(of_sum, logits, labels, mask, 7), each.sum() / 7)
    torch.testing.assert_close(call(of_sum, logits, labels, mask, 7, weights), (each * weights).sum() / 7)
    assert call(of_sum, logits, labels, mask, 0) == call(of_sum, logits, labels, mask, 0, weights) == 0
    packed = logits.flatten(0, 1)[None], labels.flatten(), mask.flatten(), 7
    assert torch.equal(call(of_sum, *packed), call(of_sum, logits, labels, mask, 7))
    torch.testing.assert_close(call(of_sum, *packed, weights.flatten()), (each * weights).sum() / 7)
    other = _module(ignore_index=3)
    assert not call(other, logits, labels)[((labels == -100) | (labels == 3)).flatten()].any()
    for name, given in (("num_label_tokens", (None, 7)), ("loss_weights", (None, None, weights))):
        with pytest.raises(ValueError, match=f"{name}: expected reduction='sum' with it, got 'mean'"):
            call(_module(reduction="mean"), logits, labels, *given)
    with pytest.raises(ValueError, match="loss_weights: expected the shape of labels"):
        call(of_sum, logits, labels, None, None, weights[:1])


@pytest.mark.reference
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_knowledge_distillation(temperature):
    student, teacher = (batch(kind, rows=6, vocab_size=COLUMNS).logits for kind in ("peaked", "confident"))
    pair = soft.Pair(student, teacher, soft.divergences)
    leaf = student.clone().requires_grad_()
    module = _module(temperature=temperature)
    loss = ours.knowledge_distillation(module, leaf * 1, teacher, torch.zeros(6, dtype=torch.int64))
    (loss * 0.75 / temperature**2).backward()
    soft.assert_right(Results((loss.detach() / temperature**2,), leaf.grad), pair, temperature=temperature)


# With NeMo Automodel itself.


def _registry(**options):
    build = real_module(f"{LOSSES}.loss").build_loss_module
    return {name: build(name, **given) for name, given in options.items()}


@pytest.mark.reference
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_beside_the_registrys_own_modules(reduction):
    logits, head = policy(kind="some_ignored"), policy(head=True)
    options = {"reduction": reduction}
    built = _registry(MaskedCrossEntropy=options, ChunkedCrossEntropy=options | {"compile": False}, KDLoss={})
    n_tokens = 7 if reduction == "sum" else None
    teacher = policy(kind="confident").leaves[0]

    def every():
        found = []
        leaf, (hidden, weight), student = *leaves_of(logits), leaves_of(head), *leaves_of(logits)
        found.append(built["MaskedCrossEntropy"](leaf * 1, logits.labels, num_label_tokens=n_tokens))
        found.append(built["ChunkedCrossEntropy"](hidden * 1, head.labels, weight * 1, n_tokens))
        found.append(built["KDLoss"](student * 1, teacher, logits.labels, n_tokens))
        torch.autograd.backward(found)
        return [value.detach() for value in found], [tensor.grad for tensor in (leaf, hidden, weight, student)]

    own = every()
    with ours.installed() as report:
        assert report.left.items() >= ours.LEFT.items()
        assert f"{LOSSES}.masked_ce.MaskedCrossEntropy.forward" in report.rebound
        torch.testing.assert_close(every(), own, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, every()[0], own[0]))


@pytest.mark.reference
def test_names_of_the_registry_that_need_a_gpu_are_right_without_one():
    """TransformerEngine's kernel and cut-cross-entropy do not run on a CPU; ours stand for them."""
    real_module(f"{LOSSES}.loss")
    inputs, head = policy(), policy(head=True)
    with ours.installed():
        built = _registry(TEParallelCrossEntropy={"reduction": "none"}, FusedLinearCrossEntropy={"reduction": "none"})
        assert_right(_from_logits(built["TEParallelCrossEntropy"], inputs), inputs)
        hidden, weight = leaves_of(head)
        losses = built["FusedLinearCrossEntropy"](hidden, head.labels, weight)
        backward([losses], [-head.grads[0]])
        assert_right(Found(-losses.detach(), None, (hidden.grad, weight.grad)), head)


def _of_dtensors(rank, group, inputs):
    """In a rank: 21 columns, 11 and 10, or whole; with NeMo Automodel's own, which gathers them, and ours."""
    mesh = init_device_mesh(device_of(rank, group).type, (2,), mesh_dim_names=("tp",))
    logits, labels, grad = inputs
    teacher = distribute_tensor(logits.flip(-1).to(mesh.device_type), mesh, [Shard(2)])
    built = _registry(MaskedCrossEntropy={"reduction": "none"}, KDLoss={"temperature": 2.0})

    def every():
        found = []
        for placement in (Shard(2), Replicate()):
            leaf = distribute_tensor(logits.to(mesh.device_type), mesh, [placement]).requires_grad_()
            with record_collectives() as collectives:
                losses = built["MaskedCrossEntropy"](leaf * 1, labels.to(mesh.device_type).clone())
            losses.backward(grad.reshape(losses.shape).to(losses))
            names = [call.name for call in collectives]
            found.append((losses.detach(), leaf.grad.full_tensor(), names))
        leaf = distribute_tensor(logits.to(mesh.device_type), mesh, [Shard(2)]).requires_grad_()
        loss = built["KDLoss"](leaf.flatten(0, 1), teacher.flatten(0, 1), labels.flatten().to(mesh.device_type))
        loss.backward()
        return found, (loss.detach(), leaf.grad.full_tensor())

    own = every()
    with ours.installed():
        return own, every()


@in_two_ranks
def test_dtensors_are_not_gathered(rank_pool, impl):
    real_module(f"{LOSSES}.loss")
    logits, labels = batch("some_ignored", rows=8, vocab_size=COLUMNS)
    inputs = logits.view(2, 4, COLUMNS), labels.view(2, 4), policy().grads[0]
    for (own, of_own), (found, of_ours) in rank_pool.run(_of_dtensors, inputs):
        assert found[0][2] == ["_allgather_base_"] and found[1][2] == own[1][2] == []
        for first, second in zip(own, found, strict=True):
            torch.testing.assert_close(second[:2], first[:2], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_ours, of_own, rtol=1e-5, atol=1e-5)


def _curves(rank, group):
    """Of plain shards, as TEParallelCrossEntropy takes them, beside PyTorch's loss of gathered logits."""
    with ours.installed():
        (module,) = _registry(TEParallelCrossEntropy={"reduction": "mean", "tp_group": group}).values()
        found = curve(rank, group, lambda h, w, labels: module(summed_grad(h, group) @ w.t(), labels))
    (module,) = _registry(MaskedCrossEntropy={"reduction": "mean"}).values()
    return curve(
        rank,
        torch.distributed.new_group([rank], use_local_synchronization=True),
        lambda h, w, labels: module(h @ w.t(), labels),
        bounds=[(0, 20)] * 2,
    ), found


@in_two_ranks
def test_curves_are_nemo_automodels(rank_pool, impl):
    real_module(f"{LOSSES}.loss")
    for own, found in rank_pool.run(_curves):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
