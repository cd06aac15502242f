"""README is a page, its words and those of the package are the project's, and every link leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import GENERATED, PAGES, README, ROOT, anchors, links, name_of, without_code

pytestmark = pytest.mark.reference

MOST_WORDS = 800
PACKAGE = ROOT / "vocab_parallel_ce"

# What to say instead -> what was said. Upper and lower case are the same.
OLD_WORDS = {
    "plan": r"\bsettl(?:e[sd]?|ing)\b|_settle|settled?_",
    "shifted": r"\bgap\b|_gap|gap_",
    "d_hidden, d_weight": r"\bof_(?:hidden|weight)\b",
    "grad_output": r"upstream",
    "token or row": r"\bplaces\b|(?<!in)(?<!of)_places?\b|\.place\b|\bplace of (?:a|each|every)\b",
    "TokenOutputs": r"\brow_?outputs\b",
    "register chunks, stages": r"\brings?\b|_ring\b|\bslots?\b(?!=)",
    "except": r"\bbut\s+for\b",
    "recomputes the logits": r"\blogits\s+again\b",
    "unsharded": r"\bwhole\s+logits\b",
    "is communicated": r"\btravels?\b",
    "in the forward pass": r"\bin\s+forward\b(?!-)",
    "per": r"\b(?:bytes|B|KB|us|ms|one|collectives|launch|launches|programs|warps|vectors)\s+an?\s+"
    r"(?:row|token|rank|call|chunk|warp|thread|multiprocessor|program|GPU|step|file|host)\b",
}


def old_words(text: str) -> list[str]:
    """Each old word in ``text``, with its line and what to say instead."""
    return [
        f"line {text[: match.start()].count(chr(10)) + 1}: {match[0]!r}: say {instead}"
        for instead, pattern in OLD_WORDS.items()
        for match in re.finditer(pattern, text, flags=re.IGNORECASE)
    ]


def test_the_readme_is_a_page():
    text = README.read_text(encoding="utf-8")
    assert GENERATED.findall(text) == ["numbers"]
    n_words = len(GENERATED.sub("", text).split())
    assert n_words <= MOST_WORDS, f"README.md: at most {MOST_WORDS} words, got {n_words}; move some to docs/"


def test_the_two_commands_are_on_the_first_screen_and_ci_runs_them():
    first_screen = README.read_text(encoding="utf-8").splitlines()[:25]
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for command in ("bash scripts/demo.sh", "bash scripts/test.sh"):
        assert any(line.startswith(f"{command} ") for line in first_screen), f"README.md does not begin with {command}"
        assert re.search(rf"^ *stage\S* .*{re.escape(command)}", ci, flags=re.MULTILINE), f".ci/run: no {command}"


def test_the_package_has_no_old_word():
    found = [
        f"{name_of(path)}: {word}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for word in old_words(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


OLD = (
    "the call is settled once",
    "exp_gap_sum",
    "of_weight = None",
    "at their places",
    "all but\nfor",
    "4 bytes a row",
)
OLD += ("4 bytes a row", "makes the logits again", "of whole logits", "what travels", "computed in forward")
NEW = ("in place, and out_of_place", "a string, during the steering", "bytes per row; bring it", "in forward-mode AD")


def test_an_old_word_is_found_and_a_word_of_the_field_is_not():
    assert all(map(old_words, OLD)) and not any(map(old_words, NEW))


def broken_links(page: Path) -> list[str]:
    text, broken = page.read_text(encoding="utf-8"), []
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(page.parents[len(page.relative_to(ROOT).parts) - 1]):
            broken.append(f"{link}: outside of the repository")
        elif not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(f"{link}: no such heading")
    return broken


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_a_page_is_ascii_its_links_and_files_exist_and_its_words_are_the_projects(page):
    text = page.read_text(encoding="ascii")
    assert broken_links(page) == []
    if page in PAGES:
        named = re.findall(r"`((?:scripts|tests|docs|\.ci)/[\w./-]+)`", without_code(text))
        assert [path for path in named if not (ROOT / path).exists()] == []
        assert old_words(text) == []


def test_every_page_of_docs_is_in_the_readme():
    linked = {link.partition("#")[0] for link in links(README.read_text(encoding="utf-8"))}
    assert {name_of(page) for page in PAGES if page.parent == ROOT / "docs"} <= linked


def test_headings_are_spelled_as_github_does():
    text = "# A `b_c`: d, e-f\n## TransformerEngine's\n## x\n```\n# no\n```\n## x\n"
    assert anchors(text) == {"a-b_c-d-e-f", "transformerengines", "x", "x-1"}
