"""The README's measured times are those of the committed documents, and say where others win."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import plot_bench
    import report_bench

pytestmark = pytest.mark.reference

TARGETS = {
    "extra_peak_bytes_per_row_below": 64,
    "cases": [
        {
            "ranks": 1,
            "reduction": "mean",
            "rows": 8,
            "vocabulary": 100,
            "dtype": "bfloat16",
            "at_most": {"ratio": 1.25},
        },
        {
            "ranks": 1,
            "reduction": "none",
            "rows": 8,
            "vocabulary": 100,
            "dtype": "bfloat16",
            "at_most": {"microseconds_eager": 90, "ratio_graph": 2.0},
        },
        {
            "ranks": 2,
            "reduction": "none",
            "rows": 8,
            "vocabulary": 100,
            "dtype": "float32",
            "at_most": {"ratio": 1.6},
        },
    ],
}


def result(provider: str, ratio: float, **changes: object) -> dict:
    numbers = {
        "rows": 8,
        "columns": 100,
        "ranks": 1,
        "dtype": "bfloat16",
        "reduction": "mean",
        "provider": provider,
        "ratio": ratio,
        "ratio_spread": [ratio, ratio],
        "microseconds": 40.0 * ratio,
        "microseconds_eager": 50.0 * ratio,
        "ratio_eager": 1.25 * ratio,
        "microseconds_graph": 41.0 * ratio,
        "ratio_graph": 1.1 * ratio,
        "copy_microseconds": 40.0,
        "bytes_formula": "3 * rows * columns * element_size",
        "terabytes_per_second": 4.0 / ratio,
        "extra_peak_bytes_per_row": 16.25,
        "max_error": 1e-3,
    }
    return numbers | changes


def refusal(provider: str, why: str, **changes: object) -> dict:
    case = {"rows": 8, "columns": 100, "ranks": 1, "dtype": "bfloat16", "reduction": "mean"}
    return case | {"provider": provider, "refused": why} | changes


def document(*results: dict, gpus: int = 1) -> dict:
    return {
        "host": {
            "gpu": "Imaginary GPU",
            "gpus_used": gpus,
            "torch": "2.11.0",
            "triton": "3.6.0",
            "cuda": "13.0",
            "python": "3.12.3",
            "commit": "0123456789abcdef",
            "providers": {"quack-kernels": "0.6.5"},
        },
        "absent": {"flash-attn": "not installed: No module named 'flash_attn'"},
        "latency": {
            "all_gather_microseconds": {"96": 20.0},
            "launch_microseconds": 3.0,
            "copy_terabytes_per_second": 4.2,
        },
        "results": list(results),
    }


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
def sweep() -> dict:
    results = []
    for rows in (64, 1024, 16384):
        for reduction in ("mean", "none"):
            case = {"rows": rows, "reduction": reduction}
            results += [result("vocab_parallel_ce", 1.2, **case), result("megatron-core", 12.8, **case)]
            results.append(refusal("liger-kernel", "unsupported", **case))
    results[-2] = refusal("megatron-core", "OutOfMemoryError", rows=16384, reduction="none")
    return document(*results)


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


def write(folder: Path, name: str, content: dict) -> None:
    (folder / "results" / name).write_text(json.dumps(content))


def run(folder: Path, *arguments: str) -> int:
    places = ["--results", str(folder / "results"), "--readme", str(folder / "README.md")]
    return plot_bench.main([*arguments, *places])


def test_committed_section_and_pictures_are_those_of_the_committed_documents(capsys):
    assert plot_bench.main(["--check"]) == 0, capsys.readouterr().out


def test_every_target_of_the_committed_file_is_a_bound_of_a_known_field():
    bounds = report_bench.bounds_by_case(report_bench.read_targets(report_bench.RESULTS))
    assert len(bounds) == 15
    assert all(set(of_case) <= set(report_bench.BOUNDS) for of_case in bounds.values())
    assert all(case.short_dtype and case.reduction in plot_bench.LIMITS for case in bounds)


def test_table_of_one_number_of_gpus(one_gpu):
    assert (
        report_bench.table_part(one_gpu, TARGETS)
        == """\
1 x Imaginary GPU; torch 2.11.0, Triton 3.6.0, CUDA 13.0, Python 3.12.3; quack-kernels 0.6.5; \
commit 0123456789ab.

| reduction | rows x columns | dtype | time / copy | us | eager us | CUDA graph us | extra B/row \
| must reach | best other |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
| mean | 8 x 100 | bf16 | **1.20** | 48.2 | 60.2 | 49.4 | 16.2 | <= 1.25 x copy: met | quack-kernels 1.31 |
| none | 8 x 100 | bf16 | 1.70 | 68.0 | 85.0 | - (1) | 80.0 (must be < 64) | \
<= 90 us eager: met; <= 2.00 x copy in a CUDA graph: not measured | quack-kernels **1.60** |

- Device time, over the copy: another provider is faster in 1 of 2 cases: \
none 8 x 100 bf16 (quack-kernels 1.60, here 1.70).
- Eager, in us: another provider is faster in 1 of 2 cases: none 8 x 100 bf16 (quack-kernels 80.0, here 85.0).
- CUDA graph, in us: another provider is faster in 1 of 2 cases: \
none 8 x 100 bf16 (quack-kernels 65.6, not timed here).

