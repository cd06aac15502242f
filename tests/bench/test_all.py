"""``scripts/bench_all.sh`` with a python that measures nothing: documents of steps that ended, and what is left."""

import os
import subprocess

import pytest

from tests.bench.support import SCRIPTS

from bench_lib import documents  # isort: skip

pytestmark = pytest.mark.reference

PYTHON = """#!/usr/bin/env bash
[ "$1" = -c ] && echo 200 && exit
echo "$*" >"${@: -1}"
case "$*" in *compile*) echo "no GPU"; exit 1 ;; esac
"""


def ran(tmp_path, *steps, minutes="1"):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir(exist_ok=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    results = tmp_path / "a b"
    results.mkdir(exist_ok=True)
    set_here = {"PATH": f"{python.parent}:{os.environ['PATH']}", "VPCE_RESULTS": str(results), "VPCE_MINUTES": minutes}
    words = ["bash", str(SCRIPTS / "bench_all.sh"), *steps]
    done = subprocess.run(words, env=os.environ | set_here, capture_output=True, text=True)
    return done, {path.stem: path.read_text() for path in results.iterdir()}


def test_each_step_writes_a_document_that_the_pages_read(tmp_path):
    done, written = ran(tmp_path, "table", "linear", "memory", "options", "tokens", "vocabulary", "transformers", "rl")
    known = {documents.name_of(kind, 1).removesuffix(".json") for kind in documents.KINDS} | set(documents.STEPS)
    assert done.returncode == 0 and done.stdout.endswith("left: nothing\n")
    assert len(written) == 8 and written.keys() <= known
    assert "table --sweep tokens --providers" in written["bench_sweep_tokens_1gpu"]


def test_a_step_that_fails_or_takes_too_long_is_left_without_a_document(tmp_path):
    done, written = ran(tmp_path, "compile", "table")
    assert done.returncode == 1 and written.keys() == {"bench_table_1gpu"}
    assert "no GPU" in done.stdout and done.stdout.endswith("left: compile\n")
    done, written = ran(tmp_path, "losses", "options", minutes="0")
    assert done.stdout.endswith("left: losses options\n") and len(written) == 1
    assert ran(tmp_path, "nothing")[0].returncode == 2
