"""What the measured calls return, in fp64 by PyTorch's own functions, and how far another result is from it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.calls import Row, Take, cispo, opd, simpo_of_tokens
from bench_lib.cases import IGNORE_INDEX, OF_COLUMNS, TOP, TOP_P, Inputs

CHECKED_ROWS = 64
SUMS = 64 * 2.0**-23  # the error of sums in fp32
CHUNK_ELEMENTS = 2**27  # logits in fp64 that exist at a time: 1 GiB


def of_all_ranks(shard: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' shards side by side."""
    if group is None:
        return shard
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def outputs_fp64(row: Row, logits: Tensor, given: Take) -> list[Tensor]:
    """The outputs of each token, by PyTorch's own functions; a mean's divisor is left to the caller."""
    options = row.options
    z = logits * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    if row.loss == "log_probs":
        temperature = given("temperature")[:, None] if "temperature" in row.given else options.get("temperature", 1.0)
        return _log_probs(row.outputs, z / temperature, given("labels"))
    if row.loss == "objective":
        log_probs, entropy = _log_probs(("log_probs", "entropy"), z, given("labels"))
        has_entropy = options.get("has_entropy", True)
        return [cispo(log_probs, given("advantage"), given("old"), entropy if has_entropy else None)]
    if row.loss == "sampled":
        log_p = z.masked_fill(~_sampled(z), -torch.inf).log_softmax(-1)
        return [-(log_p.exp() * log_p.clamp(min=-1e300)).sum(-1)]
    if row.loss == "given_ids":
        return [(z.log_softmax(-1).gather(1, given("ids")) * given("log_probs")).sum(-1)]
    if row.loss == "teacher":
        divergence = _divergence(options["divergence"], given("teacher"), z)
        if not options["has_labels"]:
            return [divergence]
        log_probs, entropy = _log_probs(("log_probs", "entropy"), z, given("labels"))
        return [opd(log_probs, divergence, entropy, given("advantage"))]
    if row.loss == "distillation":
        hard = options.get("hard_weight", 0.0)
        divergence = _divergence(options.get("divergence", "forward"), given("teacher"), z)
        of_labels = functional.cross_entropy(z, given("labels"), reduction="none") if hard else 0.0
        return [(1 - hard) * divergence + hard * of_labels]
    weight = given("class_weight") if "class_weight" in row.given else None
    smoothing = options.get("label_smoothing", 0.0)
    losses = functional.cross_entropy(z, given("labels"), weight, label_smoothing=smoothing, reduction="none")
    return [losses + options.get("z_loss", 0.0) * torch.logsumexp(z, -1).square()]


def _sampled(z: Tensor) -> Tensor:
    """Which logits a sampler of TOP and TOP_P keeps, with ties."""
    in_order = z.detach().sort(-1, descending=True).values
    in_order = in_order.masked_fill(in_order < in_order[:, min(TOP, z.shape[-1]) - 1, None], -torch.inf)
    last = (in_order.softmax(-1).cumsum(-1) < TOP_P).sum(-1, keepdim=True)
    return z >= in_order.gather(-1, last)


def _log_probs(outputs: tuple[str, ...], z: Tensor, labels: Tensor) -> list[Tensor]:
    log_p = z.log_softmax(-1)
    every = {
        "log_probs": lambda: log_p.gather(1, labels.clamp(min=0)[:, None])[:, 0],
        "entropy": lambda: -(log_p.exp() * log_p).sum(-1),
        "lse": lambda: torch.logsumexp(z, -1),
        "sum_sq_probs": lambda: log_p.exp().square().sum(-1),
        "mean_logit": lambda: z.mean(-1),
    }
    return [every[name]() for name in outputs]


def _divergence(name: str, teacher: Tensor, student: Tensor) -> Tensor:
    log_t, log_s = teacher.log_softmax(-1), student.log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if name == "js":  # of beta 0.5
        log_m = ((log_t.exp() + log_s.exp()) / 2).log()
        return (kl(log_t, log_m) + kl(log_s, log_m)) / 2
    return kl(log_t, log_s) if name == "forward" else kl(log_s, log_t)


