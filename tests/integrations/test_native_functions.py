"""Drop-ins of RL frameworks beside the frameworks' own functions, where they are; the tests that need one skip else.

None is in CI: verl needs ray and tensordict, OpenRLHF DeepSpeed and flash-attn, SkyRL another Python, ms-swift and NeMo
Automodel have large requirements, and no index has NeMo-RL. Put a checkout or an unpacked wheel on PYTHONPATH. The
import of ms-swift scripts functions of torch, which these tests replace: run them with PYTORCH_JIT=0.
"""

import importlib
import sys
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.support.cases.inputs import batch
from tests.support.frameworks import rl
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of
from vocab_parallel_ce import integrations
from vocab_parallel_ce.integrations import nemo_automodel, openrlhf, skyrl, swift, verl

VERL, VERL_SHARDS = "verl.utils.torch_functional", "verl.utils.megatron.tensor_parallel"
VERL_DISTILLATION = "verl.trainer.distillation.megatron.losses"
PPO, VERL_KERNEL = "verl.utils.experimental.torch_functional", "verl.utils.kernel.linear_cross_entropy"
OPENRLHF, NEMO_RL = "openrlhf.models.utils", "nemo_rl.distributed.model_utils"
AUTOMODEL = f"{nemo_automodel.LOSSES}.loss"
BETAS = (0, 1, 0.3)


def _outcome(leaves, log_probs=None, entropy=None, *, grads):
    """The results of a call, after backward."""
    rl.backward([log_probs, entropy], grads)
    outputs = (None if output is None else output.detach() for output in (log_probs, entropy))
    return rl.Outcome(*outputs, tuple(leaf.grad for leaf in leaves))


def _verl(rank, group):
    functions, inputs = rl.real_module(VERL_SHARDS), rl.shards(rl.policy(kind="peaked"), rank, group)
    (leaf,) = rl.leaves_of(inputs)
    entropy = functions.vocab_parallel_entropy(leaf * 1)
    log_probs = functions.vocab_parallel_log_probs_from_logits(leaf * 1, inputs.labels)
    return [_outcome([leaf], log_probs, entropy, grads=inputs.grads)]


def _nemo_logits(rank, group):
    """With padding, in chunks, and of two sequences in one tensor."""
    utils, inputs = rl.real_module(NEMO_RL), rl.shards(rl.next_tokens(rl.policy(kind="confident")), rank, group)
    place, actual = (*rl.columns_of(rank, group), group), []
    for padding, options in ((0, {}), (2, {}), (0, {"chunk_size": 3})):
        (leaf,) = rl.leaves_of(inputs)
        padded = torch.cat([leaf * 1, leaf.new_full((rl.SEQUENCES, padding, leaf.shape[-1]), 7.0)], dim=1)
        log_probs = utils.from_parallel_logits_to_logprobs(padded, inputs.labels, *place, **options)
        actual.append(_outcome([leaf], F.pad(log_probs, (0, 1)), grads=inputs.grads))
    (leaf,) = rl.leaves_of(inputs)
    ends = torch.arange(0, rl.SEQUENCES * rl.LENGTH + 1, rl.LENGTH, device=leaf.device)
    packed = (leaf * 1).reshape(1, rl.SEQUENCES * rl.LENGTH, -1), inputs.labels.reshape(1, -1), ends, rl.LENGTH
    log_probs = utils.from_parallel_logits_to_logprobs_packed_sequences(*packed, *place)
    return [*actual, _outcome([leaf], F.pad(log_probs, (0, 1)), grads=inputs.grads)]


def _nemo_head(rank, group):
    inputs = rl.shards(rl.next_tokens(rl.policy(kind="confident", head=True)), rank, group)
    hidden, weight = rl.leaves_of(inputs)
    part = hidden.transpose(0, 1).contiguous().chunk(2)[rank]
    place = *rl.columns_of(rank, group), group
    function = rl.real_module(NEMO_RL).from_parallel_hidden_states_to_logprobs
    log_probs = function(part, weight, False, inputs.labels, *place, chunk_size=2)
    actual = _outcome([hidden, weight], F.pad(log_probs, (0, 1)), grads=inputs.grads)
    dist.all_reduce(actual.grads[0], group=group)
    return [actual]


