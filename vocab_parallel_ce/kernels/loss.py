"""Loss alone from the gathered statistics of all ranks, for callers that want no gradient yet.

    loss = (1 - e) * (lse - x_y) + e * (lse - mean_i x_i)

One program finishes LOSS_ROWS rows. Reads 4 K R bytes a row and writes 4: the logits are not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from vocab_parallel_ce.kernels.launch import device_of
from vocab_parallel_ce.kernels.primitives import mean_weight, merge_ranks, row_loss

LOSS_ROWS = 128


@triton.jit(do_not_specialize=["n_rows"])
def loss_kernel(
    labels,  # [N] int64|int32
    stats,  # [R, N, K] fp32
    valid_rows,  # [1] int32, or None: no mean
    loss,  # [N] fp32, out
    n_rows,
    n_ranks,
    vocab_size,
    ignore_index,
    label_smoothing,
    HAS_SUM: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Two ranks with ``(3, 1.5032, 3)`` and ``(2, 1, -inf)``, label on the first: loss 0.6265."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < n_rows
    label = tl.load(labels + rows, inside, other=0).to(tl.int64)
    ranks = tl.arange(0, RANKS)[:, None]
    pointers = stats + (ranks.to(tl.int64) * n_rows + rows[None, :]) * (3 + HAS_SUM)
    row_max, sum_exp, target_logit, logit_sum = merge_ranks(
        pointers, (ranks < n_ranks) & inside[None, :], HAS_SUM
    )
    value = row_loss(
        row_max,
        sum_exp,
        target_logit,
        logit_sum,
        label,
        vocab_size,
        ignore_index,
        label_smoothing,
        HAS_SUM,
    )
    if valid_rows is not None:
        value *= mean_weight(valid_rows)
    tl.store(loss + rows, value, inside)


def cross_entropy_loss(
    stats: Tensor,
    labels: Tensor,
    valid_rows: Tensor | None,
    loss: Tensor,
    *,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
) -> None:
    """Fill ``loss [N]`` from ``stats [R, N, K]``, over the number of rows that count with ``valid_rows``."""
    n_ranks, n_rows, n_stats = stats.shape
    if n_rows == 0:
        return
    with device_of(stats):
        loss_kernel[(triton.cdiv(n_rows, LOSS_ROWS),)](
            labels,
            stats,
            valid_rows,
            loss,
            n_rows,
            n_ranks,
            vocab_size,
            ignore_index,
            label_smoothing,
            HAS_SUM=n_stats == 4,
            RANKS=triton.next_power_of_2(n_ranks),
            ROWS=LOSS_ROWS,
            num_warps=4,
        )
