"""Which tests find small faults of the package: ``faults.txt`` has the faults.

    python -m tests.support.mutations --jobs 2
    python -m tests.support.mutations --only "z-loss 1 % off" -- tests/test_random_calls.py -n 0
    python -m tests.support.mutations --in kernels/ --json found.json -- tests -m cuda -n 0

Each fault is put into a copy of the package and its tests. There pytest runs until the first failure, with the given
arguments, or with the tests that ``SUITES`` has for the file. On a CPU kernels are interpreted. Exits with 1 if less
than ``FLOOR`` of the faults are killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE, FAULTS = ROOT / "vocab_parallel_ce", Path(__file__).with_name("faults.txt")
COPIED = ("vocab_parallel_ce", "tests", "scripts", "docs", "README.md", "CONTRIBUTING.md", "pyproject.toml")
FLOOR = 0.9
SELF = "tests/project/test_mutations.py"  # finds every fault: its text is not the package's
INTERPRETED = "-m interpreter"
NUMBERS = "tests/test_random_calls.py tests/test_edges.py tests/kernels tests/conformance/test_same_bits.py"
EDGES = "tests/logits/test_option_edges.py tests/logits/test_losses.py tests/logits/test_options.py tests/logits"
OF_PAIRS = "tests/test_random_calls.py tests/soft"
OF_TEACHERS = "tests/soft/test_teacher.py tests/test_random_calls.py"
OF_FP16 = "tests/linear/test_objective_kinds.py"
OF_GROUPS = "tests/linear/test_objective_groups.py tests/linear/test_long_groups.py"
OF_WALKS = "tests/kernels/test_layout.py"
OF_GIVEN_IDS = "tests/conformance/test_given_ids.py tests/test_random_calls.py tests/soft/test_topk.py"
OF_HEADS = "tests/test_random_calls.py tests/linear tests/ranks/test_linear.py"
OF_TARGETS = "tests/linear/test_edges.py tests/test_edges.py tests/soft tests/ranks/test_no_columns.py"
OF_DROP_INS = "tests/integrations/test_drop_ins.py tests/integrations/test_rl_distillation.py"
RANKS = "tests/ranks/test_cross_entropy.py"
MODES = "tests/logits/test_gradient_modes.py tests/logits/test_overwritten.py tests/logits/test_sole_owner.py"
PROGRAMS = "tests/kernels/test_programs.py tests/logits/test_plans.py"
REFUSALS = "tests/refusals"  # after each suite
SUITES = {  # of files that begin so, the first that fits; what finds a fault soonest comes first
    "one_pass/__init__": "tests/core/test_one_pass.py",
    "one_pass/rows": "tests/core/test_one_pass.py tests/test_one_pass.py tests/test_one_pass_system.py",
    "one_pass/": "tests/test_one_pass.py tests/test_one_pass_system.py",
    "kernels/walk": f"-m 'interpreter or reference' {OF_WALKS} {OF_PAIRS}",
    "kernels/rows": f"{INTERPRETED} {OF_PAIRS} {NUMBERS}",
    "kernels/algebra": f"{INTERPRETED} {OF_PAIRS}",
    "kernels/divergence_rows": f"{INTERPRETED} {OF_PAIRS}",
    "kernels/divergences": f"{INTERPRETED} {OF_PAIRS}",
    "kernels/teacher_rows": f"{INTERPRETED} {OF_TEACHERS} {OF_PAIRS}",
    "kernels/launch": "tests/kernels tests/test_random_calls.py",
    "kernels/largest": "tests/kernels/test_largest.py",
    "kernels/given_ids": f"{INTERPRETED} {OF_GIVEN_IDS}",
    "kernels/": f"{INTERPRETED} {NUMBERS} {EDGES}",
    "losses/labels": f"-m 'reference or gloo' tests/conformance {OF_HEADS}",
    "api/logits_at": "-m 'reference or gloo' tests/ranks/test_logits_at.py",
    "losses/given_ids": f"-m 'reference or gloo' {OF_GIVEN_IDS}",
    "losses/": f"-m 'reference or gloo' {OF_PAIRS}",
    "layout": "tests/logits/test_losses.py tests/kernels tests/conformance tests/logits tests/linear",
    "targets": f"-m 'reference or gloo' {OF_TARGETS} {NUMBERS}",
    "reference": f"-m 'reference or gloo' {NUMBERS} {EDGES}",
    "spec": f"-m 'reference or gloo' {NUMBERS} tests/core {EDGES}",
    "head/groups": f"-m 'reference or gloo' {OF_GROUPS}",
    "head/objective": f"-m 'reference or gloo' tests/linear/test_objective.py {OF_TEACHERS} {OF_FP16} {OF_GROUPS}",
    "head/": OF_HEADS,
    "integrations/dtensor": "tests/integrations/test_dtensor.py",
    "integrations/nemo": f"{OF_DROP_INS} tests/integrations/test_nemo.py",
    "integrations/rebind": "tests/integrations/test_install.py",
    "integrations/trl": "tests/integrations/test_trl.py",
    "integrations/megatron": "tests/integrations/test_megatron_install.py tests/integrations/test_megatron_calls.py",
    "integrations/transformer_engine": "tests/integrations/test_transformer_engine.py",
    "integrations/torchtitan": "tests/integrations/test_torchtitan.py",
    **dict.fromkeys(
        (f"integrations/{name}" for name in ("verl", "openrlhf", "swift", "skyrl", "log_probs")),
        OF_DROP_INS,
    ),
    "integrations/": "tests/integrations",
    "shard": f"tests/core/test_shard.py {RANKS}",
    "collectives": "tests/ranks/test_cross_entropy.py tests/ranks/test_linear.py",
    "verify": "tests/ranks/test_verify.py tests/ranks/test_verify_fitting.py",
    "selection": "tests/core/test_selection.py",
    "api/next_labels": "tests/logits/test_next_labels.py tests/ranks/test_next_labels.py",
    "api/distillation": f"-m 'reference or gloo' {OF_PAIRS}",
    "api/objective": f"-m reference {OF_TEACHERS}",
    "api/given_ids": "-m reference tests/soft/test_topk.py",
    "api/top_k_teacher": "-m reference tests/soft/test_topk.py tests/soft",
    "api/sampling": "-m 'reference or gloo' tests/core/test_largest.py tests/conformance/test_sampling.py",
    "api/top_k": "tests/ranks/test_top_k.py",
    "largest": "tests/core/test_largest.py tests/ranks/test_top_k.py",
    "compile": "tests/logits/test_compile.py tests/logits/test_compile_edges.py tests/logits/test_operators.py",
    "options": f"{REFUSALS} tests/linear/test_options.py tests/core tests/logits/test_module_options.py {OF_HEADS}",
    "api/call": "-m reference tests/linear/test_options.py",
    "api/": "tests/test_random_calls.py tests/logits/test_outputs.py",
    "program": PROGRAMS,
    "kinds": "tests/core/test_kinds.py",
    "run": f"{MODES} {PROGRAMS} tests/logits tests/linear tests/core tests/soft tests/ranks",
    "": f"{MODES} tests/logits tests/linear tests/core tests/soft tests/ranks",
}


class Fault(NamedTuple):
    name: str
    file: str  # in the package
    old: str
    new: str


class Outcome(NamedTuple):
    name: str
    killed_by: str | None  # a test; None: it survived
    seconds: float
    ended: bool = True  # whether the tests did; a test that hangs fails by the timeout of pytest


def faults() -> Iterator[Fault]:
    """Read the table: ``# file``, and for each fault its name, ``- `` before old lines and ``+ `` before new ones."""
    for part in re.split(r"^# ", FAULTS.read_text(encoding="ascii"), flags=re.MULTILINE)[1:]:
        file, _, others = part.partition("\n")
        for text in others.strip("\n").split("\n\n"):
            name, *lines = text.split("\n")
            old, new = ("\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+")
            yield Fault(name, file, old, new)


