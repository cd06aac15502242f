"""``torch.autocast`` and ``GradScaler`` around a head and its loss: right where PyTorch's own loss is."""

import pytest
import torch

from tests.support.frameworks import training
from tests.support.truth.budget import assert_within_budget

LOSSES = {
    "logits": ("logits", {}),
    "logits, in_forward": ("logits", {"gradient": "in_forward"}),
    "logits, out_of_place": ("logits", {"gradient": "out_of_place"}),
    "linear": ("linear", {}),
    "linear, in_forward": ("linear", {"gradient": "in_forward"}),
    "linear, in_backward": ("linear", {"gradient": "in_backward", "chunk_size": 4}),
}
TOO_LARGE, ENOUGH = 2.0**40, 2.0**10  # loss scales: fp16 ends at 2**16


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("precision", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", LOSSES)
def test_autocast_of_head_and_loss(impl_device, name, precision):
    impl, device = impl_device
    loss, options = LOSSES[name]
    steps = [[batch] for batch in training.batches(2, device)]
    found = training.train(training.Model(loss, impl=impl, **options).to(device), steps, precision)
    assert found[0].loss.dtype == torch.float32
    peer = training.train(training.Model("torch").to(device), steps, precision)
    training.assert_same_steps(found, training.fp64_steps(steps), peer, precision)


def scaled_steps(model, given, *, overflow):
    """Return of each step: loss, gradients without the scale, weights before and after, scale after; in fp16."""
    device = given[0][0].device.type
    first = TOO_LARGE if overflow == "scale" else 2 * ENOUGH
    scaler = torch.amp.GradScaler(device, init_scale=first, backoff_factor=ENOUGH / first)
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for index, (tokens, labels) in enumerate(given):
        if overflow == "activations" and index == 0:
            tokens = tokens.index_fill(0, torch.tensor([len(tokens) - 1], device=tokens.device), float("nan"))
        before = training.weights_of(model)
        optimizer.zero_grad()
        with torch.autocast(device, torch.float16):
            loss = model(tokens, labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        gradients = training.gradients_of(model)
        scaler.step(optimizer)
        scaler.update()
        steps.append((loss.detach(), gradients, before, training.weights_of(model), scaler.get_scale()))
    return steps


@pytest.mark.interpreted(2)
@pytest.mark.parametrize("overflow", ("scale", "activations"))
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_that_overflows_is_skipped_and_the_next_one_is_right(impl_device, name, overflow):
    impl, device = impl_device
    loss, options = LOSSES[name]
    given = training.batches(3, device)
    found = scaled_steps(training.Model(loss, impl=impl, **options).to(device), given, overflow=overflow)
    peer = scaled_steps(training.Model("torch").to(device), given, overflow=overflow)
    truth = training.fp64_steps([[batch] for batch in given[1:]])
    # The first step.
    _, gradients, before, after, scale = found[0]
    assert not all(gradient.isfinite().all() for gradient in gradients.values())
    assert all(torch.equal(after[name], before[name]) for name in before) and scale == ENOUGH == peer[0][-1]
    # The next one starts from the same weights, and the one after it from those that it trained.
    assert_within_budget(found[1][0], truth[0].loss, peer[1][0])
    training.assert_same_numbers(found[1][1], truth[0].gradients, peer[1][1], torch.float16)
    for of_step, same in zip(found[1:], peer[1:], strict=True):
        assert of_step[-1] == same[-1] == ENOUGH
        assert all(value.isfinite().all() for numbers in of_step[1:4] for value in numbers.values())
        assert not any(torch.equal(of_step[3][name], of_step[2][name]) for name in before)
