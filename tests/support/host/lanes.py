"""Lanes: the kinds of environment a test runs in, which of them this host has, and what ran in each.

A test says which lanes it needs with markers of the same names and is skipped where one of them
cannot run. A run reports every lane; a full run in which a lane could run and executed nothing fails.
"""

import importlib.util
import json
import os
import platform
import socket
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from vocab_parallel_ce.integrations import framework_lines
from vocab_parallel_ce.selection import triton_state, triton_version

LANES = {
    "reference": "the plain PyTorch implementation on the CPU",
    "interpreter": "Triton kernels on the CPU under TRITON_INTERPRET=1",
    "gloo": "ranks in real processes on the CPU",
    "compile_only": "Triton kernels compiled for GPUs this host need not have",
    "cuda": "kernels and plain PyTorch on this host's GPU",
    "nccl": "ranks in real processes, one a GPU",
}
UNMARKED = "no lane"


class Host(NamedTuple):
    """What decides which lanes run."""

    gpu_count: int
    has_triton: bool
    interprets: bool
    has_gloo: bool
    has_nccl: bool
    has_loopback: bool = True


def this_host() -> Host:
    """This process's host, found without importing triton."""
    distributed = torch.distributed.is_available()
    return Host(
        gpu_count=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        has_triton=importlib.util.find_spec("triton") is not None,
        interprets=triton_state() == "interpreter",
        has_gloo=distributed and torch.distributed.is_gloo_available(),
        has_nccl=distributed and torch.distributed.is_nccl_available(),
        has_loopback=_loopback_connects(),
    )


def _loopback_connects() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        try:
            socket.create_connection(server.getsockname()).close()
        except OSError:
            return False
    return True


def unavailable_lanes(host: Host) -> dict[str, str]:
    """Lane -> why it cannot run on ``host``; the lanes that can are not in it."""
    reasons: dict[str, str] = {}
    if not host.has_triton:
        for lane in ("interpreter", "compile_only"):
            reasons[lane] = "triton is not installed"
    elif not host.interprets:
        reasons["interpreter"] = (
            "a GPU is present: the same tests run in the cuda lane"
            if host.gpu_count
            else "TRITON_INTERPRET is set, and not to 1"
        )
    if not host.has_gloo:
        reasons["gloo"] = "this torch is built without gloo"
    elif not host.has_loopback:
        reasons["gloo"] = "the loopback interface is down"
    for lane, needed in (("cuda", 1), ("nccl", 2)):
        if host.gpu_count < needed:
            reasons[lane] = f"needs {needed} GPU{'s' * (needed > 1)}, found {host.gpu_count}"
        elif host.interprets:
            reasons[lane] = "TRITON_INTERPRET=1: kernels are interpreted in this process"
        elif not host.has_triton:
            reasons[lane] = "triton is not installed"
    if "nccl" not in reasons and not host.has_nccl:
        reasons["nccl"] = "this torch is built without NCCL"
    return reasons