def _pair_of_shards(rank, group):
    """A student's and a teacher's columns, and the teacher's own log-probabilities and ids at its top 4."""
    student, whole_teacher = (rl.policy(kind=kind) for kind in ("peaked", "confident"))
    values, ids = (each.to(device_of(rank, group)) for each in whole_teacher.leaves[0].log_softmax(-1).topk(4))
    student, teacher = (rl.shards(inputs, rank, group) for inputs in (student, whole_teacher))
    return student, teacher.leaves[0], values, ids


def _nemo_distillation(rank, group):
    """Over the top k with the entropy, of a draft model, and NeMo-RL 0.8's over all columns."""
    utils, (inputs, teacher, values, ids), actual = rl.real_module(NEMO_RL), _pair_of_shards(rank, group), []
    (leaf,) = rl.leaves_of(inputs)
    place = {"vocab_parallel_rank": rank, "vocab_parallel_group": group}
    outputs = utils.get_distillation_topk_logprobs_from_logits(leaf * 1, values, ids, True, True, **place)
    rl.backward([outputs[0], outputs[2]], [inputs.grads[0][:, :-1, None] * values[:, :-1], inputs.grads[1][:, :-1]])
    actual += [*(each.detach() for each in outputs), leaf.grad]
    for name, arguments in (("DistributedCrossEntropy", ()), ("ChunkedDistributedReverseKLToFixedLogits", (3,))):
        if hasattr(utils, name):
            (leaf,) = rl.leaves_of(inputs)
            losses = getattr(utils, name).apply(leaf * 1, teacher, *arguments, group, False)
            rl.backward([losses], inputs.grads[:1])
            actual += [losses.detach(), leaf.grad]
    return actual


def _verl_distillation(rank, group):
    """Of packed sequences, as verl's Megatron engine calls it."""
    function = rl.real_module(VERL_DISTILLATION).compute_forward_kl_topk
    (inputs, _, values, ids), actual = _pair_of_shards(rank, group), []
    nested = [torch.nested.as_nested_tensor(list(each), layout=torch.jagged) for each in (values, ids)]
    for clamp in (None, -3.0):
        (leaf,) = rl.leaves_of(inputs)
        config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=clamp))
        found = function((leaf * 1).flatten(0, 1)[None], *nested, config, "thd")
        rl.backward([found["distillation_losses"]], [inputs.grads[0].reshape(1, -1)])
        actual += [*(each.detach() for each in found.values()), leaf.grad]
    return actual


def _skyrl(rank, group):
    utils, inputs = rl.real_module(skyrl.MODULE), rl.shards(rl.policy(kind="peaked"), rank, group)
    place, actual = (*rl.columns_of(rank, group), group), []
    for chunk_size in (None, 3):
        (leaf,) = rl.leaves_of(inputs)
        targets = inputs.labels.roll(1, dims=-1)
        log_probs = utils.from_parallel_logits_to_logprobs(leaf * 1, targets, *place, chunk_size=chunk_size)
        rl.backward([log_probs], [inputs.grads[0][:, :-1]])
        actual += [log_probs.detach(), leaf.grad]
    for options in ({}, {"chunk_size": 2}):
        (leaf,) = rl.leaves_of(inputs)
        entropy = utils.vocab_parallel_entropy(leaf * 1, **options)
        rl.backward([entropy], inputs.grads[1:])
        actual += [entropy.detach(), leaf.grad]
    hidden, weight = rl.leaves_of(rl.shards(rl.policy(kind="peaked", head=True), rank, group))
    options = {"chunk_size": 2, "temperature": 0.7}
    log_probs = utils.from_parallel_hidden_to_logprobs(hidden, weight, inputs.labels, *place, **options)
    rl.backward([log_probs], [inputs.grads[0][:, :-1]])
    return [*actual, log_probs.detach(), hidden.grad, weight.grad]


def _swift_policy(rank, group):
    functions, inputs, actual = rl.real_module(swift.SHARDS), rl.shards(rl.policy(kind="confident"), rank, group), []
    for compute_entropy in (False, True):
        (leaf,) = rl.leaves_of(inputs)
        outputs = functions.compute_logps_and_entropy_from_logits(leaf * 1, inputs.labels, compute_entropy)
        actual.append(_outcome([leaf], *outputs, grads=inputs.grads))
    return actual


