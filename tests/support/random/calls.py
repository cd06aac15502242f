"""Random calls of every public function, compared with fp64.

    python -m tests.support.random.calls --device cuda --calls 20000 --seed 0 --processes 12

A seed decides everything: the configuration of ``random.tables``, of which there is a bounded number, and the rest, of
``random.inputs``. ``--only SEED`` repeats one call. ``--small`` makes calls that Triton's interpreter can run, for the
same seeds. Exits with 1 if a call was wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.host.poison import poisoned_allocations
from tests.support.kernels import interpreter
from tests.support.kernels.launch_shapes import BY_SIZE, ONE, SEVERAL, programs
from tests.support.random.call import Call
from tests.support.random.heads import of_head
from tests.support.random.logits import of_logits
from tests.support.random.tables import changes_of, configurations

RANKS = (1, 2, 3)  # of heads; logits have a factor
# How many programs the rows of small and of wide calls have: of itself, a small row has one.
KINDS = {True: (ONE, SEVERAL), False: (BY_SIZE, ONE, SEVERAL)}


class Where(NamedTuple):
    """What runs the calls, until when."""

    device: str
    impl: str
    small: bool
    until: float = float("inf")  # of time.monotonic()


class Result(NamedTuple):
    seed: int
    function: str
    error: str | None


def name_of(seed: int) -> str:
    return configurations()[seed % len(configurations())][0]


def is_head(seed: int) -> bool:
    return "trains" in configurations()[seed % len(configurations())][1]


def kind_of(seed: int, small: bool) -> str:
    """Another one in each round of the configurations, and in later rounds each with each number of a head's ranks."""
    turn, index = divmod(seed, len(configurations()))
    kinds = KINDS[small]
    return kinds[(index + turn + turn // math.lcm(len(kinds), len(RANKS))) % len(kinds)]


def run_call(seed: int, where: Where, kind: str | None = None, changes: dict[str, Any] | None = None) -> None:
    """Make the call of a seed, and check all that it returns.

    ``kind`` of programs, if it is not the seed's; ``changes`` replace values of the configuration.
    """
    of_ranks = {name: value for name, value in changes_of(seed, RANKS).items() if name != "is_module"}
    replaced = {**(of_ranks if is_head(seed) else {}), **(changes or {})}
    call = Call(seed, where.device, where.impl, where.small, replaced)
    with programs(kind or kind_of(seed, where.small)):
        (of_head if call.is_head else of_logits)(call)


def results_of(seeds: Sequence[int], where: Where) -> Iterator[Result]:
    """The calls one after the other; none after an error of the GPU, which later calls would repeat."""
    for seed in seeds:
        if time.monotonic() > where.until:
            return
        try:
            with poisoned_allocations(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run_call(seed, where)
            yield Result(seed, name_of(seed), None)
        except Exception as error:
            yield Result(seed, name_of(seed), f"{type(error).__name__}: {error}"[:600])
            if "CUDA error" in str(error) or "illegal" in str(error):
                return


def _work(connection: Any, seeds: Sequence[int], where: Where) -> None:
    interpret(where)
    for result in results_of(seeds, where):
        connection.send(result)
    connection.close()


def interpret(where: Where) -> None:
    """Let kernels on the CPU be interpreted, in a process that has imported none yet."""
    if where.device == "cpu" and where.impl == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter.mend()


def _in_process(seeds: Sequence[int], where: Where) -> list[Result]:
    """The same in a process, and in another one for the rest if that ends early."""
    results: list[Result] = []
    while len(results) < len(seeds) and time.monotonic() <= where.until:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(theirs, seeds[len(results) :], where))
        process.start()
        theirs.close()
        try:
            while True:
                results.append(ours.recv())
        except EOFError:
            process.join()
        if process.exitcode and len(results) < len(seeds):
            seed = seeds[len(results)]
            results.append(Result(seed, name_of(seed), f"the process ended with {process.exitcode}"))
    return results


def run(seeds: Sequence[int], where: Where, processes: int = 1) -> list[Result]:
    """Make the calls. Those of a configuration are in one process, which compiles its kernels once."""
    if processes == 1:
        return list(results_of(seeds, where))
    n = len(configurations())
    parts = [[seed for seed in seeds if seed % n % processes == index] for index in range(processes)]
    with ThreadPoolExecutor(processes) as pool:
        return [result for results in pool.map(_in_process, parts, [where] * processes) for result in results]


def failures(results: Sequence[Result]) -> str:
    return "\n".join(f"{r.seed} ({r.function}): {r.error}" for r in results if r.error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--impl", help="auto on a GPU, triton on the CPU")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--only", type=int, help="this seed alone")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--small", action="store_true", help="as on the CPU, always")
    given = parser.parse_args()
    is_cpu, start = given.device == "cpu", time.monotonic()
    impl = given.impl or ("triton" if is_cpu else "auto")
    where = Where(given.device, impl, given.small or is_cpu, start + given.seconds)
    if given.only is not None or given.processes == 1:
        interpret(where)
    if given.only is not None:
        print(name_of(given.only), configurations()[given.only % len(configurations())][1])
        run_call(given.only, where)
        return 0
    results = run(range(given.seed, given.seed + given.calls), where, given.processes)
    made, wrong = (Counter(r.function for r in results if r.error or not only) for only in (False, True))
    for function in sorted(made):
        print(f"{function:40} {made[function]:6} calls {wrong[function]:5} wrong")
    print(f"{len(results)} calls, {wrong.total()} wrong, {time.monotonic() - start:.0f} s\n{failures(results)}")
    if given.json is not None:
        record = {"calls": made, "wrong": wrong, "failures": [r._asdict() for r in results if r.error]}
        record |= {"first": given.seed, **where._asdict(), "until": None, "seconds": round(time.monotonic() - start)}
        given.json.write_text(json.dumps(record, indent=2) + "\n", encoding="ascii")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
