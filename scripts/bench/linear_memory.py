"""Extra peak memory of a linear cross-entropy against the number of tokens, outputs included."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from bench.linear_cases import HIDDEN_SIZE, LinearCase, make_inputs
from bench.linear_providers import LinearProvider
from bench.measure import Result, reason_of
from bench.providers import OURS
from bench.timing import Timer

CURVE_TOKENS = (4096, 8192, 16384, 32768, 65536)
CURVE_VOCABULARY = 128256
CURVE_PROVIDERS = f"{OURS},torch eager,liger-kernel,cut-cross-entropy"


def curve_cases(ranks: int) -> list[LinearCase]:
    return [LinearCase("mean", tokens, CURVE_VOCABULARY, HIDDEN_SIZE, ranks) for tokens in CURVE_TOKENS]


def measure_memory(
    case: LinearCase,
    group: Any,
    rank: int,
    providers: Sequence[LinearProvider],
    timer: Timer,
    known: Sequence[Result] = (),
    device: str = "cuda",
) -> list[Result]:
    """One point a provider, of its second call; not of one that was refused at fewer tokens, in ``known``."""
    too_large = {point["provider"]: point["refused"] for point in known if "refused" in point}
    inputs = make_inputs(case, rank, device)
    points = []
    for provider in providers:
        run = partial(provider.call, inputs, case.reduction, group)
        point = case._asdict() | {"provider": provider.name, "gradient_bytes": gradient_bytes(case)}
        if provider.name in too_large:
            points.append(point | {"refused": too_large[provider.name]})
            continue
        try:
            run()
            point["extra_peak_bytes"] = timer.extra_peak_bytes(run)
        except Exception as error:
            if provider.is_ours:
                raise
            point["refused"] = f"{reason_of(error)} at {case.tokens} tokens"
        points.append(point)
        timer.release()
    return points


def gradient_bytes(case: LinearCase) -> int:
    """Of the gradients of hidden and of the weight, which every provider returns."""
    return case.element_size * case.hidden_size * (case.tokens + case.columns)


def growth_bytes_a_token(points: Sequence[Result], provider: str) -> float | None:
    """What a token more costs, from the fewest to the most, beyond its gradient; None without two points."""
    measured = sorted(
        (point["tokens"], point["extra_peak_bytes"] - point["gradient_bytes"])
        for point in points
        if point["provider"] == provider and "refused" not in point
    )
    if len(measured) < 2:
        return None
    (fewest, least), (most, largest) = measured[0], measured[-1]
    return (largest - least) / (most - fewest)
