"""What random calls must return: fp64 values by PyTorch's functions, and how far fp32 arithmetic may be from each.

A bound is the sum of the magnitudes that a formula adds up, in units of fp32's last digit. A probability
``p = exp(z - lse)`` has an error of ``1 + |log p|`` such units, and of ``|z|`` more if z itself was rounded.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.cases.soft import divergences
from tests.support.random.inputs import NAN, NEG_INF
from tests.support.truth import oracle

Numbers = dict[str, Tensor]
LIMITS = {"lse": NEG_INF, "mean_logit": NEG_INF}  # of nothing but -inf
IDENTITY = {"temperature": 1.0, "logit_scale": 1.0, "softcap": None}
LOWEST = -1e6  # a logit of probability 0


class Truth(NamedTuple):
    """Of fp64 logits ``[..., V]``."""

    outputs: Numbers  # those that autograd differentiates come first
    bounds: Numbers  # of each output's error
    of_gradient: Callable[[Numbers], Tensor]  # of that of each logit, from the upstream gradients


def with_nan_gradient(x: Tensor, is_bad: Tensor) -> Tensor:
    """``x``, whose gradient is NaN in bad rows."""
    x = x * 1
    if x.requires_grad and bool(is_bad.any()):
        x.register_hook(lambda grad: grad.masked_fill(is_bad.unsqueeze(-1), NAN))
    return x


def bad_rows(x: Tensor) -> Tensor:
    """Rows with NaN or +inf, or with nothing but -inf."""
    return ~x.detach().amax(-1).isfinite()


def finite(values: Tensor) -> Tensor:
    return values.detach().nan_to_num(0.0, 0.0, 0.0)


def largest(z: Tensor) -> Tensor:
    return finite(z).abs().amax(-1)


class Softmax(NamedTuple):
    """Of clean rows, each ``[..., V]`` or ``[...]``; -inf counts as 0 in sums."""

    log_p: Tensor
    p: Tensor
    error: Tensor  # of p
    lse: Tensor
    log_sum: Tensor  # relative to the largest z
    from_max: Tensor  # |z - the largest|
    rounding: Tensor  # of z


def softmax(z: Tensor, rounding: Tensor) -> Softmax:
    z = z.detach()
    log_p, lse, z_max = z.log_softmax(-1), z.logsumexp(-1), z.amax(-1)
    p, from_max = log_p.exp(), finite(z_max.unsqueeze(-1) - z)
    error = p * (1 + finite(log_p).abs() + rounding.unsqueeze(-1))
    return Softmax(log_p, p, error, lse, lse - z_max, from_max, rounding)


def transformed(x: Tensor, options: dict[str, Any]) -> Tensor:
    return oracle.transformed(x, options.get("logit_scale", 1.0), options.get("softcap"))


def is_transformed(options: dict[str, Any]) -> bool:
    """Whether logits are rounded before the softmax."""
    given = [(options.get(name, default), default) for name, default in IDENTITY.items()]
    return any(isinstance(value, Tensor) or value != default for value, default in given)


class _Labels:
    """The truth of a loss with labels, with its metrics, or of log-probabilities."""

    def __init__(
        self, x: Tensor, labels: Tensor, options: dict[str, Any], rounding: Tensor, dropped: Tensor | None
    ) -> None:
        n_columns, ignore_index = x.shape[-1], options.get("ignore_index", -100)
        self.options, self.num_items, labels = options, options.get("num_items"), labels.long()
        self.ignored = labels == ignore_index
        temperature = options.get("temperature", 1.0)
        t = torch.as_tensor(temperature, dtype=torch.float64, device=x.device).expand(labels.shape)
        is_wrong = ~((t > 0) & t.isfinite())
        is_wrong = is_wrong | ((labels < 0) | (labels >= n_columns)) & ~self.ignored
        self.t = t.where((t > 0) & t.isfinite(), 1.0)
        self.is_wrong, self.bad_x = is_wrong, bad_rows(x)
        self.excluded = x.detach().amax(-1) == NEG_INF
        self.bad_outputs = (self.bad_x | is_wrong) & ~self.ignored
        self.bad = self.bad_outputs & (not divides_by_0(options))  # which divides the loss alone
        clean = with_nan_gradient(x, self.bad).masked_fill(self.bad_x.unsqueeze(-1), 0.0)
        clean = clean if dropped is None else clean.masked_fill(dropped & ~self.bad_x.unsqueeze(-1), NEG_INF)
        finite_x = with_nan_gradient(x, self.bad_outputs).masked_fill(~x.detach().isfinite(), 0.0)
        self.no_number = (finite_x * 0).sum(-1)  # 0, whose gradient is NaN in bad rows
        inside = (labels >= 0) & (labels < n_columns) | self.ignored
        any_labels = torch.where(inside, labels, int(ignore_index == 0))
        self.found = oracle.values(clean, any_labels, **{**options, "temperature": self.t})

        own = transformed(clean.detach(), options).masked_fill(self.ignored.unsqueeze(-1), 0.0) / self.t.unsqueeze(-1)
        is_rounded = is_transformed(options)
        self.z, self.s = own, softmax(own, largest(own) * is_rounded + rounding)
        w = options.get("class_weight")
        self.w = torch.ones(n_columns, dtype=x.dtype, device=x.device) if w is None else w.double()
        self.index = any_labels.masked_fill(self.ignored, 0).unsqueeze(-1)
        self.w_y = self.w[self.index.squeeze(-1)].masked_fill(self.ignored, 0.0)
        self.e, self.z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
        self.log_p_y = finite(self.s.log_p.gather(-1, self.index).squeeze(-1)).abs()
        self.spread, self.sum_sq = (self.s.p * self.s.from_max).sum(-1), self.s.p.square().sum(-1)
        is_mean = options.get("reduction", "none") == "mean"
        divisor = self.num_items if self.num_items is not None else (self.w_y.sum() if is_mean else 1)
        self.per_item = 1 / abs(float(divisor)) if float(divisor) else 0.0

    def outputs(self, names: tuple[str, ...]) -> Numbers:
        outputs: Numbers = {}
        for name in names:
            value, at_limit = getattr(self.found, name), self.excluded & ~self.is_wrong
            bad = self.bad if name == "loss" else self.bad_outputs
            value = value if name == "loss" else value + self.no_number
            fill = torch.full_like(self.t, NAN).masked_fill(at_limit, LIMITS.get(name, NAN)).where(bad, 0.0)
            outputs[name] = value + (fill if value.dim() else fill.sum())
        return outputs

    def bounds(self, outputs: Numbers) -> Numbers:
        s, w_y = self.s, self.w_y.abs()
        of_z_loss = 2 * self.z_loss * s.lse.abs() * (s.lse.abs() + s.rounding)
        of_loss = w_y * (4 * self.log_p_y + s.rounding + of_z_loss)
        mean_log_p = (self.w.abs() * finite(s.log_p).abs()).mean(-1)
        of_loss = of_loss + (self.w.abs().mean() * (s.log_sum + s.rounding) + mean_log_p) * bool(self.e)
        is_largest = self.z.gather(-1, self.index).squeeze(-1) == self.z.amax(-1)  # log_sum has all its digits
        bounds = {
            "loss": of_loss,
            "log_probs": 4 * self.log_p_y + s.rounding,
            "entropy": ~is_largest + s.log_sum + self.spread + s.rounding * (2 + 4 * self.spread),
            "lse": s.lse.abs() + s.rounding + 1e-3,
            "sum_sq_probs": self.sum_sq * (8 + s.rounding),
            "mean_logit": s.from_max.mean(-1) + self.z.amax(-1).abs() + s.rounding,
        }
        reduction = self.options.get("reduction", "none")
        if reduction != "none":
            by_weights = reduction == "mean" and self.num_items is None
            of_divisor = 2 * w_y.sum() * self.per_item if by_weights else 2.0
            if "loss" in outputs:
                bounds["loss"] = of_loss.sum() * self.per_item + of_divisor * finite(outputs["loss"]).abs()
        return {name: bounds[name] for name in outputs}

    def of_gradient(self, upstream: Numbers) -> Tensor:
        s, w_y, total = self.s, self.w_y, torch.zeros_like(self.z)
        g = {name: value.double().abs().unsqueeze(-1) for name, value in upstream.items()}
        if "loss" in g or "log_probs" in g:
            factor = g["loss"] * self.per_item if "loss" in g else g["log_probs"]
            others = w_y * (1 + 2 * self.z_loss * (s.lse.abs() + s.rounding))
            of_column = s.error * (others.abs() + self.e * self.w.abs().mean()).unsqueeze(-1)
            of_column = of_column + self.e * self.w.abs() / self.z.shape[-1]
            # 1 - p keeps its digits.
            at_label = -torch.expm1(-self.log_p_y) * (1 + s.from_max.amax(-1) + s.rounding) * w_y.abs() + self.e
            at_label = at_label + s.error.gather(-1, self.index).squeeze(-1) * (others - w_y * (1 - self.e)).abs()
            of_column = of_column.scatter(-1, self.index, at_label.unsqueeze(-1) + self.e * self.w.abs().max())
            total += factor * of_column
        if "entropy" in g:
            of_row = (s.log_sum + self.spread + s.rounding).unsqueeze(-1)
            total += g["entropy"] * s.error * (finite(s.log_p).abs() + of_row)
        if "lse" in g:
            total += g["lse"] * s.error
        return total * (self.options.get("logit_scale", 1.0) / self.t).unsqueeze(-1)


def of_labels(
    x: Tensor,
    labels: Tensor,
    options: dict[str, Any],
    names: tuple[str, ...],
    rounding: Tensor,
    dropped: Tensor | None = None,
) -> Truth:
    """Truth of a loss with labels, or of log-probabilities. ``rounding [...]`` is of x, ``dropped`` is -inf."""
    truth = _Labels(x, labels, options, rounding, dropped)
    outputs = truth.outputs(names)
    return Truth(outputs, truth.bounds(outputs), truth.of_gradient)


def of_ids(x: Tensor, ids: Tensor, options: dict[str, Any], rounding: Tensor) -> Truth:
    """Truth of log-probabilities at ``ids [..., k]``, of which one outside the vocabulary is NaN by itself."""
    ids, ignored = ids.long(), ids == options.get("ignore_index", -100)
    outside, temperature = ((ids < 0) | (ids >= x.shape[-1])) & ~ignored, options.get("temperature", 1.0)
    t = torch.as_tensor(temperature, dtype=torch.float64, device=x.device).expand(ids.shape[:-1])
    is_wrong = bad_rows(x) | ~((t > 0) & t.isfinite())
    t = t.masked_fill(is_wrong, 1.0).unsqueeze(-1)
    bad = (is_wrong | outside.any(-1)) & ~ignored.all(-1)
    clean = with_nan_gradient(x, bad).masked_fill(is_wrong.unsqueeze(-1), 0.0)
    clean = clean.masked_fill(clean == NEG_INF, NEG_INF)  # no gradient there
    z, inside = transformed(clean, options) / t, ids.masked_fill(ignored | outside, 0)
    values = z.log_softmax(-1).gather(-1, inside)
    values = values.masked_fill((is_wrong.unsqueeze(-1) | outside), NAN).masked_fill(ignored, 0.0)
    s = softmax(z, largest(z) * is_transformed(options) + rounding)

    def of_gradient(upstream: Numbers) -> Tensor:
        g = upstream["log_probs"].double().abs().masked_fill(ignored, 0.0)
        at, total = torch.zeros_like(s.p).scatter_add(-1, inside, g), g.sum(-1, keepdim=True)
        # Of a confident id, 1 - p keeps its digits, and so does the sum of the other gradients.
        rest = -torch.expm1(s.log_p) * (1 + s.from_max.amax(-1) + s.rounding).unsqueeze(-1) * total + total - at
        of_column = torch.where(s.p > 0.5, rest, s.error * total + at)
        return of_column * (options.get("logit_scale", 1.0) / t)

    bound = 4 * finite(values).abs() + s.rounding.unsqueeze(-1)
    return Truth({"log_probs": values}, {"log_probs": bound}, of_gradient)


def divides_by_0(options: dict[str, Any]) -> bool:
    """Then no row counts, whatever it holds."""
    return options.get("num_items") is not None and float(options["num_items"]) == 0


def reduced(
    losses: Tensor, bounds: Tensor, terms: Tensor, counted: Tensor, bad: Tensor, options: dict[str, Any]
) -> Truth:
    """Truth from unreduced losses, 0 where they do not count, and their bounds; ``terms`` are of a row's gradient."""
    num_items, reduction = options.get("num_items"), options["reduction"]
    losses, factor = losses + torch.zeros_like(losses).masked_fill(bad, NAN), 1.0
    if reduction != "none":
        n = float(num_items) if num_items is not None else float(counted.sum()) if reduction == "mean" else 1.0
        factor = abs(1 / n) if n else 0.0
        bounds = bounds.where(counted, 0.0).sum() / n + finite(losses).abs().sum() / n if n else bounds.sum() * 0
        losses = losses.sum() / n if n else (losses * 0).nan_to_num().sum()

    def of_gradient(upstream: Numbers) -> Tensor:
        return upstream["loss"].double().abs().unsqueeze(-1) * factor * terms

    return Truth({"loss": losses}, {"loss": bounds}, of_gradient)


