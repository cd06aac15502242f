"""What only a GPU shows of the options: graphs, synchronisation, peak memory, and how products are fused."""

import pytest
import torch

from tests.support.gpu import assert_graph_replays, assert_host_never_waits, extra_peak_bytes
from tests.support.inputs import batch
from tests.support.logits import EVERY, check
from vocab_parallel_ce import token_log_probs, vocab_parallel_cross_entropy

pytestmark = pytest.mark.cuda

ALL = {**EVERY, "smoothing_formula": "megatron"}
ROWS, COLUMNS, VOCAB_SIZE = 64, 1000, 990


def inputs(seed=0):
    logits, labels = batch("some_ignored", rows=ROWS, vocab_size=VOCAB_SIZE, dtype=torch.bfloat16, seed=seed)
    padding = torch.full((ROWS, COLUMNS - VOCAB_SIZE), float("nan"), dtype=logits.dtype)
    return torch.cat([logits, padding], dim=1).cuda(), labels.cuda()


def loss_step(logits, labels, num_items):
    source = logits.clone().requires_grad_()
    options = {"reduction": "sum", "num_items": num_items, "return_metrics": True, "vocab_size": VOCAB_SIZE}
    loss, metrics = vocab_parallel_cross_entropy(source, labels, **options, **ALL)
    return [loss, *metrics, *torch.autograd.grad(loss, source, torch.ones_like(loss))]


def log_probs_step(logits, labels, weight):
    source = logits.clone().requires_grad_()
    outputs = token_log_probs(source, labels, entropy=True, temperature=0.7, softcap=20.0, vocab_size=VOCAB_SIZE)
    grad_output = [weight.expand(ROWS), torch.ones(ROWS, device="cuda")]
    return [*outputs, *torch.autograd.grad(outputs, source, grad_output)]


@pytest.mark.no_poison
@pytest.mark.parametrize("step", (loss_step, log_probs_step))
def test_graph_replays_with_new_data(step):
    """The number of items is read by the device, at each replay."""

    def arguments(seed):
        return [*inputs(seed), torch.tensor(40 + seed, device="cuda")]

    assert_graph_replays(step, arguments(0), (arguments(seed) for seed in (1, 2)))


@pytest.mark.no_poison
def test_the_host_never_waits():
    logits, labels = inputs()
    on_device = torch.tensor(40, device="cuda")

    def every_path():
        for num_items in (on_device, torch.tensor(40), 40):
            loss_step(logits, labels, num_items)
        log_probs_step(logits, labels, on_device)

    assert_host_never_waits(every_path)


@pytest.mark.no_poison
@pytest.mark.parametrize("columns", (64128, 50257))
def test_log_probs_and_entropy_take_no_second_shard(columns):
    """Less than 64 bytes a row, forward and backward."""
    rows = 2048
    logits = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16).requires_grad_() * 1
    labels = torch.randint(0, columns, (rows,), device="cuda")
    grad_output = torch.ones(rows, device="cuda")

    def step():
        torch.autograd.graph.increment_version(logits)  # written anew
        outputs = token_log_probs(logits, labels, entropy=True, temperature=0.7)
        torch.autograd.grad(outputs, logits, [grad_output, grad_output])

    extra = extra_peak_bytes(step)
    assert extra < 64 * rows, extra / rows


@pytest.mark.parametrize("gradient", ("in_forward", "in_backward"))
def test_a_scaled_logit_is_rounded_before_the_maximum_is_subtracted(gradient):
    """A fused ``scale * x - max`` leaves the label's own rounding in a loss of 0.001."""
    made, labels = batch("confident", rows=40, vocab_size=200)
    options = {"logit_scale": 0.3, "reduction": "none", "gradient": gradient}
    check(("triton", "cuda"), (made + 500) / 0.3, labels, **options)
