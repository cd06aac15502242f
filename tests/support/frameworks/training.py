"""A small model that ends in a loss, and steps of its training: with PyTorch's loss, or with this package's."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.cases.flat import LinearCrossEntropy
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import VocabParallelCrossEntropy

WIDTH, COLUMNS, ROWS, RATE = 8, 21, 6, 0.1
Numbers = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


class Model(nn.Module):
    """Hidden states, a head and the mean loss: of ``"torch"``, over ``"logits"``, or ``"linear"``, with the head.

    Its state is the same for each of them, and the same in each call.
    """

    def __init__(self, loss: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, COLUMNS, bias=False)
        nn.init.normal_(self.head.weight, std=2.0)
        losses: dict[str, Callable[..., nn.Module]] = {
            "torch": nn.CrossEntropyLoss,
            "logits": VocabParallelCrossEntropy,
            "linear": lambda **options: LinearCrossEntropy(self.head, **options),
        }
        self.loss = losses[loss](**options)

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.body(tokens).tanh()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.hidden(tokens)
        return self.loss(hidden if isinstance(self.loss, LinearCrossEntropy) else self.head(hidden), labels)


def batches(n: int, device: Any = "cpu") -> list[Batch]:
    """Tokens ``[ROWS, WIDTH]`` and labels, some of them ignored, and of each batch another number."""
    generator, made = torch.Generator().manual_seed(0), []
    for index in range(n):
        labels = torch.randint(0, COLUMNS, (ROWS,), generator=generator)
        labels[: 1 + index % 3] = IGNORE_INDEX
        made.append((torch.randn(ROWS, WIDTH, generator=generator).to(device), labels.to(device)))
    return made


def double(given: Iterable[Batch]) -> list[Batch]:
    return [(tokens.double(), labels) for tokens, labels in given]


def weights_of(model: nn.Module) -> Numbers:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module) -> Numbers:
    assert all(parameter.grad is not None for parameter in model.parameters())
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


class Step(NamedTuple):
    """One step: the sum of its losses, each divided by their number, the gradients, and the weights after it."""

    loss: Tensor
    gradients: Numbers
    weights: Numbers


def train(model: nn.Module, steps: Sequence[Sequence[Batch]], precision: torch.dtype | None = None) -> list[Step]:
    """Train with SGD by hand: a step accumulates the gradients of the mean of its batches' losses.

    Args:
        precision: of autocast, or None.
    """
    optimizer, done = torch.optim.SGD(model.parameters(), lr=RATE), []
    for of_step in steps:
        optimizer.zero_grad()
        losses = []
        for tokens, labels in of_step:
            device = tokens.device.type
            with torch.autocast(device, precision) if precision is not None else nullcontext():
                losses.append(model(tokens, labels) / len(of_step))
            losses[-1].backward()
        optimizer.step()
        loss = torch.stack(losses).sum().detach()
        done.append(Step(loss, gradients_of(model), weights_of(model)))
    return done


def fp64_steps(steps: Sequence[Sequence[Batch]]) -> list[Step]:
    """What training gives in fp64 with PyTorch's loss."""
    on_cpu = [[(tokens.cpu(), labels.cpu()) for tokens, labels in of_step] for of_step in steps]
    return train(Model("torch").double(), [double(of_step) for of_step in on_cpu])


def assert_same_numbers(found: Numbers, truth: Numbers, peer: Numbers, precision: torch.dtype = torch.float32) -> None:
    """Within the budget, name by name; ``precision`` is that of the products and of the gradients in them."""
    assert found.keys() == truth.keys() == peer.keys()
    for name, value in found.items():
        assert value.dtype == peer[name].dtype == torch.float32
        assert_within_budget(value.to(precision), truth[name], peer[name].to(precision), roundings=2)


def assert_same_steps(
    found: Sequence[Step], truth: Sequence[Step], peer: Sequence[Step], precision: torch.dtype = torch.float32
) -> None:
    """Losses and gradients, and weights that are precise enough to show a step."""
    for each in zip(found, truth, peer, strict=True):
        loss, true, peers = (step.loss for step in each)
        assert_within_budget(loss.to(precision), true, peers.to(precision))
        assert_same_numbers(*(step.gradients for step in each), precision)
        if precision == torch.float32:
            assert_same_numbers(*(step.weights for step in each))
