"""The bits of random calls of every public function, recorded at one commit and compared with those of another.

    python -m tests.support.record_calls --device cpu --impl reference --ranks 1,2,4 --calls 400 --seed 0 --out X.json
    python -m tests.support.record_calls --compare BEFORE.json AFTER.json

A seed decides a case, as in ``random.calls``, except the number of ranks, which is one of ``--ranks``. More cases are
modules, and some heads have sequence parallelism. ``random.public`` alone says how a case is passed to the public
functions. If their parameters change, edit that file, and keep the configurations of ``random.tables`` until the
comparison is done. The inputs are recorded too, so that a case that is no longer the same shows as such.

Ranks are threads (``ranks.in_turn``), so that one GPU has any number of them. Recorded of rank 0, and of another rank
where its bits differ: the loss and all other outputs, every gradient, and which of the tensors passed were written.
All NaN count as one.

Exits with 1 if a call raised, if a public function had less than 10 of 400 calls, or if bits differ.
"""

from __future__ import annotations

import argparse
import base64
import copy
import functools
import hashlib
import json
import multiprocessing
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.host.poison import poisoned_allocations
from tests.support.kernels import interpreter
from tests.support.random.call import Call
from tests.support.random.calls import Ready, Where, ready
from tests.support.random.logits import LogitsCase
from tests.support.random.public import PUBLIC, Given
from tests.support.random.tables import changes_of
from tests.support.random.truth import Numbers
from tests.support.ranks.in_turn import in_turn
from vocab_parallel_ce import checks

DIFFERENTIABLE = ("entropy", "log_probs", "loss", "lse")
SAMPLES = 64  # values of an output that are kept
LEAST = 1 / 40  # of the calls, for each public function
Record = dict[str, Any]


# ---- one call ---------------------------------------------------------------------------------------------------


def plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, with one NaN."""
    own = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return torch.where(own.isnan(), torch.full_like(own, float("nan")), own) if own.is_floating_point() else own


def digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return hashlib.sha256(repr(value).encode()).hexdigest()
    own = plain(value)
    head = f"{own.dtype} {tuple(own.shape)} "
    return hashlib.sha256(head.encode() + own.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def sampled(flat: Tensor) -> Tensor:
    """Some values, at places that depend on their number alone; all, if they are few."""
    n = len(flat)
    return flat[sorted(random.Random(n).sample(range(n), SAMPLES))] if n > SAMPLES else flat


def summary(value: Tensor) -> dict[str, str]:
    own = plain(value)
    samples = sampled(own.view(-1)).view(torch.uint8).numpy().tobytes()
    return {
        "sha256": digest(own),
        "kind": f"{str(own.dtype).removeprefix('torch.')} {list(own.shape)}",
        "sum": own.double().nan_to_num(0.0).sum().item().hex(),
        "samples": base64.b64encode(samples).decode(),
    }


def tensors_of(given: Given) -> Numbers:
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def upstream_of(call: Call, found: Numbers) -> Numbers:
    """Alike on all ranks: what is drawn here depends on the seed and the outputs' shapes alone."""
    own = copy.copy(call)
    own.draw = copy.copy(call.draw)
    own.draw.rng = random.Random(f"upstream {call.seed}")
    own.draw.generator = torch.Generator(call.draw.device).manual_seed(call.seed + 2**31)
    names = [name for name in DIFFERENTIABLE if name in found]
    if call.function.endswith("cross_entropy") or call.function == "cross_entropy_forward":
        names = ["loss"]
    return own.upstream(found, names)


def is_alone(call: Call) -> bool:
    """Whether nobody else has the logits when backward runs, so that the default may overwrite them."""
    draw = call.draw
    by_default = draw["gradient"] == "auto" or ("overwrite_input" in draw.case and draw["overwrite_input"] is None)
    return by_default and not call.is_head and random.Random(f"alone {call.seed}").random() < 0.5


def changed(given: Given, before: dict[str, str]) -> list[str]:
    return [name for name, tensor in tensors_of(given).items() if digest(tensor) != before[name]]


