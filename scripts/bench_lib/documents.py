"""The JSON documents of the runs: how they are written, which are committed, and what is refused."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

from bench_lib.cases import OURS, Case, LinearCase, LogitsCase
from bench_lib.timing import GRAPH_MIXING

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "scripts" / "results"
LOSSES = "losses_1gpu.json"  # of scripts/bench_losses.py
KINDS = ["table", "options", "sweep_tokens", "sweep_vocabulary", "linear_table", "linear_memory", "linear_profile"]
STEPS = [
    "transformers_step_1gpu",
    "compile_1gpu",
    "rl_1gpu",
    "losses_1gpu",
    "losses_2gpu",
    "megatron_2gpu",
    "frameworks_2gpu",
]
# In the hosts of documents of steps.
STEP_PACKAGES = ["transformers", "liger-kernel", "verl", "trl", "openrlhf", "flash-attn", "megatron-core"]
STEP_PACKAGES += ["torchtitan", "nemo-rl"]
Document: TypeAlias = dict[str, Any]
Result: TypeAlias = dict[str, Any]


def host_description() -> dict[str, Any]:
    """The machine, the versions and the commit; ``VPCE_COMMIT`` names it if there is no git history."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = os.environ.get("VPCE_COMMIT") or git.stdout.strip()
    try:
        triton_version = importlib.import_module("triton").__version__
    except ImportError:
        triton_version = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus_used": int(os.environ.get("WORLD_SIZE", "1")),
        "torch": torch.__version__,
        "triton": triton_version,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl_graph_mixing_support": os.environ.get(GRAPH_MIXING),
        "commit": commit or None,
    }


def version_of(package: str, module: str) -> str:
    """Return the version of an installed package; of one that is only sources on the path, what they say, or "source".

    Raises:
        ImportError: there is neither.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        found: str = getattr(importlib.import_module(module), "__version__", "source")
        return found.partition("+")[0]  # NeMo-RL adds the commit of whatever repository its sources lie in


def name_of(kind: str, ranks: int) -> str:
    """The committed file of a kind of document: ``bench_table_1gpu.json``."""
    return f"{kind if kind.startswith('linear') else f'bench_{kind}'}_{ranks}gpu.json"


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
    # Documents from before there was the field have predictions at their end.
    if not document.get("finished", "predictions" in document) or document.get("missing"):
        raise ValueError(f"{path.name}: expected the document of a finished run")
    if ranks is not None and host["gpus_used"] != ranks:
        raise ValueError(f"{path.name}: host.gpus_used must be {ranks}, got {host['gpus_used']}")
    return document


def read_documents(results: Path) -> dict[str, Document]:
    """The committed documents by file name, in the order of ``KINDS``."""
    names = {name_of(kind, ranks): ranks for kind in KINDS for ranks in (1, 2, 4)}
    found = {name: read_document(results / name, ranks) for name, ranks in names.items() if (results / name).exists()}
    if (results / LOSSES).exists():
        found[LOSSES] = json.loads((results / LOSSES).read_text(encoding="utf-8"))
    return found


def read_steps(results: Path) -> dict[str, Document]:
    """The committed documents of steps, by file name without its ending."""
    paths = [path for name in STEPS if (path := results / f"{name}.json").exists()]
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def case_of(result: Result) -> Case:
    kind = LinearCase if "hidden_size" in result else LogitsCase
    return kind(*(result[field] for field in kind._fields))


def results_by_case(document: Document) -> dict[Case, dict[str, Result]]:
    """Every case's results by provider, in the order in which they were measured."""
    cases: dict[Case, dict[str, Result]] = {}
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
    host = document["host"]
    found = dict(host.get("packages", {}))
    found |= {name: host[name] for name in STEP_PACKAGES if name in host}
    for name, version in host.get("providers", {}).items():
        if not is_ours(name) and "torch" not in name and name != "loss_parallel":
            found[name.partition(" (")[0]] = version
    return [f"{package} {version}" for package, version in found.items()]
