"""The committed audits: how many classes are fused, and that docs/transformers.md says the same."""

import json

import pytest

from tests.docs.markdown import ROOT, table

pytestmark = pytest.mark.reference
DOCUMENTS = [
    json.loads(path.read_text()) for path in sorted((ROOT / "scripts/results").glob("transformers_audit_*.json"))
]
# Classes, and the fewest that rewriting must take.
POPULATIONS = {"5.17.0": (173, 150), "5.23.0": (181, 157)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["transformers"])
def test_nothing_failed_and_nearly_all_are_fused(document):
    classes, rewritten = POPULATIONS[document["transformers"]]
    assert document["classes"] == classes
    lazy, rewrite = document["lazy"]["counts"], document["rewrite"]["counts"]
    assert sum(lazy.values()) == sum(rewrite.values()) == classes
    assert "failed" not in lazy | rewrite
    assert lazy["fused"] >= 156
    assert rewrite["fused"] + rewrite["rewritten, not run"] >= rewritten
    for mechanism in ("lazy", "rewrite"):
        assert len(document[mechanism]["fused"].split()) == document[mechanism]["counts"]["fused"]
        assert all(": " in reason for reason in document[mechanism]["others"].values())


def test_the_versions_are_those_that_doctor_names():
    from vocab_parallel_ce.integrations import TESTED

    assert tuple(document["transformers"] for document in DOCUMENTS) == TESTED["transformers"]


def test_the_page_has_the_same_numbers():
    rows = table(
        (ROOT / "docs/transformers.md").read_text(),
        "| transformers | mechanism | classes | fused, equal | falls back, equal | declined | failed | not built |",
    )
    expected = []
    for document in DOCUMENTS:
        for mechanism in ("lazy", "rewrite"):
            counts = document[mechanism]["counts"]
            others = [counts.get(verdict, 0) for verdict in ("falls back", "declined", "failed")]
            left = counts.get("cannot be built", 0) + counts.get("rewritten, not run", 0)
            expected.append(
                [document["transformers"], mechanism, *map(str, (document["classes"], counts["fused"], *others, left))]
            )
    assert rows == expected
