"""Objectives of whole groups of tokens, as sequences and pairs, and what they are in fp64, one group at a time."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.cases.flat import linear_objective

SEQUENCES, LENGTH, WIDTH, COLUMNS, IGNORED = 40, 10, 8, 40, -100
VALID = (torch.arange(SEQUENCES) * 7 % LENGTH + 1)[:, None] > torch.arange(LENGTH)


def sigmoid(margin):
    return -F.logsigmoid(margin)


def hinge(margin):
    return (1 - margin).relu()


def ipo(margin):
    return (margin / 0.1 - 5) ** 2


def robust(margin):
    return (0.1 * F.logsigmoid(-margin) - 0.9 * F.logsigmoid(margin)) / 0.8


def exo(margin):
    return sum(F.logsigmoid(z).exp() * (F.logsigmoid(z) - math.log(p)) for z, p in ((margin, 0.9), (-margin, 0.1)))


def dpo(log_probs, groups, sign, reference, form=sigmoid, **_):
    return form(0.1 * (groups.sum(sign * log_probs) - groups.of(reference)))


def cpo(log_probs, groups, sign, **_):
    chosen = (sign > 0).float()
    likelihood = groups.sum(log_probs * chosen) / groups.sum(chosen).clamp(min=1)
    return -F.logsigmoid(0.1 * groups.sum(sign * log_probs)) - likelihood


def simpo(log_probs, groups, sign, **_):
    means = [groups.sum(log_probs * side) / groups.sum(side).clamp(min=1) for side in (sign > 0, sign < 0)]
    return -F.logsigmoid(2 * (means[0] - means[1]) - 0.5)


def orpo(log_probs, groups, sign, **_):
    sides = [(sign * side > 0).float() for side in (1, -1)]
    chosen, other = [groups.sum(log_probs * side) / groups.sum(side).clamp(min=1) - 0.1 for side in sides]
    odds = chosen - other - (torch.log1p(-chosen.exp()) - torch.log1p(-other.exp()))
    return -chosen - 0.2 * F.logsigmoid(odds)


def kto(log_probs, groups, reference, is_right, kl=0.05, **_):
    reward = 0.1 * (groups.sum(log_probs) - groups.of(reference)) - kl
    return 1 - torch.sigmoid(torch.where(groups.of(is_right), reward, -reward))


def sequence_kl(log_probs, groups, old, **_):
    difference = (old - log_probs).clamp(max=20)
    return groups.mean(difference.exp() - difference - 1)


def gspo(log_probs, groups, old, reference, **_):
    ratio, advantage = groups.mean(log_probs - old).exp(), groups.of(reference)
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def gspo_with_kl(log_probs, groups, old, reference, **_):
    return gspo(log_probs, groups, old, reference) + 0.04 * sequence_kl(log_probs, groups, old)


def gspo_token(log_probs, groups, old, sign, **_):
    ratio = groups.to_tokens(groups.mean(log_probs - old).exp()).detach() * (log_probs - log_probs.detach()).exp()
    return groups.mean(-torch.minimum(ratio * sign, ratio.clamp(0.8, 1.2) * sign))


def every_second(sequence: Tensor) -> Tensor:
    """Ids that are not in the order of the tokens, the two halves of a pair far from each other; the last has none."""
    pair = sequence % (SEQUENCES // 2)
    return (pair * 7 % 20 * 3).masked_fill(pair == SEQUENCES // 2 - 1, -1)


KINDS = {
    "pairs": lambda sequence, token: every_second(sequence),
    "sequences": lambda sequence, token: SEQUENCES - 1 - sequence,
    "tokens": lambda sequence, token: SEQUENCES * token + sequence,
    "all": lambda sequence, token: torch.zeros_like(token),
}
PAIRS = {each.__name__: each for each in (simpo, orpo, cpo)}
PAIRS |= {f"dpo, {form.__name__}": partial(dpo, form=form) for form in (sigmoid, hinge, ipo, robust, exo)}
OF_SEQUENCES = {each.__name__: each for each in (kto, gspo, gspo_with_kl, gspo_token, sequence_kl)}
OF_SEQUENCES["kto without kl"] = partial(kto, kl=0.0)
CASES = {name: (each, "pairs") for name, each in PAIRS.items()}
CASES |= {name: (each, "sequences") for name, each in OF_SEQUENCES.items()}
CASES |= {"gspo, of tokens": (gspo, "tokens"), "dpo, of all": (dpo, "all")}


class Case(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    together: Tensor
    tokens: dict[str, Tensor]
    numbers: dict[str, Tensor]


def made(kind: str) -> Case:
    generator = torch.Generator().manual_seed(0)
    shape, n_numbers = (SEQUENCES, LENGTH), SEQUENCES * LENGTH
    hidden, weight = (torch.randn(*of, WIDTH, generator=generator) for of in (shape, (COLUMNS,)))
    labels = torch.randint(0, COLUMNS, shape, generator=generator).masked_fill(~VALID, IGNORED)
    sequence, token = (each.expand(shape) for each in (torch.arange(SEQUENCES)[:, None], torch.arange(LENGTH)))
    sign = torch.where(sequence < SEQUENCES // 2, 1.0, -1.0)
    old = torch.randn(shape, generator=generator) - 4
    reference = torch.randn(n_numbers, generator=generator)
    numbers = {"reference": reference, "is_right": torch.arange(n_numbers) % 3 > 0}
    together = torch.where(torch.arange(LENGTH) < LENGTH - 1, KINDS[kind](sequence, token), -1)  # some in each sequence
    return Case(hidden, weight, labels, together.contiguous(), {"sign": sign, "old": old}, numbers)


class One(NamedTuple):
    """A group alone."""

    id: int

    def sum(self, values):
        return values.sum(0, keepdim=True)

    def mean(self, values):
        return values.double().mean(0, keepdim=True)

    def of(self, numbers):
        return numbers[self.id : self.id + 1]

    def to_tokens(self, values):
        return values


def truth_of(objective, case: Case):
    """The mean over groups, its gradients, log-probabilities and the number of groups."""
    leaves = [t.double().requires_grad_() for t in (case.hidden, case.weight)]
    log_probs = (F.linear(*leaves) * 0.3).log_softmax(-1).gather(-1, case.labels.clamp(min=0)[..., None]).squeeze(-1)
    counts = (case.labels != IGNORED) & (case.together != -1)
    numbers = {n: t.double() if t.is_floating_point() else t for n, t in case.numbers.items()}
    values = []
    for group in case.together[counts].unique().tolist():
        own = counts & (case.together == group)
        tokens = {name: t[own].double() for name, t in case.tokens.items()}
        values.append(objective(log_probs[own], groups=One(group), **tokens, **numbers))
    loss = torch.cat(values).mean()
    found = torch.where(counts, log_probs, 0.0).detach()
    return loss.detach(), *torch.autograd.grad(loss, leaves), found, len(values)


def call(case: Case, objective, device=None, n_ranks=1, rank=0, weight=None, **options: Any):
    """Loss, gradients and log-probabilities of this rank's columns."""
    weight = case.weight.chunk(n_ranks)[rank].clone().to(device) if weight is None else weight
    leaves = case.hidden.clone().to(device).requires_grad_(), weight.requires_grad_()
    tokens, numbers = ({n: t.to(device) for n, t in each.items()} for each in (case.tokens, case.numbers))
    given = {"together": case.together.to(device), "tokens": tokens, "numbers": numbers, "logit_scale": 0.3}
    loss, found = linear_objective(*leaves, case.labels.to(device), objective, **given | options)
    loss.backward()
    return [t.detach().cpu() for t in (loss, *(leaf.grad for leaf in leaves), found.log_probs)]


def check(results, objective, case: Case, factor=1.0):
    loss, d_hidden, d_weight, log_probs, _ = truth_of(objective, case)
    for found, part in zip(results, d_weight.chunk(len(results)), strict=True):
        for value, right in zip(found, (factor * loss, factor * d_hidden, factor * part, log_probs), strict=True):
            torch.testing.assert_close(value.double(), right, rtol=2e-5, atol=4e-6 * float(right.abs().max()))
        assert torch.equal(found[0], results[0][0]) and torch.equal(found[1], results[0][1])
