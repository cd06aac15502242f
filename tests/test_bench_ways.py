"""The report of a mean that is timed in both ways: by default, in backward, and asked for in forward."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from tests.support.bench_documents import TARGETS, document, point, refusal, result, write

SCRIPTS = Path(__file__).parents[1] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import plot_bench
    import report_bench
    from bench import comparison, documents

pytestmark = pytest.mark.reference

OURS, IN_FORWARD = documents.WAYS


@pytest.fixture
def both() -> dict:
    """A mean whose default loses to another provider, and whose second way wins; an unreduced loss."""
    one = document(
        result(OURS, 1.57, gradient="in_backward", extra_peak_bytes_per_row=12.0),
        result(IN_FORWARD, 1.204, gradient="in_forward"),
        result("quack-kernels", 1.31),
        result(OURS, 1.6, reduction="none", gradient="in_backward"),
        refusal(IN_FORWARD, "for reduced losses", reduction="none"),
        result("quack-kernels", 1.7, reduction="none"),
    )
    one["predictions"] = [point(60.0, 62.8), point(40.0, 48.16, provider=IN_FORWARD)]
    return one


@pytest.fixture
def targets() -> dict:
    changed = copy.deepcopy(TARGETS)
    changed["cases"][0]["provider"] = IN_FORWARD
    return changed


def test_a_mean_has_a_row_and_a_column_for_each_way(both, targets):
    table = report_bench.table_part(both, targets)
    assert f'`{OURS}` is the default, `gradient="auto"`, which is in backward; the rows "in_forward"' in table
    main = """
| mean 8 x 100 bf16 | 1.57 | 62.8 | 60.0 (-4 %) | 78.5 | 64.4 | 12.0 |  | quack-kernels 1.31 |
| mean 8 x 100 bf16, in_forward | **1.20** | 48.2 | 40.0 (-17 %) | 60.2 | 49.4 | 16.2 \
| <= 1.25 x copy: met | quack-kernels 1.31 |
| none 8 x 100 bf16 | **1.60** | 64.0 | - | 80.0 | 65.6 | 16.2 \
| <= 90 us eager: met; <= 2.00 x copy in a CUDA graph: met | quack-kernels 1.70 |
"""
    assert main in table
    every = f"""
