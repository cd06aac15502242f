"""How numbers stand in the README's tables."""

from __future__ import annotations

from collections.abc import Iterable


def decimals(value: float) -> str:
    """A ratio as the tables show it."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}"


def microseconds(value: float) -> str:
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def shown(metric: str, value: float) -> str:
    return decimals(value) if metric.startswith("ratio") else microseconds(value)


def bold(text: str, wins: bool) -> str:
    return f"**{text}**" if wins else text


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
