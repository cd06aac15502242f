"""The pages, from the committed documents: ``docs/performance.md``, and what others have between markers.

``<!-- begin: NAME -->`` and ``<!-- end: NAME -->`` are around what NAME stands for: a function here, or the file of a
document without its ending. Pure functions, except :func:`texts`. A target is compared with the number itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench_lib.cases import IN_FORWARD, LOSSES_TARGETS, OURS, TARGETS
from bench_lib.documents import FILES, ROOT, Document, Result, name_of, read_documents, results_by_case
from bench_lib.overview import frameworks_block, numbers_block, place_of, require_one_commit
from bench_lib.tables import (
    few_part,
    gpus,
    linear_part,
    logits_part,
    losses_part,
    memory_part,
    modes_part,
    number,
    objective_part,
    options_part,
    profile_part,
    short_commit,
    steps_part,
    table,
)
from vocab_parallel_ce.versions import TESTED

TEMPLATE = Path(__file__).with_name("performance.template.md")
COMPILED = ROOT / "tests" / "test_compile_only.py"
MARKED = re.compile(r"(<!-- begin: ([\w.]+) -->\n).*?(<!-- end: \2 -->)", flags=re.DOTALL)
UNITS = {
    "ratio": "x copy",
    "ratio_graph": "x copy in a CUDA graph",
    "microseconds_eager": "us eager",
    "microseconds_graph": "us in a CUDA graph",
    "gib_over_fp32_weight_gradient": "GiB over an fp32 gradient of the weight",
}
ARCHITECTURES = {
    "sm_80": "NVIDIA A100",
    "sm_90": "NVIDIA H100, H200",
    "sm_100": "NVIDIA B200",
    "sm_120": "NVIDIA RTX 50",
    "gfx942": "AMD MI300X, MI325X",
    "gfx950": "AMD MI350X, MI355X",
}
# Of documents, by the first word of their names; in the template, by the file of their command.
BLOCKS = {"losses": losses_part, "objective": objective_part, "linear": linear_part}
PARTS = {"table": logits_part, "head": linear_part, "unfused": linear_part, "memory": memory_part}
PARTS |= {"few": few_part, "modes": modes_part, "options": options_part}


def targets_block(documents: Mapping[str, Document]) -> str:
    """Every target, whether it is met, and where the documents are from."""
    rows: list[list[str]] = []
    used: dict[str, Document] = {}
    for case, bounds in TARGETS.items():
        name = name_of("head" if case.is_head else "table", case.ranks)
        used |= {name: documents[name]} if name in documents and bounds else {}
        results = results_by_case(documents[name]).get(case, {}) if name in documents else {}
        is_in_forward = case.kind == "mean" and not case.is_head
        for metric, bound in bounds.items():
            value = number(results.get(IN_FORWARD if is_in_forward else OURS), metric)
            unit = UNITS[metric].replace("copy", "matmuls" if case.is_head else "copy")
            measured = "-" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
            name = f"{case}, {gpus(case.ranks)}{', in_forward' * is_in_forward}"
            rows.append([name, f"<= {bound:g} {unit}", measured, is_met([] if value is None else [value], bound)])
    losses = name_of("losses", 1)
    used |= {losses: documents[losses]} if losses in documents else {}
    cases = results_by_case(documents[losses]) if losses in documents else {}
    for own, base, bound in LOSSES_TARGETS:
        found = {case: beside(results, own, base) for case, results in cases.items() if own in results}
        measured = ", ".join(f"{value:.3f} ({name})" for name, value in found.items()) or "-"
        rows.append([f"{own}, 1 GPU", f"<= {bound:g} x {base}", measured, is_met(list(found.values()), bound)])
    count = sum(row[-1] == "met" for row in rows)
    places = "; ".join(f"`{name}`, {place_of(document)}" for name, document in used.items())
    said = f"{count} of {len(rows)} targets are met. The numbers are those of {places}."
    return f"{said}\n\n{table(['case', 'target', 'measured', ''], rows)}"


def is_met(values: Sequence[float], bound: float) -> str:
    return "not measured" if not values else "met" if max(values) <= bound else "**missed**"


def beside(results: dict[str, Result], provider: str, base: str) -> float:
    """A provider's time over another's, or over the copy's."""
    own, other = results[provider], results.get(base)
    return float(own["ratio"] if other is None else own["ms"] / other["ms"])


