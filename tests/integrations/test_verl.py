"""verl's log-probabilities and entropies: the formulas of its source in fp64, and its own functions if it is there.

verl needs ray and tensordict, and its shards Megatron-Core, and is not in CI. The tests that need them skip and say so;
the formulas do not. Its fused kernel needs a GPU and a hidden size that 128 divides.
"""

import pytest
import torch

from tests.support.cases.inputs import DTYPES
from tests.support.frameworks.rl import (
    WIDTH,
    Found,
    activations,
    assert_right,
    backward,
    in_two_ranks,
    leaves_of,
    on_devices,
    policy,
    real_module,
    shards,
    whole,
)
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.integrations import verl

MEGATRON = "verl.utils.megatron.tensor_parallel"
LOGITS, LINEAR = "verl.utils.torch_functional", "verl.utils.kernel.linear_cross_entropy"
PPO = "verl.utils.experimental.torch_functional"


def _log_probs(function, inputs, **options):
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    log_probs = function(logits, inputs.labels, **options)
    assert torch.equal(logits, inputs.leaves[0])
    backward([log_probs], inputs.grads[:1])
    return Found(log_probs.detach(), None, (leaves[0].grad,)), logits.detach()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"inplace_backward": False}], ids=["default", "out of place"])
def test_log_probs(device, dtype, options):
    inputs = policy(dtype, device=device)
    found, logits = _log_probs(verl.logprobs_from_logits, inputs, **options)
    assert found.log_probs.dtype == torch.float32
    assert_right(found, inputs)
    assert torch.equal(logits, inputs.leaves[0])  # the test holds them


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["calculate_sum_pi_squared_from_logits", "vocab_parallel_sum_pi_squared"])
def test_sums_of_squared_probabilities(monkeypatch, device, dtype, name):
    monkeypatch.setattr(verl, "tensor_parallel_group", lambda: None)
    inputs = policy(dtype, "confident", device=device)
    (leaf,), logits = leaves_of(inputs), inputs.leaves[0]
    found = getattr(verl, name)(leaf)
    assert torch.equal(leaf, logits) and not found.requires_grad
    assert_within_budget(found, _squares(logits.double()), _squares(logits.float()).to(dtype))


def _squares(logits):
    return logits.softmax(-1).square().sum(-1)


def _from_head(function, inputs, shape, **options):
    """Log-probabilities and entropies of hidden states ``[*shape, D]``, and gradients of random ones."""
    leaves = leaves_of(inputs)
    hidden = leaves[0].reshape(*shape, WIDTH)
    outputs = function(hidden, leaves[1], inputs.labels.reshape(shape), **options)
    backward(outputs, [grad.reshape(outputs[0].shape) for grad in inputs.grads])
    log_probs, entropy = (output.detach().view(inputs.labels.shape) for output in outputs)
    return Found(log_probs, entropy, tuple(leaf.grad for leaf in leaves)), outputs


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_for_ppo(device, dtype, shape, temperature):
    inputs = policy(dtype, head=True, device=device)
    module = verl.FusedLinearForPPO(chunk_size=3, impl_backend="liger")
    inputs = inputs._replace(labels=inputs.labels.to(torch.int32))
    found, outputs = _from_head(module, inputs, shape, temperature=temperature)
    assert [(out.shape, out.dtype) for out in outputs] == [(shape, torch.float32), (shape, dtype)]
    _assert_right_but_ignored_hidden(found, inputs, temperature=temperature)


def _assert_right_but_ignored_hidden(found, inputs, **options):
    """Ignored tokens' entropies, and the gradients through them, are 0, as their log-probabilities are."""
    ignored = inputs.labels == -100
    assert ignored.any() and not found.grads[0][ignored].any() and not found.entropy[ignored].any()
    assert_right(found, inputs, **options)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8,), (2, 4)], ids=str)
def test_the_fused_kernel(device, dtype, shape):
    inputs = policy(dtype, head=True, device=device)
    found, outputs = _from_head(verl.linear_cross_entropy, inputs, shape, temperature=0.7)
    assert [(out.shape, out.dtype) for out in outputs] == [((8,), torch.float32)] * 2
    _assert_right_but_ignored_hidden(found, inputs, temperature=0.7)


