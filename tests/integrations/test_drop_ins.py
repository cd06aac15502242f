"""What RL frameworks call for log-probabilities and entropies, against fp64, on one rank and on two.

The frameworks need not be here; ``test_native_functions.py`` compares with their expected functions where they are.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.cases.inputs import DTYPES, batch
from tests.support.cases.soft import divergences
from tests.support.frameworks import rl
from tests.support.ranks.collectives import record_collectives
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.integrations import nemo_automodel, nemo_rl, openrlhf, skyrl, swift, verl

MEGATRONS = (verl, swift, skyrl)  # they ask Megatron-Core for the group
T = 0.7


class Place(NamedTuple):
    """A rank: its group, and its columns."""

    group: Any = None
    start: int = 0
    end: int = rl.COLUMNS


def automodel_module(**options):
    """A module of NeMo Automodel's registry, as the drop-ins see it."""
    defaults = {"ignore_index": -100, "reduction": "none", "tp_group": None, "logit_softcapping": 0.0}
    return SimpleNamespace(**defaults | options, materialize_lm_weight=lambda weight, grad_reduce_group: weight)


class Sampling(NamedTuple):
    """As ``TrainingSamplingParams``."""

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def _entropy_first(z, y, on):
    """As OpenRLHF's actor, which then takes log-probabilities of the same logits."""
    entropy = openrlhf.compute_entropy(z)
    return openrlhf.log_probs_from_logits(z, y), entropy


def _flat_ppo(h, w, y, on):
    outputs = verl.FusedLinearForPPO()(h.flatten(0, 1), w, y.flatten())
    return [output.view(y.shape) for output in outputs]


def _verl_kernel(h, w, y, on):
    outputs = verl.linear_cross_entropy(h, w, y, T, "none", on.group)
    assert all(output.shape == (y.numel(),) for output in outputs)
    return [output.view(y.shape) for output in outputs]


def _nemo_core(z, y, on, *shape):
    """All ranks are None, as torch.distributed takes it; without a gradient the same numbers."""
    arguments = z.view(*(shape or y.shape), z.shape[-1]), y.view(shape or y.shape), on.start, on.end
    log_probs = nemo_rl.DistributedLogprob.apply(*arguments, None)
    alone = nemo_rl.DistributedLogprob.apply(*arguments, on.group, True)
    assert torch.equal(alone, log_probs) and not alone.requires_grad
    return log_probs.view(y.shape), None


def _next_tokens(z, y, on, padding=0):
    """Padding makes the logits longer. A temperature among the sampling parameters changes nothing, as in NeMo-RL."""
    padded = torch.cat([z, z.new_full((rl.SEQUENCES, padding, z.shape[-1]), 7.0)], dim=1)
    options = {"sampling_params": Sampling(temperature=T)}
    return F.pad(nemo_rl.from_parallel_logits_to_logprobs(padded, y, *on[1:], on.group, **options), (0, 1)), None


def _hidden_states(h, w, y, on):
    """Of this rank's part of the sequence, ``[s / R, b, D]``."""
    part = h.transpose(0, 1).chunk(on.group.size())[on.group.rank()]
    log_probs = nemo_rl.from_parallel_hidden_states_to_logprobs(part, w, False, y, *on[1:], on.group, chunk_size=2)
    return F.pad(log_probs, (0, 1)), None


def _skyrl_head(h, w, y, on):
    core = skyrl.FusedLinearChunkedDistributedLogprob.apply
    assert not core(h, w, y, *on[1:], 3, on.group, True).requires_grad
    return core(h, w, y, *on[1:], 3, on.group), None


class DropIn(NamedTuple):
    """A call of logits, or of hidden states and weight, with labels and a :class:`Place`, and what it promises."""

    call: Callable[..., Any]  # returns (log_probs, entropy), or None in place of one
    rounded: str = ""  # which of both have that of the logits; the other is fp32
    kind: str = "some_ignored"
    n_bytes: tuple[int, ...] | None = None  # that each token sends, on ranks
    head: bool = False
    temperature: float = 1.0
    is_next: bool = False  # targets are those of the next token
    roundings: int = 1  # of gradients on ranks