def apply(fault: Fault, package: Path) -> None:
    """Put a fault into a package, in which its old text occurs once."""
    path = package / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.name}: expected its old text once in {fault.file}, got {text.count(fault.old)} times")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")


def arguments_for(fault: Fault, given: Sequence[str]) -> list[str]:
    suites = next(suites for beginning, suites in SUITES.items() if fault.file.startswith(beginning))
    return list(given) or ["-n", "0", *shlex.split(suites), REFUSALS]


def outcome(fault: Fault, given: Sequence[str], timeout: float) -> Outcome:
    """Run the tests over a copy with the fault."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            put = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            put(ROOT / name, copy / name)
        apply(fault, copy / "vocab_parallel_ce")
        # Compiled kernels are those of this fault; bytecode of equal size and time would be another's.
        own = {"PYTHONPATH": folder, "TRITON_CACHE_DIR": f"{folder}/triton", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "--ignore",
            SELF,
            *arguments_for(fault, given),
        ]
        process = subprocess.Popen(
            command,
            cwd=copy,
            env=os.environ | own,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output = process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with its ranks, which may wait for each other
            process.communicate()
            return Outcome(fault.name, None, timeout, ended=False)
    if process.returncode > 2 or "no tests ran" in output:
        raise RuntimeError(f"{fault.name}: pytest ended with {process.returncode}\n{output[-2000:]}")
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", output, flags=re.MULTILINE)
    killer = found[1] if found else "the process" if process.returncode else None
    return Outcome(fault.name, killer, round(time.monotonic() - start, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault; may be repeated")
    parser.add_argument("--in", default="", dest="within", metavar="FILE", help="the beginning of the faults' files")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of the tests of a fault")
    parser.add_argument("--json", type=Path)
    parser.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    given = parser.parse_args()
    chosen = [f for f in faults() if f.file.startswith(given.within) and f.name in (given.only or [f.name])]
    if not chosen:
        parser.error("--only and --in: expected names of faults and files of faults.txt, got others")
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(given.jobs) as pool:
        for found in pool.map(lambda fault: outcome(fault, given.pytest, given.timeout), chosen):
            result = found.killed_by or ("SURVIVED" if found.ended else "NO END, which says nothing")
            print(f"{found.seconds:6.1f} s  {found.name}: {result}", flush=True)
            outcomes.append(found)
            if given.json is not None:
                given.json.write_text(json.dumps([each._asdict() for each in outcomes], indent=1) + "\n")
    killed = sum(found.killed_by is not None for found in outcomes)
    print(f"{killed} of {len(outcomes)} faults killed")
    return int(killed < FLOOR * len(outcomes))


if __name__ == "__main__":
    raise SystemExit(main())
