"""Programs: a call that launches again what an earlier call launched has the bits of a call that works it out."""

import gc
from contextlib import ExitStack, nullcontext, suppress
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.cases.flat import (
    linear_cross_entropy,
    linear_distillation_loss,
    linear_objective,
    linear_token_log_probs,
)
from tests.support.kernels.interpreted_programs import interpreted_programs
from tests.support.kernels.launch_shapes import ONE, SEVERAL, forget_plans, programs
from vocab_parallel_ce import Head, distillation_loss, token_log_probs, vocab_parallel_cross_entropy

pytest.importorskip("triton")
from vocab_parallel_ce import program
from vocab_parallel_ce.kernels import launch as launching
from vocab_parallel_ce.kernels.launch import Launch
from vocab_parallel_ce.kinds import Kind
from vocab_parallel_ce.program import Programs, Step, program_of, recorded, recording

LANES = [pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.cuda)]
ROWS, COLUMNS = 3, 288  # of two parts
ONE_TILE = 128  # columns
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


class Watched:
    """What programs answer, and the kernels that are launched outside of them."""

    def __init__(self):
        self.answers, self.kernels, self.patches = [], set(), ExitStack()

    def __enter__(self):
        launch, make = Launch.__call__, program.program_of

        def watched(made):
            def run(*tensors):
                results = made(*tensors)
                self.answers.append(results is not None)
                return results

            return None if made is None else run

        for known in [each for each in gc.get_objects() if type(each) is Programs]:
            for kind in (*known.forms.by_key.values(), *known.named.values()):
                if kind.made not in (None, program._comes_again, program._has_none):
                    kind.made = watched(kind.made)

        def watched_launch(made, *arguments):
            self.kernels.add(made.kernel.fn.__name__)
            return launch(made, *arguments)

        self.patches.enter_context(patch.object(program, "program_of", lambda *given: watched(make(*given))))
        self.patches.enter_context(patch.object(Launch, "__call__", watched_launch))
        return self

    def __exit__(self, *error):
        self.patches.close()


def in_programs(device):
    return interpreted_programs() if device == "cpu" else nullcontext()


@pytest.mark.parametrize("device", LANES)
@pytest.mark.parametrize("kind", (ONE, SEVERAL))
@pytest.mark.parametrize("name", LOSSES)
def test_calls_of_a_kind_have_the_bits_of_calls_alone(name, kind, device):
    with programs(kind), in_programs(device):
        alone = []
        for seed, backward in enumerate(BACKWARD):
            forget_plans()
            alone.append(outcome(name, device, seed, backward))
        forget_plans()
        for seed, backward in enumerate([*BACKWARD] * 3):  # of a process's first call the logits are not overwritten
            outcome(name, device, 7 + seed, backward)
        with Watched() as watched:
            known = [outcome(name, device, seed, backward) for seed, backward in enumerate(BACKWARD)]
    for found, right in zip(known, alone, strict=True):
        assert all(map(torch.equal, found, right))
    assert len(watched.answers) >= 2 * len(BACKWARD) and all(watched.answers)  # forward and backward
    assert watched.kernels == set()