@pytest.mark.reference
def test_the_fused_kernels_reductions():
    """Log-probabilities are reduced over all tokens, and entropies are not. Megatron has [s, b] and labels [b, s]."""
    inputs = policy(head=True)
    hidden, weight = inputs.leaves
    each, entropy = verl.linear_cross_entropy(hidden, weight, inputs.labels, 0.7, "none", None)
    for name, expected in {"sum": each.sum(), "MEAN": each.mean()}.items():
        reduced, others = verl.linear_cross_entropy(
            hidden.view(8, 1, WIDTH), weight, inputs.labels.view(1, 8), 0.7, name
        )
        assert torch.equal(reduced, expected) and torch.equal(others, entropy) and others.shape == (8,)
    with pytest.raises(ValueError, match="reduction: expected one of 'mean', 'sum', 'none'"):
        verl.linear_cross_entropy(hidden, weight, inputs.labels, 0.7, "batchmean")


@on_devices
def test_the_fused_kernels_logits_are_fp32(device):
    inputs = policy(torch.bfloat16, head=True, device=device)
    short, wide = (
        verl.linear_cross_entropy(*(leaf.to(dtype) for leaf in inputs.leaves), inputs.labels, 0.7)
        for dtype in (torch.bfloat16, torch.float32)
    )
    torch.testing.assert_close(short, wide, rtol=1.3e-6, atol=1e-5)


def _sharded(rank, group, inputs, names):
    """In a rank: log-probabilities, or entropies, or both from the same logits; and the collectives."""
    verl.tensor_parallel_group = lambda: group
    inputs = shards(inputs, rank, group.size(), device_of(rank, group))
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    calls = {"log_probs": lambda: verl.vocab_parallel_log_probs_from_logits(logits, inputs.labels)}
    calls["entropy"] = lambda: verl.vocab_parallel_entropy(logits)
    calls["chunked"] = lambda: verl.vocab_parallel_entropy_with_chunking(logits, chunk_size=3)
    with record_collectives() as collectives:
        found = {name: calls[name]() for name in names}
        for name in names:
            grad = inputs.grads[name != "log_probs"]
            backward([found[name]], [grad], retain_graph=True)
    assert torch.equal(logits, inputs.leaves[0])
    log_probs, entropy = found.get("log_probs"), found.get("entropy", found.get("chunked"))
    return Found(log_probs, entropy, (leaves[0].grad,)), [call.nbytes for call in collectives]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [("log_probs",), ("entropy",), ("chunked",), ("entropy", "log_probs")], ids=str)
@in_two_ranks
def test_shards(rank_pool, impl, names, dtype):
    inputs = policy(dtype, "some_ignored" if names == ("log_probs",) else "confident")
    results = rank_pool.run(_sharded, inputs, names)
    expected_bytes = {"log_probs": 12, "entropy": 16, "chunked": 16}
    for found, nbytes in results:
        assert nbytes == [expected_bytes[name] * inputs.labels.numel() for name in names]
        assert found.entropy is None or found.entropy.dtype == (torch.float32 if names == ("chunked",) else dtype)
    roundings = 2 * len(names) - 1  # of each gradient, and of their sum
    assert_right(whole([found for found, _ in results]), inputs, roundings=roundings)


def _sharded_squares(rank, group, inputs):
    verl.tensor_parallel_group = lambda: group
    (logits,) = shards(inputs, rank, group.size(), device_of(rank, group)).leaves
    with record_collectives() as collectives:
        found = verl.vocab_parallel_sum_pi_squared(logits)
    return found, [call.nbytes for call in collectives]


@in_two_ranks
def test_sums_of_squared_probabilities_of_shards(rank_pool, impl):
    inputs = policy(kind="confident")
    truth = _squares(inputs.leaves[0].double())
    for found, nbytes in rank_pool.run(_sharded_squares, inputs):
        assert nbytes == [16 * inputs.labels.numel()]
        assert_within_budget(found, truth, truth.float())


def _head_in_shards(rank, group, inputs, function):
    """In a rank: the gradient of the hidden states is its share of a sum."""
    inputs = shards(inputs, rank, group.size(), device_of(rank, group))
    found, _ = _from_head(getattr(verl, function), inputs, (8,), temperature=0.7, dist_process_group=group)
    share = found.grads[0].clone()
    torch.distributed.all_reduce(found.grads[0], group=group)
    return found, share


@in_two_ranks
def test_the_fused_kernel_on_shards(rank_pool, impl):
    inputs = policy(kind="peaked", head=True)
    results = rank_pool.run(_head_in_shards, inputs, "linear_cross_entropy")
    assert_right(whole([found for found, _ in results]), inputs, temperature=0.7)
    (found, share), _ = results
    assert not torch.allclose(share, found.grads[0], rtol=0.1)


