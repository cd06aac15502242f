"""Who may import whom in the package, checked on the source without importing it.

Modules lie in layers and may import only what lies below. Inside ``kernels`` a kernel may use the
shared modules, those only one another, and ``launchers`` all; inside ``integrations`` anything goes.
Only ``kernels`` imports triton, and only ``collectives`` and ``dtensor`` use torch.distributed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "vocab_parallel_ce"
LAYERS = (
    {"spec", "shard", "checks", "options", "overwritten", "layout", "blocks"},
    {"selection", "kernels", "collectives", "dtensor", "reference"},
    {"verify"},
    {"plan"},
    {"pipeline"},
    {"cross_entropy"},
    {"linear"},
    {"te_compat", "modules", "log_probs", "verify_group"},
    {"__init__"},
    {"integrations", "cli"},
    {"__main__"},
)
SIBLINGS_ALLOWED = {
    ("shard", "checks"),
    ("options", "checks"),
    ("options", "spec"),
    ("dtensor", "collectives"),
}
ONLY = {"te_compat": {"plan", "pipeline", "layout", "cross_entropy"}}
SHARED_KERNEL_MODULES = {"primitives", "launch"}
COLLECTOR_OF_KERNELS = "launchers"
TRITON_OWNER = "kernels"
DISTRIBUTED_OWNERS = {"collectives", "dtensor"}


class Violation(NamedTuple):
    """One line of source that breaks a rule."""

    path: str
    line: int
    rule: str


def violations(package: Path) -> list[Violation]:
    """Every breach of the import rules in the package whose sources lie in ``package``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package).with_suffix("").parts
        unit = module[0]
        relative = path.relative_to(package).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
        if _layer(unit) is None:
            found.append(Violation(relative, 1, f"{unit} has no layer"))
            continue
        for line, imported in _imports(tree, module, package):
            rule = _broken_rule(module, imported)
            if rule:
                found.append(Violation(relative, line, rule))
    return found


def _broken_rule(module: tuple[str, ...], imported: str) -> str | None:
    unit = module[0]
    root, *rest = imported.split(".")
    if root == "triton" and unit != TRITON_OWNER:
        return f"{unit} imports triton; only {TRITON_OWNER} may"
    if imported.startswith("torch.distributed") and unit not in DISTRIBUTED_OWNERS:
        return f"{unit} uses torch.distributed; only {' and '.join(sorted(DISTRIBUTED_OWNERS))} may"
    if root != PACKAGE:
        return None
    other = rest[0] if rest else "__init__"
    if other == unit:
        return _rule_within_a_package(module, rest[1:])
    here, there = _layer(unit), _layer(other)
    if there is None:
        return f"{unit} imports {other}, which has no layer"
    if unit in ONLY and other not in ONLY[unit]:
        return f"{unit} imports {other}; it may import only {', '.join(sorted(ONLY[unit]))}"
    if there == here and (unit, other) not in SIBLINGS_ALLOWED:
        return f"{unit} imports its sibling {other}"
    if here is not None and there > here:
        return f"{unit} imports {other} from above it"
    return None


def _rule_within_a_package(module: tuple[str, ...], imported: list[str]) -> str | None:
    unit = module[0]
    if unit != "kernels" or module[1] == COLLECTOR_OF_KERNELS:
        return None
    if not imported or imported[0] not in SHARED_KERNEL_MODULES:
        return f"{'.'.join(module)} imports {'.'.join([unit, *imported])}, which kernels do not share"
    return None


def _layer(unit: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if unit in layer), None)


def _imports(tree: ast.AST, module: tuple[str, ...], package: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything a module imports, at any depth of its code."""
    torch_names = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                if alias.name == "torch" and alias.asname:
                    torch_names.add(alias.asname)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module)
            for alias in node.names:
                yield node.lineno, _imported_module(base, alias.name, package)
        elif isinstance(node, ast.Call):
            yield from _dynamic_import(node)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and node.attr == "distributed"
            and isinstance(node.value, ast.Name)
            and node.value.id in torch_names
        ):
            yield node.lineno, "torch.distributed"


def _absolute(node: ast.ImportFrom, module: tuple[str, ...]) -> str:
    if node.level == 0:
        return node.module or ""
    # Level 1 is the package that holds the module: for ``__init__`` that is the module itself.
    parents = (PACKAGE, *module)[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _imported_module(base: str, name: str, package: Path) -> str:
    """``base.name`` where that is a module, ``base`` where ``name`` is something inside it."""
    if base == "torch" and name == "distributed":
        return "torch.distributed"
    root, *rest = base.split(".")
    if root != PACKAGE:
        return base
    path = package.joinpath(*rest, name)
    in_a_package = package.joinpath(*rest).is_dir()
    is_module = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()
    is_known = not rest and _layer(name) is not None
    return f"{base}.{name}" if is_known or (in_a_package and is_module) else base


def _dynamic_import(node: ast.Call) -> Iterator[tuple[int, str]]:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name in ("import_module", "__import__") and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield node.lineno, argument.value
