"""The logits that the benchmarks time: no leaf, new for every call, made outside what is timed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.benchmark import SMALL, ScriptedTimer, case_of, measured, provider_of, wrong_step

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from bench import host, measure, others, providers  # noqa: E402
from bench.cases import Case, Effort  # noqa: E402
from bench.logits import as_produced  # noqa: E402
from bench.providers import UNREDUCED  # noqa: E402

pytestmark = pytest.mark.reference

OURS, IN_FORWARD = "vocab_parallel_ce", "vocab_parallel_ce[in_forward]"


def test_produced_logits_are_no_leaf_no_view_and_the_buffer_itself():
    buffer = torch.randn(3, 5)
    logits, other = as_produced(buffer), as_produced(buffer)
    assert logits.requires_grad and not logits.is_leaf and not logits._is_view()
    assert logits.data_ptr() == buffer.data_ptr() and logits.grad_fn is not other.grad_fn
    buffer.copy_(torch.randn(3, 5))
    assert logits._version == other._version == buffer._version == 1
    (grad,) = torch.autograd.grad(logits.square().sum(), logits)
    assert torch.equal(grad, 2 * buffer)
    with pytest.raises(AssertionError, match="further than to the logits"):
        logits.sum().backward()


def test_every_call_of_a_workload_has_logits_of_its_own():
    seen = []

    def right_step(logits, labels, reduction, group):
        assert not logits.is_leaf and not logits._is_view()
        seen.append(logits.grad_fn)  # kept: an address is used again
        loss, grad = wrong_step(logits, labels, reduction, group)
        return loss, grad / 1.05

    result = measured((), extra=[provider_of(right_step)], graphs_of=lambda provider: True)["other"]
    assert result["ratio"] == 1.5 and result["ratio_graph"] == 1.5
    # The check, memory and its warm-up; five rounds of four twice; three of eight; five of four graphs twice.
    assert len(seen) == 3 + 5 * 4 * 2 + 3 * 8 + 5 * 4 * 2
    assert len(set(map(id, seen))) == len(seen)


def test_nothing_is_made_or_restored_while_time_is_taken(monkeypatch):
    made_while_timed = []

    class Watching(ScriptedTimer):
        timing = False

        def queued(self, name, run, prepare=object):
            return super().queued(name, lambda: self.watched(run), prepare)

        def eager(self, run):
            return super().eager(lambda: self.watched(run))

        def watched(self, run):
            self.timing = True
            run()
            self.timing = False

    timer = Watching()

    def watched(make):
        def watching(*given):
            made_while_timed.append(timer.timing)
            return make(*given)

        return watching

    monkeypatch.setattr(measure, "as_produced", watched(measure.as_produced))
    monkeypatch.setattr(measure.Workbench, "restore", watched(measure.Workbench.restore))
    measured(("torch eager",), timer, graphs_of=lambda provider: False)
    assert len(made_while_timed) > 60 and not any(made_while_timed)


def test_calls_find_the_source_in_every_buffer_that_no_call_has_used():
    bench = measure.Workbench(case_of(SMALL), SMALL, Effort(4, 1, 4, 1), "cpu")
    found = []

    def step(logits, labels, reduction, group):
        found.append(torch.equal(logits, bench.source))
        logits.detach().zero_()

    calls = measure.Calls(bench, provider_of(step), 6)
    for _ in range(2):
        calls.prepare()
        calls()
    assert found == [True, True, True, True, False, False] * 2


@pytest.mark.parametrize(
    ("name", "reduction", "gradient"),
    [(OURS, "mean", "in_backward"), (OURS, "none", "in_backward"), (IN_FORWARD, "mean", "in_forward")],
)
def test_this_project_is_timed_in_place_and_says_when_it_writes(name, reduction, gradient, monkeypatch):
    workload = SMALL._replace(reduction=reduction)
    bench = measure.Workbench(case_of(workload), workload, Effort(2, 1, 2, 1), "cpu")
    (provider,) = others.chosen_providers(name)
    backward, written = torch.autograd.grad, []

    def watched(*given, **options):
        written.append(not torch.equal(bench.buffers[0], bench.source))
        return backward(*given, **options)

    with monkeypatch.context() as patched:
        patched.setattr(torch.autograd, "grad", watched)
        _, grad = bench.call_on(provider, bench.buffers[0])
    assert written == [gradient == "in_forward"]
    assert grad.data_ptr() == bench.buffers[0].data_ptr()
    assert not torch.equal(bench.buffers[0], bench.source)
    result = measured((name,), workload=workload)[name]
    assert result["gradient"] == gradient and result["max_error"] < 1e-6
    assert "gradient" not in measured(("torch eager",), workload=workload)["torch eager"]


def test_both_ways_are_timed_unless_asked_otherwise_and_in_forward_of_reduced_losses_alone():
    default = [provider.name for provider in others.chosen_providers(None)]
    assert default[:2] == [OURS, IN_FORWARD]
    result = measured((OURS, IN_FORWARD))[IN_FORWARD]
    assert result["refused"] == UNREDUCED and "ratio" not in result
    by_name = {provider.name: provider for provider in others.PROVIDERS}
    assert by_name[f"{OURS}[one_pass]"].refuses(case_of(SMALL), "none") == UNREDUCED
    assert "'one_pass' needs " in by_name[f"{OURS}[one_pass]"].refuses(case_of(SMALL), "mean")
    assert by_name[IN_FORWARD].available(2) is None


def test_bytes_are_those_of_the_way_that_the_package_says_it_takes(monkeypatch):
    """On a GPU one launch does a mean in forward, and nothing else."""

    def prepare_call(logits, labels, *, group, reduction, gradient, impl):
        assert not logits.is_leaf  # for a leaf the package would choose another mode
        one_pass = object() if gradient == "in_forward" and impl != "triton" else None
        return SimpleNamespace(one_pass=one_pass)

    monkeypatch.setattr(providers.pipeline, "prepare_call", prepare_call)
    passes = {p.name: p.traffic(case_of(SMALL), "mean").passes for p in providers.OUR_PROVIDERS}
    assert passes == {OURS: 3, IN_FORWARD: 2, f"{OURS}[triton]": 3, f"{OURS}[one_pass]": 2}


def test_the_hosts_part_is_of_new_logits_at_every_call(monkeypatch):
    for name, value in (("CALLS", 5), ("ROUNDS", 2), ("COLUMNS", 16)):
        monkeypatch.setattr(host, name, value)
    made, calls = [], []

    def produced(buffer):
        made.append(as_produced(buffer))
        return made[-1]

    def loss(logits, labels, **options):
        calls.append(logits)
        return providers.vocab_parallel_cross_entropy(logits, labels, **options)

    monkeypatch.setattr(host, "as_produced", produced)
    monkeypatch.setattr(host, "vocab_parallel_cross_entropy", loss)
    times = host.measured_host(1, None, ScriptedTimer(), "cpu")
    assert times == dict.fromkeys(("nothing", "loss", "nothing_one_thread", "loss_one_thread"), 2000.0)
    assert len(made) == 4 * 3 * 5 and len(set(map(id, calls))) == len(calls) == 2 * 3 * 5


def test_options_are_timed_on_new_logits_in_place(monkeypatch):
    tqdm = pytest.importorskip("tqdm")
    import bench_options as script

    inputs = Case.inputs
    monkeypatch.setattr(Case, "inputs", lambda case: inputs(case, "cpu"))
    monkeypatch.setattr(script, "milliseconds", lambda run, queued: float(run() is None))
    monkeypatch.setattr(script, "extra_peak_bytes", lambda run: len(run()))
    written = {}
    step = script.step

    def watched(function, logits, labels):
        *outputs, grad = step(function, logits, labels)
        assert not logits.is_leaf
        if logits.shape[0] == 96:  # not the check's
            written.setdefault(str(function), []).append(grad.data_ptr() == logits.data_ptr())
        return [*outputs, grad]

    monkeypatch.setattr(script, "step", watched)
    case = Case(96, 40, torch.float32, None, 1)
    results = script.measure(None, case, 2, tqdm.tqdm(disable=True))
    names = [*script.OPTIONS, *script.LOG_PROBS]
    assert [result["call"] for result in results] == names
    assert len(written) == len(names) and all(map(all, written.values()))
    assert {result["ratio_to_copy"] for result in results} == {1.0}