# With verl itself.


@on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_beside_verls_own_functions(monkeypatch, device, dtype):
    if device == "cpu":  # flash-attn's kernel needs a GPU
        monkeypatch.setattr(real_module(LOGITS), "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
        monkeypatch.setattr(real_module(PPO), "_FLASH_ATTN_CROSS_ENTROPY_AVAILABLE", False)
    own, ppo = real_module(LOGITS).logprobs_from_logits, real_module(PPO).FusedLinearForPPO()
    functions = [own]
    logits, head = (policy(dtype, "confident", head=has_head, device=device) for has_head in (False, True))
    peers = _log_probs(own, logits)[0], _from_head(ppo, head, (2, 4), temperature=0.7)[0]
    with verl.installed() as report:
        assert {f"{LOGITS}.logprobs_from_logits", f"{PPO}.FusedLinearForPPO.forward"} <= set(report.rebound)
        functions.append(real_module(LOGITS).logprobs_from_logits)
        found = _log_probs(functions[1], logits)[0], _from_head(ppo, head, (2, 4), temperature=0.7)[0]
    assert functions[0] is not functions[1] and functions[0] is real_module(LOGITS).logprobs_from_logits
    assert_right(found[0], logits, peers[0]._replace(log_probs=peers[0].log_probs.float()))
    assert_right(found[1], head, peers[1], temperature=0.7)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("verl.models.mcore.model_forward_fused", "linear_cross_entropy"),
        ("verl.workers.engine.fsdp.transformer_impl", "logprobs_from_logits"),
        ("verl.workers.engine.megatron.transformer_impl", "vocab_parallel_entropy"),
        ("verl.workers.engine.megatron.transformer_impl", "vocab_parallel_sum_pi_squared"),
    ],
)
def test_engines_use_them(name, function):
    """Their modules have the names by ``from ... import``."""
    engine = real_module(name)
    own = getattr(engine, function)
    with verl.installed() as report:
        assert f"{name}.{function}" in report.rebound
        assert getattr(engine, function) is not own
    assert getattr(engine, function) is own and not verl.report().rebound


def _beside_verl(rank, group, inputs):
    """In a rank: verl's own and ours, through Megatron-Core's state."""
    state, functions = real_module("megatron.core.parallel_state"), real_module(MEGATRON)
    state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    inputs, found = shards(inputs, rank, group.size(), device_of(rank, group)), []

    def both():
        (leaf,) = leaves_of(inputs)
        entropy = functions.vocab_parallel_entropy(leaf * 1)
        log_probs = functions.vocab_parallel_log_probs_from_logits(leaf * 1, inputs.labels)  # a copy, as verl makes
        backward([log_probs, entropy], inputs.grads)
        return Found(log_probs, entropy, (leaf.grad,))

    try:
        found.append(both())
        with verl.installed() as report:
            assert report.left == verl.LEFT and f"{MEGATRON}.vocab_parallel_entropy" in report.rebound
            found.append(both())
    finally:
        state.destroy_model_parallel()
    return found


@in_two_ranks
def test_shards_beside_verls_own_functions(rank_pool, impl):
    real_module(MEGATRON)
    inputs = policy(kind="peaked")
    results = rank_pool.run(_beside_verl, inputs)
    own, found = (whole([result[which] for result in results]) for which in range(2))
    assert_right(found, inputs, own)


@pytest.mark.cuda
def test_the_fused_kernel_beside_verls_own():
    own = real_module(LINEAR).linear_cross_entropy
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 128, generator=generator).mul(0.5).cuda() for n in (256, 1024))
    labels = torch.randint(0, 1024, (256,), generator=generator).cuda()
    grads = [torch.randn(256, generator=generator).cuda() for _ in range(2)]  # verl's takes contiguous ones alone
    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 3e-2)):  # verl's fp32 products are TF32
        results = []
        for function in (own, verl.linear_cross_entropy):
            leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
            outputs = function(*leaves, labels, 0.7, "none", None)
            torch.autograd.backward(outputs, grads)
            results.append([*outputs, *(leaf.grad for leaf in leaves)])
        for first, second in zip(*results, strict=True):
            assert first.shape == second.shape and first.dtype == second.dtype
            torch.testing.assert_close(second, first, rtol=tolerance, atol=tolerance * float(first.abs().max()))
