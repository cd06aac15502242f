"""Calls of an objective with a teacher, and what they must return: the oracle of ``tests/soft/test_teacher.py``.

The oracle is autograd over both models' logits, in fp64, and in fp32 to see what PyTorch's arithmetic loses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases.flat import linear_objective
from tests.support.cases.inputs import IGNORE_INDEX, NEG_INF, padded_shard
from tests.support.ranks.case import BOUNDS, assembled, even
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import Teacher, VocabShard

TOKENS, COLUMNS, WIDTH, OF_TEACHER = 8, 40, 12, 7
GRAD_OUTPUT = 0.75
LEAVES = ("hidden", "weight", "bias")
OUTPUTS = ("log_probs", "entropy", "divergence")


class Models(NamedTuple):
    """Both heads over the whole vocabulary, and numbers of each token."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    teacher_bias: Tensor
    labels: Tensor
    tokens: dict[str, Tensor]


def models(
    dtype: torch.dtype = torch.float32, of_teacher: torch.dtype = torch.float32, columns: int = COLUMNS
) -> Models:
    """Two models that agree in part; numbers of 16 bits are multiples of 1/4, whose products are exact."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, to: torch.dtype = torch.float32) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return drawn if to.itemsize == 4 else (4 * drawn).round().clamp(-8, 8).div(4).to(to)

    hidden, weight = draw(TOKENS, WIDTH, to=dtype), draw(columns, WIDTH, to=dtype)
    teacher_hidden = draw(TOKENS, OF_TEACHER, to=of_teacher)
    teacher_weight = draw(columns, OF_TEACHER, to=of_teacher)
    biases = draw(columns, to=dtype), draw(columns, to=of_teacher)
    labels = torch.randint(0, columns, (TOKENS,), generator=generator)
    labels[::2] = F.linear(hidden, weight, biases[0]).argmax(-1)[::2]
    advantage = draw(TOKENS)
    mask = torch.ones(TOKENS).index_fill(0, torch.tensor([1, 6]), 0.0)
    tokens = {"advantage": advantage, "mask": mask}
    return Models(hidden, weight, biases[0], teacher_hidden, teacher_weight, biases[1], labels, tokens)


def objective(log_probs=None, *, divergence, advantage, mask, entropy=None):
    """Of all quantities that there are; each has a derivative of its own in each token."""
    return mask * sum(terms(log_probs, divergence, advantage, entropy))


def terms(log_probs, divergence, advantage, entropy):
    """What an objective adds up."""
    added = [(1 + advantage) * divergence, 0.1 * divergence**2]
    if log_probs is not None:
        added += [-advantage * log_probs, -0.5 * (2 - advantage) * entropy]
    return added


def quantities(student: Tensor, teacher: Tensor, labels: Tensor | None, case: dict[str, Any]) -> dict[str, Tensor]:
    """Log-probabilities and entropy, if there are labels, and the divergence, of logits ``[N, V]`` in their dtype."""
    softcap, scale, of_teacher, teacher_scale = case["caps"]
    temperature, T = case["temperatures"]
    z, w = (
        u if cap is None else cap * torch.tanh(u / cap)
        for u, cap in ((student * scale, softcap), (teacher * teacher_scale, of_teacher))
    )
    p, q = (z / T).log_softmax(-1), (w / T).log_softmax(-1)
    kind, beta = case["divergence"]
    m = (beta * q.exp() + (1 - beta) * p.exp()).log()
    forward, reverse = ((a.exp() * (a - b)).sum(-1) for a, b in ((q, p), (p, q)))
    js = beta * (q.exp() * (q - m)).sum(-1) + (1 - beta) * (p.exp() * (p - m)).sum(-1)
    found = {"divergence": {"forward": forward, "reverse": reverse, "js": js}[kind]}
    if labels is not None:
        rows = case.get("rows", ())
        x = z.masked_fill(student < threshold_of(case).to(z), NEG_INF) if "threshold" in rows else z
        t = temperature_of(case).to(z) if "temperature" in rows else temperature
        log_p = (x / t).log_softmax(-1)
        found["log_probs"] = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        found["entropy"] = -(log_p.exp() * log_p.masked_fill(log_p == NEG_INF, 0.0)).sum(-1)
    return found


def temperature_of(case: dict[str, Any]) -> Tensor:
    """``[N, 1]`` of each token's labels."""
    return torch.linspace(0.6, 1.7, TOKENS).unsqueeze(-1)