def of_rank(call: Call, case: Ready, rank: int, group: Any) -> Record:
    """Make the call on one rank, and return what is recorded."""
    torch.set_num_threads(1)
    given = case.given[rank]
    before = {name: digest(tensor) for name, tensor in tensors_of(given).items()}
    with case.autocast():
        found = call.invoke(given, group)
    record: Record = {name: summary(value) for name, value in sorted(found.items())}
    written = [f"{name} in forward" for name in changed(given, before)]
    upstream = case.upstream or upstream_of(call, found)
    in_place = watch_memory(call, case, rank) if isinstance(case, LogitsCase) else []
    with torch.autograd.set_multithreading_enabled(False):  # backward may wait for the other ranks' threads
        case.backward(rank, found, upstream)
    grads = case.gradients(rank)
    record |= {f"gradient of {name}": summary(grad) for name, grad in sorted(grads.items())}
    written += ["logits hold their gradient"] * any(in_place) + changed(given, before)
    return record | {"written": sorted(written)}


def watch_memory(call: Call, case: LogitsCase, rank: int) -> list[bool]:
    """Forget the logits if nobody else has them; return what will say whether their gradient is in their memory."""
    leaf = case.leaves[rank]
    in_place: list[bool] = []
    if leaf.logits is leaf.leaf:
        return in_place
    # Not an address, which a new tensor may get once the logits are freed; and no reference that the package counts.
    memory = StorageWeakRef(leaf.logits.untyped_storage())
    leaf.logits.register_hook(lambda grad: in_place.append(grad.untyped_storage()._cdata == memory.cdata))
    if is_alone(call):
        del case.given[rank]["logits"]
        case.leaves[rank] = leaf._replace(logits=None)  # type: ignore[arg-type]
    return in_place


def options_of(call: Call) -> str:
    shown = {name: getattr(value, "__name__", value) for name, value in call.draw.case.items() if value is not None}
    return " ".join(f"{name}={str(value).removeprefix('torch.').replace(' ', '')}" for name, value in shown.items())


def label_of(call: Call) -> str:
    """The public name, and which teacher."""
    kind = call.draw["divergence"] or ("k tokens" if "rest" in call.draw.case else "")
    return f"{call.public}, {kind}" if kind else call.public


def record_of(seed: int, where: Where, ranks: tuple[int, ...] = (1, 2, 4)) -> Record:
    """Make the call of a seed, and record it."""
    call = Call(seed, where.device, where.impl, where.small, changes_of(seed, ranks))
    case = ready(call)
    inputs = [sorted((name, digest(value)) for name, value in given.items()) for given in case.given]
    record = {"function": label_of(call), "ranks": call.ranks, "options": options_of(call), "inputs": digest(inputs)}
    try:
        with poisoned_allocations(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            of_ranks = in_turn(call.ranks, lambda rank, group: of_rank(call, case, rank, group))
    except Exception as error:
        return record | {"error": f"{type(error).__name__}: {error}"[:600]}
    found: Record = {}
    for rank, own in enumerate(of_ranks):
        suffix = f" of rank {rank}" if rank else ""
        found |= {name + suffix: value for name, value in own.items() if not rank or value != found.get(name)}
    return record | {"found": found}


# ---- all calls --------------------------------------------------------------------------------------------------


def differences(before: dict[str, Record], after: dict[str, Record]) -> Iterator[str]:
    """Each output whose bits differ, with its case."""
    for seed in sorted(before.keys() | after.keys(), key=int):
        a, b = before.get(seed), after.get(seed)
        if a is None or b is None:
            yield f"{seed}: only in one of both records"
            continue
        case = f"{seed}: {a['function']}, {a['ranks']} ranks, {a['options']}"
        if a["inputs"] != b["inputs"]:
            yield f"{case}\n    another case: its inputs differ"
        if a.get("error") != b.get("error"):
            yield f"{case}\n    error: {a.get('error')} before, {b.get('error')} after"
            continue
        x, y = a.get("found", {}), b.get("found", {})
        names = [name for name in sorted(x | y) if x.get(name) != y.get(name)]
        if names:
            yield "\n".join([case, *(f"    {name}: {difference(x.get(name), y.get(name))}" for name in names)])


def difference(a: Any, b: Any) -> str:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return f"{shown(a)} before, {shown(b)} after"
    if a["kind"] != b["kind"]:
        return f"{a['kind']} before, {b['kind']} after"
    x, y = (values_of(each) for each in (a, b))
    off = (x - y).abs().masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0)
    n, sums = int((off != 0).sum()), [float.fromhex(each["sum"]) for each in (a, b)]
    largest = f", by at most {float(off.max()):.3g} beside values up to {float(x.abs().max()):.3g}" if n else ""
    return f"{a['kind']}: {n} of {len(x)} samples differ{largest}; sums {sums[0]:.9g} and {sums[1]:.9g}"


