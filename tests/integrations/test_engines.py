"""Training engines around a model of transformers: the same steps with install(), and fused.

Each puts a hook on every output of the model that has a history: the stand-in of the logits too.
"""

import os
from unittest.mock import patch

import accelerate
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from tests.support.frameworks.rl import real_module
from tests.support.frameworks.transformers_ranks import RATE, halves, small_model
from tests.support.frameworks.transformers_steps import calls_of, own_step
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce.integrations.transformers import audit, install, report, uninstall
from vocab_parallel_ce.integrations.transformers.audit_models import differs, step
from vocab_parallel_ce.integrations.transformers.targets import path_of
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs

in_two_ranks = in_ranks((2,), (), (2,))
STEPS = 3
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# DeepSpeed's globals, which another test of these ranks may have left.
OF_TENSOR_PARALLELISM = ("mpu", "_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
ZERO = {f"ZeRO-{stage}": stage for stage in range(4)}
SHARDED = {f"FSDP1, {name}": getattr(ShardingStrategy, name) for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")}


class Engine:
    """A model, how a step of its training goes, and its whole weights."""

    def __init__(self, model, step, weights):
        self.model, self.step, self.weights = model, step, weights


def _whole(model):
    return {name: weight.detach().float().cpu().clone() for name, weight in model.named_parameters()}


def deepspeed_engine(model, name, dtype, device):
    engines = real_module("deepspeed")
    real_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False  # which it would compile
    groups = real_module("deepspeed.utils.groups")
    for name_of_group in OF_TENSOR_PARALLELISM:
        setattr(groups, name_of_group, None)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_optimization": {"stage": ZERO[name], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    if dtype == torch.bfloat16:
        config["bf16"] = {"enabled": True}
    engine, *_ = engines.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(loss):
        engine.backward(loss)
        engine.step()

    def weights():
        with engines.zero.GatheredParameters(list(model.parameters()), enabled=name == "ZeRO-3"):
            return _whole(model)

    return Engine(engine, step, weights)


def _fsdp1(model, name, dtype, device):
    mixed = MixedPrecision(param_dtype=dtype) if dtype == torch.bfloat16 else None
    options = {"sharding_strategy": SHARDED[name], "use_orig_params": True, "mixed_precision": mixed}
    wrapped = FullyShardedDataParallel(model, device_id=device, **options)

    def weights():
        with FullyShardedDataParallel.summon_full_params(wrapped):
            return _whole(wrapped)

    return Engine(wrapped, _step_of(wrapped, torch.Tensor.backward), weights)


def _fabric(model, name, dtype, device):
    fabrics = real_module("lightning.fabric")
    precision = "bf16-mixed" if dtype == torch.bfloat16 else "32-true"
    fabric = fabrics.Fabric(accelerator="cpu", devices=1, precision=precision)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=RATE))
    return Engine(wrapped, _step_of(model, fabric.backward, optimizer), lambda: _whole(model))


def _step_of(model, backward, optimizer=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, foreach=False) if optimizer is None else optimizer

    def step(loss):
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


ENGINES = dict.fromkeys(ZERO, deepspeed_engine) | dict.fromkeys(SHARDED, _fsdp1)
ENGINES["Fabric"] = _fabric
ON_RANKS = [*ZERO, *SHARDED]
# In each family each two of mechanism, precision and return_dict meet.
RETURN_DICT = ("ZeRO-0", "ZeRO-1", "FSDP1, FULL_SHARD", "FSDP1, SHARD_GRAD_OP", "Fabric")
CASES = [
    (name, dtype, "lazy" if (number + other) % 2 == 0 else "rewrite")
    for number, name in enumerate(ENGINES)
    for other, dtype in enumerate(PRECISIONS)
]


def _trained(rank, device, name, dtype, return_dict, options):
    """Losses of a few steps, how much each weight changed, and what became of the calls."""
    model, batch = small_model("llama").to(device), halves(device)[rank][0]
    before = _whole(model)
    if options is not None:
        install(**options)
    try:
        engine, losses = ENGINES[name](model, name, dtype, device), []
        for _ in range(STEPS):
            outputs = engine.model(**batch, return_dict=return_dict)
            loss = outputs.loss if return_dict else outputs[0]
            losses.append(loss.item())
            engine.step(loss)
        changes = {name: after - before[name] for name, after in engine.weights().items()}
        return losses, changes, audit(model)
    finally:
        uninstall()


def _both(rank, group, impl, name, dtype, mechanism):
    # DeepSpeed reads the rank, and ZeRO-3 leaves a function of its own.
    with patch.dict(os.environ, {"LOCAL_RANK": str(rank)}), patch.object(F, "linear", F.linear):
        return _pair(rank, device_of(rank, group), impl, name, dtype, mechanism)


def _pair(rank, device, impl, name, dtype, mechanism):
    """Without install() and with it."""
    returns = (dtype == "fp32") == (name in RETURN_DICT)
    options = {"mechanism": mechanism, "impl": impl}
    return [_trained(rank, device, name, PRECISIONS[dtype], returns, each) for each in (None, options)]


def _assert_same(pair, name, dtype):
    """Losses of all steps, and the weights' changes, which are the sums of the gradients times the rate."""
    (expected, truth, none), (losses, changes, counts) = pair
    assert not none and counts == {"fused": STEPS}
    assert expected[-1] < 0.99 * expected[0]  # the steps matter
    assert losses == pytest.approx(expected, rel=1e-5 if dtype == "fp32" else 2e-3)
    for each, change in truth.items():
        error, size = (changes[each] - change).norm(), change.norm()
        assert size > 0 and error <= (1e-4 if dtype == "fp32" else 0.05) * size, (each, error / size)


