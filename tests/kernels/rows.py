"""Results of the launchers and of ``spec`` for the same rows, in buffers that held NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.core.test_spec import by_spec, tensors_of, with_tensors
from tests.support.cases.layouts import Layout, logits_layouts
from tests.support.truth.budget import assert_within_budget, of_small_cap
from vocab_parallel_ce import spec
from vocab_parallel_ce.losses.labels import LABELS, Labels, outputs_gradient
from vocab_parallel_ce.options import OUTPUTS
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import PLAIN, GradOutputs, LossOptions, TokenOutputs

NAN, INF = float("nan"), float("inf")
COPIED = ("every other column", "column-major")  # layouts that no kernel walks
EVERY_STATISTIC = LossOptions(smoothing=0.1, entropy=True, predictions=True, sum_sq_probs=True)


def whole(logits: Tensor) -> VocabShard:
    """The shard of one rank."""
    return VocabShard(0, logits.shape[-1], logits.shape[-1])


def walked_layouts(columns: int, *, disjoint: bool = False, **arguments: Any) -> list[Layout]:
    """``logits_layouts`` that kernels walk, and, if ``disjoint``, may write."""
    layouts = [layout for layout in logits_layouts(columns, **arguments) if layout.name not in COPIED]
    return [layout for layout in layouts if not (disjoint and layout.shares_elements)]


def given(options: LossOptions, labels: Tensor, shard: VocabShard) -> tuple[Labels, dict[str, Any]]:
    """What stands beside the logits, weights of the shard's columns and temperatures of the rows, and the options."""
    weight, temperature = tensors_of(options, len(labels), shard.vocab_size)
    own = None if weight is None else weight[shard.start : shard.start + shard.n_valid].to(labels.device)
    temperature = None if temperature is None else temperature.to(labels.device)
    options = options._replace(temperature=None)
    return Labels(labels, own, temperature), {"options": options, "shard": shard}


def stats_by_kernel(
    logits: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN,
    shard: VocabShard | None = None,
) -> Tensor:
    """``[N, K]`` statistics."""
    from vocab_parallel_ce import kernels

    stats = torch.full((1, labels.numel(), len(options.statistics)), NAN, device=logits.device)
    beside, own = given(options, labels, shard or whole(logits))
    kernels.rows.statistics(kernels.label_rows.label_loss(**own))(logits, beside, (stats,), 0)
    return stats[0]


def empty_outputs(labels: Tensor, options: LossOptions) -> TokenOutputs:
    """Return a buffer for each output that ``options`` has the statistics for."""
    nan = torch.full((labels.numel(),), NAN, device=labels.device)
    predictions = torch.full_like(labels, -7, dtype=torch.int64) if options.predictions else None
    wanted = [name for name in OUTPUTS[:-1] if name == "lse" or getattr(options, name)]
    return TokenOutputs(nan, predictions=predictions, **{name: nan.clone() for name in wanted})


def outputs_by_kernel(
    stats: Tensor, labels: Tensor, vocab_size: int, options: LossOptions, divisor: Tensor | None = None
) -> TokenOutputs:
    """Every output that ``options`` has the statistics for."""
    from vocab_parallel_ce import kernels

    outputs = empty_outputs(labels, options)
    shard = VocabShard(0, vocab_size, vocab_size)
    fill = kernels.outputs.outputs(kernels.label_rows.label_loss(shard, options._replace(temperature=None)))
    fill((stats,), Labels(labels), divisor, outputs)
    return outputs


def gradient_by_kernel(
    logits: Tensor,
    stats: Tensor,
    labels: Tensor,
    options: LossOptions = PLAIN,
    shard: VocabShard | None = None,
    *,
    divisor: Tensor | None = None,
    into: Tensor | None = None,
    **grads: Tensor | None,
) -> Tensor:
    """The gradient from ``stats [R, N, K]``, over the logits, or in ``into``."""
    from vocab_parallel_ce import kernels

    grad = logits if into is None else into
    beside, own = given(options, labels, shard or whole(logits))
    fill = kernels.outputs.gradient(kernels.label_rows.label_loss(**own))
    fill(logits, beside, (stats,), divisor, of_rows(grads), grad)
    return grad


def of_rows(grads: dict[str, Tensor | None], dtype: torch.dtype | None = None) -> GradOutputs:
    """``grad_output`` and ``grad_`` of other outputs; with a ``dtype``, on the CPU."""
    named = {name.removeprefix("grad_").replace("output", "loss"): grad for name, grad in grads.items()}
    to = {name: None if grad is None else grad.to("cpu", dtype) for name, grad in named.items()} if dtype else named
    return GradOutputs(**to)


