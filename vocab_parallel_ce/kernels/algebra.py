"""A loss of two tensors, logits and a number alongside each, as the kernels of ``row_*`` take it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Algebra(NamedTuple):
    """A loss as kernels take it, a ``tl.constexpr``: the mathematics of its file in ``losses``, as jit functions.

    ``stats`` is the loss's record of statistics, ``tile`` a ``walk.Tile``, ``own`` a :class:`Row`. ``options`` is the
    argument ``loss_options``. Options that are off are None.
    """

    empty: Any  # (at_label, LANES): stats of lanes that have seen nothing; at_label is the label's logit, -inf if none
    tile: Any  # (stats, tile, own): each lane's stats with one more tile; stats is None for the first one
    merge_lanes: Any  # (a, b, options): each lane's stats of two sets of columns
    merge: Any  # (stats, options): of one row; over axis 0, lanes or ranks
    load: Any  # (pointers, mask, options, step): packed stats, step apart; what mask excludes has no columns
    store: Any  # (pointers, stats, options, step): pack them
    loss: Any  # (stats, second, options): of a row or a vector of rows; second are the sums of the second exchange
    factors: Any  # (stats, second, weight, live, options): what all columns' gradients share; finite if not live
    gradient: Any  # (factors, tile, own): fp32 of each column; 0 if all logits are -inf and factors are not live
    second: Any = None  # (sums, tile, (own, stats)): each lane's two sums with one more tile; None for the first one
    merge_second: Any = None  # (sums): over axis 0, lanes

    @property
    def cache_key(self) -> str:
        """What Triton's cache on disk knows this by. By its ``str`` it would load what an edited function was."""
        return "-".join([function.cache_key for function in self if function is not None])

    def __hash__(self) -> int:
        """Hash the object: the functions' hashes take a lock each, at every launch."""
        return id(self)


class Row(NamedTuple):
    """What the walk of a row passes to the functions of a loss."""

    logits: tl.tensor  # the base
    other: tl.tensor  # the base of what stands alongside the logits
    class_weight: tl.tensor  # the pointer, or None
    target: tl.tensor  # offset of the label's logit from the base; outside of the row if this rank has none
    vocab_size: tl.tensor
    loss_options: tl.tuple


@triton.jit
def load_logits(pointers, inside):
    """Return the logits in fp32, -inf outside."""
    return tl.load(pointers, inside, other=float("-inf")).to(tl.float32)