ON_ONE_RANK = {
    "verl": DropIn(lambda z, y, on: (verl.logprobs_from_logits(z, y), None)),
    "verl, out of place": DropIn(lambda z, y, on: (verl.logprobs_from_logits(z, y, inplace_backward=False), None)),
    "verl, PPO": DropIn(
        lambda h, w, y, on: verl.FusedLinearForPPO(3, "liger")(h, w, y.int(), temperature=T),
        "entropy",
        head=True,
        temperature=T,
    ),
    "verl, flat PPO": DropIn(_flat_ppo, "entropy", head=True),
    "verl, kernel": DropIn(_verl_kernel, head=True, temperature=T),
    **{
        f"OpenRLHF, temperature {t}": DropIn(
            lambda z, y, on, t=t: (openrlhf.log_probs_from_logits(z, y, temperature=t), None),
            "log_probs",
            temperature=t,
        )
        for t in (1.0, T, 2)
    },
    **{
        f"OpenRLHF, entropies, {kind}": DropIn(lambda z, y, on: (None, openrlhf.compute_entropy(z)), "entropy", kind)
        for kind in ("peaked", "confident", "excluded_columns")
    },
    "OpenRLHF, both": DropIn(
        lambda z, y, on: (openrlhf.log_probs_from_logits(z, y), openrlhf.compute_entropy(z)),
        "log_probs, entropy",
        "confident",
        roundings=3,
    ),
    "OpenRLHF, entropy first": DropIn(_entropy_first, "log_probs, entropy", "confident", roundings=3),
    "ms-swift": DropIn(lambda z, y, on: swift.compute_logps_and_entropy_from_logits(z, y), kind="confident"),
    "ms-swift, entropy": DropIn(
        lambda z, y, on: swift.compute_logps_and_entropy_from_logits(z, y, True), "entropy", "confident"
    ),
    **{
        f"NeMo Automodel, {function.__name__}": DropIn(
            lambda z, y, on, f=function: (-f(automodel_module(), z, y).view(y.shape), None)
        )
        for function in (nemo_automodel.masked_cross_entropy, nemo_automodel.te_parallel_cross_entropy)
    },
    **{
        f"NeMo Automodel, {function.__name__}": DropIn(
            lambda h, w, y, on, f=function: (-f(automodel_module(), h, y, w), None), head=True
        )
        for function in (nemo_automodel.fused_linear_cross_entropy, nemo_automodel.chunked_cross_entropy)
    },
}
ON_RANKS = {
    "verl": DropIn(lambda z, y, on: (verl.vocab_parallel_log_probs_from_logits(z, y), None), n_bytes=(12,)),
    "verl, entropy": DropIn(
        lambda z, y, on: (None, verl.vocab_parallel_entropy(z)), "entropy", "confident", n_bytes=(16,)
    ),
    "verl, chunked entropy": DropIn(
        lambda z, y, on: (None, verl.vocab_parallel_entropy_with_chunking(z, chunk_size=3)),
        kind="confident",
        n_bytes=(16,),
    ),
    "verl, both": DropIn(
        lambda z, y, on: (verl.vocab_parallel_log_probs_from_logits(z, y), verl.vocab_parallel_entropy(z)),
        "entropy",
        "confident",
        n_bytes=(12, 16),
        roundings=3,
    ),
    "verl, kernel": DropIn(_verl_kernel, kind="peaked", head=True, temperature=T, roundings=3),
    "SkyRL, head": DropIn(_skyrl_head, n_bytes=(12, 12), head=True, roundings=3),
    "SkyRL, entropy": DropIn(lambda z, y, on: (None, skyrl.vocab_parallel_entropy(z)), "entropy", "confident"),
    "ms-swift": DropIn(
        lambda z, y, on: swift.compute_logps_and_entropy_from_logits(z, y), kind="confident", n_bytes=(12,)
    ),
    "ms-swift, entropy": DropIn(
        lambda z, y, on: swift.compute_logps_and_entropy_from_logits(z, y, True), "entropy", "confident", n_bytes=(16,)
    ),
    "NeMo-RL": DropIn(_nemo_core, n_bytes=(12, 12)),
    "NeMo-RL, flat": DropIn(lambda z, y, on: _nemo_core(z, y, on, -1), n_bytes=(12, 12)),
    "NeMo-RL, chunked": DropIn(
        lambda z, y, on: (nemo_rl.ChunkedDistributedLogprob.apply(z, y, *on[1:], 3, on.group), None), n_bytes=(12,)
    ),
    "NeMo-RL, next tokens": DropIn(_next_tokens, kind="confident", is_next=True),
    "NeMo-RL, padded": DropIn(lambda z, y, on: _next_tokens(z, y, on, padding=2), kind="confident", is_next=True),
    "NeMo-RL, head": DropIn(_hidden_states, kind="peaked", head=True, is_next=True),
}


