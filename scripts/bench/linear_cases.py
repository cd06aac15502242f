"""What the linear cross-entropy is measured on: the targets' cases, those named, and one rank's inputs."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.cases import REDUCTIONS, columns_of

HIDDEN_SIZE = 4096
WEIGHT_STD = 0.02
IGNORE_INDEX = -100
IGNORED_SHARE = 0.1
MATMULS = 3  # logits, gradient of hidden, gradient of the weight
# Ranks -> reduction, tokens, vocabulary of all ranks.
TABLE: dict[int, tuple[tuple[str, int, int], ...]] = {
    1: (
        ("mean", 4096, 128256),
        ("mean", 16384, 32064),
        ("mean", 32768, 128256),
        ("none", 4096, 128256),
    ),
    2: (
        ("mean", 16384, 128256),
        ("mean", 4096, 128256),
    ),
}
CASE = re.compile(rf"({'|'.join(REDUCTIONS)}):([1-9]\d*)x([1-9]\d*)(?:x([1-9]\d*))?")

EXPECTED_FLOPS_A_MILLISECOND = 7e11  # of a matmul in bf16, on the GPUs that this was written on
SHORT_MILLISECONDS, LONG_MILLISECONDS = 20.0, 50.0
MOST_CALLS = 8


class LinearCase(NamedTuple):
    """One measurement; ``vocabulary`` is that of all ranks, and every rank has the same share of it."""

    reduction: str
    tokens: int
    vocabulary: int
    hidden_size: int
    ranks: int
    dtype: str = "bfloat16"

    @property
    def columns(self) -> int:
        """Rows of the weight that a rank has."""
        return columns_of(self.vocabulary, self.ranks)

    @property
    def flops(self) -> int:
        """Of three matmuls of a rank, over all tokens, whatever a provider multiplies."""
        return 2 * MATMULS * self.tokens * self.columns * self.hidden_size

    @property
    def fp32_weight_bytes(self) -> int:
        return 4 * self.columns * self.hidden_size

    @property
    def element_size(self) -> int:
        return getattr(torch, self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.reduction}:{self.tokens}x{self.vocabulary}x{self.hidden_size}"


class LinearEffort(NamedTuple):
    """How often a case is measured."""

    calls: int
    rounds: int

    @classmethod
    def of(cls, case: LinearCase, rounds: int) -> LinearEffort:
        """Several calls at a time where one is short, fewer rounds where it is long."""
        expected = case.flops / EXPECTED_FLOPS_A_MILLISECOND
        calls = max(1, min(MOST_CALLS, round(SHORT_MILLISECONDS / expected)))
        return cls(calls, rounds if expected <= LONG_MILLISECONDS else min(rounds, max(3, rounds // 3)))


class LinearInputs(NamedTuple):
    """One rank's; hidden, labels and upstream gradients are the same on all ranks."""

    hidden: Tensor  # [N, D], requires a gradient
    weight: Tensor  # [C, D], requires a gradient
    labels: Tensor  # [N] int64 ids of the whole vocabulary, a tenth of them ignored
    upstreams: dict[torch.dtype, Tensor]  # the same [] or [N] gradient of the loss, in its possible dtypes


def table_cases(ranks: int) -> list[LinearCase]:
    """The table of targets: the rows of one GPU, or those of several."""
    rows = TABLE[max(known for known in TABLE if known <= ranks)]
    return [
        LinearCase(reduction, tokens, vocabulary, HIDDEN_SIZE, ranks)
        for reduction, tokens, vocabulary in rows
    ]


def chosen_cases(names: str | None, ranks: int) -> list[LinearCase]:
    """Those of a comma-separated list, each ``REDUCTION:TOKENSxVOCABULARY[xHIDDEN_SIZE]``, or the table.

    Raises:
        ValueError: a name is no such case, or its vocabulary cannot be divided among the ranks.
    """
    cases = table_cases(ranks) if names is None else [parsed_case(name, ranks) for name in names.split(",")]
    for case in cases:
        columns_of(case.vocabulary, ranks)
    return list(dict.fromkeys(cases))


def parsed_case(name: str, ranks: int) -> LinearCase:
    match = CASE.fullmatch(name.strip())
    if match is None:
        raise ValueError(
            f"case: expected REDUCTION:TOKENSxVOCABULARY[xHIDDEN_SIZE] such as mean:4096x128256, got {name!r}"
        )
    reduction, tokens, vocabulary, hidden_size = match.groups()
    return LinearCase(reduction, int(tokens), int(vocabulary), int(hidden_size or HIDDEN_SIZE), ranks)


def make_inputs(case: LinearCase, rank: int, device: Any = "cuda") -> LinearInputs:
    """Random: hidden of variance 1, a weight as it is initialised, for ``none`` also upstream gradients."""
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
    upstreams = {kind: upstream.to(kind) for kind in (torch.float32, dtype)}
    return LinearInputs(
        hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, upstreams
    )