def _pair(device="cpu"):
    return [batch(kind, rows=6, vocab_size=rl.COLUMNS).logits.to(device) for kind in ("peaked", "confident")]


def _swift_divergences(rank, group):
    functions, gkd, actual = rl.real_module(swift.SHARDS), rl.real_module(swift.GKD), []
    pair = _pair(device_of(rank, group))
    cut = [tensor.chunk(2, -1)[rank].contiguous() for tensor in pair]
    sharded = functions.vocab_parallel_log_softmax, functions.vocab_parallel_kl_div
    unsharded = gkd.default_log_softmax, gkd.default_kl_div
    for beta in BETAS:
        for (student, teacher), callables in ((cut, sharded), (pair, unsharded), (pair, ())):
            leaf = student.clone().requires_grad_()
            loss = gkd.jsd_loss(leaf * 1, teacher, beta, *callables)
            loss.backward(torch.tensor(0.75, device=leaf.device))
            actual += [loss.detach(), leaf.grad]
    return actual


def _swift_gkd(rank, group):
    """The whole pipeline, of tokens that are not ignored, and of a teacher that is known at its top k."""
    functions, gkd = rl.real_module(swift.SHARDS), rl.real_module(swift.GKD)
    gather = rl.real_module("swift.megatron.trainers.gkd_utils").tp_gather_topk
    inputs, teacher, actual = rl.shards(rl.policy(), rank, group), rl.policy(kind="confident").leaves[0], []
    part = teacher.chunk(2, -1)[rank].to(inputs.labels.device)
    values, indices = teacher.to(part.device).log_softmax(-1).topk(4)
    functions = gather, functions.vocab_parallel_log_softmax, functions.vocab_parallel_kl_div
    for output in (gkd.TeacherOutput(full_logits=part), gkd.TeacherOutput(topk_logprobs=values, topk_indices=indices)):
        (leaf,) = rl.leaves_of(inputs)
        total, n_valid = gkd.gkd_loss(leaf * 1, output, inputs.labels, 0.5, 0.7, *functions)
        total.backward()
        actual += [total.detach(), torch.as_tensor(n_valid), leaf.grad]
    return actual


def _registry(**options):
    build = rl.real_module(AUTOMODEL).build_loss_module
    return {name: build(name, **arguments) for name, arguments in options.items()}


def _automodel_dtensors(rank, group):
    """21 columns, 11 and 10, or whole; NeMo Automodel's own gathers them."""
    mesh = init_device_mesh(device_of(rank, group).type, (2,), mesh_dim_names=("tp",))
    made = batch("some_ignored", rows=8, vocab_size=21)
    logits, labels = made.logits.view(2, 4, 21).to(mesh.device_type), made.labels.view(2, 4).to(mesh.device_type)
    built, actual = _registry(MaskedCrossEntropy={"reduction": "none"}, KDLoss={"temperature": 2.0}), []
    for placement in (Shard(2), Replicate()):
        leaf = distribute_tensor(logits, mesh, [placement]).requires_grad_()
        with record_collectives() as collectives:
            losses = built["MaskedCrossEntropy"](leaf * 1, labels.clone())
        losses.backward(rl.policy().grads[0].reshape(losses.shape).to(losses))
        if nemo_automodel.report().installed:
            assert [call.name for call in collectives] == ["_allgather_base_"] * placement.is_shard()
        actual += [losses.detach(), leaf.grad.full_tensor()]
    leaf, teacher = (distribute_tensor(each, mesh, [Shard(2)]) for each in (logits, logits.flip(-1)))
    loss = built["KDLoss"](leaf.requires_grad_().flatten(0, 1), teacher.flatten(0, 1), labels.flatten())
    loss.backward()
    return [*actual, loss.detach(), leaf.grad.full_tensor()]


class Case(NamedTuple):
    """A call in a rank of a framework's functions; the integration puts ours in their place."""

    integration: str
    needs: str  # the framework's module
    call: Callable[..., list[Any]]
    truth: Any = None  # the inputs of each Outcome that the call returns