def threshold_of(case: dict[str, Any]) -> Tensor:
    """``[N, 1]``: some logits are below it, none of the labels."""
    return torch.linspace(-6.0, -1.0, TOKENS).unsqueeze(-1) - 3.0 * (case["labels"] != "above")


def labels_of(case: dict[str, Any], made: Models) -> Tensor | None:
    """None, all of them, or with two ignored."""
    if case["labels"] is None:
        return None
    return made.labels.index_fill(0, torch.tensor([3, 4] if case["labels"] == "some" else []).long(), IGNORE_INDEX)


class Right(NamedTuple):
    """What a call must return."""

    values: dict[str, Tensor]  # loss, outputs and gradients
    of_loss: float  # the sum of the sizes of what the loss adds up
    of_hidden: Tensor | None  # the sum of the sizes of the ranks' parts of the hidden states' gradient


def right(case: dict[str, Any], made: Models, dtype: torch.dtype, bounds: Sequence[tuple[int, int]]) -> Right:
    """In ``dtype``: fp64 is the truth, fp32 what PyTorch makes of it; the latter rounds the logits' gradient."""
    hidden, weight, bias, *teacher = (tensor.to(dtype) for tensor in made[:6])
    labels, numbers = labels_of(case, made), {name: number.to(dtype) for name, number in made.tokens.items()}
    counted = torch.ones(TOKENS, dtype=torch.bool) if labels is None else labels != IGNORE_INDEX
    logits = F.linear(hidden, weight, bias).requires_grad_()
    found = quantities(logits, F.linear(*teacher), labels, case)
    divisor = {"mean": counted.sum(), "sum": 1}.get(case["divisor"], case["divisor"])
    loss = torch.where(counted, objective(**found, **numbers), 0.0).sum() / divisor
    (grad,) = torch.autograd.grad(loss, logits)
    grad = grad if dtype == torch.float64 else grad.to(made.hidden.dtype).to(dtype)
    outputs = {name: torch.where(counted, value, 0.0).detach() for name, value in found.items()}
    added = terms(found.get("log_probs"), found["divergence"], numbers["advantage"], found.get("entropy"))
    of_loss = float(sum((each.abs() * counted).sum() for each in added) / divisor)
    of_hidden = sum((grad[:, a:b] @ weight[a:b]).abs() for a, b in bounds) if len(bounds) > 1 else None
    gradients = {"hidden": grad @ weight, "weight": grad.t() @ hidden, "bias": grad.sum(0)}
    gradients = {name: GRAD_OUTPUT * gradient for name, gradient in gradients.items()}
    return Right({"loss": loss.detach(), **outputs, **gradients}, of_loss, of_hidden)


