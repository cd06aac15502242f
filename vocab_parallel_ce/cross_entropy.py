"""Vocabulary-parallel cross-entropy over logits: the public function and its autograd.

    logits --online_softmax--> RowStats [N, K] --all_gather--> [R, N, K] --> loss, grad_logits

Collectives: forward one (none for one rank), backward none. See ``spec`` for the mathematics and the
legend of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.exchange import all_gather_stats, group_position
from vocab_parallel_ce.kernels.layout import row_layout, rows_are_disjoint
from vocab_parallel_ce.selection import select
from vocab_parallel_ce.shard import VocabShard

SECOND_BACKWARD = (
    "cross-entropy: backward ran a second time, but the first had its gradient in the logits' "
    "storage and has handed it on; ask for gradient='out_of_place' (TransformerEngine's "
    "overwrite_input=False) to run backward again"
)


DOUBLE_BACKWARD = (
    "cross-entropy: expected backward without create_graph: its gradient cannot be differentiated again"
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run ``function`` eagerly where a caller under ``torch.compile`` reaches it: its graph breaks there.

    The kernels overwrite their input and take tuples, neither of which inductor follows.
    """

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@outside_graphs
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool = False,
    vocab_size: int | None = None,
) -> Tensor:
    """Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

    Rank ``r`` of the ``R`` ranks of ``group`` holds the columns ``[r * C, (r + 1) * C)`` of a
    vocabulary of ``V = R * C``. Formula: ``torch.nn.functional.cross_entropy`` over the whole
    vocabulary, in fp32 (``spec`` spells it out).

    Overwrites: unless ``gradient="out_of_place"``, the storage of ``logits`` holds their gradient
    after forward (``"in_forward"``) or after backward (``"in_backward"``): do not use ``logits``
    afterwards. Where no gradient is needed, nothing is overwritten. Logits whose last dimension is
    not dense, whose leading dimensions have more than three strides that do not merge, or that overlap
    themselves (expanded), are copied and stay as they are.

    Collectives: forward one all_gather of 12 bytes a row (16 with label smoothing) from each rank,
    on the current stream; backward none. No host synchronisation unless ``check_labels``; every
    path can be captured in a CUDA graph. Under ``torch.compile`` the graph breaks here.

    Args:
        logits: ``[..., C]`` bf16, fp16 or fp32, at least two dimensions, of any strides.
        labels: ``[...]`` int64 or int32 ids in the *global* vocabulary, the same on every rank.
        group: the ``torch.distributed.ProcessGroup`` of the ranks that share a vocabulary; None for
            logits that hold all of it. All of its ranks call, with the same shapes, dtype and options,
            which is not checked.
        ignore_index: rows with this label have loss 0 and gradient 0, and do not count in the mean.
        label_smoothing: in [0, 1]; the mean over the vocabulary is over all ``V`` columns. The
            smoothed part of the loss is exact to 2**-24 of the mean logit's magnitude.
        reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or
            ``"none"``.
        gradient: ``"in_forward"``: computed by forward and scaled by backward, which rounds it a
            second time where the upstream gradient is not 1; not for logits that are a view in the
            graph. ``"in_backward"``: computed by backward with the upstream gradient folded in.
            ``"out_of_place"``: the same into a new tensor, so that logits survive and backward may run
            again; a view with gaps costs a copy. ``"auto"``: in_forward for mean and sum of bf16 and
            fp32 logits that are no view, otherwise in_backward.
        impl: ``"triton"``, ``"reference"`` or ``"auto"`` (triton on a GPU, reference elsewhere).
        check_labels: raise for a label outside ``[0, V)`` that is not ``ignore_index``, at the price
            of a host synchronisation. Otherwise its row's loss and gradient are NaN.
        vocab_size: ``V`` if given, to check ``R * C`` against.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError: a dtype or type is not one of those above.
        ValueError: shapes, devices or values do not fit, or ``impl`` cannot run here.
        RuntimeError: from backward, when it runs again over a gradient in place, or with
            ``create_graph``.
    """
    call = prepare_call(
        logits,
        labels,
        group=group,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
        gradient=gradient,
        impl=impl,
        check_labels=check_labels,
        vocab_size=vocab_size,
    )
    if torch.is_grad_enabled() and logits.requires_grad:
        return _CrossEntropy.apply(logits, labels, call)
    with torch.no_grad():
        loss, _, _ = call.loss(walkable(logits), flat(labels))
        return loss


