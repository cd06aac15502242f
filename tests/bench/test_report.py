"""The report: what it says of made-up and of committed documents, what it refuses, and when it is stale."""

import json
import shutil

import pytest

from tests.bench.support import EAGER, HEAD, IN_FORWARD, OURS, SCRIPTS, document, refusal, result

import bench  # isort: skip
from bench_lib import cases, documents, modes, report  # isort: skip

pytestmark = pytest.mark.reference

ROOT = SCRIPTS.parent
MEAN, NONE = (cases.Case(kind, 8192, 32064, 1) for kind in ("mean", "none"))
COMMITTED = documents.read_documents(documents.RESULTS)


def both_ways():
    """A mean whose default loses to another provider and whose second way wins; an unreduced loss."""
    return document(
        result(OURS, 1.57, MEAN, gradient="in_backward"),
        result(IN_FORWARD, 1.204, MEAN, gradient="in_forward"),
        result("quack-kernels", 1.31, MEAN, microseconds_eager=70.0),
        result(EAGER, 13.2, MEAN, queued=False),
        result(OURS, 1.6, NONE, gradient="in_backward"),
        refusal(IN_FORWARD, "for reduced losses", NONE),
        refusal("quack-kernels", "\x1b[91mwidth\x1b[0m | `odd`", NONE),
        result(EAGER, 13.8, NONE),
    )


def test_the_part_of_one_number_of_gpus():
    text = report.logits_part(both_ways())
    assert "quack-kernels 0.6.5; commit 0123456789ab. This project's ratios vary by 0.0 % or less." in text
    own = f"""
| mean 8192 x 32064 bf16 | 1.57 | 62.8 | 78.5 | 64.4 | 16.2 | quack-kernels 1.31 |
| mean 8192 x 32064 bf16, in_forward | 1.20 | 48.2 | 60.2 | 49.4 | 16.2 | quack-kernels 1.31 |
| none 8192 x 32064 bf16 | 1.60 | 64.0 | 80.0 | 65.6 | 16.2 | {EAGER} 13.8 |
"""
    every = f"""
| tokens x vocabulary | {OURS} | {IN_FORWARD} | quack-kernels | {EAGER} |
| --- | --- | --- | --- | --- |
| mean 8192 x 32064 bf16 | 1.57 | **1.20** | 1.31 | 13.2 |
| none 8192 x 32064 bf16 | **1.60** | - | - | 13.8 |
"""
    faster = """
| mean 8192 x 32064 bf16 | time / copy | quack-kernels 1.31 | 1.57 | 1.20 |
| mean 8192 x 32064 bf16 | eager us | quack-kernels 70.0 | 78.5 | 60.2 |

"""
    assert own in text and every in text and faster in text
    assert f"- {EAGER}: waits for the device, so its time includes the host's." in text
    assert "- quack-kernels: refused in some or all cases: `width / 'odd'`." in text
    assert "- flash-attn: absent: `not installed: No module named 'flash_attn'`." in text


def test_a_number_says_its_day_and_its_rounds_and_readme_has_ten():
    dated = both_ways() | {"rounds": 10}
    dated["host"] |= {"date": "2026-11-26"}
    assert "0.6.5; 10 rounds; commit 0123456789ab, 2026-11-26." in report.host_line(dated)
    assert report.place_of(dated) == "1 x Imaginary GPU (0123456789ab, 2026-11-26)"
    documents.require_rounds("README", {"bench_table_1gpu": dated, "of an older script": both_ways()})
    with pytest.raises(ValueError, match="README: expected 10 rounds or more, got rl_1gpu: 3; measure"):
        documents.require_rounds("README", {"bench_table_1gpu": dated, "rl_1gpu": dated | {"rounds": 3}})


def test_a_case_that_a_provider_has_no_result_of_has_a_dash():
    measured = both_ways()
    measured["results"].pop()
    assert "| none 8192 x 32064 bf16 | **1.60** | - | - | - |" in report.logits_part(measured)


