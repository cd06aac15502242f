"""The losses as ``nn.Module``."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from vocab_parallel_ce import checks
from vocab_parallel_ce.cross_entropy import vocab_parallel_cross_entropy
from vocab_parallel_ce.exchange import group_position
from vocab_parallel_ce.linear_cross_entropy import linear_cross_entropy
from vocab_parallel_ce.pipeline import checked_options, given_shard
from vocab_parallel_ce.selection import IMPLEMENTATIONS
from vocab_parallel_ce.shard import VocabShard

NOT_FIXED = {"hidden", "weight", "labels", "bias", "num_items"}  # of a module: they come with each call


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


class LinearCrossEntropy(nn.Module):
    """:func:`linear_cross_entropy` with its head and options fixed.

    Args:
        head: what the weight belongs to: an ``nn.Linear`` (its bias too) or an ``nn.Embedding`` of this
            rank's ``C`` rows, or a parameter ``[C, D]``; it is shared, and stays in the ``state_dict`` of its
            owner alone. Or ``(D, C)`` for an ``nn.Linear`` of this module's own, ``self.head``.
        bias: whether this module's own head has one.
        options: those of :func:`linear_cross_entropy` but ``num_items`` and ``bias``.

    Raises:
        TypeError: the head does more than its weight says (LoRA, quantisation, a subclass), or an option is
            unknown.
        ValueError: the head is parametrised or has hooks, which would not run.
    """

    def __init__(self, head: Any, *, bias: bool = False, **options: Any) -> None:
        super().__init__()
        allowed = inspect.signature(linear_cross_entropy).parameters.keys() - NOT_FIXED
        unknown = sorted(options.keys() - allowed)
        if unknown:
            raise TypeError(f"options: expected some of {', '.join(sorted(allowed))}, got {unknown[0]!r}")
        if isinstance(head, tuple):
            n_features, n_columns = head
            self.head = nn.Linear(n_features, n_columns, bias=bias)
            head = self.head
        elif bias:
            raise ValueError("bias: expected False with a head that is given, got True")
        # In a tuple, so that what is shared is no submodule or parameter of this module.
        self.shared = (head,)
        self.options = options
        self.weight_and_bias()

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The head's, looked up at each call: what is moved, cast or replaced is seen."""
        (head,) = self.shared
        if isinstance(head, Tensor):
            return head, None
        if type(head) not in (nn.Linear, nn.Embedding):
            raise TypeError(
                "head: expected exactly an nn.Linear, an nn.Embedding or a parameter, got "
                f"{type(head).__name__}, which may do more than multiply by its weight (LoRA, quantisation); "
                "merge it, or compute its logits and use VocabParallelCrossEntropy"
            )
        if parametrize.is_parametrized(head):
            raise ValueError(
                "head: expected one without parametrizations, which would run for each chunk, got some"
            )
        if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks:
            raise ValueError("head: expected one without hooks, which would not run, got some")
        return head.weight, getattr(head, "bias", None)

    def forward(self, hidden: Tensor, labels: Tensor, num_items: int | Tensor | None = None) -> Any:
        """Loss of ``hidden [..., D]`` and ``labels [...]``, and metrics as asked for."""
        weight, bias = self.weight_and_bias()
        return linear_cross_entropy(hidden, weight, labels, bias=bias, num_items=num_items, **self.options)

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self.options.items() if name not in ("group", "main_grad")}
        n_ranks = group_position(self.options.get("group"))[1]
        ranks = "1 rank" if n_ranks == 1 else f"{n_ranks} ranks"
        size = tuple(self.weight_and_bias()[0].shape)
        return ", ".join([ranks, f"weight={size}", *(f"{name}={value!r}" for name, value in shown.items())])
