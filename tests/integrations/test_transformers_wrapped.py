"""Models of transformers that FSDP or DDP wraps: trained without their logits."""

import copy
import os
import re
import sys
import weakref
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

from tests.support.frameworks import transformers_ranks as small
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce.integrations.transformers import audit, fsdp, install, uninstall
from vocab_parallel_ce.integrations.transformers.heads import refusal

in_two_ranks = in_ranks((2,), (), (2,))
WRAPS = (
    "root",
    "reshard",
    "own",
    "own, reshard",
    "own, tokens",
    "own, tokens, rewrite",
    "list",
    "ddp",
    "ddp, unused",
    "tied",
    "outer",
)


def _data_parallel(rank, group, impl, how, dtype):
    device = device_of(rank, group)
    model = small.small_model("llama", how == "tied").to(device)
    batches = small.halves(device)
    reference = copy.deepcopy(model)
    losses = [small.accumulate(reference, part, 0.5) for part in batches][rank]
    expected = small.gradients_of(reference)
    policy = MixedPrecisionPolicy(param_dtype=dtype) if dtype is not None else None
    if dtype is not None:
        other = small.wrap(copy.deepcopy(model), how, device, policy)
        small.accumulate(other, batches[rank])
        native = small.gradients_of(other)
    else:
        native = expected
    wrapped = small.wrap(model, how, device, policy)
    own_tokens = "tokens" in how
    install(wrapped, impl=impl, own_tokens=own_tokens, mechanism="rewrite" if "rewrite" in how else "lazy")
    with patch.object(fsdp, "in_forward_of", None if own_tokens else fsdp.in_forward_of):
        found = small.accumulate(wrapped, batches[rank])
    counts = audit(wrapped)
    gradients = small.gradients_of(wrapped)
    looks = looks_at_logits(wrapped, reference, batches[rank][0])
    uninstall(wrapped)
    return (losses, found), (expected, gradients, native), counts, looks


def looks_at_logits(model, reference, batch):
    """Return the real logits, and those looked at in several places, or the error."""
    optimizer = torch.optim.SGD(model.parameters(), lr=small.RATE, foreach=False)  # of the shards
    with torch.no_grad():
        expected = reference(**batch).logits
        evaluated = model(**batch)
    looks = {"real": expected, "evaluated": evaluated.logits.detach()}

    def look(name, outputs):
        looks[name] = error_of(lambda: looks.update({name: outputs.logits.detach()})) or looks[name]

    look("after forward", model(**batch))
    outputs = model(**batch)
    outputs.loss.backward()
    look("after backward", outputs)
    outputs = model(**batch)
    outputs.loss.backward()
    optimizer.step()
    model(**batch)
    look("after a step", outputs)
    return looks


@pytest.mark.parametrize("how", WRAPS)
@in_two_ranks
def test_a_model_that_fsdp_or_ddp_wraps_trains_as_a_whole_one_without_its_logits(rank_pool, impl, how):
    freed, changed = "RuntimeError: logits: .* freed", "RuntimeError: logits: .* changed"
    errors = {"after a step": changed}
    if how in ("root", "reshard", "tied", "outer", "list"):
        errors["after backward"] = freed
    if how in ("reshard", "list"):
        errors["after forward"] = freed
    for (losses, own), (expected, found, _), counts, looks in rank_pool.run(_data_parallel, impl, how, None):
        assert counts == {"fused": 2}, how
        assert own == pytest.approx(losses, rel=1e-5)
        small.assert_same_gradients(found, {name.removeprefix("module."): g for name, g in expected.items()})
        real = looks.pop("real")
        for name, look in looks.items():
            if name in errors:
                assert re.match(errors[name], look), (name, look)
            else:
                small.assert_same(look, real, name)


@pytest.mark.reference
def test_heads_of_other_frameworks_fall_back_by_name():
    flattened, hooked = (nn.Linear(4, 8) for _ in range(2))
    del flattened.weight
    flattened.weight = torch.ones(8, 4)  # as FSDP1 does in forward
    hooked.register_forward_hook(lambda *_: None)
    reasons = ("the head's weight is not its parameter: FSDP1", "the head has hooks")
    for head, expected in zip((flattened, hooked), reasons, strict=True):
        reason, group = refusal(head)
        assert reason is not None and reason.startswith(expected) and group is None
    assert refusal(nn.Linear(4, 8)) == (None, None)


@pytest.mark.reference
def test_without_the_map_of_states_the_head_is_declined_with_the_reason(monkeypatch):
    head = nn.Linear(2, 3)
    assert fsdp.refusal(head) is None
    monkeypatch.delattr(sys.modules[fsdp.STATES], "_module_state_mapping")
    assert fsdp.refusal(head).endswith(
        "does not say which weights FSDP gathers: torch.distributed._composable_state has no _module_state_mapping"
    )


