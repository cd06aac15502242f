"""What a caller passes to a head and its loss, and what of it is this rank's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.head.objective import Objective
from vocab_parallel_ce.options import HeadOptions, Settings
from vocab_parallel_ce.plan import comparable, has_weights
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.targets import Head, present, with_padding

WEIGHT = "weight: rows"  # what has a rank's columns, for messages


class Arguments(NamedTuple):
    """What a caller passes, except options."""

    head: Head
    targets: Any  # the loss's
    group: Any
    num_items: float | Tensor | None
    main_grad: Tensor | None = None
    expected_grad_output: Tensor | None = None
    objective: Objective | None = None

    @property
    def knows_grad_output(self) -> bool:
        """Whether forward knows what will multiply each loss, except one factor for all."""
        return self.expected_grad_output is not None or self.objective is not None

    @property
    def has_groups(self) -> bool:
        """Whether an objective takes groups of tokens, of which long ones may keep logits within forward."""
        return self.objective is not None and self.objective.together is not None


def with_local_rows(arguments: Arguments, settings: Settings, position: tuple[int, int]) -> tuple[Arguments, Settings]:
    """Return the arguments of this rank: the rows of DTensors; one of padding, with no gradient, if it has none."""
    (hidden, weight, bias), group = arguments.head, arguments.group
    if is_dtensor(weight) or (bias is not None and is_dtensor(bias)):
        if is_dtensor(weight):
            settings = settings._replace(vocab_size=shard_of_dtensor(arguments.head, settings, *position))
        weight = local_rows("weight", weight, group)
        bias = None if bias is None else local_rows("bias", bias, group)
        arguments = arguments._replace(head=Head(hidden, weight, bias))
    if not isinstance(weight, Tensor) or weight.dim() != 2 or weight.shape[0]:
        return arguments, settings
    if settings.vocab_size is None:
        expected = f"[C, {weight.shape[1]}] with rows"
        raise ValueError(f"weight: expected shape {expected}, got {tuple(weight.shape)}; {checks.NO_COLUMNS}")
    if arguments.main_grad is not None:
        checks.check_main_grad(arguments.main_grad, weight)
    targets, settings = with_padding(arguments.targets, settings, *position, WEIGHT)
    weight, bias = F.pad(weight, (0, 0, 0, 1)), None if bias is None else F.pad(bias, (0, 1))
    main_grad = None if arguments.main_grad is None else torch.zeros_like(weight, dtype=torch.float32)
    return arguments._replace(head=Head(hidden, weight, bias), targets=targets, main_grad=main_grad), settings


def shard_of_dtensor(head: Head, settings: Settings, rank: int, n_ranks: int) -> VocabShard:
    """Return this rank's columns from sizes that all ranks know, so that all of them raise or none."""
    n_rows, bias, vocab_size = head.weight.shape[0], head.bias, settings.vocab_size
    shard = VocabShard.for_rank(n_rows, rank, n_ranks)
    if isinstance(vocab_size, VocabShard):
        raise ValueError(
            f"vocab_size: expected a number or None with a DTensor weight, whose shard is {shard}, got {vocab_size}; "
            "leave it out"
        )
    if bias is not None and is_dtensor(bias) and bias.shape[0] != n_rows:
        raise ValueError(f"bias: expected shape ({n_rows},), got {tuple(bias.shape)}; pass that of weight's rows")
    if vocab_size is None:
        return shard
    vocab_size = checks.checked_count("vocab_size", vocab_size)
    if vocab_size > n_rows:
        raise ValueError(f"vocab_size: must be at most {n_rows}, the rows of weight, got {vocab_size}; pad weight")
    return shard._replace(vocab_size=vocab_size)


