"""Whoever reads the logits of a model on several ranks gets the gradients that the model has without install()."""

import contextlib
import copy
from itertools import product

import pytest

from tests.support.frameworks import transformers_ranks as small
from tests.support.frameworks.logits_readers import PLACES, READERS
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce.integrations.transformers import install

in_two_ranks = in_ranks((2,), (), (2,))
STEPS = 2  # DDP(static_graph=True) records the first
READ_BY = {"kl_div": ["kl_div"], "Functions": ["a Function", "a Function of a slice", "token_log_probs"]}
CASES = [  # the two mechanisms take turns
    (*case, ("lazy", "rewrite")[(number + number // 2) % 2])
    for number, case in enumerate(product([*small.DDP, "root", "own"], PLACES, READ_BY))
]


def read(logits, labels, readers):
    return sum(READERS[reader](logits, labels, None) for reader in readers)


def loss_of(model, batch, readers, place):
    """The loss of a call that readers take part in."""
    outputs = model(**batch)
    if place == "inside":
        return outputs.loss
    return read(outputs.logits, batch["labels"], readers) + (outputs.loss if place == "beside" else 0.0)


def _wrapped(rank, group, impl, how, mechanism, readers, place):
    """Gradients without install(), of the mean over the ranks, and of each step of a wrapped model with it."""
    device = device_of(rank, group)
    model, batches = small.small_model("llama").to(device), small.halves(device)
    if place == "inside":
        model.loss_function = lambda logits, labels, *_, **__: read(logits, labels, readers)
    reference, actual = copy.deepcopy(model), []
    for batch in (batch for part in batches for batch in part):
        (loss_of(reference, batch, readers, place) / 2).backward()
    install(model, mechanism=mechanism, impl=impl)
    wrapped = small.wrap(model, how, device)
    for _ in range(STEPS):
        wrapped.zero_grad()
        with wrapped.no_sync() if how == "ddp, views" else contextlib.nullcontext():
            loss_of(wrapped, batches[rank][0], readers, place).backward()
        loss_of(wrapped, batches[rank][1], readers, place).backward()
        actual.append(small.gradients_of(wrapped))
    return small.gradients_of(reference), actual


@pytest.mark.parametrize(("how", "place", "readers", "mechanism"), CASES)
@in_two_ranks
def test_gradients_are_averaged(rank_pool, impl, how, mechanism, place, readers):
    for expected, steps in rank_pool.run(_wrapped, impl, how, mechanism, READ_BY[readers], place):
        for actual in steps:
            small.assert_same_gradients(actual, expected)
