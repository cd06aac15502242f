"""What stands beside the logits of a random call: labels, targets or a teacher; the truth, and one call."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.random.call import MATHS, UNITS, Call, Settings
from tests.support.random.inputs import NEG_INF
from tests.support.random.tables import TENSOR
from tests.support.random.truth import Numbers, Truth, finite, of_labels, of_targets, of_teacher, of_topk, transformed

LOG_PROBS = ("log_probs", "entropy", "lse", "sum_sq_probs", "mean_logit")


class Beside(NamedTuple):
    """What stands beside the logits, and the truth over them."""

    compute: Callable[[Tensor, Tensor], Truth]  # of fp64 logits and their rounding
    tensors: Callable[[int], Settings]  # of a rank: labels, targets or a teacher
    check: Callable[[Numbers, Tensor, Tensor], None]  # of what has no gradient, with clean fp64 logits


def with_labels(call: Call, labels: Tensor) -> Beside:
    """A loss with labels, or log-probabilities."""
    draw, is_loss = call.draw, call.function.endswith("cross_entropy")
    call.common(("ignore_index", "softcap", "logit_scale", *(MATHS if is_loss else ())))
    for name in ("check_labels", "gradient"):
        if draw[name] is not None:
            call.settings[name] = draw[name]
    if is_loss:
        call.divisor()
        call.weights()
        names = ("loss", *asked_of_loss(call))
    else:
        names = log_prob_names(call, labels)

    def compute(logits: Tensor, rounding: Tensor) -> Truth:
        asked = tuple(name for name in names if name != "predictions")
        return of_labels(logits, labels, call.of_oracle, asked, rounding)

    def check(found: Numbers, logits: Tensor, rounding: Tensor) -> None:
        check_ids(call, found, logits, labels, rounding)

    return Beside(compute, lambda rank: {"labels": labels}, check)


def asked_of_loss(call: Call) -> list[str]:
    """Take what is asked beside a loss, except what the package refuses; return the names."""
    draw = call.draw
    asked = list(draw["outputs"] or ())
    if draw["gradient"] == "in_forward":
        asked = [name for name in asked if name in ("predictions", "lse")]
    call.settings |= {"outputs": tuple(asked)} if asked else {}
    return asked


def log_prob_names(call: Call, labels: Tensor) -> tuple[str, ...]:
    """Take what is asked of log-probabilities, and return the names of the oracle's values."""
    draw = call.draw
    asked = list(draw["outputs"])
    draw.rng.shuffle(asked)
    call.settings |= {"outputs": tuple(asked)} if asked else {}
    call.of_oracle["temperature"] = call.settings["temperature"] = draw["temperature"]
    if draw["temperature"] == TENSOR:
        values = draw.uniform(*labels.shape) * 1.5 + 0.3
        if draw.has(0.1) and values.numel():
            values.view(-1)[0] = draw.rng.choice((0.0, float("nan"), -1.0))
        dtype = draw.rng.choice((torch.float32, torch.float32, torch.bfloat16))
        values = values[(slice(0, 1),) * values.dim()] if draw.has(0.2) and values.numel() else values
        values = draw.placed(values.to(dtype), draw.rng.choice(("contiguous", "columns")))
        call.settings["temperature"], call.of_oracle["temperature"] = values, values.double()
    return ("log_probs", *(name for name in LOG_PROBS[1:] if name in asked))


def check_ids(call: Call, found: Numbers, logits: Tensor, labels: Tensor, rounding: Tensor) -> None:
    """Predictions and accuracy are those of logits that cannot be told from the largest."""
    options, n_columns = call.of_oracle, logits.shape[-1]
    z, ignored = transformed(logits, options), labels == options.get("ignore_index", -100)
    is_exact = options.get("softcap") is None and options.get("logit_scale", 1.0) == 1 and not rounding.any()
    is_exact = is_exact and not isinstance(options.get("temperature"), Tensor) and options.get("temperature", 1.0) == 1
    slack = (rounding + finite(z).abs().amax(-1)) * (0 if is_exact else UNITS * 2.0**-23)
    z_max, temperature = z.amax(-1), options.get("temperature", 1.0)
    known = z_max.isfinite() & ~ignored
    if isinstance(temperature, Tensor):
        known = known & ((temperature > 0) & temperature.isfinite())
    if "predictions" in found:
        ids = found["predictions"]
        assert torch.equal(ids >= 0, known), "predictions: known in other rows"
        assert bool((ids < z.shape[-1]).all()), "predictions: outside the vocabulary"
        at = z.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        assert bool((at >= z_max - slack)[known].all()), "predictions: not the largest"
        if is_exact:
            columns = torch.arange(n_columns, device=z.device)
            first = torch.where(z == z_max.unsqueeze(-1), columns, n_columns).amin(-1)
            assert torch.equal(ids[known], first[known]), "predictions: not the first of equals"


# ---- targets and teachers ---------------------------------------------------------------------------------------


