"""Compiled calls: one graph, the bits of eager code, and nothing overwritten."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_structure
from torch.utils.checkpoint import checkpoint

import vocab_parallel_ce as vp
from tests.support.cases import flat
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.logits import flat_outputs
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.api.call import TRACES_DTENSORS

N, WIDTH, VOCABULARY = 12, 8, 48
SMOOTHED = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "logit_scale": 0.9}


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight


def inputs(
    device: Any = "cpu", n: int = N, dtype: torch.dtype = torch.float32, part: slice = slice(None), seed: int = 0
) -> Inputs:
    """Hidden states and a head whose logits are far from uniform; one label is ignored."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, WIDTH, generator=generator).to(device, dtype)
    weight = (3 * torch.randn(VOCABULARY, WIDTH, generator=generator))[part].to(device, dtype)
    labels = torch.randint(0, VOCABULARY, (n,), generator=generator)
    labels[3] = IGNORE_INDEX
    return Inputs(hidden.requires_grad_(), weight.requires_grad_(), labels.to(device))


def logits_mean(x, **options):
    options["outputs"] = ("lse", "predictions")
    return vp.vocab_parallel_cross_entropy(x.hidden @ x.weight.t(), x.labels, **SMOOTHED, **options)


def logits_none(x, **options):
    return (vp.vocab_parallel_cross_entropy(x.hidden @ x.weight.t(), x.labels, reduction="none", **options),)


def logits_transposed(x, **options):
    logits = (x.hidden @ x.weight.t()).view(3, 4, -1).transpose(0, 1)
    options |= {"reduction": "sum", "num_items": 7}
    return (vp.vocab_parallel_cross_entropy(logits, x.labels.view(3, 4).t(), **options),)


def log_probs(x, **options):
    return vp.token_log_probs(x.hidden @ x.weight.t(), x.labels, outputs=("entropy",), temperature=0.7, **options)


def every_output(x, **options):
    options["outputs"] = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")
    options["temperature"] = 0.5 + x.labels.abs() * 0.125  # exact: the compiler fuses it
    return vp.token_log_probs(x.hidden @ x.weight.t(), x.labels, **options)


def of_transformer_engine(x, impl=None, group=None):
    return (vp.parallel_cross_entropy(x.hidden @ x.weight.t(), x.labels, 0.1, False, group),)


def linear_mean(x, **options):
    options["outputs"] = ("predictions",)
    return flat.linear_cross_entropy(x.hidden, x.weight, x.labels, chunk_size=5, **SMOOTHED, **options)


def linear_outputs(x, **options):
    options |= {"outputs": ("entropy", "lse", "predictions"), "reduction": "sum"}
    return flat.linear_cross_entropy(x.hidden, x.weight, x.labels, chunk_size=5, **options)


def linear_valid_tokens(x, **options):
    n_items = (x.labels != IGNORE_INDEX).sum()
    options |= {"reduction": "sum", "num_items": n_items, "bias": x.weight.detach()[:, 0]}
    return (flat.linear_cross_entropy(x.hidden, x.weight, x.labels, valid_tokens=N - 1, **options),)


def next_token(x, **options):
    labels, kept = vp.next_labels(x.labels.view(2, -1)), {"reduction": "none", **options}
    asked = {"outputs": ("predictions",), "chunk_size": 5}
    found = flat.linear_cross_entropy(x.hidden.view(2, -1, WIDTH), x.weight, labels, **asked, **kept)
    logits = (x.hidden @ x.weight.t()).view(2, -1, VOCABULARY)
    return *flat_outputs(found), vp.vocab_parallel_cross_entropy(logits, labels, **kept)


def linear_none(x, **options):
    return (flat.linear_cross_entropy(x.hidden, x.weight, x.labels, reduction="none", chunk_size=5, **options),)


def linear_log_probs(x, **options):
    options |= {"outputs": ("entropy", "mean_logit"), "temperature": 0.5 + x.labels.abs() * 0.125}
    options["valid_tokens"] = 100
    return flat.linear_token_log_probs(x.hidden, x.weight, x.labels, **options)


