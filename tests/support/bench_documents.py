"""Documents of the benchmark with made-up numbers, and the folder that they are reported in."""

from __future__ import annotations

import json
from pathlib import Path

TARGETS = {
    "extra_peak_bytes_per_row_below": 64,
    "cases": [
        {
            "ranks": 1,
            "reduction": "mean",
            "rows": 8,
            "vocabulary": 100,
            "dtype": "bfloat16",
            "at_most": {"ratio": 1.25},
        },
        {
            "ranks": 1,
            "reduction": "none",
            "rows": 8,
            "vocabulary": 100,
            "dtype": "bfloat16",
            "at_most": {"microseconds_eager": 90, "ratio_graph": 2.0},
        },
        {
            "ranks": 2,
            "reduction": "none",
            "rows": 8,
            "vocabulary": 100,
            "dtype": "float32",
            "at_most": {"ratio": 1.6},
        },
    ],
}


def result(provider: str, ratio: float, **changes: object) -> dict:
    numbers = {
        "rows": 8,
        "columns": 100,
        "ranks": 1,
        "dtype": "bfloat16",
        "reduction": "mean",
        "provider": provider,
        "ratio": ratio,
        "ratio_spread": [ratio, ratio],
        "microseconds": 40.0 * ratio,
        "microseconds_eager": 50.0 * ratio,
        "ratio_eager": 1.25 * ratio,
        "microseconds_graph": 41.0 * ratio,
        "ratio_graph": 1.1 * ratio,
        "copy_microseconds": 40.0,
        "bytes_formula": "3 * rows * columns * element_size",
        "terabytes_per_second": 4.0 / ratio,
        "extra_peak_bytes_per_row": 16.25,
        "max_error": 1e-3,
        "in_place": True,
        "queued": True,
    }
    return numbers | changes


def refusal(provider: str, why: str, **changes: object) -> dict:
    case = {"rows": 8, "columns": 100, "ranks": 1, "dtype": "bfloat16", "reduction": "mean"}
    return case | {"provider": provider, "refused": why} | changes


def document(*results: dict, gpus: int = 1) -> dict:
    return {
        "host": {
            "gpu": "Imaginary GPU",
            "gpus_used": gpus,
            "torch": "2.11.0",
            "triton": "3.6.0",
            "cuda": "13.0",
            "python": "3.12.3",
            "commit": "0123456789abcdef",
            "providers": {result["provider"]: "0.6.5" for result in results},
        },
        "absent": {"flash-attn": "not installed: No module named 'flash_attn'"},
        "latency": {
            "all_gather_microseconds": {"96": 20.0},
            "launch_microseconds": 3.0,
            "copy_terabytes_per_second": 4.2,
        },
        "assumptions": {
            "note": "assumed, not measured",
            "gpus_a_host": 8,
            "hop_microseconds": 1.0,
            "host_hop_microseconds": 4.0,
            "link_gigabytes_per_second": 300.0,
            "host_link_gigabytes_per_second": 40.0,
            "all_gather_microseconds": 20.0,
        },
        "results": list(results),
        "predictions": [],
        "missing": [],
    }


def point(predicted: float, measured: float | None, **changes: object) -> dict:
    """One of the cost model's."""
    case = {"rows": 8, "columns": 100, "ranks": 1, "hosts": 1, "dtype": "bfloat16", "reduction": "mean"}
    error = None if measured is None else 100 * (predicted / measured - 1)
    numbers = {"predicted_microseconds": predicted, "measured_microseconds": measured, "error_percent": error}
    return case | {"provider": "vocab_parallel_ce"} | numbers | changes


def write(folder: Path, name: str, content: dict) -> None:
    (folder / "results" / name).write_text(json.dumps(content))