def test_targets_are_compared_with_the_number_itself_and_a_means_with_in_forward():
    linear = cases.Case("mean", 16384, 32064, 1, 4096)
    found = {"bench_table_1gpu": both_ways()}
    found["linear_table_1gpu"] = document(result(OURS, 1.0701, linear))
    of_cases = [{"case": case, "provider": "soft_cross_entropy", "ratio": r} for case, r in (("a", 2.75), ("b", 2.8))]
    found["losses_1gpu"] = document() | {"results": of_cases}
    text = report.targets_part(found)
    assert "| soft_cross_entropy, 1 GPU | <= 2.75 x copy | 2.750 (a), 2.800 (b) | **missed** |" in text
    assert "| mean 8192 x 32064 bf16, 1 GPU, in_forward | <= 1.25 x copy | 1.204 | met |" in text
    assert "| none 8192 x 32064 bf16, 1 GPU | <= 1.58 x copy | 1.6 | **missed** |" in text
    assert "| mean 16384 x 32064 x 4096, 1 GPU | <= 1.07 x matmuls | 1.07 | **missed** |" in text
    assert "| <= 0.5 GiB over an fp32 gradient of the weight | 1.511 | **missed** |" in text
    assert text.startswith("1 of 35 targets are met.")
    assert "| none 16384 x 128256 bf16, 4 GPUs | <= 1.65 x copy | - | not measured |" in text


def test_the_parts_of_options_the_linear_loss_and_memory():
    case = cases.Case("options", 4096, 1000, 1)
    calls = document(result("mean", 1.6, case), result("mean, softcap", 2.8, case))
    text = report.options_part([calls])
    assert "| mean, softcap | 2.80 (1.75) | 16.2 |" in text and "| call | 4096 x 1000 bf16, 1 GPU |" in text
    linear = document(result(OURS, 1.034, HEAD), result("liger-kernel", 2.8331, HEAD))
    text = report.linear_part(linear)
    assert "| mean 48 x 64 x 32 | 1.034 | 20.68 | 2.00 | liger-kernel 2.833, 2.00 GiB |" in text
    assert "| mean 48 x 64 x 32 | **1.034, 2.00** | 2.833, 2.00 |" in text
    point = HEAD._asdict() | {"gradient_bytes": 2**29}
    points = [point | {"provider": OURS, "peak_bytes": 2**30}]
    points.append(point | {"provider": EAGER, "refused": "out of memory"})
    text = report.memory_part(document(*points))
    assert "| mean 48 x 64 x 32 | 0.50 | 1.00 | - |" in text and "cases: `out of memory`." in text


def test_pages_have_no_rows_of_a_baseline(tmp_path):
    content = both_ways()
    row = content["results"][0]
    content["results"].append(row | {"provider": row["provider"] + cases.BASELINE})
    documents.write_document(content, tmp_path / "bench_table_1gpu.json")
    assert documents.read_documents(tmp_path)["bench_table_1gpu"]["results"] == content["results"][:-1]


def test_a_document_without_a_commit_or_of_an_unfinished_run_is_refused(tmp_path):
    path = tmp_path / "bench_table_1gpu.json"

    def refused(match, **changes):
        content = both_ways()
        content["host"] |= changes.pop("host", {})
        documents.write_document(content | changes, path)
        with pytest.raises(ValueError, match=match):
            documents.read_documents(tmp_path)

    refused("bench_table_1gpu.json: host.commit must name the commit", host={"commit": None})
    refused("expected the document of a finished run", finished=False)
    refused("expected the document of a finished run", missing=["none 1 x 2"])
    refused("host.gpus_used must be 1, got 2", host={"gpus_used": 2})
    twice = document(result(OURS, 1.5), result(OURS, 1.6))
    with pytest.raises(ValueError, match="expected one result of vocab_parallel_ce, got several"):
        documents.results_by_case(twice)


