"""``scripts/bench.py`` from end to end on the CPU, its cases and its profile of a made-up trace."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.bench.support import EAGER, IN_FORWARD, ONE_PASS, OURS, SCRIPTS, TRITON, document, refusal, result

import bench  # isort: skip
from bench_lib import adapters, cases, documents, modes, profile, providers, rows, steps, timing  # isort: skip

pytestmark = pytest.mark.reference


def run(tmp_path, *words):
    path = tmp_path / "document.json"
    assert bench.main([*words, "--rounds", "1", "--json", str(path)]) == 0
    return documents.read_document(path, ranks=1)


def test_table(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setenv("VPCE_COMMIT", "abcdef0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    names = f"{OURS},{IN_FORWARD},{EAGER},flash-attn"
    document = run(tmp_path, "table", "--shape", "8x64", "--reduction", "mean", "--providers", names)
    assert document["host"]["commit"] == "abcdef0" and document["host"]["gpu"] is None
    assert document["absent"] == {"flash-attn": "not installed: No module named 'flash_attn'"}
    results = documents.results_by_case(document)[cases.Case("mean", 8, 64, 1)]
    assert list(results) == [OURS, IN_FORWARD, EAGER]
    for found in results.values():
        assert found["ratio"] > 0 and found["microseconds_eager"] > 0
        assert found["peak_bytes"] is None and found["microseconds_graph"] is None
    assert "absent: flash-attn: not installed" in capsys.readouterr().out


def test_heads_and_their_memory(tmp_path):
    shape = ["--shape", "8x64x32", "--providers", f"{OURS},{EAGER}"]
    document = run(tmp_path, "head", "--reduction", "none", *shape)
    assert list(documents.results_by_case(document)) == [cases.Case("none", 8, 64, 1, 32)]
    points = run(tmp_path, "memory", *shape)["results"]
    assert [point["provider"] for point in points] == [OURS, EAGER]
    assert points[0]["gradient_bytes"] == 2 * 32 * (8 + 64)


@pytest.mark.parametrize("command, shape", [("options", "4x100"), ("losses", "4x100"), ("losses", "8x100x8")])
def test_every_row_is_right_beside_the_same_call_of_another_checkout(tmp_path, capsys, monkeypatch, command, shape):
    """The baseline is this checkout: a copy of the package under another name."""
    monkeypatch.setenv("VPCE_BASELINE_COMMIT", "0123abc")
    document = run(tmp_path, command, "--shape", shape, "--baseline", str(SCRIPTS.parent))
    assert document["host"]["baseline_commit"] == "0123abc"
    (results,) = documents.results_by_case(document).values()
    expected = rows.rows_of(cases.cases_of(command, 1, [shape])[0])
    assert list(results) == [f"{name}{suffix}" for name in expected for suffix in ("", ", baseline")]
    assert all(len(results[name]["over_baseline"]) == 3 for name in expected)
    assert adapters.baseline_package(SCRIPTS.parent).__name__ == f"baseline_{OURS}"
    assert "| call | time / baseline | eager |" in capsys.readouterr().out


def test_modes_of_a_cpu_are_measured_and_the_slower_one_is_an_error(tmp_path, capsys, monkeypatch):
    """A CPU has no stable times, so the bound is given."""
    monkeypatch.setattr(modes, "NOISE", 1e9)
    found = run(tmp_path, "modes", "--shape", "8x64", "--dtype", "float32")
    ((case, results),) = documents.results_by_case(found).items()
    assert case == cases.Case("mean", 8, 64, 1, dtype="float32")
    assert [name for name in results if documents.is_timed(results[name])] == [OURS, IN_FORWARD, TRITON]
    assert "microseconds_eager" not in results[OURS] and "| copy | vocab_parallel_ce |" in capsys.readouterr().out
    monkeypatch.setattr(modes, "NOISE", 0.0)
    with pytest.raises(AssertionError, match="assert 1 == 0"):
        run(tmp_path, "modes", "--shape", "8x64")
    assert "slower: mean 8 x 64 bf16: vocab_parallel_ce[in_forward]" in capsys.readouterr().out


@pytest.mark.parametrize("in_forward, by_name, said", [(0.0510, 0.051, []), (0.0511, 0.050, [1.02]), (0.06, 0.03, [2])])
def test_a_mode_is_compared_with_the_fastest_that_may_run_in_its_place(in_forward, by_name, said):
    """A mode asked for by name must not be slower than the default. Two hundredths are noise."""
    case = cases.Case("mean", 16, 128256, 1)
    times = {OURS: 0.055, IN_FORWARD: in_forward, TRITON: by_name}
    results = [result(name, 1.0, case, ms=ms, yardstick_ms=0.025) for name, ms in times.items()]
    found = modes.slower(document(*results, refusal(ONE_PASS, "rows of a width", case)))
    assert found == [
        f"slower: mean 16 x 128256 bf16: {IN_FORWARD} {1e3 * in_forward:.2f} us, {ratio:.2f} x {TRITON}"
        for ratio in said
    ]


def test_the_fewest_rows_are_those_from_which_on_one_launch_stays_faster():
    times = {8: (1.0, 2.0), 64: (2.0, 2.0), 96: (3.0, 4.0), 128: (4.0, 4.0), 256: (9.0, 5.0)}
    results = []
    for tokens, (triton, one_pass) in times.items():
        case = cases.Case("mean", tokens, 8192, 1)
        results += [result(TRITON, 1.0, case, ms=triton), result(ONE_PASS, 1.0, case, ms=one_pass)]
    wide = cases.Case("mean", 8, 256000, 1)
    results += [result(TRITON, 1.0, wide, ms=2.0), refusal(ONE_PASS, "rows of a width", wide)]
    assert modes.fewest_rows(document(*results)) == ["one_pass of 8192 columns: from 128 rows on"]


def test_a_baseline_of_no_known_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("VPCE_BASELINE_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="--baseline: expected a checkout with git history, got"):
        run(tmp_path, "options", "--shape", "4x100", "--baseline", str(SCRIPTS))


def test_a_wrong_row_is_an_error(tmp_path, monkeypatch):
    """Twice the loss is seen by the check."""
    right = adapters.Names.distillation
    monkeypatch.setattr(adapters.Names, "distillation", lambda *given, **options: 2 * right(*given, **options))
    with pytest.raises(RuntimeError, match="distillation, forward: wrong: loss: relative error 1"):
        run(tmp_path, "losses", "--shape", "4x100")


def test_the_time_of_the_host_launches_nothing(monkeypatch):
    class Launch:
        def __call__(self):
            raise AssertionError("launched")

    prepared, launch = [], Launch()
    assert timing.HostTimer([Launch]).queued("a", launch, lambda: prepared.append(1)) >= 0 and prepared
    with pytest.raises(AssertionError, match="launched"):
        launch()


def test_a_page_has_documents_of_steps_that_ended(tmp_path, capsys, monkeypatch):
    def ended(words, environment, seconds):
        if seconds <= 0 or "compile" in words:
            return "no GPU"
        assert environment["VPCE_COMMIT"] == "abcdef0"
        assert ("torch.distributed.run" in words) == words[-1].endswith("_2gpu.json")
        documents.write_document(document() | {"absent": {"verl": "not installed"}}, Path(words[-1]))
        return None

    monkeypatch.setenv("VPCE_COMMIT", "abcdef0")
    monkeypatch.setattr(bench, "ended", ended)
    assert bench.main(["page", "--out", str(tmp_path)]) == 1
    expected = {documents.name_of(step, 1) for step in bench.STEPS} - {"compile_1gpu", "rl_1gpu"}
    assert {path.stem for path in tmp_path.iterdir()} == expected
    said = capsys.readouterr().out
    assert said.endswith("left: compile rl\n") and "no GPU" in said and "not every framework is installed" in said
    assert bench.main(["page", "--gpus", "2", "--out", str(tmp_path)]) == 0
    assert {documents.name_of(step, 2) for step in bench.STEPS_OF_SEVERAL} <= {path.stem for path in tmp_path.iterdir()}
    assert bench.main(["page", "losses", "--minutes", "0", "--out", str(tmp_path)]) == 1
    with pytest.raises(SystemExit, match="page: expected some of table, .*got nothing"):
        bench.main(["page", "nothing"])


def test_a_step_that_fails_or_takes_too_long_says_why():
    assert bench.ended([sys.executable, "-c", "print(1)"], os.environ, 60) is None
    assert bench.ended([sys.executable, "-c", "raise SystemExit(3)"], os.environ, 60) == "exit status 3"
    assert bench.ended([sys.executable, "-c", "input()"], os.environ, 0) == "no time is left"
    assert bench.ended([sys.executable, "-c", "import time; time.sleep(600)"], os.environ, 1) == "it took too long"


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
    head = steps.document_of("frameworks", {"some-sources": "some_sources", "pytest": "some_sources"})
    assert head["host"]["packages"] == {"some-sources": says, "pytest": pytest.__version__}
    with pytest.raises(ImportError, match="absent"):
        providers.version_of("some-sources", "absent")


def test_cases_are_a_tables_a_commands_or_those_named():
    assert len(cases.cases_of("table", 1)) == 11 and len(cases.cases_of("table", 1, reduction="mean")) == 4
    assert {case.vocabulary for case in cases.cases_of("table", 4)} == {128256, 65536, 32000}
    assert cases.cases_of("few", 2)[0] == cases.Case("mean", 16, 128256, 2)
    assert {case.vocabulary for case in cases.cases_of("options", 2)} == {128256, 64128, 32064, 151936}
    named = cases.cases_of("head", 2, ["512x8064", "8x64x32"], "mean")
    assert named == [cases.Case("mean", 512, 8064, 2, 4096), cases.Case("mean", 8, 64, 2, 32)]
    for shape in ("8", "0x64", "8x64x", "axb"):
        with pytest.raises(ValueError, match="shape: expected TOKENSxVOCABULARY"):
            cases.cases_of("table", 1, [shape])
    with pytest.raises(ValueError, match="vocabulary: expected a multiple of the 3 ranks, got 64"):
        cases.cases_of("head", 3, ["8x64"])


def test_a_profile_tells_hidden_from_exposed_communication():
    def event(name, start, duration, cat="kernel"):
        return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": duration}

    trace = [
        event("spin_kernel", 0, 90),
        event("ncclDevKernel_AllReduce_Sum", 90, 5),  # the ranks begin together
        event("nvjet_tst_128x256", 100, 50),
        event("ncclDevKernel_AllGather_RING_LL", 140, 20),
        event("statistics_kernel", 155, 15),
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


@pytest.mark.parametrize("command", bench.DEFAULT_PROVIDERS)
def test_the_default_providers_of_a_command_are_known(command):
    (case, *_) = cases.cases_of(command, 1)
    names = bench.DEFAULT_PROVIDERS[command]
    found = providers.chosen(names, bench.known_providers(command, case, None))
    assert {provider.name for provider in found} == set(names.split(","))


@pytest.mark.parametrize("command", [*bench.COMMANDS, "page", "report", "compare"])
def test_help(command, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        bench.main([command, "--help"])
    assert capsys.readouterr().out.partition(" [-h]")[0].endswith(command)
