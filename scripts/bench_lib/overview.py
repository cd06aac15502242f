"""README's figures and the table of docs/frameworks.md, whose rows are in ``overview.json``. Pure functions.

A row has what it shows ``without`` this package and what is ``given`` with it: a document, a case and providers. Of a
framework's, ``peers`` are others to compare with, and ``pairs`` what else its line replaces, and by what.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_lib.cases import OURS
from bench_lib.documents import Document, Result, is_timed, results_by_case
from bench_lib.tables import cost, gib, short_commit, shown, table

ROWS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("overview.json").read_text("utf-8"))
FEWEST_ROUNDS = 10
LESS = 1.02  # memory differs if one has so many times the other's


def require_one_commit(where: str, documents: Mapping[str, Document]) -> None:
    """Raise ValueError for documents of one GPU and of several commits. Those of several GPUs are of other machines."""
    commits: dict[str, list[str]] = {}
    for name, document in documents.items():
        if document["host"]["gpus_used"] == 1:
            commits.setdefault(document["host"]["commit"], []).append(name)
    if len(commits) > 1:
        said = "; ".join(f"{commit[:12]}: {', '.join(names)}" for commit, names in commits.items())
        raise ValueError(f"{where}: expected documents of one commit, got {said}; measure them again together")


def used_by(block: str, documents: Mapping[str, Document]) -> dict[str, Document]:
    """The documents of a block's rows.

    Raises:
        ValueError: they are of several commits, or of fewer rounds than ``FEWEST_ROUNDS``.
    """
    used = {row["document"]: documents[row["document"]] for row in ROWS[block]}
    require_one_commit(block, used)
    rounds = {name: document.get("rounds") or FEWEST_ROUNDS for name, document in used.items()}
    few = [f"{name}: {count}" for name, count in rounds.items() if count < FEWEST_ROUNDS]
    if few:
        raise ValueError(f"{block}: expected {FEWEST_ROUNDS} rounds or more, got {'; '.join(few)}; measure them again")
    return used


def frameworks_block(documents: Mapping[str, Document]) -> str:
    """Time and memory without and with this package, the others, and where this package loses."""
    rows, used = [], used_by("frameworks", documents)
    commits: dict[str, list[str]] = {}
    for row in ROWS["frameworks"]:
        cases, without, given = results_by_case(used[row["document"]]), row["without"], row["given"]
        results, others = cases[row["case"]], row.get("peers", [])
        is_same = not any(worse(results[a], results[b], "ms") for a, b in ((without, given), (given, without)))
        compared = [*((other, given) for other in (without, *others)), *row.get("pairs", [])]
        peers = [f"{peer}: {cost(results[peer])}" for peer in others if peer in results]
        cells = [f"{row['name']}<br>{row['line']}", row.get("setting", "") + row["case"], cost(results[without])]
        cells.append(cost(results[given]) + (": time within the noise" if is_same else ""))
        rows.append([*cells, "<br>".join(peers) or "-", where_it_loses(compared, cases)])
        commits.setdefault(short_commit(used[row["document"]]), []).append(row["name"].partition("]")[0].lstrip("["))
    every = table(["framework and line", "case", "without", "with", "others", "where it loses"], rows)
    said = "; ".join(f"{commit} ({', '.join(names)})" for commit, names in commits.items())
    return f"{every}\n\nCommit{'s' * (len(commits) > 1)} {said}."


def where_it_loses(compared: Iterable[Sequence[str]], cases: dict[str, dict[str, Result]]) -> str:
    """The worst case by time, and the worst by memory, of other providers and ours; "-" if there is none."""
    said = []
    for key, unit, text in (("ms", "ms", shown), ("peak_bytes", "GiB", gib)):
        found = [
            (results[own][key] / results[other][key], case, text(results[own][key]), other, text(results[other][key]))
            for case, results in cases.items()
            for other, own in compared
            if {own, other} <= results.keys() and worse(results[own], results[other], key)
        ]
        if found:
            _, case, own, other, others = max(found)
            said.append(f"{case}: {own} {unit}, {other} {others}")
    return "<br>".join(said) or "-"


def worse(result: Result, other: Result, key: str) -> bool:
    """Whether a provider takes more: time beyond the quartiles, or memory."""
    if key == "ms":
        return bool(result["ms_quartiles"][0] > other["ms_quartiles"][1])
    return bool(result["peak_bytes"] > LESS * other["peak_bytes"] + 0.01 * 2**30)


def place_of(document: Document) -> str:
    """The GPUs and the commit."""
    host = document["host"]
    return f"{host['gpus_used']} x {host['gpu']} ({short_commit(document)})"


def numbers_block(documents: Mapping[str, Document]) -> str:
    """README's rows, and where each was measured. The least of each column is bold.

    Raises:
        ValueError: a row of ratios leaves out the fastest of the others.
    """
    rows, used = [], used_by("numbers", documents)
    for row in ROWS["numbers"]:
        results = {str(case): found for case, found in results_by_case(used[row["document"]]).items()}[row["case"]]
        others = {n: each["ratio"] for n, each in results.items() if is_timed(each) and not n.startswith(OURS)}
        if row.get("is_ratio") and min(others, key=lambda name: others[name]) not in row["without"]:
            raise ValueError(f"README: {row['case']}: expected the fastest of {others}, got {row['without']}")
        cells = {}
        for name in (*row["without"], row["given"]):
            ratio = f"{shown(results[name]['ratio'])} x memcpy"
            cells[name] = [ratio] if row.get("is_ratio") else cost(results[name]).split(", ")
        best = [min(column, key=lambda text: float(text.split()[0])) for column in zip(*cells.values(), strict=True)]
        said = {
            name: ", ".join(f"**{text}**" if text == least else text for text, least in zip(texts, best, strict=True))
            for name, texts in cells.items()
        }
        without = "<br>".join(f"{name}: {said[name]}" for name in row["without"])
        rows.append([row["what"], without, said[row["given"]]])
    every = table(["bf16, forward and backward", "without", "with"], rows)
    places = "; ".join(dict.fromkeys(map(place_of, used.values())))
    return f"{every}\n\nMeasured on {places}. Bold is the least."
