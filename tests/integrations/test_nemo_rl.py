"""NeMo-RL's log-probabilities on shards: the formulas of its source in fp64, and its own functions if it is there.

No index has NeMo-RL, so it is not in CI: put a checkout of it on PYTHONPATH. The tests that need it skip and say so;
the formulas do not.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from tests.support.cases.inputs import DTYPES
from tests.support.frameworks.rl import (
    COLUMNS,
    LENGTH,
    SEQUENCES,
    Found,
    activations,
    assert_right,
    backward,
    in_two_ranks,
    leaves_of,
    policy,
    real_module,
    shards,
    whole,
)
from tests.support.ranks.collectives import assert_refused, messages_of, record_collectives
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import nemo_rl

MODULE = "nemo_rl.distributed.model_utils"


class Sampling(NamedTuple):
    """As ``TrainingSamplingParams``."""

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


def _columns(rank, group):
    width = COLUMNS // group.size()
    return rank * width, (rank + 1) * width


def _next_tokens(inputs):
    """The same tokens as targets before they are rolled: that of each but the last is the next one's label."""
    return inputs._replace(labels=inputs.labels.roll(1, dims=-1))


def _without_the_last(inputs):
    """What counts in fp64: the last token of a sequence has no next one."""
    labels, grads = inputs.labels.clone(), tuple(grad.clone() for grad in inputs.grads)
    labels[:, -1] = -100
    return inputs._replace(labels=labels, grads=grads)


def _core(rank, group, inputs, chunked, flat):
    """In a rank: log-probabilities of the core, with its collectives."""
    inputs = shards(inputs, rank, group.size(), device_of(rank, group))
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    shape = (-1,) if flat else (SEQUENCES, LENGTH)
    given = logits.view(*shape, logits.shape[-1]), inputs.labels.view(shape), *_columns(rank, group)
    with record_collectives() as collectives:
        if chunked:
            log_probs = nemo_rl.ChunkedDistributedLogprob.apply(*given, 3, group)
        else:
            log_probs = nemo_rl.DistributedLogprob.apply(*given, None)  # all ranks, as torch.distributed takes it
        assert log_probs.shape == given[1].shape and log_probs.dtype == torch.float32
        backward([log_probs], [inputs.grads[0].view(shape)])
    assert torch.equal(logits, inputs.leaves[0])
    alone = nemo_rl.DistributedLogprob.apply(*given, group, True)
    assert torch.equal(alone, log_probs) and not alone.requires_grad
    found = Found(log_probs.detach().view(SEQUENCES, LENGTH), None, (leaves[0].grad,))
    return found, [call.nbytes for call in collectives]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("chunked", "flat"), [(False, False), (True, False), (False, True)])
@in_two_ranks
def test_the_cores(rank_pool, impl, chunked, flat, dtype):
    inputs = policy(dtype)
    results = rank_pool.run(_core, inputs, chunked, flat)
    assert all(nbytes == [12 * inputs.labels.numel()] for _, nbytes in results)
    assert_right(whole([found for found, _ in results]), inputs)


def _of_next_tokens(rank, group, inputs, padding, function=None):
    """In a rank: ``[b, s - 1]``, and the gradient of logits that padding makes longer."""
    inputs = shards(inputs, rank, group.size(), device_of(rank, group))
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    padded = torch.cat([logits, logits.new_full((SEQUENCES, padding, logits.shape[-1]), 7.0)], dim=1)
    function = function or nemo_rl.from_parallel_logits_to_logprobs
    log_probs = function(
        padded, inputs.labels, *_columns(rank, group), group, sampling_params=Sampling(temperature=0.7)
    )
    backward([log_probs], [inputs.grads[0][:, :-1]])
    return Found(torch.nn.functional.pad(log_probs.detach(), (0, 1)), None, (leaves[0].grad,))


@pytest.mark.parametrize("padding", [0, 2])
@in_two_ranks
def test_of_next_tokens(rank_pool, impl, padding):
    """A temperature among the sampling parameters changes nothing, as in NeMo-RL."""
    inputs = policy(kind="confident")
    found = whole(rank_pool.run(_of_next_tokens, _next_tokens(inputs), padding))
    assert_right(found, _without_the_last(inputs))


def _filtered(logits, target, top_k, top_p):
    """Log-probabilities ``[N]`` as NeMo-RL's filter leaves them: what sorting puts below both edges is -inf."""
    in_order, order = logits.detach().sort(dim=-1)
    if top_k > 0:
        in_order = in_order.masked_fill(in_order < in_order[:, -top_k].unsqueeze(-1), -torch.inf)
    if top_p < 1:
        is_kept = in_order.softmax(-1).cumsum(-1) > 1 - top_p
        is_kept[:, -1] = True
        in_order = in_order.masked_fill(~is_kept, -torch.inf)
    is_dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, in_order == -torch.inf)
    return logits.masked_fill(is_dropped, -torch.inf).log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