CASES = {
    "verl": Case("verl", VERL_SHARDS, _verl, rl.policy(kind="peaked")),
    "verl, distillation": Case("verl", VERL_DISTILLATION, _verl_distillation),
    "NeMo-RL, distillation": Case("nemo_rl", NEMO_RL, _nemo_distillation),
    "NeMo-RL": Case("nemo_rl", NEMO_RL, _nemo_logits, rl.without_the_last(rl.policy(kind="confident"))),
    "NeMo-RL, head": Case("nemo_rl", NEMO_RL, _nemo_head, rl.without_the_last(rl.policy(kind="confident", head=True))),
    "SkyRL": Case("skyrl", skyrl.MODULE, _skyrl),
    "ms-swift": Case("swift", swift.SHARDS, _swift_policy, rl.policy(kind="confident")),
    "ms-swift, divergences": Case("swift", swift.SHARDS, _swift_divergences),
    "ms-swift, GKD": Case("swift", "swift.megatron.trainers.gkd_utils", _swift_gkd),
    "NeMo Automodel, DTensors": Case("nemo_automodel", AUTOMODEL, _automodel_dtensors),
}


@contextmanager
def _megatron_group(group, name):
    """Megatron-Core's state of tensor parallelism, which some ask for."""
    if name not in ("verl", "skyrl", "swift"):
        yield
        return
    state = rl.real_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    try:
        yield
    finally:
        state.destroy_model_parallel()


def _both(rank, group, name):
    """In a rank: what the framework's own functions get, and ours in their place."""
    case = CASES[name]
    module = integrations.__getattr__(case.integration)
    with _megatron_group(group, case.integration):
        rl.real_module(case.needs)
        native = case.call(rank, group)
        with module.installed() as report:
            assert report.rebound and report.left.items() >= module._switch.left.items()
            return native, case.call(rank, group)


@rl.in_two_ranks
@pytest.mark.parametrize("name", CASES)
def test_two_ranks(rank_pool, impl, name):
    case = CASES[name]
    rl.real_module(case.needs)
    results = rank_pool.run(_both, name)
    if case.truth is None:
        for native, actual in results:
            torch.testing.assert_close(actual, native, rtol=1e-4, atol=1e-5)
        return
    for native, actual in zip(*(zip(*each, strict=True) for each in zip(*results, strict=True)), strict=True):
        rl.assert_right(rl.whole(actual), case.truth, rl.whole(native))


@rl.on_devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verl(monkeypatch, device, dtype):
    functions, ppo = rl.real_module(VERL), rl.real_module(PPO)
    if device == "cpu":  # flash-attn's kernel needs a GPU
        monkeypatch.setattr(functions, "FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE", False)
        monkeypatch.setattr(ppo, "_FLASH_ATTN_CROSS_ENTROPY_AVAILABLE", False)
    logits, head = (rl.policy(dtype, "confident", head=has_head, device=device) for has_head in (False, True))
    native, module = functions.logprobs_from_logits, ppo.FusedLinearForPPO()

    def both():
        leaves, head_leaves = rl.leaves_of(logits), rl.leaves_of(head)
        log_probs = functions.logprobs_from_logits(leaves[0] * 1, logits.labels).float()
        outputs = module(*head_leaves, head.labels, temperature=0.7)
        return _outcome(leaves, log_probs, grads=logits.grads), _outcome(head_leaves, *outputs, grads=head.grads)

    peers = both()
    with verl.installed() as report:
        assert {f"{VERL}.logprobs_from_logits", f"{PPO}.FusedLinearForPPO.forward"} <= set(report.rebound)
        assert functions.logprobs_from_logits is not native
        actual = both()
    assert functions.logprobs_from_logits is native
    rl.assert_right(actual[0], logits, peers[0])
    rl.assert_right(actual[1], head, peers[1], temperature=0.7)


@rl.on_devices
def test_openrlhf(monkeypatch, device):
    if device == "cpu":
        monkeypatch.setitem(sys.modules, "flash_attn.ops.triton.cross_entropy", None)  # it needs a GPU
    utils, inputs = rl.real_module(OPENRLHF), rl.policy(kind="confident", device=device)

    def both():
        """Each with a backward of its own: OpenRLHF's write over the logits."""
        (leaf,) = rl.leaves_of(inputs)
        logits = leaf * 1
        outputs = [utils.compute_entropy(logits), utils.log_probs_from_logits(logits, inputs.labels)]
        for output, grad in zip(outputs, inputs.grads[::-1], strict=True):
            rl.backward([output], [grad], retain_graph=True)
        return rl.Outcome(outputs[1].detach(), outputs[0].detach(), (leaf.grad,))

    native = both()
    with openrlhf.installed() as report:
        assert list(report.left) == ["the head"]
        actual = both()
    rl.assert_right(actual, inputs, native)
    assert both().log_probs.equal(native.log_probs)


