"""The pictures of the sweeps: drawn from the committed documents, and what their lines and limits are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.bench_documents import TARGETS, document, refusal, result, write

SCRIPTS = Path(__file__).parents[1] / "scripts"
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(SCRIPTS)
    import plot_bench
    from bench import documents, others

pytestmark = pytest.mark.reference


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
def folder(tmp_path: Path) -> Path:
    """A README and results without a table."""
    (tmp_path / "results").mkdir()
    write(tmp_path, "targets.json", TARGETS)
    (tmp_path / "README.md").write_text(f"# Title\n\n{plot_bench.BEGIN}\n\n{plot_bench.END}\n")
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    places = ["--results", str(folder / "results"), "--readme", str(folder / "README.md")]
    return plot_bench.main([*arguments, *places])


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


def test_the_limit_is_one_pass_for_a_mean_on_one_rank_alone():
    cases = [
        documents.Case(reduction, 8, 100, ranks, "bfloat16")
        for reduction, ranks in (("mean", 1), ("mean", 2), ("none", 1))
    ]
    assert [plot_bench.limit_of(case) for case in cases] == [1.0, 1.5, 1.5]


def test_every_provider_of_the_benchmark_has_its_own_look_in_grey():
    assert {provider.name for provider in others.PROVIDERS} == set(documents.PROVIDERS)
    assert len({look[1:] for look in plot_bench.STYLES.values()}) == len(documents.PROVIDERS)


def test_formulas_say_where_a_provider_has_which(sweep):
    for measured in sweep["results"]:
        if measured["provider"] == "vocab_parallel_ce" and measured["reduction"] == "mean":
            measured["bytes_formula"] = "2 * rows * columns * element_size"
    assert documents.formulas_of(sweep, "tokens") == {
        "2 * rows * columns * element_size": ["vocab_parallel_ce (mean, tokens 64 to 16384)"],
        "3 * rows * columns * element_size": [
            "vocab_parallel_ce (none, tokens 64 to 16384)",
            "megatron-core",
        ],
    }
