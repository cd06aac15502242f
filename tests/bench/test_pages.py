"""The tables between markers: what they say of made-up documents of steps, and what is refused."""

import pytest

from tests.bench.support import OURS, document

from bench_lib import pages, where  # isort: skip

pytestmark = pytest.mark.reference


def provider(name, ms, gib, spread=0.0):
    """Its quartiles are ``spread`` away; the copy takes 2 ms."""
    quartiles = [ms - spread, ms + spread]
    return {"provider": name, "ms": ms, "ratio": ms / 2, "ms_quartiles": quartiles, "peak_bytes": gib * 2**30}


def steps(**cases):
    found = [{"case": case.replace("_", " ")} | each for case, results in cases.items() for each in results]
    return document() | {"results": found}


ROW = pages.Framework("[A](docs/a.md)", "`X.a()`", "tp 2, ", "a", "many tokens", "its own", OURS, ("fused", "absent"))
SLOW, FAST = provider("its own", 52.3, 3.5, spread=4.0), provider(OURS, 50.1, 3.5, spread=4.0)


def cells(monkeypatch, document, row=ROW):
    monkeypatch.setattr(pages, "FRAMEWORKS", (row,))
    return [cell.strip() for cell in pages.frameworks_block({"a": document}).splitlines()[2].strip("|").split("|")]


def test_a_row_has_time_and_memory_the_fused_peer_and_the_worst_of_what_it_loses(monkeypatch):
    few = [provider("its own", 1.0, 1.0), provider(OURS, 1.25, 1.0), provider("fused", 1.1, 0.5)]
    many = [provider("its own", 166, 17.81), provider(OURS, 142, 11.79), provider("fused", 158.4, 11.0)]
    found = cells(monkeypatch, steps(few_tokens=few, many_tokens=many))
    assert found[:4] == ["[A](docs/a.md)<br>`X.a()`", "tp 2, many tokens", "166 ms, 17.81 GiB", "142 ms, 11.79 GiB"]
    assert found[4] == "fused: 158 ms, 11.00 GiB"
    assert found[5] == "few tokens: 1.25 ms, its own 1.00<br>few tokens: 1.00 GiB, fused 0.50"


def test_times_whose_quartiles_meet_are_called_noise_and_nothing_is_lost(monkeypatch):
    found = cells(monkeypatch, steps(many_tokens=[SLOW, FAST]))
    assert found[3:] == ["50.1 ms, 3.50 GiB: time within the noise", "-", "-"]
    found = cells(monkeypatch, steps(many_tokens=[SLOW, provider(OURS, 40.0, 3.5)]))
    assert found[3:] == ["40.0 ms, 3.50 GiB", "-", "-"]


def test_what_else_a_line_replaces_counts_too(monkeypatch):
    pair = [provider("head", 77.2, 1.26), provider("head, installed", 49.7, 4.99)]
    row = ROW._replace(pairs=(("head", "head, installed"),))
    found = cells(monkeypatch, steps(many_tokens=[SLOW, FAST, *pair]), row)
    assert found[5] == "many tokens: 4.99 GiB, head 1.26"


def test_a_row_of_few_rounds_is_not_in_readme_but_named_below(monkeypatch):
    row = ROW._replace(name="[B](docs/b.md)", document="b")
    monkeypatch.setattr(pages, "FRAMEWORKS", (ROW, row))
    found = {name: steps(many_tokens=[SLOW, FAST]) for name in "ab"}
    assert "| [B](docs/b.md)<br>" in pages.frameworks_block(found)
    found["b"] |= {"rounds": 3}
    text = pages.frameworks_block(found)
    assert "| [A](docs/a.md)<br>" in text and "| [B]" not in text
    assert text.endswith("(A). In fewer rounds, on their pages: [B](docs/b.md) (`X.a()`).")


def test_markers(tmp_path):
    made = {"a": lambda: "| new |", "b": lambda: "unused"}
    text = "x\n<!-- begin: a -->\nold\n<!-- end: a -->\ny\n"
    new = pages.with_blocks(text, made, "page.md")
    assert new == "x\n<!-- begin: a -->\n\n| new |\n\n<!-- end: a -->\ny\n"
    assert pages.with_blocks(new, made, "page.md", ["a"]) == new
    for wrong, needed in ((text, ["b"]), (text * 2, []), (text.replace("end: a", "end: b"), []), ("", ["a"])):
        with pytest.raises(ValueError, match="page.md: expected"):
            pages.with_blocks(wrong, made, "page.md", needed)
    with pytest.raises(ValueError, match="expected one begin and end of 'a', one of b"):
        pages.with_blocks(text, {"b": made["b"]}, "page.md")


def lanes_of(model):
    document = {"gpu_count": 2, "gpu_model": model, "torch": "2.11.0+cu130", "triton": "3.6.0", "python": "3.12.3"}
    none = {"passed": 0, "failed": 0, "skipped": 7}
    lanes = {"cuda": none, "nccl": {"passed": 40, "failed": 1, "skipped": 2}}
    frameworks = ["transformers 5.17.0: tested", "trl: not installed (tested with 1.16.0)", "verl 0.9.1: tested"]
    return document | {"commit": "0123456789", "lanes": lanes, "frameworks": frameworks}


def test_where_it_runs_says_what_ran_and_what_never_did():
    documents = {"lanes_2gpu": lanes_of("NVIDIA H100 80GB HBM3")}
    (row,) = where.lanes_block(documents).splitlines()[2:]
    assert row.startswith("| 2 x H100 | 2.11.0 | 3.6.0 | 3.12.3 | nccl | 40 passed, 1 failed, 2 skipped | 0123456 |")
    assert row.endswith("| `lanes_2gpu` | transformers 5.17.0, verl 0.9.1 |")
    found = where.architectures_block('("hip:gfx950", "cuda:90", "cuda:120")', documents).splitlines()[2:]
    assert [row.split(" | ")[0] for row in found] == ["| sm_90", "| sm_120", "| gfx950"]
    assert [row.endswith("| never |") for row in found] == [False, True, True] and "yes: H100 |" in found[0]
    with pytest.raises(ValueError, match="^ARCHITECTURES: expected the GPUs of gfx999 too"):
        where.architectures_block('"hip:gfx999"', documents)


def test_where_it_runs_takes_documents_of_gpus_alone(tmp_path):
    (tmp_path / "lanes_cpu.json").write_text('{"gpu_model": null}')
    (tmp_path / "lanes_1gpu.json").write_text('{"gpu_model": "NVIDIA H200"}')
    assert list(where.lanes(tmp_path)) == ["lanes_1gpu"]
