"""Measures what a rank sees if another one is killed, raises or skips a call: which error, and after how many seconds.

    python scripts/bench_failures.py --json scripts/results/failures_2gpu.json

Each case has two processes of its own. They make one right call, then rank 1 fails, and rank 0's error is reported. If
a process ends without an exception, its error is the last line that it wrote. ``--backend gloo`` runs on CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_lib.documents import host_description, write_document

from vocab_parallel_ce import vocab_parallel_cross_entropy

FAILURES = {
    "is killed before the call": "kill",
    "raises in the call: labels of a wrong dtype": "raise",
    "skips the call, and makes the next one of other tokens": "skip",
}
COLUMNS, STARTS_WITHIN, ENDS_WITHIN = 16000, 60, 60  # seconds, besides the group's timeout
BEGAN = "began"


def call(n_tokens: int, device: torch.device, dtype: torch.dtype = torch.int64) -> None:
    logits = torch.randn(n_tokens, COLUMNS, device=device, requires_grad=True)
    labels = torch.arange(n_tokens, device=device).to(dtype)
    vocab_parallel_cross_entropy(logits * 1, labels, group=dist.group.WORLD).backward()
    if device.type == "cuda":
        torch.cuda.synchronize()


def rank_of_case(words: argparse.Namespace) -> None:
    """One rank: prints when its call began, and the error that it raised, if it raises one."""
    is_cuda = words.backend == "nccl"
    device = torch.device("cuda", words.rank) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    store = dist.FileStore(str(words.store), 2)
    dist.init_process_group(
        words.backend, store=store, rank=words.rank, world_size=2, timeout=timedelta(seconds=words.timeout)
    )
    call(1024, device)  # compiles, and connects
    dist.barrier()
    fails: Callable[[], object] | None = None
    if words.rank == 1:
        fails = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "raise": lambda: call(1024, device, torch.float32),
            "skip": lambda: None,
        }[words.fails]
    print(BEGAN, time.time(), flush=True)
    try:
        fails() if fails else call(1024, device)
        call(512, device)
        dist.barrier()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        print(json.dumps({"seconds": time.time(), "error": text[:400]}), flush=True)
        os._exit(1)  # as a program that ends, without waiting for its collectives
    print(json.dumps({"seconds": time.time(), "error": None}), flush=True)
    os._exit(0)


def ended(lines: Sequence[str], code: int, now: float, log: str) -> dict[str, Any]:
    """The error of a rank that has ended, and its seconds since the call."""
    began = next((float(line.split()[1]) for line in lines if line.startswith(BEGAN)), None)
    if began is None:
        raise RuntimeError(f"a rank ended with {code} before its call:\n{log[-3000:]}")
    found = json.loads(lines[-1]) if lines[-1].startswith("{") else {"seconds": now}
    if "error" not in found:
        said = [line for line in log.splitlines() if "what():" in line or "Watchdog caught" in line]
        found["error"] = f"exit code {code}; {' '.join((said or log.splitlines() or [''])[-1].split())[:400]}"
    return {"error": found["error"], "seconds": round(found["seconds"] - began, 2)}


def measure(failure: str, verifies: bool, words: argparse.Namespace) -> dict[str, Any]:
    """Run one case in two processes, and return the error of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"VOCAB_PARALLEL_CE_VERIFY": str(int(verifies)), "GLOO_SOCKET_IFNAME": "lo"}
        processes, logs = [], [Path(directory) / f"log{rank}" for rank in range(2)]
        for rank, log in enumerate(logs):
            given = ["--rank", str(rank), "--store", f"{directory}/store", "--fails", FAILURES[failure]]
            given += ["--backend", words.backend, "--timeout", str(words.timeout)]
            with log.open("w") as errors:
                process = subprocess.Popen(
                    [sys.executable, __file__, *given],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=environment,
                )
            processes.append(process)
        try:
            out, _ = processes[0].communicate(timeout=words.timeout + STARTS_WITHIN + ENDS_WITHIN)
            found = ended(out.splitlines(), processes[0].returncode, time.time(), logs[0].read_text(errors="replace"))
        except subprocess.TimeoutExpired:
            found = {"error": "still waits", "seconds": None}
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return {"rank 1": failure, "verifies": verifies, **found}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl")
    parser.add_argument("--timeout", type=int, default=20, help="of the process group, in seconds")
    parser.add_argument("--jobs", type=int, default=3, help="cases at once")
    parser.add_argument("--json", type=Path, metavar="PATH")
    for name, kind in (("--rank", int), ("--store", Path), ("--fails", str)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)
    words = parser.parse_args(given)
    if words.rank is not None:
        rank_of_case(words)
        return
    cases = [(failure, verifies, words) for failure in FAILURES for verifies in (False, True)]
    with ThreadPoolExecutor(words.jobs) as pool:
        results = list(pool.map(measure, *zip(*cases, strict=True)))
    host = host_description() | {"gpus_used": 2 if words.backend == "nccl" else 0}
    document = {"kind": "failures", "host": host, "backend": words.backend, "timeout": words.timeout}
    write_document(document | {"results": results}, words.json)
    for result in results:
        print("  ".join(f"{name}={value}" for name, value in result.items()))


if __name__ == "__main__":
    main()