def test_runs_are_compared_case_by_case(tmp_path, capsys):
    old = document(result(OURS, 1.18, MEAN), result(OURS, 1.62, NONE), result(EAGER, 12.0, MEAN))
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, content in zip(paths, (old, both_ways()), strict=True):
        documents.write_document(content, path)
    assert bench.main(["compare", *map(str, paths)]) == 0
    lines = [line.split()[5:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[0] == [OURS, "-", "1.570", "-"]  # the default wrote a mean's gradient in forward once
    assert [OURS, "1.620", "1.600", "-1.2", "%"] in lines
    assert [*EAGER.split(), "12.000", "13.200", "+10.0", "%"] in lines


def test_the_committed_documents_are_complete():
    """Every case of the tables, each with every provider, and this project timed in each."""
    ones = ["table", "options", "tokens", "vocabulary", "head", "memory", "losses", "compile", "rl", "transformers"]
    kinds = {1: ones, 2: ["table", "options", "frameworks", "megatron"], 4: ["table", "head", "profile"]}
    expected = {documents.name_of(kind, ranks) for ranks, found in kinds.items() for kind in found}
    assert expected <= COMMITTED.keys()
    for name, content in COMMITTED.items():
        found = documents.results_by_case(content)
        if "table" in name:
            kinds = {case.kind for case in found}
            assert len({(case.kind, frozenset(results)) for case, results in found.items()}) == len(kinds), name
            command = "head" if name.startswith("linear") else "table"
            assert set(cases.cases_of(command, content["host"]["gpus_used"])) == set(found), name
            assert all(documents.is_timed(results[OURS]) for results in found.values()), name


def test_no_mode_of_the_committed_document_is_slower_than_another():
    assert not modes.slower(COMMITTED["bench_modes_1gpu"] if "bench_modes_1gpu" in COMMITTED else document())


def test_documents_of_several_commits_in_one_section_are_refused(monkeypatch):
    text, others = "# a\n{{bench_table_1gpu}}\n# b\n{{linear_table_1gpu}} {{bench_table_2gpu}}\n{{commit}}", both_ways()
    head, two = document(result(OURS, 1.0, HEAD)), document(result(OURS, 1.5), gpus=2)
    head["host"]["commit"] = two["host"]["commit"] = "fedcba987654321"
    found = {"bench_table_1gpu": others, "linear_table_1gpu": head, "bench_table_2gpu": two}
    made = report.with_parts(text, found)
    assert made.endswith("0123456789ab") and made.count("commit fedcba987654") == 2 and "commit 0123" not in made
    with pytest.raises(ValueError, match="# a: .* 0123456789ab: bench_table_1gpu; fedcba987654: linear_table_1gpu"):
        report.with_parts(text.replace("\n# b", ""), found)
    with monkeypatch.context() as patched:
        patched.setattr(documents, "OLDER", {"linear_table_1gpu": "fedcba"})
        assert report.with_parts(text.replace("\n# b", ""), found).endswith("0123456789ab")


def test_the_page_the_readme_and_the_picture_are_those_of_the_documents():
    assert bench.main(["report", "--check"]) == 0
    page = (ROOT / "docs" / "performance.md").read_text()
    assert "{{" not in page
    assert len(report.readme_block(COMMITTED).splitlines()) == 2 + 6 + 4  # the hosts, and the picture


def test_the_check_names_what_is_stale_and_write_renews_it(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    shutil.copytree(documents.RESULTS, results)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "README.md", tmp_path)
    place = ["--root", str(tmp_path), "--results", str(results)]
    path = results / "bench_table_1gpu.json"
    content = json.loads(path.read_text())
    for each in content["results"]:
        if "ratio" in each:
            each["ratio"] += 1
    documents.write_document(content, path)
    assert bench.main(["report", "--check", *place]) == 1
    said = capsys.readouterr().out
    for stale in ("performance.md", "README.md", report.PICTURE):
        assert f"stale: {stale}; python scripts/bench.py report --write renews it" in said
    assert bench.main(["report", "--write", *place]) == 0
    assert bench.main(["report", "--check", *place]) == 0
    assert (results / report.PICTURE).stat().st_size < 200_000
