"""A representative set of variants compiles for GPUs that this host need not have, without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vocab_parallel_ce.one_pass import SHARED_MEMORY, WIDTHS

pytestmark = [pytest.mark.compile_only, pytest.mark.timeout(3600)]

REGISTERS = 65_536  # of a multiprocessor
READS, WALKS = ("statistics", "part"), ("gradient", "element_mul")
PAIRS = (
    "divergence_statistics",
    "divergence_part",
    "divergence_second",
    "divergence_gradient",
)  # that walk two tensors together
LARGEST = ("tile_maxima", "equal_and_below", "sums_above")
IDS = ("ids_statistics", "ids_outputs", "ids_gradient", "write_columns")
MERGED_PAIRS = ("divergence_merged",)  # that merge parts of them


def compiled(target: str) -> list[dict]:
    """Return the reports of ``support.compile_kernels``, from a process that does not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.kernels.compile_kernels", target]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    reports = json.loads(run.stdout)
    # docs/triton_reductions.md: an accumulator that its loop reads would be 0 there.
    assert not [report["kernel"] for report in reports if report["moved_sums"]]
    return reports


@pytest.mark.parametrize("target", ("cuda:80", "cuda:100", "cuda:120", "hip:gfx942", "hip:gfx950"))
def test_every_kernel_compiles_and_its_arguments_bind(target):
    """A Triton that lacks a target fails here, under its name: each version of the package's table has all."""
    reports = compiled(target)
    one_pass = {"one_pass"} if target == "cuda:100" else set()
    assert {report["kernel"].split("-")[0] for report in reports} == {
        *READS,
        *WALKS,
        *PAIRS,
        *MERGED_PAIRS,
        "divergence_part_second",
        "divergence_merged_second",
        "merged",
        "outputs",
        "divergence_outputs",
        *LARGEST,
        *IDS,
    } | one_pass
    assert all(report["bytes"] > 0 for report in reports)
    assert not [report["kernel"] for report in reports if report.get("local_bytes")]


def test_sm_90_code_is_wide_and_does_not_spill():
    reports = compiled("cuda:90")
    overlapping = {report["kernel"].split("-")[0] for report in reports if report["overlaps"]}
    parts = {"part", "divergence_part", "divergence_part_second"}
    assert overlapping == {*parts, "merged", *MERGED_PAIRS, "outputs", "gradient"}
    for report in reports:
        assert_waits_if_it_overlaps(report)
        if report["kernel"].startswith("one_pass"):
            assert_fills_a_multiprocessor(report)
            continue
        assert report["local_bytes"] == 0, report
        if report["kernel"].startswith((*READS, *WALKS, *PAIRS)):
            assert "ld.global.v4.b32" in report["loads"], report
        if report["kernel"].startswith((*WALKS, "divergence_gradient")):
            assert "st.global.v4.b32" in report["stores"], report
        # 8 warps of 64 registers: four rows at a time on a multiprocessor of 64 K registers, 16 of scaled gradients
        # two. Kernels of pairs must fit two rows, and may leave four values in memory. So may the statistics of rows
        # with edges under all options. The loss of all options may leave ten.
        is_plain = "-plain-" in report["kernel"] and "-edges-" not in report["kernel"]
        is_large = report["kernel"].startswith((*PAIRS, *MERGED_PAIRS)) or "-edges-all_weighted" in report["kernel"]
        registers, stack_bytes = (128, 16) if is_large and not is_plain else (64, 0)
        # A gradient has 4 warps: seven programs of 72 registers. The large tile of one rank takes them for fp32 logits
        # that become 16 bits. The same with all options and edges takes more: five programs.
        if report["kernel"].startswith("gradient") and ("-R1-to-" in report["kernel"] or not is_plain):
            is_most = "-edges-all_weighted" in report["kernel"] and "-to-" in report["kernel"]
            registers, stack_bytes = (96 if is_most else 72), 0
            if "-plain-" in report["kernel"] and "-R1-to-" in report["kernel"] and report["triton"] >= [3, 9]:
                registers = 80  # six programs
        if report["kernel"].startswith("tile_maxima"):
            registers = 80  # 16 columns a thread, and whether one is NaN: 64 from Triton 3.7 on
        if report["kernel"].startswith("sums_above"):
            registers = 168  # int64 sums above eight numbers, of eight columns a thread
        if report["kernel"].startswith(IDS):
            registers = 96  # one warp a row: as many as a multiprocessor has room for
        if report["kernel"].startswith("outputs-all"):
            registers, stack_bytes = (64 if report["threads"] == 1024 else 96), 40
        assert report["registers"] <= registers, report
        assert report["stack_bytes"] <= stack_bytes, report
        if "_units" in report["kernel"]:
            # What a thread adds up itself must not depend on the number of warps, which is that of units.
            assert {elements for _, elements in report["of_a_thread"]} <= {"1", "1, 8"}, report


def assert_waits_if_it_overlaps(report: dict) -> None:
    """A launch that begins before the one before has ended reads and writes nothing until then."""
    assert report["overlaps"] == (report["waits"] >= 0), report
    assert not report["overlaps"] or report["waits"] < report["accesses"], report


def assert_fills_a_multiprocessor(report: dict) -> None:
    """Check that ctas_per_sm programs fit at once, and that each thread copies 16 bytes."""
    assert report["copies"] == ["cp.async.cg.shared.global 16"], report
    assert "st.global.v4.b32" in report["stores"], report
    assert report["registers"] <= REGISTERS // (report["threads"] * report["ctas_per_sm"]), report
    # The system uses 1 KB of each program's shared memory.
    shared_bytes = (report["shared_bytes"] + 1024) * report["ctas_per_sm"]
    assert shared_bytes <= SHARED_MEMORY + 1024, report
    # The widest rows leave up to 28 values in memory with Triton 3.6 and 3.7, and up to 50 with 3.9; others with
    # options or edges 24, and 40. Plain rows leave none, and 14: four took 27 % more time (128,256 bytes; H100, 3.6).
    is_new = report["triton"] >= [3, 9]
    is_plain = "-plain-" in report["kernel"] and "-edges-" not in report["kernel"]
    most = (56 if is_new else 0) if is_plain else 160 if is_new else 96
    if report["kernel"].endswith(f"-{WIDTHS[-1][1]}"):
        most = 200 if is_new else 112
    assert report["stack_bytes"] <= most and report["local_bytes"] == 0, report