class Rows(NamedTuple):
    """Which rows of a distillation count, and which are NaN."""

    counted: Tensor
    bad: Tensor
    bad_x: Tensor


def rows_of(x: Tensor, teacher: Tensor, labels: Tensor | None, options: dict[str, Any]) -> Rows:
    bad_x = bad_rows(x) | bad_rows(teacher)
    counted, outside = torch.ones_like(bad_x), torch.zeros_like(bad_x)
    if labels is not None:
        counted = labels != options.get("ignore_index", -100)
        outside = (labels < 0) | (labels >= x.shape[-1])
    return Rows(counted, (bad_x | outside) & counted & (not divides_by_0(options)), bad_x)


def of_teacher(
    x: Tensor, teacher: Tensor, labels: Tensor | None, options: dict[str, Any], rounding: Tensor, of_other: Tensor
) -> Truth:
    """Truth of a divergence; ``of_other`` is the rounding of the teacher's logits."""
    rows = rows_of(x, teacher, labels, options)
    hidden_rows = (rows.bad_x | ~rows.counted).unsqueeze(-1)
    clean = with_nan_gradient(x, rows.bad).masked_fill(hidden_rows, 0.0)
    teacher = teacher.masked_fill(hidden_rows, 0.0)
    excluded = (clean == NEG_INF) & (teacher == NEG_INF)  # the oracle's autograd knows no such column
    clean, teacher = (each.masked_fill(excluded, LOWEST) for each in (clean, teacher))
    own = {name: options[name] for name in ("divergence", "temperature", "hard_weight")}
    own["beta"] = options.get("beta", 0.5)
    any_labels = None
    if labels is not None:
        any_labels = torch.where((labels < 0) | (labels >= x.shape[-1]), 0, labels.long())
        own |= {"ignore_index": -1}
    flat = [each.reshape(-1, each.shape[-1]) for each in (clean, teacher)]
    losses = divergences(*flat, labels=None if any_labels is None else any_labels.reshape(-1), **own)
    losses = losses.view(x.shape[:-1])
    if any_labels is not None and own["hard_weight"]:
        has_no_label = excluded.gather(-1, any_labels.unsqueeze(-1)).squeeze(-1)
        losses = losses + torch.zeros_like(losses).masked_fill(has_no_label, math.inf)
    temperature, hard, beta, kind = own["temperature"], own["hard_weight"], own["beta"], own["divergence"]
    is_rounded = temperature != 1
    zs = (clean.detach() / temperature, teacher / temperature)
    s, t = (
        softmax(z, r + largest(z - z.amax(-1, keepdim=True)) * is_rounded)
        for z, r in zip(zs, (rounding, of_other), strict=True)
    )
    logs = finite(s.log_p).abs() + finite(t.log_p).abs()
    r = (s.rounding + t.rounding).unsqueeze(-1)
    terms = s.error + t.error if kind == "forward" else s.p * (logs + 1 + r)
    if kind == "js":
        terms = s.p * (1 + finite(s.log_p).abs() + finite(oracle_mixture(s, t, beta)).abs() + r)
    cross = (torch.maximum(s.p, t.p) * (logs + r)).sum(-1)
    if kind == "reverse":
        terms = terms + s.p * (cross + s.log_sum + t.log_sum).unsqueeze(-1)
    of_loss = (1 - hard) * (1 + cross + s.log_sum + t.log_sum)
    terms = terms * ((1 - hard) / temperature)
    if hard:
        own_s = softmax(clean, rounding)
        of_loss = of_loss + hard * (
            1 + own_s.log_sum + finite(own_s.log_p.gather(-1, any_labels.unsqueeze(-1)))[..., 0].abs()
        )
        terms = (terms + hard * own_s.error).scatter_add(
            -1, any_labels.unsqueeze(-1), torch.full_like(of_loss, hard).unsqueeze(-1)
        )
    losses = losses.masked_fill(~rows.counted, 0.0)
    return reduced(losses, of_loss, terms, rows.counted, rows.bad, options)


