"""``scripts/bench.py`` from end to end on the CPU: a small run of its commands, and what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.bench.support import EAGER, IN_FORWARD, OURS, SCRIPTS, document

import bench  # isort: skip
from bench_lib import calls, cases, documents, pages  # isort: skip

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
    found = run(tmp_path, "table", "--shape", "8x64", "--reduction", "mean", "--providers", names)
    assert found["host"]["commit"] == "abcdef0" and found["host"]["gpu"] is None
    assert found["absent"] == {"flash-attn": "not installed: No module named 'flash_attn'"}
    results = documents.results_by_case(found)[cases.Case("mean", 8, 64, 1)]
    assert list(results) == [OURS, IN_FORWARD, EAGER]
    for each in results.values():
        assert each["ratio"] > 0 and each["microseconds_eager"] > 0
        assert each["peak_bytes"] is None and "microseconds_graph" not in each
    assert "absent: flash-attn: not installed" in capsys.readouterr().out


def test_few_heads_and_their_memory(tmp_path):
    assert len(documents.results_by_case(run(tmp_path, "few", "--shape", "8x64"))) == 2
    shape = ["--shape", "8x64x32", "--providers", f"{OURS},{EAGER}"]
    found = run(tmp_path, "head", "--reduction", "none", *shape)
    assert list(documents.results_by_case(found)) == [cases.Case("none", 8, 64, 1, 32)]
    points = run(tmp_path, "memory", *shape)["results"]
    assert [point["provider"] for point in points] == [OURS, EAGER]
    assert points[0]["gradient_bytes"] == 2 * 32 * (8 + 64)


@pytest.mark.parametrize("command, shape", [("options", "4x100"), ("losses", "4x100"), ("losses", "8x100x8")])
def test_every_row_is_right_beside_the_same_call_of_another_checkout(tmp_path, capsys, monkeypatch, command, shape):
    """The baseline is this checkout: a copy of the package under another name."""
    monkeypatch.setenv("VPCE_BASELINE_COMMIT", "0123abc")
    found = run(tmp_path, command, "--shape", shape, "--baseline", str(SCRIPTS.parent))
    assert found["host"]["baseline_commit"] == "0123abc"
    (results,) = documents.results_by_case(found).values()
    expected = calls.rows_of(cases.cases_of(command, 1, [shape])[0])
    assert list(results) == [f"{name}{suffix}" for name in expected for suffix in ("", ", baseline")]
    assert all(len(results[name]["over_baseline"]) == 3 for name in expected)
    assert calls.baseline_package(SCRIPTS.parent).__name__ == f"baseline_{OURS}"
    assert "| call | time / baseline | eager |" in capsys.readouterr().out


def test_objective(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "OBJECTIVE_PROVIDERS", ())  # those that are here compile for long
    monkeypatch.setattr(bench, "TEACHER_PROVIDERS", ())
    document = run(tmp_path, "objective", "--shape", "8x100x8")
    found, *of_teachers, pairs, one = map(list, documents.results_by_case(document).values())
    assert pairs == one == [*calls.PAIR_ROWS]
    assert found == [*calls.OBJECTIVE_ROWS, *calls.UNFUSED_ROWS["objective"]]
    assert of_teachers == 2 * [[*calls.TEACHER_ROWS, *calls.UNFUSED_ROWS["teacher"]]]
    for result in document["results"]:
        result["peak_bytes"] = 0  # a CPU's is not measured
    assert pages.objective_part(document).count("| linear |") == 3


def test_a_wrong_row_is_an_error_and_leaves_no_finished_document(tmp_path, monkeypatch):
    """Twice the loss is seen by the check."""
    right = calls.distillation
    monkeypatch.setitem(calls.LOSSES, "distillation", lambda *given, **options: 2 * right(*given, **options))
    with pytest.raises(RuntimeError, match="distillation, forward: wrong: loss: relative error 1"):
        run(tmp_path, "losses", "--shape", "4x100")
    path, results = tmp_path / "document.json", iter([[{"ratio": 1.5}]])
    monkeypatch.setattr(bench, "measure", lambda *given, graphs: next(results))  # the second case fails
    with pytest.raises(StopIteration):
        bench.main(["table", "--shape", "8x64", "--providers", OURS, "--json", str(path)])
    assert json.loads(path.read_text())["results"] == [{"ratio": 1.5}]
    with pytest.raises(ValueError, match="finished run"):
        documents.read_document(path)


def test_a_baseline_of_no_known_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("VPCE_BASELINE_COMMIT", raising=False)
    with pytest.raises(SystemExit, match="--baseline: expected a checkout with git history, got"):
        run(tmp_path, "options", "--shape", "4x100", "--baseline", str(SCRIPTS))


def test_a_page_has_documents_of_steps_that_ended(tmp_path, capsys, monkeypatch):
    def run(words, env=None, **options):
        if env is None:  # git
            return SimpleNamespace(stdout="")
        if "compile" in words:
            return SimpleNamespace(returncode=1)
        assert env["VPCE_COMMIT"] == "abcdef0"
        assert ("torch.distributed.run" in words) == words[-1].endswith("_2gpu.json")
        documents.write_document(document() | {"absent": {"verl": "not installed"}}, Path(words[-1]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setenv("VPCE_COMMIT", "abcdef0")
    monkeypatch.setattr(bench.subprocess, "run", run)
    assert bench.main(["page", "--out", str(tmp_path)]) == 1
    expected = {documents.name_of(step, 1) for step in bench.STEPS} - {"compile_1gpu", "rl_1gpu"}
    assert {path.stem for path in tmp_path.iterdir()} == expected
    assert capsys.readouterr().out.endswith("left: compile rl\n")
    assert bench.main(["page", "--gpus", "2", "--out", str(tmp_path)]) == 0
    assert {documents.name_of(step, 2) for step in bench.STEPS_OF_SEVERAL} <= {path.stem for path in tmp_path.iterdir()}
    with pytest.raises(SystemExit, match="page: expected some of table, .*got nothing"):
        bench.main(["page", "nothing"])


def test_cases_are_a_tables_a_commands_or_those_named():
    assert len(cases.cases_of("table", 1)) == 11 and len(cases.cases_of("table", 1, reduction="mean")) == 4
    assert {case.vocabulary for case in cases.cases_of("options", 2)} == {128256, 32064}
    named = cases.cases_of("head", 2, ["512x8064", "8x64x32"], "mean")
    assert named == [cases.Case("mean", 512, 8064, 2, 4096), cases.Case("mean", 8, 64, 2, 32)]
    with pytest.raises(ValueError, match="shape: expected TOKENSxVOCABULARY"):
        cases.cases_of("table", 1, ["8x64x"])
    with pytest.raises(ValueError, match="vocabulary: expected a multiple of the 3 ranks, got 64"):
        cases.cases_of("head", 3, ["8x64"])