def _with_sampling(rank, group, logits, target, grad, top_k, top_p, chunked):
    start, end = _columns(rank, group)
    device = device_of(rank, group)
    leaf = logits[:, start:end].to(device).requires_grad_()
    core = nemo_rl.ChunkedDistributedLogprobWithSampling if chunked else nemo_rl.DistributedLogprobWithSampling
    log_probs = core.apply(leaf * 1, target.to(device), group, top_k, top_p, *((3,) if chunked else ()))
    log_probs.backward(grad.to(device))
    of_next = nemo_rl.from_parallel_logits_to_logprobs(
        leaf.detach()[None], target.to(device)[None], start, end, group, sampling_params=Sampling(top_k, top_p)
    )
    return log_probs.detach().cpu(), leaf.grad.cpu(), of_next.cpu()


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.8), (9, 0.7)])
@in_two_ranks
def test_top_k_and_top_p(rank_pool, impl, top_k, top_p):
    """Against the filter of NeMo-RL's source, of the whole vocabulary."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(11, COLUMNS, generator=generator) * 3
    target, grad = logits.topk(3).indices[:, 1], torch.randn(11, generator=generator)
    whole_logits = logits.double().requires_grad_()
    truth = _filtered(whole_logits, target, top_k, top_p)
    grad = grad.masked_fill(truth.isinf(), 0.0)  # what a trainer does with a token that its sampler could not draw
    truth.masked_fill(truth.isinf(), 0.0).backward(grad.double())
    next_truth = _filtered(logits.double()[:-1], target[1:], top_k, top_p)
    for chunked in (False, True):
        results = rank_pool.run(_with_sampling, logits, target, grad, top_k, top_p, chunked)
        for log_probs, _, of_next in results:
            torch.testing.assert_close(log_probs, truth.detach().float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(of_next[0], next_truth.float(), rtol=1e-5, atol=1e-5)
        found = torch.cat([grad_of_rank for _, grad_of_rank, _ in results], dim=-1)
        torch.testing.assert_close(found, whole_logits.grad.float(), rtol=1e-5, atol=1e-6)


def _of_hidden_states(rank, group, inputs, frozen=False, function=None, chunk_size=2):
    """In a rank: from its part of the sequence, ``[s / R, b, D]``."""
    n_ranks = group.size()
    inputs = shards(inputs, rank, n_ranks, device_of(rank, group))
    hidden, weight = leaves_of(inputs)
    weight.requires_grad_(not frozen)
    part = hidden.detach().transpose(0, 1).contiguous().chunk(n_ranks)[rank].clone().requires_grad_()
    function = function or nemo_rl.from_parallel_hidden_states_to_logprobs
    given = part, weight, False, inputs.labels, *_columns(rank, group), group
    log_probs = function(*given, chunk_size=chunk_size)
    assert log_probs.dtype == torch.float32 and log_probs.shape == (SEQUENCES, LENGTH - 1)
    backward([log_probs], [inputs.grads[0][:, :-1]])
    assert torch.equal(part, hidden.detach().transpose(0, 1).chunk(n_ranks)[rank]) and part.grad.shape == part.shape
    parts = [torch.empty_like(part.grad) for _ in range(n_ranks)]
    dist.all_gather(parts, part.grad.contiguous(), group=group)
    log_probs = torch.nn.functional.pad(log_probs.detach(), (0, 1))
    return Found(log_probs, None, (torch.cat(parts).transpose(0, 1).contiguous(), weight.grad))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@in_two_ranks
def test_of_hidden_states(rank_pool, impl, dtype):
    inputs = policy(dtype, "peaked", head=True)
    found = whole(rank_pool.run(_of_hidden_states, _next_tokens(inputs)))
    assert_right(found, _without_the_last(inputs))


def _refusals(rank, group):
    device = device_of(rank, group)
    logits, target = torch.randn(2, 4, 10, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    hidden, head = torch.randn(2, 2, 8, device=device), torch.randn(10, 8, device=device)
    start, end = _columns(rank, group)
    of_logits, of_hidden = nemo_rl.from_parallel_logits_to_logprobs, nemo_rl.from_parallel_hidden_states_to_logprobs
    core = nemo_rl.DistributedLogprob.apply
    return messages_of(
        {
            "cut otherwise": lambda: core(logits, target, start + 1, end + 1, group),
            "padded": lambda: core(logits, target, start, end - 1, group),
            "head": lambda: of_hidden(hidden, head, None, target, 0, 9, group),
            "cp": lambda: of_logits(logits, target, start, end, group, cp_group=group),
            "cp of hidden": lambda: of_hidden(hidden, head, None, target, start, end, group, cp_group=group),
            "top-k": lambda: of_logits(logits, target, start, end - 1, group, sampling_params=Sampling(top_k=5)),
            "short": lambda: of_logits(logits[:, :2], target, start, end, group),
        }
    )


@in_two_ranks
def test_refusals(rank_pool, impl):
    columns = (
        r"ValueError: vocab_start_index, vocab_end_index: expected \(.*\), those of rank . with equal shards of 10"
    )
    cp = "ValueError: cp_group: expected None or one rank, got 2; call "
    expected: dict[str, Any] = dict.fromkeys(("cut otherwise", "padded", "head", "top-k"), columns)
    expected |= {
        "cp": cp,
        "cp of hidden": cp,
        "short": "ValueError: labels: shape",
    }
    assert_refused(rank_pool.run(_refusals), expected)


# With NeMo-RL itself.


def _beside(rank, group, inputs, head):
    """In a rank: NeMo-RL's own functions, by themselves and with the cores of this package."""
    utils, chosen = real_module(MODULE), []

    def every():
        if head:
            return [_of_hidden_states(rank, group, inputs, function=utils.from_parallel_hidden_states_to_logprobs)]
        plain = [
            _of_next_tokens(rank, group, inputs, padding, utils.from_parallel_logits_to_logprobs) for padding in (0, 2)
        ]
        return [*plain, _chunked(rank, group, inputs, utils), _packed(rank, group, inputs, utils)]

    chosen.append(every())
    with nemo_rl.installed() as report:
        assert len(report.rebound) >= 5 and report.left == nemo_rl._switch.left
        chosen.append(every())
    return chosen


