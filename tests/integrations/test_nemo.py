"""NeMo-RL's samplers and refusals, and masks and weights of NeMo Automodel; ``test_drop_ins.py`` has the rest."""

import pytest
import torch

from tests.integrations.test_drop_ins import Sampling, automodel_module
from tests.support.frameworks.rl import COLUMNS, columns_of, in_two_ranks, policy
from tests.support.ranks.collectives import assert_refused, messages_of
from tests.support.ranks.pools import device_of
from vocab_parallel_ce.integrations import nemo_automodel, nemo_rl, skyrl


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
    start, end = columns_of(rank, group)
    device = device_of(rank, group)
    leaf = logits[:, start:end].to(device).requires_grad_()
    core = nemo_rl.ChunkedDistributedLogprobWithSampling if chunked else nemo_rl.DistributedLogprobWithSampling
    log_probs = core.apply(leaf * 1, target.to(device), group, top_k, top_p, *((3,) if chunked else ()))
    log_probs.backward(grad.to(device))
    next_log_probs = nemo_rl.from_parallel_logits_to_logprobs(
        leaf.detach()[None], target.to(device)[None], start, end, group, sampling_params=Sampling(top_k, top_p)
    )
    return log_probs.detach().cpu(), leaf.grad.cpu(), next_log_probs.cpu()


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
        for log_probs, _, next_log_probs in results:
            torch.testing.assert_close(log_probs, truth.detach().float(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(next_log_probs[0], next_truth.float(), rtol=1e-5, atol=1e-5)
        actual = torch.cat([grad_of_rank for _, grad_of_rank, _ in results], dim=-1)
        torch.testing.assert_close(actual, whole_logits.grad.float(), rtol=1e-5, atol=1e-6)


def _refusals(rank, group):
    device = device_of(rank, group)
    logits, target = torch.randn(2, 4, 10, device=device), torch.zeros(2, 4, dtype=torch.int64, device=device)
    hidden, head = torch.randn(2, 2, 8, device=device), torch.randn(10, 8, device=device)
    start, end = columns_of(rank, group)
    from_logits, from_hidden = nemo_rl.from_parallel_logits_to_logprobs, nemo_rl.from_parallel_hidden_states_to_logprobs
    core, skyrl_head = nemo_rl.DistributedLogprob.apply, skyrl.FusedLinearChunkedDistributedLogprob.apply
    attempts = {
        "cut otherwise": lambda: core(logits, target, start + 1, end + 1, group),
        "padded": lambda: core(logits, target, start, end - 1, group),
        "head": lambda: from_hidden(hidden, head, None, target, 0, 9, group),
        "SkyRL's head": lambda: skyrl_head(hidden, head, target[:, :2], start, end - 1, 4, group),
        "top-k": lambda: from_logits(logits, target, start, end - 1, group, sampling_params=Sampling(top_k=5)),
        "cp": lambda: from_logits(logits, target, start, end, group, cp_group=group),
        "cp of hidden": lambda: from_hidden(hidden, head, None, target, start, end, group, cp_group=group),
        "short": lambda: from_logits(logits[:, :2], target, start, end, group),
    }
    return messages_of(attempts)


@in_two_ranks
def test_refusals(rank_pool, impl):
    columns = (
        r"ValueError: vocab_start_index, vocab_end_index: expected \(.*\), those of rank . with equal shards of 10"
    )
    expected = dict.fromkeys(("cut otherwise", "padded", "head", "SkyRL's head", "top-k"), columns)
    expected |= dict.fromkeys(("cp", "cp of hidden"), "ValueError: cp_group: expected None or one rank, got 2; call ")
    assert_refused(rank_pool.run(_refusals), expected | {"short": "ValueError: labels: shape"})


@pytest.mark.reference
def test_masks_weights_and_numbers_of_tokens():
    inputs = policy()
    logits, labels, weights = inputs.leaves[0], inputs.labels, inputs.grads[0].abs()
    mask = torch.ones_like(labels)
    mask[0, 1] = 0
    before = labels.clone()
    each = nemo_automodel.masked_cross_entropy(automodel_module(), logits, labels, mask)
    assert each.shape == (labels.numel(),)
    each = each.view(labels.shape)
    call = nemo_automodel.masked_cross_entropy
    assert torch.equal(labels, before) and not each[0, 1] and each[1].any()
    summed = automodel_module(reduction="sum")
    torch.testing.assert_close(call(summed, logits, labels, mask, 7), each.sum() / 7)
    torch.testing.assert_close(call(summed, logits, labels, mask, 7, weights), (each * weights).sum() / 7)
    assert call(summed, logits, labels, mask, 0) == call(summed, logits, labels, mask, 0, weights) == 0
    packed = logits.flatten(0, 1)[None], labels.flatten(), mask.flatten(), 7
    assert torch.equal(call(summed, *packed), call(summed, logits, labels, mask, 7))
    torch.testing.assert_close(call(summed, *packed, weights.flatten()), (each * weights).sum() / 7)
    other = automodel_module(ignore_index=3)
    assert not call(other, logits, labels)[((labels == -100) | (labels == 3)).flatten()].any()
    for name, arguments in (("num_label_tokens", (None, 7)), ("loss_weights", (None, None, weights))):
        with pytest.raises(ValueError, match=f"{name}: expected reduction='sum' with it, got 'mean'"):
            call(automodel_module(reduction="mean"), logits, labels, *arguments)
    with pytest.raises(ValueError, match="loss_weights: expected the shape of labels"):
        call(summed, logits, labels, None, None, weights[:1])