def with_targets(call: Call, logits: Tensor) -> Beside:
    draw = call.draw
    call.common(("label_smoothing", "z_loss", "softcap", "logit_scale", "gradient"))
    call.of_oracle.pop("gradient", None)
    call.of_oracle = {"softcap": None, **call.of_oracle}
    call.divisor()
    call.weights()
    own = (draw.normal(*logits.shape) * 3).masked_fill(logits == NEG_INF, NEG_INF)
    targets = own.softmax(-1).nan_to_num(0.0)
    if draw.has(0.3):
        targets = torch.nn.functional.one_hot(own.argmax(-1), call.vocab_size).float()
    targets = targets * draw.rng.choice((1.0, 1.0, 1.7)) * (draw.uniform(*logits.shape) < draw.rng.choice((1.0, 0.7)))
    targets = draw.shared(targets.to(draw["other_dtype"]), "other_layout")
    places = [draw.placed(call.shard_of(targets, rank), draw["other_layout"]) for rank in range(call.ranks)]

    def compute(x: Tensor, rounding: Tensor) -> Truth:
        return of_targets(x, targets, call.of_oracle, rounding)

    return Beside(compute, lambda rank: {"targets": places[rank]}, no_check)


def no_check(found: Numbers, logits: Tensor, rounding: Tensor) -> None:
    return None


def teacher_options(call: Call, labels: Tensor) -> Settings:
    """Take the options of a divergence; return the labels, if the call has them."""
    draw = call.draw
    call.common(("temperature", "ignore_index"))
    call.divisor()
    call.settings |= {name: draw[name] for name in ("check_labels", "gradient") if draw[name] is not None}
    if draw["divergence"] is not None:
        call.common(("divergence", "hard_weight"))
        if draw["divergence"] == "js":
            call.settings["beta"] = call.of_oracle["beta"] = draw.rng.choice((0.5, 0.1, 0.8))
    else:
        rest = draw["rest"] if call.vocab_size > draw["k"] else "ignore"
        call.settings["rest"] = call.of_oracle["rest"] = rest
    return {"labels": labels} if draw["labels"] else {}


def with_teacher(call: Call, logits: Tensor, labels: Tensor) -> Beside:
    draw = call.draw
    given = teacher_options(call, labels)
    teacher = draw.normal(*logits.shape) * 3 + finite(logits).float().clamp(-20, 20) * draw.rng.choice((0.0, 0.5, 1.0))
    teacher = teacher.masked_fill(logits == NEG_INF, NEG_INF)
    teacher = draw.shared(teacher.to(draw["other_dtype"]), "other_layout")
    places = [draw.placed(call.shard_of(teacher, rank), draw["other_layout"]) for rank in range(call.ranks)]

    def compute(x: Tensor, rounding: Tensor) -> Truth:
        return of_teacher(
            x, teacher.double(), given.get("labels"), call.of_oracle, rounding, torch.zeros_like(rounding)
        )

    return Beside(compute, lambda rank: {"teacher": places[rank], **given}, no_check)


def with_tokens(call: Call, labels: Tensor) -> Beside:
    """A teacher that is known at k tokens."""
    draw = call.draw
    k = min(draw["k"], call.vocab_size - (draw["rest"] == "bucket"), call.vocab_size) or 1
    given = teacher_options(call, labels)
    ids = draw.uniform(*labels.shape, call.vocab_size).topk(k, dim=-1).indices
    log_probs = (draw.normal(*ids.shape) * 2).log_softmax(-1) + draw.rng.choice((0.0, -0.3, -2.0))
    if draw.has(0.3):
        log_probs = log_probs.masked_fill(draw.uniform(*ids.shape) < 0.3, NEG_INF)
    if draw.has(0.1) and not draw["check_labels"] and ids.numel():
        ids.view(-1, k)[0, 0] = draw.rng.choice((-1, call.vocab_size))
    log_probs = draw.placed(log_probs.to(draw.rng.choice((torch.float32, torch.bfloat16))), "columns")
    ids = draw.placed(ids.int() if draw["int32"] else ids, draw.rng.choice(("contiguous", "gaps")))

    def compute(x: Tensor, rounding: Tensor) -> Truth:
        return of_topk(x, ids, log_probs.double(), given.get("labels"), call.of_oracle, rounding)

    tensors = {"teacher_ids": ids, "teacher_log_probs": log_probs, **given}
    return Beside(compute, lambda rank: tensors, no_check)


def gradients_of(
    call: Call, beside: Beside, logits: Tensor, rounding: Tensor, found: Numbers, given: Numbers | None = None
) -> tuple[Truth, Numbers, Tensor]:
    """The truth, the upstream gradients, those given or new ones, and the gradient of the logits in fp64."""
    leaf = logits.detach().double().requires_grad_()
    truth = beside.compute(leaf, rounding)
    if given is None:
        is_pair = call.function == "cross_entropy_forward"  # without autograd
        names = [name for name in truth.outputs if is_pair or found[name].requires_grad]
        if call.draw["gradient"] == "in_forward":  # which knows the loss's gradient alone
            names = ["loss"]
        given = call.upstream(found, names)
    outputs = [truth.outputs[name] for name in given]
    factors = [value.to(output) for value, output in zip(given.values(), outputs, strict=True)]
    (grad,) = torch.autograd.grad(outputs, leaf, factors)
    return truth, given, grad