class LossCall(NamedTuple):
    """One validated call: what runs, on which shard, and the options of the loss."""

    launchers: ModuleType
    group: Any
    rank: int
    n_ranks: int
    shard: VocabShard
    loss_shape: torch.Size
    ignore_index: int
    label_smoothing: float
    reduction: str
    gradient: str

    def statistics(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """``[R, N, K]`` statistics of all ranks, and ``[1]`` rows that count where a mean asks for it."""
        n_rows = labels.shape[0]
        n_stats = 4 if self.label_smoothing > 0 else 3
        stats = logits.new_empty((self.n_ranks, n_rows, n_stats), dtype=torch.float32)
        valid_rows = None
        if self.reduction == "mean":
            valid_rows = logits.new_empty(1, dtype=torch.int32)
        self.launchers.online_softmax(
            logits,
            labels,
            stats[self.rank],
            valid_rows,
            start=self.shard.start,
            ignore_index=self.ignore_index,
        )
        all_gather_stats(stats, self.rank, self.group)
        return stats, valid_rows

    def loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The loss, and the statistics and count it came from. Reads the logits once."""
        stats, valid_rows = self.statistics(logits, labels)
        losses = stats.new_empty(self.loss_shape)
        self.launchers.cross_entropy_loss(
            stats,
            labels,
            valid_rows,
            losses.view(-1),
            vocab_size=self.shard.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        return self.reduced(losses), stats, valid_rows

    def write_gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        stats: Tensor,
        valid_rows: Tensor | None,
        *,
        into: Tensor,
        upstream: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Fill ``into``, laid out as ``logits`` or the same tensor, and ``loss [N]`` where given."""
        self.launchers.cross_entropy(
            logits,
            stats,
            labels,
            valid_rows,
            upstream,
            loss,
            into,
            start=self.shard.start,
            vocab_size=self.shard.vocab_size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )
        _raise_version(into)

    def loss_and_gradient(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss; its gradient replaces ``logits``, which must be :func:`overwritable`."""
        stats, valid_rows = self.statistics(logits, labels)
        losses = stats.new_empty(self.loss_shape)
        self.write_gradient(logits, labels, stats, valid_rows, into=logits, loss=losses.view(-1))
        return self.reduced(losses)

    def reduced(self, losses: Tensor) -> Tensor:
        """The mean's weight is in each of ``losses`` already.

        Unreduced, they are the tensor that was allocated and no view of it: autograd forbids to
        change a view that a Function returns, as ``loss += auxiliary_loss`` does.
        """
        return losses if self.reduction == "none" else losses.sum()


def prepare_call(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    gradient: str,
    impl: str,
    check_labels: bool = False,
    vocab_size: int | None = None,
) -> LossCall:
    """Check the arguments of a public function and settle what runs; nothing is changed by it."""
    checks.check_logits(logits)
    checks.check_labels(labels, logits)
    checks.check_integer("ignore_index", ignore_index)
    checks.check_label_smoothing(label_smoothing)
    checks.check_choice("reduction", reduction, checks.REDUCTIONS)
    checks.check_choice("gradient", gradient, checks.GRADIENTS)
    rank, n_ranks = group_position(group)
    shard = VocabShard.even(logits.shape[-1], rank, n_ranks)
    if vocab_size is not None:
        checks.check_vocab_size(vocab_size, logits.shape[-1], n_ranks)
    implementation = select(logits.device.type, impl).name
    if check_labels:
        checks.check_label_range(labels, shard.vocab_size, ignore_index)
    return LossCall(
        launchers=_launchers(implementation),
        group=group,
        rank=rank,
        n_ranks=n_ranks,
        shard=shard,
        loss_shape=labels.shape,
        ignore_index=int(ignore_index),
        label_smoothing=float(label_smoothing),
        reduction=reduction,
        gradient=_gradient_mode(gradient, reduction, logits),
    )


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
    _raise_version(grad_logits)
    return grad_logits


class _CrossEntropy(torch.autograd.Function):
    """Collectives: forward one, backward none.

    Saved: in_forward the gradient, in the logits' storage; otherwise the logits (no copy), labels
    and 12 to 16 bytes a row and rank of statistics.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, call: LossCall) -> Tensor:
        ctx.call = call
        ctx.handed_on = False
        flat_labels = flat(labels)
        if call.gradient == "in_forward":
            grad = overwritable(logits)
            loss = call.loss_and_gradient(grad, flat_labels)
            ctx.save_for_backward(grad)
        else:
            kept = logits if call.gradient == "out_of_place" else overwritable(logits)
            loss, stats, valid_rows = call.loss(walkable(kept), flat_labels)
            ctx.save_for_backward(kept, flat_labels, stats, valid_rows)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:
        # once_differentiable looks at the upstream gradient alone: with one that requires no gradient
        # it would hand out a gradient that is silently a constant.
        if torch.is_grad_enabled():
            raise RuntimeError(DOUBLE_BACKWARD)
        call: LossCall = ctx.call
        if ctx.handed_on:
            raise RuntimeError(SECOND_BACKWARD)
        saved = ctx.saved_tensors
        ctx.handed_on = call.gradient != "out_of_place"
        logits = saved[0].detach()
        upstream = per_row(grad_loss, logits)
        if call.gradient == "in_forward":
            call.launchers.element_mul(logits, upstream)
            _raise_version(logits)
            return logits, None, None
        source, grad = logits, logits
        if call.gradient == "out_of_place":
            source, grad = _source_and_new(logits)
        call.write_gradient(source, *saved[1:], into=grad, upstream=upstream)
        return grad, None, None


def walkable(logits: Tensor) -> Tensor:
    """``logits``, or a contiguous copy where kernels cannot walk their rows."""
    return logits if row_layout(logits) is not None else logits.contiguous()


def overwritable(logits: Tensor) -> Tensor:
    """``logits``, or a contiguous copy where rows cannot be walked or share memory with each other."""
    logits = walkable(logits)
    return logits if rows_are_disjoint(logits) else logits.contiguous()


def per_row(upstream: Tensor, logits: Tensor) -> Tensor:
    """``[N]`` view of an upstream gradient with one element for all rows (stride 0) or one for each."""
    n_rows = logits.shape[:-1].numel()
    return upstream.reshape(1).expand(n_rows) if upstream.numel() == 1 else upstream.reshape(-1)


def _is_view_in_graph(tensor: Tensor) -> bool:
    return tensor._is_view() and tensor.grad_fn is not None


def _raise_version(overwritten: Tensor) -> None:
    """Autograd then refuses to use a saved value that has been overwritten.

    A view in a graph is left out: autograd would rebuild the view's node, which then is no longer the
    one that the graph holds, and gradients for the view and hooks on it would be lost.
    """
    if not _is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)


def _source_and_new(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits to read and a new tensor for their gradient, laid out alike: gaps cost a copy."""
    grad = torch.empty_like(logits)
    if row_layout(grad) is None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alike = grad.stride() == logits.stride() and logits.data_ptr() % 16 == grad.data_ptr() % 16
    return (logits, grad) if alike else (grad.copy_(logits), grad)


def flat(labels: Tensor) -> Tensor:
    """``[N]`` contiguous labels: a view where they are contiguous already."""
    return labels.reshape(-1).contiguous()


def _launchers(implementation: str) -> ModuleType:
    if implementation == "reference":
        from vocab_parallel_ce import reference

        return reference
    from vocab_parallel_ce.kernels import launchers

    return launchers
