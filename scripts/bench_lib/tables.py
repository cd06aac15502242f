"""A Markdown table, a number in its cells, and the line above it. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench_lib.documents import Document, package_versions, short_commit


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def shown(metric: str, value: float | None) -> str:
    """A ratio or microseconds as the tables show them."""
    if value is None:
        return "-"
    if metric.startswith("ratio"):
        return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def host_line(document: Document, commit: str | None = None) -> str:
    """The machine, the versions, and the commit if it is not the one that the page says at its top."""
    host = document["host"]
    versions = f"torch {host['torch']}, Triton {host['triton']}, CUDA {host['cuda']}, Python {host['python']}"
    packages = ", ".join(package_versions(document)) or "no other package"
    rounds = f"; {document['rounds']} rounds" if document.get("rounds") else ""
    own = "" if host["commit"] == commit else f"; commit {short_commit(document)}"
    cpu = f", {host['cpu']}" if host.get("cpu") else ""
    return f"{host['gpus_used']} x {host['gpu']}{cpu}; {versions}; {packages}{rounds}{own}."
