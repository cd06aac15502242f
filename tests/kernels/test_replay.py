"""Programs: a call that launches again what an earlier call launched has the bits of a call that works it out."""

from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch

from tests.support.kernels.interpreted_programs import interpreted_programs
from tests.support.kernels.launch_shapes import BY_SIZE, ONE, SEVERAL, forget_plans, programs
from vocab_parallel_ce import distillation_loss, token_log_probs, vocab_parallel_cross_entropy

pytest.importorskip("triton")
from vocab_parallel_ce.kernels import replay
from vocab_parallel_ce.kernels.launch import Record

LANES = [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.cuda)]
ROWS, COLUMNS = 3, 2048
LOSSES = {
    "none": lambda x, y, t: vocab_parallel_cross_entropy(x, y, reduction="none", impl="triton"),
    "mean": lambda x, y, t: vocab_parallel_cross_entropy(x, y, impl="triton"),
    "sum": lambda x, y, t: vocab_parallel_cross_entropy(x, y, reduction="sum", impl="triton", softcap=5.0),
    "items": lambda x, y, t: vocab_parallel_cross_entropy(x, y, num_items=2, impl="triton"),
    "items, a tensor": lambda x, y, t: vocab_parallel_cross_entropy(x, y, num_items=y[:1].abs() + 1, impl="triton"),
    "smoothing": lambda x, y, t: vocab_parallel_cross_entropy(x, y, label_smoothing=0.1, impl="triton"),
    "weights": lambda x, y, t: vocab_parallel_cross_entropy(x, y, class_weight=t[0].exp(), impl="triton"),
    "padding": lambda x, y, t: vocab_parallel_cross_entropy(x, y, vocab_size=COLUMNS - 2, impl="triton"),
    "in_backward": lambda x, y, t: vocab_parallel_cross_entropy(x, y, gradient="in_backward", impl="triton"),
    "in_forward": lambda x, y, t: vocab_parallel_cross_entropy(x, y, gradient="in_forward", impl="triton"),
    "out_of_place": lambda x, y, t: vocab_parallel_cross_entropy(x, y, gradient="out_of_place", impl="triton"),
    "log_probs": lambda x, y, t: token_log_probs(x, y, impl="triton"),
    "temperature": lambda x, y, t: token_log_probs(x, y, temperature=t[:, 0].exp(), impl="triton"),
    "threshold": lambda x, y, t: token_log_probs(x, y, threshold=t[:, 0] - 3, impl="triton"),
    "entropy": lambda x, y, t: token_log_probs(x, y, outputs=("entropy",), impl="triton").entropy,
    "probabilities": lambda x, y, t: vocab_parallel_cross_entropy(x, t.softmax(-1), reduction="none", impl="triton"),
    "forward": lambda x, y, t: distillation_loss(x, t, impl="triton", reduction="none"),
    "js": lambda x, y, t: distillation_loss(x, t, divergence="js", impl="triton", reduction="none"),
    "hard": lambda x, y, t: distillation_loss(x, t, labels=y, hard_weight=0.5, impl="triton"),
}
# How backward is called. They share a kind of call.
BACKWARD = {
    "ones": lambda loss: loss.sum().backward(),
    "numbers": lambda loss: (
        (loss * torch.arange(1.0, 1 + loss.numel(), device=loss.device).view(loss.shape)).sum().backward()
    ),
    "kept": lambda loss: loss.sum().backward(retain_graph=True),
}


def outcome(name, device, seed, backward):
    """The loss and the gradient of the ``seed``-th call."""
    generator = torch.Generator().manual_seed(seed)
    x, teacher = torch.randn(2, ROWS, COLUMNS, generator=generator).to(device)
    leaf, labels = x.requires_grad_(), torch.randint(COLUMNS - 2, (ROWS,), generator=generator).to(device)
    labels[seed % ROWS] = -100
    loss = LOSSES[name](leaf * 1, labels, teacher)
    BACKWARD[backward](loss)
    return loss.detach().clone(), leaf.grad


@pytest.fixture(autouse=True)
def _unread_labels(unread_labels):
    """The look at the labels of a CPU is no launch."""


