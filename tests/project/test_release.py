"""What a release is made of agrees: the version, the changelog, the citation, and the workflows that publish it."""

import re
from pathlib import Path

import pytest

import vocab_parallel_ce

pytestmark = pytest.mark.reference

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_a_literal_in_one_file():
    """setuptools reads a literal without importing the package, which would need torch."""
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', read("vocab_parallel_ce/versions.py"), re.M) == [
        vocab_parallel_ce.__version__
    ]
    assert 'version = { attr = "vocab_parallel_ce.versions.__version__" }' in read("pyproject.toml")
    assert not re.search(r"^version\s*=\s*\"", read("pyproject.toml"), re.M)


def test_changelog_and_citation_have_the_version_and_its_date():
    headings = re.findall(r"^## (.+)$", read("CHANGELOG.md"), re.M)
    assert headings.pop(0) == "Unreleased"
    found = [re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d\d-\d\d)", heading) for heading in headings]
    assert all(found), headings
    released = [(tuple(map(int, one[1].split("."))), one[2]) for one in found]
    assert released == sorted(released, reverse=True)
    citation = dict(re.findall(r"^(version|date-released): \"?([\w.-]+)\"?$", read("CITATION.cff"), re.M))
    assert (found[0][1], found[0][2]) == (citation["version"], citation["date-released"])
    assert citation["version"] == vocab_parallel_ce.__version__


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_actions_to_commits_and_begin_with_few_permissions(workflow):
    text = workflow.read_text(encoding="utf-8")
    uses = re.findall(r"uses: (.+)$", text, re.M)
    assert uses
    for action in uses:
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v[\d.]+", action), action
    top = re.search(r"^permissions:(?: \{\}|\n  contents: read)\n", text, re.M)
    assert top and "secrets." not in text and "pull_request_target" not in text
