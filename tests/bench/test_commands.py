"""``scripts/bench.py`` from end to end on the CPU, its cases and its profile of a made-up trace."""

import json
import sys

import pytest
import torch

from tests.bench.support import IN_FORWARD, OURS, SCRIPTS

import bench  # isort: skip
from bench_lib import cases, documents, options, profile, steps, timing  # isort: skip

pytestmark = pytest.mark.reference


def run(tmp_path, *words):
    path = tmp_path / "document.json"
    assert bench.main([*words, "--rounds", "2", "--json", str(path)]) == 0
    return documents.read_document(path, ranks=1)


def test_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setenv("VPCE_COMMIT", "abcdef0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = f"{OURS},{IN_FORWARD},torch eager,flash-attn"
    document = run(tmp_path, "table", "--shape", "8x64", "--reduction", "mean", "--providers", names)
    assert document["host"]["commit"] == "abcdef0" and document["host"]["gpu"] is None
    assert document["absent"] == {"flash-attn": "not installed: No module named 'flash_attn'"}
    results = documents.results_by_case(document)[cases.LogitsCase("mean", 8, 64, 1)]
    assert list(results) == [OURS, IN_FORWARD, "torch eager"] == list(document["host"]["providers"])
    for result in results.values():
        assert result["ratio"] > 0 and result["microseconds_eager"] > 0
        assert result["extra_peak_bytes_per_row"] is None and result["microseconds_graph"] is None
    assert "absent: flash-attn: not installed" in capsys.readouterr().out


def test_linear_and_its_memory_curve(tmp_path):
    shape = ["--shape", "8x64x32", "--providers", f"{OURS},torch eager"]
    document = run(tmp_path, "linear", "--reduction", "none", *shape)
    assert list(documents.results_by_case(document)) == [cases.LinearCase("none", 8, 64, 32, 1)]
    points = run(tmp_path, "linear", "--memory-curve", *shape)["points"]
    assert [point["provider"] for point in points] == [OURS, "torch eager"]
    assert points[0]["gradient_bytes"] == 2 * 32 * (8 + 64)


def test_options_beside_another_checkout(tmp_path):
    """The baseline is this checkout: a copy of the package under another name."""
    document = run(tmp_path, "options", "--shape", "4x64", "--baseline", str(SCRIPTS.parent))
    results = next(iter(documents.results_by_case(document).values()))
    assert list(results) == [*options.OPTION_CALLS, *(f"{name}, baseline" for name in options.BASELINES)]
    assert options.baseline_package(SCRIPTS.parent).__name__ == f"baseline_{OURS}"


def test_a_failed_measurement_is_an_error_and_leaves_no_finished_document(tmp_path, monkeypatch):
    path, results = tmp_path / "document.json", iter([[{"ratio": 1.5}]])
    monkeypatch.setattr(bench, "measure", lambda *given: next(results))  # the second case fails
    words = ["table", "--shape", "8x64", "--providers", OURS, "--json", str(path)]
    with pytest.raises(StopIteration):
        bench.main(words)
    assert json.loads(path.read_text())["results"] == [{"ratio": 1.5}]
    with pytest.raises(ValueError, match="finished run"):
        documents.read_document(path)


@pytest.mark.parametrize("source, says", [("__version__ = '1.2.0rc1+abcdef0'", "1.2.0rc1"), ("", "source")])
def test_the_version_of_a_package_that_is_only_sources(tmp_path, monkeypatch, source, says):
    """Not the commit that they add, which is that of any repository around them."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_sources", raising=False)
    (tmp_path / "some_sources.py").write_text(source)
    head = steps.head_of("frameworks", {"some-sources": "some_sources", "pytest": "some_sources"})
    assert head["host"].items() >= {"some-sources": says, "pytest": pytest.__version__}.items()
    with pytest.raises(ImportError, match="absent"):
        documents.version_of("some-sources", "absent")


def test_cases_are_the_tables_a_sweeps_or_those_named():
    assert len(cases.logits_cases(1)) == 11 and len(cases.logits_cases(1, reduction="mean")) == 4
    assert {case.vocabulary for case in cases.logits_cases(4)} == {128256, 32000}
    assert cases.logits_cases(2, sweep="tokens")[0] == cases.LogitsCase("mean", 64, 64128, 2)
    named = cases.linear_cases(2, ["512x8064", "8x64x32"], "mean")
    assert named == [cases.LinearCase("mean", 512, 8064, 4096, 2), cases.LinearCase("mean", 8, 64, 32, 2)]
    for shape in ("8", "0x64", "8x64x", "axb"):
        with pytest.raises(ValueError, match="shape: expected ROWSxCOLUMNS such as 4096x128256"):
            cases.logits_cases(1, [shape])
    with pytest.raises(ValueError, match="vocabulary: expected a multiple of the 3 ranks, got 64"):
        cases.linear_cases(3, ["8x64"])[0].columns  # noqa: B018
    with pytest.raises(SystemExit, match="no case of this reduction for 8 ranks: pass --shape"):
        bench.measure_cases(bench.arguments(["table"]), timing.Ranks(0, 8, None, "cpu"), {})


def test_a_profile_tells_hidden_from_exposed_communication():
    def event(name, start, duration, cat="kernel"):
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}

    trace = [
        event("spin_kernel", 0, 90),
        event("ncclDevKernel_AllReduce_Sum", 90, 5),  # the ranks begin together
        event("nvjet_tst_128x256", 100, 50),
        event("ncclDevKernel_AllGather_RING_LL", 140, 20),
        event("online_softmax_kernel", 155, 15),
        event("void at::native::fill(int)", 180, 10),
        event("aten::mm", 0, 200, cat="cpu_op"),
        event("ncclDevKernel_AllReduce_Sum", 195, 5),  # the ranks meet again
    ]
    summary = profile.summary_of(profile.step_of(trace, ranks=2))
    assert summary["step"] == 90 and summary["nccl"] == 20 and summary["idle"] == 10
    # From 150 to 155 neither a matmul nor a loss runs beside the all_gather.
    assert summary["nccl_exposed"] == 5 and summary["nccl_overlapped"] == 15
    assert summary["by_category"] == {"nccl": 20, "matmul": 50, "loss": 15, "other": 10}
    assert len(profile.step_of(trace, ranks=1)) == 6


@pytest.mark.parametrize("command", ["table", "options", "linear", "report", "compare"])
def test_help(command, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        bench.main([command, "--help"])
    assert capsys.readouterr().out.partition(" [-h]")[0].endswith(command)