def expected(row: Row, inputs: Inputs, group: Any, n_tokens: int) -> list[Tensor]:
    """The outputs of a row for the first tokens, then the gradients of their sums, this rank's; tokens in chunks.

    Collectives: all_gathers.
    """
    if row.loss == "pairs":  # the derivatives by all log-probabilities first
        of_each = partial(expected, Row("log_probs", {}), group=group, n_tokens=n_tokens)
        log_probs = of_each(inputs)[0].requires_grad_()
        sign, reference = (inputs.alongside(name).double() for name in ("sign", "reference"))
        loss = simpo_of_tokens(log_probs, inputs.alongside("pair"), sign, reference)
        (weights,) = torch.autograd.grad(loss, log_probs)
        return [loss.detach(), *of_each(inputs._replace(upstreams={torch.float32: weights}))[1:]]
    *of_tokens, shard = (tensor.detach() for tensor in inputs.tensors)
    labels, is_head = inputs.labels[:n_tokens], bool(of_tokens)
    whole = of_all_ranks(shard, 0, group) if is_head else of_all_ranks(shard[:n_tokens], 1, group)
    weight: Any = whole.double().requires_grad_() if is_head else None
    divisor = _divisor(row, labels, partial(_given, inputs, group, slice(None)))
    outputs: list[list[Tensor]] = []
    gradients: list[Any] = []
    chunk = max(1, CHUNK_ELEMENTS // whole.shape[0 if is_head else 1])
    for start in range(0, n_tokens, chunk):
        rows = slice(start, min(start + chunk, n_tokens))
        leaf = (of_tokens[0] if is_head else whole)[rows].double().requires_grad_()
        found = outputs_fp64(row, leaf if weight is None else leaf @ weight.T, partial(_given, inputs, group, rows))
        upstream = 1.0 if inputs.upstreams is None else inputs.upstreams[torch.float32][rows].double()
        (sum((output * upstream).sum() for output in found) / divisor).backward()
        outputs.append([output.detach() for output in found])
        gradients.append(leaf.grad)
    together = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
    if row.reduction != "none":
        together = [output.sum() / divisor for output in together]
    d_tokens, n_columns = torch.cat(gradients), shard.shape[0 if is_head else 1]
    first = n_columns * (0 if group is None else dist.get_rank(group))
    columns = slice(first, first + n_columns)
    return [*together, d_tokens[:, columns]] if weight is None else [*together, d_tokens, weight.grad[columns]]


def _divisor(row: Row, labels: Tensor, given: Take) -> Any:
    if row.reduction != "mean":
        return row.options.get("num_items", 1)
    counted = labels[labels != IGNORE_INDEX] if row.loss == "cross_entropy" else labels
    return given("class_weight")[counted].sum() if "class_weight" in row.given else len(counted)


def _given(inputs: Inputs, group: Any, rows: slice, name: str) -> Any:
    """What a loss takes of these tokens, of all ranks: ids as they are, numbers in fp64."""
    value = inputs.labels if name == "labels" else inputs.alongside(name)
    if isinstance(value, tuple):
        hidden, weight = value
        return hidden[rows].double() @ of_all_ranks(weight, 0, group).double().T
    if name in OF_COLUMNS:
        return of_all_ranks(value, 0, group).double()
    found = of_all_ranks(value[rows], 1, group) if name == "teacher" else value[rows]
    return found.double() if found.is_floating_point() else found


@torch.no_grad()
def errors_of(actual: tuple[Tensor, ...], right: list[Tensor], gradients: tuple[str, ...]) -> dict[str, float]:
    """Relative errors: of all losses as a whole, of each gradient the root mean square over its rows.

    Over rows, since a few rows of a weight's gradient, those of the labels, hold nearly all of its norm.
    """
    n_losses = len(right) - len(gradients)
    loss, right_loss = (torch.cat([t.reshape(-1).double() for t in ts[:n_losses]]) for ts in (actual, right))
    norm = torch.linalg.vector_norm
    errors = {"loss": float(norm(loss - right_loss) / norm(right_loss))}
    for name, grad, right_grad in zip(gradients, actual[n_losses:], right[n_losses:], strict=True):
        norms = norm(right_grad, dim=1)
        # A row that must be zero counts as one far smaller than the others. Where its terms cancel, fp64 leaves 1e-17.
        counted = norms[norms > norms.max() * 1e-12]
        smallest = float(counted.median()) * 1e-3 if len(counted) else 1e-30
        relative = norm(grad.reshape(right_grad.shape) - right_grad, dim=1) / norms.clamp(min=smallest)
        errors[name] = float(relative.square().mean().sqrt())
    return errors


def require(errors: dict[str, float], allowed: tuple[float, ...]) -> None:
    """Raise AssertionError if an error is larger than allowed, or NaN."""
    for (name, error), most in zip(errors.items(), allowed, strict=True):
        if not error <= most:
            raise AssertionError(f"{name}: relative error {error:.2g}, at most {most:.2g}")
