"""The README's measured times are those of the committed documents, and say where others win."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.support.bench_documents import TARGETS, document, point, refusal, result, write

SCRIPTS = Path(__file__).parents[1] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import plot_bench
    import report_bench
    from bench import documents

pytestmark = pytest.mark.reference


@pytest.fixture
def one_gpu() -> dict:
    """Mean won by this project, none by another; a refusal, an absent provider, a failed capture."""
    failed = {
        "microseconds_graph": None,
        "ratio_graph": None,
        "graph_error": "RuntimeError:\n  `capture` | no",
    }
    return document(
        result("vocab_parallel_ce", 1.204),
        result("quack-kernels", 1.31),
        result("liger-kernel", 2.5),
        result("vocab_parallel_ce", 1.7, reduction="none", extra_peak_bytes_per_row=80.0, **failed),
        result("quack-kernels", 1.6, reduction="none"),
        refusal("liger-kernel", "OutOfMemoryError", reduction="none"),
    )


@pytest.fixture
def folder(tmp_path: Path, one_gpu: dict) -> Path:
    """A README and results whose section is written."""
    (tmp_path / "results").mkdir()
    write(tmp_path, "bench_table_1gpu.json", one_gpu)
    write(tmp_path, "targets.json", TARGETS)
    readme = f"# Title\n\n{plot_bench.BEGIN}\n\n{plot_bench.END}\n\nThe end.\n"
    (tmp_path / "README.md").write_text(readme)
    assert run(tmp_path, "--write") == 0
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    places = ["--results", str(folder / "results"), "--readme", str(folder / "README.md")]
    return plot_bench.main([*arguments, *places])


def test_committed_section_and_pictures_are_those_of_the_committed_documents(capsys):
    assert plot_bench.main(["--check"]) == 0, capsys.readouterr().out


def test_every_target_of_the_committed_file_is_a_bound_of_a_known_field():
    bounds = report_bench.bounds_by_case(documents.read_targets(documents.RESULTS))
    assert len(bounds) == 15
    assert all(set(of_case.at_most) <= set(report_bench.BOUNDS) for of_case in bounds.values())
    of_mean = {of_case.provider for case, of_case in bounds.items() if case.reduction == "mean"}
    assert of_mean == {documents.IN_FORWARD}
    assert all(case.short_dtype and case.reduction in ("mean", "none") for case in bounds)


def test_table_of_one_number_of_gpus(one_gpu):
    one_gpu["predictions"] = [point(40.0, 48.16), point(60.0, None, reduction="none", ranks=2)]
    assert (
        report_bench.table_part(one_gpu, TARGETS)
        == """\
1 x Imaginary GPU; torch 2.11.0, Triton 3.6.0, CUDA 13.0, Python 3.12.3; quack-kernels 0.6.5, \
liger-kernel 0.6.5; commit 0123456789ab. vocab_parallel_ce's ratios are at most 0.0 % apart over the rounds.

| rows x columns | time / copy | us | predicted us | eager us | CUDA graph us | extra B/row \
| must reach | best other |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
| mean 8 x 100 bf16 | **1.20** | 48.2 | 40.0 (-17 %) | 60.2 | 49.4 | 16.2 | <= 1.25 x copy: met \
| quack-kernels 1.31 |
| none 8 x 100 bf16 | 1.70 | 68.0 | - | 85.0 | - (1) | 80.0 (must be < 64) | \
<= 90 us eager: met; <= 2.00 x copy in a CUDA graph: not measured | quack-kernels **1.60** |

Device time, over the copy: another provider is faster in 1 of 2 cases: \
none 8 x 100 bf16 (quack-kernels 1.60, here 1.70). \
Eager, in us: another provider is faster in 1 of 2 cases: none 8 x 100 bf16 (quack-kernels 80.0, here 85.0). \
CUDA graph, in us: another provider is faster in 1 of 2 cases: \
none 8 x 100 bf16 (quack-kernels 65.6, not timed here).

| time / copy | vocab_parallel_ce | quack-kernels | liger-kernel |
| --- | --- | --- | --- |
| mean 8 x 100 bf16 | **1.20** | 1.31 | 2.50 |
| none 8 x 100 bf16 | 1.70 | **1.60** | - (2) |

