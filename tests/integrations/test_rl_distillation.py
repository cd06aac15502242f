"""What NeMo-RL and verl call to distil on shards of the vocabulary, against fp64, on two ranks.

The frameworks need not be here; ``test_native_functions.py`` compares with their own functions where they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.cases.inputs import DTYPES
from tests.support.frameworks import rl
from tests.support.ranks.collectives import record_collectives
from tests.support.ranks.pools import device_of
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce.integrations import nemo_rl, verl

K, CLAMP = 4, -3.0


class Given(NamedTuple):
    """What is given besides the student's logits; in a rank the logits are its columns."""

    teacher: Any
    ids: Any  # [2, 4, k] of the teacher
    log_probs: Any  # its own there
    group: Any = None
    columns: tuple[int, int] = (0, rl.COLUMNS)


def _topk_kl(z, on, clamp):
    """verl's, with what it logs: masses, the number of ids that both have, and what these contribute."""
    log_s, log_t = z.log_softmax(-1).gather(-1, on.ids), on.log_probs.to(z.dtype)
    if clamp is not None:
        log_s, log_t = log_s.clamp(min=clamp), log_t.clamp(min=clamp)
    terms = log_t.exp() * (log_t - log_s)
    is_shared = torch.zeros_like(z).scatter(-1, z.topk(K).indices, 1.0).gather(-1, on.ids)
    n_shared = is_shared.sum(-1)
    advantage = -(terms * is_shared).sum(-1) / n_shared.clamp(min=1)
    return terms.sum(-1), log_s.exp().sum(-1), log_t.exp().sum(-1), n_shared, advantage


def _log_pair(z, on):
    return z.log_softmax(-1), on.teacher.to(z.dtype).log_softmax(-1)


def _cross_entropy(z, on):
    log_s, log_t = _log_pair(z, on)
    return (-(log_t.exp() * log_s).sum(-1),)


def _reverse(z, on):
    log_s, log_t = _log_pair(z, on)
    return ((log_s.exp() * (log_s - log_t)).sum(-1),)


class Case(NamedTuple):
    call: Callable[..., Any]  # of a stand-in, of a rank's logits; its first output has a gradient
    truth: Callable[..., tuple[Any, ...]]  # the same of all columns
    n_bytes: tuple[int, ...]  # that each token sends


CASES = {
    "NeMo-RL, ids": Case(
        lambda z, on, *only: nemo_rl._ChunkedDistributedGatherLogprob.apply(z, on.ids, *on.columns, 3, on.group, *only),
        lambda z, on: (z.log_softmax(-1).gather(-1, on.ids),),
        (4 * (K + 3),),
    ),
    "NeMo-RL, entropy": Case(
        lambda z, on, *only: nemo_rl._ChunkedDistributedEntropy.apply(z, 3, on.group, *only),
        lambda z, on: ((z.softmax(-1) * z.log_softmax(-1)).sum(-1),),
        (16,),
    ),
    "NeMo-RL, cross-entropy": Case(
        lambda z, on, *only: nemo_rl._DistributedCrossEntropy.apply(z, on.teacher, on.group, *only),
        _cross_entropy,
        (16, 20),
    ),
    "NeMo-RL, reverse": Case(
        lambda z, on, *only: nemo_rl._ChunkedDistributedReverseKLToFixedLogits.apply(z, on.teacher, 3, on.group, *only),
        _reverse,
        (20,),
    ),
    **{
        f"verl, clamp {clamp}": Case(
            lambda z, on, *only, c=clamp: verl._VocabParallelKLDivergence.apply(z, on.log_probs, on.ids, c),
            lambda z, on, c=clamp: _topk_kl(z, on, c),
            (4 * (K + 3), 8 * K + 4),
        )
        for clamp in (None, CLAMP)
    },
}


def _inputs(dtype):
    """A student, and a teacher of which two ids of a token are the same."""
    student, teacher = (rl.policy(dtype, kind).leaves[0] for kind in ("peaked", "confident"))
    log_probs, ids = teacher.float().log_softmax(-1).topk(K)
    ids[0, 1, 1] = ids[0, 1, 0]
    log_probs[0, 1, 1] = log_probs[0, 1, 0] = -1.0
    return student, Given(teacher, ids, log_probs)


def _in_rank(rank, group, name, student, given, grad):
    call, start, end = CASES[name].call, *rl.columns_of(rank, group)
    student, teacher, ids, log_probs, grad = (
        tensor.to(device_of(rank, group))
        for tensor in (student[..., start:end], given.teacher[..., start:end], *given[1:3], grad)
    )
    on, leaf = Given(teacher, ids, log_probs, group, (start, end)), student.clone().requires_grad_()
    logits = leaf * 1
    with pytest.MonkeyPatch.context() as patch, record_collectives() as collectives:
        patch.setattr(verl, "tensor_parallel_group", lambda: group)
        outputs = call(logits, on)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        outputs[0].backward(grad)
    assert torch.equal(logits, student) and not any(output.requires_grad for output in outputs[1:])
    assert len(outputs) > 1 or not call(logits, on, True).requires_grad
    return [output.detach() for output in outputs], leaf.grad, [each.nbytes for each in collectives]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
@rl.in_two_ranks
def test_two_ranks(rank_pool, impl, name, dtype):
    student, given = _inputs(dtype)

    def expected(in_dtype):
        leaf = student.to(in_dtype, copy=True).requires_grad_()
        outputs = CASES[name].truth(leaf, given)
        return outputs, torch.autograd.grad(outputs[0], leaf, grad.to(in_dtype))[0]

    n_outputs = CASES[name].truth(student.float(), given)[0].shape
    grad = torch.randn(n_outputs, generator=torch.Generator().manual_seed(2))
    (truths, true_grad), (peers, peer_grad) = expected(torch.float64), expected(torch.float32)
    results = rank_pool.run(_in_rank, name, student, given, grad)
    for outputs, _, n_bytes in results:
        assert n_bytes == [each * rl.SEQUENCES * rl.LENGTH for each in CASES[name].n_bytes]
        for output, first, truth, peer in zip(outputs, results[0][0], truths, peers, strict=True):
            assert torch.equal(output, first)
            assert_within_budget(output.float(), truth.detach(), peer.detach())
    assert_within_budget(torch.cat([each for _, each, _ in results], dim=-1), true_grad, peer_grad)
