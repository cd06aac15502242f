"""Labels of the next token: one ahead in each sequence. Logits and hidden states stay where they are.

    starts = [0, 3, 3, 5], labels = [10, 11, 12, 20, 21]  ->  [11, 12, ignore, 21, ignore]

A rank of a context-parallel group holds one or two runs of each sequence. The label that follows a run is the first of
the next run, which is on another rank: the ranks exchange the first label of each run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import public
from vocab_parallel_ce.collectives import gathered, group_position

RUNS = {"contiguous": 1, "zigzag": 2}  # of a sequence on each rank
NO_LABEL = -(2**31)  # of no vocabulary; fits in 32 bits


@public(lambda keywords: keywords.get("group") is not None)
def next_labels(
    labels: Tensor,
    *,
    ignore_index: int = -100,
    cu_seqlens: Tensor | None = None,
    group: Any = None,
    layout: str | None = None,
) -> Tensor:
    """Return the label of the next token for each token, within its sequence.

    Computes::

        next[t] = labels[t + 1], and ignore_index for the last token of a sequence

    Pass the result to a loss as its labels. Labels that a framework has shifted, as Megatron-LM's
    data sets do, must not be shifted again.

    Collectives: none without a group; otherwise one all_gather of 8 bytes per sequence from each rank, 16 with
    ``"zigzag"``. Under ``torch.compile`` the graph breaks if there is a group. The host does not wait for the device.

    Args:
        labels: int64 or int32 ids. ``[..., T]`` without ``cu_seqlens``, at least two dimensions, one sequence per row.
            ``[T]`` or ``[1, T]`` with it. With a group, ``T`` counts this rank's tokens.
        ignore_index: the label of a token that predicts nothing. Labels that are ``ignore_index`` stay so, one earlier.
        cu_seqlens: ``[n + 1]`` int32 or int64, as FlashAttention takes it: sequence i of one packed row is
            ``[cu_seqlens[i], cu_seqlens[i + 1])``. With a group, of the whole row over all ranks, as Megatron-Core
            passes it: ``cu_seqlens_q_padded`` if sequences are padded. The labels of padding within a sequence must be
            ``ignore_index``. On one rank, tokens after ``cu_seqlens[-1]`` are padding and get ``ignore_index``; on
            several, ``cu_seqlens`` ends with the tokens of all of them. On the CPU its values are checked. On the
            device of the labels nobody reads them: if they are wrong, every label is outside of any vocabulary, so
            that the loss raises, or is NaN: see its ``check_labels``.
        group: the context-parallel ``ProcessGroup``, or a ``DeviceMesh`` of one dimension. Each of its ``R`` ranks
            holds an equal part of every sequence. None if this rank holds all. Not the loss's ``group``.
        layout: which part; needed if there are several ranks. ``"contiguous"``: slice r of ``R`` of each sequence.
            ``"zigzag"``: chunks r and ``2 * R - 1 - r`` of ``2 * R``, as Megatron-Core's
            ``get_batch_on_this_cp_rank`` and TransformerEngine's ``thd_get_partitioned_indices`` cut. The length of
            each sequence is a multiple of ``R``, or of ``2 * R``.

    Returns:
        int64, of the shape of ``labels``.

    Raises:
        TypeError: a type or dtype does not fit.
        ValueError: a shape, a device, the layout, or ``cu_seqlens`` on the CPU does not fit.

    Example:
        >>> from vocab_parallel_ce import next_labels
        >>> ids = torch.tensor([[5, 6, 7, 8, 9]])  # two sequences in one row
        >>> next_labels(ids, cu_seqlens=torch.tensor([0, 3, 5]))
        tensor([[   6,    7, -100,    9, -100]])
    """
    checks.check_labels(labels, labels)
    checks.check_integer("ignore_index", ignore_index)
    rank, n_ranks = group_position(group)
    n_runs = _checked_runs(layout, n_ranks)
    is_right = None
    if cu_seqlens is None:
        _check_rows(labels, n_runs)
        if n_ranks == 1:
            last = labels.new_full((*labels.shape[:-1], 1), ignore_index, dtype=torch.int64)
            return torch.cat([labels[..., 1:].long(), last], dim=-1)[..., : labels.shape[-1]]
        n_tokens = labels.shape[-1]
        bounds = n_tokens * torch.arange(labels.shape[:-1].numel() + 1, device=labels.device)
    else:
        bounds, is_right = _checked_bounds(cu_seqlens, labels, n_ranks, n_runs)
    arguments = {"ignore_index": ignore_index, "layout": layout, "cu_seqlens": cu_seqlens}
    verify.compare({"equal": {"call": "next_labels", "labels.shape": tuple(labels.shape), **arguments}})

    runs = (bounds[1:] - bounds[:-1]).unsqueeze(1).expand(-1, n_runs) // n_runs  # lengths [n, n_runs]
    starts = bounds[:-1].unsqueeze(1) + runs * torch.arange(n_runs, device=labels.device)
    # Not pad, which sends its value through a double.
    n_tokens, last = labels.numel(), labels.new_full((2,), ignore_index, dtype=torch.int64)
    flat = torch.cat([labels.reshape(-1).long(), last])
    firsts = flat[starts.clamp(0, n_tokens)]
    after = _first_after_each(firsts, rank, n_ranks, group, ignore_index)
    # The position behind the last token takes what there is of empty sequences.
    lasts = torch.where(runs > 0, starts + runs - 1, n_tokens).clamp(0, n_tokens)
    ahead = flat[1:].scatter(0, lasts.reshape(-1), after.reshape(-1))[:-1]
    ahead = ahead.masked_fill(torch.arange(n_tokens, device=labels.device) >= bounds[-1], ignore_index)
    if is_right is not None:
        ahead = ahead.masked_fill(~is_right, NO_LABEL if ignore_index != NO_LABEL else NO_LABEL + 1)
    return ahead.view(labels.shape)


def _checked_runs(layout: object, n_ranks: int) -> int:
    """Return how many runs of each sequence a rank holds."""
    if layout is not None:
        checks.check_choice("layout", layout, tuple(RUNS))
    if n_ranks == 1:
        return 1
    if layout is None:
        raise ValueError(
            f"layout: expected 'contiguous' or 'zigzag' with a group of {n_ranks} ranks, got None; name the one "
            "that cut the sequences"
        )
    return RUNS[layout]  # type: ignore[index]


def _check_rows(labels: Tensor, n_runs: int) -> None:
    shape = tuple(labels.shape)
    if len(shape) < 2:
        raise ValueError(
            "labels: expected at least two dimensions, [..., T], or cu_seqlens, because flattened labels do not say "
            f"where a sequence ends, got shape {shape}; pass cu_seqlens, or a single sequence as [1, T]"
        )
    if shape[-1] % n_runs:
        raise ValueError(
            f"labels: last dimension must be even with layout 'zigzag', two chunks of equal length, got shape {shape}; "
            "pad the sequences before they are cut"
        )


def _checked_bounds(cu_seqlens: Tensor, labels: Tensor, n_ranks: int, n_runs: int) -> tuple[Tensor, Tensor | None]:
    """Return where the sequences begin among this rank's labels, and whether that can be, if nobody has read it."""
    checks.expect("cu_seqlens", cu_seqlens, checks.LABEL_DTYPES)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"cu_seqlens: expected shape [n + 1], got {tuple(cu_seqlens.shape)}")
    if labels.dim() == 0 or labels.numel() != labels.shape[-1]:
        raise ValueError(f"labels: expected one row, [T] or [1, T], with cu_seqlens, got shape {tuple(labels.shape)}")
    if cu_seqlens.device != labels.device and cu_seqlens.device.type != "cpu":
        raise ValueError(f"cu_seqlens: device must be cpu or that of labels, {labels.device}, got {cu_seqlens.device}")
    whole = cu_seqlens.long()
    lengths, n_labels = whole[1:] - whole[:-1], n_ranks * labels.numel()
    conditions = {"0 at the beginning": whole[:1] == 0, "no value below the one before": lengths >= 0}
    if n_ranks == 1:
        conditions[f"at most {n_labels}, the labels, at the end"] = whole[-1:] <= n_labels
    else:
        multiple, all_labels = n_ranks * n_runs, f"the labels of all {n_ranks} ranks, also of padding,"
        conditions[f"sequences padded to a multiple of {multiple} tokens"] = lengths % multiple == 0
        conditions[f"{n_labels}, {all_labels} at the end"] = whole[-1:] == n_labels
    bounds = (whole // n_ranks).to(labels.device, non_blocking=True)
    if cu_seqlens.device.type != "cpu" or checks.has_no_values(cu_seqlens) or torch.compiler.is_dynamo_compiling():
        return bounds, torch.cat(list(conditions.values())).all().to(labels.device)
    for expected, holds in conditions.items():
        if not holds.all():
            shown = ", ".join(map(str, whole[:16].tolist())) + ", ..." * (whole.numel() > 16)
            raise ValueError(f"cu_seqlens: expected {expected}, got [{shown}]")
    return bounds, None


def _first_after_each(firsts: Tensor, rank: int, n_ranks: int, group: Any, ignore_index: int) -> Tensor:
    """Return the label that follows each run, of ``firsts [n, n_runs]``: that of the next run's first token.

    Collectives: one all_gather of ``firsts``.
    """
    # The second runs lie in the reverse order of the ranks.
    forth, *back = gathered(firsts, rank, n_ranks, group).unbind(-1)
    in_order = torch.cat([forth, *(runs.flip(0) for runs in back), forth.new_full((1, len(firsts)), ignore_index)])
    positions = (rank, 2 * n_ranks - 1 - rank)[: firsts.shape[1]]
    return torch.stack([in_order[position + 1] for position in positions], dim=-1)
