"""FSDP2's private records: where a torch has others, nothing is taken for a weight that nobody gathers."""

import sys
import weakref

import pytest
import torch.distributed.fsdp
from torch import nn

from vocab_parallel_ce.integrations.transformers import fsdp

pytestmark = pytest.mark.reference


def test_without_the_map_of_states_the_head_is_declined_with_the_reason(monkeypatch):
    head = nn.Linear(2, 3)
    assert fsdp.refusal(head) is None
    monkeypatch.delattr(sys.modules[fsdp.STATES], "_module_state_mapping")
    assert fsdp.refusal(head).endswith(
        "does not say which weights FSDP gathers: torch.distributed._composable_state has no _module_state_mapping"
    )


def test_a_state_without_its_groups_is_an_error(monkeypatch):
    state = type("FSDPState", (), {"__module__": fsdp.HOOKS})()
    monkeypatch.setattr(sys.modules[fsdp.STATES], "_module_state_mapping", {nn.Module(): weakref.ref(state)})
    with pytest.raises(ValueError, match="^torch .* does not say .*: FSDPState has no _fsdp_param_groups; uninstall"):
        fsdp.fsdp_shard(nn.Parameter(torch.zeros(2)))
