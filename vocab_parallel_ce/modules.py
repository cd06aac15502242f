"""The loss as an ``nn.Module``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import vocab_parallel_cross_entropy


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
        group = shown.pop("group")
        ranks = "1 rank" if group is None else f"{group.size()} ranks"
        return ", ".join([ranks, *(f"{name}={value!r}" for name, value in shown.items())])
