"""Hidden states and heads that are hard on a fused loss, what it must return, and one call of it.

The oracle is ``oracle.py`` on the logits of ``F.linear`` in fp64, and the chain rule. Beside it stands the
same computation by PyTorch in the tensors' dtype: logits and their gradient rounded to it, then matmuls.
Hidden states of ignored tokens count as 0 in both: whatever they hold, nobody may see it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases.flat import linear_cross_entropy, linear_token_log_probs
from tests.support.cases.inputs import IGNORE_INDEX, batch, with_a_broad_row
from tests.support.cases.logits import (
    OUTPUTS,
    backward,
    flat_outputs,
    of_every_output,
    of_oracle,
    zero_first_grad_output,
)
from tests.support.ranks.collectives import recorded
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget

PADDING = 300.0
_MATMULS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "matmul", "linear", "_scaled_mm"}


def linear_every_output(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Every output of :func:`linear_token_log_probs`, as :func:`of_every_output` says."""
    return of_every_output(linear_token_log_probs(hidden, weight, labels, outputs=OUTPUTS, **options))


def linear_loss_and_outputs(hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """The loss, entropy and lse; and, if they are among ``outputs``, the others as :func:`of_every_output` says."""
    found = linear_cross_entropy(hidden, weight, labels, **options)
    if found.sum_sq_probs is None:
        return found.loss, found.entropy, found.lse
    return of_every_output(dataclasses.replace(found, log_probs=found.loss))


ORACLES = {
    linear_token_log_probs: oracle.of_log_probs,
    linear_every_output: oracle.of_every_output,
    linear_loss_and_outputs: oracle.of_loss_and_every_output,
}
# What calls of the tests are made of, and the ways of a reduction to compute its gradients.
ROWS, COLUMNS, WIDTH = 5, 21, 8
N_LEAVES = 6  # tokens of Leaves
LEAVES = ("hidden", "weight", "bias")
WAYS = {
    "mean": {"reduction": "mean", "gradient": "in_forward"},
    "mean, in_backward": {"reduction": "mean", "gradient": "in_backward"},
    "sum": {"reduction": "sum", "gradient": "in_forward"},
    "sum, in_backward": {"reduction": "sum", "gradient": "in_backward"},
    "none": {"reduction": "none"},
}
TWO_WAYS = pytest.mark.parametrize("way", [WAYS["none"], WAYS["mean"]], ids=["none", "mean"])


class Projection(NamedTuple):
    """What a call takes, over the whole vocabulary."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    labels: Tensor  # [...] int64
    bias: Tensor | None = None  # [V]

    def to(self, dtype: torch.dtype) -> Projection:
        bias = None if self.bias is None else self.bias.to(dtype)
        return Projection(self.hidden.to(dtype), self.weight.to(dtype), self.labels, bias)

    def shaped(self, *leading: int) -> Projection:
        """The same tokens with other leading dimensions."""
        width = self.hidden.shape[-1]
        return self._replace(hidden=self.hidden.view(*leading, width), labels=self.labels.view(leading))

    def rows(self, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """``[N, D]`` hidden states, 0 where ignored."""
        ignored = (self.labels.reshape(-1).long() == ignore_index).unsqueeze(1)
        return self.hidden.reshape(-1, self.hidden.shape[-1]).masked_fill(ignored, 0.0)

    def logits(self, ignore_index: int = IGNORE_INDEX) -> Tensor:
        """``[..., V]`` in the dtype of this projection."""
        logits = F.linear(self.rows(ignore_index), self.weight, self.bias)
        return logits.view(*self.labels.shape, -1)


class Results(NamedTuple):
    """Loss, and metrics; or log-probabilities, and entropy; and gradients."""

    outputs: tuple[Tensor, ...]
    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def projection(
    kind: str = "some_ignored",
    rows: int = ROWS,
    vocab_size: int = COLUMNS,
    width: int = WIDTH,
    *,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    bias: bool = False,
    exact: bool = False,
    broad: bool = True,
    seed: int = 0,
    **of_batch: Any,
) -> Projection:
    """``rows`` of at most ``width`` tokens whose logits are those of one kind of ``inputs.KINDS``, without -inf.

    Args:
        exact: tokens are unit vectors, so that logits without a bias are rows of the weight to the bit;
            otherwise they are orthonormal, and every product rounds.
        broad: the last token is the one of :func:`with_a_broad_row`.
    """
    assert rows <= width, (rows, width)
    made = batch(kind, rows=rows - broad, vocab_size=vocab_size, shards=shards, dtype=dtype, seed=seed, **of_batch)
    logits, labels = with_a_broad_row(made) if broad else made
    generator = torch.Generator().manual_seed(seed)
    added = torch.randn(vocab_size, generator=generator).to(dtype) if bias else None
    hidden = torch.eye(rows, width)
    if not exact:
        hidden = torch.linalg.qr(torch.randn(width, rows, generator=generator))[0].T.contiguous()
    wanted = logits.float() if added is None else logits.float() - added.float()
    return Projection(hidden.to(dtype), (wanted.T @ hidden).to(dtype), labels, added)


def many_tokens(rows: int, vocab_size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Projection:
    """More tokens than the width; every other label is the likeliest column."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, WIDTH, generator=generator).to(dtype)
    weight = torch.randn(vocab_size, WIDTH, generator=generator).to(dtype)
    labels = torch.randint(0, vocab_size, (rows,), generator=generator)
    labels[::2] = (hidden.float() @ weight.float().T).argmax(dim=1)[::2]
    return Projection(hidden, weight, labels)


def grad_output_of(way: dict[str, Any], rows: int = ROWS) -> Tensor:
    """For a call with the reduction of ``way``."""
    return zero_first_grad_output(rows) if way.get("reduction") == "none" else torch.tensor(0.75)


def linear_fp64(inputs: Projection, *grad_outputs: Tensor | None, **options: Any) -> Results:
    """fp64 outputs and gradients of ``options["function"]``."""
    return linear_same_dtype(inputs.to(torch.float64), *grad_outputs, **options)


def linear_same_dtype(
    inputs: Projection,
    *grad_outputs: Tensor | None,
    function: Callable[..., Any] = linear_cross_entropy,
    bounds: Sequence[tuple[int, int]] | None = None,
    weight_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
    chunk_size: int | str = "auto",
    gradient: str = "auto",
    adds_sizes: bool = False,
    **options: Any,
) -> Results:
    """What PyTorch gets in the dtype of ``inputs``; gradients of 16 bits are not rounded at the end, if of one rank.

    Args:
        bounds: of the ranks' columns: their parts of the hidden states' gradient are added in that dtype.
        weight_dtype: of the gradients of weight and bias, where they are not rounded to that of ``inputs``.
        logits_dtype: fp32 logits, whose gradient is rounded.
        chunk_size: of a product, whose rounding depends on it; a CPU leaves out ignored tokens.
        gradient: "in_forward" computes products before it knows ``grad_output``.
        adds_sizes: the ranks' parts of the hidden states' gradient are added without their signs.
    """
    options = of_oracle(options)
    ignore_index = options.get("ignore_index", IGNORE_INDEX)
    dtype = inputs.weight.dtype
    wide = inputs.to(torch.promote_types(logits_dtype or dtype, dtype))
    rows, logits = inputs.rows(ignore_index), oracle.at_least_fp32(wide.logits(ignore_index))
    # The products of forward come before grad_output.
    is_scaled = gradient == "in_forward" and len(grad_outputs) > 0 and grad_outputs[0].dim() == 0
    factor = grad_outputs[0].to(dtype) if is_scaled else None
    given = () if is_scaled else grad_outputs
    of = ORACLES.get(function, oracle.of_loss)
    *outputs, grad = oracle.with_gradient(of, logits, inputs.labels, *given, **options)
    grad = grad.reshape(len(rows), len(inputs.weight)).to(dtype)
    d_weight = grad.to(weight_dtype or grad.dtype)
    if dtype.itemsize == 2 and len(bounds or [0]) == 1:
        # The budget adds the last rounding.
        grad, rows, inputs = grad.float(), rows.float(), inputs.to(torch.float32)
        d_weight = d_weight.float()
    kept = inputs.labels.reshape(-1) != ignore_index
    chunks = grad[kept].split(chunk_size if isinstance(chunk_size, int) else len(rows))
    parts = [
        torch.cat([part[:, a:b] @ inputs.weight[a:b] for part in chunks])
        for a, b in bounds or [(0, len(inputs.weight))]
    ]
    if adds_sizes:
        parts = [part.abs() for part in parts]
    d_hidden = torch.zeros_like(rows).masked_scatter(kept.unsqueeze(1), sum(parts[1:], start=parts[0]))
    d_bias = None if inputs.bias is None else d_weight.sum(dim=0)
    gradients = d_hidden.view(inputs.hidden.shape), d_weight.T @ rows.to(d_weight.dtype), d_bias
    if factor is not None:
        gradients = [None if g is None else (g * factor).to(g.dtype) for g in gradients]
    return Results(tuple(outputs), *gradients)


def padded_weight(inputs: Projection, start: int, stop: int) -> tuple[Tensor, Tensor | None]:
    """Rows ``[start, stop)`` of weight and bias, copied; what follows V is large and must not count."""

    def cut(whole: Tensor) -> Tensor:
        part = whole.new_full((stop - start, *whole.shape[1:]), PADDING)
        part[: max(len(whole) - start, 0)] = whole[start:stop]
        return part

    return cut(inputs.weight), None if inputs.bias is None else cut(inputs.bias)


def run(
    impl_device: tuple[str, str],
    inputs: Projection,
    *grad_outputs: Tensor | None,
    function: Callable[..., Any] = linear_cross_entropy,
    frozen: Sequence[str] = (),
    **options: Any,
) -> Results:
    """Results of ``function`` over copies of ``inputs``, which it must not change; backward is run once.

    Args:
        grad_outputs: of the outputs; without one it is 1, and an output with None is not used.
        frozen: of ``"hidden"``, ``"weight"`` and ``"bias"``, which need no gradient.
    """
    impl, device = impl_device
    copies = Projection(*(None if x is None else x.clone().to(device) for x in inputs))
    leaves = [copies.hidden, copies.weight, copies.bias]
    for name, leaf in zip(LEAVES, leaves, strict=True):
        if leaf is not None:
            leaf.requires_grad_(name not in frozen)
    outputs = flat_outputs(function(*copies[:3], bias=copies.bias, impl=impl, **options))
    backward(outputs, grad_outputs)
    for name, copy in copies._asdict().items():
        if copy is not None:
            assert copy._version == 0, f"{name} was written"
            torch.testing.assert_close(copy.detach().cpu(), getattr(inputs, name), rtol=0, atol=0, equal_nan=True)
    gradients = (None if leaf is None or leaf.grad is None else leaf.grad.cpu() for leaf in leaves)
    return Results(tuple(output.detach().cpu() for output in outputs), *gradients)


def assert_results(
    actual: Results,
    truth: Results,
    peer: Results,
    roundings: int = 1,
    summands: Tensor | None = None,
) -> None:
    """Within the budget, except metrics; what was not computed is None; padding 0.

    ``summands`` are those of the hidden states' gradient, if ranks add it.
    """
    differentiable = min(len(actual.outputs), len(truth.outputs))
    of_outputs = (results.outputs[:differentiable] for results in (actual, truth, peer))
    for triple in zip(*of_outputs, strict=True):
        assert_within_budget(*triple)
    for name in LEAVES:
        gradient, expected = getattr(actual, name), getattr(truth, name)
        if gradient is not None:
            valid = len(gradient) if name == "hidden" else len(truth.weight)
            assert not gradient[valid:].any(), f"gradient of padded rows of the {name}"
            added = summands if name == "hidden" else None
            assert_within_budget(gradient[:valid], expected, getattr(peer, name), 0.0, roundings, added)


def assert_right(
    results: Results,
    inputs: Projection,
    *grad_outputs: Tensor | None,
    bounds: Sequence[tuple[int, int]] | None = None,
    **options: Any,
) -> None:
    """``results`` of the call with ``options`` are those of the whole computation."""
    truth = linear_fp64(inputs, *grad_outputs, **options)
    peer = linear_same_dtype(inputs, *grad_outputs, bounds=bounds, **options)
    # Backward multiplies what forward has written.
    roundings = 1 + (options.get("gradient") == "in_forward")
    summands = None
    if bounds is not None and len(bounds) > 1 and inputs.hidden.dtype.itemsize == 2:  # others are not rounded
        summands = linear_fp64(inputs, *grad_outputs, bounds=bounds, adds_sizes=True, **options).hidden.abs()
    assert_results(results, truth, peer, roundings, summands)


def check(
    impl_device: tuple[str, str],
    inputs: Projection,
    *grad_outputs: Tensor | None,
    frozen: Sequence[str] = (),
    **options: Any,
) -> Results:
    """:func:`run`, whose results must be those of the whole computation."""
    actual = run(impl_device, inputs, *grad_outputs, frozen=frozen, **options)
    assert_right(actual, inputs, *grad_outputs, **options)
    for name in LEAVES:
        needed = name not in frozen and getattr(inputs, name) is not None
        if name == "weight" and options.get("main_grad") is not None:
            needed = False
        assert (getattr(actual, name) is not None) == needed, name
    return actual


class Leaves:
    """Hidden states and a head of ``N_LEAVES`` tokens that need gradients, and losses of them."""

    def __init__(self, impl_device, kind="some_ignored", *, dtype=torch.float32, frozen=()) -> None:
        self.impl, self.device = impl_device
        self.inputs = projection(kind, N_LEAVES, dtype=dtype, bias=True)
        self.labels = self.inputs.labels.to(self.device)
        self.hidden, self.weight, self.bias = (
            getattr(self.inputs, name).clone().to(self.device).requires_grad_(name not in frozen) for name in LEAVES
        )
        self.leaves = [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf.requires_grad]

    def loss(self, hidden: Tensor | None = None, **options: Any) -> Any:
        hidden = self.hidden if hidden is None else hidden
        options = {"bias": self.bias, "impl": self.impl, **options}
        return linear_cross_entropy(hidden, self.weight, self.labels, **options)

    def grad_output(self, loss: Tensor) -> Tensor:
        return grad_output_of({"reduction": "none" if loss.dim() else "mean"}, N_LEAVES).to(self.device)

    def assert_gradients(self, loss, gradients, grad_output, *, times=1, **options) -> None:
        """``gradients`` of hidden states, weight and bias are ``times`` those of the loss."""
        assert_right(Results((loss,), *gradients), self.inputs, times * grad_output.cpu(), **options)


def record_matmuls() -> Any:
    """The list that this yields to ``with`` grows by one name for every matmul that PyTorch does within it."""
    return recorded(_matmul)


def _matmul(func: Any, args: Any, kwargs: Any) -> str | None:
    name = func.overloadpacket.__name__
    return name if name in _MATMULS else None
