"""Audits every causal language model of the installed transformers, with both mechanisms, and writes the table.

Each class is tried in a tiny model on the CPU: its step with the fused loss against its own. This takes minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import transformers
from tqdm import tqdm

from vocab_parallel_ce.integrations.transformers.audit_models import audit_class
from vocab_parallel_ce.integrations.transformers.patch import MECHANISMS
from vocab_parallel_ce.integrations.transformers.tiny import class_names

RESULTS = Path(__file__).parent / "results"


def table(mechanism: str, names: list[str]) -> dict[str, Any]:
    """How many classes have each verdict, the fused ones, and the others with their reasons."""
    found = {name: audit_class(name, mechanism) for name in tqdm(names, desc=mechanism, disable=None)}
    counts = Counter(each["verdict"] for each in found.values())
    unfused = {name: each for name, each in found.items() if each["verdict"] != "fused"}
    others = {name: f"{each['verdict']}: {each['reason']}" for name, each in unfused.items()}
    fused = [name for name in names if name not in others]
    return {"counts": dict(sorted(counts.items())), "others": others, "fused": " ".join(fused)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    names = class_names()
    document: dict[str, Any] = {"transformers": transformers.__version__, "classes": len(names)}
    document |= {mechanism: table(mechanism, names) for mechanism in MECHANISMS}
    text = json.dumps(document, indent=1)
    print(text)
    (RESULTS / f"transformers_audit_{transformers.__version__}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
