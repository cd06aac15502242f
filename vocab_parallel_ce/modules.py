"""The loss as an ``nn.Module``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import vocab_parallel_cross_entropy
from vocab_parallel_ce.exchange import group_position
from vocab_parallel_ce.selection import IMPLEMENTATIONS


class VocabParallelCrossEntropy(nn.Module):
    """:func:`vocab_parallel_cross_entropy` with its options fixed; it has no parameters.

    Args:
        group, ignore_index, label_smoothing, reduction, gradient, impl, check_labels, vocab_size:
            as in :func:`vocab_parallel_cross_entropy`.

    Raises:
        TypeError, ValueError: an option is not one that the function takes.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        gradient: str = "auto",
        impl: str = "auto",
        check_labels: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        checks.check_integer("ignore_index", ignore_index)
        checks.check_label_smoothing(label_smoothing)
        checks.check_choice("reduction", reduction, checks.REDUCTIONS)
        checks.check_choice("gradient", gradient, checks.GRADIENTS)
        checks.check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
        if vocab_size is not None:
            checks.check_integer("vocab_size", vocab_size)
        self.n_ranks = group_position(group)[1]
        self.options: dict[str, Any] = {
            "group": group,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "reduction": reduction,
            "gradient": gradient,
            "impl": impl,
            "check_labels": check_labels,
            "vocab_size": vocab_size,
        }

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of ``logits [..., C]`` and ``labels [...]``: fp32, ``[]`` or ``[...]``."""
        return vocab_parallel_cross_entropy(logits, labels, **self.options)

    def extra_repr(self) -> str:
        shown = dict(self.options)
        del shown["group"]
        ranks = "1 rank" if self.n_ranks == 1 else f"{self.n_ranks} ranks"
        return ", ".join([ranks, *(f"{name}={value!r}" for name, value in shown.items())])
