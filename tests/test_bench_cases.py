"""Which cases the benchmark measures, and what its cost model predicts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from bench import cost_model, report  # noqa: E402
from bench.cases import (  # noqa: E402
    BYTES_IN_ROTATION,
    Effort,
    Workload,
    chosen_workloads,
    parsed_shape,
    table_workloads,
)

pytestmark = pytest.mark.reference

MACHINE = cost_model.Machine(4.0, 1.0, 2, {1000: 20.0, 3000: 24.0})


def test_every_target_is_in_the_table():
    """The table of targets, which another file holds for the README, and the one that is measured."""
    path = Path(__file__).parents[1] / "scripts" / "results" / "targets.json"
    for target in json.loads(path.read_text())["cases"]:
        ranks = target["ranks"]
        columns = target["vocabulary"] // ranks
        workload = Workload(target["rows"], columns, target["dtype"], target["reduction"])
        assert workload in table_workloads(ranks), target


def test_the_table_of_several_ranks_divides_the_vocabulary():
    assert [(w.rows, w.columns) for w in table_workloads(4)] == [(16384, 32064), (4096, 32064), (1024, 8000)]
    assert table_workloads(8)[0].columns == 16032
    with pytest.raises(ValueError, match="vocabulary: expected a multiple of the 7 ranks, got 128256"):
        table_workloads(7)


def test_what_is_measured_without_options_is_the_table():
    assert chosen_workloads(1) == table_workloads(1)
    assert chosen_workloads(1, dtype="float32") == [Workload(4096, 64128, "float32", "none")]
    assert {w.reduction for w in chosen_workloads(1, reduction="mean")} == {"mean"}


def test_sweeps_and_shapes_replace_the_table_and_nothing_is_measured_twice():
    swept = chosen_workloads(2, sweeps=["vocabulary"], reduction="none")
    assert [w.columns for w in swept] == [4096, 8192, 16384, 32768, 65536, 131072]
    assert {w.rows for w in swept} == {4096}
    tokens = chosen_workloads(1, sweeps=["tokens"], dtype="float16")
    assert {w.columns for w in tokens} == {128256} and {w.dtype for w in tokens} == {"float16"}
    assert len(tokens) == 12 and {w.reduction for w in tokens} == {"mean", "none"}
    twice = chosen_workloads(1, table=True, shapes=["4096x128256"])
    assert twice == table_workloads(1)
    with pytest.raises(ValueError, match="workloads: expected at least one"):
        chosen_workloads(2, dtype="float16")


@pytest.mark.parametrize("text", ["4096", "4096x", "axb", "0x5", "4096x128256x2", "-1x5"])
def test_a_shape_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="shape: expected ROWSxCOLUMNS"):
        parsed_shape(text)


@pytest.mark.parametrize("shard_bytes", [2**20, 16 * 2**20, 65 * 2**20, 10**9, 8 * 10**9])
def test_effort_suits_the_size(shard_bytes):
    effort = Effort.of(shard_bytes, rounds=15)
    assert 2 <= effort.buffers <= 16
    assert effort.buffers * shard_bytes >= BYTES_IN_ROTATION or effort.buffers == 16
    assert effort.eager_calls >= effort.buffers
    assert effort.eager_calls >= 20 or shard_bytes == 8 * 10**9
    assert effort.rounds == (15 if shard_bytes < 2 * 10**9 else 5)


def test_interpolation():
    points = {0: 10.0, 100: 20.0, 300: 30.0}
    assert cost_model.interpolated(points, 50) == 15.0
    assert cost_model.interpolated(points, 100) == 20.0
    assert cost_model.interpolated(points, 200) == 25.0
    assert cost_model.interpolated(points, 500) == 40.0
    assert cost_model.interpolated(points, -5) == 10.0
    assert cost_model.interpolated({7: 3.0}, 100) == 3.0


def test_predicted_time_is_bytes_launches_and_gather():
    predict = cost_model.predicted_microseconds
    shard = {"rows": 1000, "columns": 4000, "element_size": 2}
    assert predict(MACHINE, **shard, ranks=1, reduction="none") == pytest.approx(24e6 / 4e6 + 2)
    assert predict(MACHINE, **shard, ranks=1, reduction="mean", passes=2) == pytest.approx(16e6 / 4e6 + 3)
    gather = cost_model.interpolated(MACHINE.gathers, 12000)
    assert predict(MACHINE, **shard, ranks=2, reduction="none") == pytest.approx(6 + 3 + gather)


def test_the_gather_is_the_measured_one_and_a_ring_beyond_it():
    gather = cost_model.all_gather_microseconds
    assumed = MACHINE.assumed
    assert gather(MACHINE, 1, 1000) == 0.0
    assert gather(MACHINE, 2, 1000) == 20.0
    inside = gather(MACHINE, 8, 1000)
    assert inside == pytest.approx(20 + 6 * assumed.hop_microseconds + 6e-3 / 0.3, rel=1e-3)
    times = [gather(MACHINE, ranks, 1000) for ranks in cost_model.RANKS]
    assert times == sorted(times)
    several = gather(MACHINE, 64, 1000)
    per_link = 62 * 1000 / assumed.host_link_gigabytes_per_second / 1e3
    assert several == pytest.approx(20 + 6 + 56 * assumed.host_hop_microseconds + per_link)
    alone = cost_model.Machine(4.0, 1.0, 1, {})
    assert gather(alone, 2, 1000) == assumed.all_gather_microseconds
    assert gather(cost_model.Machine(4.0, 1.0, 4, {1000: 30.0}), 2, 1000) < 30.0


def test_predictions_stand_beside_what_was_measured():
    result = {"rows": 4096, "columns": 128256, "dtype": "bfloat16", "reduction": "none", "ranks": 1}
    result |= {"provider": "vocab_parallel_ce", "microseconds": 800.0}
    key = (4096, 128256, "bfloat16", "none", "vocab_parallel_ce")
    points = cost_model.predictions(MACHINE, [result], {key: 3}, {"bfloat16": 2})
    assert points[0]["measured_microseconds"] == 800.0
    expected = 3 * 4096 * 128256 * 2 / 4e6 + 2
    assert points[0]["predicted_microseconds"] == round(expected, 1)
    assert points[0]["error_percent"] == round(100 * (expected / 800 - 1), 1)
    rest = [(p["rows"], p["ranks"], p["hosts"]) for p in points[1:]]
    assert (4096, 1, 1) not in rest and (16384, 64, 8) in rest and (4096, 16, 2) in rest
    assert len(rest) == 2 * len(cost_model.RANKS) - 1
    text = report.predictions_text(points)
    assert len(text.splitlines()) == 1 + len(points) and "800.0" in text


def test_the_latency_section_makes_a_machine():
    latency = {"copy_terabytes_per_second": 4.2, "launch_microseconds": 1.5}
    latency |= {"all_gather_microseconds": {"768": 14.0, "12288": 16.0}}
    machine = cost_model.Machine.of(latency, 2)
    assert machine.gathers == {768: 14.0, 12288: 16.0} and machine.ranks == 2
    described = cost_model.described_assumptions(machine.assumed)
    assert described["note"] == "assumed, not measured" and described["gpus_a_host"] == 8