def shown(entry: Any) -> str:
    return entry["kind"] if isinstance(entry, dict) else str(entry)


def values_of(entry: dict[str, str]) -> Tensor:
    dtype, data = getattr(torch, entry["kind"].split()[0]), bytearray(base64.b64decode(entry["samples"]))
    return torch.frombuffer(data, dtype=dtype).double() if data else torch.zeros(0, dtype=torch.float64)


def prepare(where: Where) -> None:
    """For a process that has run no kernel yet."""
    torch.set_num_threads(1)
    checks.looks_at = lambda values, check_labels: check_labels is True  # a label outside is NaN, as on a GPU
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its products may differ between two runs
    if where.device == "cpu" and where.impl == "triton":
        os.environ["TRITON_INTERPRET"] = "1"
        interpreter.mend()


def records_of(seeds: Sequence[int], where: Where, ranks: tuple[int, ...], processes: int) -> dict[str, Record]:
    record = functools.partial(record_of, where=where, ranks=ranks)
    if processes == 1:
        prepare(where)
        return {str(seed): record(seed) for seed in seeds}
    with multiprocessing.get_context("spawn").Pool(processes, prepare, (where,)) as pool:
        return dict(zip(map(str, seeds), pool.map(record, seeds, chunksize=1), strict=True))


def compare(before: Path, after: Path) -> int:
    of_both = [json.loads(path.read_text(encoding="ascii")) for path in (before, after)]
    found = list(differences(*(each["calls"] for each in of_both)))
    print("\n".join([*found, f"{len(of_both[0]['calls'])} calls, {len(found)} differ"]))
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--impl", default="reference", choices=("reference", "triton", "auto"), help="auto: one_pass too"
    )
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.compare:
        return compare(*given.compare)
    start, ranks = time.monotonic(), tuple(int(n) for n in given.ranks.split(","))
    where, seeds = Where(given.device, given.impl, given.device == "cpu"), range(given.seed, given.seed + given.calls)
    calls = records_of(seeds, where, ranks, given.processes)
    if given.out is not None:
        about = {**where._asdict(), "ranks": ranks, "torch": torch.__version__}
        given.out.write_text(json.dumps({"about": about, "calls": calls}, indent=0) + "\n", encoding="ascii")
    made = Counter((call["function"], call["ranks"]) for call in calls.values())
    for function in sorted({name for name, _ in made}):
        print(f"{function:40}", *(f"{made[function, n]:4} on {n}" for n in ranks))
    errors = [f"{seed}: {call['function']}: {call['error']}" for seed, call in calls.items() if "error" in call]
    of_public = Counter(call["function"].partition(",")[0] for call in calls.values())
    rare = [name for name in PUBLIC if of_public[name] < int(LEAST * given.calls)]
    print("\n".join([*errors, *(f"{name}: only {of_public[name]} calls" for name in rare)]))
    print(f"{len(calls)} calls, {len(errors)} raised, {time.monotonic() - start:.0f} s")
    return int(bool(errors or rare))


if __name__ == "__main__":
    raise SystemExit(main())
