"""Verification: ranks that do not fit raise the same error, and none waits."""

from __future__ import annotations

import re
import runpy
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import vocab_parallel_ce as vp
from tests.support.cases import flat
from tests.support.cases.inputs import IGNORE_INDEX, NAN, batch, shard_of
from tests.support.ranks.case import with_collectives
from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth.budget import assert_within_budget
from tests.support.truth.oracle import cross_entropy_fp64, cross_entropy_same_dtype
from vocab_parallel_ce import VocabShard, verify, verify_calls

WIDTH, COLUMNS = 8, 10  # hidden size, and columns per rank
in_two_ranks, in_two_or_three_ranks = (in_ranks(worlds, (), (2,)) for worlds in ((2,), (2, 3)))


class Arguments:
    """Valid arguments of one rank. A change spoils one of them."""

    def __init__(self, rank: int, group: Any, n_ranks: int | None = None) -> None:
        self.group, self.n_ranks = group, n_ranks or group.size()
        self.options: dict[str, Any] = {}
        self.grad_enabled, self.has_hook = True, False
        logits, labels = _batch(self.n_ranks)
        leaf = shard_of(logits, rank, self.n_ranks).to(device_of(rank, None)).requires_grad_()
        self.logits: Any = leaf.view(2, 3, COLUMNS) * 1  # no leaf, as in training
        self.labels: Any = labels.view(2, 3).to(leaf.device)
        generator = torch.Generator().manual_seed(2)
        self.hidden = torch.randn(2, 3, WIDTH, generator=generator).to(leaf.device).requires_grad_()
        weight = torch.randn(COLUMNS * self.n_ranks, WIDTH, generator=generator)
        self.weight = weight.chunk(self.n_ranks)[rank].to(leaf.device).requires_grad_()
        self.given: dict[str, Any] = {"group": group}

    def changed(self, **changes: Any) -> Arguments:
        for name, change in changes.items():
            setattr(self, name, change(getattr(self, name)) if callable(change) else change)
        self.given = {"group": self.group, **self.options}
        return self


def _batch(n_ranks):
    logits, labels = batch("peaked", rows=6, vocab_size=COLUMNS * n_ranks)
    return logits, labels.index_put((torch.tensor([1, 4]),), torch.tensor([IGNORE_INDEX, 4]))


def _check_loss(losses, n_ranks):
    oracle, peer = cross_entropy_fp64(*_batch(n_ranks)), cross_entropy_same_dtype(*_batch(n_ranks))
    for loss in losses:
        assert_within_budget(loss, oracle.loss, peer.loss)


def _linear_module(a):
    head = torch.nn.Linear(WIDTH, COLUMNS, bias=False, device=a.weight.device)
    head.weight = torch.nn.Parameter(a.weight.detach(), requires_grad=a.weight.requires_grad)
    module = flat.LinearCrossEntropy(head, **a.given)
    if a.has_hook:
        head.register_forward_hook(lambda *_: None)
    return module(a.hidden, a.labels)


def _linear(a, **options):
    return flat.linear_cross_entropy(a.hidden, a.weight, a.labels, **options, **a.given)


FUNCTIONS = {
    "loss": lambda a: vp.vocab_parallel_cross_entropy(a.logits, a.labels, **a.given),
    "log-probs": lambda a: -vp.token_log_probs(a.logits, a.labels, **a.given).sum(),
    "transformer engine": lambda a: vp.parallel_cross_entropy(
        a.logits, a.labels, reduce_loss=True, dist_process_group=a.group, **a.options
    )[0],
    "linear": _linear,
    "linear in backward": lambda a: _linear(a, gradient="in_backward"),
    "linear log-probs": lambda a: flat.linear_token_log_probs(a.hidden, a.weight, a.labels, **a.given).sum(),
    "linear module": _linear_module,
}
ALL, OVER_LOGITS, LINEAR = list(FUNCTIONS), list(FUNCTIONS)[:3], list(FUNCTIONS)[3:]


