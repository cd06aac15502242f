"""The oldest torch and Triton, what refuses older ones, and the table of what the tests ran with."""

import re

import pytest
import torch

from tests.docs.markdown import ROOT
from tests.support.host.fresh import fresh_python
from vocab_parallel_ce import __main__ as cli
from vocab_parallel_ce import selection
from vocab_parallel_ce.versions import LOWEST_TORCH, LOWEST_TRITON, NOT_RUN, TESTED, how_tested, is_older, minor

pytestmark = pytest.mark.reference


def test_versions_are_compared_by_their_numbers():
    assert [minor(version) for version in ("2.11.0a0+git1", "3.6", "10.0.1")] == ["2.11", "3.6", "10.0"]
    for version, is_too_old in {
        "2.9.1": True,
        "2.10.0+cu128": True,
        "2.11.0a0": False,
        "2.13.0": False,
        "3.0": False,
    }.items():
        assert is_older(version, "2.11") == is_too_old, version
    assert not is_older("", "2.11") and not is_older("main", "2.11")  # what cannot be read is tried


def test_an_older_torch_is_refused_at_the_import_in_one_line():
    source = "import torch; torch.__version__ = '2.10.0+cu128'; import vocab_parallel_ce"
    last = fresh_python("-c", source).stderr.splitlines()[-1]
    assert last == (
        f"ImportError: torch: vocab_parallel_ce needs {LOWEST_TORCH} or newer, got 2.10.0+cu128; "
        f"upgrade it: pip install 'torch>={LOWEST_TORCH}'"
    )


def test_an_older_triton_runs_no_kernel_and_doctor_says_why(monkeypatch):
    monkeypatch.setattr(selection, "triton_version", lambda: "3.5.1")
    monkeypatch.setattr(cli, "triton_version", lambda: "3.5.1")
    monkeypatch.setattr(selection, "is_installed", lambda module: True)
    assert selection.triton_state() == "too old" and selection.select("cpu")[0] == "reference"
    with pytest.raises(
        ValueError, match="^impl: 'triton' .* 3.6 or newer, got 3.5.1; upgrade it, or ask for impl='refer"
    ):
        selection.select("cpu", "triton")
    lines = cli.doctor_lines()
    assert "triton 3.5.1 (too old)" in lines and not [line for line in lines if "launch" in line.split()]


def test_doctor_calls_only_pairs_of_the_table_tested():
    for row in TESTED:
        words = ": tested" if row.gpu != NOT_RUN else ": tested, on a CPU only"
        assert how_tested(f"{minor(row.torch)}.9+cu1", f"{minor(row.triton)}.9").endswith(words)
        assert how_tested(row.torch, None).endswith("with triton none: tested")
    first, last = TESTED[0], TESTED[-1]
    for pair in ((first.torch, last.triton), ("2.99.0", first.triton), ("2.99.0", None)):
        assert ": not tested; tested are 2.11 with 3.6, " in how_tested(*pair)
    assert how_tested(torch.__version__, selection.triton_version()) in cli.doctor_lines()


def test_the_lowest_versions_stand_in_every_file():
    lowest = TESTED[0]
    assert (minor(lowest.torch), minor(lowest.triton)) == (LOWEST_TORCH, LOWEST_TRITON)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    expected = {f"torch>={LOWEST_TORCH}", f"triton>={LOWEST_TRITON}"}
    assert set(re.findall(r"\b(?:torch|triton)>=[\d.]+", project)) == expected
    assert f"torch {LOWEST_TORCH} or newer" in (ROOT / "README.md").read_text(encoding="utf-8")