def bounds_of(case: dict[str, Any], made: Models, n_ranks: int) -> Sequence[tuple[int, int]]:
    return BOUNDS[case.get("columns", "even")].get(n_ranks, even(len(made.weight) // n_ranks, n_ranks))


def call(case: dict[str, Any], made: Models, impl_device: tuple[str, str], rank: int, group: Any) -> dict[str, Any]:
    """One rank's call and its backward: loss, outputs and gradients."""
    (impl, device), n_ranks = impl_device, 1 if group is None else group.size()
    start, stop = bounds_of(case, made, n_ranks)[rank]

    def rows(whole: Tensor) -> Tensor:
        return padded_shard(whole.t(), start, stop, 300.0).t().contiguous().to(device)

    labels, frozen = labels_of(case, made), case.get("frozen", ())
    hidden = made.hidden.chunk(n_ranks)[rank] if case.get("form") == "sequence_parallel" else made.hidden
    leaves = {"hidden": hidden.clone().to(device), "weight": rows(made.weight), "bias": rows(made.bias)}
    leaves = {name: leaf.requires_grad_(name not in frozen) for name, leaf in leaves.items()}
    softcap, logit_scale, of_teacher, teacher_scale = case["caps"]
    kind, beta = case["divergence"]
    options: dict[str, Any] = {"softcap": softcap, "logit_scale": logit_scale, "group": group, "impl": impl}
    options |= {"vocab_size": VocabShard(start, stop, len(made.weight)), "chunk_size": case.get("chunk_size", "auto")}
    options |= {"sequence_parallel": case.get("form") == "sequence_parallel", "logits_dtype": case.get("logits_dtype")}
    options |= {"reduction": "sum"} if case["divisor"] == "sum" else {}
    options |= {"num_items": case["divisor"]} if isinstance(case["divisor"], float) else {}
    if labels is not None:
        options |= {"outputs": ("divergence", "entropy"), "temperature": case["temperatures"][0]}
        of_rows = {"temperature": temperature_of(case), "threshold": threshold_of(case)}
        options |= {name: of_rows[name].squeeze(-1).to(device) for name in case.get("rows", ())}
    if case.get("form") == "main_grad":
        options["main_grad"] = torch.full(leaves["weight"].shape, 0.5, device=device)
    teacher = Teacher(
        made.teacher_hidden.to(device),
        rows(made.teacher_weight),
        rows(made.teacher_bias),
        of_teacher,
        teacher_scale,
        case["temperatures"][1],
        kind,
        beta,
    )
    loss, found = linear_objective(
        leaves["hidden"],
        leaves["weight"],
        None if labels is None else labels.to(device),
        objective,
        bias=leaves["bias"],
        tokens={name: number.to(device) for name, number in made.tokens.items()},
        teacher=teacher,
        **options,
    )
    (loss * GRAD_OUTPUT).backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items()}
    if case.get("form") == "main_grad":
        assert gradients["weight"] is None
        gradients["weight"] = options["main_grad"] - 0.5
    outputs = {name: getattr(found, name) for name in OUTPUTS if getattr(found, name) is not None}
    assert not any(output.requires_grad for output in outputs.values())
    returned = {"loss": loss, **outputs, **gradients}
    return {name: each if each is None else each.detach().cpu() for name, each in returned.items()}


def check(case: dict[str, Any], made: Models, results: Sequence[dict[str, Any]]) -> None:
    """Outputs have the same bits on all ranks, and everything is what the whole vocabulary gives in fp64."""
    first, *others = results
    bounds, frozen = bounds_of(case, made, len(results)), case.get("frozen", ())
    (truth, of_loss, of_hidden), (peer, *_) = (right(case, made, d, bounds) for d in (torch.float64, torch.float32))
    assert first.keys() == truth.keys()
    for name in first.keys() - {*LEAVES}:
        assert all(torch.equal(first[name], other[name]) for other in others), f"{name}: differs between the ranks"
        assert_within_budget(first[name], truth[name], peer[name], of_loss if name == "loss" else 0.0)
    for name in LEAVES:
        parts = [result[name] for result in results]
        assert all((part is None) == (name in frozen) for part in parts), name
        if name in frozen:
            continue
        if name != "hidden":
            whole = assembled(bounds, parts, len(made.weight))
        elif case.get("form") == "sequence_parallel":
            whole = torch.cat(parts)
        else:
            whole = parts[0]
            assert all(torch.equal(whole, part) for part in parts[1:]), "gradient of hidden: differs between the ranks"
        # Backward multiplies what forward has rounded.
        summands = of_hidden if name == "hidden" else None
        assert_within_budget(whole, truth[name], peer[name], roundings=2, summands=summands)
