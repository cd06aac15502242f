"""A temperature per token on ranks: one collective as without it, and what ranks and DTensors make of it."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.logits.test_temperature import temperatures
from tests.support import linear_ranks
from tests.support.collectives import error_of
from tests.support.inputs import NAN
from tests.support.linear import linear_every_output, projection
from tests.support.logits import broad_rows, every_output, grads_of_every_output
from tests.support.logits_ranks import Case, check, run
from tests.support.ranks import device_of, in_ranks, in_several_ranks, in_two_ranks
from vocab_parallel_ce import token_log_probs, verify_calls
from vocab_parallel_ce.integrations import dtensor

VOCAB, ROWS = 40, 6


@in_several_ranks
def test_every_output_in_one_exchange(rank_pool, impl):
    """Ignored rows may hold a NaN temperature."""
    logits, labels = broad_rows("some_ignored", ROWS, VOCAB)
    options = {"temperature": temperatures(rows=ROWS).masked_fill(labels < 0, NAN), "logit_scale": 0.4, "softcap": 10.0}
    grads = tuple(grads_of_every_output(ROWS))
    case = Case(logits, labels, impl, options, grad_outputs=grads, function=every_output)
    check(case, rank_pool.run(run, case))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@in_two_ranks
def test_every_output_of_a_head(rank_pool, impl, sequence_parallel):
    """With sequence parallelism each chunk has tokens of both ranks."""
    inputs = projection("shard_edges", ROWS, VOCAB, shards=2)
    options = {"temperature": temperatures(rows=ROWS), "chunk_tokens": 4, "sequence_parallel": sequence_parallel}
    grads = tuple(grads_of_every_output(ROWS))
    case = linear_ranks.Case(inputs, impl, options, grad_outputs=grads, function=linear_every_output)
    linear_ranks.check(case, rank_pool.run(linear_ranks.run, case))


def _verified(rank, group, case):
    """In a rank: what a call raises if only the first rank has the temperature, or has another."""
    given = case.options["temperature"].to(device_of(rank, group))
    own = [given, given if rank == 0 else given + 1, given if rank == 0 else 0.7]
    with verify_calls():
        return [error_of(run, rank, group, case._replace(options={"temperature": t})) for t in own]


@in_ranks((2,), (), (2,))
def test_verification_notices_another_temperature(rank_pool, impl):
    grads = (torch.ones(ROWS),)
    options = {"temperature": temperatures(rows=ROWS)}
    case = Case(*broad_rows("peaked", ROWS, VOCAB), impl, options, grad_outputs=grads, function=token_log_probs)
    for same, other, number in rank_pool.run(_verified, case):
        assert same is None
        assert other.startswith("ValueError: temperature: rank 1 of 2 has shape (6,), norm "), other
        assert number.startswith("ValueError: temperature: rank 1 of 2 has 0.7, rank 0 has shape (6,)"), number


def _dtensors(rank, group, case):
    """In a rank: log-probs with plain and DTensor labels, and the errors of temperatures that are not plain."""
    device, given = device_of(rank, group), {"impl": case.impl}
    mesh = DeviceMesh.from_group(group, device.type)
    logits = distribute_tensor(case.logits.to(device), mesh, [Shard(1)])
    labels, t = case.labels.to(device), case.options["temperature"].to(device)
    whole, of_rows = (distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (labels, t))
    found = [dtensor.token_log_probs(logits, each, temperature=t, **given) for each in (labels, whole)]
    error = error_of(partial(dtensor.token_log_probs, logits, whole, temperature=of_rows))
    return found[0].cpu(), found[1].to_local().cpu(), error


@in_ranks((2,), (), (2,))
def test_the_function_over_dtensors_takes_plain_temperatures(rank_pool, impl):
    case = Case(*broad_rows("peaked", ROWS, VOCAB), impl, {"temperature": temperatures(rows=ROWS)})
    expected = token_log_probs(case.logits, case.labels, **case.options)
    for plain, distributed, error in rank_pool.run(_dtensors, case):
        torch.testing.assert_close(plain, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(plain, distributed)
        assert error.startswith("TypeError: temperature: expected this rank's part as a plain torch.Tensor"), error