def _results(drop_in, inputs, on):
    """What a call gets, and the bytes that it sends. It leaves its tensors, which the test holds, as they are."""
    leaves = rl.leaves_of(inputs)
    tensors = [leaf * 1 for leaf in leaves]
    with record_collectives() as collectives:
        outputs = drop_in.call(*tensors, inputs.labels, on)
        n_bytes = [call.nbytes for call in collectives]
        assert all(map(torch.equal, tensors, inputs.leaves))
        rl.backward(outputs, inputs.grads)
    assert all(map(torch.equal, tensors, inputs.leaves))
    assert drop_in.head or len(collectives) == len(n_bytes)
    for name, output in zip(rl.Outcome._fields, outputs, strict=False):
        expected = inputs.leaves[0].dtype if name in drop_in.rounded else torch.float32
        assert output is None or (output.dtype, output.shape) == (expected, inputs.labels.shape)
    outputs = (None if output is None else output.detach() for output in outputs)
    return rl.Outcome(*outputs, tuple(leaf.grad for leaf in leaves)), n_bytes


@rl.on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ON_ONE_RANK)
def test_one_rank(monkeypatch, device, dtype, name):
    monkeypatch.setattr(swift, "tensor_parallel_group", lambda: None)
    drop_in = ON_ONE_RANK[name]
    inputs = rl.policy(dtype, drop_in.kind, head=drop_in.head, device=device)
    actual, _ = _results(drop_in, inputs, Place())
    rl.assert_right(actual, inputs, roundings=drop_in.roundings, temperature=drop_in.temperature)


def _in_rank(rank, group, name, inputs):
    """Gradients of hidden states are shares of a sum, which is made here."""
    with pytest.MonkeyPatch.context() as patch:
        for module in MEGATRONS:
            patch.setattr(module, "tensor_parallel_group", lambda: group)
        place = Place(group, *rl.columns_of(rank, group))
        actual, n_bytes = _results(ON_RANKS[name], rl.shards(inputs, rank, group), place)
    if ON_RANKS[name].head:
        share = actual.grads[0].clone()
        dist.all_reduce(actual.grads[0], group=group)
        assert not torch.allclose(share, actual.grads[0], rtol=0.1)
    return actual, n_bytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ON_RANKS)
@rl.in_two_ranks
def test_two_ranks(rank_pool, impl, name, dtype):
    drop_in = ON_RANKS[name]
    inputs = truth = rl.policy(dtype, drop_in.kind, head=drop_in.head)
    if drop_in.is_next:
        inputs, truth = rl.next_tokens(inputs), rl.without_the_last(inputs)
    results = rank_pool.run(_in_rank, name, inputs)
    # A CPU counts the labels of a head, and leaves ignored tokens out.
    n_tokens = int((inputs.labels != -100).sum()) if drop_in.head and rank_pool.backend == "gloo" else 8
    if drop_in.n_bytes is not None:
        assert [n_bytes for _, n_bytes in results] == [[each * n_tokens for each in drop_in.n_bytes]] * 2
    actual = rl.whole([actual for actual, _ in results])
    rl.assert_right(actual, truth, roundings=drop_in.roundings, temperature=drop_in.temperature)


def _squares(logits):
    return logits.softmax(-1).square().sum(-1)


@rl.on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["calculate_sum_pi_squared_from_logits", "vocab_parallel_sum_pi_squared"])
def test_sums_of_squared_probabilities(monkeypatch, device, dtype, name):
    monkeypatch.setattr(verl, "tensor_parallel_group", lambda: None)
    inputs = rl.policy(dtype, "confident", device=device)
    (leaf,), logits = rl.leaves_of(inputs), inputs.leaves[0]
    actual = getattr(verl, name)(leaf)
    assert torch.equal(leaf, logits) and not actual.requires_grad
    assert_within_budget(actual, _squares(logits.double()), _squares(logits.float()).to(dtype))


def _sharded_squares(rank, group, inputs):
    (logits,) = rl.shards(inputs, rank, group).leaves
    with pytest.MonkeyPatch.context() as patch, record_collectives() as collectives:
        patch.setattr(verl, "tensor_parallel_group", lambda: group)
        actual = verl.vocab_parallel_sum_pi_squared(logits)
    return actual, [call.nbytes for call in collectives]


