"""Kinds of calls: what is another kind, with PyTorch's guard of tensors and without it."""

import pytest
import torch
from torch import nn

from vocab_parallel_ce import kinds, plan, vocab_parallel_cross_entropy
from vocab_parallel_ce.head import plan as head_plan
from vocab_parallel_ce.kinds import Kinds

pytestmark = pytest.mark.reference


class Subclass(torch.Tensor):
    pass


def usual():
    return torch.zeros(2, 4)


def in_inference_mode():
    with torch.inference_mode():
        return usual()


OTHERS = {
    "dtype": lambda: usual().double(),
    "sizes": lambda: torch.zeros(4, 2),
    "dimensions": lambda: usual().unsqueeze(0),
    "strides": lambda: torch.zeros(4, 2).t(),
    "expanded": lambda: torch.zeros(1, 4).expand(2, 4),
    "rows apart": lambda: torch.zeros(2, 8)[:, :4],
    "device": lambda: usual().to("meta"),
    "requires_grad": lambda: usual().requires_grad_(),
    "a result": lambda: usual().requires_grad_() * 1,
    "a parameter": lambda: nn.Parameter(usual(), requires_grad=False),
    "negative": lambda: torch._neg_view(usual()),
    "inference": in_inference_mode,
    "layout": lambda: usual().to_sparse(),
    "None": lambda: None,
}
SAME = {
    "values": lambda: usual() + 1,
    "a view": lambda: torch.zeros(3, 4)[1:],
    "off a boundary": lambda: torch.zeros(9)[1:].view(2, 4),
    "detached": lambda: (usual().requires_grad_() * 1).detach(),
}


@pytest.fixture(params=(True, False), ids=("guard", "keys"))
def found(request, monkeypatch):
    assert kinds._GUARDS is not None  # of the PyTorch that is tested
    if not request.param:
        monkeypatch.setattr(kinds, "_GUARDS", None)
    return Kinds()


@pytest.mark.parametrize("name", OTHERS)
def test_each_fact_of_a_tensor_is_another_kind(found, name):
    before, other = usual(), OTHERS[name]()
    for _ in range(3):
        pairs = [(before, before + 1), (other, before), (before, other)]
        of = [found.find("facts", pair) for pair in pairs]
        assert None not in of and len({*map(id, of)}) == 3
        assert of == [found.find("facts", pair) for pair in pairs]
    assert len(found.by_key) == 3


@pytest.mark.parametrize("name", SAME)
def test_values_and_memory_are_no_part_of_a_kind(found, name):
    kind = found.find("facts", (usual(), None, usual()))
    kind.made = "a plan"
    for _ in range(2):
        assert found.find("facts", (SAME[name](), None, SAME[name]())) is kind
    assert found.find("other facts", (usual(), None, usual())) is not kind


def test_a_tensor_that_is_given_twice(found):
    x, y = usual(), usual()
    kind = found.find("facts", (x, x))
    assert found.find("facts", (x, y)) is kind is found.find("facts", (y, y))


@pytest.mark.parametrize("first", (usual, in_inference_mode))
def test_an_inference_tensor_is_another_kind_in_inference_mode_too(found, first):
    second = usual() if first is in_inference_mode else in_inference_mode()
    with torch.no_grad():
        kind = found.find("facts", (first(),))
    with torch.inference_mode():
        assert found.find("facts", (second,)) is not kind


def test_the_guard_is_used_whatever_the_default_dtype(monkeypatch):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert kinds._guards() is not None
    finally:
        torch.set_default_dtype(before)


def test_what_has_no_kind(found):
    assert found.find("facts", (usual().as_subclass(Subclass),)) is None
    assert not found.by_key
    with pytest.raises(TypeError, match="unhashable"):
        found.find([], (usual(),))
    with pytest.raises(AttributeError):
        found.find("facts", ("no tensor",))


GUARDS = torch._C._dynamo.guards.TensorGuards


class AcceptsOne:
    """A guard that takes a tensor for another."""

    def __init__(self, *tensors, **options):
        self.guard, self.tensors = GUARDS(*tensors, **options), tensors

    def check(self, tensor):
        return self.guard.check(tensor) or type(self).accepts(tensor, *self.tensors)


@pytest.mark.parametrize(
    "accepts",
    [
        lambda t, usual: t.dtype != usual.dtype,
        lambda t, usual: t.layout == torch.strided and t.shape == usual.shape and t.stride() != usual.stride(),
        lambda t, usual: t.dim() == 2 and t.shape != usual.shape,
        lambda t, usual: t.requires_grad,
        lambda t, usual: t.is_meta,
        lambda t, usual: t.is_neg(),
        lambda t, usual: t.is_inference(),
        lambda t, usual: type(t) is nn.Parameter,
        lambda t, usual: type(t) not in (torch.Tensor, nn.Parameter),
        lambda t, usual: t.is_sparse,
    ],
    ids=["dtype", "strides", "sizes", "grad", "device", "negative", "inference", "parameter", "subclass", "sparse"],
)
def test_a_guard_that_takes_a_tensor_for_another_is_not_used(monkeypatch, accepts):
    monkeypatch.setattr(AcceptsOne, "accepts", staticmethod(accepts), raising=False)
    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", AcceptsOne)
    assert kinds._guards() is None
    monkeypatch.setattr(AcceptsOne, "accepts", staticmethod(lambda *tensors: False))
    assert kinds._guards() is AcceptsOne


def test_a_pytorch_without_the_guard(monkeypatch):
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert kinds._guards() is None


def test_no_more_kinds_are_known_than_the_most():
    """Numbers of tokens that never repeat would fill the memory."""
    few = Kinds(most=3)
    for n in range(1, 9):
        kind = few.find("facts", (torch.zeros(n, 4),))
        assert few.find("facts", (torch.zeros(n, 4),)) is kind and len(few.by_key) <= 3 and len(few.last) <= 3
    for known in (plan._kinds, head_plan._kinds):
        assert known.most <= 1024


def test_calls_of_all_lengths_are_few_plans():
    plan._kinds.forget()
    plan._cached_plan.cache_clear()
    for n in range(1, 20):
        vocab_parallel_cross_entropy(torch.randn(n, 4), torch.zeros(n, dtype=torch.int64))
    assert len(plan._kinds.by_key) == 19 and plan._cached_plan.cache_info().currsize == 1
