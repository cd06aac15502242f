"""The forwards of transformers: which are rewritten. What they compute, ``test_transformers_classes`` says."""

import ast
import json
import re
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.docs.markdown import ROOT
from vocab_parallel_ce.integrations.transformers.rewrite import Declined, rewrite_source

pytestmark = pytest.mark.reference

AUDIT = ROOT / f"scripts/results/transformers_audit_{transformers.__version__}.json"


def forward_of(class_source: str) -> str:
    body = ast.parse(class_source).body[0].body
    forward = next(item for item in body if isinstance(item, ast.FunctionDef) and item.name == "forward")
    first = min(node.lineno for node in (forward, *forward.decorator_list))
    return "\n".join(class_source.split("\n")[first - 1 : forward.end_lineno]) + "\n"


def forward_sources() -> dict[str, str]:
    """Return the source of each class's forward, read from the files: an import of all of them takes 20 seconds."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    wanted = {name for value in names for name in ([value] if isinstance(value, str) else value)}
    sources = {}
    for path in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        for block in re.split(r"^(?=class )", text, flags=re.M):
            name = block[6:].partition("(")[0]
            if name in wanted:
                # What follows the class at no indentation, such as __all__, is not parsed.
                sources[name] = forward_of(re.split(r"\n(?=[\w@])", block)[0])
    assert set(sources) == wanted
    return sources


def verdicts() -> dict[str, str]:
    """Return class -> "rewritten", or the reason for declining it."""
    found = {name: rewrite_source(source) for name, source in sorted(forward_sources().items())}
    return {name: v.reason if isinstance(v, Declined) else "rewritten" for name, v in found.items()}


@pytest.mark.skipif(not AUDIT.exists(), reason="no audit of this version of transformers")
def test_which_forwards_are_rewritten() -> None:
    """Those of the committed audit. If a newer release declines more, look at the reasons, then audit it."""
    declined = {name: reason.split(":")[0] for name, reason in verdicts().items() if reason != "rewritten"}
    declined = {name: reason for name, reason in declined.items() if reason != "no labels"}  # of none that has no loss
    audited = json.loads(AUDIT.read_text())["rewrite"]["others"]
    expected = {name: reason.split(": ")[1] for name, reason in audited.items() if reason.startswith("declined")}
    assert declined == expected
