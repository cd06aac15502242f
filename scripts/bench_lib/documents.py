"""The JSON documents of the runs: how they are written, which are committed, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import platform
import re
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import torch

from bench_lib.cases import BASELINE, OURS, Case
from bench_lib.timing import GRAPH_MIXING

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"
# The file of what each command measures, without the number of GPUs.
FILES = {
    "table": "bench_table",
    "options": "bench_options",
    "modes": "bench_modes",
    "few": "bench_few",
    "head": "linear_table",
    "shapes": "linear_shapes",  # of "head", with other sizes and peers
    "unfused": "linear_unfused",  # of "head", alongside F.linear and this project's loss alone
    "memory": "linear_memory",
    "profile": "linear_profile",
    "losses": "losses",
    "objective": "objective",
    "compile": "compile",
    "rl": "rl",
    "frameworks": "frameworks",
    "transformers": "transformers_step",
    "ignored": "transformers_ignored",
    "megatron": "megatron",
}
FEWEST_ROUNDS = 10  # of README's numbers
Document: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]


def commit_of(checkout: Path, variable: str) -> str | None:
    """The commit of a checkout, which an environment variable names if there is no git history."""
    words = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    top, _, commit = subprocess.run(words, cwd=checkout, capture_output=True, text=True).stdout.partition("\n")
    found = commit.strip() if top and Path(top) == checkout.resolve() else None
    return os.environ.get(variable) or found or None


def cpu_name() -> str | None:
    """As Linux names it: eager times are the host's."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)", path.read_text() if path.exists() else "", flags=re.MULTILINE)
    return found and found[1].strip()


def host_description() -> dict[str, Any]:
    """The machine, the versions and the commit; ``VPCE_COMMIT`` names it if there is no git history."""
    try:
        triton_version = importlib.import_module("triton").__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus_used": int(os.environ.get("WORLD_SIZE", "1")),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl_graph_mixing_support": os.environ.get(GRAPH_MIXING),
        "commit": commit_of(ROOT, "VPCE_COMMIT"),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def new_document(kind: str, rounds: int | None = None) -> Document:
    """The beginning of a document: what is measured, in how many rounds, where, when and at which commit."""
    document = {"kind": kind, "rounds": rounds, "host": host_description() | {"packages": {}}}
    return document | {"finished": False, "absent": {}, "results": []}


def name_of(command: str, ranks: int) -> str:
    """The committed document of a command, by the name of its file: ``bench_table_1gpu``."""
    return f"{FILES[command]}_{ranks}gpu"


def dumped(document: Document) -> str:
    """JSON with one case per line, so that a difference between two runs can be read."""

    def value(content: Any) -> str:
        if isinstance(content, list) and content and isinstance(content[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(each) for each in content) + "\n ]"
        return json.dumps(content)

    fields = [f" {json.dumps(name)}: {value(content)}" for name, content in document.items()]
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write_document(document: Document, path: Path | None) -> None:
    if path is not None:
        path.write_text(dumped(document), encoding="utf-8")


def read_document(path: Path, ranks: int | None = None) -> Document:
    """The document of a finished run of a known commit, of ``ranks`` GPUs if they are given.

    Raises:
        ValueError: it has no commit, is of an unfinished run, or is of another number of GPUs.
    """
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    host = document["host"]
    if not host["commit"]:
        raise ValueError(f"{path.name}: host.commit must name the commit measured, got nothing")
    if not document["finished"]:
        raise ValueError(f"{path.name}: expected the document of a finished run")
    if ranks is not None and host["gpus_used"] != ranks:
        raise ValueError(f"{path.name}: host.gpus_used must be {ranks}, got {host['gpus_used']}")
    return document


def read_documents(results: Path) -> dict[str, Document]:
    """The committed documents by the names of their files, in the order of ``FILES``; without rows of a baseline."""
    names = {name_of(command, ranks): ranks for command in FILES for ranks in (1, 2, 4)}
    paths = {results / f"{name}.json": ranks for name, ranks in names.items()}
    found = {path.stem: read_document(path, ranks) for path, ranks in paths.items() if path.exists()}
    for document in found.values():
        document["results"] = [each for each in document["results"] if not each.get("provider", "").endswith(BASELINE)]
    return found


def quartiles(times: Sequence[float]) -> list[float]:
    """The lower and the upper one. What disturbs a host only adds: to compare two checkouts, take the lower."""
    if len(times) < 2:
        return [times[0], times[0]]
    lower, _, upper = statistics.quantiles(times, n=4, method="inclusive")
    return [lower, upper]


def case_of(result: Result) -> Case | str:
    """The case of a result, or how a table calls it."""
    if "case" in result:
        return str(result["case"])
    return Case(**{field: result[field] for field in Case._fields if field in result})


def results_by_case(document: Document) -> dict[Any, dict[str, Result]]:
    """Every case's results by provider, in the order in which they were measured."""
    cases: dict[Any, dict[str, Result]] = {}
    for result in document["results"]:
        found = cases.setdefault(case_of(result), {})
        if result["provider"] in found:
            raise ValueError(f"{case_of(result)}: expected one result of {result['provider']}, got several")
        found[result["provider"]] = result
    return cases


def is_timed(result: Result | None) -> bool:
    return result is not None and "refused" not in result


def is_ours(provider: str) -> bool:
    return OURS in provider


def package_versions(document: Document) -> list[str]:
    """Each other project's version, once per package."""
    return [f"{package} {version}" for package, version in document["host"]["packages"].items()]


def short_commit(document: Document) -> str:
    """The commit, and the day of the measurement; of documents without it, the day on which they were committed."""
    host = document["host"]
    return ", ".join(str(part) for part in (str(host["commit"])[:12], host.get("date")) if part)


def is_of_enough_rounds(document: Document) -> bool:
    return (document.get("rounds") or FEWEST_ROUNDS) >= FEWEST_ROUNDS


def require_rounds(where: str, documents: Mapping[str, Document]) -> None:
    """Refuse documents of fewer rounds than ``FEWEST_ROUNDS``, of which none is a warm-up.

    Raises:
        ValueError: there are some.
    """
    few = [f"{name}: {each['rounds']}" for name, each in documents.items() if not is_of_enough_rounds(each)]
    if few:
        raise ValueError(f"{where}: expected {FEWEST_ROUNDS} rounds or more, got {'; '.join(few)}; measure them again")


def require_one_commit(where: str, documents: Mapping[str, Document]) -> None:
    """Refuse documents of one GPU and of several commits side by side.

    Those of several GPUs are of other machines.

    Raises:
        ValueError: there are some.
    """
    commits: dict[str, list[str]] = {}
    for name, document in documents.items():
        host = document["host"]
        if host["gpus_used"] == 1:
            commits.setdefault(host["commit"], []).append(name)
    if len(commits) > 1:
        said = "; ".join(f"{commit[:12]}: {', '.join(names)}" for commit, names in commits.items())
        raise ValueError(f"{where}: expected documents of one commit, got {said}; measure them again together")