class Case(NamedTuple):
    """How one rank's call differs, and a pattern of its error, or of its subject and what the ranks have."""

    functions: list[str]
    changes: dict[str, Any]
    error: str
    has: tuple[str, str] | None = None  # the rank that differs, and the others

    def expected(self, odd, n_ranks):
        if self.has is None:
            return self.error.replace(": ", f": rank {odd} of {n_ranks}: ", 1)
        if n_ranks == 2:  # a tie
            odd, (one, two), others = 1, self.has if odd else self.has[::-1], "rank 0 has"
        else:
            (one, two), others = self.has, "the others have"
        return f"ValueError: {self.error}: rank {odd} of {n_ranks} has {one}, {others} {two}"


def _label(value):
    return {"labels": lambda y: y.index_put((torch.tensor(1),) * 2, torch.tensor(value))}


def _all(function):
    return {"logits": function, "hidden": function, "labels": function}


def _options(functions, error, has=None, **options):
    return Case(functions.split("/"), {"options": options}, error, has)


CASES = [
    Case(ALL, _label(7), r"labels\[1, 1\]", ("7", "4")),
    Case(ALL, {"labels": Tensor.int}, "labels.dtype", ("torch.int32", "torch.int64")),
    Case(OVER_LOGITS, {"grad_enabled": False}, "logits.requires_grad", ("False.*", "True")),
    Case(LINEAR, {"grad_enabled": False}, "hidden.requires_grad", ("False.*", "True")),
    Case(LINEAR, {"weight": Tensor.detach}, "weight.requires_grad", ("False.*", "True")),
    Case(OVER_LOGITS, {"logits": Tensor.bfloat16}, "logits.dtype", ("torch.bfloat16", "torch.float32")),
    Case(OVER_LOGITS, _all(lambda x: x[:, 1:]), "logits.shape.*", (r"\(2, 2\)", r"\(2, 3\)")),
    Case(LINEAR, _all(lambda x: x[:, 1:]), "hidden.shape.*", (r"\(2, 2\)", r"\(2, 3\)")),
    Case(LINEAR, {"hidden": lambda h: h.flip(1)}, "hidden", ("values of .*",) * 2),
    Case(["loss"], {"logits": lambda x: x[..., 1:]}, "vocab_size", (".* of 9 columns", ".* of 10 columns.*")),
    _options("loss/log-probs", "vocab_size", ("15 .*", ".0 .*"), vocab_size=15),
    _options("loss/linear", "ignore_index", ("-1", "-100"), ignore_index=-1),
    _options("loss", "label_smoothing", ("0.1", "0.0"), label_smoothing=0.1),
    _options("loss/linear/linear module", "reduction", ("sum", "mean"), reduction="sum"),
    _options("log-probs/linear log-probs", "temperature", ("2.0", "1.0"), temperature=2.0),
    _options("/".join(LINEAR), "chunk_size", ("2", "auto"), chunk_size=2),
    _options("loss", "TypeError: .* unexpected keyword argument 'unknown'", unknown=3),
    _options("loss", "ValueError: logits: .* width 9 of .*, got 10", vocab_size=VocabShard(0, 9, 20)),
    _options("log-probs", "ValueError: gradient: expected one of .*", gradient="in_forward"),
    _options("linear", "ValueError: labels: shape must be .*", sequence_parallel=True),
    Case(OVER_LOGITS, {"logits": Tensor.tolist}, "TypeError: logits: expected a torch.Tensor, got list"),
    Case(["loss"], _all(lambda x: x.to("meta")), "RuntimeError: NotImplementedError: .*"),
    Case(["nccl"], _all(Tensor.cpu), "logits.device.type", ("cpu", "cuda")),
    Case(["transformer engine"], {"labels": Tensor.float}, "TypeError: target: dtype must be .*"),
    Case(["loss", "log-probs", *LINEAR], {"labels": Tensor.float}, "TypeError: labels: dtype must be .*"),
    Case(LINEAR, {"weight": lambda w: w[:, :-1]}, "ValueError: weight: expected shape .*"),
    Case(["linear module"], {"has_hook": True}, "ValueError: head: .*"),
]