def left_to_other_lanes(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases that the interpreter, which is slow, does not run: all except one of each test.

    ``@pytest.mark.interpreted(n)`` keeps n, spread from the first to the last, of those whose parameters ``among``
    takes, if given; the kernels' own tests keep all.
    The reference runs every case, and a GPU every compiled one.
    """
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("interpreter") and "tests/kernels/" not in item.nodeid:
            tests[item.nodeid.partition("[")[0]].append(item)
    left_out = set()
    for cases in tests.values():
        marker = cases[0].get_closest_marker("interpreted")
        n, among = marker.args[0] if marker else 1, marker and marker.kwargs.get("among")
        taken = [case for case in cases if not among or among(case.callspec.params)]
        kept = {taken[round(i * (len(taken) - 1) / max(n - 1, 1))] for i in range(n if taken else 0)}
        left_out |= set(cases) - kept if n else set()
    return left_out


def keep_quick_cases(items: Sequence[pytest.Item]) -> None:
    """Take the marker ``quick`` from all except the first cases of a test in each lane.

    Of the kernels' own tests, it marks the first of each file.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for item in items:
        marker, end_of_key = item.get_closest_marker("quick"), "["
        if marker is None and "tests/kernels/" in item.nodeid:
            marker, end_of_key = pytest.mark.quick, "::"
            item.add_marker(marker)
        if marker is not None:
            lanes = (lane for lane in LANES if item.get_closest_marker(lane))
            key = (item.nodeid.partition(end_of_key)[0], *lanes)
            counts[key] += 1
            if counts[key] > (marker.args[0] if marker.args else 1):
                item.own_markers = [mark for mark in item.own_markers if mark.name != "quick"]


class LaneLedger:
    """Outcome of every test, by lane, from the reports of all workers."""

    def __init__(self) -> None:
        self._outcomes: dict[str, str] = {}
        self._lanes: dict[str, tuple[str, ...]] = {}
        self._reasons: dict[str, str] = {}

    def record(self, report: Any) -> None:
        """Take in one ``pytest.TestReport``: setup, call or teardown, in any order."""
        name = report.nodeid
        lanes = tuple(value for key, value in report.user_properties if key == "lane")
        self._lanes[name] = lanes or self._lanes.get(name, ())
        if report.failed:
            self._outcomes[name] = "failed"
        elif self._outcomes.get(name) != "failed" and (report.when == "call" or report.skipped):
            self._outcomes[name] = report.outcome
        if report.skipped and isinstance(report.longrepr, tuple):
            self._reasons[name] = report.longrepr[2].removeprefix("Skipped: ")

    def counts(self) -> dict[str, dict[str, int]]:
        """Lane -> outcome -> number of tests, for every lane and for the tests of no lane."""
        counts = {lane: {"passed": 0, "failed": 0, "skipped": 0} for lane in (*LANES, UNMARKED)}
        for name, outcome in self._outcomes.items():
            for lane in self._lanes[name] or (UNMARKED,):
                counts[lane][outcome] += 1
        return counts

    def reasons(self) -> dict[str, int]:
        """Why tests were skipped -> how many."""
        return dict(Counter(self._reasons.values()).most_common())

    def idle_lanes(self, unavailable: Iterable[str]) -> list[str]:
        """Lanes that could have run and executed nothing."""
        counts = self.counts()
        return [
            lane for lane in LANES if lane not in unavailable and not counts[lane]["passed"] + counts[lane]["failed"]
        ]

    def lines(self, unavailable: dict[str, str]) -> list[str]:
        """One line per lane."""
        lines = []
        for lane, counts in self.counts().items():
            if lane == UNMARKED and not any(counts.values()):
                continue
            text = ", ".join(f"{number:5d} {outcome}" for outcome, number in counts.items())
            if lane in unavailable:
                text += f"   cannot run here: {unavailable[lane]}"
            lines.append(f"{lane:<13}{text}")
        return lines


def write_lanes_json(path: Path, ledger: LaneLedger, host: Host, exit_status: int) -> None:
    """Counts, versions and machine of a run, for a record of it."""
    reasons, counts = unavailable_lanes(host), ledger.counts()
    record = {
        "lanes": {lane: {**counts[lane], "unavailable": reasons.get(lane)} for lane in LANES},
        "no_lane": counts[UNMARKED],
        "skipped_because": ledger.reasons(),
        "exit_status": exit_status,
        "torch": torch.__version__,
        "triton": triton_version(),
        "frameworks": framework_lines(),
        "gpu_model": torch.cuda.get_device_name(0) if host.gpu_count else None,
        "gpu_count": host.gpu_count,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        **_commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="ascii")


def _commit() -> dict[str, str | bool | None]:
    """The commit and whether the tree differs from it; null if there is no history to ask."""
    given = os.environ.get("VPCE_COMMIT")
    if given:
        return {"commit": given.removesuffix("-dirty"), "dirty": given.endswith("-dirty")}
    questions = (("rev-parse", "HEAD"), ("status", "--porcelain"))
    folder = Path(__file__).parent
    try:
        commit, changes = (
            subprocess.check_output(["git", *words], cwd=folder, text=True).strip() for words in questions
        )
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": changes != ""}
