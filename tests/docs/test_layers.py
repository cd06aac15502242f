"""The table of modules in docs/design.md is what the package's imports say.

A module may import what stands in a lower row of the table or, in its own row, to its left. Only ``kernels/``
and ``one_pass/`` import triton, only ``collectives``, ``dtensor`` and ``integrations/`` use torch.distributed, and only
``integrations/`` uses a framework.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, table

pytestmark = pytest.mark.reference

PACKAGE = "vocab_parallel_ce"
FRAMEWORKS = (
    *("transformers", "trl", "peft", "megatron", "torchtitan", "verl", "nemo_rl", "openrlhf", "lightning"),
    *("deepspeed", "swift", "nemo_automodel", "skyrl"),
)
OWNERS = {"triton": {"kernels/", "one_pass/"}, "torch.distributed": {"collectives", "dtensor", "integrations/"}}
OWNERS |= {framework: {"integrations/"} for framework in FRAMEWORKS}
TABLE = table((ROOT / "docs" / "design.md").read_text(encoding="utf-8"), "| module | what it has |")


def order_of(rows: list[list[str]]) -> dict[str, tuple[int, int]]:
    """Each module's row, counted from the bottom, and its position in the row."""
    return {
        module: (-row, position)
        for row, (modules, _) in enumerate(rows)
        for position, module in enumerate(re.findall(r"`(.+?)`", modules))
    }


def breaches(package: Path, order: dict[str, tuple[int, int]]) -> list[str]:
    """Every disagreement of the table with the modules and imports of ``package``."""
    found, seen = [], set()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = sorted(set(names_used(tree, path, package)))
        imported = [(line, file) for line, name in names if (file := file_of(name, package))]
        unit = unit_of(path, package, order)
        if path.name == "__init__.py" and path.parent != package and not imported:
            continue
        if unit not in order:
            found.append(f"{name}: is not in the table")
            continue
        seen.add(unit)
        for (line, used), owned in itertools.product(names, OWNERS):
            if f"{used}.".startswith(f"{owned}.") and unit not in OWNERS[owned]:
                found.append(f"{name}:{line}: {unit} uses {owned}")
        for line, other in dict.fromkeys(imported):
            target = unit_of(other, package, order)
            if target not in order:
                found.append(f"{name}:{line}: imports {target}, which is not in the table")
            elif target != unit and not order[target] < order[unit]:
                found.append(f"{name}:{line}: {unit} imports {target}, which is not below it")
    found += [f"{unit}: is in the table and not in the package" for unit in order.keys() - seen]
    return found


def unit_of(path: Path, package: Path, order: dict[str, tuple[int, int]]) -> str:
    """The name in the table of the module at ``path``: ``kernels/`` stands for all modules in it that have no other."""
    name = path.relative_to(package).with_suffix("").as_posix()
    folder = f"{name.partition('/')[0]}/"
    return folder if name not in order and "/" in name and folder in order else name


def names_used(tree: ast.AST, path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """``(line, absolute dotted name)`` of all that is imported or is an attribute, at any depth of the code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            here = (package.name, *path.relative_to(package).parts)
            base = [*(here[: -node.level] if node.level else ()), *([node.module] if node.module else ())]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def file_of(name: str, package: Path) -> Path | None:
    """The module of the package that a dotted name is, or that it is in."""
    parts = name.split(".")
    if parts[0] != package.name:
        return None
    paths = [package.joinpath(*parts[1:]), package.joinpath(*parts[1:-1])]
    files = [file for path in paths for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return files[0]


def test_the_table_is_what_the_imports_say():
    found = breaches(ROOT / PACKAGE, order_of(TABLE))
    assert not found, "\n".join(found)