@pytest.mark.reference
def test_a_state_without_its_groups_is_an_error(monkeypatch):
    state = type("FSDPState", (), {"__module__": fsdp.HOOKS})()
    monkeypatch.setattr(sys.modules[fsdp.STATES], "_module_state_mapping", {nn.Module(): weakref.ref(state)})
    with pytest.raises(ValueError, match="^torch .* does not say .*: FSDPState has no _fsdp_param_groups; uninstall"):
        fsdp.fsdp_shard(nn.Parameter(torch.zeros(2)))


@pytest.mark.reference
def test_states_of_other_wrappers_have_no_groups(monkeypatch):
    state = type("ReplicateState", (), {})()
    monkeypatch.setattr(sys.modules[fsdp.STATES], "_module_state_mapping", {nn.Module(): weakref.ref(state)})
    assert fsdp.fsdp_shard(nn.Parameter(torch.zeros(2))) is None


def _without_a_unit(rank, group, impl):
    """What is said of heads whose shard is no vocabulary shard, and their loss."""
    device, said = device_of(rank, group), {}
    for how in ("root", "list"):
        model = small.wrap(small.small_model("llama").to(device), how, device)
        install(model, impl=impl, own_tokens=True)
        error = error_of(partial(model, **small.tokens(device)))
        said[how] = error or audit(model)
        uninstall(model)
    return said


@in_two_ranks
def test_own_tokens_need_a_unit_of_the_head_alone(rank_pool, impl):
    for said in rank_pool.run(_without_a_unit, impl):
        no_unit = "own_tokens: the head is in no FSDP unit of its own; call fully_shard(model.lm_head) first"
        assert said["root"] == {no_unit: 1}
        assert said["list"].startswith("TypeError: weight: expected a DTensor with own_tokens, got Parameter; wrap the")


def _left_in_larger_parts(rank, group, impl):
    """What is said before and after a forward that leaves parts of two ranks, which FSDP gives no gradient."""
    device = device_of(rank, group)
    model, mesh = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8)).to(device), init_device_mesh(device.type, (4,))
    fully_shard(model[1], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    reasons = [fsdp.shard_group(model[1])[0]]
    with torch.no_grad():
        model(torch.ones(2, 4, device=device))
    return [*reasons, fsdp.shard_group(model[1])[0]]


@in_ranks((4,), (), (4,))
def test_own_tokens_need_the_shard_that_has_the_gradient(rank_pool, impl):
    reason = "own_tokens: FSDP has gathered the head's weight outside of its forward"
    assert rank_pool.run(_left_in_larger_parts, impl) == [[None, reason]] * 4


def _by_tensor_parallelism_and_fsdp(rank, group, impl, path):
    device = device_of(rank, group)
    os.environ["LOCAL_RANK"] = str(rank)
    with patch("torch._C._get_accelerator", lambda: torch.device(device.type)):
        config = DistributedConfig(tp_size=2, tp_plan="auto", fsdp_size=2)
        model = LlamaForCausalLM.from_pretrained(path, distributed_config=config)
    batches = small.halves(device)
    reference = small.small_model("llama").to(device)
    part = rank // 2
    losses = [small.accumulate(reference, batch, 0.5) for batch in batches][part]
    install(model, impl=impl)
    found = small.accumulate(model, batches[part])
    gradients, counts, looks = (
        small.gradients_of(model),
        audit(model),
        looks_at_logits(model, reference, batches[part][0]),
    )
    return (losses, found), (small.gradients_of(reference), gradients), counts, looks


@in_ranks((4,), (), (4,))
def test_transformers_tensor_parallelism_and_fsdp(rank_pool, impl, tmp_path):
    """Its plan puts norm and head into an FSDP group of their own."""
    if small.UP_TO_5_17:
        pytest.skip("transformers 5.17 cannot load a model that both cut")
    small.small_model("llama").save_pretrained(tmp_path)
    results = rank_pool.run(_by_tensor_parallelism_and_fsdp, impl, tmp_path)
    for (losses, own), (expected, found), counts, looks in results:
        small.assert_same(looks["evaluated"], looks["real"])
        small.assert_same(looks["after forward"], looks["real"])
        assert re.match("RuntimeError: logits: .* freed", looks["after backward"])
        assert re.match("RuntimeError: logits: .* changed", looks["after a step"])
        assert own == pytest.approx(losses, rel=1e-5)
        small.assert_same_gradients(found, expected)
        assert counts == {"fused": 2}


@pytest.mark.parametrize("how", ["root", "own", "list"])
@in_two_ranks
def test_fsdp_with_mixed_precision_is_as_exact_as_without_the_fused_loss(rank_pool, impl, how):
    for (losses, own), (truth, found, native), counts, _ in rank_pool.run(_data_parallel, impl, how, torch.bfloat16):
        assert counts == {"fused": 2}
        assert own == pytest.approx(losses, rel=2e-3)
        for name, gradient in truth.items():
            error, usual = ((other - gradient).norm() for other in (found[name], native[name]))
            assert 0 < error <= 1.1 * usual, (name, error / usual)
