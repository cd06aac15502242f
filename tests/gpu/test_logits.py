"""What only a GPU shows: graphs, synchronisation, peak memory, offsets past 2^31, fusing, the current device."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.autograd import DeviceType
from torch.nn.functional import pad
from torch.profiler import ProfilerActivity, profile

import vocab_parallel_ce as vp
from tests.support.cases.inputs import batch
from tests.support.cases.logits import EVERY, GRADIENTS, METRICS, REDUCTIONS, Results, assert_right, check, flat_outputs
from tests.support.host.gpu import (
    assert_graph_replays,
    assert_host_never_waits,
    assert_right_past_2_to_the_31_elements,
    captured,
    extra_peak_bytes,
)

pytestmark = pytest.mark.cuda

ROWS, COLUMNS, PADDING = 64, 1000, 8


def inputs(seed=0):
    """Logits, labels and a number for each token."""
    made = batch("some_ignored", rows=ROWS, vocab_size=COLUMNS, dtype=torch.bfloat16, seed=seed)
    numbers = torch.rand(ROWS, generator=torch.Generator().manual_seed(seed))
    return [tensor.cuda() for tensor in (*made, numbers)]


def plain_step(logits, labels, numbers, **options):
    source = logits.clone().requires_grad_()
    loss = vp.vocab_parallel_cross_entropy(source, labels, **options)
    return loss, *torch.autograd.grad(loss, source, numbers if loss.dim() else numbers[0])


def step_with_every_option(logits, labels, numbers, num_items=None):
    """The number of items is read by the device, at each replay."""
    source = pad(logits, (0, PADDING), value=float("nan")).requires_grad_()
    options = {**EVERY, "reduction": "sum", "outputs": METRICS}
    options["num_items"] = 40 + numbers[0] if num_items is None else num_items
    outputs = flat_outputs(vp.vocab_parallel_cross_entropy(source, labels, vocab_size=COLUMNS, **options))
    return *outputs, *torch.autograd.grad(outputs[0], source, torch.ones_like(outputs[0]))


def step_of_log_probs(logits, labels, numbers):
    source = pad(logits, (0, PADDING), value=float("nan")).requires_grad_()
    options = {"outputs": ("entropy",), "temperature": 0.7, "softcap": 20.0, "vocab_size": COLUMNS}
    outputs = flat_outputs(vp.token_log_probs(source, labels, **options))
    return *outputs, *torch.autograd.grad(outputs, source, [numbers[:1].expand(ROWS), numbers])


def step_of_soft_losses(logits, labels, numbers):
    leaf, teacher = logits.detach().requires_grad_(), logits.detach().flip(-1)
    log_probs, ids = teacher.float().log_softmax(-1).topk(4)
    js = vp.distillation_loss(leaf * 1, teacher, divergence="js", labels=labels, hard_weight=0.5)
    losses = [js, vp.distillation_loss(leaf * 1, teacher.softmax(-1).log())]
    known = (vp.TopKTeacher(ids, log_probs, rest) for rest in ("ignore", "bucket"))
    losses += [vp.distillation_loss(leaf * 1, each, labels=labels) for each in known]
    return *(loss.detach() for loss in losses), *torch.autograd.grad(sum(losses), leaf)


STEPS = (step_with_every_option, step_of_log_probs, step_of_soft_losses)


@pytest.mark.no_poison
@pytest.mark.parametrize("step", STEPS)
def test_graph_replays_with_new_data(step):
    """Looking at the grad_output on the host broke capture elsewhere; ``test_cuda_graphs`` has the modes."""
    assert_graph_replays(step, inputs(), map(inputs, (1, 2)))


@pytest.mark.no_poison
def test_the_host_never_waits():
    logits, labels, numbers = inputs()
    grad_output = numbers[0]

    def every_path():
        for reduction, gradient in product(REDUCTIONS, GRADIENTS):
            plain_step(logits, labels, numbers, reduction=reduction, gradient=gradient, label_smoothing=0.1)
        for step in STEPS:
            step(logits, labels, numbers)
        for num_items in (torch.tensor(40), 40):
            step_with_every_option(logits, labels, numbers, num_items)
        _, grad = vp.cross_entropy_forward(logits.clone(), labels, 0.0, True, None, -100)
        vp.cross_entropy_backward(grad, grad_output)

    assert_host_never_waits(every_path)


OF_LOGITS = {
    "mean": vp.vocab_parallel_cross_entropy,
    "none": partial(vp.vocab_parallel_cross_entropy, reduction="none"),
    "log-probs": partial(vp.token_log_probs, outputs=("entropy",), temperature=0.7),
}
IN_PLACE = [*product(("mean", "none"), (32000, 32001)), ("log-probs", 64128), ("log-probs", 50257)]


class Made(torch.autograd.Function):
    """Makes logits, and drops their gradient."""

    @staticmethod
    def forward(ctx, anchor, values):
        return values.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None


@pytest.mark.no_poison
@pytest.mark.parametrize("is_held", (False, True))
@pytest.mark.parametrize(("name", "columns"), IN_PLACE)
def test_extra_peak_memory(name, columns, is_held):
    """Less than 64 bytes per row beside the logits, and beside their gradient if somebody holds them."""
    rows = 2048
    values = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, columns, (rows,), device="cuda")
    anchor, one = torch.ones((), device="cuda", requires_grad=True), torch.ones((), device="cuda")

    def step():
        logits = Made.apply(anchor, values)
        result = OF_LOGITS[name](logits, labels)
        outputs = flat_outputs(result)
        held = [logits] * is_held
        del logits, result
        torch.autograd.backward(outputs, [one.expand(output.shape) for output in outputs])
        del held

    step()  # a new kind of call may end others, and free what they kept
    extra = extra_peak_bytes(step) - (1 + is_held) * values.nbytes
    assert -64 * rows < extra < 64 * rows, extra / rows


@pytest.mark.no_poison
@pytest.mark.parametrize("shape", ((2, 1024, 8000), (1024, 2, 8000)))
def test_no_copy_of_dense_layouts(shape):
    """Transposing tokens before the loss cost a copy of the logits elsewhere."""
    logits = torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_() * 1
    view = logits.transpose(0, 1)[:, : shape[0] - 1]
    labels = torch.randint(0, shape[-1], view.shape[:-1], device="cuda")

    def step():
        torch.autograd.graph.increment_version(logits)  # written anew
        loss = vp.vocab_parallel_cross_entropy(view, labels, gradient="in_backward")
        torch.autograd.grad(loss, view)

    assert extra_peak_bytes(step) < 64 * labels.numel()


@pytest.mark.no_poison
def test_nothing_but_the_loss_under_no_grad():
    logits = torch.randn(2048, 8000, device="cuda", dtype=torch.bfloat16).requires_grad_()
    labels = torch.randint(0, 8000, (2048,), device="cuda")

    @torch.no_grad()
    def step():
        vp.vocab_parallel_cross_entropy(logits, labels)

    assert extra_peak_bytes(step) < 32 * 2048


@pytest.mark.no_poison
def test_more_than_2_to_the_31_elements():
    rows, columns = 32_832, 65_537  # the last 64 rows lie within 128-byte lines as the first 64 do

    def step(logits, labels):
        losses = vp.parallel_cross_entropy(logits.requires_grad_(), labels, overwrite_input=True)
        (grad,) = torch.autograd.grad(losses, logits, torch.ones_like(losses))
        return losses, grad

    def step_of_tail(tail, labels):
        want = vp.vocab_parallel_cross_entropy(tail.clone(), labels, reduction="none")
        source = tail.clone().requires_grad_()
        loss = vp.vocab_parallel_cross_entropy(source, labels, reduction="none")
        (want_grad,) = torch.autograd.grad(loss, source, torch.ones_like(loss))
        return want, want_grad

    assert_right_past_2_to_the_31_elements(rows, columns, step, step_of_tail)


@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_warm_up_and_capture_of_a_cuda_graph_are_not_checked(gradient):
    """Both call over the same static logits; what a replay leaves there is refused again."""
    values, labels = (t.cuda() for t in batch("peaked", rows=8, vocab_size=64))
    # A leaf: another tensor's node lies on the stream that made it, and a capture may not wait for that.
    static = values.clone().requires_grad_()

    def step():
        loss = vp.vocab_parallel_cross_entropy(static, labels, gradient=gradient, impl="triton")
        torch.autograd.grad(loss, static)
        return (loss,)

    graph, outputs = captured(step, warm_ups=3)
    with torch.no_grad():
        static.copy_(values)
    graph.replay()
    assert_right(Results(outputs, static), values.cpu(), labels.cpu())


@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_a_scaled_logit_is_rounded_before_the_maximum_is_subtracted(gradient):
    """A fused ``scale * x - max`` leaves the label's own rounding in a loss of 0.001."""
    made, labels = batch("confident", rows=40, vocab_size=200)
    options = {"logit_scale": 0.3, "reduction": "none", "gradient": gradient}
    check(("triton", "cuda"), (made + 500) / 0.3, labels, **options)