@pytest.mark.parametrize("device", LANES)
@pytest.mark.parametrize("kind", (ONE, SEVERAL, BY_SIZE))
@pytest.mark.parametrize("name", LOSSES)
def test_calls_of_a_kind_have_the_bits_of_calls_alone(name, kind, device):
    calls = [(seed, backward) for seed, backward in enumerate((*BACKWARD, *BACKWARD))]
    with programs(kind), interpreted_programs() if device == "cpu" else nullcontext():
        alone = []
        for call in calls:
            forget_plans()
            alone.append(outcome(name, device, *call))
        forget_plans()
        with patch.object(replay.Program, "run", autospec=True, side_effect=replay.Program.run) as run:
            after_each_other = [outcome(name, device, *call) for call in calls]
    for found, right in zip(after_each_other, alone, strict=True):
        assert all(map(torch.equal, found, right))
    assert run.call_count >= 2 * len(BACKWARD)  # the second three calls, forward and backward


@pytest.mark.interpreter
def test_divisors_of_a_kind():
    """What divides a sum is no part of a kind."""
    x, labels = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS)
    divisors = (None, 2, torch.tensor(3), None, torch.tensor(0.5), torch.tensor(4, dtype=torch.int32), 5, None)
    expected = vocab_parallel_cross_entropy(x.double(), labels, reduction="sum")
    with interpreted_programs():
        forget_plans()
        for each in (*divisors, *divisors):
            leaf = x.clone().requires_grad_()
            loss = vocab_parallel_cross_entropy(leaf * 1, labels, reduction="sum", num_items=each, impl="triton")
            loss.backward()
            divisor = 1.0 if each is None else float(each)
            torch.testing.assert_close(loss.double(), expected / divisor)
            of_labels = (x.double().softmax(-1)[range(ROWS), labels] - 1) / divisor
            torch.testing.assert_close(leaf.grad[range(ROWS), labels].double(), of_labels)


@pytest.mark.interpreter
def test_a_call_of_other_memory_takes_the_launchers_own_way():
    """Off a boundary of 16 bytes other variants are launched, which is no reason to forget the program."""
    labels = torch.arange(ROWS)
    memory = torch.randn(1 + ROWS * COLUMNS, generator=torch.Generator().manual_seed(0))
    with interpreted_programs(), torch.no_grad():
        forget_plans()
        losses = []
        for logits in (memory[1:].clone(), memory[1:], memory[1:].clone()):
            logits = logits.view(ROWS, COLUMNS)
            losses.append(vocab_parallel_cross_entropy(logits, labels, reduction="none", impl="triton"))
    assert all(torch.equal(loss, losses[0]) for loss in losses)


def a_record(*tensors):
    class Variant:
        def bound(self, grid, device, addresses_of, others):
            return lambda addresses: None

    return Record([(Variant(), 1, tensors, ())], [])


@pytest.mark.reference
def test_what_is_no_program():
    a, b, c = torch.zeros(3, 4).unbind()
    assert replay.program_of(a_record(a, None, b), (a, b, None), (b,)) is not None
    assert replay.program_of(a_record(a, b), (a, a, b), (b,)) is None  # which of both does the kernel take?
    assert replay.program_of(a_record(a, c), (a, b), ()) is None  # c is from elsewhere
    assert replay.program_of(a_record(a), (a, b), (b,)) is None  # something else filled b
    record = a_record(a, b)
    record.launches.append((None, 1, (b,), ()))
    assert replay.program_of(record, (a, b), (b,)) is None  # it cannot be launched in C


@pytest.mark.reference
def test_what_a_program_leaves_to_its_launcher(monkeypatch):
    a, b = torch.zeros(8), torch.zeros(8)
    program = replay.program_of(a_record(a, b), (a, b), (b,))
    assert program.run((a, b)) and not program.run((a, b[1:]))
    monkeypatch.setattr(replay, "current_device", lambda: 1)
    assert program._replace(device=1).run((a, b)) and not program._replace(device=0).run((a, b))
    monkeypatch.setattr(replay.knobs.runtime, "launch_enter_hook", print)
    assert not program.run((a, b))
