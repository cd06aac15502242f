"""What a random call is made of, drawn from its seed: sizes, logits, labels, upstream gradients, and where they lie."""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.random.tables import FEWER_THAN_RANKS, configurations

NAN, NEG_INF, INF = float("nan"), float("-inf"), float("inf")
BYTES = {"a tile": (0, 512), "tiles": (512, 2048), "medium": (2048, 16_384), "large": (16_384, 1 << 30)}
BYTES["one launch"] = (212_992, 270_336)  # takes every option that it has
MOST_COLUMNS, MOST_INTERPRETED = 262_144, 3_000
MOST_ROWS, MOST_ELEMENTS = 1_500, 2**20
LINE = 128  # bytes


class Place(NamedTuple):
    """A view of a flat tensor of ``length`` elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    length: int

    def view(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self.shape, self.strides, self.offset)

    def filled(self, values: Tensor) -> Tensor:
        """The flat tensor, NaN outside the view."""
        flat = torch.full((self.length,), NAN if values.is_floating_point() else 10**6, device=values.device)
        flat = flat.to(values.dtype)
        firsts = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in self.strides)
        self.view(flat)[firsts].copy_(values[firsts])
        return flat


class Draw:
    """The source of one call."""

    def __init__(self, seed: int, device: str, small: bool) -> None:
        self.seed, self.index = seed, seed % len(configurations())
        self.function, self.case = configurations()[self.index]
        self.rng, self.device, self.small = random.Random(seed), device, small
        self.generator = torch.Generator(device).manual_seed(seed)

    def __getitem__(self, name: str) -> Any:
        return self.case.get(name)

    def has(self, chance: float) -> bool:
        return self.rng.random() < chance

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.device)

    def ids(self, shape: Sequence[int], below: int) -> Tensor:
        return torch.randint(0, below, tuple(shape), generator=self.generator, device=self.device)

    def bounds(self, itemsize: int, ranks: int) -> tuple[int, list[tuple[int, int]]]:
        """The vocabulary, and the columns of each rank; those beyond the vocabulary are padding."""
        if self["width"] == FEWER_THAN_RANKS:
            vocab_size = self.rng.randint(1, ranks - 1) if self.has(0.5) else ranks + 1
            ends = [min(rank * -(-vocab_size // ranks), vocab_size) for rank in range(ranks + 1)]
            return vocab_size, list(zip(ends, ends[1:], strict=False))
        least, most = (n // itemsize for n in BYTES[self["width"]])
        widest = MOST_INTERPRETED if self.small else MOST_COLUMNS // ranks
        most = min(most, widest)
        least = least + 1 if least < most else most // 2 + 1
        width, line = int(least * (most / least) ** self.rng.random()), LINE // itemsize
        if self["ragged"]:
            width -= width % 2 == 0 and width > 1
        else:
            width = max(line, width // line * line)
        vector = 16 // itemsize
        padding = {"none": 0, "vectors": vector, "odd": self.rng.choice((1, 3, vector + 1))}[self["padding"]]
        total = ranks * width
        vocab_size = max(1, total - min(padding, width))
        if (
            self["ragged"] and not padding and ranks > 1 and "reduce_loss" not in self.case and total > 2 * ranks
        ):  # shards of unequal widths
            cuts = sorted(self.rng.sample(range(1, total), ranks - 1))
            return total, list(zip([0, *cuts], [*cuts, total], strict=True))
        return vocab_size, [(rank * width, (rank + 1) * width) for rank in range(ranks)]

    def leading(self, columns: int, layout: str | None) -> tuple[int, ...]:
        """The dimensions before the last; two or more where the layout is about several."""
        most = 6 if self.small else max(1, min(MOST_ROWS, MOST_ELEMENTS // columns))
        if not self.has(0.15):
            most = min(most, 12)
        if layout in ("contiguous", "leaf") and self.has(0.02):
            return (0,)
        outer = self.rng.randint(1, max(1, int(most**0.5)))
        inner = max(most // outer, 1)
        inner = self.rng.randint(min(2, inner), inner)
        if layout in ("sliced", "transposed", "expanded") or self.has(0.5):
            return (outer, 1, inner) if self.has(0.15) else (outer, inner)
        return (outer * inner,)

    def place(self, shape: Sequence[int], layout: str) -> Place:
        """Where a tensor ``[..., C]`` lies."""
        *leading, columns = shape
        step, gap = (2, 0) if layout == "columns" else (1, 0)
        if layout == "gaps":
            gap = 3 if self["ragged"] else LINE
        size = pitch = max(columns * step + gap, 1)
        strides = [0] * len(leading)
        order = list(range(len(leading)))
        for dim in order if layout == "transposed" else reversed(order):
            strides[dim] = size
            size = size * leading[dim] + (pitch if layout == "sliced" else 0)
        if layout == "columns" and self.has(0.5):  # column-major
            strides, step = [stride // pitch for stride in strides], max(size // pitch, 1)
        if layout == "expanded":
            strides[0] = 0
        offset = 3 if layout == "offset" else 0
        reach = sum((n - 1) * stride for n, stride in zip(shape, (*strides, step), strict=True) if n)
        return Place(tuple(shape), (*strides, step), offset, offset + reach + 1)

    def placed(self, values: Tensor, layout: str) -> Tensor:
        """``values`` in such a place."""
        place = self.place(values.shape, layout)
        return place.view(place.filled(values))

    def logits(
        self, leading: Sequence[int], vocab_size: int, labels: Tensor, dtype: torch.dtype, mask: float
    ) -> Tensor:
        """Broad, peaked, confident, masked, far from 0 or large rows; ``mask`` is for masked columns."""
        kind = self.rng.choices(("broad", "peaked", "confident", "masked", "far", "large"), (4, 3, 2, 2, 1, 1))[0]
        x = self.normal(*leading, vocab_size) * 2
        label = labels.clamp(0, vocab_size - 1).unsqueeze(-1).long()
        if kind == "peaked":
            place = torch.where(self.uniform(*label.shape) < 0.5, label, self.ids(label.shape, vocab_size))
            x.scatter_add_(-1, place, torch.full_like(place, 12.0, dtype=x.dtype))
        elif kind == "confident":
            gap = self.uniform(*label.shape) * 15 - 3
            x.scatter_(-1, label, x.scatter(-1, label, NEG_INF).logsumexp(-1, keepdim=True).clamp(min=-99.0) + gap)
        elif kind == "masked":
            is_masked = self.uniform(vocab_size) < self.rng.choice((0.05, 0.5))
            x = torch.where(is_masked.expand_as(x).scatter(-1, label, False), mask, x)
        elif kind == "far":
            x = x - 500
        elif kind == "large":
            x *= 200
        return self.shared(x.to(dtype))

    def with_bad_row(self, logits: Tensor) -> Tensor:
        """Sometimes one row with NaN, with +inf, or of nothing but -inf."""
        if logits.numel() and self["layout"] != "expanded" and self.has(0.06):
            rows = logits.view(-1, logits.shape[-1])
            kind = self.rng.choice((NAN, INF) if self["threshold"] else (NAN, INF, NEG_INF))
            row, column = (self.rng.randrange(n) for n in rows.shape)
            rows[row].nan_to_num_(0.0, 0.0, 0.0)  # a -inf beside it would be NaN, too
            rows[row, slice(None) if kind == NEG_INF else column] = kind
        return logits

    def shared(self, values: Tensor, layout: str = "layout") -> Tensor:
        """The values; those of the first index of the first dimension if the layout expands that."""
        return values[:1].expand_as(values).clone() if self[layout] == "expanded" else values

    def labels(self, shape: Sequence[int], vocab_size: int, *, may_be_outside: bool = True) -> Tensor:
        ignore_index = self["ignore_index"] if self["ignore_index"] is not None else -100
        labels = self.ids(shape, vocab_size)
        kinds = ("any", "some ignored", "edges", "all ignored", "outside")
        kind = self.rng.choices(kinds, (5, 4, 1, 0.5, 1))[0]
        if kind == "edges":
            labels = torch.where(self.uniform(*shape) < 0.5, 0, vocab_size - 1)
        elif kind == "some ignored":
            labels = labels.masked_fill(self.uniform(*shape) < self.rng.choice((0.2, 0.7)), ignore_index)
        elif kind == "all ignored":
            labels = labels.fill_(ignore_index)
        elif kind == "outside" and may_be_outside and not self["check_labels"]:
            outside = torch.tensor((-1, vocab_size, 2**31 - 1), device=self.device)[self.ids(shape, 3)]
            labels = torch.where(self.uniform(*shape) < 0.3, outside, labels)
        labels = labels.int() if self["int32"] else labels
        return self.placed(labels, self.rng.choice(("contiguous", "offset", "columns", "transposed")))

    def upstream(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What multiplies an output."""
        kind, shape = self["upstream"], tuple(shape)
        factor = self.rng.choice((-1, 1)) * self.rng.uniform(0.3, 1.7) * self.rng.choice((1, 1, 1, 1e-4, 100.0))
        if kind == "one" or not shape:
            return torch.full((), 1.0 if kind == "one" else factor, dtype=dtype, device=self.device).expand(shape)
        if kind == "expanded":
            return torch.full((), factor, dtype=dtype, device=self.device).expand(shape)
        values = self.normal(*shape).to(dtype)
        if kind == "zero first":
            values.view(-1)[:1] = 0
        if kind == "strided":
            backwards = self.normal(*reversed(shape)).to(dtype)
            return backwards.permute(*reversed(range(len(shape))))
        return values