def stats_of_ranks(
    kernels: Any, pieces: Sequence[Tensor], labels: Tensor, shards: Sequence[VocabShard], options: LossOptions
) -> Tensor:
    """``[R, N, K]`` statistics, by ``kernels``, or by plain PyTorch for None."""
    stats = torch.full((len(shards), labels.numel(), len(options.statistics)), NAN, device=labels.device)
    for rank, (logits, shard) in enumerate(zip(pieces, shards, strict=True)):
        beside, own = given(options, labels, shard)
        launchers = LABELS.launchers(own["options"], shard, kernels)
        launchers.statistics(logits, beside, (stats,), rank)
    return stats


def gradient_by_spec(
    logits: Tensor, labels: Tensor, options: LossOptions, dtype: torch.dtype, **grads: Tensor | None
) -> Tensor:
    """Of the whole vocabulary, computed in ``dtype``."""
    logits, of_outputs, vocab_size = logits.to(dtype), of_rows(grads, dtype), logits.shape[-1]
    options, weight = with_tensors(options, labels, vocab_size, dtype)
    stats = spec.local_stats(logits, labels, 0, vocab_size, options, class_weight=weight)
    grad = spec.gradient(logits, stats, labels, 0, vocab_size, options, weight)
    grad = grad if of_outputs.loss is None else grad * of_outputs.loss.unsqueeze(1)
    return grad + outputs_gradient(logits, stats, labels, 0, vocab_size, of_outputs, options)


def grads_of(n_rows: int, options: LossOptions, device: str | torch.device) -> dict[str, Tensor | None]:
    """Gradients of the loss, different in every row, and of the other outputs that there are."""
    names, made = GradOutputs._fields, torch.randn(3, n_rows, generator=torch.Generator().manual_seed(1)).to(device)
    grads = {
        f"grad_{name}": made[i] if name == "loss" or getattr(options, name) else None for i, name in enumerate(names)
    }
    return {"grad_output": grads.pop("grad_loss"), **grads}


def assert_gradient(grad: Tensor, logits: Tensor, labels: Tensor, options: LossOptions, **grads: Tensor | None) -> None:
    """The gradient of rows on the CPU is within the budget."""
    truth, peer = (gradient_by_spec(logits, labels, options, d, **grads) for d in (torch.float64, torch.float32))
    assert_within_budget(grad.reshape(truth.shape), truth, peer)


def assert_is_largest(argmax: Tensor, rows: Tensor, options: LossOptions) -> None:
    """Whether z there is the largest, up to rounding: a cap makes near ties of logits far above it."""
    z, _ = spec.transformed(rows.double(), options)
    for row, column in zip(z, argmax.tolist(), strict=True):
        if not row.isfinite().any() or bool((row.isnan() | (row == INF)).any()):
            assert column in (INF, -1)
        else:
            assert float(row.max() - row[int(column)]) <= 8 * torch.finfo(torch.float32).eps * 20.0


def assert_outputs(outputs: TokenOutputs, logits: Tensor, labels: Tensor, options: LossOptions) -> None:
    """Each output that was asked for, against the whole vocabulary."""
    truth, peer = (by_spec(logits.to(dtype), labels, options) for dtype in (torch.float64, torch.float32))
    of_cap = of_small_cap(logits.dtype, options.softcap)
    assert_within_budget(outputs.loss.cpu(), truth.loss, peer.loss, of_cap)
    assert_within_budget(outputs.lse.cpu(), truth.lse, peer.lse, of_cap)
    # Their terms are rounded next to 1, beside which they may be nothing.
    if options.entropy:
        assert_within_budget(outputs.entropy.cpu() + 1, truth.entropy + 1, peer.entropy + 1, of_cap)
    if options.sum_sq_probs:
        assert_within_budget(*(made.sum_sq_probs.cpu() + 1 for made in (outputs, truth, peer)))
    if options.mean_logit:
        # The largest logit is rounded, beside which the mean may be nothing.
        assert_within_budget(*((made.lse - made.mean_logit).cpu() for made in (outputs, truth, peer)), of_cap)
    if options.predictions:
        predicted = outputs.predictions.cpu()
        live = labels != options.ignore_index
        assert torch.equal(predicted[~live], torch.full_like(predicted[~live], -1))
        if options.softcap is None:
            assert torch.equal(predicted, truth.predictions)
        else:
            assert_is_largest(predicted[live], logits[live], options)
