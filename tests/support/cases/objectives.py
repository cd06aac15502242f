"""Objectives of reinforcement learning, as docs/objective.md has them, and the numbers that they take."""

import torch
from torch import Tensor


def ppo(log_probs, advantage, old, entropy, **_):
    ratio = (log_probs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * entropy


def grpo(log_probs, advantage, old, reference, **_):
    ratio, difference = (log_probs - old).exp(), reference - log_probs
    k3 = difference.exp() - difference - 1
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.04 * k3


def dapo(log_probs, advantage, old, **_):
    ratio = (log_probs - old).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -torch.where(advantage < 0, torch.maximum(clipped, 10 * advantage), clipped)


def cispo(log_probs, advantage, old, **_):
    ratio = (log_probs - old).exp().clamp(max=1.28)
    return -ratio.detach() * advantage * log_probs


def distilled(log_probs, reference, entropy, **_):
    """The reverse divergence of sampled tokens, whose gradient is that of REINFORCE."""
    return (log_probs - reference).detach() * log_probs - 0.02 * entropy


OBJECTIVES = {each.__name__: each for each in (ppo, grpo, dapo, cispo, distilled)}


def numbers_of(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Numbers of each token: advantages of both signs, the second 0, and log-probabilities."""
    generator = torch.Generator().manual_seed(7)
    advantage, old, reference = torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    advantage.view(-1)[1:2] = 0.0
    numbers = {"advantage": advantage, "old": old - 3, "reference": reference - 3}
    return {name: number.float() for name, number in numbers.items()}
