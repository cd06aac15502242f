"""DeepSpeed's losses on shards, uneven ones too: fp64, and its own functions if it is there.

The tests that need DeepSpeed skip without it and say so; the others tell the functions the vocabulary, so that they do
not ask DeepSpeed.
"""

import os
from unittest.mock import patch

import pytest
import torch

from tests.support.cases import soft
from tests.support.cases.inputs import DTYPES, batch
from tests.support.cases.logits import Results
from tests.support.frameworks.rl import (
    COLUMNS,
    UNEVEN,
    Found,
    activations,
    assert_right,
    backward,
    curve,
    leaves_of,
    on_devices,
    policy,
    real_module,
    shards,
    summed_grad,
    whole,
)
from tests.support.ranks.collectives import assert_refused, messages_of, record_collectives
from tests.support.ranks.pools import device_of, in_ranks
from vocab_parallel_ce.integrations import deepspeed

in_two_ranks = in_ranks((2,), (), (2,))
LOSS, LINEAR, OPS = deepspeed.LOSS, deepspeed.LINEAR, deepspeed.OPS
NAMES = ("vocab_parallel_cross_entropy", "vocab_parallel_logprobs")


def _bounds(rank, n_ranks):
    start, stop = UNEVEN[n_ranks][rank]
    return {"vocab_start_index": start, "vocab_end_index": stop, "global_vocab_size": COLUMNS}


def _found(functions, name, inputs, group, options):
    """Log-probabilities, or losses as such, of this rank's columns, and the gradient of the logits."""
    leaves = leaves_of(inputs)
    (logits,) = activations(leaves)
    is_loss = name == NAMES[0]
    options = options | ({"reduction": "none"} if is_loss else {})
    with record_collectives() as collectives:
        outputs = getattr(functions, name)(logits, inputs.labels, tp_group=group, **options)
    assert outputs.dtype == torch.float32
    sign = -1 if is_loss else 1
    backward([outputs], [sign * inputs.grads[0]])
    assert torch.equal(logits, inputs.leaves[0])
    return Found(sign * outputs.detach(), None, (leaves[0].grad,)), [call.nbytes for call in collectives]


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_one_rank(device, name, dtype):
    inputs = policy(dtype, device=device)
    found, _ = _found(deepspeed, name, inputs, None, _bounds(0, 1))
    assert_right(found, inputs)


