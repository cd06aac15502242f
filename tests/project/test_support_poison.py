"""Memory the package allocates is poisoned in tests; everyone else's is not."""

from __future__ import annotations

import types

import pytest
import torch

ALLOCATIONS = """
def allocate(torch, like):
    return {
        "empty": torch.empty(3),
        "empty, requires_grad": torch.empty(3, requires_grad=True),
        "empty_like": torch.empty_like(like),
        "empty_strided": torch.empty_strided((3,), (2,)),
        "new_empty": like.new_empty(3),
        "new_empty_strided": like.new_empty_strided((3,), (1,)),
        "int64": torch.empty(3, dtype=torch.int64),
        "bool": torch.empty(3, dtype=torch.bool),
    }
"""


def _allocate_from(module_name: str) -> dict[str, torch.Tensor]:
    module = types.ModuleType(module_name)
    exec(ALLOCATIONS, module.__dict__)
    return module.allocate(torch, torch.zeros(3))


def _poisoned(name: str, tensor: torch.Tensor) -> bool:
    if name == "int64":
        return bool((tensor == torch.iinfo(torch.int64).max).all())
    return bool(tensor.all() if name == "bool" else tensor.isnan().all())


@pytest.mark.parametrize("module", ["vocab_parallel_ce", "vocab_parallel_ce.kernels.online_softmax"])
def test_allocations_of_the_package_are_poisoned(module):
    tensors = _allocate_from(module)
    assert [name for name, tensor in tensors.items() if not _poisoned(name, tensor)] == []
    assert tensors["empty, requires_grad"].requires_grad


def test_allocations_of_others_are_not(monkeypatch):
    filled = []
    monkeypatch.setattr("tests.support.poison.poison", filled.append)
    _allocate_from("vocab_parallel_ce_other_project")
    _allocate_from("some.library")
    assert filled == []


@pytest.mark.no_poison
def test_a_test_can_ask_for_plain_memory():
    assert torch.empty.__module__ != "tests.support.poison"
    assert not hasattr(torch.empty, "__wrapped__")
