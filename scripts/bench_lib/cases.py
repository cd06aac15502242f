"""What is measured: the cases of each command, their targets, how often each is measured, and one rank's inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

OURS = "vocab_parallel_ce"
BASELINE = ", baseline"  # ends the name of a row of another commit
IN_FORWARD = f"{OURS}[in_forward]"
UNFUSED, UNFUSED_IN_FORWARD = f"F.linear + {OURS}", f"F.linear + {IN_FORWARD}"
# PyTorch's rows say of which logits they are.
EAGER, COMPILED, SHARDED = (f"{n} (logits.float())" for n in ("torch eager", "torch.compile", "loss_parallel"))
EAGER_16, COMPILED_16 = "torch eager (16-bit logits)", "torch.compile (16-bit logits)"
REDUCTIONS = ("mean", "none")
IGNORE_INDEX = -100
IGNORED_SHARE = 0.1  # of the labels of heads that are compared with other projects'
HIDDEN_SIZE = 4096
WEIGHT_STD, WIDE_WEIGHT_STD = 0.02, 0.05
TOP = 64  # tokens of a teacher, and of top_k
TOP_P = 0.9
SEQUENCE = 1024  # tokens of an objective's sequences
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
    is_queued: bool = True  # False: the time that is compared includes the host's


class Case(NamedTuple):
    """``tokens`` alongside the ``vocabulary`` of all ranks together; over logits if there is no ``hidden_size``.

    ``kind`` is the reduction, or the command whose calls are compared.
    """

    kind: str
    tokens: int
    vocabulary: int
    ranks: int
    hidden_size: int = 0
    dtype: str = "bfloat16"

    @property
    def teacher_size(self) -> int:
        """The hidden size of the teacher's head, 0 without one."""
        return {"teacher": 1, "wide teacher": 2}.get(self.kind, 0) * self.hidden_size

    @property
    def n_pairs(self) -> int:
        """The number of pairs of sequences, 0 if they are none."""
        return {"pairs": max(2, self.tokens // (2 * SEQUENCE)), "one pair": 1}.get(self.kind, 0)

    @property
    def columns(self) -> int:
        """Those of one rank."""
        return self.vocabulary // self.ranks

    @property
    def is_head(self) -> bool:
        return self.hidden_size > 0

    @property
    def gradient_bytes(self) -> int:
        """Those of both gradients of a head."""
        itemsize: int = getattr(torch, self.dtype).itemsize
        return itemsize * self.hidden_size * (self.tokens + self.columns)

    @property
    def label(self) -> str | None:
        """How a table calls the case, if not by all of its fields."""
        size = f"{self.tokens} x {self.vocabulary}"
        if self.teacher_size:
            return f"{size}, D = {self.hidden_size} beside {self.teacher_size}"
        if self.n_pairs:
            return f"{self.n_pairs} x 2 x {self.tokens // self.n_pairs // 2} x {self.hidden_size} x {self.vocabulary}"
        if self.kind in ("losses", "objective"):
            return f"{self.tokens} x {self.hidden_size} x {self.vocabulary}" if self.is_head else size
        if self.kind in WITH_HOST and self.is_head:
            return f"{size}, D = {self.hidden_size}"
        return {"rl": f"{size}, logits", "frameworks": size}.get(self.kind)

    def __str__(self) -> str:
        size = f"x {self.hidden_size}" if self.is_head else SHORT_DTYPES[self.dtype]
        return f"{self.kind} {self.tokens} x {self.vocabulary} {size}"

    def effort(self, rounds: int) -> Effort:
        """Use enough buffers that no call finds its logits in the L2 cache."""
        if self.kind in WITH_HOST:
            return Effort(1, rounds, is_queued=False)
        if self.is_head:
            return Effort(1, rounds)
        shard_bytes = self.tokens * self.columns * getattr(torch, self.dtype).itemsize
        fewest = 2 if shard_bytes >= HUGE_BYTES else 4
        buffers = min(MOST_BUFFERS, max(fewest, math.ceil(BYTES_IN_ROTATION / shard_bytes)))
        # Small shards wait for the host: with enough calls the last one's device time hardly counts.
        eager_calls = max(20, buffers, min(MOST_EAGER_CALLS, HUGE_BYTES // shard_bytes))
        return Effort(buffers, rounds, eager_calls, min(rounds, max(5, rounds // 2)))


WITH_HOST = ("rl", "compile", "frameworks")  # what frameworks call waits for the device, or compiles
ONE_GPU = ((8192, 32064), (4096, 128256), (8192, 50304), (8192, 64128))
SEVERAL_GPUS = ((16384, 128256), (4096, 128256), (16384, 65536), (1024, 32000))
# The cases of "table" and of "head", on any number of ranks.
TABLES = (
    *(Case(kind, *size, 1) for size in ONE_GPU for kind in REDUCTIONS),
    Case("none", 4096, 50257, 1),
    Case("none", 1024, 32000, 1),
    Case("none", 4096, 64128, 1, dtype="float32"),
    *(Case(kind, *size, ranks) for ranks in (2, 4) for size in SEVERAL_GPUS for kind in REDUCTIONS),
    *(Case("mean", *size, 1, HIDDEN_SIZE) for size in ((4096, 128256), (16384, 32064), (32768, 128256))),
    Case("none", 4096, 128256, 1, HIDDEN_SIZE),
    *(Case("mean", tokens, 128256, ranks, HIDDEN_SIZE) for ranks in (2, 4) for tokens in (16384, 4096)),
)
# Of every other command, TOKENSxVOCABULARY of logits and TOKENSxVOCABULARYxHIDDEN of heads.
SHAPES: dict[str, list[str]] = {
    "few": [f"{tokens}x128256" for tokens in (16, 64, 256, 512)] + ["64x256000", "16x32064", "64x32064"],
    "options": ["4096x128256", "8192x32064", "4096x50257"],
    "memory": [f"{tokens}x128256x{HIDDEN_SIZE}" for tokens in (4096, 8192, 16384, 32768, 65536)],
    "losses": ["4096x128256", "8192x32064", "4096x128256x4096", "16384x128256x4096"],
    "objective": [f"{tokens}x128256x{HIDDEN_SIZE}" for tokens in (4096, 8192, 16384, 32768)],
    "rl": ["1024x32000", "8192x128256", "1024x32000x2048", "8192x128256x4096"],
    "compile": ["1024x32000x2048", "8192x128256x2048", "32768x32000x2048"],
    "frameworks": ["1024x32000", "8192x128256", "16384x128256"],
}
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("table", "few", "head"), REDUCTIONS),
    "memory": ("mean",),
    "objective": ("objective", "teacher", "wide teacher", "pairs", "one pair"),
}
OF_TOKENS = (4096, 8192, 16384)
# The tokens of kinds that do not have all shapes of their command.
TOKENS_OF = {**dict.fromkeys(("objective", "teacher", "wide teacher"), OF_TOKENS), "pairs": (8192,)}
TOKENS_OF["one pair"] = (8192, 32768)


def cases_of(command: str, ranks: int, shapes: list[str] | None = None, reduction: str | None = None) -> list[Case]:
    """A command's cases, those of its vocabularies that divide by ``ranks``; or those of named shapes."""
    kinds = (reduction,) if reduction else KINDS.get(command, (command,))
    if command in ("table", "head") and not shapes:
        of_command = [case for case in TABLES if case.is_head == (command == "head") and case.ranks == ranks]
        return [case for case in of_command if case.kind in kinds]
    found = []
    for tokens, vocabulary, hidden in map(parsed_shape, shapes or SHAPES[command]):
        if shapes and vocabulary % ranks:
            raise ValueError(f"vocabulary: expected a multiple of the {ranks} ranks, got {vocabulary}")
        hidden = hidden or (HIDDEN_SIZE if command == "head" else 0)
        if vocabulary % ranks == 0:
            of_shape = [kind for kind in kinds if shapes or tokens in TOKENS_OF.get(kind, (tokens,))]
            found += [Case(kind, tokens, vocabulary, ranks, hidden) for kind in of_shape]
    return found


def parsed_shape(text: str) -> tuple[int, int, int]:
    """``"4096x128256"`` or ``"4096x128256x2048"`` as numbers; the last is 0 if it is not there."""
    sizes = text.split("x")
    if len(sizes) not in (2, 3) or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape: expected TOKENSxVOCABULARY[xHIDDEN] such as 4096x128256, got {text!r}")
    tokens, vocabulary, hidden = map(int, [*sizes, "0"][:3])
    return tokens, vocabulary, hidden


class Inputs(NamedTuple):
    """One rank's; ``tensors`` get a gradient: ``(logits,)`` or ``(hidden, weight)``.

    ``alongside`` returns what else a loss takes, by name. ``upstreams`` is the gradient of the loss in each dtype that
    a loss may have; None stands for ones.
    """

    tensors: tuple[Tensor, ...]
    labels: Tensor
    alongside: Callable[[str], Any]
    upstreams: dict[torch.dtype, Tensor] | None = None


OF_COLUMNS = ("class_weight",)  # what a loss takes of each column; the others have a row of each token


def alongside_of(case: Case, tensors: tuple[Tensor, ...], rank: int) -> Callable[[str], Any]:
    """What a loss takes alongside logits or a head and labels; each is made when it is first asked for.

    The teacher is its logits, or its hidden states and weight. An advantage is one number for the tokens of a sequence,
    ``old`` are about the log-probabilities of random labels, and which ids a teacher knows does not matter.
    """
    device, n_known = tensors[0].device, min(TOP, case.columns)

    def random(*shape: int, seed: int) -> Tensor:
        return torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(seed))

    def teacher() -> Any:
        if case.is_head:
            hidden, weight = (tensor.detach() for tensor in tensors)
            wider = max(1, case.teacher_size // case.hidden_size)  # whose logits have the same size
            return hidden.flip(0).repeat(1, wider), weight.flip(1).repeat(1, wider) / wider
        return random(*tensors[0].shape, seed=4000 + rank).mul_(3).to(tensors[0].dtype)

    def advantage() -> Tensor:
        of_sequences = random(-(-case.tokens // SEQUENCE), seed=6000).abs()
        return of_sequences.repeat_interleave(SEQUENCE)[: case.tokens]

    token, half = torch.arange(case.tokens, device=device), max(1, case.tokens // 2)
    made: dict[str, Callable[[], Any]] = {
        "pair": lambda: token % half * case.n_pairs // half,  # of the chosen sequences, and then of the others
        "sign": lambda: torch.where(token < half, 1.0, -1.0),
        "reference": lambda: random(case.n_pairs, seed=8000),
        "class_weight": lambda: random(case.columns, seed=2000 + rank).abs(),
        "temperature": lambda: random(case.tokens, seed=3000).abs() + 0.5,
        "teacher": teacher,
        "advantage": advantage,
        "old": lambda: random(case.tokens, seed=7000) - math.log(case.vocabulary),
        "ids": lambda: torch.arange(n_known, device=device).expand(case.tokens, -1),
        "log_probs": lambda: random(case.tokens, n_known, seed=5000).log_softmax(-1),
    }
    return cache(lambda name: made[name]())


class _Head(torch.autograd.Function):
    """Stands for the operation that makes logits; its backward is not part of the loss and never runs."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, buffer: Tensor) -> Tensor:
        return buffer.detach()

    @staticmethod
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[None, None]:
        raise AssertionError("benchmark: the gradient of logits went further than to the logits")


@cache
def _leaf(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, requires_grad=True)


def as_produced(buffer: Tensor) -> Tensor:
    """Logits as training has them: no leaf and no view, in the memory of ``buffer``.

    Takes no memory and launches nothing. All logits of one buffer share a version with it, so that autograd
    and the losses notice a write.
    """
    logits: Tensor = _Head.apply(_leaf(buffer.device), buffer)
    return logits


def inputs_of(case: Case, rank: int, device: Any) -> Inputs:
    """One rank's inputs. Weights and logits differ between the ranks; labels and hidden states are the same."""
    dtype = getattr(torch, case.dtype)
    own = torch.Generator(device).manual_seed(rank)
    common = torch.Generator(device).manual_seed(1000)
    if not case.is_head:
        logits = torch.randn(case.tokens, case.columns, generator=own, device=device).mul_(3).to(dtype)
        labels = torch.randint(0, case.vocabulary, (case.tokens,), generator=common, device=device)
        return Inputs((logits,), labels, alongside_of(case, (logits,), rank))
    is_compared = case.kind in REDUCTIONS
    std = WEIGHT_STD if is_compared else WIDE_WEIGHT_STD
    weight = torch.randn(case.columns, case.hidden_size, generator=own, device=device).mul_(std)
    hidden = torch.randn(case.tokens, case.hidden_size, generator=common, device=device)
    labels = torch.randint(0, case.vocabulary, (case.tokens,), generator=common, device=device)
    upstreams = None
    if is_compared:
        labels[torch.rand(labels.shape, generator=common, device=device) < IGNORED_SHARE] = IGNORE_INDEX
    if case.kind == "none":  # random, and the same in both dtypes
        upstream = torch.randn(labels.shape, generator=common, device=device).to(dtype)
        upstreams = {kind: upstream.to(kind) for kind in (torch.float32, dtype)}
    tensors = (hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_())
    return Inputs(tensors, labels, alongside_of(case, tensors, rank), upstreams)