def linear_autocast(x, **options):
    with torch.autocast(x.hidden.device.type, dtype=torch.bfloat16):
        return (flat.linear_cross_entropy(x.hidden, x.weight, x.labels, logits_dtype=torch.float32, **options),)


def class_weights(x, **options):
    options |= {"class_weight": x.weight.detach()[:, 0].abs(), "label_smoothing": 0.1}
    loss = vp.vocab_parallel_cross_entropy(x.hidden @ x.weight.t(), x.labels, **options)
    return loss, flat.linear_cross_entropy(x.hidden, x.weight, x.labels, chunk_size=5, **options)


def checkpointed(x, **options):
    def head(hidden, weight):
        return vp.vocab_parallel_cross_entropy(hidden @ weight.t(), x.labels, **options) + flat.linear_cross_entropy(
            hidden, weight, x.labels, **options
        )

    return (checkpoint(head, x.hidden, x.weight, use_reentrant=False),)


STEPS = (
    *(logits_mean, logits_none, logits_transposed, log_probs, every_output, of_transformer_engine),
    *(linear_mean, linear_outputs, linear_valid_tokens, linear_none, linear_log_probs, linear_autocast),
    *(checkpointed, class_weights, next_token),
)
BY_STEP = pytest.mark.parametrize("step", STEPS, ids=[step.__name__ for step in STEPS])


def with_grads(outputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that have a gradient, and a random ``grad_output`` of each; the first token's is 0."""
    differentiable = [output for output in outputs if output.requires_grad]
    generator = torch.Generator().manual_seed(5)
    grads = [torch.rand(output.shape, generator=generator).to(output.device) for output in differentiable]
    for grad in grads:
        grad.view(-1)[0] *= grad.dim() == 0
    return differentiable, grads


def results(step, x: Inputs, **options) -> list[Tensor]:
    """The outputs of a step, and the gradients of a random combination of those that have one."""
    outputs = flat_outputs(step(x, **options))
    differentiable, grads = with_grads(outputs)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(differentiable, x.leaves(), grads)]


def assert_same_bits(found, expected) -> None:
    for index, (value, same) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(value, same), f"result {index}: {value}, not {same}"


def backend_of(device: Any) -> str:
    return "inductor" if torch.device(device).type == "cuda" else "aot_eager"


@BY_STEP
def test_a_compiled_step_is_one_graph_and_one_for_other_counts_of_tokens(impl_device, step):
    """With the bits of an eager one."""
    impl, device = impl_device
    if step is of_transformer_engine and impl == "reference" and device == "cuda":
        return  # it takes no impl
    counter = CompileCounterWithBackend(backend_of(device))
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    names_a_count = step in (linear_valid_tokens, logits_transposed, next_token)
    graphs, counts = [], (12,) if names_a_count or impl == "triton" else (12, 16, 31, 7)
    for n in counts:
        x = inputs(device, n=n)
        assert_same_bits(results(compiled, x, impl=impl), results(step, x, impl=impl))
        graphs.append(counter.frame_count)
    assert graphs == [1, 2, 2, 2][: len(counts)]
    with torch.no_grad():
        found, expected = compiled(x, impl=impl), step(x, impl=impl)
    assert tree_structure(found) == tree_structure(expected)  # the names of an Outputs too
    assert_same_bits(flat_outputs(found), flat_outputs(expected))


@pytest.mark.reference
@pytest.mark.parametrize(
    ("step", "dtype", "backend"),
    [(linear_none, torch.bfloat16, "inductor"), (logits_mean, torch.float64, "aot_eager")],
    ids=("inductor", "fp64"),
)
def test_other_dtypes(step, dtype, backend):
    x = inputs(dtype=dtype)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    found, expected = results(compiled, x), results(step, x)
    assert_same_bits(found, expected)
    assert [each.dtype for each in found] == [each.dtype for each in expected]