def _looked_at(rank, group, impl):
    """What became of the logits of a model that ZeRO-3 has partitioned, after its forward and without gradients."""
    device = device_of(rank, group)
    with patch.dict(os.environ, {"LOCAL_RANK": str(rank)}), patch.object(F, "linear", F.linear):
        model, batch = small_model("llama").to(device), halves(device)[rank][0]
        expected = model(**batch).logits
        engine = deepspeed_engine(model, "ZeRO-3", torch.float32, device).model
        install(model, impl=impl)
        try:
            late = error_of(lambda: engine(**batch).logits.sum().item())
            with torch.no_grad():
                error = (engine(**batch).logits - expected).abs().max()
            return late, error, audit(model)
        finally:
            uninstall(model)


@in_two_ranks
def test_logits_of_a_partitioned_head_are_not_made_after_its_forward(rank_pool, impl):
    real_module("deepspeed")
    unsure = "DeepSpeed ZeRO-3 has partitioned the head, whose logits may be looked at later without gradients"
    for late, error, counts in rank_pool.run(_looked_at, impl):
        assert late.startswith("RuntimeError: logits: looked at after the forward of a model whose head ZeRO-3")
        assert error < 1e-5 and counts == {"fused": 1, "logits made after the call": 1, unsure: 1}


@pytest.mark.parametrize(("name", "dtype", "mechanism"), [case for case in CASES if case[0] in ON_RANKS])
@in_two_ranks
def test_an_engine_of_several_ranks_trains_alike_and_fused(rank_pool, impl, name, dtype, mechanism):
    if name in ZERO:
        real_module("deepspeed")
    for pair in rank_pool.run(_both, impl, name, dtype, mechanism):
        _assert_same(pair, name, dtype)


@pytest.mark.reference
@pytest.mark.parametrize(("name", "dtype", "mechanism"), [case for case in CASES if case[0] not in ON_RANKS])
def test_an_engine_of_one_process_trains_alike_and_fused(name, dtype, mechanism):
    _assert_same(_pair(0, torch.device("cpu"), "reference", name, dtype, mechanism), name, dtype)


# Models whose own forward something else has made before install().


HOOKED_HEAD = "something replaced the head's forward"


def _dispatched(model, how="hook"):
    hooks = accelerate.hooks
    if how == "hook":  # on the model alone
        return hooks.add_hook_to_module(model, hooks.AlignDevicesHook(io_same_device=True))
    return accelerate.dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("how", "target_of"),
    [("hook", lambda model: ()), ("hook", lambda model: (type(model),)), ("dispatch_model", lambda model: (model,))],
)
def test_a_model_that_accelerate_dispatched_before_is_reached_and_given_back(how, target_of, llama):
    model, target = _dispatched(llama, how), target_of(llama)
    inputs, forward, old = tiny_inputs(model), model.forward, model._old_forward
    expected = own_step(model, inputs)
    assert f"{path_of(model)}.forward" in install(*target).rebound and install(*target).installed
    assert differs(step(model, inputs), expected) is None
    assert calls_of(model) == ({"fused": 1} if how == "hook" else {HOOKED_HEAD: 1})
    uninstall()
    assert model.forward is forward and model._old_forward == old
    step(model, inputs)
    assert sum(calls_of(model).values()) == 1


@pytest.mark.reference
def test_a_model_that_accelerate_offloaded_before_says_why_it_is_not_fused(llama):
    model = accelerate.cpu_offload(llama, execution_device=torch.device("cpu"))
    inputs = tiny_inputs(model)
    expected = model(**inputs).loss
    install()
    torch.testing.assert_close(model(**inputs).loss, expected)
    (reason,) = audit(model)
    assert reason and reason != "fused"


@pytest.mark.reference
@pytest.mark.parametrize("installs_first", (True, False))
def test_an_installed_model_is_given_back_after_accelerate_came_or_went(installs_first, llama):
    from accelerate.hooks import remove_hook_from_module

    if installs_first:
        install(llama)
        _dispatched(llama)
    else:
        _dispatched(llama)
        install(llama)
        remove_hook_from_module(llama)
    llama(**tiny_inputs(llama))
    assert audit(llama) == {"fused": 1}
    assert uninstall(llama) == {"LlamaForCausalLM": "restored"}
    llama(**tiny_inputs(llama))
    assert audit(llama) == {"fused": 1}
    assert hasattr(llama, "_hf_hook") == installs_first


@pytest.mark.reference
def test_uninstall_leaves_accelerates_own_forward_alone(llama):
    install(type(llama))
    _dispatched(llama)
    forward = llama.forward
    assert "left alone: its class is installed" in uninstall(llama)["LlamaForCausalLM"]
    assert llama.forward is forward


def _compiled(model):
    model.forward = torch.compile(model.forward, backend="eager")
    return "torch._dynamo.eval_frame"


def _prepared(model):
    accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    return "accelerate.utils.operations"


@pytest.mark.reference
@pytest.mark.parametrize("make", (_compiled, _prepared))
def test_a_forward_of_something_else_is_said_and_one_made_after_install_is_not(make, llama, caplog):
    maker = make(llama)
    with pytest.raises(ValueError, match="LlamaForCausalLM: something else has replaced its forward: install.. before"):
        install(llama)
    made = install()
    assert made.left["LlamaForCausalLM (one model)"].startswith(f"its forward, by {maker}, is from before install()")
    assert sum("is from before install(): make it after" in each.getMessage() for each in caplog.records) == 1
    assert list(audit(llama).values()) == [0] and maker in str(audit(llama))
    del llama.forward
    make(llama)
    assert audit(llama) == {} and "LlamaForCausalLM (one model)" not in report().left
