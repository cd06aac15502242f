"""Whole groups of tokens, as the two sequences of a pair: their order in a head, and what an objective of them gets.

Rows are the tokens by group. Chunks, and their parts, end where groups end: one call of the function has all tokens
of a group, and its derivatives are there before the gradient of the chunk's logits. Groups that are longer than a
chunk come first. Their chunks end anywhere, since a walk without gradients comes before the call and the gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.head.chunks import TokenOrder, chunks_of
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.targets import Tokens

NONE = -1  # the id of no group
PIECE = 64  # tokens that one thread adds
REFUSED = {
    "own_tokens": "use a whole weight, or take two steps (docs/objective.md)",
    "valid_tokens": "leave it out: tokens of no group and ignored ones are never computed",
}


class Groups(NamedTuple):
    """The ``k`` groups of one call of an objective, which has ``n`` tokens."""

    ids: Tensor  # [k] int64
    lengths: Tensor  # [k] int64: of tokens that count
    group_of_token: Tensor  # [n] int64: positions in ``ids``, ascending

    def sum(self, values: Tensor) -> Tensor:
        """Return ``[k, ...]``: the sum of each group's ``values [n, ...]``, with the same bits every time."""
        n_tokens = len(self.group_of_token)
        if values.dim() == 0 or len(values) != n_tokens:
            got = tuple(values.shape)
            raise ValueError(f"groups: expected numbers of each token, [{n_tokens}, ...], got shape {got}; mask by 0")
        values = values if values.is_floating_point() else values.float()
        pieces, n_pieces = self._pieces()
        # Its checks would wait. On a GPU one thread adds a segment: pieces of it first.
        values = torch.segment_reduce(values, "sum", lengths=pieces, unsafe=True)
        return torch.segment_reduce(values, "sum", lengths=n_pieces, unsafe=True)

    def _pieces(self) -> tuple[Tensor, Tensor]:
        """Return the lengths of pieces of at most PIECE tokens, the last ones may be 0; and each group's number."""
        n_pieces, group = (self.lengths + PIECE - 1) // PIECE, self.group_of_token
        place = torch.arange(len(group), device=group.device) - (self.lengths.cumsum(0) - self.lengths)[group]
        piece = (n_pieces.cumsum(0) - n_pieces)[group] + place // PIECE
        lengths = piece.new_zeros(len(group) // PIECE + len(self.lengths))
        return lengths.index_add_(0, piece, torch.ones_like(piece)), n_pieces

    def mean(self, values: Tensor) -> Tensor:
        """Return ``[k, ...]``: the mean of each group's ``values [n, ...]``."""
        return self.sum(values) / self.lengths.view(-1, *[1] * (values.dim() - 1))

    def of(self, numbers: Tensor) -> Tensor:
        """Return ``[k, ...]``: those of ``numbers [G, ...]`` that are at the groups' ids."""
        return numbers[self.ids]

    def to_tokens(self, values: Tensor) -> Tensor:
        """Return ``[n, ...]``: for each token its group's of ``values [k, ...]``."""
        return values[self.group_of_token]


class RowGroups(NamedTuple):
    """The groups of some rows, which are whole."""

    groups: Groups
    ends: Sequence[int]  # the row at which each group ends, on the host
    largest: int  # id
    n_long: int  # the first rows, which are of groups longer than a chunk
    numbers: dict[str, Tensor] = {}  # [G, ...]

    def having(self, numbers: Mapping[str, Tensor]) -> RowGroups:
        """Return them with numbers that have all ids."""
        for name, each in numbers.items():
            if len(each) <= self.largest:
                expected = f"at least {self.largest + 1} rows, since groups have ids up to {self.largest}"
                raise ValueError(f"numbers[{name!r}]: expected {expected}, got {len(each)}; put each at its group's id")
        return self._replace(numbers={name: each.detach() for name, each in numbers.items()})

    def within(self, rows: slice) -> slice:
        """Return which groups are in ``rows``, a chunk or a part."""
        return slice(bisect_right(self.ends, rows.start), bisect_right(self.ends, rows.stop))

    def ends_in(self, rows: slice) -> list[int]:
        """Return where the groups of ``rows`` end, counted from its first."""
        return [end - rows.start for end in self.ends[self.within(rows)]]

    def at(self, rows: slice) -> RowGroups:
        """Return the groups of ``rows``."""
        own, (ids, lengths, group) = self.within(rows), self.groups
        return self._replace(groups=Groups(ids[own], lengths[own], group[rows] - own.start), ends=self.ends_in(rows))

    def every_second(self, first: int) -> tuple[Tensor, RowGroups]:
        """Return which rows are of the groups ``first``, ``first + 2``, ..., and these alone. Waits for the device."""
        ids, lengths, group = self.groups
        is_own, own = group % 2 == first, slice(first, None, 2)
        groups = Groups(ids[own], lengths[own], group[is_own] // 2)
        return is_own, self._replace(groups=groups, ends=groups.lengths.cumsum(0).tolist())

    def arguments(self, rows: slice) -> dict[str, Any]:
        """Return what a function gets by name, with copies of the numbers."""
        return {"groups": self.at(rows).groups, **{name: each.clone() for name, each in self.numbers.items()}}


def check_numbers(subject: str, by_name: Any, taken: Iterable[str], example: str, tokens: Tokens) -> None:
    """Raise unless it is a dict of tensors without a gradient, by names of arguments that are not ``taken``."""
    if not isinstance(by_name, Mapping):
        got = type(by_name).__name__
        raise TypeError(f"{subject}: expected a dict of tensors by their names, got {got}; pass {{'{example}': ...}}")
    for name, each in by_name.items():
        if type(name) is not str:
            got = repr(name)
            raise TypeError(f"{subject}: expected names as keys, got {got}; pass the name of an argument of objective")
        if name in taken:
            raise ValueError(f"{subject}[{name!r}]: expected a name of its own, got that of another; pass another")
        checks.expect(f"{subject}[{name!r}]", each, None, on=tokens.tensor, subject=tokens.subject)
        checks.check_requires_no_gradient(f"{subject}[{name!r}]", each)


def check_groups(
    together: Tensor, numbers: Mapping[str, Tensor], taken: Iterable[str], tokens: Tokens, settings: Settings
) -> None:
    """Raise unless the ids and the groups' numbers fit, except their values, and the head can order tokens."""
    on = None if getattr(together, "is_cpu", False) else tokens.tensor
    remedy = "; number the groups"
    checks.expect("together", together, (torch.int64, torch.int32), remedy, on=on, subject=tokens.subject)
    if together.shape != tokens.shape:
        shapes = f"{tuple(tokens.shape)}, got {tuple(together.shape)}"
        raise ValueError(f"together: shape must be that of the tokens, {shapes}; pass each token's group")
    for name, remedy in REFUSED.items():
        value = getattr(settings.head, name)
        if value is not None and value is not False:
            raise ValueError(f"{name}: expected none with together, got {value!r}; {remedy}")
    check_numbers("numbers", numbers, taken, "reference", tokens)
    for name, each in numbers.items():
        if each.dim() == 0:
            got = "got shape (); put each at its group's id"
            raise ValueError(f"numbers[{name!r}]: expected one of each group, [G, ...], {got}")
    checks.check_no_transforms(together, *numbers.values())


def of_no_group(ids: Tensor, ignored: Tensor | None, device: torch.device) -> Tensor:
    """Return ``[N]`` bool: tokens that are ``ignored``, or whose id says that they are of no group."""
    is_none = sent(ids == NONE, device)
    return is_none if ignored is None else ignored | is_none


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``, without a wait for it."""
    if tensor.device == device:
        return tensor
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def knows(ids: Tensor, device: torch.device) -> bool:
    """Return whether the host has the ids of tokens on another ``device``."""
    return ids.is_cpu and device.type != "cpu"


def order_of_groups(
    ids: Tensor, is_valid: Tensor, chunks: tuple[slice, ...], longest: int, check_labels: bool | str
) -> tuple[tuple[slice, ...], TokenOrder | None, RowGroups, Tensor | None]:
    """Return the chunks, the order of the tokens of ``ids [N]`` that are valid, and their groups.

    A chunk has as many tokens as the first of ``chunks``, or as the longest group of at most ``longest``; those of
    longer groups come first. Waits for the device once, unless the host has the ids: also return the factor of the
    loss ``[]`` then, NaN if a token of a group is not valid, for which ValueError is raised where ``check_labels``
    looks.
    """
    device, is_known, overflow = is_valid.device, knows(ids, is_valid.device), None
    if is_valid.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("together: expected no CUDA graph, got one; it would repeat the lengths of these groups")
    nothing = torch.iinfo(torch.int64).max
    in_order, token = torch.where(ids != NONE if is_known else is_valid, ids.long(), nothing).sort(stable=True)
    on_host = in_order.cpu()
    n_rows = int((on_host != nothing).sum())
    known, lengths = on_host[:n_rows].unique_consecutive(return_counts=True)
    if n_rows and known[0] < 0:
        raise ValueError(f"together: ids must be at least 0, or {NONE} for no group, got {int(known[0])}")
    if is_known:
        has_ignored = is_valid.sum() < n_rows
        if checks.looks_at(is_valid, check_labels) and has_ignored:
            expected = f"expected {NONE} for ignored labels if ids are on the CPU"
            raise ValueError(f"together: {expected}, got groups that have some; pass {NONE} there")
        overflow = has_ignored.new_ones((), dtype=torch.float32).masked_fill_(has_ignored, float("nan"))
    largest, is_short = int(known[-1]) if n_rows else NONE, lengths <= longest
    n_long, of_short = int(lengths[~is_short].sum()), lengths[is_short]
    if n_long:
        rows, by = (each.sort(stable=True).indices for each in (is_short.repeat_interleave(lengths), is_short))
        token[:n_rows], known, lengths = token[rows.to(token.device)], known[by], lengths[by]
    group = torch.arange(len(known)).repeat_interleave(lengths)
    groups = Groups(*[sent(each, device) for each in (known, lengths, group)])
    found = RowGroups(groups, lengths.cumsum(0).tolist(), largest, n_long)
    if len(ids) == 0:
        return chunks, None, found, overflow
    # A row of no token stands for none at all.
    token = token[:n_rows] if n_rows else token.new_full((1,), len(ids))
    row = token.new_full((len(ids) + 1,), len(token)).scatter_(0, token, torch.arange(len(token), device=ids.device))
    chunk, ends = chunks[0].stop, found.ends[len(found.ends) - len(of_short) :] if n_rows else [1]
    most = max(chunk, int(of_short.max()) if len(of_short) else 0)
    of_chunks = (*chunks_of(n_long, chunk), *chunks_of_groups(ends, most, n_long))
    return of_chunks, TokenOrder(sent(token, device), sent(row[:-1], device)), found, overflow


def chunks_of_groups(ends: Sequence[int], most: int, start: int = 0) -> tuple[slice, ...]:
    """Return chunks of as many groups as have ``most`` rows: groups that end at 3, 4 and 9 by 5 are 0:4 and 4:9."""
    chunks, last = list[slice](), start
    for end in ends:
        if end - start > most:
            chunks.append(slice(start, last))
            start = last
        last = end
    return (*chunks, slice(start, last)) if ends else ()
