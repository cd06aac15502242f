"""The host's path of calls on a GPU, without one: a kernel's launch is one call in C that does nothing.

    python -m tests.support.host.host_path [microseconds]

Needs a process of its own. Prints one JSON object: per call of a warm forward and backward the package's Python frames,
their files in order, and with ``microseconds`` the least time above an autograd Function that does nothing. A frame is
a call of a function of the package; comprehensions and lambdas do not count. Kernels are not run, so numbers are not
right; the path is that of ``impl="triton"``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # so that CPU tensors may be launched over

import torch
import torch._dynamo  # as in a program that compiles something

import vocab_parallel_ce as vp
from vocab_parallel_ce.kernels import launch
from vocab_parallel_ce.program import Step

PACKAGE = str(Path(vp.__file__).parent)
IN_C = "".format  # takes any arguments and ignores them


class _NoKernel:
    """In the place of a kernel: compiled at the first launch, which does nothing."""

    def __getitem__(self, grid: object) -> Callable[..., object]:
        run = SimpleNamespace(global_scratch_size=0, profile_scratch_size=0)
        return lambda *args, **kwargs: SimpleNamespace(run=run)


def stub_launches() -> None:
    """Let all launches that are made from now on do nothing, as those of a GPU's private launch."""
    make = launch.Launch.__init__

    def init(self: Any, kernel: Any, *args: Any, **kwargs: Any) -> None:
        make(self, _NoKernel(), *args, **kwargs)

    variant = Step(IN_C, 0, abs)
    launch.Launch.__init__ = init  # type: ignore[method-assign]
    launch.step_of = lambda compiled: variant


def calls() -> dict[str, Callable[[], object]]:
    """Return calls with their backward by name."""
    generator = torch.Generator().manual_seed(0)
    x, teacher = torch.randn(2, 8, 64, generator=generator)
    hidden, weight = torch.randn(8, 16, generator=generator), torch.randn(64, 16, generator=generator).requires_grad_()
    labels, ids, ones = torch.arange(8), torch.arange(4).repeat(8, 1), torch.ones(8)
    top_k = vp.TopKTeacher(ids, teacher.log_softmax(-1).gather(1, ids))
    leaf, states = x.clone().requires_grad_(), hidden.clone().requires_grad_()
    own: dict[str, Any] = {"impl": "triton", "check_labels": False}
    options = vp.HeadOptions(**own)
    ce, log_probs, head = vp.vocab_parallel_cross_entropy, vp.token_log_probs, vp.linear_cross_entropy

    def with_entropy() -> None:
        found = log_probs(leaf * 1, labels, outputs=("entropy",), **own)
        torch.autograd.backward((found.log_probs, found.entropy), (ones, ones))

    def divergence(teacher: Any, **options: Any) -> Callable[[], None]:
        return lambda: vp.distillation_loss(leaf * 1, teacher, **own, **options).backward()

    def forward() -> None:
        with torch.no_grad():
            ce(x, labels, reduction="none", **own)

    return {
        "nothing": lambda: _Nothing.apply(leaf * 1).backward(),
        "unreduced": lambda: ce(leaf * 1, labels, reduction="none", **own).backward(ones),
        "mean": lambda: ce(leaf * 1, labels, **own).backward(),
        "forward alone": forward,
        "log-probabilities and entropy": with_entropy,
        "distillation": divergence(teacher),
        "top-k teacher, forward": divergence(top_k),
        "top-k teacher, reverse": divergence(top_k, divergence="reverse"),
        "mean of a head": lambda: head(states, weight, labels, options=options).backward(),
    }


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0]


def files_of_frames(call: Callable[[], object]) -> list[str]:
    """Return the files of the package's frames in a warm call, in order."""
    for _ in range(3):
        call()
    files = []

    def profile(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            files.append(str(Path(code.co_filename).relative_to(PACKAGE)))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def microseconds(call: Callable[[], object], n: int = 300, rounds: int = 15) -> float:
    """Return the least time of a warm call."""
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        for _ in range(n):
            call()
        times.append((time.thread_time() - start) / n * 1e6)
    return min(times)


def main() -> None:
    torch.set_num_threads(1)
    stub_launches()
    found, nothing = {}, 0.0
    with torch.autograd.set_multithreading_enabled(False):
        for name, call in calls().items():
            files = files_of_frames(call)
            found[name] = {"frames": len(files), "files": list(dict.fromkeys(files))}
            if "microseconds" in sys.argv:
                time_ = microseconds(call)
                nothing = time_ if name == "nothing" else nothing
                found[name]["microseconds"] = round(time_ if name == "forward alone" else time_ - nothing, 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
