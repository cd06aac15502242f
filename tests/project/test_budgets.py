"""Files, functions and kernels stay short enough to read."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 60  # without its docstring
MOST_LINES_OF_A_KERNEL = 90  # with it
FOLDERS = ("vocab_parallel_ce", "scripts", "tests")
SUFFIXES = (".py", ".sh")

pytestmark = pytest.mark.reference


def sources(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES)


def n_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def too_long_functions(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef):
            continue
        lines = node.end_lineno - node.lineno + 1
        most = MOST_LINES_OF_A_KERNEL
        if not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
            most = MOST_LINES_OF_A_FUNCTION
            docstring = node.body[0] if ast.get_docstring(node) else None
            lines -= 0 if docstring is None else docstring.end_lineno - docstring.lineno + 1
        if lines > most:
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {lines} of {most} lines")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_files_and_functions_are_short(folder):
    long_files = [
        f"{path.relative_to(ROOT)} has {n_lines(path)} of {MOST_LINES_OF_A_FILE} lines"
        for path in sources(folder)
        if n_lines(path) > MOST_LINES_OF_A_FILE
    ]
    long_functions = [found for path in sources(folder) if path.suffix == ".py" for found in too_long_functions(path)]
    assert not long_files + long_functions, "\n".join(long_files + long_functions)