@rl.in_two_ranks
def test_sums_of_squared_probabilities_of_shards(rank_pool, impl):
    inputs = rl.policy(kind="confident")
    truth = _squares(inputs.leaves[0].double())
    for actual, n_bytes in rank_pool.run(_sharded_squares, inputs):
        assert n_bytes == [16 * inputs.labels.numel()]
        assert_within_budget(actual, truth, truth.float())


@pytest.mark.reference
def test_reductions_of_verls_kernel():
    """Log-probabilities are reduced over all tokens, and entropies are not. Megatron has [s, b] and labels [b, s]."""
    inputs = rl.policy(head=True)
    hidden, weight = inputs.leaves
    each, entropy = verl.linear_cross_entropy(hidden, weight, inputs.labels, T, "none", None)
    for name, expected in {"sum": each.sum(), "MEAN": each.mean()}.items():
        arguments = hidden.view(8, 1, rl.WIDTH), weight, inputs.labels.view(1, 8), T, name
        reduced, others = verl.linear_cross_entropy(*arguments)
        assert torch.equal(reduced, expected) and torch.equal(others, entropy) and others.shape == (8,)
    with pytest.raises(ValueError, match="reduction: expected one of 'mean', 'sum', 'none'"):
        verl.linear_cross_entropy(hidden, weight, inputs.labels, T, "batchmean")


@rl.on_devices
def test_logits_of_verls_kernel_are_fp32(device):
    inputs = rl.policy(torch.bfloat16, head=True, device=device)
    short, wide = (
        verl.linear_cross_entropy(*(leaf.to(dtype) for leaf in inputs.leaves), inputs.labels, T)
        for dtype in (torch.bfloat16, torch.float32)
    )
    torch.testing.assert_close(short, wide, rtol=1.3e-6, atol=1e-5)


@pytest.mark.reference
def test_ms_swifts_ignored_tokens_have_entropies_and_no_log_probability(monkeypatch):
    monkeypatch.setattr(swift, "tensor_parallel_group", lambda: None)
    inputs = rl.policy()
    ignored = inputs.labels == -100
    log_probs, entropy = swift.compute_logps_and_entropy_from_logits(inputs.leaves[0], inputs.labels, True)
    assert ignored.any() and not log_probs[ignored].any() and entropy[ignored].all()


def _distillation(student, teacher, temperature):
    """NeMo Automodel's, without its factor of the temperature."""
    module = automodel_module(temperature=temperature)
    loss = nemo_automodel.knowledge_distillation(module, student, teacher, torch.zeros(6, dtype=torch.int64))
    return loss / temperature**2


DIVERGENCES = {
    "ms-swift, 0": (lambda s, t: swift.jsd_loss(s, t, 0), {"divergence": "forward", "reduction": "sum"}),
    "ms-swift, 1": (lambda s, t: swift.jsd_loss(s, t, 1), {"divergence": "reverse", "reduction": "sum"}),
    "ms-swift, 0.3": (
        lambda s, t: swift.jsd_loss(s, t, 0.3),
        {"divergence": "js", "beta": 0.3, "reduction": "sum"},
    ),
    "NeMo Automodel": (lambda s, t: _distillation(s, t, 1.0), {}),
    "NeMo Automodel, temperature": (lambda s, t: _distillation(s, t, 2.0), {"temperature": 2.0}),
}


@pytest.mark.reference
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences(name):
    function, options = DIVERGENCES[name]
    student, teacher = (batch(kind, rows=6, vocab_size=21).logits for kind in ("peaked", "confident"))
    leaf = student.clone().requires_grad_()
    loss = function(leaf * 1, teacher)
    loss.backward(torch.tensor(0.75))
    exact, reduction = student.double().requires_grad_(), options.get("reduction", "mean")
    ways = {name: value for name, value in options.items() if name != "reduction"}
    truth = getattr(divergences(exact, teacher.double(), **ways), reduction)()
    truth.backward(torch.tensor(0.75))
    torch.testing.assert_close((loss, leaf.grad), (truth.float(), exact.grad.float()), rtol=2e-6, atol=1e-6)


@pytest.mark.reference
def test_no_token_has_a_divergence_of_0_in_the_graph():
    loss = swift.jsd_loss(torch.zeros(0, rl.COLUMNS, requires_grad=True) * 1, torch.zeros(0, rl.COLUMNS), 0.5)
    assert loss.requires_grad and loss == 0
