"""The ranks of a run, and the machine that it runs on."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench_lib.documents import ROOT
from bench_lib.timing import CpuTimer, DeviceTimer

TIMEOUT = timedelta(minutes=5)
GRAPH_MIXING = "NCCL_GRAPH_MIXING_SUPPORT"


class Ranks(NamedTuple):
    """This process among those of the run; ``group`` is None if it is alone."""

    rank: int
    size: int
    group: Any
    device: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def timer(self) -> DeviceTimer:
        return (DeviceTimer if self.device == "cuda" else CpuTimer)(self.size)

    def gathered(self, own: Any) -> list[Any]:
        """What every rank has, in their order."""
        everyone: list[Any] = [own] * self.size
        if self.size > 1:
            dist.all_gather_object(everyone, own, group=self.group)
        return everyone


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """The ranks that ``torchrun`` started, one per GPU, and their process group while this lasts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # NCCL guards against several graphs that run at once, of which there are none here, with launches of its
    # own: 13 to 30 us in every graph. It reads this when the group is made.
    os.environ.setdefault(GRAPH_MIXING, "0")
    size, local_rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    if size > 1:
        where = torch.device("cuda", local_rank) if device == "cuda" else None
        dist.init_process_group("nccl" if where else "gloo", timeout=TIMEOUT, device_id=where)
    try:
        yield Ranks(dist.get_rank() if size > 1 else 0, size, dist.group.WORLD if size > 1 else None, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def quiet() -> None:
    """Silence other projects' warnings, which say nothing about a time."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def host_description() -> dict[str, Any]:
    """The machine, the versions and the commit; ``VPCE_COMMIT`` names it if there is no git history."""
    git = ["git", "rev-parse", "HEAD"]
    commit = os.environ.get("VPCE_COMMIT")
    if not commit:
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    try:
        import triton
    except ImportError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "gpus_used": int(os.environ.get("WORLD_SIZE", "1")),
        "torch": torch.__version__,
        "triton": None if triton is None else triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "nccl_graph_mixing_support": os.environ.get(GRAPH_MIXING),
        "commit": commit or None,
    }
