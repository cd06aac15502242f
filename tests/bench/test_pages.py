"""The pages are those of the committed documents, their numbers are compared rightly, and what is refused."""

import json
import shutil

import pytest

from tests.bench.support import EAGER, IN_FORWARD, OURS, SCRIPTS, document, result

import bench  # isort: skip
from bench_lib import cases, documents, pages  # isort: skip

pytestmark = pytest.mark.reference

ROOT = SCRIPTS.parent
MEAN, NONE = (cases.Case(kind, 8192, 32064, 1) for kind in ("mean", "none"))
COMMITTED = documents.read_documents(documents.RESULTS)


def test_the_pages_are_those_of_the_documents():
    assert bench.main(["report", "--check"]) == 0


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
    for stale in ("performance.md", "README.md"):
        assert f"stale: {stale}; python scripts/bench.py report --write renews it" in said
    assert bench.main(["report", "--write", *place]) == 0
    assert bench.main(["report", "--check", *place]) == 0
    picture = (results / pages.PICTURE).read_bytes()
    assert picture != (documents.RESULTS / pages.PICTURE).read_bytes() and len(picture) < 200_000


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
    said = pages.logits_part(
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


def test_readme_names_the_fastest():
    changed = json.loads(json.dumps(COMMITTED))
    for each in changed["bench_table_2gpu"]["results"]:
        if each["provider"] == "liger-kernel" and "ratio" in each:
            each["ratio"] = 1.0
    with pytest.raises(ValueError, match="README: none 16384 x 128256 bf16: expected the fastest of"):
        pages.numbers_block(changed)


def test_markers():
    made = {"a": lambda: "| new |", "b": lambda: "unused"}
    text = "x\n<!-- begin: a -->\nold\n<!-- end: a -->\ny\n"
    new = pages.with_blocks(text, made, "page.md")
    assert new == "x\n<!-- begin: a -->\n\n| new |\n\n<!-- end: a -->\ny\n"
    assert pages.with_blocks(new, made, "page.md", ["a"]) == new
    for wrong, needed in ((text, ["b"]), (text * 2, []), (text.replace("end: a", "end: b"), []), ("", ["a"])):
        with pytest.raises(ValueError, match="page.md: expected"):
            pages.with_blocks(wrong, made, "page.md", needed)