KERNELS = ("statistics_kernel", "gradient_kernel", "outputs_kernel", "element_mul")


@pytest.mark.nccl
@pytest.mark.no_poison
@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_tensors_on_a_gpu_that_is_not_current(reduction):
    """Without a guard the launch goes to the current GPU's stream, and reads the other's memory too early."""
    logits, labels, _ = inputs()
    torch.cuda.set_device(0)
    there = logits.to("cuda:1").requires_grad_()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        loss = vp.vocab_parallel_cross_entropy(there, labels.to("cuda:1"), reduction=reduction)
        (grad,) = torch.autograd.grad(loss, there, torch.ones_like(loss))
        torch.cuda.synchronize(1)
    assert torch.cuda.current_device() == 0
    launches = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    gpus = [e.device_index for e in launches if any(name in e.name for name in KERNELS)]
    assert gpus == [1] * (2 if reduction == "none" else 3)  # the statistics store an unreduced loss
    here = logits.clone().requires_grad_()
    expected = vp.vocab_parallel_cross_entropy(here, labels, reduction=reduction)
    (expected_grad,) = torch.autograd.grad(expected, here, torch.ones_like(expected))
    assert torch.equal(loss.cpu(), expected.cpu())
    assert torch.equal(grad.cpu(), expected_grad.cpu())


