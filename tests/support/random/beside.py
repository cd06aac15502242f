"""What a random call has beside its logits or hidden states: labels or a teacher; and the truth of each."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.random.call import MATHS, Call, Settings
from tests.support.random.inputs import NEG_INF
from tests.support.random.tables import TENSOR
from tests.support.random.truth import Truth, finite, of_labels, of_teacher

Compute = Callable[[Tensor, Tensor], Truth]


class Beside(NamedTuple):
    compute: Compute  # the truth of fp64 logits and their rounding
    tensors: Callable[[int], Settings]  # of a rank: labels or a teacher


def with_labels(call: Call, labels: Tensor) -> Beside:
    """A loss with labels, or log-probabilities."""
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

    def compute(logits: Tensor, rounding: Tensor) -> Truth:
        with_truth = tuple(name for name in names if name != "predictions")
        return of_labels(logits, labels, call.of_oracle, with_truth, rounding)

    return Beside(compute, lambda rank: {"labels": labels})


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
        if draw.has(0.1) and values.numel():
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


def divergence_from(call: Call, teacher: Tensor, labels: Tensor | None, of_other: Tensor) -> Compute:
    return lambda x, rounding: of_teacher(x, teacher.double(), labels, call.of_oracle, rounding, of_other)


def with_teacher(call: Call, logits: Tensor, labels: Tensor) -> Beside:
    draw = call.draw
    settings = teacher_options(call, labels)
    teacher = draw.normal(*logits.shape) * 3 + finite(logits).float().clamp(-20, 20) * draw.rng.choice((0.0, 0.5, 1.0))
    teacher, places = call.on_ranks(teacher.masked_fill(logits == NEG_INF, NEG_INF))
    compute = divergence_from(call, teacher, settings.get("labels"), call.no_rounding())
    return Beside(compute, lambda rank: {"teacher": places[rank], **settings})