def _call(function, a):
    with torch.set_grad_enabled(a.grad_enabled):
        loss = FUNCTIONS[function](a)
    if loss is not None:
        loss.backward()


def _errors(rank, group, function, calls):
    """Errors of calls in which rank ``odd`` differs. The valid call after each fails if a rank is behind."""
    errors = []
    with verify_calls():
        for index, odd in calls:
            a = Arguments(rank, group).changed(**CASES[index].changes if rank == odd else {})
            errors.append(error_of(_call, function, a))
            _call(function, Arguments(rank, group))
    return errors, FUNCTIONS["loss"](Arguments(rank, group))


@in_two_or_three_ranks
@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_rank_that_differs_is_the_same_error_on_every_rank(rank_pool, impl, function):
    """Without verification these return a number, abort gloo or wait for half an hour."""
    n_ranks = rank_pool.world_size
    names = {function, rank_pool.backend if function == "loss" else ""}
    chosen = [index for index, case in enumerate(CASES) if names & set(case.functions)]
    calls = [(index, (n_ranks - 1) * (i % 2)) for i, index in enumerate(chosen)]
    results = rank_pool.run(_errors, function, calls)
    for (index, odd), *errors in zip(calls, *(errors for errors, _ in results), strict=True):
        expected = CASES[index].expected(odd, n_ranks)
        assert errors[0] and re.match(expected, errors[0]), (errors[0], expected)
        assert errors == errors[:1] * n_ranks
    _check_loss([loss for _, loss in results], n_ranks)


def _close(rank, group):
    """Errors of hidden states that are 1 % off, 10 % off, and no numbers."""
    with verify_calls():
        given = [Arguments(rank, group).changed(hidden=lambda h, by=by: h * by**rank) for by in (1.01, 1.1, NAN)]
        return [error_of(FUNCTIONS["linear"], a) for a in given]


@in_two_ranks
def test_hidden_states_that_rounding_or_nan_sets_apart_are_not_compared(rank_pool, impl):
    for rounded, other, nan in rank_pool.run(_close):
        assert rounded is nan is None and other.startswith("ValueError: hidden: rank 1 of 2 has values of ")


def _weighted(rank, group):
    """Errors of class weights: equal, of other values on each rank, and of another form or dtype on one."""
    every = torch.arange(1.0, 1 + COLUMNS * group.size()) / 3
    given = every, every + rank, every if rank else every[:COLUMNS], every.double() if rank else every
    with verify_calls():
        calls = [Arguments(rank, group).changed(options={"class_weight": weight}) for weight in given]
        return [error_of(FUNCTIONS[name], a) for name in ("loss", "linear") for a in calls]


@in_ranks((2,), (), ())
def test_unsharded_class_weights_are_compared(rank_pool, impl):
    for found in rank_pool.run(_weighted):
        for equal, other, own, exact in (found[:4], found[4:]):
            assert equal is own is exact is None and other.startswith(
                "ValueError: class_weight: rank 1 of 2 has shape (20,), "
            )


def _beside(rank, group):
    """Errors of class weights on the first rank alone, and of three pairs of temperatures."""
    a, errors = Arguments(rank, group), []
    t = torch.linspace(0.5, 2.0, 6, device=a.logits.device).view(2, 3)
    with verify_calls():
        weight = {} if rank else {"class_weight": torch.ones(COLUMNS * 2, device=t.device)}
        errors.append(error_of(FUNCTIONS["loss"], a.changed(options=weight)))
        for own in (t, t + rank, 0.7 if rank else t):
            errors.append(error_of(FUNCTIONS["log-probs"], a.changed(options={"temperature": own})))
    return errors


@in_two_ranks
def test_tensors_of_options_are_compared(rank_pool, impl):
    for weight, same, other, number in rank_pool.run(_beside):
        assert weight == "ValueError: class_weight: rank 1 of 2 has None, rank 0 has a tensor" and same is None
        assert other.startswith("ValueError: temperature: rank 1 of 2 has shape (2, 3), norm "), other
        assert number.startswith("ValueError: temperature: rank 1 of 2 has 0.7, rank 0 has shape (2, 3)"), number


