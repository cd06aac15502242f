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

import torch
from torch import Tensor

from tests.support.host.poison import poisoned_allocations
from tests.support.kernels import interpreter
from tests.support.kernels.launch_shapes import BY_SIZE, ONE, SEVERAL, programs
from tests.support.random import heads, logits
from tests.support.random.call import UNITS, Call, alike, assert_near
from tests.support.random.public import Returned
from tests.support.random.tables import changes_of, configurations
from tests.support.random.truth import Numbers, Truth, finite, transformed
from tests.support.ranks.in_turn import in_turn

Ready = heads.HeadCase | logits.LogitsCase
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


def ready(call: Call) -> Ready:
    return heads.ready(call) if call.is_head else logits.ready(call)


def run_call(seed: int, where: Where, kind: str | None = None, changes: dict[str, Any] | None = None) -> None:
    """Make the call of a seed, and check all that it returns.

    ``kind`` of programs, if it is not the seed's; ``changes`` replace values of the configuration.
    """
    of_ranks = {name: value for name, value in changes_of(seed, RANKS).items() if name != "is_module"}
    replaced = {**(of_ranks if is_head(seed) else {}), **(changes or {})}
    call = Call(seed, where.device, where.impl, where.small, replaced)
    with programs(kind or kind_of(seed, where.small)):
        check(call)


def check(call: Call) -> None:
    case = ready(call)
    made: list[tuple[Truth, Numbers, Tensor]] = []  # by the rank that comes first

    def on_rank(rank: int, group: Any) -> Returned:
        with case.autocast():
            returned = call.invoke(case.given[rank], group)
        if not made:
            made.append(gradients_of(call, case, returned))
        with torch.autograd.set_multithreading_enabled(False):  # backward may wait for the other ranks' threads
            case.backward(rank, returned, made[0][1])
        return returned

    returned, *others = in_turn(call.ranks, on_rank)
    truth, upstream, grad = made[0]
    for name, value in truth.outputs.items():
        assert_near(name, returned[name], value, truth.bounds[name])
    if "predictions" in returned:
        check_predictions(call, case, returned["predictions"])
    for name in returned.keys() - {"gradient"}:
        assert all(alike(other[name], returned[name]) for other in others), f"{name}: differs between the ranks"
    case.check_gradients(grad, truth.of_gradient(upstream), upstream)


def gradients_of(call: Call, case: Ready, returned: Returned) -> tuple[Truth, Numbers, Tensor]:
    """The truth, the upstream gradients, and the gradient of the logits in fp64."""
    leaf = case.logits.detach().double().requires_grad_()
    truth, upstream = case.beside.compute(leaf, case.rounding), case.upstream
    if upstream is None:
        is_pair = call.function == "cross_entropy_forward"  # without autograd
        names = [name for name in truth.outputs if is_pair or returned[name].requires_grad]
        if call.draw["gradient"] == "in_forward":  # which knows the loss's gradient alone
            names = ["loss"]
        upstream = call.upstream(returned, names)
    outputs = [truth.outputs[name] for name in upstream]
    factors = [value.to(output) for value, output in zip(upstream.values(), outputs, strict=True)]
    (grad,) = torch.autograd.grad(outputs, leaf, factors)
    return truth, upstream, grad


def check_predictions(call: Call, case: Ready, ids: Tensor) -> None:
    """Predictions are those of logits that cannot be told from the largest."""
    options, rounding = call.of_oracle, case.rounding
    z, temperature = transformed(case.logits.double(), options), options.get("temperature", 1.0)
    z_max, is_exact = z.amax(-1), options.get("softcap") is None and options.get("logit_scale", 1.0) == 1
    known = z_max.isfinite() & (case.labels != options.get("ignore_index", -100))
    if isinstance(temperature, Tensor):
        known, is_exact = known & ((temperature > 0) & temperature.isfinite()), False
    is_exact = is_exact and temperature == 1 and not rounding.any()
    slack = (rounding + finite(z).abs().amax(-1)) * (0 if is_exact else UNITS * 2.0**-23)
    assert torch.equal(ids >= 0, known), "predictions: known in other rows"
    assert bool((ids < z.shape[-1]).all()), "predictions: outside the vocabulary"
    at = z.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert bool((at >= z_max - slack)[known].all()), "predictions: not the largest"
    if is_exact:
        columns = torch.arange(z.shape[-1], device=z.device)
        first = torch.where(z == z_max.unsqueeze(-1), columns, z.shape[-1]).amin(-1)
        assert torch.equal(ids[known], first[known]), "predictions: not the first of equals"


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
