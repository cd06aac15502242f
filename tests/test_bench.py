"""The benchmark's own logic, without a GPU: what it refuses, checks, times and reports."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.support.benchmark import SMALL, ScriptedTimer, case_of, measured, provider_of, wrong_step

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from bench import oracle, others, providers, report  # noqa: E402
from bench.cases import Case, Effort  # noqa: E402
from bench.measure import Workbench, measure_graphs  # noqa: E402
from bench.timing import LONGEST_SLEEP_SECONDS, DeviceTimer  # noqa: E402

pytestmark = pytest.mark.reference

RIGHT = ("vocab_parallel_ce", "torch eager")
RESULT_KEYS = {
    "rows",
    "columns",
    "ranks",
    "dtype",
    "reduction",
    "provider",
    "ratio",
    "ratio_spread",
    "microseconds",
    "copy_microseconds",
    "terabytes_per_second",
    "microseconds_eager",
    "ratio_eager",
    "microseconds_graph",
    "ratio_graph",
    "bytes_formula",
    "extra_peak_bytes_per_row",
    "max_error",
    "in_place",
    "queued",
}


class ScriptedDevice(DeviceTimer):
    """A timer whose host needs some time to queue, given the sleep of the device."""

    def __init__(self, host_of: Callable[[float], float]) -> None:
        super().__init__(ranks=1)
        self.host_of = host_of
        self.sleeps: list[float] = []

    def _time(self, run, sleep_seconds):
        run()
        self.sleeps.append(sleep_seconds)
        return float(len(self.sleeps)), self.host_of(sleep_seconds)


def test_a_result_has_all_numbers_and_is_json():
    results = measured(RIGHT)
    assert set(results["vocab_parallel_ce"]) == RESULT_KEYS | {"gradient"}
    assert set(results["torch eager"]) == RESULT_KEYS | {"graph_error"}
    json.dumps(results, allow_nan=False)
    ours = results["vocab_parallel_ce"]
    assert ours["ratio"] == 1.5 and ours["ratio_graph"] == 1.5 and "graph_error" not in ours
    assert ours["microseconds"] == 750.0 and ours["copy_microseconds"] == 500.0  # of four buffers
    assert ours["microseconds_eager"] == 1250.0 and ours["ratio_eager"] == 1.0  # of eight calls
    assert ours["extra_peak_bytes_per_row"] == 2.0
    assert ours["queued"] and not results["torch eager"]["queued"]
    assert results["torch eager"]["microseconds_graph"] is None
    assert results["torch eager"]["graph_error"] == "not asked for"


def test_bytes_over_time():
    """12 bytes a logit of ours, 24 of eager PyTorch, in fp32."""
    results = measured(RIGHT)
    logits = SMALL.rows * SMALL.columns
    assert results["vocab_parallel_ce"]["bytes_formula"] == "3 * rows * columns * element_size"
    assert results["vocab_parallel_ce"]["terabytes_per_second"] == round(12 * logits / 750 / 1e6, 3)
    assert results["torch eager"]["bytes_formula"] == "6 * rows * columns * element_size"
    bf16 = Case(2, 3, torch.bfloat16, None, 1)
    eager = others.chosen_providers("torch eager")[0].traffic(bf16, "none")
    assert eager.formula == "(2 * element_size + 32) * rows * columns" and eager.bytes_of(bf16) == 36 * 6


def test_the_providers_take_turns_and_the_ratio_is_the_median_over_rounds():
    timer = ScriptedTimer({"torch eager": [9.0, 2.0, 4.0, 8.0, 3.0]})
    results = measured(("torch eager",), timer)
    assert timer.order[:4] == ["copy", "torch eager", "copy", "torch eager"]
    # Two rounds warm up, then 8, 3 and 9 ms beside a copy of 2.
    assert results["torch eager"]["ratio"] == 4.0
    assert results["torch eager"]["ratio_spread"] == [1.5, 4.5]


def test_the_device_sleeps_until_all_calls_are_queued():
    timer, events = ScriptedDevice(lambda sleep: 0.03), []
    elapsed = timer.queued("a", lambda: events.append("run"), lambda: events.append("prepare"))
    assert elapsed == 2.0  # the first time has the host's in it
    assert timer.sleeps == [0.01, 0.06] and events == ["prepare", "run"] * 2
    assert timer.queued("a", lambda: None) == 3.0 and timer.sleeps[-1] == 0.06
    assert timer.queued("b", lambda: None) == 5.0 and timer.sleeps[-2:] == [0.01, 0.06]
    assert timer.was_queued("a")
    quick = ScriptedDevice(lambda sleep: 0.001)
    assert quick.queued("a", lambda: None) == 1.0 and quick.sleeps == [0.01]


def test_a_call_that_waits_for_the_device_is_timed_and_named():
    timer = ScriptedDevice(lambda sleep: sleep + 0.002)
    timer.queued("waits", lambda: None)
    assert not timer.was_queued("waits") and timer.was_queued("another")
    assert max(timer.sleeps) <= LONGEST_SLEEP_SECONDS
    before = len(timer.sleeps)
    timer.queued("waits", lambda: None)
    assert len(timer.sleeps) == before + 1 and timer.sleeps[-1] == 0.01


def test_the_copy_reads_a_buffer_and_writes_another_far_from_it():
    bench = Workbench(case_of(SMALL), SMALL, Effort(4, 1, 4, 1), "cpu")
    step = bench.step(None)
    with torch.no_grad():
        for index, logits in enumerate(bench.buffers):
            logits.fill_(index)
    step(bench.buffers[1])
    assert [float(logits.detach()[0, 0]) for logits in bench.buffers] == [0, 1, 2, 1]


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_providers_pass_the_check(name, reduction):
    workload = SMALL._replace(reduction=reduction)
    assert measured((name,), workload=workload)[name]["max_error"] < 1e-6


def test_another_provider_that_is_wrong_is_refused_and_not_timed():
    timer = ScriptedTimer()
    result = measured(RIGHT, timer, extra=[provider_of(wrong_step)])["other"]
    assert result["refused"].startswith("wrong: gradient: ")
    assert set(result) == {"rows", "columns", "dtype", "reduction", "ranks", "provider", "refused"}
    assert "other" not in timer.order


def test_this_project_must_be_right():
    with pytest.raises(AssertionError, match="gradient"):
        measured((), extra=[provider_of(wrong_step, is_ours=True)])


def test_the_strict_tolerance_finds_what_the_generous_one_lets_pass():
    def slightly_wrong(logits, labels, reduction, group):
        loss, grad = wrong_step(logits, labels, reduction, group)
        return loss, grad / 1.05 * (1 + 1e-4)

    assert "refused" not in measured((), extra=[provider_of(slightly_wrong)])["other"]
    with pytest.raises(AssertionError, match="gradient"):
        measured((), extra=[provider_of(slightly_wrong, is_ours=True)])


def test_what_a_provider_raises_is_why_it_is_refused():
    def out_of_memory(logits, labels, reduction, group):
        if logits.shape[0] == SMALL.rows:
            raise torch.OutOfMemoryError("tried to allocate")
        return wrong_step(logits, labels, reduction, group)[0], torch.zeros(())

    def unsupported(logits, labels, reduction, group):
        raise ValueError("\n  width: must be a multiple of 8\nstack")

    def only_large(logits, labels, reduction, group):
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)
        if logits.shape[0] == SMALL.rows:
            raise torch.OutOfMemoryError("tried to allocate")
        return loss, torch.autograd.grad(loss.sum(), logits)[0]

    def refusal(step, **fields):
        return measured((), extra=[provider_of(step, **fields)])["other"]["refused"]

    assert refusal(unsupported) == "ValueError: width: must be a multiple of 8"
    assert refusal(only_large) == "out of memory"
    assert refusal(out_of_memory).startswith("wrong: gradient")
    assert refusal(unsupported, limits=lambda case, reduction: f"not {reduction}") == "not none"


def test_a_kernel_alone_is_checked_for_what_it_returns():
    def unweighted(logits, labels, reduction, group):
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return loss, torch.autograd.grad(loss.sum(), logits)[0]

    workload = SMALL._replace(reduction="mean")
    kernel = provider_of(unweighted, checked_as="none")
    assert measured((), workload=workload, extra=[kernel])["other"]["max_error"] < 1e-6
    as_mean = measured((), workload=workload, extra=[provider_of(unweighted)])["other"]
    assert as_mean["refused"].startswith("wrong: loss")


def test_a_capture_that_fails_is_reported():
    class NoCapture(ScriptedTimer):
        def captured(self, call, buffers):
            if getattr(call, "func", None) is not None:
                raise RuntimeError("\n  operation not permitted when stream is capturing\nmore")
            return lambda: None

    result = measured(RIGHT, NoCapture())["vocab_parallel_ce"]
    assert result["microseconds_graph"] is None and result["ratio_graph"] is None
    assert result["graph_error"] == "RuntimeError: operation not permitted when stream is capturing"
    assert result["ratio"] == 1.5
    eager = others.chosen_providers("torch eager")
    effort = Effort(4, 3, 8, 2)
    numbers = measure_graphs(case_of(SMALL), SMALL, eager, ScriptedTimer(), effort, device="cpu")
    assert numbers["torch eager"] == {"microseconds_graph": 750.0, "ratio_graph": 1.5}


def test_providers_are_chosen_by_name_in_one_order():
    every = [provider.name for provider in others.chosen_providers(None)]
    assert "vocab_parallel_ce[triton]" not in every and len(every) == len(set(every))
    assert [p.name for p in others.chosen_providers("torch eager,vocab_parallel_ce")] == list(RIGHT)
    with_triton = [p.name for p in others.chosen_providers("all,vocab_parallel_ce[triton]")]
    assert set(with_triton) - set(every) == {"vocab_parallel_ce[triton]"}
    # megatron-core looks for transformer-engine where it is imported second.
    assert every.index("megatron-core") < every.index("transformer-engine")
    with pytest.raises(ValueError, match="providers: expected all or some of .*, got 'torch'"):
        others.chosen_providers("torch")


def test_absent_providers_say_why():
    by_name = {provider.name: provider for provider in others.PROVIDERS}
    assert by_name["torch eager"].available(2) == "needs the whole vocabulary on one rank"
    assert by_name["loss_parallel"].available(1) == "needs several ranks"
    assert by_name["vocab_parallel_ce"].available(1) is None
    assert by_name["vocab_parallel_ce[one_pass]"].available(2) == "needs the whole vocabulary on one rank"

    def missing():
        raise ModuleNotFoundError("No module named 'cutlass'")

    def broken():
        raise OSError("libcudart.so.12: cannot open\nmore")

    fields = {"in_place": False, "package": "torch", "distribution": "torch"}
    absent = providers.Provider("x", missing, providers.fixed(3), **fields)
    assert absent.available(1) == "not installed: No module named 'cutlass'"
    absent = providers.Provider("x", broken, providers.fixed(3), **fields)
    assert absent.available(1) == "cannot be imported: OSError: libcudart.so.12: cannot open"
    assert by_name["torch eager"].version == importlib.metadata.version("torch")


def test_the_largest_error_is_that_of_loss_or_gradient():
    right = oracle.Expected(
        torch.zeros(2, 2), torch.zeros(2), torch.tensor([10.0, 0.5]), torch.tensor([[0.5, -0.5]])
    )
    assert oracle.max_error(torch.tensor([10.1, 0.5]), right.grad, right) == pytest.approx(0.01, rel=1e-4)
    assert oracle.max_error(torch.tensor([10.0, 0.52]), right.grad, right) == pytest.approx(0.02, rel=1e-4)
    assert oracle.max_error(right.loss, right.grad + 0.05, right) == pytest.approx(0.1, rel=1e-4)


def test_the_table_is_sorted_by_shape_and_then_ratio():
    results = measured(RIGHT, ScriptedTimer({"vocab_parallel_ce": [4.0]}), extra=[provider_of(wrong_step)])
    lines = report.results_text(results.values()).splitlines()
    assert lines[0].startswith("96 x 40 float32 none, 1 GPU")
    names = [line.split()[0] for line in lines[1:]]
    assert names == ["torch", "vocab_parallel_ce", "other"]
    assert "refused: wrong: gradient" in lines[-1]
    assert "waits for the device" in lines[1]


def test_a_run_stops_at_its_budget(monkeypatch):
    pytest.importorskip("tqdm")
    import bench_cross_entropy as script

    clock = iter([0.0, 1.0, 99.0])
    monkeypatch.setattr(script.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(script, "DeviceTimer", lambda ranks: None)
    monkeypatch.setattr(script, "measure", lambda case, workload, *_, **__: [workload._asdict()])
    monkeypatch.setattr(sys, "argv", ["bench", "--budget-seconds", "10"])
    workloads = [SMALL._replace(rows=rows) for rows in (1, 2, 3)]
    plan = script.Plan(script.Ranks(0, 1, None), workloads, [], 3)
    document = {"results": [], "missing": []}
    script.run_plan(plan, document, script.arguments(), deadline=10.0)
    assert [result["rows"] for result in document["results"]] == [1, 2]
    assert document["missing"] == ["3 x 40 float32 none"]


def test_other_providers_graphs_are_added_to_their_results(monkeypatch):
    pytest.importorskip("tqdm")
    import bench_cross_entropy as script

    numbers = {"microseconds_graph": 5.0, "ratio_graph": 2.0}
    monkeypatch.setattr(script, "DeviceTimer", lambda ranks: None)
    monkeypatch.setattr(
        script, "measure_graphs", lambda case, workload, chosen, *_: {chosen[0].name: numbers}
    )
    plan = script.Plan(script.Ranks(0, 1, None), [SMALL], others.chosen_providers("all"), 3)
    results = list(measured(RIGHT).values())
    script.add_graphs(plan, {"results": results, "missing": []}, float("inf"))
    by_name = {result["provider"]: result for result in results}
    assert by_name["torch eager"]["microseconds_graph"] == 5.0
    assert "graph_error" not in by_name["torch eager"]
    assert by_name["vocab_parallel_ce"]["ratio_graph"] == 1.5


def test_the_document_of_a_run_is_complete_without_a_gpu(capsys):
    pytest.importorskip("tqdm")
    import bench_cross_entropy as script

    results = list(measured(RIGHT).values())
    plan = script.Plan(script.Ranks(0, 1, None), [SMALL], others.chosen_providers(",".join(RIGHT)), 3)
    latency = {"copy_terabytes_per_second": 4.2, "launch_microseconds": 1.5, "all_gather_microseconds": {}}
    document = {"host": script.host_description({"torch eager": "2"}), "absent": {"x": "not installed: y"}}
    document |= {"latency": latency, "results": results, "missing": []}
    script.add_predictions(plan, document)
    script.print_document(document)
    printed = capsys.readouterr().out.splitlines()
    assert json.loads(printed[-1]) == document
    assert "absent: x: not installed: y" in printed
    assert document["predictions"][0]["provider"] == "vocab_parallel_ce"
