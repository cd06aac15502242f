"""One call of the loss: its arguments checked, then statistics -> exchange -> outputs and gradient.

    logits --online_softmax--> RowStats [N, K] --all_gather--> [R, N, K] --> loss, grad_logits

Public functions prepare a :class:`Call` and run it, most of them under autograd.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.exchange import all_gather_stats, group_position
from vocab_parallel_ce.kernels.layout import row_layout, rows_are_disjoint
from vocab_parallel_ce.selection import select
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions, RowOutputs


class Call(NamedTuple):
    """One validated call: what runs, on which shard, and the options of the loss."""

    launchers: ModuleType
    group: Any
    rank: int
    n_ranks: int
    shard: VocabShard
    loss_shape: torch.Size
    options: LossOptions
    reduction: str
    num_items: Tensor | None  # [1], of a sum
    gradient: str

    def statistics(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[R, N, K]`` statistics of all ranks, and the ``[1]`` divisor of a mean or a sum over items."""
        shape = (self.n_ranks, labels.shape[0], len(self.options.statistics))
        stats = logits.new_empty(shape, dtype=torch.float32)
        valid_rows = logits.new_empty(1, dtype=torch.int32) if self.reduction == "mean" else None
        self.launchers.online_softmax(
            logits, labels, stats[self.rank], valid_rows, shard=self.shard, options=self.options
        )
        all_gather_stats(stats, self.rank, self.group)
        return stats, self.num_items if valid_rows is None else valid_rows

    def outputs(self, logits: Tensor, labels: Tensor) -> tuple[RowOutputs, Tensor, Tensor | None]:
        """What was asked for, and the statistics and divisor it came from. Reads the logits once."""
        stats, divisor = self.statistics(logits, labels)
        return self.finished(stats, labels, divisor), stats, divisor

    def finished(self, stats: Tensor, labels: Tensor, divisor: Tensor | None) -> RowOutputs:
        """What was asked for, from the statistics."""
        wanted = self.options
        rows = RowOutputs(
            stats.new_empty(self.loss_shape),
            stats.new_empty(self.loss_shape) if wanted.entropy else None,
            stats.new_empty(self.loss_shape) if wanted.predictions else None,
            stats.new_empty(self.loss_shape, dtype=torch.int64) if wanted.predictions else None,
        )
        self.launchers.row_outputs(stats, labels, divisor, rows, shard=self.shard, options=wanted)
        return rows._replace(loss=self.reduced(rows.loss))

    def write_gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        stats: Tensor,
        divisor: Tensor | None,
        *,
        into: Tensor,
        upstream: Tensor | None = None,
        entropy_upstream: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Fill ``into``, laid out as ``logits`` or the same tensor, and ``loss [N]`` where given."""
        self.launchers.cross_entropy(
            logits,
            stats,
            labels,
            divisor,
            upstream,
            entropy_upstream,
            loss,
            into,
            shard=self.shard,
            options=self.options,
        )
        raise_version(into)

    def outputs_and_gradient(self, logits: Tensor, labels: Tensor) -> RowOutputs:
        """What was asked for; the gradient replaces ``logits``, which must be :func:`overwritable`."""
        stats, divisor = self.statistics(logits, labels)
        if self.options.predictions:
            outputs = self.finished(stats, labels, divisor)
            self.write_gradient(logits, labels, stats, divisor, into=logits)
            return outputs
        losses = stats.new_empty(self.loss_shape)
        self.write_gradient(logits, labels, stats, divisor, into=logits, loss=losses.view(-1))
        return RowOutputs(self.reduced(losses), None, None, None)

    def reduced(self, losses: Tensor) -> Tensor:
        """The divisor is in each of ``losses`` already.

        Unreduced, they are the tensor that was allocated and no view of it: autograd forbids to
        change a view that a Function returns, as ``loss += auxiliary_loss`` does.
        """
        return losses if self.reduction == "none" else losses.sum()


def checked_options(**options: Any) -> LossOptions:
    """:func:`_loss_options`, remembered: the same options come with every step."""
    try:
        return _loss_options(**options)
    except TypeError:
        pass  # of the cache, whose keys must be hashable, or of a check: the check says it better
    return _loss_options.__wrapped__(**options)


@functools.lru_cache(typed=True)
def _loss_options(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    entropy: bool = False,
    metrics: bool = False,
    vocab_size: int | None = None,
) -> LossOptions:
    """Checked options; ``vocab_size``, which ``"megatron"`` and ``metrics`` depend on, may be unknown yet.

    A temperature divides z: ``softcap * tanh(u / softcap) / T`` is that of ``u / T`` and ``softcap / T``.
    """
    checks.check_integer("ignore_index", ignore_index)
    checks.check_number("label_smoothing", label_smoothing, at_most=1)
    checks.check_choice("smoothing_formula", smoothing_formula, checks.SMOOTHING_FORMULAS)
    checks.check_number("z_loss", z_loss)
    checks.check_number("logit_scale", logit_scale, positive=True)
    checks.check_number("temperature", temperature, positive=True)
    if softcap is not None:
        checks.check_number("softcap", softcap, positive=True)
    checks.check_bool("return_metrics", metrics)
    checks.check_bool("entropy", entropy)
    smoothing = float(label_smoothing)
    if vocab_size is not None:
        if metrics:
            checks.check_exact_in_fp32(vocab_size)
        if smoothing_formula == "megatron":
            checks.check_several_columns(vocab_size)
            smoothing *= vocab_size / (vocab_size - 1)
    logit_scale /= temperature
    checks.check_number("logit_scale / temperature", logit_scale, positive=True)
    if softcap is not None:
        softcap /= temperature
        checks.check_number("softcap / temperature", softcap, positive=True)
    return LossOptions(
        ignore_index=int(ignore_index),
        smoothing=smoothing,
        z_loss=float(z_loss),
        logit_scale=float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        entropy=entropy,
        predictions=metrics,
    )


def prepare_call(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any,
    reduction: str,
    gradient: str,
    impl: str,
    num_items: int | Tensor | None = None,
    check_labels: bool = False,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
    **options: Any,
) -> Call:
    """Check the arguments of a public function and settle what runs; nothing is changed by it."""
    checks.check_logits(logits)
    checks.check_labels(labels, logits)
    checks.check_choice("reduction", reduction, checks.REDUCTIONS)
    checks.check_choice("gradient", gradient, checks.GRADIENTS)
    checks.check_bool("check_labels", check_labels)
    checks.check_num_items(num_items, reduction, logits)
    rank, n_ranks = group_position(group)
    shard = shard_of_logits(logits.shape[-1], rank, n_ranks, vocab_size, shard)
    row_options = checked_options(**options, vocab_size=shard.vocab_size)
    implementation = select(logits.device.type, impl).name
    if check_labels:
        checks.check_label_range(labels, shard.vocab_size, row_options.ignore_index)
    return Call(
        launchers=_launchers(implementation),
        group=group,
        rank=rank,
        n_ranks=n_ranks,
        shard=shard,
        loss_shape=labels.shape,
        options=row_options,
        reduction=reduction,
        num_items=_as_divisor(num_items, logits),
        gradient=_gradient_mode(gradient, reduction, logits),
    )


def shard_of_logits(
    n_columns: int, rank: int, n_ranks: int, vocab_size: int | None, shard: VocabShard | None
) -> VocabShard:
    """The shard that was given, or that follows from the size of the vocabulary, or from equal shards."""
    if shard is not None:
        return given_shard(shard, vocab_size, n_columns, n_ranks)
    if vocab_size is None:
        return VocabShard.even(n_columns, rank, n_ranks)
    return VocabShard.of_rank(vocab_size, rank, n_ranks, n_columns)


def given_shard(shard: object, vocab_size: int | None, n_columns: int | None, n_ranks: int) -> VocabShard:
    """``shard`` checked, against ``n_columns`` where they are known."""
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {type(shard).__name__}")
    if vocab_size is not None:
        raise ValueError("shard: has a vocab_size itself, got vocab_size too")
    return shard.checked(n_columns, n_ranks)


def _as_divisor(num_items: int | Tensor | None, logits: Tensor) -> Tensor | None:
    if num_items is None:
        return None
    if isinstance(num_items, Tensor) and num_items.device == logits.device:
        return num_items.detach().reshape(1)
    return logits.new_full((1,), float(num_items), dtype=torch.float32)


def _gradient_mode(gradient: str, reduction: str, logits: Tensor) -> str:
    is_view = torch.is_grad_enabled() and _is_view_in_graph(logits)
    if gradient == "in_forward" and is_view:
        raise ValueError(
            "gradient: 'in_forward' overwrites logits during forward, which autograd allows for no view "
            f"of another tensor, got logits from {type(logits.grad_fn).__name__}; use 'in_backward'"
        )
    if gradient != "auto":
        return gradient
    # fp16 has no room for a gradient that the loss scale has not multiplied yet.
    if reduction == "none" or logits.dtype == torch.float16 or is_view:
        return "in_backward"
    return "in_forward"


def scale_in_place(grad_logits: Tensor, grad_output: Tensor) -> Tensor:
    """Multiply the gradient of a two-step forward by the upstream gradient; returns ``grad_logits``."""
    checks.check_logits(grad_logits)
    checks.check_grad_output(grad_output, grad_logits)
    if row_layout(grad_logits) is None or not rows_are_disjoint(grad_logits):
        raise ValueError(
            "_input: expected the tensor that cross_entropy_forward returned, whose rows are dense and "
            f"share no memory, got shape {tuple(grad_logits.shape)}, strides {grad_logits.stride()}"
        )
    launchers = _launchers(select(grad_logits.device.type).name)
    launchers.element_mul(grad_logits, per_row(grad_output, grad_logits))
    raise_version(grad_logits)
    return grad_logits


def walkable(logits: Tensor) -> Tensor:
    """``logits``, or a contiguous copy where kernels cannot walk their rows."""
    return logits if row_layout(logits) is not None else logits.contiguous()


def overwritable(logits: Tensor) -> Tensor:
    """``logits``, or a contiguous copy where rows cannot be walked or share memory with each other."""
    logits = walkable(logits)
    return logits if rows_are_disjoint(logits) else logits.contiguous()


def source_and_new(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits to read and a new tensor for their gradient, laid out alike: gaps cost a copy."""
    grad = torch.empty_like(logits)
    if row_layout(grad) is None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alike = grad.stride() == logits.stride() and logits.data_ptr() % 16 == grad.data_ptr() % 16
    return (logits, grad) if alike else (grad.copy_(logits), grad)


def per_row(upstream: Tensor, logits: Tensor) -> Tensor:
    """``[N]`` view of an upstream gradient with one element for all rows (stride 0) or one for each."""
    n_rows = logits.shape[:-1].numel()
    return upstream.reshape(1).expand(n_rows) if upstream.numel() == 1 else upstream.reshape(-1)


def flat(labels: Tensor) -> Tensor:
    """``[N]`` contiguous labels: a view where they are contiguous already."""
    return labels.reshape(-1).contiguous()


def raise_version(overwritten: Tensor) -> None:
    """Autograd then refuses to use a saved value that has been overwritten.

    A view in a graph is left out: autograd would rebuild the view's node, which then is no longer the
    one that the graph holds, and gradients for the view and hooks on it would be lost.
    """
    if not _is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)


def _is_view_in_graph(tensor: Tensor) -> bool:
    return tensor._is_view() and tensor.grad_fn is not None


def _launchers(implementation: str) -> ModuleType:
    if implementation == "reference":
        from vocab_parallel_ce import reference

        return reference
    from vocab_parallel_ce.kernels import launchers

    return launchers