CHUNKS: dict[str, Any] = {"chunk_size": 4, "impl": "triton"}  # of 10 tokens
HEADS = {
    "mean": lambda h, w, y: linear_cross_entropy(h, w, y, **CHUNKS),
    "sum, padded": lambda h, w, y: linear_cross_entropy(h, w, y, reduction="sum", vocab_size=ONE_TILE - 2, **CHUNKS),
    "none": lambda h, w, y: linear_cross_entropy(h, w, y, reduction="none", **CHUNKS),
    "valid": lambda h, w, y: linear_cross_entropy(h, w, y, valid_tokens="count", **CHUNKS),
    "kept": lambda h, w, y: linear_cross_entropy(h, w, y, reduction="none", keep_logits="all", **CHUNKS),
    "fp32": lambda h, w, y: linear_cross_entropy(h.half(), w.half(), y, logits_dtype=torch.float32, **CHUNKS),
    "entropy": lambda h, w, y: linear_token_log_probs(h, w, y, outputs=("entropy",), **CHUNKS).entropy,
    "objective": lambda h, w, y: linear_objective(
        h, w, y, lambda log_probs, entropy: -log_probs.exp() - entropy, outputs=("entropy",), **CHUNKS
    )[0],
    "divergence": lambda h, w, y: linear_distillation_loss(Head(h, w), Head(h.detach() * 2, w.detach()), **CHUNKS),
}
# Of one chunk, whose forward pass is one program.
OWN: dict[str, Any] = {"impl": "triton"}
WHOLE = {
    "one chunk": lambda h, w, y: linear_cross_entropy(h, w, y, **OWN),
    "items": lambda h, w, y: linear_cross_entropy(h, w, y, num_items=y.abs().max(), **OWN),
    "batches": lambda h, w, y: linear_cross_entropy(h.view(2, 6, 8), w, y.view(2, 6), reduction="sum", **OWN),
    "bias": lambda h, w, y: linear_cross_entropy(h, w, y, bias=w[:, 0].detach(), **OWN),
    "bias with a gradient": lambda h, w, y: linear_cross_entropy(h, w, y, bias=w[:, 0] * 1, **OWN),
    "predictions": lambda h, w, y: linear_cross_entropy(h, w, y, outputs=("predictions",), **OWN).loss,
    "weights": lambda h, w, y: linear_cross_entropy(h, w, y, class_weight=w[:, 0].detach().exp(), **OWN),
    "bf16": lambda h, w, y: linear_cross_entropy(h.bfloat16(), w.bfloat16(), y, **OWN),
}


@pytest.mark.parametrize("device", LANES)
@pytest.mark.parametrize("name", [*HEADS, *WHOLE])
def test_calls_of_a_head_have_the_bits_of_calls_alone(name, device):
    """Their chunks, and the tokens that are left out, differ. Of a tenth or fewer none are left out."""
    n_tokens, most = (12, 2) if name in WHOLE else (10, 4)

    def outcome(seed, backward):
        generator = torch.Generator().manual_seed(seed)
        hidden, weight = (torch.randn(rows, 8, generator=generator).to(device) for rows in (n_tokens, ONE_TILE))
        labels = torch.randint(ONE_TILE - 2, (n_tokens,), generator=generator).to(device)
        labels[: seed % most] = -100
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        loss = (HEADS | WHOLE)[name](*leaves, labels)
        BACKWARD[backward](loss)
        return loss.detach().clone(), *[leaf.grad for leaf in leaves]

    alone = []
    calls = [*enumerate(BACKWARD), (3, "ones")]  # one for each number of tokens that are left out
    for call in calls:
        forget_plans()
        alone.append(outcome(*call))
    with in_programs(device):
        forget_plans()
        for call in calls * 3:
            outcome(*call)
        with Watched() as watched:
            known = [outcome(*call) for call in calls]
    for found, right in zip(known, alone, strict=True):
        assert all(map(torch.equal, found, right))
    n_programs = len(watched.answers) / len(known)
    assert (n_programs == 2 if name in WHOLE else n_programs >= 3) and all(watched.answers)


# What a hook may return of what was saved: other strides, and other dtypes.
FORMS = {
    "as it was": lambda x: x,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() == 4 else x,
    "transposed otherwise": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x,
    "rows apart": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]] if x.dim() == 4 else x,
    "bf16": lambda x: x.bfloat16() if x.dim() == 4 and x.shape[-1] == ONE_TILE else x,
    "int32": lambda x: x.int() if x.dtype == torch.int64 else x,
}


