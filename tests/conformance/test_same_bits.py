"""1, 2, 4 and 8 ranks, whose shards are whole eighths of one padded vocabulary, give the same bits.

Random calls of every loss over logits; a seed decides all but the number of ranks.
"""

import copy
import functools
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.support.kernels.launch_shapes import ONE, SEVERAL, forget_plans, programs
from tests.support.random import logits
from tests.support.random.call import Call, alike
from tests.support.random.calls import is_head, name_of
from tests.support.random.inputs import Draw
from tests.support.random.truth import Numbers
from tests.support.ranks.in_turn import in_turn
from tests.support.ranks.pools import device_of, in_several_ranks
from vocab_parallel_ce import vocab_parallel_cross_entropy
from vocab_parallel_ce.blocks import units_of
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.layout import VECTOR_BYTES
from vocab_parallel_ce.options import DIFFERENTIABLE

UNITS = 8
N_CALLS, BLOCK = 300, 10
SEEDS = [seed for seed in range(4 * N_CALLS) if not is_head(seed) and name_of(seed) != "one_pass"][:N_CALLS]


@contextmanager
def one_rank_has_units() -> Iterator[None]:
    """Let one rank have the bits of several; processes that begin meanwhile would have them for good."""
    with patch.dict(os.environ, {SAME_BITS: "1"}):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    units_of.cache_clear()
    forget_plans()


class DrawUnits(Draw):
    """The vocabulary is whole units of whole vectors, of which the last may be padding."""

    def bounds(self, itemsize: int, ranks: int) -> tuple[int, list[tuple[int, int]]]:
        rng = random.Random(f"units {self.seed}")
        most, vector = 40 if self.small else 2000, VECTOR_BYTES // itemsize
        unit = vector * int(most ** rng.random())
        padding = rng.choice((0, 0, vector, 1, 11, unit, 2 * unit + 3))
        width = UNITS * unit // ranks
        vocab_size = max(1, UNITS * unit - padding)
        return vocab_size, [(rank * width, (rank + 1) * width) for rank in range(ranks)]


OfRank = tuple[dict[str, Tensor], Tensor]  # outputs, and the gradient of the rank's logits


def programs_of(seed: int) -> AbstractContextManager[None]:
    return programs((ONE, SEVERAL)[seed % 2])


def ready(seed: int, device: str, impl: str, small: bool, n_ranks: int) -> logits.LogitsCase:
    changes = {"ranks": n_ranks, "layout": "contiguous", "other_layout": "contiguous", "n_ids": None}
    return logits.ready(Call(seed, device, impl, small, changes, DrawUnits))


def upstream_of(call: Call, found: Numbers) -> Numbers:
    """Alike on all ranks: what is drawn here depends on the seed and the outputs' shapes alone."""
    own = copy.copy(call)
    own.draw = copy.copy(call.draw)
    own.draw.rng = random.Random(f"upstream {call.seed}")
    own.draw.generator = torch.Generator(call.draw.device).manual_seed(call.seed + 2**31)
    names = [name for name in ("log_probs", "loss", *DIFFERENTIABLE) if name in found]
    if call.function.endswith("cross_entropy") or call.function == "cross_entropy_forward":
        names = ["loss"]
    return own.upstream(found, names)


def of_rank(case: logits.LogitsCase, rank: int, group: Any) -> OfRank:
    outputs = case.call.invoke(case.given[rank], group)
    with torch.autograd.set_multithreading_enabled(False):
        case.backward(rank, outputs, upstream_of(case.call, outputs))
    return {name: value.detach() for name, value in outputs.items()}, case.gradients(rank)["logits"]


def whole(ranks: Sequence[OfRank]) -> dict[str, Tensor]:
    """The outputs of a call, alike on all ranks, and the gradient of the whole vocabulary."""
    outputs, *others = [{name: value for name, value in found.items() if name != "gradient"} for found, _ in ranks]
    for other in others:
        assert all(alike(value, outputs[name]) for name, value in other.items()), "ranks differ"
    return outputs | {"gradient": torch.cat([gradient for _, gradient in ranks], dim=-1)}


