"""The benchmark's tables for people, as text. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Result = dict[str, Any]


def shape_key(result: Result) -> tuple[Any, ...]:
    return result["dtype"], result["rows"], result["columns"], result["reduction"]


def results_text(results: Iterable[Result]) -> str:
    """Timed results by shape and then ratio, under each shape what was refused."""
    ordered = sorted(results, key=lambda r: (*shape_key(r), "refused" in r, r.get("ratio", 0), r["provider"]))
    lines, last = [], None
    for result in ordered:
        if shape_key(result) != last:
            last = shape_key(result)
            lines += ["", _heading(result)]
        lines.append(_line(result))
    return "\n".join(lines[1:])


def _heading(result: Result) -> str:
    shape = f"{result['rows']} x {result['columns']} {result['dtype']} {result['reduction']}"
    columns = f"{'x copy':>8} {'us':>9} {'eager us':>9} {'graph us':>9} {'TB/s':>6} {'B/row':>9} {'error':>8}"
    return f"{shape + ', ' + str(result['ranks']) + ' GPU':46}{columns}"


def _line(result: Result) -> str:
    name = f"  {result['provider']:44}"
    if "refused" in result:
        return f"{name}refused: {result['refused'][:110]}"
    graph = result["microseconds_graph"]
    mark = "" if result["queued"] else "  (waits for the device: its time has the host's in it)"
    return (
        f"{name}{result['ratio']:8.3f} {result['microseconds']:9.1f} {result['microseconds_eager']:9.1f} "
        f"{'-' if graph is None else format(graph, '.1f'):>9} {result['terabytes_per_second']:6.2f} "
        f"{result['extra_peak_bytes_per_row']:9.1f} {result['max_error']:8.1e}{mark}"
    )


def predictions_text(points: Iterable[Result]) -> str:
    """The cost model beside what was measured."""
    lines = [
        f"{'ranks':>5} {'hosts':>5} {'rows':>6} {'columns':>8} {'dtype':>9} {'':5}"
        f"{'predicted us':>13} {'measured us':>12} {'error %':>8}"
    ]
    for point in points:
        measured, error = point["measured_microseconds"], point["error_percent"]
        lines.append(
            f"{point['ranks']:5d} {point['hosts']:5d} {point['rows']:6d} {point['columns']:8d} "
            f"{point['dtype']:>9} {point['reduction']:5}{point['predicted_microseconds']:13.1f} "
            f"{'-' if measured is None else format(measured, '.1f'):>12} "
            f"{'-' if error is None else format(error, '+.1f'):>8}"
        )
    return "\n".join(lines)
