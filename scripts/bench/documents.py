"""The documents that ``bench_cross_entropy.py`` writes, as what reports them reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"
TABLES = {1: "bench_table_1gpu.json", 2: "bench_table_2gpu.json", 4: "bench_table_4gpu.json"}
SWEEPS = {"vocabulary": "bench_sweep_vocabulary_*.json", "tokens": "bench_sweep_tokens_*.json"}
TARGETS = "targets.json"

OURS = "vocab_parallel_ce"
IN_FORWARD = f"{OURS}[in_forward]"
WAYS = (OURS, IN_FORWARD)  # of this project, timed by default: gradient="auto", and asked for by name
IMPLEMENTATIONS = (f"{OURS}[triton]", f"{OURS}[one_pass]")
PROVIDERS = (
    OURS,
    IN_FORWARD,
    *IMPLEMENTATIONS,
    "quack-kernels",
    "quack-kernels (out of place)",
    "quack-kernels (kernel alone)",
    "flash-attn",
    "transformer-engine",
    "transformer-engine (overwrite)",
    "liger-kernel",
    "torch.compile",
    "torch eager",
    "megatron-core",
    "loss_parallel",
)
OF_TORCH = ("torch.compile", "torch eager", "loss_parallel")
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
Document = dict[str, Any]
Result = dict[str, Any]


class Case(NamedTuple):
    """What is computed; ``columns`` are those of one rank."""

    reduction: str
    rows: int
    columns: int
    ranks: int
    dtype: str

    @property
    def vocabulary(self) -> int:
        return self.columns * self.ranks

    @property
    def short_dtype(self) -> str:
        return SHORT_DTYPES[self.dtype]

    @property
    def shape(self) -> str:
        whole = f" ({self.vocabulary})" if self.ranks > 1 else ""
        return f"{self.rows} x {self.columns}{whole}"

    def __str__(self) -> str:
        return f"{self.reduction} {self.shape} {self.short_dtype}"


def is_ours(provider: str) -> bool:
    return provider in WAYS or provider in IMPLEMENTATIONS


def is_timed(result: Result | None) -> bool:
    return result is not None and "refused" not in result


def gradient_of(result: Result) -> str:
    """When this project wrote the gradient; results without the field are of an earlier default."""
    was_in_forward = result["reduction"] != "none" and result["dtype"] != "float16"
    return str(result.get("gradient", "in_forward" if was_in_forward else "in_backward"))


def our_result(results: dict[str, Result], provider: str) -> Result | None:
    """One case's result of ``provider``, one of ``WAYS``: the default's where that was ``IN_FORWARD``'s."""
    if provider == IN_FORWARD and provider not in results and gradient_of(results[OURS]) == "in_forward":
        return results[OURS]
    return results.get(provider)


def has_both_ways(document: Document) -> bool:
    """Whether something was timed that can be had in both ways."""
    return any(result["provider"] == IN_FORWARD and is_timed(result) for result in document["results"])


def results_by_case(document: Document) -> dict[Case, dict[str, Result]]:
    """Every case's results by provider, in the order in which they were measured."""
    cases: dict[Case, dict[str, Result]] = {}
    known = providers_of(document)
    for result in document["results"]:
        case = Case(*(result[field] for field in Case._fields))
        provider = result["provider"]
        if provider not in known:
            raise ValueError(f"provider: expected one of those that host.providers names, got {provider!r}")
        if provider in cases.setdefault(case, {}):
            raise ValueError(f"{case}: expected one result of {provider}, got several")
        cases[case][provider] = result
    return cases


def providers_of(document: Document) -> list[str]:
    """The providers that could be timed, in the order of ``PROVIDERS``."""
    named = document["host"]["providers"]
    return [provider for provider in PROVIDERS if provider in named]


def read_documents(results: Path) -> dict[str, Document]:
    """The tables and sweeps among ``results`` by file name."""
    paths = [results / name for name in TABLES.values() if (results / name).exists()]
    for pattern in SWEEPS.values():
        paths += sorted(results.glob(pattern))
    documents = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    for name, document in documents.items():
        if not document["host"]["commit"]:
            raise ValueError(f"{name}: host.commit must name the commit measured, got nothing")
        if "predictions" not in document:
            raise ValueError(f"{name}: expected the document of a finished run, got one without predictions")
    for ranks, name in TABLES.items():
        found = {result["ranks"] for result in documents[name]["results"]} if name in documents else {ranks}
        if found != {ranks}:
            raise ValueError(f"{name}: ranks of every result must be {ranks}, got {sorted(found)}")
    return documents


def read_targets(results: Path) -> Document:
    return json.loads((results / TARGETS).read_text(encoding="utf-8"))


def point_case(point: Result) -> Case:
    return Case(*(point[field] for field in Case._fields))


def package_versions(document: Document) -> list[str]:
    """The version of every other project's package, once for all that a package provides."""
    versions = document["host"]["providers"]
    packages = {
        name.partition(" (")[0]: versions[name]
        for name in providers_of(document)
        if not is_ours(name) and name not in OF_TORCH
    }
    return [f"{package} {version}" for package, version in packages.items()] or ["no other package"]


def position(case: Case, axis: str) -> int:
    return case.vocabulary if axis == "vocabulary" else case.rows


def formulas_of(document: Document, axis: str) -> dict[str, list[str]]:
    """The providers of each formula, and where, if a provider's other points have another one."""
    places: dict[str, dict[tuple[str, str], list[int]]] = {}
    for case, results in sorted(results_by_case(document).items()):
        for name, result in results.items():
            if is_timed(result):
                users = places.setdefault(name, {})
                users.setdefault((result["bytes_formula"], case.reduction), []).append(position(case, axis))
    formulas: dict[str, list[str]] = {}
    for name, users in places.items():
        several = len({formula for formula, _ in users}) > 1
        for (formula, reduction), found in users.items():
            where = f" ({reduction}, {axis} {found[0]} to {found[-1]})" if several else ""
            formulas.setdefault(formula, []).append(f"{name}{where}")
    return {formula: list(dict.fromkeys(users)) for formula, users in formulas.items()}
