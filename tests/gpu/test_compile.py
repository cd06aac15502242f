"""Compiled calls on GPUs: CUDA graphs of the compiler, and the memory of a step."""

import pytest
import torch

from tests.logits import test_compile
from tests.support.host.gpu import extra_peak_bytes
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce import vocab_parallel_cross_entropy

STEPS = (test_compile.logits_mean, test_compile.log_probs, test_compile.linear_mean, test_compile.linear_none)


def assert_graphs_replay(step, device, part=slice(None), **options) -> None:
    """Compiled with CUDA graphs, a step gives the bits of eager code for new data at every call."""
    torch._dynamo.reset()
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    weight = test_compile.inputs(device, part=part).weight
    for seed in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        new = test_compile.inputs(device, seed=seed)
        x = test_compile.Inputs(new.hidden, weight, new.labels)
        found = [tensor.clone() for tensor in test_compile.results(compiled, x, **options)]
        test_compile.assert_same_bits(found, test_compile.results(step, x, **options))
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == skips


@pytest.mark.cuda
@pytest.mark.parametrize("step", STEPS, ids=[step.__name__ for step in STEPS])
def test_cuda_graphs_of_the_compiler(step):
    assert_graphs_replay(step, "cuda", impl="triton")


def _in_ranks(rank, group, impl):
    width = test_compile.VOCABULARY // group.size()
    for step in STEPS:
        assert_graphs_replay(
            step, device_of(rank, group), slice(rank * width, (rank + 1) * width), impl=impl, group=group
        )


@in_ranks((), (), (2,))
def test_cuda_graphs_of_the_compiler_on_ranks(rank_pool, impl):
    rank_pool.run(_in_ranks, impl)


@pytest.mark.cuda
def test_an_eager_loss_over_logits_of_a_compiled_model_with_cuda_graphs():
    """The compiler's pool owns the logits; its backward reads what its forward saved in the same pool."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1000)).cuda()
    compiled = torch.compile(model, mode="reduce-overhead")
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        hidden, labels = torch.randn(32, 64, device="cuda"), torch.randint(0, 1000, (32,), device="cuda")
        grads = []
        for produce in (compiled, model):
            model.zero_grad()
            vocab_parallel_cross_entropy(produce(hidden), labels).backward()
            grads.append([p.grad.clone() for p in model.parameters()])
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.cuda
def test_a_compiled_step_needs_one_more_tensor_like_the_logits():
    """Its gradient is out of place; forward copies nothing."""
    n, columns = 2048, 32000
    hidden = torch.randn(n, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(columns, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, columns, (n,), device="cuda")

    def forward(hidden, weight):
        return vocab_parallel_cross_entropy(hidden @ weight.t(), labels)

    compiled, logits_bytes = torch.compile(forward, fullgraph=True), n * columns * 2

    def step():
        hidden.grad = weight.grad = None
        compiled(hidden, weight).backward()

    step()
    small = logits_bytes // 4
    assert extra_peak_bytes(step) < 2 * logits_bytes + small
    hidden.grad = weight.grad = None
    assert extra_peak_bytes(lambda: compiled(hidden, weight)) < logits_bytes + small