@pytest.mark.reference
def test_numbers_that_change_are_seen():
    """Options are Python floats, which compiled kernels take for fp64, and graphs for constants."""

    def step(x, smoothing, z_loss, softcap, scale, ignored, items):
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "logit_scale": scale}
        options |= {"reduction": "sum", "num_items": items, "ignore_index": ignored}
        logits = x.hidden @ x.weight.t()
        loss = vp.vocab_parallel_cross_entropy(logits, x.labels.abs() % 5, **options)
        return loss, *flat_outputs(log_probs(x, softcap=softcap))

    compiled, x = torch.compile(step, fullgraph=True, backend="aot_eager"), inputs()
    for numbers in ((0.1, 1e-3, 20.0, 0.9, -100, 7), (0.2, 1e-2, 5.0, 1.1, 3, 8), (0.3, 0.1, 7.0, 1.3, 4, 11)):

        def bound(way, numbers=numbers):
            return lambda x: way(x, *numbers)

        assert_same_bits(results(bound(compiled), x), results(bound(step), x))


@pytest.mark.reference
def test_nothing_is_overwritten_and_several_losses_share_their_logits():
    x = inputs()
    logits = (x.hidden @ x.weight.t()).detach().requires_grad_()
    before = logits.detach().clone()

    def step(logits):
        options = {"reduction": "sum", "softcap": 20.0}
        first = vp.vocab_parallel_cross_entropy(logits, x.labels, **options)
        second = vp.vocab_parallel_cross_entropy(logits, x.labels.flip(0), **options)
        return first + second + logits.tanh().sum()

    compiled = torch.compile(step, fullgraph=True, backend="inductor")
    for _ in range(2):
        (grad,) = torch.autograd.grad(compiled(logits), logits)
        assert torch.equal(logits, before)
    expected = []
    for dtype in (torch.float64, torch.float32):
        leaf = before.to(dtype, copy=True).requires_grad_()
        capped, each = 20 * torch.tanh(leaf / 20), (x.labels, x.labels.flip(0))
        losses = [nn.functional.cross_entropy(capped, labels, reduction="sum") for labels in each]
        expected += torch.autograd.grad(sum(losses) + leaf.tanh().sum(), leaf)
    assert_within_budget(grad, *expected)


@pytest.mark.reference
@pytest.mark.parametrize(("step", "compiles_forward"), [(log_probs, False), (linear_mean, True)])
def test_compiled_autograd(step, compiles_forward):
    x = inputs()
    forward = torch.compile(step, fullgraph=True, backend="aot_eager") if compiles_forward else step
    expected = results(step, x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="inductor")):
        torch.autograd.backward(*with_grads(flat_outputs(forward(x))))
    assert_same_bits([x.hidden.grad, x.weight.grad], expected[-2:])


def _in_ranks(rank, group, impl, names):
    """For each step, what compiled and eager calls give, with this rank's part of the head."""
    device, n_ranks = device_of(rank, group), group.size()
    width = -(-VOCABULARY // n_ranks)
    found = []
    for name in names:
        torch._dynamo.reset()
        x = inputs(device, part=slice(rank * width, (rank + 1) * width))
        options = {"impl": impl, "group": group}
        if name == "sequence parallel":
            part = x.hidden.detach().chunk(n_ranks)[rank].clone().requires_grad_()
            x, step, options = x._replace(hidden=part), linear_mean, options | {"sequence_parallel": True}
        elif name == "DTensor head":
            mesh = init_device_mesh(device.type, (n_ranks,))
            head = distribute_tensor(inputs(device).weight.detach(), mesh, [Shard(0)]).requires_grad_()
            x, step, options = x._replace(weight=head), linear_none, options | {"group": mesh.get_group()}
        else:
            step = next(step for step in STEPS if step.__name__ == name)
        fullgraph = name != "DTensor head" or TRACES_DTENSORS
        compiled = torch.compile(step, fullgraph=fullgraph, backend=backend_of(device))
        found.append((results(compiled, x, **options), results(step, x, **options)))
    found[-1] = tuple([getattr(t, "_local_tensor", t) for t in each] for each in found[-1])
    return found


@in_ranks((2,), (), (2, 4))
def test_ranks(rank_pool, impl):
    names = ["logits_mean", "class_weights", "linear_log_probs", "sequence parallel", "DTensor head"]
    all_ranks = rank_pool.run(_in_ranks, impl, names)
    for of_rank in all_ranks:
        for compiled, eager in of_rank:
            assert_same_bits(compiled, eager)
        assert_same_bits([of_rank[0][0][0]], [all_ranks[0][0][0][0]])
