"""What is measured: the cases of both losses, their targets, one rank's inputs and how often to measure."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

OURS = "vocab_parallel_ce"
IN_FORWARD = f"{OURS}[in_forward]"
REDUCTIONS = ("mean", "none")
OPTIONS = "options"  # stands for the reduction in cases that compare the loss's options
IGNORE_INDEX = -100
IGNORED_SHARE = 0.1  # of the linear cases' labels
HIDDEN_SIZE = 4096
WEIGHT_STD = 0.02
SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

MOST_BUFFERS, MOST_EAGER_CALLS = 16, 100
BYTES_IN_ROTATION = 256 * 2**20  # several times the L2 cache of any GPU here
HUGE_BYTES = 2 * 2**30  # from this shard size on, two buffers are enough


class Effort(NamedTuple):
    """How often a case is measured; ``calls`` is the calls per round, each on its own buffer."""

    calls: int
    rounds: int
    eager_calls: int = 0  # 0: no eager and no CUDA graph times
    eager_rounds: int = 0


class LogitsCase(NamedTuple):
    """The loss over logits of ``rows`` tokens; ``columns`` is one rank's share of the vocabulary."""

    reduction: str
    rows: int
    columns: int
    ranks: int
    dtype: str = "bfloat16"

    @property
    def vocabulary(self) -> int:
        return self.columns * self.ranks

    def __str__(self) -> str:
        return f"{self.reduction} {self.rows} x {self.vocabulary} {SHORT_DTYPES[self.dtype]}"

    def effort(self, rounds: int) -> Effort:
        """Use enough buffers that no call finds its logits in the L2 cache."""
        shard_bytes = self.rows * self.columns * getattr(torch, self.dtype).itemsize
        fewest = 2 if shard_bytes >= HUGE_BYTES else 4
        buffers = min(MOST_BUFFERS, max(fewest, math.ceil(BYTES_IN_ROTATION / shard_bytes)))
        # Small shards wait for the host: with enough calls the last one's device time hardly counts.
        eager_calls = max(20, buffers, min(MOST_EAGER_CALLS, HUGE_BYTES // shard_bytes))
        return Effort(buffers, rounds, eager_calls, min(rounds, max(5, rounds // 2)))


class LinearCase(NamedTuple):
    """The loss of ``hidden @ weight.T``; ``vocabulary`` is that of all ranks together."""

    reduction: str
    tokens: int
    vocabulary: int
    hidden_size: int
    ranks: int
    dtype: str = "bfloat16"

    @property
    def columns(self) -> int:
        return divided(self.vocabulary, self.ranks)

    @property
    def gradient_bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return itemsize * self.hidden_size * (self.tokens + self.columns)

    def __str__(self) -> str:
        return f"{self.reduction} {self.tokens} x {self.vocabulary} x {self.hidden_size}"

    def effort(self, rounds: int) -> Effort:
        return Effort(1, rounds)


Case: TypeAlias = LogitsCase | LinearCase
# The table's cases, and what the fields of their results must not exceed. A mean's bounds are those of the
# provider IN_FORWARD. The columns are one rank's.
LOGITS_TARGETS: dict[LogitsCase, dict[str, float]] = {
    LogitsCase("mean", 8192, 32064, 1): {"ratio": 1.25},
    LogitsCase("none", 8192, 32064, 1): {"ratio": 1.58},
    LogitsCase("mean", 4096, 128256, 1): {"ratio": 1.40},
    LogitsCase("none", 4096, 128256, 1): {"ratio": 1.58},
    LogitsCase("mean", 8192, 50304, 1): {"ratio": 1.30},
    LogitsCase("none", 8192, 50304, 1): {},
    LogitsCase("mean", 8192, 64128, 1): {"ratio": 1.20},
    LogitsCase("none", 8192, 64128, 1): {"ratio": 1.58},
    LogitsCase("none", 4096, 50257, 1): {"ratio": 1.75},
    LogitsCase("none", 1024, 32000, 1): {"microseconds_eager": 90, "ratio_graph": 1.90},
    LogitsCase("none", 4096, 64128, 1, "float32"): {"ratio": 1.58},
    LogitsCase("none", 16384, 64128, 2): {"ratio": 1.60},
    LogitsCase("none", 4096, 64128, 2): {"ratio": 1.70},
    LogitsCase("none", 1024, 16000, 2): {"microseconds_eager": 110, "microseconds_graph": 60},
    LogitsCase("none", 16384, 32064, 4): {"ratio": 1.65},
    LogitsCase("none", 4096, 32064, 4): {"ratio": 1.90},
    LogitsCase("none", 1024, 8000, 4): {},
}
# Here the second field is peak memory beyond an fp32 gradient of the weight.
LINEAR_TARGETS: dict[LinearCase, dict[str, float]] = {
    LinearCase("mean", 4096, 128256, 4096, 1): {"ratio": 1.06, "gib_over_fp32_weight_gradient": 1.06},
    LinearCase("mean", 16384, 32064, 4096, 1): {"ratio": 1.07, "gib_over_fp32_weight_gradient": 0.50},
    LinearCase("mean", 32768, 128256, 4096, 1): {},
    LinearCase("none", 4096, 128256, 4096, 1): {"ratio": 1.42},
    LinearCase("mean", 16384, 128256, 4096, 2): {},
    LinearCase("mean", 4096, 128256, 4096, 2): {},
    LinearCase("mean", 16384, 128256, 4096, 4): {"ratio": 1.07, "gib_over_fp32_weight_gradient": 0.50},
    LinearCase("mean", 4096, 128256, 4096, 4): {"ratio": 1.12},
}
# Of scripts/bench_losses.py: a provider, whose time is over that of another, and the most that it may be.
LOSSES_TARGETS = [
    ("mean, class_weight", "mean", 1.03),
    ("soft_cross_entropy", "copy", 2.75),
    *(
        (f"distillation, {name}", "copy", 2.75)
        for name in ("forward", "reverse", "js", "top 64", "forward, hard_weight")
    ),
    *((f"token_log_probs, {name}", "token_log_probs", 1.05) for name in ("lse", "sum_sq_probs")),
    ("linear, logits_dtype", "linear", 1.10),
]
SWEEPS = {
    "tokens": [(tokens, 128256) for tokens in (64, 256, 1024, 4096, 16384, 32768)],
    "vocabulary": [(4096, 2**k) for k in range(13, 19)],
}
OPTIONS_SHAPES = ["4096x128256", "8192x64128", "8192x32064"]
MEMORY_SHAPES = [f"{tokens}x128256" for tokens in (4096, 8192, 16384, 32768, 65536)]
PROFILE_SHAPE = "16384x128256"


def divided(vocabulary: int, ranks: int) -> int:
    if vocabulary % ranks:
        raise ValueError(f"vocabulary: expected a multiple of the {ranks} ranks, got {vocabulary}")
    return vocabulary // ranks


def parsed_shape(text: str, form: str) -> list[int]:
    """``"4096x128256"`` as numbers; ``form`` is what is expected, such as ``"ROWSxCOLUMNS"``."""
    sizes = text.split("x")
    if len(sizes) != form.count("x") + 1 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape: expected {form} such as 4096x128256, got {text!r}")
    return list(map(int, sizes))


def logits_cases(
    ranks: int, shapes: list[str] | None = None, sweep: str | None = None, reduction: str | None = None
) -> list[LogitsCase]:
    """The table's cases, or a sweep's, or those of ``ROWSxCOLUMNS`` shapes whose columns are one rank's."""
    sizes = [parsed_shape(shape, "ROWSxCOLUMNS") for shape in shapes or ()]
    if sweep:
        sizes += [[rows, divided(vocabulary, ranks)] for rows, vocabulary in SWEEPS[sweep]]
    kinds = (reduction,) if reduction else REDUCTIONS
    named = [LogitsCase(kind, rows, columns, ranks) for rows, columns in sizes for kind in kinds]
    return named or [case for case in LOGITS_TARGETS if case.ranks == ranks and case.reduction in kinds]


def linear_cases(ranks: int, shapes: list[str] | None = None, reduction: str | None = None) -> list[LinearCase]:
    """The table's cases, or ``TOKENSxVOCABULARY[xHIDDEN]`` shapes whose vocabulary is that of all ranks."""
    full = [shape if shape.count("x") > 1 else f"{shape}x{HIDDEN_SIZE}" for shape in shapes or ()]
    sizes = [parsed_shape(shape, "TOKENSxVOCABULARYxHIDDEN") for shape in full]
    kinds = (reduction,) if reduction else REDUCTIONS
    named = [LinearCase(kind, rows, size, hidden, ranks) for rows, size, hidden in sizes for kind in kinds]
    return named or [case for case in LINEAR_TARGETS if case.ranks == ranks and case.reduction in kinds]


class Inputs(NamedTuple):
    """One rank's; ``tensors`` get a gradient: ``(logits,)`` or ``(hidden, weight)``.

    ``upstreams`` is the gradient of the loss in each dtype that a loss may have; None stands for ones.
    """

    tensors: tuple[Tensor, ...]
    labels: Tensor
    upstreams: dict[torch.dtype, Tensor] | None = None


def logits_inputs(case: LogitsCase, rank: int, device: Any) -> Inputs:
    """Random logits, different on each rank; labels are the same on all ranks."""
    generator = torch.Generator(device).manual_seed(rank)
    logits = torch.randn(case.rows, case.columns, generator=generator, device=device).mul_(3)
    generator.manual_seed(1000)
    labels = torch.randint(0, case.vocabulary, (case.rows,), generator=generator, device=device)
    return Inputs((logits.to(getattr(torch, case.dtype)),), labels)


def linear_inputs(case: LinearCase, rank: int, device: Any) -> Inputs:
    """Hidden states of variance 1, a freshly initialised weight, and random upstream gradients for none."""
    dtype = getattr(torch, case.dtype)
    own = torch.Generator(device).manual_seed(rank)
    common = torch.Generator(device).manual_seed(1000)
    tokens = (case.tokens,)
    weight = torch.randn(case.columns, case.hidden_size, generator=own, device=device).mul_(WEIGHT_STD)
    hidden = torch.randn(case.tokens, case.hidden_size, generator=common, device=device)
    labels = torch.randint(0, case.vocabulary, tokens, generator=common, device=device)
    labels[torch.rand(tokens, generator=common, device=device) < IGNORED_SHARE] = IGNORE_INDEX
    upstream = torch.ones((), device=device)
    if case.reduction == "none":
        upstream = torch.randn(tokens, generator=common, device=device).to(dtype).float()
    tensors = (hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_())
    return Inputs(tensors, labels, {kind: upstream.to(kind) for kind in (torch.float32, dtype)})
