"""Is a provider right? Its losses and gradients against PyTorch in fp64, before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.adapters import cispo
from bench_lib.cases import IGNORE_INDEX, TOP, TOP_P, Alongside, Inputs
from bench_lib.rows import Row

CHECKED_ROWS = 64
SUMS = 64 * 2.0**-23  # the error of sums in fp32
CHUNK_ELEMENTS = 2**27  # logits in fp64 that exist at a time: 1 GiB
Given = Callable[[str], Any]  # what a loss takes, by name, in fp64, of all ranks


def of_all_ranks(shard: Tensor, dim: int, group: Any) -> Tensor:
    """The ranks' shards side by side."""
    if group is None:
        return shard
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts, dim=dim)


def outputs_fp64(row: Row, logits: Tensor, given: Given) -> list[Tensor]:
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
    if row.loss in ("top_k", "given_ids"):
        known, own = given("log_probs"), z.log_softmax(-1).gather(1, given("ids"))
        if row.loss == "given_ids":
            return [(own * known).sum(-1)]
        of_student = options.get("divergence") == "reverse"
        return [(own.exp() * (own - known) if of_student else known.exp() * (known - own)).sum(-1)]
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


class Truth:
    """Losses and gradients of one rank's inputs; what each token takes is read in chunks of tokens."""

    def __init__(self, inputs: Inputs, group: Any, n_tokens: int) -> None:
        *of_tokens, shard = (tensor.detach() for tensor in inputs.tensors)
        self.is_head, self.group, self.n_tokens = bool(of_tokens), group, n_tokens
        self.inputs, self.labels, self.n_columns = inputs, inputs.labels[:n_tokens], shard.shape[0 if of_tokens else 1]
        self.sharded = shard if of_tokens else shard[:n_tokens]
        self.hidden = of_tokens[0][:n_tokens] if of_tokens else None
        self.whole = of_all_ranks(self.sharded, 0 if of_tokens else 1, group)

    def expected(self, row: Row) -> list[Tensor]:
        """The outputs of a row, then the gradients of their sums. Collectives: all_gathers."""
        vectors = {name: self._whole(name) for name in row.given if name in Alongside.OF_COLUMNS}
        divisor = self._divisor(row, vectors)
        leaf = self.whole.double().requires_grad_() if self.is_head else None
        outputs, of_tokens, d_weight = [], [], None if leaf is None else torch.zeros_like(leaf)
        for start in range(0, self.n_tokens, max(1, CHUNK_ELEMENTS // (self.n_columns * self._ranks))):
            rows = slice(start, start + max(1, CHUNK_ELEMENTS // (self.n_columns * self._ranks)))
            own = (self.whole if self.hidden is None else self.hidden)[rows].double().requires_grad_()
            logits = own if leaf is None else own @ leaf.T
            found = outputs_fp64(row, logits, partial(self._given, rows, vectors))
            total = torch.stack([self._weighted(output, rows) for output in found]).sum() / divisor
            grads = torch.autograd.grad(total, (own,) if leaf is None else (own, leaf))
            outputs.append([output.detach() for output in found])
            of_tokens.append(grads[0])
            if d_weight is not None:
                d_weight += grads[1]
        together = [torch.cat(parts) for parts in zip(*outputs, strict=True)]
        if row.reduction != "none":
            together = [output.sum() / divisor for output in together]
        first = self.n_columns * (0 if self.group is None else dist.get_rank(self.group))
        d_tokens, own_columns = torch.cat(of_tokens), slice(first, first + self.n_columns)
        if d_weight is None:
            return [*together, d_tokens[:, own_columns]]
        return [*together, d_tokens, d_weight[own_columns].clone()]

    @property
    def _ranks(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def _divisor(self, row: Row, vectors: dict[str, Tensor]) -> Any:
        if row.reduction != "mean":
            return row.options.get("num_items", 1)
        if row.loss != "cross_entropy":
            return self.n_tokens
        counted = self.labels[self.labels != IGNORE_INDEX]
        return vectors["class_weight"][counted].sum() if vectors else len(counted)

    def _weighted(self, output: Tensor, rows: slice) -> Tensor:
        """The sum, by the gradient that the loss is given."""
        if self.inputs.upstreams is None:
            return output.sum()
        return (output * self.inputs.upstreams[torch.float32][rows].double()).sum()

    def _whole(self, name: str) -> Tensor:
        return of_all_ranks(self.inputs.alongside(name), 0, self.group).double()

    def _given(self, rows: slice, vectors: dict[str, Tensor], name: str) -> Any:
        if name in vectors:
            return vectors[name]
        if name == "labels":
            return self.labels[rows]
        value = self.inputs.alongside(name)
        rows = slice(rows.start, min(rows.stop, self.n_tokens))
        if isinstance(value, tuple):
            hidden, weight = value
            return hidden[rows].double() @ of_all_ranks(weight, 0, self.group).double().T
        if name == "ids":
            return value[rows]
        whole = of_all_ranks(value[rows], 1, self.group) if name == "teacher" else value[rows]
        return whole.double()


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
