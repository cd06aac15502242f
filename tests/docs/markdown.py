"""The pages that are tested, and what is read from their Markdown."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = re.compile(r"<!-- begin: (\w+) -->\n.+?\n<!-- end: \1 -->", flags=re.DOTALL)  # by scripts/bench.py report


def name_of(page: Path) -> str:
    """The page as a test's id: its path in the repository."""
    return page.relative_to(ROOT).as_posix()


def python_blocks(text: str) -> list[str]:
    """The code of every ``python`` block, in order."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """What ``#...`` may name in a page: its headings, as GitHub spells them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+?)\s*$", without_code(text), flags=re.MULTILINE):
        words = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = sum(1 for other in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", other))
        found.add(f"{slug}-{repeats}" if repeats else slug)
    return found


def links(text: str) -> list[str]:
    """The targets of all links and pictures, except those with a scheme."""
    targets = re.findall(r"\]\(([^()\s]+)\)", without_code(text))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def table(text: str, header: str) -> list[list[str]]:
    """The cells of each row of the table whose first line is ``header``."""
    _, found, rest = text.partition(f"{header}\n")
    assert found, f"no table {header!r}"
    _rule, *lines = rest.splitlines()
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
