"""A recording of random calls has the same bits each time, and a comparison shows each value that differs."""

import json

import pytest

from tests.support import record_calls
from tests.support.random import public as random_public
from tests.support.random.calls import Where
from tests.support.random.tables import FACTORS

SEEDS = range(len(FACTORS))  # one of each function
RANKS = (2,)

pytestmark = [pytest.mark.quick, pytest.mark.reference]


def recorded(seeds=SEEDS):
    where = Where("cpu", "reference", small=True)
    return {str(seed): record_calls.record_of(seed, where, RANKS) for seed in seeds}


def test_recorded_twice_calls_have_the_same_bits_in_any_order():
    calls = recorded()
    assert list(record_calls.differences(calls, recorded(reversed(SEEDS)))) == []
    assert not [call["error"] for call in calls.values() if "error" in call]
    assert {name.partition(",")[0] for name in FACTORS} - {"one_pass"} == {
        call["function"].partition(",")[0] for call in calls.values()
    }
    for call in calls.values():
        assert [name for name in call["found"] if name.startswith("gradient of ")], call["function"]


def test_what_differs_is_reported(monkeypatch, tmp_path, capsys):
    functions = list(FACTORS)
    seeds = [functions.index(name) for name in ("vocab_parallel_cross_entropy", "distillation_loss, k tokens")]
    before, after = (tmp_path / name for name in ("before.json", "after.json"))
    before.write_text(json.dumps({"calls": recorded(seeds)}))
    own = random_public.PUBLIC["vocab_parallel_cross_entropy"]

    def refuse(given):
        raise ValueError("teacher: refused")

    monkeypatch.setitem(
        random_public.PUBLIC, "vocab_parallel_cross_entropy", lambda given: {"loss": own(given)["loss"] + 0.25}
    )
    monkeypatch.setitem(random_public.PUBLIC, "distillation_loss", refuse)
    after.write_text(json.dumps({"calls": recorded(seeds)}))
    assert record_calls.compare(before, before) == 0
    assert record_calls.compare(before, after) == 1
    said = capsys.readouterr().out
    assert f"{seeds[0]}: vocab_parallel_cross_entropy, 2 ranks, width=" in said
    assert "loss: float32 []: 1 of 1 samples differ, by at most 0.25 beside" in said
    assert "error: None before, ValueError: teacher: refused after" in said
    assert "gradient of" not in said and "2 calls, 2 differ" in said
