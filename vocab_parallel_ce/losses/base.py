"""What differs between losses, seen from the path that all of them take.

    check -> plan -> statistics -> exchange -> outputs -> gradient

A :class:`Loss` declares its targets, and binds its launchers to the options of a plan. It has the
mathematics of a row over tensors: the specification, the oracle in fp64, and what runs without a GPU. A loss may bring
launchers in place of the mathematics, as that of given ids does, whose launchers call those of labels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.targets import Tokens, at, in_order, register

Stats = tuple[Any, ...]  # of each exchange, [R, N, K] on all ranks


class Launchers(NamedTuple):
    """What computes a loss in one implementation, for one shard and its options.

    ``targets`` are the loss's, ``outputs`` and ``grads`` the records ``TokenOutputs`` and ``GradOutputs``.
    """

    # (logits, targets, stats, rank): fills stats[0][rank], of a single rank all of them. Of at most stored_rows also
    # (..., outputs): fills those of a single rank's unreduced loss.
    statistics: Callable[..., None]
    # (stats, targets, divisor, outputs, total): fills outputs from the statistics of all ranks, and total [] with the
    # sum of the losses if given. Of at most counted_rows also (..., count): fills count [1] int32, which divides.
    outputs: Callable[..., None]
    # (logits, targets, stats, divisor, grads, grad_logits): fills grad_logits.
    gradient: Callable[..., None]
    element_mul: Callable[..., None]  # (grad_logits, grad_output)
    widths: tuple[int, ...]  # K of each exchange
    # (logits, targets, stats, rank): fills stats[1][rank] after the first exchange of several ranks. None: there is no
    # second.
    second: Callable[..., None] | None = None
    # (logits, targets, divisor, outputs): fills the outputs, and the gradient overwrites the logits.
    one_pass: Callable[..., None] | None = None
    one_pass_rows: int = 0  # the fewest that one_pass takes
    stored_rows: int = 0  # the most whose outputs the launch of the statistics stores
    summed_rows: int = 0  # the most whose losses the launch of the outputs sums, and need not store
    counted_rows: int = 0  # the most whose labels the launch of the outputs counts for a mean


LOSSES: dict[str, Loss] = {}  # Keys: names of the losses' files, as operators pass them.


class Loss:
    """A kind of loss. There is one instance of each, in a file of its own.

    The mathematics are functions over rows ``x [N, n]``, this rank's columns without padding. ``stats`` are of the
    whole vocabulary, except in ``merge``.
    """

    Targets: type  # a NamedTuple of tensors, whose roles ``targets`` reads
    HeadTargets: type  # those of a head, if they are others

    def __init__(self) -> None:
        kind = type(self)
        self.name = kind.__module__.rpartition(".")[2]
        self.HeadTargets = getattr(kind, "HeadTargets", kind.Targets)
        register(self.HeadTargets)
        register(self.Targets)
        other = type(LOSSES.setdefault(self.name, self))
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            raise ValueError(
                f"{kind.__qualname__}: expected a file of its own name, got {self.name}, which {other} has"
            )

    def check(self, targets: Any, tokens: Tokens, settings: Settings) -> None:
        """Raise unless the caller's targets fit each other and the settings; ``targets.check`` looks at each alone.

        By shapes, dtypes and settings, not by values: it is not asked again for another call that is alike.
        """

    def in_order(self, targets: Any, order: Any, settings: Settings) -> Any:
        """Return local targets of a head in the order of its rows, a ``TokenOrder``."""
        return in_order(targets, order, settings)

    def at(self, targets: Any, rows: slice) -> Any:
        """Return the targets of some rows of a head: of a chunk, of which ``targets.at`` takes parts."""
        return at(targets, rows)

    def options(self, settings: Settings, vocab_size: int | None, *, class_weight: bool) -> Any:
        """Check the settings, and return what the mathematics take: hashable. ``vocab_size`` may not be known yet."""
        raise NotImplementedError

    def outputs(self, options: Any) -> dict[str, bool]:
        """Return the names of the outputs alongside the loss that are asked for, and whether they have a gradient."""
        return {}

    def row_shape(self, options: Any) -> tuple[int, ...]:
        """Return the shape of a row's loss: ``()``, or ``(k,)`` of a loss that has k values, which are not reduced."""
        return ()

    def launchers(self, options: Any, shard: VocabShard, kernels: ModuleType | None) -> Launchers:
        """Bind the launchers of ``kernels``, or of plain PyTorch for None."""
        raise NotImplementedError

    # The mathematics.

    Stats: Any  # the record of all statistics, each ``[N]``

    def exchanges(self, options: Any) -> tuple[tuple[str, ...], ...]:
        """Return for each exchange the names of what is communicated, in the order in which they are packed."""
        raise NotImplementedError

    def tile(self, x: Tensor, targets: Any, shard: VocabShard, options: Any) -> Any:
        """Return the statistics of these columns."""
        raise NotImplementedError

    def merge(self, a: Any, b: Any, options: Any) -> Any:
        """Return the statistics of the union of two disjoint sets of columns: associative and commutative."""
        raise NotImplementedError

    def second(self, x: Tensor, targets: Any, stats: Any, shard: VocabShard, options: Any) -> Tensor:
        """Return ``[N, K]`` of these columns for the second exchange; every rank sums those of all ranks."""
        raise NotImplementedError

    def output(self, name: str, stats: Any, second: Any, targets: Any, shard: VocabShard, options: Any) -> Tensor:
        """Return ``[N]``, one of ``TokenOutputs``."""
        raise NotImplementedError

    def gradient(self, x: Tensor, targets: Any, stats: Any, second: Any, shard: VocabShard, options: Any) -> Tensor:
        """Return the ``[N, n]`` derivative of each row's loss by its logits."""
        raise NotImplementedError

    def outputs_gradient(
        self, x: Tensor, targets: Any, stats: Any, second: Any, grads: Any, shard: VocabShard, options: Any
    ) -> Tensor:
        """Return the same of the outputs alongside the loss, each times its ``grads``, summed."""
        raise NotImplementedError

    def ignored(self, targets: Any, options: Any) -> Tensor | None:
        """Return ``[N]`` bool; None if no row is ignored."""
        return None


def bound(kernels: ModuleType, loss: Any, exchanges: tuple[tuple[str, ...], ...]) -> Launchers:
    """Bind the launchers of ``kernels`` to a ``KernelLoss``."""
    return Launchers(
        kernels.rows.statistics_launcher(loss),
        kernels.outputs.outputs_launcher(loss),
        kernels.outputs.gradient_launcher(loss),
        kernels.outputs.element_mul,
        widths=tuple(map(len, exchanges)),
        second=kernels.rows.second_launcher(loss) if len(exchanges) > 1 else None,
        stored_rows=kernels.rows.STORED_ROWS if len(exchanges) == 1 else 0,
        summed_rows=0 if loss.is_pair else kernels.outputs.SUMMED_ROWS,
        counted_rows=0 if loss.is_pair else kernels.outputs.COUNTED_ROWS,
    )