def autocast_dtype(hidden: Tensor) -> torch.dtype | None:
    """Return the dtype of the products under ``torch.autocast``, None outside of it."""
    device_type = hidden.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def check_gradient(settings: Settings, *, knows_grad_output: bool) -> None:
    """Raise ValueError if forward is to compute gradients and cannot; see :meth:`Arguments.knows_grad_output`."""
    if settings.gradient == "in_forward" and settings.reduction == "none" and not knows_grad_output:
        raise ValueError(
            "gradient: 'in_forward' cannot know the grad_output of reduction 'none', got both; use 'in_backward', or "
            "pass expected_grad_output"
        )


def rounded_dtypes(dtype: torch.dtype, tensors: Iterable[Tensor | None]) -> set[torch.dtype]:
    """Return the dtypes that gradients are rounded to: of the products, and of the tensors that require one."""
    return {dtype, *[t.dtype for t in tensors if t is not None and t.requires_grad]}


def gradient_of(settings: Settings) -> str:
    """Return the mode that runs."""
    if settings.gradient != "auto":
        return settings.gradient
    # With kept logits, backward has three products too, and gradients of the outputs as well.
    keeps = settings.asks_for_differentiable and settings.head.keep_logits != "none"
    return "in_backward" if keeps or settings.reduction == "none" else "in_forward"


def mode_of(arguments: Arguments, settings: Settings, dtype: torch.dtype) -> tuple[str, bool]:
    """Return the mode that runs with products of ``dtype``, and whether forward scales its gradients: those of fp16.

    How large they are with class weights only backward knows.
    """
    is_fp16 = torch.float16 in rounded_dtypes(dtype, arguments.head)
    waits = settings.gradient == "auto" and is_fp16 and has_weights(arguments.targets)
    gradient = "in_backward" if waits else gradient_of(settings)
    return gradient, is_fp16 and gradient == "in_forward"


def shape_of_tokens(hidden: Tensor, n_ranks: int, options: HeadOptions) -> tuple[int, ...]:
    """Return the shape of the tokens, with sequence parallelism of all ranks'."""
    first, *others = hidden.shape[:-1]
    return (first * n_ranks if options.sequence_parallel else first, *others)


def bytes_of_chunk(arguments: Arguments, element_size: int, scales: bool) -> tuple[int, int]:
    """Return the bytes of a chunk for each token and column, a teacher's logits included, and of an element of the
    weight's gradient: 4 if it stays fp32 until it is added or multiplied, 0 if it is not wanted.
    """
    weight = arguments.head.weight
    heads = (target for _, target, role in present(arguments.targets) if "tokens" in role.axes)
    logit_bytes = element_size + sum(states.dtype.itemsize for states in heads)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return logit_bytes, 0
    stays_fp32 = scales or arguments.main_grad is not None or arguments.expected_grad_output is not None
    return logit_bytes, 4 if stays_fp32 else min(weight.dtype.itemsize, 4)


def compare(
    arguments: Arguments,
    expected: Tensor | None,
    is_valid: Tensor,
    shard: VocabShard,
    dtype: torch.dtype,
    settings: Settings,
) -> None:
    """Compare the ranks' arguments, and the grad_output by token that is ``expected``.

    ``is_valid [N]`` are the tokens that are not ignored, ``dtype`` is that of the products.
    """
    options = comparable(settings, arguments.num_items)
    options |= {"main_grad": arguments.main_grad is not None, "dtype of the products": dtype}
    if arguments.objective is not None:
        function, tokens, reduction, num_items, is_checked, _, together, numbers = arguments.objective
        options |= {"reduction": reduction, "num_items": None if num_items is None else float(num_items)}
        options["check_objective"] = is_checked
        options["objective"] = getattr(function, "__qualname__", type(function).__name__)
        options |= {f"tokens[{name!r}]": each for name, each in tokens.items()}
        options |= {f"numbers[{name!r}]": each for name, each in numbers.items()}
        options["together"] = together
    options["expected_grad_output"] = expected
    verify.compare_call(arguments.head._asdict(), arguments.targets, shard, options, is_valid)
