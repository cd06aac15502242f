"""The benchmark without a GPU: its modules, a timer that is told its times, and made-up results."""

import sys
from collections.abc import Callable
from pathlib import Path

from torch.nn import functional

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

from bench_lib import cases, clock, measure, providers  # noqa: E402

# Few calls are enough for these tests.
cases.MOST_BUFFERS, cases.MOST_EAGER_CALLS = 4, 20
OURS, IN_FORWARD, EAGER, SHARDED = cases.OURS, cases.IN_FORWARD, cases.EAGER, cases.SHARDED
KNOWN = [each for each in providers.PROVIDERS if each.takes == "logits"]
LOGITS = cases.Case("none", 96, 40, 1, dtype="float32")
HEAD = cases.Case("mean", 48, 64, 1, 32, "float32")
ALONE = clock.Ranks(0, 1, None, "cpu")


class ScriptedTimer(clock.CpuTimer):
    """Runs what it is handed; the yardstick takes 2 ms and others as told, round by round, or 3 ms."""

    def __init__(self, times: dict[str, list[float]] | None = None) -> None:
        super().__init__(ranks=1)
        self.times = times or {}
        self.order: list[str] = []
        self.is_timing = False

    def queued(self, name: str, run: Callable, prepare: Callable = clock.nothing) -> float:
        """As if the first attempt's sleep had been too short for the host."""
        for _ in range(2):
            prepare()
            self.is_timing = True
            run()
            self.is_timing = False
        series = self.times.get(name, [2.0 if name.endswith(measure.YARDSTICK) else 3.0])
        self.order.append(name)
        return series[(self.order.count(name) - 1) % len(series)]

    def eager(self, name: str, run: Callable, prepare: Callable = clock.nothing) -> float:
        return self.queued(f"eager {name}", run, prepare)

    def was_queued(self, name: str) -> bool:
        return name != EAGER

    def captured(self, call: Callable, operands: list) -> Callable:
        return lambda: [call(operand) for operand in operands]

    def extra_peak_bytes(self, run: Callable) -> int:
        run()
        return 192


def measured(names, timer=None, case=LOGITS, extra=(), graphs=False):
    known = [each for each in providers.PROVIDERS if (each.takes == "head") == case.is_head]
    chosen = [*(providers.chosen(",".join(names), known) if names else ()), *extra]
    subject = measure.subject_of(case, ALONE, 3)
    return {
        each["provider"]: each for each in measure.measure(subject, chosen, timer or ScriptedTimer(), graphs=graphs)
    }


def provider_of(loss_of, **fields):
    module = OURS if fields.pop("is_ours", False) else "torch"
    return providers.Provider("other", lambda m: loss_of, module, "torch", **fields)


def eager(logits, labels, reduction, group):
    return functional.cross_entropy(logits, labels, reduction=reduction)


def result(provider, ratio, **changes):
    return LOGITS._asdict() | {"provider": provider, "ratio": ratio, "ms": 20 * ratio, "peak_bytes": 2**31} | changes


def document(*results):
    host = {"gpu": "Imaginary GPU", "gpus_used": 1, "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
    host |= {"python": "3.12.3", "commit": "0123456789abcdef", "packages": {}}
    return {"host": host, "finished": True, "absent": {}, "results": list(results)}
