"""The threshold of each row below which a sampler drops logits, from logits that are sharded over the vocabulary.

    top_k   the k-th largest logit: the smallest t with fewer than k logits above it
    top_p   the largest t whose logits of at least t have the share top_p of the exponentials that top_k leaves:
            the smallest one whose logits above it have less

Of ``top_k`` up to 1024, all ranks gather their largest logits, and the threshold is read off the list. Otherwise it is
searched among the logits' bit patterns, which are ordered as the numbers are: a step takes ``2**N_BITS - 1`` of them
per row, adds the counts or sums above them of all ranks, and leaves one of ``2**N_BITS`` parts of the range. Kernels
read the logits once a step; plain PyTorch sorts them first.

The threshold is then moved to the middle between this last kept logit and the first dropped one, the largest below it
of all ranks: the fp32 values of 16-bit logits are on the same side.

Exponentials, at most 1, become multiples of 2**-40, and sums are int64: exact, in any order. So a row has the same
threshold whatever rows it comes with, and however many ranks share its columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, spec, verify
from vocab_parallel_ce.api.call import public
from vocab_parallel_ce.api.top_k import Gather, sharded_rows
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.largest import equal_and_below, has_kernels, largest_values, n_compared, sums_above
from vocab_parallel_ce.layout import INTEGERS, compute_dtype
from vocab_parallel_ce.options import Settings, loss_options
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import INF, NEG_INF, LossOptions
from vocab_parallel_ce.targets import Role, Tokens, at_rows, check_target, prepared

N_BITS = 3  # that a step finds
LONGEST = (1 << 64 - N_BITS) - 1  # segment: a difference of 64-bit keys has no sign
UNIT = 2.0**40  # of an exponential of 1: 2**22 of them fit
NEARLY_1 = 1 - 2.0**-25  # which fp32 rounds to 1
MOST_LISTED = 1024  # logits of top_k: more are searched for
MOST_ELEMENTS = 2**25  # of a rank's logits that are compared or sorted at once: that takes about 32 bytes each


@public(lambda keywords: True)
def sampling_threshold(
    logits: Tensor,
    *,
    top_k: int | None = None,
    top_p: float = 1.0,
    temperature: float | Tensor = 1.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    group: Any = None,
    vocab_size: int | VocabShard | None = None,
) -> Tensor:
    """Return for each row a number below which a sampler drops logits: ``threshold`` of :func:`token_log_probs`.

    It is in the middle between the smallest logit that stays and the largest that goes. So that of 16-bit logits parts
    the same ones in fp32; not the other way round, since 16 bits round logits across it. As samplers do, ``top_k``
    first; the nucleus is the smallest set of the largest logits that has at least ``top_p`` of what ``top_k`` leaves
    (Holtzman et al., arXiv:1904.09751), to a share of ``V * 2**-40``. Equal logits stay in or go together. It has no
    gradient. Overwrites nothing.

    Collectives: none if all logits stay. With ``top_k`` up to 1024, per 2**25 logits of a rank (on a GPU: compared,
    about 64 of each of ``top_k`` and row), one all_gather of 4 bytes (fp64: 8) per logit of ``top_k`` and row, and one
    of 4 bytes with ``top_p``. Otherwise, per 2**25 logits of a rank, on a GPU per 2**25 rows, one of 4 bytes per row,
    and 6 of 56 bytes for ``top_k``, 6 and one of 8 bytes for ``top_p``; 11 of fp32 logits in the place of 6. In both
    cases one more of 4 bytes (fp64: 8) per row. ``torch.compile`` breaks its graph.

    Args:
        logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        top_k: at least 1; None, or as in vLLM 0 or -1, for all.
        top_p: above 0, at most 1. What fp32 rounds to 1, from ``1 - 2**-25`` on, is 1: all stay.
        temperature, softcap, logit_scale: as in :func:`token_log_probs`; the nucleus depends on them.
        group, vocab_size: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        ``[...]`` fp32, fp64 for fp64 logits, equal on all ranks; ``-inf`` in a row that loses nothing or only ``-inf``,
        and in one with NaN or ``+inf``.

    Raises:
        TypeError, ValueError: a type, dtype or value does not fit.

    Example:
        >>> from vocab_parallel_ce import sampling_threshold, token_log_probs
        >>> logits = torch.tensor([[3.0, 3.0, 0.0, 0.0]])
        >>> threshold = sampling_threshold(logits, top_k=2)
        >>> threshold
        tensor([1.5000])
        >>> token_log_probs(logits, torch.tensor([1]), threshold=threshold)  # log 1 / 2
        tensor([-0.6931])
    """
    rows, shard, gather = sharded_rows(logits, vocab_size, group)
    k = None
    if top_k is not None:
        checks.check_integer("top_k", top_k)
        if top_k < -1:
            raise ValueError(f"top_k: must be at least 1, or None, 0 or -1 for all, got {top_k}")
        k = int(top_k) if top_k > 0 else None
    checks.check_number("top_p", top_p, positive=True, at_most=1)
    share = 1.0 if top_p >= NEARLY_1 else float(top_p)
    number, row_temperature = 1.0, None
    if isinstance(temperature, Tensor):
        tokens, role = Tokens(logits, "logits", logits.shape[:-1]), Role("numbers", ("rows",))
        check_target("temperature", temperature, role, tokens)
        checks.check_requires_no_gradient("temperature", temperature)
        row_temperature = prepared("temperature", temperature, role, tokens, Settings(), None)
    else:
        number = temperature
    settings = Settings(softcap=softcap, logit_scale=logit_scale, temperature=number)
    options = loss_options(settings, shard.vocab_size)
    if verify.pending.get() is not None:
        arguments = {"top_k": k, "top_p": share, "options": options, "temperature": row_temperature}
        verify.compare_logits("sampling_threshold", logits, shard, vocab_size, **arguments)
    if k is not None and k >= shard.vocab_size:
        k = None
    if k is None and share == 1:
        return logits.new_full(logits.shape[:-1], NEG_INF, dtype=compute_dtype(logits.dtype))
    width = -(-shard.vocab_size // group_position(group)[1])
    if has_kernels(rows):  # which copy no logits
        width = 1 if k is None or k > MOST_LISTED else n_compared(width, k)
    step, thresholds = max(MOST_ELEMENTS // width, 1), []
    for start, part in zip(range(0, max(len(rows), 1), step), rows.split(step), strict=True):
        temperatures = None if row_temperature is None else row_temperature[start : start + len(part)]
        thresholds.append(_threshold(part, at_rows(options, temperatures), k, share, gather))
    return torch.cat(thresholds).view(logits.shape[:-1])


@torch.no_grad()
def _threshold(rows: Tensor, options: LossOptions, top_k: int | None, top_p: float, gather: Gather) -> Tensor:
    find = _least_of_few if top_k is not None and top_k <= MOST_LISTED else _least_of_many
    least, dropped, row_max = find(rows, options, top_k, top_p, gather)
    middle = dropped / 2 + least / 2  # their sum may overflow
    # Of adjacent numbers, the middle may be the lower one.
    threshold = torch.where((dropped < middle) & (middle <= least), middle, least) + 0.0  # no -0
    return torch.where(row_max.isfinite() & (dropped > NEG_INF), threshold, NEG_INF)


def _least_of_many(
    rows: Tensor, options: LossOptions, top_k: int | None, top_p: float, gather: Gather
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the smallest logit that stays, the largest that goes, and the largest, of all ranks, by their bits."""
    columns = _Columns(rows, options, gather)
    least = torch.full_like(columns.largest, columns.lowest)
    if top_k is not None:
        least = columns.first_below(least, counts=True, bound=top_k)
    if top_p < 1:
        kept_mass = columns.above((least - 1).clamp(min=columns.lowest).unsqueeze(-1), counts=False)
        least = columns.first_below(least, counts=False, bound=kept_mass.double() * top_p)
    last = columns.value_of(least).to(compute_dtype(rows.dtype))
    return last, gather(equal_and_below(rows, last)[1]).amax(dim=0), columns.row_max


