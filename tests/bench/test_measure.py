"""How the benchmark measures: what it checks, what it times, and the arithmetic of its numbers."""

import json

import pytest
import torch
from torch.nn import functional

from tests.bench.support import (
    ALONE,
    EAGER,
    HEAD,
    IN_FORWARD,
    KNOWN,
    LOGITS,
    OURS,
    SHARDED,
    ScriptedTimer,
    eager,
    measured,
    provider_of,
)
from tests.support.ranks.pools import in_ranks
from vocab_parallel_ce.integrations import torchtitan

from bench_lib import cases, clock, frameworks, measure, providers, truth  # isort: skip
from bench_lib.calls import Row  # isort: skip

pytestmark = pytest.mark.reference

RIGHT = (OURS, EAGER)


def test_numbers_of_the_loss_over_logits():
    """3 ms beside 2, of 4 calls per round; the eager loop has 20 calls."""
    results = measured(RIGHT, graphs=True)
    json.dumps(results, allow_nan=False)
    ours, expected = results[OURS], {"ratio": 1.5, "ratio_spread": [1.5, 1.5], "ratio_eager": 1.5, "ratio_graph": 1.5}
    expected |= {"ms": 0.75, "ms_quartiles": [0.75, 0.75], "yardstick_ms": 0.5, "peak_bytes": 192, "queued": True}
    expected |= {"microseconds_eager": 150.0, "microseconds_graph": 750.0}
    assert {name: ours[name] for name in expected} == expected
    assert "graph_error" not in ours and max(ours["errors"].values()) < 1e-6
    assert not results[EAGER]["queued"] and "ratio_graph" not in measured((EAGER,))[EAGER]


def test_rounds_are_interleaved_and_the_ratio_is_the_median_of_those_of_each_round():
    yardstick = measure.YARDSTICK
    timer = ScriptedTimer({yardstick: [9, 9, 2, 4, 2], EAGER: [9, 9, 3, 8, 5]})
    result = measured((EAGER,), timer, case=HEAD)[EAGER]
    rounds = set(zip(timer.order[::2], timer.order[1::2], strict=True))
    assert len(timer.order) == 10 and rounds == {(yardstick, EAGER), (EAGER, yardstick)}
    # Two rounds warm up. Then 3 / 2, 8 / 4 and 5 / 2; the median of the times is 5.
    assert result["ratio"] == 2.0 and result["ratio_spread"] == [1.5, 2.5] and result["ms"] == 5
    assert result["peak_bytes"] == 192 and result["errors"].keys() == {"loss", "d_hidden", "d_weight"}


def test_each_call_has_fresh_logits_that_are_no_leaf_and_that_no_call_has_overwritten():
    seen, starts = [], []

    def overwriting(logits, labels, reduction, group):
        assert not logits.is_leaf and not logits._is_view() and logits.requires_grad
        seen.append(logits.grad_fn)  # kept: an address is used again
        starts.append(logits[: truth.CHECKED_ROWS].detach().clone())
        loss = eager(logits.clone(), labels, reduction, group)
        logits.detach().zero_()
        return loss

    assert measured((), extra=[provider_of(overwriting)], graphs=True)["other"]["ratio_graph"] == 1.5
    # The check, two calls for memory; 5 rounds of 4 calls twice, also as graphs; 5 rounds of 20 twice.
    assert len(seen) == 3 + 2 * 5 * 4 * 2 + 5 * 20 * 2
    assert len(set(map(id, seen))) == len(seen) and all(torch.equal(start, starts[0]) for start in starts)


def test_the_copy_writes_far_from_what_it_reads_and_the_matmuls_into_memory_that_is_there(monkeypatch):
    subject = measure.subject_of(LOGITS, ALONE, 3)
    operands, copy = subject.operands(4, fresh=False), subject.yardstick()
    subject.buffers[3].fill_(7.0)
    copy(operands[3])
    changed = [i for i, buffer in enumerate(subject.buffers) if not torch.equal(buffer, subject.source)]
    far = 3 + len(subject.buffers) // 2
    assert changed == [3, far] and torch.equal(subject.buffers[far], subject.buffers[3])
    linear, shapes = measure.subject_of(HEAD, ALONE, 3), []
    matmuls, mm = linear.yardstick(), torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given, out: shapes.append(out.shape) or mm(*given, out=out))
    matmuls(linear.inputs)
    assert shapes == [(48, 64), (48, 32), (64, 32)]


def test_a_wrong_provider_is_refused_before_it_is_timed_and_this_project_must_be_right():
    timer = ScriptedTimer()

    def other(loss_of, names=(), case=LOGITS, **fields):
        return measured(names, timer, case, [provider_of(loss_of, **fields)])["other"]

    def wrong(logits, *given):
        """The right loss, and 1.05 times its gradient."""
        return eager(1.05 * logits - 0.05 * logits.detach(), *given)

    result = other(wrong, RIGHT)
    assert result["refused"] == "wrong: gradient: relative error 0.05, at most 0.02" and "ratio" not in result
    assert OURS in timer.order and "other" not in timer.order
    with pytest.raises(RuntimeError, match="none 96 x 40 fp32: other: wrong: gradient"):
        other(wrong, is_ours=True)

    def over_all_labels(hidden, weight, labels, reduction, group):
        return functional.cross_entropy(hidden @ weight.T, labels, reduction="sum") / labels.numel()

    assert other(over_all_labels, case=HEAD)["refused"].startswith("wrong: loss: relative error 0.")

    def almost(*given):
        return eager(*given) * 1.001

    assert "refused" not in other(almost)
    with pytest.raises(RuntimeError, match="wrong: loss"):
        other(almost, is_ours=True)