@pytest.mark.parametrize("device", LANES)
@pytest.mark.parametrize("is_for_all", (True, False))
@pytest.mark.parametrize("name", ("none", "forward"))
def test_what_was_saved_may_come_back_in_another_form(name, is_for_all, device):
    """From hooks for all that is saved, a checkpoint's, or of one tensor: the kind of the call does not say so."""
    x, teacher = torch.randn(2, 2, 3, 2, ONE_TILE, generator=torch.Generator().manual_seed(0)).to(device)
    labels, factors = (torch.arange(12, device=device).view(2, 3, 2) + each for each in (0, 1.0))

    def grad(form):
        leaf = x.clone().requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, FORMS[form]) if is_for_all else nullcontext()
        ):
            loss = LOSSES[name](leaf * 1, labels, teacher)
        for saved in () if is_for_all else loss.grad_fn._raw_saved_tensors:
            with suppress(RuntimeError):  # it saved None
                saved.register_hooks(lambda saved: saved, FORMS[form])
        (loss * factors).sum().backward()
        return leaf.grad

    alone = {}
    for form in FORMS:
        forget_plans()
        alone[form] = grad(form)
    with in_programs(device):
        forget_plans()
        for form in [*FORMS] * 4:
            assert torch.equal(grad(form), alone[form]), form


@pytest.mark.parametrize("device", LANES)
def test_rows_apart_have_no_program(device):
    """A kind of call has no strides: rows that are further apart are of the same one."""
    labels = torch.arange(ROWS, device=device)
    with in_programs(device), torch.no_grad(), Watched() as watched:
        forget_plans()
        for width in (72, 96, 128, 72):
            logits = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0)).to(device)[:, :64]
            loss = vocab_parallel_cross_entropy(logits, labels, reduction="none", impl="triton")
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
    assert watched.answers == []


@pytest.mark.interpreter
def test_divisors_of_a_kind():
    """What divides a sum is no part of a kind."""
    x, labels = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)), torch.arange(ROWS)
    divisors = (None, 2, torch.tensor(3), None, torch.tensor(0.5), torch.tensor(4, dtype=torch.int32), 5, None)
    expected = vocab_parallel_cross_entropy(x.double(), labels, reduction="sum")
    with interpreted_programs():
        forget_plans()
        for each in divisors * 3:
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
    aligned, other = memory[1:].clone(), memory[1:]
    with interpreted_programs(), torch.no_grad(), Watched() as watched:
        forget_plans()
        losses = []
        for logits in (aligned, other, aligned, aligned, other, aligned):
            logits = logits.view(ROWS, COLUMNS)
            losses.append(vocab_parallel_cross_entropy(logits, labels, reduction="none", impl="triton"))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert watched.answers == [True, False, True]  # after the call that is recorded


@pytest.mark.reference
@pytest.mark.parametrize("has_sequence", (False, True))
def test_a_bound_launch_passes_what_a_launch_passes(has_sequence):
    passed, tensor = [], torch.zeros(4)
    in_c = Step(lambda *args: passed.append(args), 0, lambda device: device, ("start",), (), has_sequence)
    launch = Launch(None, (1.5,), {"A": 2}, num_warps=4)
    launch.variants[-1, torch.float32, None] = in_c
    with recorded() as (steps, made):
        launch(3, (tensor, None), (7,))
    program = program_of(steps, made, (tensor, None), (tensor, None), launching)
    assert program(tensor, None) == (tensor, None)
    own, repeated = passed
    assert own[:5] == repeated[:5] == (3, 1, 1, -1, "start")
    of_kernel = [tensor.data_ptr(), None, 1.5, 7, 2]
    assert [[*(args[5] if has_sequence else args[5:])] for args in passed] == [of_kernel, of_kernel]


def a_record(*tensors, made=()):
    return [(Step(lambda *arguments: None, 1, abs), tensors)], list(made)


class OnGpu(torch.Tensor):
    def get_device(self):
        return 0