def _least_of_few(
    rows: Tensor, options: LossOptions, top_k: int | None, top_p: float, gather: Gather
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same by the list of the ``top_k`` largest logits of all ranks."""
    assert top_k is not None
    missing = max(top_k - rows.shape[-1], 0)
    listed = largest_values(rows, top_k - missing).to(compute_dtype(rows.dtype))
    listed = gather(F.pad(listed, (0, missing), value=NEG_INF)).transpose(0, 1).flatten(1)
    x = listed.sort(dim=-1, descending=True).values[:, :top_k]
    least = x[:, -1:]
    n_equal, below = equal_and_below(rows, least.squeeze(-1))
    dropped = gather(below).amax(dim=0)
    if top_p < 1:
        n_equal = gather(n_equal).sum(dim=0)  # some may not be listed
        z = spec.transformed(x, options)[0]
        exps = ((z - z[:, :1]).exp() * UNIT).long()
        kept = torch.where(x > least, exps, 0).sum(dim=-1) + n_equal * exps[:, -1]
        before = exps.cumsum(dim=-1) - exps
        last = (before < (kept.double() * top_p).unsqueeze(-1)).sum(dim=-1, keepdim=True) - 1
        least = x.gather(-1, last.clamp(min=0))
        dropped = torch.where(x < least, x, dropped.unsqueeze(-1)).amax(dim=-1)
    return least.squeeze(-1), dropped, x[:, 0]


class _Columns:
    """This rank's ``rows [N, n]``, and the keys of numbers that the logits' dtype has."""

    def __init__(self, rows: Tensor, options: LossOptions, gather: Gather) -> None:
        self.gather = gather
        self.dtype, self.integer = rows.dtype, INTEGERS[rows.itemsize]
        ends = torch.tensor([NEG_INF, INF], device="cpu")  # whatever the default device is
        self.lowest, highest = self.key_of(ends).tolist()
        self.n_keys = highest - self.lowest + 1
        largest = rows.amax(dim=-1) if rows.shape[-1] else rows.new_full(rows.shape[:1], NEG_INF)
        self.row_max = gather(largest).amax(dim=0)
        self.largest = self.key_of(self.row_max.nan_to_num(nan=INF, posinf=INF, neginf=NEG_INF))
        self.sums_above = sums_above(rows, self.row_max, options, UNIT)

    def key_of(self, values: Tensor) -> Tensor:
        """Return int64 keys: the bits, below 0 the negative ones of the positive. Zeros of both signs have one key."""
        bits = values.to(self.dtype).view(self.integer).long()
        return torch.where(bits < 0, (bits ^ torch.iinfo(self.integer).max) + 1, bits)

    def value_of(self, keys: Tensor) -> Tensor:
        """Return numbers of the logits' dtype."""
        bits = torch.where(keys < 0, (keys - 1) ^ torch.iinfo(self.integer).max, keys)
        return bits.to(self.integer).view(self.dtype)

    def above(self, keys: Tensor, *, counts: bool) -> Tensor:
        """Return ``[N, T]`` sums of the exponentials of all ranks' logits above ``keys [N, T]``, or counts."""
        return self.gather(self.sums_above(self.value_of(keys), counts=counts)).sum(dim=0)

    def first_below(self, least: Tensor, *, counts: bool, bound: Tensor | int) -> Tensor:
        """Return ``[N]`` the first key from ``least`` on that has less than ``bound`` above it."""
        below, high, n_keys = least[:, None] - 1, torch.maximum(self.largest, least)[:, None], self.n_keys
        ends = torch.arange(1, 1 << N_BITS, device=below.device)
        while n_keys > 1:
            # The last keys of 2 ** N_BITS segments, except the last one's.
            step = ((high - below + len(ends)) >> N_BITS) & LONGEST
            keys = torch.addcmul(below, step, ends).minimum(high)
            holds = self.above(keys, counts=counts) < bound
            below = torch.where(holds, below, keys).amax(dim=-1, keepdim=True)
            high = torch.where(holds, keys, high).amin(dim=-1, keepdim=True)
            n_keys = -(-n_keys >> N_BITS)
        return high.squeeze(-1)