def _whole(rank, group, function):
    """Errors of equal logits and heads: alone, with what says that they are shards, and of zeros."""

    def the_same(x):
        return x * 0 + torch.linspace(-2, 3, x.numel(), device=x.device).view_as(x)

    options = [{}] if function == "transformer engine" else [{}, {"vocab_size": COLUMNS * group.size()}]
    given = [{"logits": the_same, "weight": the_same, "options": own} for own in options]
    given.append({"logits": lambda x: x * 0, "weight": lambda w: w * 0})
    with verify_calls():
        return [error_of(_call, function, Arguments(rank, group).changed(**changes)) for changes in given]


@in_two_or_three_ranks
@pytest.mark.parametrize("function", ["loss", "log-probs", "transformer engine", "linear"])
def test_whole_logits_and_heads_with_a_group_are_refused(rank_pool, impl, function):
    """Without verification the loss is too large by the logarithm of the number of ranks."""
    of_columns, n_ranks = "weight" if function in LINEAR else "logits", rank_pool.world_size
    expected = f"ValueError: {of_columns}: expected other columns on each rank, got equal values on all {n_ranks}; "
    for whole, *passed in rank_pool.run(_whole, function):
        assert whole.startswith(expected) and "group=None" in whole and "vocab_size=" in whole
        assert not any(passed)


def _counted(rank, group):
    counts = []
    for context, inner in ((True, True), (False, False), (True, False)):
        a = Arguments(rank, group)
        with verify_calls(context), verify_calls(inner):
            _, forward, backward = with_collectives(partial(FUNCTIONS["loss"], a), ())
        counts.append((len(forward), len(backward), max(call.nbytes for call in forward)))
    return counts


@in_two_ranks
def test_off_it_sends_nothing(rank_pool, impl):
    for on, *off in rank_pool.run(_counted):
        assert [counts[:2] for counts in (on, *off)] == [(3, 0), (1, 0), (1, 0)] and on[2] < 4096


def _different_calls(rank, group):
    """Errors of two functions, of targets and options that differ, and of TransformerEngine's first step."""
    a, labels = Arguments(rank, group), Arguments(rank, group).changed(**_label(3 + rank)).labels
    log_probs = torch.zeros_like(labels[..., None]).float()
    known, same, other = (
        vp.TopKTeacher(ids[..., None], values)
        for ids, values in ((labels, log_probs), (a.labels, log_probs), (a.labels, log_probs - rank))
    )
    loss = partial(vp.vocab_parallel_cross_entropy, a.logits, a.labels, group=group)
    whole = partial(vp.distillation_loss, a.logits, a.logits.detach().neg(), group=group)
    few = partial(vp.distillation_loss, a.logits, known, group=group)
    js = partial(vp.distillation_loss, a.logits, divergence="js", group=group)
    heads = vp.Head(a.hidden.detach(), a.weight.detach())
    head = partial(flat.linear_distillation_loss, heads, same, divergence="js", group=group)
    attempts = {
        "call": partial(FUNCTIONS["loss" if rank else "linear"], a),
        "function": whole if rank else partial(FUNCTIONS["loss"], a),
        "labels": partial(whole, labels=labels),
        "teacher": few if rank else whole,
        "ids": few,
        "log-probs": partial(js, other),
        "given ids": partial(vp.token_log_probs, a.logits, labels[..., None], group=group),
        "ids, js": partial(js, known),
        "items": partial(js, same, num_items=3 + rank),
        "head's reduction": partial(head, reduction=("sum", "mean")[rank]),
        "head's items": partial(head, num_items=3 + rank),
        "smoothing": partial(vp.cross_entropy_forward, a.logits, a.labels, 0.1 * rank, True, group, -100),
        "z-loss": partial(loss, z_loss=0.1 * rank),
    }
    with verify_calls():
        return {name: error_of(attempt) for name, attempt in attempts.items()}