(1) vocab_parallel_ce, CUDA graph: `RuntimeError: 'capture' | no`; \
(2) liger-kernel, refused: `OutOfMemoryError`; \
flash-attn, not timed: `not installed: No module named 'flash_attn'`."""
    )


def test_what_waits_for_the_device_is_marked_and_a_graph_not_asked_for_is_a_dash_alone():
    no_graph = {"microseconds_graph": None, "ratio_graph": None}
    ours = result("vocab_parallel_ce", 1.2, graph_error="not asked for", **no_graph)
    table = report_bench.table_part(document(ours, result("liger-kernel", 2.5, queued=False)), TARGETS)
    assert "| 60.0 | - | 16.2 |" in table
    assert "| **1.20** | 2.50 (1) |" in table
    assert "(1) liger-kernel, waits for the device: its time has the host's in it; flash-attn" in table


def test_a_kernel_alone_counts_and_is_explained():
    alone = "quack-kernels (kernel alone)"
    table = report_bench.table_part(document(result("vocab_parallel_ce", 1.2), result(alone, 1.1)), TARGETS)
    assert f"| {alone} **1.10** |" in table
    assert f"({alone} 1.10, here 1.20)" in table
    assert f"{alone}: loss and gradient of one launch, without autograd" in table


def test_reasons_are_shown_without_a_terminals_colours_and_what_was_left_out_is_named():
    red = refusal("quack-kernels", "DSLRuntimeError: \x1b[91m\x1b[1merror:\x1b[0m no\nIR")
    one = document(result("vocab_parallel_ce", 1.2), red)
    one["missing"] = ["64 x 100 bfloat16 mean"]
    table = report_bench.table_part(one, TARGETS)
    assert "(1) quack-kernels, refused: `DSLRuntimeError: error: no IR`;" in table
    assert table.endswith("not measured within the run's time: 64 x 100 bfloat16 mean.")


def test_sections_of_three_numbers_of_gpus_are_short(one_gpu):
    targets = documents.read_targets(documents.RESULTS)
    parts = []
    for ranks, count in ((1, 11), (2, 3), (4, 3)):
        results = [
            result(name, 1.5, rows=rows, ranks=ranks)
            for rows in range(count)
            for name in ("vocab_parallel_ce", "flash-attn")
        ]
        parts.append(report_bench.table_part(document(*results, gpus=ranks), targets))
    lines = [line for part in parts for line in part.splitlines() if line]
    assert len(lines) <= 60


def test_equals_at_two_decimals_are_both_winners():
    table = report_bench.table_part(
        document(result("vocab_parallel_ce", 1.2349), result("quack-kernels", 1.2301)), TARGETS
    )
    assert "| **1.23** | **1.23** |" in table
    assert "quack-kernels **1.23** |" in table
    assert "over the copy: no other provider is faster in any of 1 cases." in table


def test_a_case_that_this_project_refuses_is_lost(one_gpu):
    one_gpu["results"][0] = refusal("vocab_parallel_ce", "OutOfMemoryError")
    table = report_bench.table_part(one_gpu, TARGETS)
    assert "- (1) | - (1) | - (1) | <= 1.25 x copy: not measured | quack-kernels **1.31** |" in table
    assert "mean 8 x 100 bf16 (quack-kernels 1.31, not timed here)" in table


def test_without_another_provider_there_is_no_claim_of_being_faster():
    table = report_bench.table_part(document(result("vocab_parallel_ce", 1.2)), TARGETS)
    assert table.count("no other provider was timed.") == 3


def test_shapes_of_several_gpus_name_the_vocabulary():
    two = document(result("vocab_parallel_ce", 1.5, columns=50, ranks=2), gpus=2)
    table = report_bench.table_part(two, TARGETS)
    assert "| rows x columns of a rank (vocabulary) |" in table
    assert "| mean 8 x 50 (100) bf16 | **1.50** |" in table


def test_targets_are_met_missed_or_not_measured(one_gpu):
    one_gpu["results"][0]["ratio"] = 1.375
    assert (
        report_bench.targets_part({"bench_table_1gpu.json": one_gpu}, TARGETS)
        == """\
1 of 4 targets are met. \
Missed: mean 8 x 100 bf16, 1 GPU (<= 1.25 x copy: missed by 10.0 %). \
Not measured: none 8 x 100 bf16, 1 GPU (<= 2.00 x copy in a CUDA graph); \
none 8 x 50 (100) fp32, 2 GPUs (<= 1.60 x copy)."""
    )


def test_a_target_is_compared_with_the_number_and_not_with_what_is_shown(one_gpu):
    one_gpu["results"][0]["ratio"] = 1.252
    assert "| **1.25** |" in report_bench.table_part(one_gpu, TARGETS)
    assert "<= 1.25 x copy: missed by 0.2 %" in report_bench.table_part(one_gpu, TARGETS)


def test_predictions_over_ranks_stand_beside_what_was_measured(one_gpu):
    assert report_bench.predictions_part({}) == ""
    two = document(result("vocab_parallel_ce", 1.5, columns=50, ranks=2, reduction="none"), gpus=2)
    more = {"reduction": "none", "columns": 25, "ranks": 4}
    one_gpu["predictions"] = [point(45.0, 50.0, reduction="none")]
    two["predictions"] = [
        point(25.0, 60.0, reduction="none", columns=50, ranks=2),
        point(46.0, None, reduction="none"),
        point(450.0, None, **more),
        point(9.0, 9.0, columns=50, ranks=2),
    ]
    part = report_bench.predictions_part({"bench_table_1gpu.json": one_gpu, "bench_table_2gpu.json": two})
    assert "`bench_table_2gpu.json`: copy 4.20 TB/s, launch 3.0 us, all_gather 96 B 20.0 us." in part
    assert part.endswith(
        """
