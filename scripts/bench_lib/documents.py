"""The JSON documents of the runs: how they are filled and written, which are committed, and what is refused."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import platform
import re
import subprocess
import warnings
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from bench_lib.cases import BASELINE, OURS, Case
from bench_lib.clock import GRAPH_MIXING, Ranks
from bench_lib.providers import version_of

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"
# The file of what each command measures, without the number of GPUs.
FILES = {
    "table": "bench_table",
    "options": "bench_options",
    "few": "bench_few",
    "head": "linear_table",
    "shapes": "linear_shapes",  # of "head", with other sizes and peers
    "unfused": "linear_unfused",  # of "head", alongside F.linear and this project's loss alone
    "memory": "linear_memory",
    **{name: name for name in ("losses", "objective", "compile", "rl", "frameworks")},
    "transformers": "transformers_step",
    "ignored": "transformers_ignored",
    "megatron": "megatron",
    "fsdp": "fsdp",
}
Document: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]


def commit_of(checkout: Path, variable: str) -> str | None:
    """The commit of a checkout, which an environment variable names if there is no git history."""
    words = ["git", "rev-parse", "--show-toplevel", "HEAD"]
    top, _, commit = subprocess.run(words, cwd=checkout, capture_output=True, text=True).stdout.partition("\n")
    found = commit.strip() if top and Path(top) == checkout.resolve() else None
    return os.environ.get(variable) or found or None


def host_description() -> dict[str, Any]:
    """The machine, the versions and the commit; ``VPCE_COMMIT`` names it if there is no git history."""
    try:
        triton_version = importlib.import_module("triton").__version__
    except ImportError:
        triton_version = None
    linux = Path("/proc/cpuinfo")  # eager times are the host's
    cpu = re.search(r"^model name\s*: (.*)", linux.read_text() if linux.exists() else "", flags=re.MULTILINE)
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus_used": int(os.environ.get("WORLD_SIZE", "1")),
        "cpu": cpu and cpu[1].strip(),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl_graph_mixing_support": os.environ.get(GRAPH_MIXING),
        "commit": commit_of(ROOT, "VPCE_COMMIT"),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def new_document(kind: str, rounds: int | None = None, modules: Mapping[str, str] | None = None) -> Document:
    """The beginning of a document, with the versions of the packages that have these ``modules``."""
    packages = {package: version_of(package, module) for package, module in (modules or {}).items()}
    document = {"kind": kind, "rounds": rounds, "host": host_description() | {"packages": packages}}
    return document | {"finished": False, "absent": {}, "results": []}


def name_of(command: str, ranks: int) -> str:
    """The committed document of a command, by the name of its file: ``bench_table_1gpu``."""
    return f"{FILES[command]}_{ranks}gpu"


def write_document(document: Document, path: Path | None) -> None:
    """With one case per line, so that a difference between two runs can be read."""

    def value(content: Any) -> str:
        if isinstance(content, list) and content and isinstance(content[0], dict):
            return "[\n  " + ",\n  ".join(json.dumps(each) for each in content) + "\n ]"
        return json.dumps(content)

    if path is not None:
        fields = [f" {json.dumps(name)}: {value(content)}" for name, content in document.items()]
        path.write_text("{\n" + ",\n".join(fields) + "\n}\n", encoding="utf-8")


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
        document["results"] = [each for each in document["results"] if not each["provider"].endswith(BASELINE)]
    return found


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


def parser_of(description: str | None, rounds: int = 10, *, add_help: bool = True) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all scripts of a benchmark have."""
    lines = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=lines, add_help=add_help)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the document here")
    return parser


def quiet() -> None:
    """Silence other projects' warnings, which say nothing about a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run(
    document: Document, cases: Iterable[Any], measure: Callable[[Any], list[Result]], ranks: Ranks, path: Path | None
) -> None:
    """Fill the document case by case; the first rank shows each, and writes what there is until then."""
    quiet()
    written = path if ranks.is_first else None
    for case in tqdm(list(cases), unit="case", disable=not ranks.is_first):
        document["results"] += (found := measure(case))
        write_document(document, written)
        for result in found if ranks.is_first else ():
            print("  ".join(f"{name}={value}" for name, value in result.items()), flush=True)
    document["finished"] = True
    write_document(document, written)
    for name, reason in document["absent"].items() if ranks.is_first else ():
        print(f"absent: {name}: {reason}")
