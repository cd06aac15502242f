"""The documents that ``bench_linear_cross_entropy.py`` writes, as what reports them reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.documents import OURS, Document, Result, is_timed
from bench.linear_cases import LinearCase

TABLES = {1: "linear_table_1gpu.json", 2: "linear_table_2gpu.json", 4: "linear_table_4gpu.json"}
MEMORY = "linear_memory_1gpu.json"
PROFILES = {2: "linear_profile_2gpu.json", 4: "linear_profile_4gpu.json"}
TARGETS = "linear_targets.json"
GIB = 2**30


def case_of(result: Result) -> LinearCase:
    return LinearCase(*(result[field] for field in LinearCase._fields))


def results_by_case(results: list[Result]) -> dict[LinearCase, dict[str, Result]]:
    """Every case's results by provider, in the order in which they were measured."""
    cases: dict[LinearCase, dict[str, Result]] = {}
    for result in results:
        of_case = cases.setdefault(case_of(result), {})
        if result["provider"] in of_case:
            raise ValueError(f"{case_of(result)}: expected one result of {result['provider']}, got several")
        of_case[result["provider"]] = result
    return cases


def bounds_by_case(targets: Document) -> dict[LinearCase, dict[str, float]]:
    """The bounds of each case that is a target; none where it must only run."""
    return {case_of(target): target["at_most"] for target in targets["cases"]}


def measured(result: Result | None, metric: str) -> float | None:
    """What a bound of ``metric`` is compared with; None where there is no right result."""
    if result is None or not is_timed(result) or result["wrong"]:
        return None
    if metric == "gib_over_fp32_weight_gradient":
        return result["bytes_over_fp32_weight_gradient"] / GIB
    value: float = result[metric]
    return value


def is_ours(provider: str) -> bool:
    return OURS in provider


def read_targets(results: Path) -> Document:
    targets: Document = json.loads((results / TARGETS).read_text(encoding="utf-8"))
    return targets


def read_documents(results: Path) -> dict[str, Document]:
    """Those among ``results`` by file name, each of a finished run of a known commit."""
    ranks_of: dict[str, int] = {name: ranks for ranks, name in [*TABLES.items(), *PROFILES.items()]}
    ranks_of[MEMORY] = 1
    documents: dict[str, Document] = {}
    for name, ranks in ranks_of.items():
        if not (results / name).exists():
            continue
        document: dict[str, Any] = json.loads((results / name).read_text(encoding="utf-8"))
        if not document["host"]["commit"]:
            raise ValueError(f"{name}: host.commit must name the commit measured, got nothing")
        if not document["finished"]:
            raise ValueError(f"{name}: expected the document of a finished run")
        if document["host"]["gpus_used"] != ranks:
            used = document["host"]["gpus_used"]
            raise ValueError(f"{name}: host.gpus_used must be {ranks}, got {used}")
        documents[name] = document
    return documents