| time / copy | {OURS} | {IN_FORWARD} | quack-kernels |
| --- | --- | --- | --- |
| mean 8 x 100 bf16 | 1.57 | **1.20** | 1.31 |
| none 8 x 100 bf16 | **1.60** | - (1) | 1.70 |
"""
    assert every in table and f"(1) {IN_FORWARD}, refused: `for reduced losses`;" in table


def test_who_is_faster_is_told_of_the_better_way_and_of_the_default(both, targets):
    table = report_bench.table_part(both, targets)
    better, default = (line for line in table.splitlines() if "Device time" in line)
    assert better.startswith(f"The other providers beside the faster of `{OURS}` and `{IN_FORWARD}`: ")
    assert "over the copy: no other provider is faster in any of 2 cases." in better
    assert default.startswith(f"Beside the default `{OURS}` alone, in the 1 cases that have both: ")
    lost = "faster in 1 of 1 cases: mean 8 x 100 bf16 (quack-kernels 1.31, here 1.57)."
    assert f"over the copy: another provider is {lost}" in default
    both["results"][1]["ratio"] = 1.4
    better = report_bench.table_part(both, targets)
    assert "1 of 2 cases: mean 8 x 100 bf16 (quack-kernels 1.31, here 1.40)." in better


def test_the_rounds_of_both_ways_count_for_the_spread(both, targets):
    both["results"][1]["ratio_spread"] = [1.204, 1.3244]
    assert "ratios are at most 10.0 % apart" in report_bench.table_part(both, targets)


def test_a_target_is_compared_with_the_way_that_it_names(both, targets):
    name = "bench_table_1gpu.json"
    part = report_bench.targets_part({name: both}, targets)
    assert part.startswith(
        f"3 of 4 targets are met. Those of a mean are of `{IN_FORWARD}`. Not measured: none"
    )
    both["results"][1]["ratio"] = 1.5
    part = report_bench.targets_part({name: both}, targets)
    assert "Missed: mean 8 x 100 bf16, in_forward, 1 GPU (<= 1.25 x copy: missed by 20.0 %)." in part
    del both["results"][4], both["results"][1], both["host"]["providers"][IN_FORWARD]
    part = report_bench.targets_part({name: both}, targets)
    assert "2 of 4 targets are met. Not measured: mean 8 x 100 bf16, 1 GPU (<= 1.25 x copy);" in part
    assert "| <= 1.25 x copy: not measured | quack-kernels **1.31** |" in report_bench.table_part(
        both, targets
    )


def test_the_default_of_an_earlier_document_was_in_forward(targets):
    earlier = document(result(OURS, 1.204), result("quack-kernels", 1.31))
    table = report_bench.table_part(earlier, targets)
    assert "| mean 8 x 100 bf16 | **1.20** | 48.2 |" in table and "<= 1.25 x copy: met" in table
    assert "in_forward" not in table
    part = report_bench.targets_part({"bench_table_1gpu.json": earlier}, targets)
    assert part.startswith("1 of 4 targets are met. Not measured: none")


def test_where_nothing_is_reduced_there_is_one_way_and_the_reason(targets):
    several = {"reduction": "none", "columns": 50, "ranks": 2}
    two = document(
        result(OURS, 1.5, gradient="in_backward", **several),
        refusal(IN_FORWARD, "for reduced losses", **several),
        result("flash-attn", 1.8, **several),
        gpus=2,
    )
    table = report_bench.table_part(two, targets)
    assert f"| time / copy | {OURS} | flash-attn |" in table and "beside the faster of" not in table
    assert f"{IN_FORWARD}, not timed: `for reduced losses`" in table
    assert "no other provider is faster in any of 1 cases." in table


def test_an_earlier_sweep_beside_newer_tables_says_what_its_default_was(both, targets):
    sweep = document(*(result(OURS, 1.2, rows=rows) for rows in (8, 16)))
    title = "Against tokens (`bench_sweep_tokens_1gpu.json`)"
    read = {"bench_table_1gpu.json": both, "bench_sweep_tokens_1gpu.json": sweep}
    said = f"The default of a mean was in_forward then: its `{OURS}` is what `{IN_FORWARD}` is above."
    assert plot_bench.parts_of(read, targets, "results")[title].startswith(f"{said}\n\n![Time over copy")
    del read["bench_table_1gpu.json"]
    assert plot_bench.parts_of(read, targets, "results")[title].startswith("![Time over copy")
    newer = document(*(result(OURS, 1.6, rows=rows, gradient="in_backward") for rows in (8, 16)))
    read |= {"bench_table_1gpu.json": both, "bench_sweep_tokens_1gpu.json": newer}
    assert plot_bench.parts_of(read, targets, "results")[title].startswith("![Time over copy")


def test_runs_are_compared_by_when_the_gradient_is_written(both, tmp_path, capsys):
    earlier = document(result(OURS, 1.18), result(OURS, 1.62, reduction="none"), result("quack-kernels", 2.0))
    (tmp_path / "results").mkdir()
    paths = [str(tmp_path / "results" / name) for name in ("old.json", "new.json")]
    for name, content in (("old.json", earlier), ("new.json", both)):
        write(tmp_path, name, content)
    assert plot_bench.main(["--compare", *paths]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[5:] for line in lines] == [
        [OURS, "-", "1.570", "-"],
        [IN_FORWARD, "1.180", "1.204", "+2.0", "%"],
        [OURS, "1.620", "1.600", "-1.2", "%"],
    ]
    assert comparison.compared_runs(both, both).count("+0.0 %") == 3
    both["results"][3] = refusal(OURS, "OutOfMemoryError", reduction="none")
    assert comparison.compared_runs(earlier, both).splitlines()[-1].split()[6:] == ["1.620", "-", "-"]
    assert json.loads(Path(paths[0]).read_text()) == earlier