@pytest.mark.reference
def test_what_is_no_program():
    def made_of(record, tensors, results):
        return program_of(*record, tensors, results, launching)

    a, b, c = torch.zeros(12), torch.zeros(12), torch.zeros(12)
    view = a.view(3, 4)
    assert made_of(a_record(a, None, b), (a, b, None), (b, None)) is not None
    assert made_of(a_record(view, b), (a, b), (b,)) is not None
    assert made_of(a_record(a, b), (a, view, b), (b,)) is None  # which of both does the kernel take?
    assert made_of(a_record(a, c), (a, b), ()) is None  # c is from elsewhere
    assert made_of(a_record(a, b), (a, b), (c,)) is None
    assert made_of(a_record(a, b), (a, b), (a[1:],)) is None  # a view of what it gets
    assert made_of(a_record(a, b, made=(c,)), (a, b), (c,)) is None  # no step filled c
    assert made_of(a_record(a, c, made=(c,)), (a, b), (c, b)) is not None
    assert made_of(([], []), (a, b), (b,)) is None  # nothing is launched
    record = a_record(a, b)
    record[0].append((None, (b,)))
    assert made_of(record, (a, b), (b,)) is None  # it cannot be launched in C
    changed = torch.zeros(12).add_(1)
    assert made_of(a_record(a, b, made=(changed,)), (a, b), (b,)) is None  # by an operator that is no step
    assert made_of(a_record(a, changed, made=(changed,)), (a, b), (changed,)) is not None


@pytest.mark.reference
def test_what_a_program_leaves_to_its_function(monkeypatch):
    a, b = torch.zeros(8).as_subclass(OnGpu), torch.zeros(8)
    own, calls = Programs(launching), []
    monkeypatch.setattr(launching, "current_device", lambda: 0)

    def function(a, b):
        calls.append(b)
        return b, None

    own.named["key"] = kind = Kind()
    kind.made = program_of(*a_record(a, b), (a, b), (b, None), launching)
    assert own.run("key", function, (a, b)) == (b, None) and calls == []
    assert own.run("key", function, (a, b[1:]))[0].shape == (7,) and len(calls) == 1
    with monkeypatch.context() as patched:
        patched.setattr(launching, "current_device", lambda: 1)
        assert own.run("key", function, (a, b)) == (b, None) and len(calls) == 2
    monkeypatch.setattr(launching.knobs.runtime, "launch_enter_hook", print)
    assert own.run("key", function, (a, b)) == (b, None) and len(calls) == 3


@pytest.mark.reference
def test_what_is_not_recorded(monkeypatch):
    """Neither a first call, nor one that an observer watches; what has no program is recorded once."""
    own, found, a = Programs(launching), [], torch.zeros(8)

    def function(a):
        found.append(recording.steps is not None)
        return (a,)

    own.run("key", function, (a,))
    with monkeypatch.context() as patched:
        patched.setattr(launching.knobs.runtime, "launch_enter_hook", print)
        own.run("key", function, (a,))
    own.run("key", function, (a[1:],))
    for _ in range(2):
        own.run("key", function, (a,))
    assert found == [False, False, False, True, False]


@pytest.mark.interpreter
@pytest.mark.parametrize("is_expanded", (False, True))
def test_one_gradient_of_two_outputs(is_expanded):
    """Autograd hands on one tensor for both; in another call they are two."""
    x = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))

    def gradient(a, b):
        leaf = x.clone().requires_grad_()
        found = token_log_probs(leaf * 1, torch.arange(ROWS), outputs=("entropy",), impl="triton")
        torch.autograd.backward((found.log_probs, found.entropy), (a, b))
        return leaf.grad

    a, b = (torch.full((), each).expand(ROWS) if is_expanded else torch.rand(ROWS) for each in (2.0, 0.5))
    alone = []
    for pair in ((a, a), (a, b), (b, a)):
        forget_plans()
        alone.append(gradient(*pair))
    with interpreted_programs():
        forget_plans()
        for _ in range(4):
            gradient(a, a)
        with Watched() as watched:
            again = [gradient(*pair) for pair in ((a, a), (a, b), (b, a))]
    assert watched.answers == [True] * 6
    assert all(map(torch.equal, again, alone))
