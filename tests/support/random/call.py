"""One random call: what its seed decides for every function, and how near its numbers must be to fp64."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tests.support.random.inputs import NAN, NEG_INF, Draw
from tests.support.random.public import Given, invoke, verified
from tests.support.random.tables import TENSOR, Case
from tests.support.random.truth import Numbers, finite

UNITS = 16  # last digits of fp32 per unit of a bound; of fp64 FP64_UNITS
FP64_UNITS = 4096  # the oracle rounds as much
WIDTH = 16  # hidden size
MATHS = ("label_smoothing", "z_loss", "softcap", "logit_scale", "ignore_index")
ORACLE = 2.0**-44
Settings = dict[str, Any]


def half_digit(tensor: Tensor) -> float:
    """The relative error of one rounding to the tensor's dtype."""
    return torch.finfo(tensor.dtype).eps / 2 * 1.01


def assert_near(
    name: str, actual: Tensor, truth: Tensor, bound: Tensor | float, roundings: int = 0, factor: float = 1.0
) -> None:
    """Each element is within ``roundings`` of its own dtype and so many units of its bound.

    ``factor`` is the size of what was multiplied by 1 - p, of which fp64 has no digits either if p is almost 1.
    """
    assert actual.shape == truth.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(truth.shape)}"
    is_fp64 = actual.dtype == torch.float64
    unit = FP64_UNITS * 2.0**-52 if is_fp64 else UNITS * 2.0**-23
    digit = 0.0 if is_fp64 else half_digit(actual) * roundings
    least = {torch.float16: 2.0**-24, torch.float64: 1e-300}.get(actual.dtype, 1e-37) * (1 + roundings)
    largest = torch.finfo(actual.dtype).max
    found, bound = actual.detach().double(), torch.as_tensor(bound, dtype=torch.float64, device=actual.device)
    if is_fp64 and bound.numel():
        bound = bound + finite(bound).max() + 1
    allowed = digit * truth.abs() + unit * bound + least + ORACLE * factor
    is_right = (found - truth).abs() <= allowed
    is_right |= (found == truth) | (found.isnan() & truth.isnan())
    is_right |= found.isinf() & (truth.abs() + allowed >= largest) & (found.sign() == truth.sign())  # overflow
    if not bool(is_right.all()):
        at = tuple(int(i) for i in (~is_right).nonzero()[0])
        n, ratio = int((~is_right).sum()), float(((found - truth).abs() / allowed)[~is_right].nan_to_num(9e9).max())
        raise AssertionError(
            f"{name}: {n} of {truth.numel()} wrong, first at {at}: {float(found[at]):.9g}, expected "
            f"{float(truth[at]):.9g} within {float(allowed.expand_as(truth)[at]):.3g}; up to {ratio:.3g} times that"
        )


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same bits, except of NaN."""
    return torch.equal(a.detach().nan_to_num(7.0), b.detach().nan_to_num(7.0))


def size_of(upstream: Numbers) -> float:
    """The largest factor."""
    return max((float(value.abs().max()) for value in upstream.values() if value.numel()), default=0.0)


class Call:
    """What calls of functions with labels, targets or teachers have in common: the draw, and the oracle's options."""

    def __init__(
        self, seed: int, device: str, impl: str, small: bool, changes: Case | None = None, drawn: type[Draw] = Draw
    ) -> None:
        """``changes`` replace values of the seed's configuration; ``drawn`` is what the rest comes from."""
        self.seed, self.draw = seed, drawn(seed, device, small)
        draw = self.draw
        draw.case = {**draw.case, **(changes or {})}
        self.function = draw.function.replace("one_pass", "vocab_parallel_cross_entropy")
        self.is_head = "trains" in draw.case
        self.public = self.function  # of random.public
        if draw["is_module"]:
            self.public = "LinearCrossEntropy" if self.is_head else "VocabParallelCrossEntropy"
        self.dtype: torch.dtype = draw["dtype"]
        if impl != "reference" and draw.has(0.04) or impl == "reference" and draw.has(0.2):
            self.dtype = self.dtype if self.is_head else torch.float64
        self.ranks: int = draw["ranks"] or 1
        of_columns = self.dtype if self.dtype.itemsize < 8 else torch.float32
        self.vocab_size, self.bounds = draw.bounds(of_columns.itemsize, self.ranks)
        if draw["layout"] == "expanded" and draw["gradient"] == "in_forward":
            raise AssertionError("in_forward takes no view")
        self.n_ids: int | None = draw["n_ids"]
        while self.n_ids in (self.vocab_size, -(-self.vocab_size // self.ranks)):  # which one-hot labels would have
            self.n_ids += 1
        self.impl = "auto" if self.dtype == torch.float64 else impl
        columns = self.vocab_size if self.is_head else self.bounds[-1][1]
        self.leading = draw.leading(columns, draw["layout"])
        if draw.case.get("sequence_parallel"):  # tokens that ranks can cut, of one sequence or of two
            *sequences, n = self.leading
            self.leading = (n - n % self.ranks or self.ranks, *(sequences or [2] * (draw.index % 2)))
        self.settings: Settings = {}  # of the call, alike on all ranks
        self.of_oracle: Settings = {}

    def take(self, *names: str) -> Settings:
        """Take options of the configuration, where they are not the default."""
        taken = {name: self.draw[name] for name in names if self.draw[name] is not None}
        self.settings |= taken
        return taken

    def common(self, *names: str) -> None:
        """Take options that the oracle has, too."""
        self.of_oracle |= self.take(*names)

    def divisor(self) -> None:
        """Draw ``num_items``; 0 at times."""
        draw = self.draw
        self.common("reduction")
        if draw["num_items"] is not None:
            n = 0 if draw.has(0.04) else draw.rng.randint(1, 40)
            self.of_oracle["num_items"] = n
            dtype = (torch.int64, torch.int32, torch.float32)[draw.index % 3]  # each compiles kernels
            of_tensor = torch.tensor([n], dtype=dtype, device=draw.device)
            self.settings["num_items"] = of_tensor if draw["num_items"] == TENSOR else n

    def weights(self) -> None:
        draw = self.draw
        if draw["class_weight"] is None:
            return
        weights = draw.uniform(self.vocab_size) * 3 + 0.1
        if draw.has(0.3):
            weights[draw.rng.randrange(self.vocab_size)] = 0.0
        if draw.has(0.2) and draw["reduction"] != "mean":
            weights[draw.rng.randrange(self.vocab_size)] = -0.05
        dtype = draw.rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64))
        self.of_oracle["class_weight"] = weights.to(dtype)

    def of_rank(self, rank: int) -> Settings:
        """The settings that differ between the ranks."""
        draw, (start, stop) = self.draw, self.bounds[rank]
        own: Settings = {"impl": self.impl}
        is_whole = (stop - start, self.ranks) == (self.vocab_size, 1)
        way = draw.rng.choice(("vocab_size", "shard", "nothing"))
        if self.ranks == 1 and way == "vocab_size":
            own["vocab_size"] = self.vocab_size
        elif way != "nothing" or not is_whole:
            own["shard"] = (start, stop, self.vocab_size)
        weights = self.of_oracle.get("class_weight")
        if weights is not None:
            if draw["class_weight"] == "columns" and stop - start != self.vocab_size:
                padding = max(stop - self.vocab_size, 0)
                weights = torch.nn.functional.pad(weights[start:stop], (0, min(padding, stop - start)), value=NAN)
            own["class_weight"] = draw.placed(weights.unsqueeze(0), draw.rng.choice(("contiguous", "offset")))[0]
        return own

    def shard_of(self, values: Tensor, rank: int) -> Tensor:
        """A rank's columns of ``values [..., V]``, padding NaN."""
        start, stop = self.bounds[rank]
        part = values.new_full((*values.shape[:-1], stop - start), NAN)
        part[..., : max(self.vocab_size - start, 0)] = values[..., start:stop]
        return part

    def on_ranks(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Targets, or a teacher's logits, in their dtype; and each rank's columns of them in their layout."""
        dtype, layout = self.draw["other_dtype"], self.draw["other_layout"]
        values = self.draw.shared(values.to(dtype), "other_layout")
        return values, [self.draw.placed(self.shard_of(values, rank), layout) for rank in range(self.ranks)]

    def no_rounding(self) -> Tensor:
        return torch.zeros(self.leading, dtype=torch.float64, device=self.draw.device)

    def mask(self) -> float:
        """The value of masked columns: -inf, the lowest number, or a large one where sums of it would overflow."""
        draw = self.draw
        sums = (
            draw["label_smoothing"]
            or draw["class_weight"]
            or "mean_logit" in (draw["outputs"] or ())
            or "divergence" in draw.case
        )
        is_low = sums or draw["temperature"] not in (None, 1.0) or draw["z_loss"] or "lse" in (draw["outputs"] or ())
        is_low = is_low or "predictions" in (draw["outputs"] or ()) or "other_dtype" in draw.case or draw["softcap"]
        dtype = torch.float32 if self.dtype == torch.float64 else self.dtype
        lowest = -1e4 if is_low else torch.finfo(dtype).min
        return draw.rng.choice((NEG_INF, lowest)) if not self.is_head else 0.0

    def labels(self) -> Tensor:
        may_be_outside = self.draw["class_weight"] is None or self.draw["reduction"] != "mean"
        may_be_outside &= self.public not in ("parallel_cross_entropy", "cross_entropy_forward")  # which raise on a CPU
        return self.draw.labels(self.leading, self.vocab_size, may_be_outside=may_be_outside)

    def upstream(self, found: Numbers, names: Sequence[str]) -> Numbers:
        """Gradients of the outputs, of some of them at times."""
        draw = self.draw
        if len(names) > 1 and draw.has(0.3):
            names = draw.rng.sample(names, draw.rng.randint(1, len(names)))
        return {name: draw.upstream(found[name].shape, found[name].dtype) for name in names}

    def invoke(self, given: Given, group: Any) -> Numbers:
        """Call the public function on one rank, with verification at times."""
        with verified() if self.ranks == 1 and self.draw.has(0.05) else nullcontext():
            return invoke(self.public, {**given, "group": group})