| predicted us (measured) | 1 rank | 2 ranks | 4 ranks |
| --- | --- | --- | --- |
| none 8 x 100 bf16 | 46.0 (50.0) | 25.0 (60.0) | 450 |"""
    )


def test_missing_and_double_measurements_raise(one_gpu):
    missing = copy.deepcopy(one_gpu)
    del missing["results"][1]
    with pytest.raises(ValueError, match="expected a result or a refusal of quack-kernels, got neither"):
        report_bench.table_part(missing, TARGETS)
    with pytest.raises(ValueError, match="expected a result of vocab_parallel_ce"):
        report_bench.table_part(document(result("quack-kernels", 1.3)), TARGETS)
    one_gpu["results"] += one_gpu["results"][:1]
    with pytest.raises(ValueError, match="expected one result of vocab_parallel_ce, got several"):
        report_bench.table_part(one_gpu, TARGETS)
    with pytest.raises(ValueError, match="provider: expected one of those that .*, got 'quack'"):
        report_bench.table_part(document(result("quack", 1.3)), TARGETS)


def test_documents_need_their_commit_and_the_ranks_of_their_name(tmp_path, one_gpu):
    (tmp_path / "results").mkdir()
    write(tmp_path, "bench_table_2gpu.json", one_gpu)
    with pytest.raises(
        ValueError, match=r"bench_table_2gpu.json: ranks of every result must be 2, got \[1\]"
    ):
        documents.read_documents(tmp_path / "results")
    one_gpu["host"]["commit"] = None
    write(tmp_path, "bench_table_2gpu.json", one_gpu)
    with pytest.raises(ValueError, match="bench_table_2gpu.json: host.commit must name the commit"):
        documents.read_documents(tmp_path / "results")
    one_gpu["host"]["commit"] = "0123456789abcdef"
    del one_gpu["predictions"]
    write(tmp_path, "bench_table_2gpu.json", one_gpu)
    with pytest.raises(ValueError, match="2gpu.json: expected the document of a finished run"):
        documents.read_documents(tmp_path / "results")


def test_check_passes_on_what_was_written_and_the_rest_of_the_readme_stays(folder):
    assert run(folder, "--check") == 0
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# Title\n\n") and readme.endswith("\n\nThe end.\n")
    assert run(folder, "--write") == 0
    assert (folder / "README.md").read_text() == readme


def test_a_changed_number_makes_the_check_name_the_table(folder, one_gpu, capsys):
    one_gpu["results"][0]["ratio"] = 1.215
    write(folder, "bench_table_1gpu.json", one_gpu)
    readme = (folder / "README.md").read_text()
    assert run(folder, "--check") == 1
    said = capsys.readouterr().out
    assert "stale: README: Measured on 1 GPU (`bench_table_1gpu.json`)" in said
    assert "Targets" not in said
    assert (folder / "README.md").read_text() == readme


def test_a_number_edited_in_the_readme_makes_the_check_fail(folder):
    readme = folder / "README.md"
    readme.write_text(readme.read_text().replace("**1.20**", "**1.10**"))
    assert run(folder, "--check") == 1


def test_a_document_taken_away_makes_the_check_fail(folder, capsys):
    (folder / "results" / "bench_table_1gpu.json").unlink()
    assert run(folder, "--check") == 1
    assert "Measured on 1 GPU" in capsys.readouterr().out
    assert run(folder, "--write") == 0
    assert plot_bench.split_readme((folder / "README.md").read_text())[1] == report_bench.NOTHING


def test_a_readme_without_its_markers_raises(folder):
    (folder / "README.md").write_text("# Title\n")
    with pytest.raises(ValueError, match="README: expected one '<!-- begin"):
        run(folder, "--check")


def test_the_host_s_part_is_told_where_it_was_measured():
    measured = document(result("vocab_parallel_ce", 1.2))
    assert report_bench.host_time_text(measured) == ""
    times = {"nothing": 50.0, "loss": 120.0, "nothing_one_thread": 22.0, "loss_one_thread": 80.0}
    measured["host_microseconds"] = times
    text = report_bench.host_time_text(measured)
    assert "120 us" in text and "nothing 50.0 us." in text and "80.0 and 22.0 us" in text
    assert text in report_bench.table_part(measured, TARGETS)
    times["all_gather"] = 17.0
    assert "the all_gather alone 17.0 us." in report_bench.host_time_text(measured)