def _on_shards(rank, group, inputs, name):
    inputs = shards(inputs, rank, 2, device_of(rank, group), UNEVEN[2])
    return _found(deepspeed, name, inputs, group, _bounds(rank, 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
@in_two_ranks
def test_uneven_shards(rank_pool, impl, name, dtype):
    inputs = policy(dtype)
    results = rank_pool.run(_on_shards, inputs, name)
    assert all(nbytes == [12 * inputs.labels.numel()] for _, nbytes in results)
    assert_right(whole([found for found, _ in results], UNEVEN[2]), inputs)


def _entropies(rank, group, inputs, functions=deepspeed):
    inputs = shards(inputs, rank, 2, device_of(rank, group), UNEVEN[2])
    (leaf,) = leaves_of(inputs)
    entropy = functions.vocab_parallel_entropy(leaf * 1, tp_group=group)
    backward([entropy], inputs.grads[1:])
    return Found(None, entropy.detach(), (leaf.grad,))


@in_two_ranks
def test_entropies(rank_pool, impl):
    inputs = policy(kind="confident")
    assert_right(whole(rank_pool.run(_entropies, inputs), UNEVEN[2]), inputs)


NONE = {"reduction": "none"}


def _divergences(rank, group, pair, divergence, functions=deepspeed):
    device, (start, stop) = device_of(rank, group), UNEVEN[2][rank]
    student, teacher = (tensor[:, start:stop].to(device) for tensor in (pair.logits, pair.other))
    student.requires_grad_()
    found = functions.vocab_parallel_kl_div(student * 1, teacher, divergence == "reverse", group)
    found.backward(soft.grad_output_of(NONE, len(student)).to(device))
    return Found(found.detach(), None, (student.grad,))


@pytest.mark.parametrize("divergence", ["forward", "reverse"])
@in_two_ranks
def test_divergences(rank_pool, impl, divergence):
    student, teacher = (batch(kind, rows=6, vocab_size=COLUMNS).logits for kind in ("peaked", "confident"))
    pair = soft.Pair(student, teacher, soft.divergences)
    found = whole(rank_pool.run(_divergences, pair, divergence), UNEVEN[2])
    soft.assert_right(Results((found.log_probs,), found.grads[0]), pair, divergence=divergence, **NONE)


def _head(rank, group, inputs, function=deepspeed.vocab_parallel_linear_cross_entropy, **options):
    """In a rank: losses of its rows of the head. The gradient of the hidden states is the sum."""
    inputs = shards(inputs, rank, group.size(), device_of(rank, group), UNEVEN[group.size()])
    leaves = leaves_of(inputs)
    start, stop = UNEVEN[group.size()][rank]
    losses = function(*leaves, inputs.labels, None, group, None, start, stop, reduction="none", **options)
    backward([losses], [-inputs.grads[0]])
    return Found(-losses.detach(), None, tuple(leaf.grad for leaf in leaves))


# With DeepSpeed itself.


def _join_deepspeed():
    """In a rank: give DeepSpeed the process group that there is, and no kernel of its own, which it would compile."""
    real_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    real_module("deepspeed.comm").init_distributed(torch.distributed.get_backend(), auto_mpi_discovery=False)


def _both(rank, group, call, *args):
    """In a rank: what DeepSpeed's own functions get, and ours in their place."""
    _join_deepspeed()
    own = call(rank, group, *args)
    with deepspeed.installed() as report:
        assert report.left == deepspeed.LEFT and f"{LOSS}.vocab_parallel_cross_entropy" in report.rebound
        assert "deepspeed.sequence.vocab_parallel_cross_entropy" in report.rebound
        return own, call(rank, group, *args)


def _every_function(rank, group, inputs, head, pair):
    """DeepSpeed's names, whatever they stand for, with bounds that DeepSpeed checks."""
    ops, bounds = real_module(OPS), {"vocab_start_index": UNEVEN[2][rank][0], "vocab_end_index": UNEVEN[2][rank][1]}
    given = shards(inputs, rank, 2, device_of(rank, group), UNEVEN[2])
    return [
        _found(real_module(LOSS), NAMES[0], given, group, bounds)[0],
        _found(ops, NAMES[1], given, group, bounds)[0],
        _head(rank, group, head, real_module(LINEAR).vocab_parallel_linear_cross_entropy),
        _entropies(rank, group, inputs, ops),
        _divergences(rank, group, pair, "reverse", ops),
    ]


@in_two_ranks
def test_beside_deepspeeds_own_functions(rank_pool, impl):
    real_module(OPS)
    inputs, head = policy(kind="some_ignored"), policy(head=True)
    student, teacher = (batch(kind, rows=6, vocab_size=COLUMNS).logits for kind in ("peaked", "confident"))
    pair = soft.Pair(student, teacher, soft.divergences)
    results = rank_pool.run(_both, _every_function, inputs, head, pair)
    pairs = zip(*(zip(*(result[which] for result in results), strict=True) for which in range(2)), strict=True)
    for number, (own, found) in enumerate(pairs):
        own, found = whole(own, UNEVEN[2]), whole(found, UNEVEN[2])
        if number < 3:
            assert_right(found, head if number == 2 else inputs, own)
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)


@pytest.mark.reference
def test_what_is_left_to_deepspeed_is_its_own_to_the_bit():
    loss, ops, bounds = real_module(LOSS), real_module(OPS), _bounds(0, 1)
    inputs, (teacher,) = policy(), leaves_of(policy(kind="confident"))
    (logits,), indices = inputs.leaves, torch.arange(COLUMNS).expand(*inputs.labels.shape, COLUMNS)

    def every():
        return [
            loss.vocab_parallel_cross_entropy(logits, inputs.labels, backend="liger", **bounds),
            ops.vocab_parallel_logprobs(logits, indices, **bounds),
            ops.vocab_parallel_kl_div(logits, teacher),
        ]

    own = every()
    with deepspeed.installed():
        found = every()
    assert all(map(torch.equal, found, own)) and found[2].requires_grad


def _at_k_ids(rank, group, logits, ids, grad_output):
    """DeepSpeed's log-probabilities of k ids per position and its gradient, then this package's."""
    (start, stop), device, found = UNEVEN[2][rank], device_of(rank, group), []
    for functions in (real_module(OPS), deepspeed):
        leaf = logits[..., start:stop].to(device).contiguous().requires_grad_()
        value = functions.vocab_parallel_logprobs(leaf * 1, ids.to(device), group, start, stop, COLUMNS)
        value.backward(grad_output.to(value))
        found.append((value.detach().cpu(), leaf.grad.cpu()))
    return found


@in_two_ranks
def test_log_probabilities_of_k_ids_per_position(rank_pool, impl):
    real_module(OPS)
    inputs = policy()
    ids = (inputs.labels.clamp(min=0)[..., None] + torch.arange(3)).clamp(max=COLUMNS - 1)
    grad_output = torch.randn(ids.shape)
    for own, found in rank_pool.run(_at_k_ids, inputs.leaves[0].detach(), ids, grad_output):
        for theirs, ours in zip(own, found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def _of_sequences(rank, group, inputs):
    """Each rank has one of the two sequences, and all columns: means, sums and gathered losses, and a gradient."""
    loss, found = real_module(LOSS), []
    (logits,), labels = inputs.leaves, inputs.labels
    for reduction, gathers in (("mean", False), ("sum", False), ("none", True)):
        leaf = logits[rank].to(device_of(rank, group)).requires_grad_()
        value = loss.vocab_parallel_cross_entropy(
            leaf * 1, labels[rank].to(leaf.device), sp_group=group, reduction=reduction, gather_sequence_loss=gathers
        )
        (value.sum() * 0.75).backward()
        found.append((value.detach(), leaf.grad))
    return found


@in_two_ranks
def test_sequence_parallelism_is_deepspeeds(rank_pool, impl):
    real_module(LOSS)
    for own, found in rank_pool.run(_both, _of_sequences, policy()):
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-6)


def _curves(rank, group):
    loss, linear = real_module(LOSS), real_module(LINEAR)
    start, stop = UNEVEN[2][rank]

    def of_logits(hidden, weight, labels):
        module = loss.VocabParallelCausalLMLoss(group, None, start, stop)
        return module(summed_grad(hidden, group) @ weight.t(), shift_labels=labels)

    def of_head(hidden, weight, labels):
        given = hidden, weight, labels, None, group, None, start, stop
        return linear.vocab_parallel_linear_cross_entropy(*given)

    return [curve(rank, group, of, UNEVEN[2]) for of in (of_logits, of_head)]


@in_two_ranks
def test_curves_are_deepspeeds(rank_pool, impl):
    real_module(LINEAR)
    for own, found in rank_pool.run(_both, _curves):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def _engine(rank, group, steps=20):
    """Losses of a model whose head AutoTP cuts into 51 and 50 columns, as DeepSpeed's engine trains it."""
    models, torch_deepspeed = real_module("transformers"), real_module("deepspeed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = models.LlamaForCausalLM(models.LlamaConfig(vocab_size=101, num_key_value_heads=4, **sizes))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": True},
    }
    with patch.dict(os.environ, {"LOCAL_RANK": str(rank)}):
        engine, *_ = torch_deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    assert model.lm_head.weight.shape[0] == (51, 50)[rank]
    ids = torch.randint(0, 101, (2, 12), generator=torch.Generator().manual_seed(1)).to(engine.device)
    losses = []
    for _ in range(steps):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    assert losses[-1] < losses[0] / 2
    return torch.stack(losses)


