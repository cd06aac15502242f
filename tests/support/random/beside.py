"""What a random call has beside its logits or hidden states: labels or a teacher; and the truth of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.random.call import MATHS, Call, Settings
from tests.support.random.inputs import NEG_INF
from tests.support.random.tables import TENSOR
from tests.support.random.truth import Truth, finite, of_capped, of_ids, of_labels

Compute = Callable[[Tensor, Tensor], Truth]


class Beside(NamedTuple):
    compute: Compute  # the truth of fp64 logits and their rounding
    tensors: Callable[[int], Settings]  # of a rank: labels or a teacher


def with_labels(call: Call, labels: Tensor, logits: Tensor, rounding: Tensor) -> Beside:
    """A loss with labels, or log-probabilities of logits with so much rounding."""
    draw = call.draw
    call.common(*MATHS)
    call.take("check_labels", "gradient")
    call.divisor()
    call.weights()
    if "reduce_loss" in draw.case:  # TransformerEngine's name
        call.of_oracle["reduction"] = call.settings["reduction"] = "mean" if draw["reduce_loss"] else "none"
    if "overwrite_input" in draw.case:
        call.settings["overwrite_input"] = draw["overwrite_input"]
    names = log_prob_names(call, labels) if "log_probs" in call.function else ("loss", *outputs_of_loss(call))
    ids = given_ids(call, labels)
    threshold = threshold_of(call, labels, logits.detach().double(), rounding) if draw["threshold"] else None
    call.settings |= {} if threshold is None else {"threshold": threshold}

    def compute(logits: Tensor, rounding: Tensor) -> Truth:
        if ids is not None:
            return of_ids(logits, ids, call.of_oracle, rounding)
        dropped = None if threshold is None else logits.detach() < threshold.unsqueeze(-1)
        with_truth = tuple(name for name in names if name != "predictions")
        return of_labels(logits, labels, call.of_oracle, with_truth, rounding, dropped)

    return Beside(compute, lambda rank: {"labels": labels if ids is None else ids})


def given_ids(call: Call, labels: Tensor) -> Tensor | None:
    """Several ids for each token, some equal and some ignored, of which the label is one; None for the label alone."""
    draw, ignore_index = call.draw, call.of_oracle.get("ignore_index", -100)
    if call.n_ids is None:
        return None
    shape, own = (*labels.shape, call.n_ids - 1), labels.unsqueeze(-1)
    others = torch.where(draw.uniform(*shape) < 0.2, own, draw.ids(shape, call.vocab_size).to(own))
    others = others.masked_fill((draw.uniform(*shape) < 0.2) | (own == ignore_index), ignore_index)
    return draw.placed(torch.cat([own, others], dim=-1), draw.rng.choice(("contiguous", "offset", "gaps")))


def threshold_of(call: Call, labels: Tensor, x: Tensor, rounding: Tensor) -> Tensor:
    """In each row a number between two logits that rounding does not change, below the label's; or below all."""
    own = x.gather(-1, labels.clamp(0, x.shape[-1] - 1).long().unsqueeze(-1))
    upper = x.sort(dim=-1, descending=True).values
    lower = torch.cat([upper[..., 1:], torch.full_like(own, NEG_INF)], dim=-1)
    may_part = (upper <= own) & (upper - lower > 1e-3 * (rounding > 0).unsqueeze(-1))
    place = (call.draw.uniform(*x.shape) * may_part).argmax(dim=-1, keepdim=True)
    return (upper / 2 + lower / 2).masked_fill(~may_part, NEG_INF).gather(-1, place).squeeze(-1).float()


def outputs_of_loss(call: Call) -> list[str]:
    """Take the outputs of a loss, except those that the package refuses; return their names."""
    draw = call.draw
    names = list(draw["outputs"] or ())
    if draw["gradient"] == "in_forward":
        names = [name for name in names if name in ("predictions", "lse")]
    call.settings |= {"outputs": tuple(names)} if names else {}
    return names


def log_prob_names(call: Call, labels: Tensor) -> tuple[str, ...]:
    """Take the outputs and the temperature of log-probabilities; return all their names, in the oracle's order."""
    draw = call.draw
    names = list(draw["outputs"])
    draw.rng.shuffle(names)
    call.settings |= {"outputs": tuple(names)} if names else {}
    call.common("temperature")
    if draw["temperature"] == TENSOR:
        values = draw.uniform(*labels.shape) * 1.5 + 0.3
        if draw.has(0.1) and values.numel() and not draw["teacher"]:
            values.view(-1)[0] = draw.rng.choice((0.0, float("nan"), -1.0))
        dtype = draw.rng.choice((torch.float32, torch.float32, torch.bfloat16))
        values = values[(slice(0, 1),) * values.dim()] if draw.has(0.2) and values.numel() else values
        values = draw.placed(values.to(dtype), draw.rng.choice(("contiguous", "columns")))
        call.settings["temperature"], call.of_oracle["temperature"] = values, values.double()
    return ("log_probs", *(name for name in ("entropy", "lse", "sum_sq_probs", "mean_logit") if name in names))


# ---- teachers ---------------------------------------------------------------------------------------


def teacher_options(call: Call, labels: Tensor) -> Settings:
    """Take the options of a divergence; return the labels, if the call has them."""
    draw = call.draw
    call.common("temperature", "ignore_index", "divergence", "hard_weight")
    call.divisor()
    call.take("check_labels", "gradient")
    if draw["divergence"] == "js":
        call.settings["beta"] = call.of_oracle["beta"] = draw.case.get("beta") or draw.rng.choice((0.5, 0.1, 0.8))
    return {"labels": labels} if draw["labels"] else {}


def divergence_from(
    call: Call, teacher: Tensor, labels: Tensor | None, of_other: Tensor, caps: Settings, of_teachers: Settings
) -> Compute:
    """``caps``: the options of the logits, and ``of_teachers`` those of its own, which may have a cap and a scale."""
    other = teacher.double(), of_teachers, of_other
    return lambda x, rounding: of_capped((x, caps, rounding), other, labels, call.of_oracle)


def with_teacher(call: Call, logits: Tensor, labels: Tensor) -> Beside:
    draw = call.draw
    settings = teacher_options(call, labels)
    teacher = draw.normal(*logits.shape) * 3 + finite(logits).float().clamp(-20, 20) * draw.rng.choice((0.0, 0.5, 1.0))
    teacher, places = call.on_ranks(teacher.masked_fill(logits == NEG_INF, NEG_INF))
    compute = divergence_from(call, teacher, settings.get("labels"), call.no_rounding(), {}, {})
    return Beside(compute, lambda rank: {"teacher": places[rank], **settings})