@pytest.mark.parametrize(("name", "reduction"), [(OURS, "mean"), (OURS, "none"), (IN_FORWARD, "mean")])
def test_this_project_writes_in_place_at_the_time_that_the_result_names(name, reduction, monkeypatch):
    subject = measure.subject_of(LOGITS._replace(kind=reduction), ALONE, 3)
    (provider,) = providers.chosen(name, KNOWN)
    backward, before_backward = torch.autograd.grad, []

    def watched(*given, **named):
        before_backward.append(not torch.equal(subject.buffers[0], subject.source))
        return backward(*given, **named)

    monkeypatch.setattr(torch.autograd, "grad", watched)
    _, grad = subject.call(provider, subject.operands(1, fresh=True)[0])
    assert grad.data_ptr() == subject.buffers[0].data_ptr()
    assert before_backward == [name == IN_FORWARD]


def test_absent_providers_say_why():
    by_name = {provider.name: provider for provider in KNOWN}
    assert by_name[EAGER].absent(2) == "needs the whole vocabulary on one rank"
    assert by_name[SHARDED].absent(1) == "needs several ranks" and by_name[OURS].absent(1) is None
    assert measured((IN_FORWARD,))[IN_FORWARD]["refused"] == "timed with the means alone"
    with pytest.raises(ValueError, match="providers: expected all or some of .*got 'torch'"):
        providers.chosen("torch", KNOWN)


def test_the_linear_oracle_is_pytorchs_whatever_its_chunks(monkeypatch):
    case = HEAD._replace(kind="none")
    inputs = cases.inputs_of(case, 0, "cpu")
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in inputs.tensors)
    loss = functional.cross_entropy(hidden @ weight.T, inputs.labels, reduction="none")
    grads = torch.autograd.grad(loss, (hidden, weight), inputs.upstreams[torch.float32].double())
    monkeypatch.setattr(truth, "CHUNK_ELEMENTS", 64 * 10)
    right = truth.expected(Row("cross_entropy", {"reduction": "none"}), inputs, None, case.tokens)
    assert max(truth.errors_of((loss, *grads), right, ("d_hidden", "d_weight")).values()) < 1e-13
    with pytest.raises(AssertionError, match="loss: relative error nan, at most 0.1"):
        truth.require({"loss": float("nan")}, (0.1,))


def test_the_device_sleeps_until_all_calls_are_queued(monkeypatch):
    sleeps, host_of, events = [], {"a": lambda sleep: 0.03, "waits": lambda sleep: sleep + 0.002}, []
    timer = clock.CpuTimer(ranks=1)

    def queued(name, *given):
        def times(run, sleep):
            run()
            sleeps.append(sleep)
            return float(len(sleeps)), host_of[name](sleep)

        monkeypatch.setattr(timer, "_time", times)
        return timer.queued(name, *given)

    # The first time includes the host's.
    assert queued("a", lambda: events.append("run"), lambda: events.append("prepare")) == 2.0
    assert timer.was_queued("a") and sleeps == [0.01, 0.06] and events == ["prepare", "run"] * 2
    queued("waits", clock.nothing)
    assert not timer.was_queued("waits") and max(sleeps) <= clock.LONGEST_SLEEP_SECONDS


def refused_by_one(rank, group):
    """What the ranks say of a loss that only rank 1 finds wrong."""

    class Subject(measure.LogitsSubject):
        def check(self, provider):
            found = super().check(provider)
            if rank == 1:
                raise AssertionError("gradient")
            return found

    case = cases.Case("none", 96, 40, 2, dtype="float32")
    subject = Subject(case, clock.Ranks(rank, 2, group, "cpu"), case.effort(1))
    (loss_parallel,) = providers.chosen(SHARDED, KNOWN)
    return measure.attempt(subject, loss_parallel, clock.CpuTimer(ranks=2))


@in_ranks((2,), (), ())
def test_a_loss_that_one_rank_finds_wrong_keeps_no_rank_waiting(rank_pool, impl):
    assert rank_pool.run(refused_by_one, timeout=30) == [{"refused": "wrong: gradient"}] * 2


def computed_here(rank, group):
    """Each of torchtitan's providers of the page, and whether this project computed its call."""
    subject = measure.subject_of(cases.Case("frameworks", 8, 40, 2), clock.Ranks(rank, 2, group, "cpu"), 1)
    found = {}
    for provider in frameworks.FRAMEWORK_PROVIDERS:
        if provider.distribution == "torchtitan":
            with provider.context():
                before = torchtitan.report().calls.get("fused", 0)
                assert max(subject.check(provider)["errors"].values()) < 0.01
                found[provider.name] = torchtitan.report().calls.get("fused", 0) - before == 1
    return found


@in_ranks((2,), (), ())
def test_a_framework_is_measured_without_and_with_this_project(rank_pool, impl):
    pytest.importorskip("torchtitan")
    names = ("torchtitan loss", "torchtitan log-probs")
    without, given = dict.fromkeys(names, False), {f"{name}, installed": True for name in names}
    assert rank_pool.run(computed_here) == [without | given] * 2