@in_two_ranks
def test_an_engine_with_autotp_trains_alike(rank_pool, impl):
    real_module(LOSS), real_module("transformers")
    for own, found in rank_pool.run(_both, _engine):
        torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)


def _refusals(rank, group):
    """DeepSpeed's errors are errors here too."""
    logits, labels = torch.randn(2, 3, COLUMNS), torch.full((2, 3), COLUMNS)
    call = deepspeed.vocab_parallel_cross_entropy
    bounds = _bounds(0, 1)
    return messages_of(
        {
            "label": lambda: call(logits, labels, **bounds),
            "bounds": lambda: call(logits, labels, global_vocab_size=COLUMNS),
            "width": lambda: call(logits[..., 1:], labels, **bounds),
            "reduction": lambda: call(logits, labels, reduction="batchmean", **bounds),
            "gathers": lambda: call(logits, labels, gather_sequence_loss=True, **bounds),
        }
    )


@in_two_ranks
def test_refusals(rank_pool, impl):
    expected = {
        "label": "ValueError: labels: ",
        "bounds": "ValueError: global_vocab_size: expected vocab_start_index and vocab_end_index with it, got None",
        "width": "ValueError: logits: last dimension must be the width 20",
        "reduction": "ValueError: reduction: expected one of 'mean', 'sum', 'none', got 'batchmean'",
        "gathers": "ValueError: gather_sequence_loss: expected sp_group and reduction='none' with it, got None, 'mean'",
    }
    assert_refused(rank_pool.run(_refusals), expected)