def test_launches_of_few_rows_wait_for_those_of_the_call_before():
    """Nothing is queued between, and each call's parts lie where those of the call before lay."""
    sources = torch.randn(6, 16, 131072, device="cuda").bfloat16()
    labels = torch.randint(131072, (6, 16), device="cuda")
    with torch.no_grad():
        found = [
            vp.vocab_parallel_cross_entropy(*each, reduction="none")
            for _ in range(50)
            for each in zip(sources, labels, strict=True)
        ]
    expected = [
        torch.nn.functional.cross_entropy(x.double(), y, reduction="none") for x, y in zip(sources, labels, strict=True)
    ]
    for index, loss in enumerate(found):
        torch.testing.assert_close(loss.double(), expected[index % 6], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reduction", ("mean", "none"))
def test_launches_of_few_rows_wait_for_what_was_queued_before(reduction):
    """Each loss reads logits that the launch before has just written, where the gradient before it was."""
    sources = torch.randn(6, 16, 131072, device="cuda").bfloat16()
    labels, memory = torch.randint(131072, (6, 16), device="cuda"), torch.empty_like(sources[0])

    def loss_and_gradient(source, labels):
        leaf = memory.copy_(source).requires_grad_()
        loss = vp.vocab_parallel_cross_entropy(leaf, labels, reduction=reduction, gradient="out_of_place")
        (grad,) = torch.autograd.grad(loss.sum(), leaf)
        memory.requires_grad_(False)
        memory.zero_()
        return loss.detach(), grad

    queued = [loss_and_gradient(*each) for _ in range(20) for each in zip(sources, labels, strict=True)]
    for (loss, grad), source, of_source in zip(queued[-6:], sources, labels, strict=True):
        leaf = source.double().requires_grad_()
        expected = torch.nn.functional.cross_entropy(leaf, of_source, reduction=reduction)
        torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
        (right,) = torch.autograd.grad(expected.sum(), leaf)
        torch.testing.assert_close(grad.double(), right, rtol=2**-7, atol=1e-9)
