"""The pages are those of the committed documents, and which documents are refused."""

import json
import shutil

import pytest

from tests.bench.support import OURS, SCRIPTS, document, result

import bench  # isort: skip
from bench_lib import cases, documents, pictures  # isort: skip

pytestmark = pytest.mark.reference

ROOT = SCRIPTS.parent


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
    picture = (results / pictures.SPEED).read_bytes()
    assert picture != (documents.RESULTS / pictures.SPEED).read_bytes() and len(picture) < 200_000


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
