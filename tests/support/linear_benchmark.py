"""The linear cross-entropy's benchmark with made-up numbers: documents, and a timer that is told times."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

OURS = "vocab_parallel_ce"
UNFUSED = f"F.linear + {OURS}"
YARDSTICK = "three bare matmuls"
HOST = {
    "gpu": "Imaginary GPU",
    "gpus_used": 1,
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "python": "3.12.3",
    "commit": "0123456789abcdef",
    "packages": {"liger-kernel": "0.8.5"},
}


class ScriptedTimer:
    """Runs what it is handed; says that the matmuls take 2 ms and another call as told, round by round."""

    def __init__(self, times: dict[str, list[float]] | None = None) -> None:
        self.times = times or {}
        self.order: list[str] = []

    def queued(self, name: str, run: Callable[[], object]) -> float:
        self.order.append(name)
        run()
        series = self.times.get(name, [2.0 if name == YARDSTICK else 3.0])
        return series[(self.order.count(name) - 1) % len(series)]

    def was_queued(self, name: str) -> bool:
        return name != "torch eager"

    def extra_peak_bytes(self, run: Callable[[], object]) -> int:
        run()
        return 20000

    def release(self) -> None: ...

    def eager(self, run):
        raise NotImplementedError

    def captured(self, call, buffers):
        raise NotImplementedError


def case(**changes: object) -> dict:
    fixed = {"reduction": "mean", "tokens": 8, "vocabulary": 64, "hidden_size": 32, "ranks": 1}
    return fixed | {"dtype": "bfloat16"} | changes


TARGETS = {
    "cases": [
        case() | {"at_most": {"ratio": 1.06, "gib_over_fp32_weight_gradient": 0.5}},
        case(tokens=16) | {"at_most": {}},
        case(ranks=4) | {"at_most": {"ratio": 1.07}},
    ],
    "memory": {"growth_bytes_a_token_beyond_gradient": 64, "from_tokens": 0},
}


def result(provider: str, ratio: float, **changes: object) -> dict:
    numbers = {
        "ratio": ratio,
        "ratio_spread": [ratio, ratio],
        "milliseconds": 20 * ratio,
        "yardstick_milliseconds": 20.0,
        "all_reduce_milliseconds": None,
        "teraflops_per_second": 700.0,
        "queued": True,
        "extra_peak_bytes": 2**31,
        "bytes_over_fp32_weight_gradient": 2**30 // 4,
        "errors": {"loss": 1e-6, "d_hidden": 2e-3, "d_weight": 3e-3},
        "wrong": None,
    }
    return case() | {"provider": provider} | numbers | changes


def refusal(provider: str, why: str, **changes: object) -> dict:
    return case() | {"provider": provider, "refused": why} | changes


def document(*results: dict, **changes: object) -> dict:
    absent = {"quack-kernels": "not installed: No module named 'quack'"}
    return {"host": dict(HOST), "finished": True, "absent": absent, "results": list(results)} | changes


def memory_document() -> dict:
    points = [
        case(tokens=tokens)
        | {"provider": provider, "gradient_bytes": tokens * 2**20}
        | ({"refused": "out of memory at 64 tokens"} if size is None else {"extra_peak_bytes": size * 2**30})
        for tokens, sizes in ((16, (2, 3)), (32, (2, 6)), (64, (2, None)))
        for provider, size in zip((OURS, "torch eager"), sizes, strict=True)
    ]
    return document(points=points)


def write(folder: Path, name: str, content: dict) -> None:
    (folder / "results" / name).write_text(json.dumps(content))
