"""What a call should take: bytes over bandwidth, one all_gather, launches. Pure functions.

    time = passes * shard bytes / copy bandwidth + launches * launch + all_gather(ranks, bytes a rank)

Bandwidth, launch and the all_gather of this run's ranks are measured. For other numbers of ranks the
gather is taken as a ring, whose steps each wait for the slowest link:

    all_gather(R, b) = measured(b) + (R - R_measured) * hop, within a host
                     = measured(b) + (R_host - R_measured) * hop + (R - R_host) * host_hop, over several

and what it adds for its bytes, ``(R - R_measured) * b / link bandwidth``, with the link between hosts
where there are several. What was not measured is in :class:`Assumptions`, and is printed as assumed.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RANKS = (1, 2, 4, 8, 16, 32, 64)
SHAPES = ((16384, 128256), (4096, 128256))  # rows, vocabulary of all ranks
# Kernels a call of this project's two-kernel implementation launches beside the gather. mean: statistics,
# losses, their sum, gradient; in_forward: statistics, gradient and losses, their sum, the scale. none:
# statistics, losses, gradient; one rank's statistics kernel writes the losses itself.
LAUNCHES = {"mean": 4, "none": 3}
STATISTICS_BYTES = 12  # three fp32 a row
ASSUMED = "assumed, not measured"


@dataclass(frozen=True)
class Assumptions:
    """What this host cannot measure."""

    gpus_a_host: int = 8
    hop_microseconds: float = 1.0
    host_hop_microseconds: float = 4.0
    link_gigabytes_per_second: float = 300.0
    host_link_gigabytes_per_second: float = 40.0
    all_gather_microseconds: float = 20.0  # of two ranks, where there is one rank to measure on


@dataclass(frozen=True)
class Machine:
    """What was measured; ``gathers`` are microseconds by bytes a rank, of ``ranks`` ranks."""

    copy_terabytes_per_second: float
    launch_microseconds: float
    ranks: int
    gathers: Mapping[int, float]
    assumed: Assumptions = field(default_factory=Assumptions)

    @classmethod
    def of(cls, latency: Mapping[str, Any], ranks: int, assumed: Assumptions | None = None) -> Machine:
        """From the ``latency`` section of a document."""
        return cls(
            latency["copy_terabytes_per_second"],
            latency["launch_microseconds"],
            ranks,
            {int(size): time for size, time in latency["all_gather_microseconds"].items()},
            assumed or Assumptions(),
        )


def interpolated(points: Mapping[int, float], place: int) -> float:
    """Linear between the two nearest points, and beyond the last along its neighbours' line.

    ``interpolated({0: 10.0, 100: 20.0}, 50) == 15.0``; below the first point its value.
    """
    places = sorted(points)
    if place <= places[0] or len(places) == 1:
        return points[places[0]]
    right = min(max(1, bisect.bisect_left(places, place)), len(places) - 1)
    low, high = places[right - 1], places[right]
    slope = (points[high] - points[low]) / (high - low)
    return points[high] + slope * (place - high)


def hosts_of(ranks: int, assumed: Assumptions) -> int:
    return -(-ranks // assumed.gpus_a_host)


def all_gather_microseconds(machine: Machine, ranks: int, bytes_a_rank: int) -> float:
    """One all_gather over ``ranks``, measured where this run has as many, otherwise by the ring above."""
    if ranks == 1:
        return 0.0
    assumed = machine.assumed
    known_ranks = machine.ranks if machine.gathers else 2
    known = (
        interpolated(machine.gathers, bytes_a_rank) if machine.gathers else assumed.all_gather_microseconds
    )
    several_hosts = hosts_of(ranks, assumed) > 1
    inside = min(ranks, max(assumed.gpus_a_host, known_ranks)) - known_ranks
    between = ranks - known_ranks - inside
    link = assumed.host_link_gigabytes_per_second if several_hosts else assumed.link_gigabytes_per_second
    more_bytes = (ranks - known_ranks) * bytes_a_rank
    time = known + inside * assumed.hop_microseconds + between * assumed.host_hop_microseconds
    return max(0.0, time + more_bytes / link / 1e3)


def predicted_microseconds(
    machine: Machine,
    *,
    rows: int,
    columns: int,
    element_size: int,
    ranks: int,
    reduction: str,
    passes: int = 3,
) -> float:
    """Forward and backward of one rank; ``passes`` reads and writes of the shard, two for ``one_pass``."""
    moving = passes * rows * columns * element_size / machine.copy_terabytes_per_second / 1e6
    launches = LAUNCHES[reduction] - (3 - passes) - (reduction == "none" and ranks == 1)
    launching = launches * machine.launch_microseconds
    return moving + launching + all_gather_microseconds(machine, ranks, STATISTICS_BYTES * rows)


def predictions(
    machine: Machine,
    results: list[dict[str, Any]],
    passes_of: Mapping[tuple[int, int, str, str, str], int],
    element_sizes: Mapping[str, int],
) -> list[dict[str, Any]]:
    """The measured points, then every number of ranks that was not, each with its prediction.

    Args:
        results: timed results of this project.
        passes_of: passes by rows, columns, dtype, reduction and provider of ``results``.
        element_sizes: bytes by dtype.
    """
    points = []
    for result in results:
        key = (result["rows"], result["columns"], result["dtype"], result["reduction"], result["provider"])
        measured = result["microseconds"]
        points.append(_point(machine, *key, result["ranks"], passes_of[key], element_sizes, measured))
    seen = {(point["rows"], point["columns"], point["ranks"], point["reduction"]) for point in points}
    for rows, vocabulary in SHAPES:
        for ranks in RANKS:
            if (rows, vocabulary // ranks, ranks, "none") not in seen:
                shape = (rows, vocabulary // ranks, "bfloat16", "none", "vocab_parallel_ce")
                points.append(_point(machine, *shape, ranks, 3, element_sizes, None))
    return points


def _point(
    machine: Machine,
    rows: int,
    columns: int,
    dtype: str,
    reduction: str,
    provider: str,
    ranks: int,
    passes: int,
    element_sizes: Mapping[str, int],
    measured: float | None,
) -> dict[str, Any]:
    predicted = predicted_microseconds(
        machine,
        rows=rows,
        columns=columns,
        element_size=element_sizes[dtype],
        ranks=ranks,
        reduction=reduction,
        passes=passes,
    )
    return {
        "ranks": ranks,
        "hosts": hosts_of(ranks, machine.assumed),
        "rows": rows,
        "columns": columns,
        "dtype": dtype,
        "reduction": reduction,
        "provider": provider,
        "predicted_microseconds": round(predicted, 1),
        "measured_microseconds": measured,
        "error_percent": None if measured is None else round(100 * (predicted / measured - 1), 1),
    }


def described_assumptions(assumed: Assumptions) -> dict[str, Any]:
    return {"note": ASSUMED} | asdict(assumed)
