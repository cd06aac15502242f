"""Lanes: which can run where, what is counted, and that an idle lane fails a full run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.lanes import LANES, UNMARKED, Host, LaneCounts, LaneLedger, unavailable_lanes

CPU = Host(gpu_count=0, has_triton=True, interprets=True, has_gloo=True, has_nccl=False)
TESTS = Path(__file__).parents[1]
SUITE = """
import pytest

@pytest.mark.reference
def test_reference(): pass

@pytest.mark.reference
def test_reference_skipped(): pytest.skip("planted")

@pytest.mark.interpreter
def test_interpreter(): pass

@pytest.mark.gloo
@pytest.mark.compile_only
def test_two_lanes(): pass

@pytest.mark.cuda
def test_cuda(): pass

@pytest.mark.nccl
def test_nccl(): pass

def test_no_lane(): pass
"""


def _report(name, when, outcome, *lanes):
    return SimpleNamespace(
        nodeid=name,
        when=when,
        outcome=outcome,
        failed=outcome == "failed",
        skipped=outcome == "skipped",
        user_properties=[("lane", lane) for lane in lanes],
    )


def _ledger(*reports):
    ledger = LaneLedger()
    for report in reports:
        ledger.record(report)
    return ledger


@pytest.mark.parametrize(
    ("change", "unavailable"),
    [
        ({}, {"cuda", "nccl"}),
        ({"has_triton": False, "interprets": False}, {"interpreter", "compile_only", "cuda", "nccl"}),
        ({"interprets": False}, {"interpreter", "cuda", "nccl"}),
        ({"has_gloo": False}, {"gloo", "cuda", "nccl"}),
        ({"gpu_count": 1, "interprets": False, "has_nccl": True}, {"interpreter", "nccl"}),
        ({"gpu_count": 2, "interprets": False, "has_nccl": True}, {"interpreter"}),
        ({"gpu_count": 2, "interprets": False}, {"interpreter", "nccl"}),
        ({"gpu_count": 4, "has_nccl": True}, {"cuda", "nccl"}),
    ],
)
def test_a_host_says_which_lanes_it_lacks_and_why(change, unavailable):
    reasons = unavailable_lanes(CPU._replace(**change))
    assert set(reasons) == unavailable
    assert all(reasons.values())


def test_a_gpu_host_says_where_the_interpreters_tests_run():
    gpu = CPU._replace(gpu_count=1, interprets=False, has_nccl=True)
    assert unavailable_lanes(gpu) == {
        "interpreter": "a GPU is present: the same tests run in the cuda lane",
        "nccl": "needs 2 GPUs, found 1",
    }


def test_one_test_is_counted_once_in_each_of_its_lanes_with_its_worst_phase():
    ledger = _ledger(
        *(_report("a", when, "passed", "reference") for when in ("setup", "call", "teardown")),
        _report("b", "setup", "passed", "gloo", "interpreter"),
        _report("b", "call", "failed", "gloo", "interpreter"),
        _report("b", "teardown", "passed", "gloo", "interpreter"),
        _report("c", "setup", "skipped", "cuda"),
        _report("c", "teardown", "passed", "cuda"),
        _report("d", "setup", "failed", "reference"),
        _report("e", "call", "passed", "reference"),
        _report("e", "teardown", "failed", "reference"),
        _report("f", "call", "passed"),
    )
    counts = ledger.counts()
    assert counts["reference"] == LaneCounts(passed=1, failed=2, skipped=0)
    assert counts["gloo"] == counts["interpreter"] == LaneCounts(passed=0, failed=1, skipped=0)
    assert counts["cuda"] == LaneCounts(passed=0, failed=0, skipped=1)
    assert counts[UNMARKED] == LaneCounts(passed=1, failed=0, skipped=0)


def test_a_lane_whose_tests_were_all_skipped_is_idle():
    ledger = _ledger(
        _report("a", "call", "passed", "reference"),
        _report("b", "setup", "skipped", "gloo"),
        _report("c", "call", "failed", "interpreter"),
    )
    assert ledger.idle_lanes(unavailable_lanes(CPU)) == ["gloo", "compile_only"]
    assert set(ledger.idle_lanes({})) == set(LANES) - {"reference", "interpreter"}


def test_every_lane_has_a_line_and_those_that_cannot_run_a_reason():
    lines = LaneLedger().lines({"cuda": "needs 1 GPU, found 0"})
    assert [line.split()[0] for line in lines] == list(LANES)
    assert [line for line in lines if "cannot run here: needs 1 GPU, found 0" in line]


@pytest.fixture
def suite(tmp_path):
    """A small suite under this project's conftest, and a function that runs it in a fresh process."""
    shutil.copytree(TESTS / "support", tmp_path / "tests" / "support")
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(TESTS / name, tmp_path / "tests" / name)
    (tmp_path / "tests" / "test_suite.py").write_text(SUITE)

    def run(*arguments):
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        environment["VPCE_COMMIT"] = "0123abc-dirty"
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
        )

    run.directory = tmp_path
    return run


def test_a_full_run_reports_every_lane_and_writes_the_record(suite):
    path = suite.directory / "out" / "lanes.json"
    result = suite("--lanes-json", str(path))
    assert result.returncode == 0, result.stdout
    record = json.loads(path.read_text())
    assert set(record["lanes"]) == set(LANES)
    reference = {"passed": 1, "failed": 0, "skipped": 1, "unavailable": None}
    assert record["lanes"]["reference"] == reference
    assert record["no_lane"]["passed"] == 1
    for lane in record["lanes"].values():
        executed = lane["passed"] + lane["failed"]
        assert (executed == 0) == (lane["unavailable"] is not None)
    assert (record["commit"], record["dirty"]) == ("0123abc", True)
    assert {"torch", "triton", "gpu_model", "gpu_count", "python", "platform"} <= set(record)


def test_a_full_run_with_an_idle_lane_fails_and_a_selection_does_not(suite):
    path = suite.directory / "tests" / "test_suite.py"
    path.write_text(SUITE.replace("@pytest.mark.gloo\n", ""))
    result = suite()
    assert result.returncode == 1
    assert "gloo: can run here and executed nothing; the run fails" in result.stdout
    assert suite("-k", "reference").returncode == 0


def test_workers_reports_are_added_up(suite):
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    path = suite.directory / "lanes.json"
    result = suite("-n", "2", "--lanes-json", str(path))
    assert result.returncode == 0, result.stdout
    record = json.loads(path.read_text())
    assert record["lanes"]["reference"]["passed"] == 1
    assert record["lanes"]["gloo"] == record["lanes"]["compile_only"]
    assert record["lanes"]["gloo"]["passed"] == 1
