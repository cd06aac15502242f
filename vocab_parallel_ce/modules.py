"""The loss as an ``nn.Module``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import vocab_parallel_cross_entropy
from vocab_parallel_ce.exchange import group_position
from vocab_parallel_ce.pipeline import checked_options, given_shard
from vocab_parallel_ce.selection import IMPLEMENTATIONS
from vocab_parallel_ce.shard import VocabShard


class VocabParallelCrossEntropy(nn.Module):
    """:func:`vocab_parallel_cross_entropy` with its options fixed; it has no parameters.

    Args:
        group, ignore_index, label_smoothing, smoothing_formula, z_loss, softcap, logit_scale, reduction,
            return_metrics, gradient, impl, check_labels, vocab_size, shard: as in
            :func:`vocab_parallel_cross_entropy`.

    Raises:
        TypeError, ValueError: an option is not one that the function takes.
    """

    def __init__(
        self,
        *,
        group: Any = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        smoothing_formula: str = "torch",
        z_loss: float = 0.0,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        reduction: str = "mean",
        return_metrics: bool = False,
        gradient: str = "auto",
        impl: str = "auto",
        check_labels: bool = False,
        vocab_size: int | None = None,
        shard: VocabShard | None = None,
    ) -> None:
        super().__init__()
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "smoothing_formula": smoothing_formula,
            "z_loss": z_loss,
            "softcap": softcap,
            "logit_scale": logit_scale,
        }
        self.n_ranks = group_position(group)[1]
        if vocab_size is not None:
            checks.check_vocab_size(vocab_size)
        known_size = vocab_size
        if shard is not None:
            shard = given_shard(shard, vocab_size, None, self.n_ranks)
            known_size = shard.vocab_size
        checked_options(**self.options, metrics=return_metrics, vocab_size=known_size)
        checks.check_bool("check_labels", check_labels)
        checks.check_choice("reduction", reduction, checks.REDUCTIONS)
        checks.check_choice("gradient", gradient, checks.GRADIENTS)
        checks.check_choice("impl", impl, ("auto", *IMPLEMENTATIONS))
        self.options |= {
            "group": group,
            "reduction": reduction,
            "return_metrics": return_metrics,
            "gradient": gradient,
            "impl": impl,
            "check_labels": check_labels,
            "vocab_size": vocab_size,
            "shard": shard,
        }

    def forward(self, logits: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Any:
        """Loss of ``logits [..., C]`` and ``labels [...]``: fp32, ``[]`` or ``[...]``; metrics as asked for.

        ``num_items`` changes from step to step and therefore comes here: what a sum is divided by.
        """
        return vocab_parallel_cross_entropy(logits, labels, num_items=num_items, **self.options)

    def extra_repr(self) -> str:
        shown = dict(self.options)
        del shown["group"]
        ranks = "1 rank" if self.n_ranks == 1 else f"{self.n_ranks} ranks"
        return ", ".join([ranks, *(f"{name}={value!r}" for name, value in shown.items())])