def _chunked(rank, group, inputs, utils):
    def function(*given, sampling_params):
        return utils.from_parallel_logits_to_logprobs(*given, chunk_size=3)

    return _of_next_tokens(rank, group, inputs, 0, function)


def _packed(rank, group, inputs, utils):
    """Two sequences of one tensor."""

    def function(logits, labels, start, end, group, sampling_params):
        ends = torch.arange(0, SEQUENCES * LENGTH + 1, LENGTH, device=logits.device)
        given = logits.reshape(1, SEQUENCES * LENGTH, -1), labels.reshape(1, -1), ends, LENGTH, start, end, group
        return utils.from_parallel_logits_to_logprobs_packed_sequences(*given)

    return _of_next_tokens(rank, group, inputs, 0, function)


@pytest.mark.parametrize("head", [False, True], ids=["logits", "hidden states"])
@in_two_ranks
def test_beside_nemo_rls_own_functions(rank_pool, impl, head):
    real_module(MODULE)
    inputs = policy(kind="confident", head=head)
    results = rank_pool.run(_beside, _next_tokens(inputs), head)
    assert len(results[0][0]) == (1 if head else 4)
    for own, found in zip(
        *(zip(*(result[which] for result in results), strict=True) for which in range(2)), strict=True
    ):
        assert_right(whole(found), _without_the_last(inputs), whole(own))


def _with_context_parallelism(rank, group, inputs):
    """In a rank: its two quarters of the sequence, and the whole vocabulary."""
    utils = real_module(MODULE)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    inputs, found = inputs.to(device_of(rank, group)), []

    def own_part():
        leaf = utils._get_tokens_on_this_cp_rank(inputs.leaves[0], rank, 2).clone().requires_grad_()
        log_probs = utils.from_parallel_logits_to_logprobs(leaf * 1, inputs.labels, 0, COLUMNS, alone, cp_group=group)
        if log_probs.is_cuda:  # its backward over context parallelism is written for GPUs
            backward([log_probs], [inputs.grads[0][:, :-1]])
        return [log_probs.detach()] if leaf.grad is None else [log_probs.detach(), leaf.grad]

    found.append(own_part())
    with nemo_rl.installed():
        found.append(own_part())
    return found


@in_two_ranks
def test_nemo_rls_context_parallelism_is_its_own(rank_pool, impl):
    real_module(MODULE)
    inputs = _next_tokens(policy(kind="peaked"))
    for own, found in rank_pool.run(_with_context_parallelism, inputs):
        for first, second in zip(own, found, strict=True):
            torch.testing.assert_close(second, first, rtol=1e-5, atol=1e-5)