def results(seed: int, device: str, impl: str, small: bool, n_ranks: int) -> dict[str, Tensor]:
    case = ready(seed, device, impl, small, n_ranks)
    with one_rank_has_units(), programs_of(seed):
        return whole(in_turn(n_ranks, functools.partial(of_rank, case)))


def assert_same_bits(seed: int, several: dict[str, Tensor], one: dict[str, Tensor], n_ranks: int) -> None:
    for name, value in several.items():
        assert alike(value, one[name]), f"{name} of {name_of(seed)}: {n_ranks} ranks differ from 1"


@pytest.mark.quick(1)
@pytest.mark.interpreted(N_CALLS // BLOCK)
@pytest.mark.parametrize("first", range(0, N_CALLS, BLOCK))
def test_1_2_4_and_8_ranks_give_the_same_bits(impl_device, first):
    """The interpreter takes its time: it runs one call of a block, the second: of call 1 an edge is in another unit."""
    impl, device = impl_device
    is_interpreted = (impl, device) == ("triton", "cpu")
    small = device == "cpu" or impl == "reference"
    for seed in SEEDS[first + 1 : first + 2] if is_interpreted else SEEDS[first : first + BLOCK]:
        one = results(seed, device, impl, small, 1)
        for n_ranks in (2, 4, 8):
            assert_same_bits(seed, results(seed, device, impl, small, n_ranks), one, n_ranks)


def in_process(rank: int, group: Any, seeds: Sequence[int], impl: str, small: bool) -> list[OfRank]:
    calls = []
    for seed in seeds:
        case = ready(seed, str(device_of(rank, group)), impl, small, group.size())
        with programs_of(seed):
            calls.append(of_rank(case, rank, group))
    return calls


@in_several_ranks
@pytest.mark.interpreted(2 * N_CALLS // BLOCK // 3)
@pytest.mark.parametrize("first", range(0, N_CALLS, 3 * BLOCK))
def test_ranks_in_processes_give_the_bits_of_one(rank_pool, impl, first):
    """A third of the calls: the others differ in what a rank computes, and not in how it is sent."""
    device = "cuda" if rank_pool.backend == "nccl" else "cpu"
    is_interpreted = (impl, device) == ("triton", "cpu")
    small = device == "cpu" or impl == "reference"
    seeds = SEEDS[first : first + (1 if is_interpreted else BLOCK)]
    ranks = rank_pool.run(in_process, seeds, impl, small)
    for i, seed in enumerate(seeds):
        one = {name: value.cpu() for name, value in results(seed, device, impl, small, 1).items()}
        assert_same_bits(seed, whole([calls[i] for calls in ranks]), one, len(ranks))


@pytest.mark.interpreted(5)
@pytest.mark.parametrize("label", (-1, -20, 64, 10**6, 2**32 + 3))
def test_the_weight_of_a_label_outside_stays_in_the_mean(impl_device, label):
    """It is NaN. A unit that the label is not in has no place for it."""
    impl, device = impl_device
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(0)).to(device)
    weight, labels = torch.ones(64, device=device), torch.tensor([3, label], device=device)

    def on_rank(rank: int, group: Any) -> tuple[Tensor, Tensor]:
        width = 64 // (1 if group is None else group.size())
        own = logits[:, rank * width : (rank + 1) * width].clone().requires_grad_()
        options = {"class_weight": weight, "group": group, "impl": impl}
        loss = vocab_parallel_cross_entropy(own, labels, **options)
        with torch.autograd.set_multithreading_enabled(False):
            (gradient,) = torch.autograd.grad(loss, own)
        return loss.detach(), gradient

    with one_rank_has_units():
        for n_ranks in (1, 2, 4, 8):
            for loss, gradient in in_turn(n_ranks, on_rank):
                assert loss.isnan() and gradient.isnan().all()
