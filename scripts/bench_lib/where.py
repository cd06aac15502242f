"""The tables of docs/where_it_runs.md: from ``versions.TESTED``, the documents of lanes, and the tests that compile."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_lib.tables import table
from vocab_parallel_ce.versions import TESTED

ROOT = Path(__file__).parents[2]
COMPILED = ROOT / "tests" / "test_compile_only.py"
ARCHITECTURES = {
    "sm_80": "NVIDIA A100",
    "sm_90": "NVIDIA H100, H200",
    "sm_100": "NVIDIA B200",
    "sm_120": "NVIDIA RTX 50",
    "gfx942": "AMD MI300X, MI325X",
    "gfx950": "AMD MI350X, MI355X",
}


def blocks(results: Path) -> dict[str, Callable[[], str]]:
    """What makes each block, by name."""
    return {
        "pairs": pairs_block,
        "lanes": lambda: lanes_block(lanes(results)),
        "architectures": lambda: architectures_block(COMPILED.read_text(encoding="utf-8"), lanes(results)),
    }


def lanes(results: Path) -> dict[str, dict[str, Any]]:
    """The documents that ``--lanes-json`` wrote on GPUs, by name."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("lanes_*.json"))}
    return {name: document for name, document in found.items() if document["gpu_model"] is not None}


def pairs_block() -> str:
    """Pairs of torch and Triton, as ``doctor`` reads them, and the command that tests one."""
    rows = [[*row, f"`bash scripts/test_versions.sh {row.torch} {row.triton}`"] for row in TESTED]
    return table(["torch", "Triton", "Python", "quick lane", "compile-only lane", "GPU", "repeat it"], rows)


def lanes_block(documents: dict[str, dict[str, Any]]) -> str:
    """Counts of every lane that ran on GPUs, and which frameworks were installed."""
    rows = []
    for name, document in documents.items():
        versions = [document[key].partition("+")[0] for key in ("torch", "triton", "python")]
        gpus = f"{document['gpu_count']} x {document['gpu_model'].removeprefix('NVIDIA ').partition(' ')[0]}"
        for lane, counts in document["lanes"].items():
            if counts["passed"] + counts["failed"]:
                said = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
                here = [line.partition(":")[0] for line in document["frameworks"] if "not installed" not in line]
                rows.append([gpus, *versions, lane, said, document["commit"][:7], f"`{name}`", ", ".join(here)])
    return table(["GPUs", "torch", "Triton", "Python", "lane", "tests", "commit", "document", "frameworks there"], rows)


def architectures_block(compiled: str, documents: dict[str, dict[str, Any]]) -> str:
    """For each target of the compiling tests: its GPUs, and whether a lane ran on one of them."""
    found = re.findall(r'"(?:cuda:(\d+)|hip:(gfx\w+))"', compiled)
    named = {f"sm_{cuda}" if cuda else hip for cuda, hip in found}
    if unknown := named - ARCHITECTURES.keys():
        raise ValueError(
            f"ARCHITECTURES: expected the GPUs of {', '.join(sorted(unknown))} too, got no such entry; add it"
        )
    targets = sorted(named, key=[*ARCHITECTURES].index)
    models = {document["gpu_model"].split()[1] for document in documents.values()}
    rows = []
    for target in targets:
        ran = sorted(model for model in models if model in ARCHITECTURES[target])
        rows.append([target, ARCHITECTURES[target], "yes", f"yes: {', '.join(ran)}" if ran else "never"])
    return table(["target", "GPUs", "every kernel compiles, in the tests", "tests ran there"], rows)