Logits = tuple[Tensor, dict[str, Any], Tensor]  # options of which are a scale and a cap, and their rounding


def of_capped(student: Logits, teacher: Logits, labels: Tensor | None, options: dict[str, Any]) -> Truth:
    """Truth of a divergence of logits that have a scale or a cap each."""
    zs, errors = [], []
    for logits, given, rounding in (student, teacher):
        zs.append(transformed(logits, given))
        errors.append(rounding + largest(zs[-1]) * is_transformed({**given, "temperature": 1.0}))
    truth, scale = of_teacher(*zs, labels, options, *errors), student[1].get("logit_scale", 1.0)
    return truth._replace(of_gradient=lambda upstream: truth.of_gradient(upstream) * scale)


def with_divergence(
    truth: Truth,
    x: Tensor,
    teacher: Tensor,
    labels: Tensor,
    options: dict[str, Any],
    own: dict[str, Any],
    rounding: Tensor,
    of_other: Tensor,
) -> Truth:
    """``truth`` of labels, and the divergence of each token from a teacher, whose options are its own."""
    given = {**own, "hard_weight": 0.0, "reduction": "none", "ignore_index": options.get("ignore_index", -100)}
    of = of_capped((x, options, rounding), (teacher, own, of_other), labels, given)

    def of_gradient(upstream: Numbers) -> Tensor:
        return truth.of_gradient(upstream) + of.of_gradient({"loss": upstream["divergence"]})

    outputs = {**truth.outputs, "divergence": of.outputs["loss"]}
    return Truth(outputs, {**truth.bounds, "divergence": of.bounds["loss"]}, of_gradient)


def oracle_mixture(s: Softmax, t: Softmax, beta: float) -> Tensor:
    return torch.logaddexp(t.log_p + math.log(beta), s.log_p + math.log(1 - beta))