def lanes_of(results: Path) -> dict[str, dict[str, Any]]:
    """The documents that ``--lanes-json`` wrote on GPUs, by name."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("lanes_*.json"))}
    return {name: document for name, document in found.items() if document["gpu_model"] is not None}


def pairs_block() -> str:
    """Pairs of torch and Triton, as ``doctor`` reads them, and the command that tests one."""
    rows = [[*row, f"`bash scripts/test_versions.sh {row.torch} {row.triton}`"] for row in TESTED]
    return table(["torch", "Triton", "Python", "quick lane", "compile-only lane", "GPU", "repeat it"], rows)


def lanes_block(documents: Mapping[str, dict[str, Any]]) -> str:
    """Counts of every lane that ran on GPUs, and which frameworks were installed."""
    rows = []
    for name, document in documents.items():
        versions = [document[key].partition("+")[0] for key in ("torch", "triton", "python")]
        model = document["gpu_model"].removeprefix("NVIDIA ").partition(" ")[0]
        here = [line.partition(":")[0] for line in document["frameworks"] if "not installed" not in line]
        for lane, counts in document["lanes"].items():
            if counts["passed"] + counts["failed"]:
                said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
                cells = [f"{document['gpu_count']} x {model}", *versions, lane, said, document["commit"][:7]]
                rows.append([*cells, f"`{name}`", ", ".join(here)])
    return table(["GPUs", "torch", "Triton", "Python", "lane", "tests", "commit", "document", "frameworks there"], rows)


def architectures_block(compiled: str, documents: Mapping[str, dict[str, Any]]) -> str:
    """For each target of the compiling tests: its GPUs, and whether a lane ran on one of them."""
    named = {f"sm_{cuda}" if cuda else hip for cuda, hip in re.findall(r'"(?:cuda:(\d+)|hip:(gfx\w+))"', compiled)}
    if unknown := named - ARCHITECTURES.keys():
        raise ValueError(f"ARCHITECTURES: expected {', '.join(sorted(unknown))} too, got no such entry; add its GPUs")
    models, rows = sorted({document["gpu_model"].split()[1] for document in documents.values()}), []
    for target in [name for name in ARCHITECTURES if name in named]:
        ran = [model for model in models if model in ARCHITECTURES[target]]
        rows.append([target, ARCHITECTURES[target], "yes", f"yes: {', '.join(ran)}" if ran else "never"])
    return table(["target", "GPUs", "every kernel compiles, in the tests", "tests ran there"], rows)


def blocks(documents: dict[str, Document], lanes: dict[str, dict[str, Any]]) -> dict[str, Callable[[], str]]:
    """What makes each block, by name."""
    made: dict[str, Callable[[], str]] = {
        "numbers": partial(numbers_block, documents),
        "targets": partial(targets_block, documents),
        "frameworks": partial(frameworks_block, documents),
        "pairs": pairs_block,
        "lanes": partial(lanes_block, lanes),
        "architectures": lambda: architectures_block(COMPILED.read_text(encoding="utf-8"), lanes),
    }
    for name, document in documents.items():
        part: Callable[..., str] = BLOCKS.get(name.partition("_")[0], steps_part)
        made[name] = partial(profile_part if "ranks" in document else part, document)
    return made


def with_blocks(text: str, made: Mapping[str, Callable[[], str]], page: str, needed: Iterable[str] = ()) -> str:
    """The text with every block anew.

    Raises:
        ValueError: a marker names no block, has no other end, or one that is ``needed`` is not there once.
    """
    names = [match[2] for match in MARKED.finditer(text)]
    if len(names) != text.count("<!-- begin: ") or len(names) != text.count("<!-- end: "):
        raise ValueError(f"{page}: expected an end after each begin, got others")
    for name in (*names, *needed):
        if name not in made or names.count(name) != 1:
            raise ValueError(f"{page}: expected one begin and end of {name!r}, one of {', '.join(made)}")
    return MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]()}\n\n{match[3]}", text)


def with_parts(text: str, documents: Mapping[str, Document]) -> str:
    """The template with each ``{{part}}`` in its place, and the commit at the top.

    Raises:
        ValueError: a section has documents of several commits.
    """
    first = documents.get(name_of("table", 1)) or next(iter(documents.values()))
    commit, sections = first["host"]["commit"], []
    for section in re.split(r"^(?=#)", text, flags=re.MULTILINE):
        named = {name: each for name, each in documents.items() if "{{" + name + "}}" in section}
        require_one_commit(section.partition("\n")[0], named)
        for name, document in named.items():
            part = next(part for command, part in PARTS.items() if name.startswith(FILES[command]))
            section = section.replace("{{" + name + "}}", part(document, commit))
        sections.append(section)
    return "".join(sections).replace("{{commit}}", short_commit(first))


def texts(root: Path, results: Path) -> dict[Path, str]:
    """``docs/performance.md``, and README and the other pages of docs/ with their blocks anew."""
    documents, page, readme = read_documents(results), root / "docs" / "performance.md", root / "README.md"
    made, found = blocks(documents, lanes_of(results)), {page: with_parts(TEMPLATE.read_text("utf-8"), documents)}
    for path in (readme, *sorted(page.parent.glob("*.md"))):
        if path != page:
            needed = ("numbers",) if path == readme else ()
            found[path] = with_blocks(path.read_text(encoding="utf-8"), made, path.name, needed)
    return found