| time / copy | vocab_parallel_ce | quack-kernels | flash-attn | liger-kernel |
| --- | --- | --- | --- | --- |
| mean, 8 x 100, bf16 | **1.20** | 1.31 | - (2) | 2.50 |
| none, 8 x 100, bf16 | 1.70 | **1.60** | - (2) | - (3) |

- (1) vocab_parallel_ce, CUDA graph: `RuntimeError: 'capture' | no`
- (2) flash-attn, absent: `not installed: No module named 'flash_attn'`
- (3) liger-kernel, refused: `OutOfMemoryError`"""
    )


def test_equals_at_two_decimals_are_both_winners():
    table = report_bench.table_part(
        document(result("vocab_parallel_ce", 1.2349), result("quack-kernels", 1.2301)), TARGETS
    )
    assert "| **1.23** | **1.23** | - (1) |" in table
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
    assert "| mean | 8 x 50 (100) | bf16 | **1.50** |" in table


def test_targets_are_met_missed_or_not_measured(one_gpu):
    documents = {"bench_table_1gpu.json": one_gpu}
    one_gpu["results"][0]["ratio"] = 1.375
    assert (
        report_bench.targets_part(documents, TARGETS)
        == """\
- 1 of 4 targets are met.
- Missed: mean 8 x 100 bf16, 1 GPU (<= 1.25 x copy: missed by 10.0 %).
- Not measured: none 8 x 100 bf16, 1 GPU (<= 2.00 x copy in a CUDA graph); \
none 8 x 50 (100) fp32, 2 GPUs (<= 1.60 x copy)."""
    )


def test_a_target_is_compared_with_the_number_and_not_with_what_is_shown(one_gpu):
    one_gpu["results"][0]["ratio"] = 1.252
    assert "| **1.25** |" in report_bench.table_part(one_gpu, TARGETS)
    assert "<= 1.25 x copy: missed by 0.2 %" in report_bench.table_part(one_gpu, TARGETS)


def test_predictions_stand_beside_what_was_measured(one_gpu):
    assert report_bench.predictions_part({"bench_table_1gpu.json": one_gpu}) == ""
    shape = {"rows": 8, "columns": 100}
    one_gpu["predictions"] = [
        {**shape, "ranks": 1, "predicted_microseconds": 45.0, "measured_microseconds": 50.0},
        {**shape, "ranks": 64, "predicted_microseconds": 450.0, "measured_microseconds": None},
    ]
    part = report_bench.predictions_part({"bench_table_1gpu.json": one_gpu})
    assert "copy 4.20 TB/s, launch 3.0 us, all_gather 96 B 20.0 us." in part
    assert "| 1 | 8 | 100 | 45.0 | 50.0 | -10.0 % |" in part
    assert "| 64 | 8 | 100 | 450 | - | - |" in part


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
    with pytest.raises(ValueError, match="provider: expected one of .*, got 'quack'"):
        report_bench.table_part(document(result("quack", 1.3)), TARGETS)


def test_documents_need_their_commit_and_the_ranks_of_their_name(tmp_path, one_gpu):
    (tmp_path / "results").mkdir()
    write(tmp_path, "bench_table_2gpu.json", one_gpu)
    with pytest.raises(
        ValueError, match=r"bench_table_2gpu.json: ranks of every result must be 2, got \[1\]"
    ):
        report_bench.read_documents(tmp_path / "results")
    one_gpu["host"]["commit"] = None
    write(tmp_path, "bench_table_2gpu.json", one_gpu)
    with pytest.raises(ValueError, match="bench_table_2gpu.json: host.commit must name the commit"):
        report_bench.read_documents(tmp_path / "results")


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


def test_sweeps_are_drawn_the_same_twice_and_their_pictures_checked(folder, sweep, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib, which draws, is not installed")
    write(folder, "bench_sweep_tokens_1gpu.json", sweep)
    assert run(folder, "--check") == 1
    assert "bench_sweep_tokens_1gpu.png: not drawn from this" in capsys.readouterr().out
    assert run(folder, "--write") == 0
    assert run(folder, "--check") == 0
    picture = folder / "results" / "bench_sweep_tokens_1gpu.png"
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG\r\n\x1a\n") and len(drawn) <= plot_bench.LARGEST_PNG
    assert "](results/bench_sweep_tokens_1gpu.png)" in (folder / "README.md").read_text()
    plot_bench.draw(sweep, "tokens", picture)
    assert picture.read_bytes() == drawn
    sweep["results"][0]["ratio"] = 1.3
    write(folder, "bench_sweep_tokens_1gpu.json", sweep)
    assert run(folder, "--check") == 1
    shutil.copy(SCRIPTS / "results" / "train_lm_2gpu.png", picture)
    assert plot_bench.drawn_digest(picture) is None


def test_a_line_breaks_where_a_provider_refused(sweep):
    cases = plot_bench.panels_of(sweep)["none", "bfloat16"]
    places, values = plot_bench.series(cases, "tokens", "megatron-core", "ratio")
    assert places == [64, 1024, 16384]
    assert values == pytest.approx([12.8, 12.8, float("nan")], nan_ok=True)


def test_labels_are_apart_in_order_and_inside():
    placed = plot_bench.spread([0.5, 0.51, 0.99, 1.0, 0.98], 0.1)
    ordered = sorted(placed)
    assert placed[0] < placed[1] < placed[4] < placed[2] < placed[3] <= 1.0
    assert all(high - low > 0.1 - 1e-9 for low, high in zip(ordered, ordered[1:], strict=False))
