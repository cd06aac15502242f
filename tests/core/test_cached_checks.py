"""What checks remember of calls before: no value of another type, no error, and not without bounds."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from contextlib import suppress

import numpy
import pytest
import torch

import vocab_parallel_ce as package
from vocab_parallel_ce import VocabShard, vocab_parallel_cross_entropy

pytestmark = pytest.mark.reference

CALL = (torch.randn(2, 12), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"z_loss": 1}, {"z_loss": True}),
        ({"ignore_index": 1}, {"ignore_index": 1.0}),
        ({"check_labels": True}, {"check_labels": 1}),
        ({"vocab_size": 12}, {"vocab_size": 12.0}),
        ({"vocab_size": VocabShard(0, 12, 12)}, {"vocab_size": VocabShard(False, 12, 12)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("others", ({}, {"num_items": 2}), ids=("as given", "a sum in the end"))
def test_an_equal_value_of_another_type_is_refused_before_and_after_the_right_one(right, wrong, others):
    """``True == 1``, and both have one hash: what was checked for one must not let the other pass."""
    (name,) = wrong
    message = f"^{name}[.:].* expected (an int|a number|a bool|'auto', True or False), got "
    for _ in range(2):
        with pytest.raises(TypeError, match=message) as raised:
            vocab_parallel_cross_entropy(*CALL, **wrong, **others)
        assert raised.value.__context__ is None
        vocab_parallel_cross_entropy(*CALL, **right, **others)


def test_a_tensor_of_another_library_is_checked_in_every_call():
    """What it is may be said by the tensor, not by its type."""

    class Wrapper(torch.Tensor):
        pass

    plain, part = (CALL[0].as_subclass(Wrapper) for _ in range(2))
    part.placements = ("Shard",)
    vocab_parallel_cross_entropy(plain, CALL[1])
    with pytest.raises(TypeError, match="^logits: expected this rank's part as a plain torch.Tensor"):
        vocab_parallel_cross_entropy(part, CALL[1])


def test_fields_of_a_shard_may_be_numpy_integers():
    shard = VocabShard(*map(numpy.int64, (0, 12, 11)))
    loss = vocab_parallel_cross_entropy(*CALL, vocab_size=shard)
    expected = torch.nn.functional.cross_entropy(CALL[0][:, :11].double(), CALL[1])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def _caches():
    """Everything in the package that ``functools.lru_cache`` made."""
    modules = [package]
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "__main__" not in info.name:
            with suppress(ModuleNotFoundError):  # a plugin's, of a framework that is not installed
                modules.append(importlib.import_module(info.name))
    found = {id(value): value for module in modules for value in vars(module).values()}
    return [value for value in found.values() if isinstance(value, functools._lru_cache_wrapper)]


def test_caches_are_bounded_and_a_call_like_one_before_is_found_in_them():
    """A weight or a temperature that is annealed has a new value every step, and shapes change too."""
    pytest.importorskip("triton")
    caches = _caches()

    def has_several_arguments(code):
        return code.co_argcount > 1 or code.co_flags & inspect.CO_VARARGS

    # One without a bound has one key a process, a device or a group.
    of_calls = [cache for cache in caches if has_several_arguments(cache.__wrapped__.__code__)]
    assert of_calls and all(cache.cache_info().maxsize for cache in of_calls)

    def entries():
        return sum(cache.cache_info().currsize for cache in caches)

    for cache in of_calls:  # earlier tests may have filled them
        cache.cache_clear()
    vocab_parallel_cross_entropy(*CALL, z_loss=1)
    with pytest.raises(TypeError, match="^z_loss: "):  # equal to 1, and no number
        vocab_parallel_cross_entropy(*CALL, z_loss=True)
    vocab_parallel_cross_entropy(*CALL, z_loss=0.1)

    def refused():
        with pytest.raises(ValueError, match="^label_smoothing: "):
            vocab_parallel_cross_entropy(*CALL, label_smoothing=2.0)

    refused()
    before = entries()
    for step in range(3):
        vocab_parallel_cross_entropy(CALL[0] + step, CALL[1], z_loss=0.1)
        refused()  # what stands for its settings is remembered, no error
    assert entries() == before
    vocab_parallel_cross_entropy(*CALL, z_loss=0.2734375)
    assert entries() > before