ENGINES = {
    "verl.models.mcore.model_forward_fused": ["linear_cross_entropy"],
    "verl.workers.engine.fsdp.transformer_impl": ["logprobs_from_logits"],
    "verl.workers.engine.megatron.transformer_impl": ["vocab_parallel_entropy", "vocab_parallel_sum_pi_squared"],
    "openrlhf.models.actor": ["log_probs_from_logits", "compute_entropy"],
}


@pytest.mark.reference
@pytest.mark.parametrize("name", ENGINES)
def test_engines_use_them(name):
    """Their modules have the names by ``from ... import``."""
    engine, module = rl.real_module(name), importlib.import_module(f"{integrations.__name__}.{name.partition('.')[0]}")
    native = {function: getattr(engine, function) for function in ENGINES[name]}
    with module.installed() as report:
        for function in native:
            assert f"{name}.{function}" in report.rebound and getattr(engine, function) is not native[function]
    assert all(getattr(engine, function) is native[function] for function in native) and not module.report().rebound


@pytest.mark.reference
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_registry_of_nemo_automodel(reduction):
    logits, head, teacher = rl.policy(), rl.policy(head=True), rl.policy(kind="confident").leaves[0]
    options = {"reduction": reduction}
    built = _registry(MaskedCrossEntropy=options, ChunkedCrossEntropy=options | {"compile": False}, KDLoss={})
    n_tokens = 7 if reduction == "sum" else None

    def every():
        leaf, (hidden, weight), student = *rl.leaves_of(logits), rl.leaves_of(head), *rl.leaves_of(logits)
        actual = [built["MaskedCrossEntropy"](leaf * 1, logits.labels, num_label_tokens=n_tokens)]
        actual.append(built["ChunkedCrossEntropy"](hidden * 1, head.labels, weight * 1, n_tokens))
        actual.append(built["KDLoss"](student * 1, teacher, logits.labels, n_tokens))
        torch.autograd.backward(actual)
        return [value.detach() for value in actual], [tensor.grad for tensor in (leaf, hidden, weight, student)]

    native = every()
    with nemo_automodel.installed() as report:
        assert f"{nemo_automodel.LOSSES}.masked_ce.MaskedCrossEntropy.forward" in report.rebound
        torch.testing.assert_close(every(), native, rtol=1e-5, atol=1e-6)
    assert all(map(torch.equal, every()[0], native[0]))


@pytest.mark.reference
def test_other_functions_and_a_teacher_with_a_gradient_are_ms_swifts():
    gkd, (student, teacher) = rl.real_module(swift.GKD), _pair()
    native = gkd.jsd_loss

    def halved(logits):
        return (logits / 2).log_softmax(-1)

    with swift.installed():
        for other, functions in ((teacher, (halved, gkd.default_kl_div)), (teacher.clone().requires_grad_(), ())):
            inputs = student, other, 0.3, *functions
            assert torch.equal(gkd.jsd_loss(*inputs), native(*inputs))


@pytest.mark.cuda
def test_verls_kernel():
    native = rl.real_module(VERL_KERNEL).linear_cross_entropy
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 128, generator=generator).mul(0.5).cuda() for n in (256, 1024))
    labels = torch.randint(0, 1024, (256,), generator=generator).cuda()
    grads = [torch.randn(256, generator=generator).cuda() for _ in range(2)]  # verl's takes contiguous ones alone
    for dtype, tolerance in ((torch.float32, 2e-3), (torch.bfloat16, 3e-2)):  # verl's fp32 products are TF32
        results = []
        for function in (native, verl.linear_cross_entropy):
            leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight)]
            outputs = function(*leaves, labels, 0.7, "none", None)
            torch.autograd.backward(outputs, grads)
            results.append([*outputs, *(leaf.grad for leaf in leaves)])
        for first, second in zip(*results, strict=True):
            assert first.shape == second.shape and first.dtype == second.dtype
            torch.testing.assert_close(second, first, rtol=tolerance, atol=tolerance * float(first.abs().max()))