@in_two_ranks
def test_calls_of_different_functions(rank_pool, impl):
    ids = "teacher.ids[1, 1, 0]: rank 1 of 2 has 4, rank 0 has 3"
    items = "num_items: rank 1 of 2 has 4.0, rank 0 has 3.0"
    expected = {
        "call": "call: rank 1 of 2 has a loss over logits, rank 0 has a loss over hidden",
        "function": "call: rank 1 of 2 has a loss over logits and teacher, rank 0 has ",
        "labels": "labels[1, 1]: rank 1 of 2 has 4, rank 0 has 3",
        "teacher": "call: rank 1 of 2 has a loss over logits, rank 0 has a loss over logits and teacher",
        "ids": ids,
        "log-probs": "teacher.log_probs: rank 1 of 2 has ",
        "given ids": "labels[1, 1, 0]: rank 1 of 2 has 4, rank 0 has 3",
        "ids, js": ids,
        "items": items,
        "head's reduction": "reduction: rank 1 of 2 has mean, rank 0 has sum",
        "head's items": items,
        "smoothing": "label_smoothing: rank 1 of 2 has 0.1, rank 0 has 0.0",
        "z-loss": "z_loss: rank 1 of 2 has 0.1, rank 0 has 0.0",
    }
    first, second = rank_pool.run(_different_calls)
    assert first == second and first.keys() == expected.keys()
    for name, message in expected.items():
        assert first[name].startswith(f"ValueError: {message}"), first[name]


def _in_a_checkpoint(rank, group):
    losses, errors = [], []
    with verify_calls():
        for function in ("loss", "transformer engine", "linear", "linear in backward"):
            a = Arguments(rank, group)

            def call(logits, hidden, weight, a=a, function=function):
                return FUNCTIONS[function](a.changed(logits=logits * 1, hidden=hidden, weight=weight))

            loss = checkpoint(call, a.logits, a.hidden, a.weight, use_reentrant=False)
            errors.append(error_of(loss.backward))
            losses.append(loss.detach())
    return losses, errors


@in_two_ranks
def test_it_works_in_a_checkpoint(rank_pool, impl):
    """A checkpoint hands out saved tensors once, and calls the loss again within its backward."""
    for losses, errors in rank_pool.run(_in_a_checkpoint):
        _check_loss(losses[:2], 2)
        assert errors == [None] * 4


@pytest.mark.reference
def test_the_variable_switches_it_on_for_a_program(monkeypatch):
    for value, is_on in (("1", True), ("0", False), ("", False), ("False", False)):
        monkeypatch.setenv("VOCAB_PARALLEL_CE_VERIFY", value)
        assert runpy.run_path(verify.__file__)["is_on"] is is_on


def _without_numpy(rank, group):
    """In a rank, whose tensors cannot become arrays: the loss and the error of another label."""
    arguments, failed = Arguments(rank, group), RuntimeError("Numpy is not available")
    with mock.patch.object(torch.Tensor, "numpy", side_effect=failed), verify_calls():
        loss = FUNCTIONS["loss"](arguments.changed())
        error = error_of(lambda: FUNCTIONS["loss"](arguments.changed(labels=lambda y: y + rank * (y == 4))))
    return loss.detach(), error


@in_ranks((2, 3), (), (2,))
def test_it_needs_no_numpy(rank_pool, impl):
    n_ranks = rank_pool.world_size
    for loss, error in rank_pool.run(_without_numpy):
        _check_loss([loss], n_ranks)
        assert re.match(r"ValueError: labels\[\d, \d\]: .* has 5, ", error), error


@pytest.mark.reference
def test_one_rank_compares_nothing():
    logits = torch.randn(3, 8, requires_grad=True)
    with verify_calls():
        vp.vocab_parallel_cross_entropy(logits, torch.tensor([1, 2, 3])).backward()
        with pytest.raises(ValueError, match="^labels: shape"):
            vp.vocab_parallel_cross_entropy(logits, torch.tensor([1, 2]))
    assert verify.pending.get() is None and not verify.is_on
