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

FEWEST_BUFFERS, MOST_BUFFERS = 4, 16
BYTES_IN_ROTATION = 256 * 2**20  # several times the L2 cache of any GPU here
HUGE_BYTES = 2 * 2**30  # from this shard size on, two buffers and fewer rounds are enough
FLOPS_PER_MILLISECOND = 7e11  # of a bf16 matmul on an H200: only decides how often a case runs


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

    @property
    def tokens(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"{self.reduction} {self.rows} x {self.vocabulary} {SHORT_DTYPES[self.dtype]}"

    def effort(self, rounds: int) -> Effort:
        """Use enough buffers that no call finds its logits in the L2 cache."""
        shard_bytes = self.rows * self.columns * getattr(torch, self.dtype).itemsize
        if shard_bytes >= HUGE_BYTES:
            return Effort(2, min(rounds, max(3, rounds // 3)), 4, min(rounds, 3))
        buffers = min(MOST_BUFFERS, max(FEWEST_BUFFERS, math.ceil(BYTES_IN_ROTATION / shard_bytes)))
        # Small shards wait for the host: with enough calls the last one's device time hardly counts.
        eager_calls = max(20, buffers, min(100, HUGE_BYTES // shard_bytes))
        return Effort(buffers, rounds, eager_calls, min(rounds, 5))


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
    def flops(self) -> int:
        """Of one rank's three matmuls: logits, gradient of hidden, gradient of weight."""
        return 6 * self.tokens * self.columns * self.hidden_size

    @property
    def gradient_bytes(self) -> int:
        itemsize: int = getattr(torch, self.dtype).itemsize
        return itemsize * self.hidden_size * (self.tokens + self.columns)

    def __str__(self) -> str:
        return f"{self.reduction} {self.tokens} x {self.vocabulary} x {self.hidden_size}"

    def effort(self, rounds: int) -> Effort:
        """Repeat short cases within a round; measure long ones in fewer rounds."""
        milliseconds = self.flops / FLOPS_PER_MILLISECOND
        calls = max(1, min(8, round(20 / milliseconds)))
        return Effort(calls, rounds if milliseconds <= 50 else min(rounds, max(3, rounds // 3)))


Case: TypeAlias = LogitsCase | LinearCase
Bounds: TypeAlias = dict[str, float]
# Ranks -> (reduction, tokens, vocabulary, dtype): what the results must not exceed, by field. A mean's
# bounds are those of the provider IN_FORWARD.
LOGITS_TABLE: dict[int, dict[tuple[str, int, int, str], Bounds]] = {
    1: {
        ("mean", 8192, 32064, "bfloat16"): {"ratio": 1.25},
        ("none", 8192, 32064, "bfloat16"): {"ratio": 1.58},
        ("mean", 4096, 128256, "bfloat16"): {"ratio": 1.40},
        ("none", 4096, 128256, "bfloat16"): {"ratio": 1.58},
        ("mean", 8192, 50304, "bfloat16"): {"ratio": 1.30},
        ("none", 8192, 50304, "bfloat16"): {},
        ("mean", 8192, 64128, "bfloat16"): {"ratio": 1.20},
        ("none", 8192, 64128, "bfloat16"): {"ratio": 1.58},
        ("none", 4096, 50257, "bfloat16"): {"ratio": 1.75},
        ("none", 1024, 32000, "bfloat16"): {"microseconds_eager": 90, "ratio_graph": 1.90},
        ("none", 4096, 64128, "float32"): {"ratio": 1.58},
    },
    2: {
        ("none", 16384, 128256, "bfloat16"): {"ratio": 1.60},
        ("none", 4096, 128256, "bfloat16"): {"ratio": 1.70},
        ("none", 1024, 32000, "bfloat16"): {"microseconds_eager": 110, "microseconds_graph": 60},
    },
    4: {
        ("none", 16384, 128256, "bfloat16"): {"ratio": 1.65},
        ("none", 4096, 128256, "bfloat16"): {"ratio": 1.90},
        ("none", 1024, 32000, "bfloat16"): {},
    },
}
# Ranks -> (reduction, tokens, vocabulary), for hidden states of HIDDEN_SIZE. The second field is peak memory
# beyond an fp32 gradient of the weight.
LINEAR_TABLE: dict[int, dict[tuple[str, int, int], Bounds]] = {
    1: {
        ("mean", 4096, 128256): {"ratio": 1.06, "gib_over_fp32_weight_gradient": 1.06},
        ("mean", 16384, 32064): {"ratio": 1.07, "gib_over_fp32_weight_gradient": 0.50},
        ("mean", 32768, 128256): {},
        ("none", 4096, 128256): {"ratio": 1.42},
    },
    2: {("mean", 16384, 128256): {}, ("mean", 4096, 128256): {}},
    4: {
        ("mean", 16384, 128256): {"ratio": 1.07, "gib_over_fp32_weight_gradient": 0.50},
        ("mean", 4096, 128256): {"ratio": 1.12},
    },
}
SWEEPS = {
    "tokens": [(tokens, 128256) for tokens in (64, 256, 1024, 4096, 16384, 32768)],
    "vocabulary": [(4096, 2**k) for k in range(13, 19)],
}
OPTIONS_SHAPES = {1: ((4096, 128256), (8192, 64128), (8192, 32064)), 2: ((4096, 128256),)}
MEMORY_SHAPES = [(tokens, 128256, HIDDEN_SIZE) for tokens in (4096, 8192, 16384, 32768, 65536)]
PROFILE_SHAPE = (16384, 128256, HIDDEN_SIZE)


def divided(vocabulary: int, ranks: int) -> int:
    if vocabulary % ranks:
        raise ValueError(f"vocabulary: expected a multiple of the {ranks} ranks, got {vocabulary}")
    return vocabulary // ranks


def bounds_of(case: Case) -> Bounds:
    """The targets of ``case``; empty if it has none."""
    if isinstance(case, LogitsCase):
        key = (case.reduction, case.rows, case.vocabulary, case.dtype)
        return LOGITS_TABLE.get(case.ranks, {}).get(key, {})
    shape = (case.reduction, case.tokens, case.vocabulary)
    return LINEAR_TABLE.get(case.ranks, {}).get(shape, {}) if case.hidden_size == HIDDEN_SIZE else {}


def parsed_shape(text: str, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """``"4096x128256"`` as numbers, as many as one of ``lengths``."""
    sizes = text.split("x")
    if len(sizes) not in lengths or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        expected = "TOKENSxVOCABULARYxHIDDEN" if 3 in lengths else "ROWSxCOLUMNS"
        raise ValueError(f"shape: expected {expected} such as 4096x128256, got {text!r}")
    return tuple(map(int, sizes))


def logits_cases(
    ranks: int,
    shapes: list[str] | None = None,
    sweep: str | None = None,
    reduction: str | None = None,
    dtype: str | None = None,
) -> list[LogitsCase]:
    """The table's cases, or a sweep's, or ``ROWSxCOLUMNS`` shapes whose columns are one rank's."""
    kinds = (reduction,) if reduction else REDUCTIONS
    if shapes:
        sizes = [parsed_shape(shape, (2,)) for shape in shapes]
        return [LogitsCase(k, size[0], size[1], ranks, dtype or "bfloat16") for size in sizes for k in kinds]
    if sweep:
        table = [(kind, *shape, dtype or "bfloat16") for shape in SWEEPS[sweep] for kind in kinds]
    else:
        table = list(LOGITS_TABLE[max(known for known in LOGITS_TABLE if known <= ranks)])
        table = [key for key in table if key[0] in kinds and dtype in (None, key[3])]
    if not table:
        raise ValueError(f"table: expected a case of reduction {reduction} and dtype {dtype}, found none")
    return [LogitsCase(kind, rows, divided(size, ranks), ranks, kept) for kind, rows, size, kept in table]


def linear_cases(
    ranks: int, shapes: list[str] | None = None, reduction: str | None = None, dtype: str = "bfloat16"
) -> list[LinearCase]:
    """The table's cases, or ``TOKENSxVOCABULARY[xHIDDEN]`` shapes whose vocabulary is that of all ranks."""
    kinds = (reduction,) if reduction else REDUCTIONS
    if shapes:
        sizes = [(*parsed_shape(shape, (2, 3)), HIDDEN_SIZE) for shape in shapes]
        found = [LinearCase(k, size[0], size[1], size[2], ranks, dtype) for size in sizes for k in kinds]
    else:
        table = LINEAR_TABLE[max(known for known in LINEAR_TABLE if known <= ranks)]
        found = [LinearCase(*key, HIDDEN_SIZE, ranks, dtype) for key in table if key[0] in kinds]
    for case in found:
        divided(case.vocabulary, ranks)
    return found


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
