"""The pages are those of the committed documents, their numbers are compared rightly, and what is refused."""

import json
import shutil

import pytest

from tests.bench.support import EAGER, IN_FORWARD, ONE_PASS, OURS, SCRIPTS, TRITON, document, result

import bench  # isort: skip
from bench_lib import cases, documents, overview, pages, pictures, tables  # isort: skip

pytestmark = pytest.mark.reference

ROOT = SCRIPTS.parent
MEAN, NONE = (cases.Case(kind, 8192, 32064, 1) for kind in ("mean", "none"))
COMMITTED = documents.read_documents(documents.RESULTS)


def test_the_pages_and_the_pictures_are_those_of_the_documents():
    assert bench.main(["report", "--check"]) == 0
    assert "{{" not in (ROOT / "docs" / "performance.md").read_text()


def test_the_check_names_what_is_stale_and_write_renews_it(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    shutil.copytree(documents.RESULTS, results)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    place = ["--root", str(tmp_path), "--results", str(results)]
    for path in (results / "bench_table_1gpu.json", results / "bench_table_2gpu.json"):
        content = json.loads(path.read_text())
        for each in content["results"]:
            if "ratio" in each:
                each["ratio"] += 1
        documents.write_document(content, path)
    assert bench.main(["report", "--check", *place]) == 1
    said = capsys.readouterr().out
    for stale in ("performance.md", "README.md", pictures.RATIOS):
        assert f"stale: {stale}; python scripts/bench.py report --write renews it" in said
    assert bench.main(["report", "--write", *place]) == 0
    assert bench.main(["report", "--check", *place]) == 0
    assert (results / pictures.RATIOS).stat().st_size < 200_000


def test_the_committed_documents_are_complete():
    """Every case of the tables, each with every provider, and this project timed in each."""
    for name, content in COMMITTED.items():
        found = documents.results_by_case(content)
        if "table" in name:
            kinds = {case.kind for case in found}
            assert len({(case.kind, frozenset(results)) for case, results in found.items()}) == len(kinds), name
            command = "head" if name.startswith("linear") else "table"
            assert set(cases.cases_of(command, content["host"]["gpus_used"])) == set(found), name
            assert all(documents.is_timed(results[OURS]) for results in found.values()), name


def test_a_table_has_the_fastest_in_bold_and_says_who_is_refused_and_who_is_faster_eagerly():
    said = tables.logits_part(
        document(
            result(OURS, 1.57, MEAN, microseconds_eager=78.5, peak_bytes=16.25 * 8192),
            result(IN_FORWARD, 1.204, MEAN, microseconds_eager=60.2),
            result("quack-kernels", 1.31, MEAN, microseconds_eager=50.0),
            result(EAGER, 13.2, MEAN, queued=False, microseconds_eager=660.0),
            result(OURS, 1.6, NONE, microseconds_eager=80.0, peak_bytes=16.25 * 8192),
            NONE._asdict() | {"provider": "quack-kernels", "refused": "\x1b[91mwidth\x1b[0m | `odd`"},
        )
    )
    assert f"| {MEAN} | 1.57 | **1.20** | 1.31 | 13.2 | 78.5 | 16.2 |" in said and f"| {NONE} | **1.60** | - |" in said
    assert f"provider's is faster than this project's fastest: {MEAN} (quack-kernels 50.0 / 60.2)." in said
    assert f"- {EAGER}: waits for the device" in said and "`width / 'odd'`" in said


def test_targets_are_compared_with_the_number_itself_and_a_means_with_in_forward():
    linear = cases.Case("mean", 16384, 32064, 1, 4096)
    of_table = [result(OURS, 1.57, MEAN), result(IN_FORWARD, 1.204, MEAN), result(OURS, 1.6, NONE)]
    found = {"bench_table_1gpu": document(*of_table), "linear_table_1gpu": document(result(OURS, 1.0701, linear))}
    of_cases = [{"case": case, "provider": "distillation, js", "ratio": r} for case, r in (("a", 2.75), ("b", 2.8))]
    text = pages.targets_block(found | {"losses_1gpu": document(*of_cases)})
    assert "| distillation, js, 1 GPU | <= 2.75 x copy | 2.750 (a), 2.800 (b) | **missed** |" in text
    assert "| mean 8192 x 32064 bf16, 1 GPU, in_forward | <= 1.25 x copy | 1.204 | met |" in text
    assert "| none 8192 x 32064 bf16, 1 GPU | <= 1.58 x copy | 1.6 | **missed** |" in text
    assert "| mean 16384 x 32064 x 4096, 1 GPU | <= 1.07 x matmuls | 1.07 | **missed** |" in text
    assert "| <= 0.5 GiB over an fp32 gradient of the weight | 1.511 | **missed** |" in text
    assert text.startswith("1 of 34 targets are met.")


@pytest.mark.parametrize("in_forward, by_name, said", [(0.0510, 0.051, []), (0.0511, 0.050, [1.02]), (0.06, 0.03, [2])])
def test_a_mode_is_compared_with_the_fastest_that_may_run_in_its_place(in_forward, by_name, said):
    """A mode asked for by name must not be slower than the default. Two hundredths are noise."""
    case = cases.Case("mean", 16, 128256, 1)
    times = {OURS: 0.055, IN_FORWARD: in_forward, TRITON: by_name}
    results = [result(name, 1.0, case, ms=ms) for name, ms in times.items()]
    results.append(case._asdict() | {"provider": ONE_PASS, "refused": "rows of a width"})
    assert tables.slower_modes(document(*results)) == [
        f"slower: mean 16 x 128256 bf16: {IN_FORWARD} {1e3 * in_forward:.2f} us, {ratio:.2f} x {TRITON}"
        for ratio in said
    ]


def test_where_a_line_loses_is_the_worst_beyond_the_quartiles():
    def of(ms, gib, spread=0.0):
        return {"ms": ms, "ms_quartiles": [ms - spread, ms + spread], "peak_bytes": gib * 2**30}

    few = {"its own": of(1.0, 1.0), OURS: of(1.25, 1.0), "fused": of(1.1, 0.5)}
    many = {"its own": of(52.3, 3.5, spread=4.0), OURS: of(53.1, 3.5, spread=4.0)}
    compared = [("its own", OURS), ("fused", OURS)]
    said = overview.where_it_loses(compared, {"few tokens": few, "many tokens": many})
    assert said == "few tokens: 1.25 ms, its own 1.00<br>few tokens: 1.00 GiB, fused 0.50"
    assert overview.where_it_loses(compared, {"many tokens": many}) == "-"


def test_runs_are_compared_case_by_case(tmp_path, capsys):
    old, new = document(result(OURS, 1.62, NONE)), document(result(OURS, 1.6, NONE), result(EAGER, 13.8, NONE))
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (old, new), strict=True):
        documents.write_document(content, path)
    assert bench.main(["compare", *map(str, paths)]) == 0
    lines = [line.split()[5:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [[OURS, "1.620", "1.600", "-1.2", "%"], [*EAGER.split(), "-", "13.800", "-"]]


def test_a_document_without_a_commit_or_of_an_unfinished_run_is_refused(tmp_path):
    path = tmp_path / "bench_table_1gpu.json"
    changes = {"host.commit must name the commit": {"commit": None}, "gpus_used must be 1, got 2": {"gpus_used": 2}}
    for match, changed in (*changes.items(), ("expected the document of a finished run", {})):
        content = document(result(OURS, 1.5), result(f"{OURS}{cases.BASELINE}", 1.5))
        documents.write_document(content, path)
        assert len(documents.read_documents(tmp_path)[path.stem]["results"]) == 1  # none of a baseline
        content["host"] |= changed
        documents.write_document(content | {"finished": bool(changed)}, path)
        with pytest.raises(ValueError, match=match):
            documents.read_documents(tmp_path)
    with pytest.raises(ValueError, match="expected one result of vocab_parallel_ce, got several"):
        documents.results_by_case(document(result(OURS, 1.5), result(OURS, 1.6)))


def test_documents_of_several_commits_or_few_rounds_are_refused_and_readme_names_the_fastest():
    changed = {name: json.loads(json.dumps(each)) for name, each in COMMITTED.items()}
    changed["linear_memory_1gpu"]["host"]["commit"] = "fedcba987654321"
    with pytest.raises(ValueError, match="fedcba987654: linear_memory_1gpu"):
        pages.with_parts("# a\n{{bench_table_1gpu}} {{linear_memory_1gpu}}", changed)
    with pytest.raises(ValueError, match="numbers: expected 10 rounds or more, got objective_1gpu: 3"):
        overview.numbers_block(changed | {"objective_1gpu": changed["objective_1gpu"] | {"rounds": 3}})
    for each in changed["bench_table_2gpu"]["results"]:
        if each["provider"] == "liger-kernel" and "ratio" in each:
            each["ratio"] = 1.0
    with pytest.raises(ValueError, match="README: none 16384 x 128256 bf16: expected the fastest of"):
        overview.numbers_block(changed)


def test_markers():
    made = {"a": lambda: "| new |", "b": lambda: "unused"}
    text = "x\n<!-- begin: a -->\nold\n<!-- end: a -->\ny\n"
    new = pages.with_blocks(text, made, "page.md")
    assert new == "x\n<!-- begin: a -->\n\n| new |\n\n<!-- end: a -->\ny\n"
    assert pages.with_blocks(new, made, "page.md", ["a"]) == new
    for wrong, needed in ((text, ["b"]), (text * 2, []), (text.replace("end: a", "end: b"), []), ("", ["a"])):
        with pytest.raises(ValueError, match="page.md: expected"):
            pages.with_blocks(wrong, made, "page.md", needed)
