"""verl's log-probabilities, entropies, sums of squares and distillation from this package: on request, and undoable.

The functions have the names, parameters, shapes and dtypes of verl 0.9. :func:`install` makes verl use them. Importing
this module does it too if the variable ``VOCAB_PARALLEL_CE_VERL`` is on: so verl's own variable
``VERL_USE_EXTERNAL_MODULES=vocab_parallel_ce.integrations.verl`` switches it on in every process of a program.

What differs from verl in all of them: a label of -100 has log-probability 0, and exactly no gradient; another label
outside the vocabulary gives NaN. Forward never changes logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks, environment
from vocab_parallel_ce.api.heads import linear_token_log_probs
from vocab_parallel_ce.api.logits import output_of, token_log_probs
from vocab_parallel_ce.api.top_k import top_k
from vocab_parallel_ce.integrations.log_probs import head_options, tensor_parallel_group
from vocab_parallel_ce.integrations.rebind import Switch
from vocab_parallel_ce.options import REDUCTIONS

LEFT = {
    "the head without use_fused_kernels": "the model makes its logits",
    "logits of a DTensor in the FSDP engine": "verl gathers them before it calls anything",
}


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return ``[...]`` fp32 log-probabilities of ``labels [...]``, for ``logits [..., V]``.

    They are fp32 for logits of any dtype, as verl's are with flash-attn; without it verl rounds them to that of the
    logits.

    Overwrites: with ``inplace_backward``, backward writes the gradient over ``logits`` if nobody else can see them.

    Example:
        >>> from vocab_parallel_ce.integrations import verl
        >>> verl.logprobs_from_logits(torch.zeros(2, 4), torch.tensor([1, -100]))
        tensor([-1.3863,  0.0000])
    """
    return token_log_probs(logits, labels, gradient="auto" if inplace_backward else "out_of_place")


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return ``[...]`` fp32 log-probabilities for ``logits [..., C]``, this rank's shard of Megatron's vocabulary.

    Overwrites nothing; verl's overwrites fp32 logits in the forward pass. Padded columns count, as they do there.

    Collectives: one all_gather of 12 bytes per token over the tensor-parallel group; verl's has three all_reduces.
    """
    return token_log_probs(logits, labels, group=tensor_parallel_group(), gradient="out_of_place")


def vocab_parallel_entropy(vocab_parallel_logits: Tensor) -> Tensor:
    """Return the entropies ``[...]`` of ``[..., C]`` logits, in their dtype; the arithmetic is fp32.

    Overwrites nothing. verl's backward subtracts from the logits and adds again, which leaves them rounded.

    Collectives: one all_gather of 16 bytes per token over the tensor-parallel group.
    """
    return vocab_parallel_entropy_with_chunking(vocab_parallel_logits).to(vocab_parallel_logits.dtype)


def vocab_parallel_entropy_with_chunking(vocab_parallel_logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Return :func:`vocab_parallel_entropy` in fp32. It needs no memory that chunks would save."""
    return output_of("entropy", vocab_parallel_logits, tensor_parallel_group())


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Return the sums of squared probabilities ``[...]`` of ``logits [..., V]``, in their dtype.

    They have no gradient. The arithmetic is fp32; verl's is that of the logits. Overwrites nothing.

    Example:
        >>> from vocab_parallel_ce.integrations import verl
        >>> verl.calculate_sum_pi_squared_from_logits(torch.zeros(2, 4))
        tensor([0.2500, 0.2500])
    """
    return output_of("sum_sq_probs", logits).to(logits.dtype)


def vocab_parallel_sum_pi_squared(vocab_parallel_logits: Tensor) -> Tensor:
    """Return the sums of squared probabilities ``[...]`` of this rank's shard ``[..., C]``, in its dtype.

    They have no gradient. The arithmetic is fp32; verl's is that of the logits. Overwrites nothing.

    Collectives: one all_gather of 16 bytes per token over the tensor-parallel group; verl's has three all_reduces.
    """
    sums = output_of("sum_sq_probs", vocab_parallel_logits, tensor_parallel_group())
    return sums.to(vocab_parallel_logits.dtype)


class _VocabParallelKLDivergence:
    @staticmethod
    def apply(
        vp_logits: Tensor, target_topk_logps: Tensor, target_topk_indices: Tensor, log_prob_min_clamp: float | None
    ) -> tuple[Tensor, ...]:
        """Return ``[...]`` fp32 KL(teacher || student) over the teacher's ``k`` ids ``[..., k]``, and four for logs.

        Those have no gradient: both models' mass on the ids, how many ids are among the student's ``k`` most probable,
        and the mean advantage of these. ``k`` is not a rank's number of columns, nor all ranks'. Overwrites nothing.

        Collectives: two all_gathers, of ``4 * (k + 3)`` and ``8 * k + 4`` bytes per token; verl's has seven or eight.
        """
        group = tensor_parallel_group()
        log_s: Any = token_log_probs(vp_logits, target_topk_indices, group=group, gradient="out_of_place")
        log_t = target_topk_logps.float()
        if log_prob_min_clamp is not None:
            log_s, log_t = log_s.clamp_min(log_prob_min_clamp), log_t.clamp_min(log_prob_min_clamp)
        terms, likely = log_t.exp() * (log_t - log_s), top_k(vp_logits, log_t.shape[-1], group=group)[0]
        shared = (target_topk_indices.unsqueeze(-1) == likely.unsqueeze(-2)).any(dim=-1)
        n_shared = shared.sum(dim=-1)
        advantage = -(terms.detach() * shared).sum(dim=-1) / n_shared.clamp_min(1)
        masses = (each.detach().exp().sum(dim=-1) for each in (log_s, log_t))
        return terms.sum(dim=-1), *masses, n_shared, advantage


class FusedLinearForPPO(torch.nn.Module):
    """The head and its log-probabilities; the backends of verl do the same here.

    Example:
        >>> from vocab_parallel_ce.integrations import verl
        >>> log_probs, entropy = verl.FusedLinearForPPO()(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]))
        >>> log_probs
        tensor([-1.3863, -1.3863])
    """

    def __init__(self, chunk_size: int = 512, impl_backend: str = "torch") -> None:
        super().__init__()

    def forward(
        self, hidden_states: Tensor, vocab_weights: Tensor, input_ids: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return ``(log_probs, entropy)`` of ``input_ids [...]`` for ``hidden_states [..., D]``.

        Log-probabilities are fp32, entropies of the dtype of ``hidden_states``. The gradient of
        ``vocab_weights [V, D]`` is summed in fp32 and rounded once; verl's is rounded every 512 tokens. Chunks are this
        package's.
        """
        labels = input_ids.to(torch.int64)
        outputs: Any = linear_token_log_probs(
            hidden_states, vocab_weights, labels, temperature=temperature, outputs=("entropy",), options=head_options()
        )
        return outputs.log_probs, outputs.entropy.to(hidden_states.dtype)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    reduction: str = "none",
    dist_process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """Return fp32 ``(log_probs, entropy)`` for all ``T`` tokens of ``hidden [..., D]`` and ``labels [...]``.

    ``entropy`` is ``[T]``. ``log_probs`` is ``[T]``, or their sum or mean over all tokens. With
    ``dist_process_group``, ``weight [C, D]`` is this rank's equal part of the vocabulary, and the gradient of
    ``hidden`` is this rank's share of a sum, as verl's is. The caller adds the shares: the backward of Megatron's
    ``gather_from_sequence_parallel_region`` does. ``linear_token_log_probs`` gives the sum itself.

    The logits of 16-bit hidden states stay fp32, as those of verl's kernel do. That kernel returns what was in the
    memory for -100, and adds a sum or a mean to it.

    Raises:
        ValueError: ``reduction`` is another word.

    Example:
        >>> from vocab_parallel_ce.integrations import verl
        >>> log_probs, entropy = verl.linear_cross_entropy(torch.ones(2, 3), torch.zeros(4, 3), torch.tensor([0, 3]))
        >>> entropy
        tensor([1.3863, 1.3863])
    """
    reduction = reduction.lower()
    checks.check_choice("reduction", reduction, REDUCTIONS)
    tokens, group = hidden.reshape(-1, hidden.shape[-1]), dist_process_group
    is_whole, labels = group is None, labels.reshape(-1)
    outputs: Any = linear_token_log_probs(
        tokens,
        weight,
        labels,
        group=group,
        temperature=temperature,
        outputs=("entropy",),
        options=head_options(logits_dtype=torch.float32, reduce_hidden_grad=is_whole),
    )
    log_probs = outputs.log_probs
    if reduction != "none":
        log_probs = log_probs.sum() if reduction == "sum" else log_probs.mean()
    return log_probs, outputs.entropy


_MEGATRON = "verl.utils.megatron.tensor_parallel"
_switch = Switch(
    "verl 0.9",
    {
        "verl.utils.torch_functional:logprobs_from_logits": logprobs_from_logits,
        "verl.utils.torch_functional:calculate_sum_pi_squared_from_logits": calculate_sum_pi_squared_from_logits,
        f"{_MEGATRON}:vocab_parallel_sum_pi_squared": vocab_parallel_sum_pi_squared,
        f"{_MEGATRON}:vocab_parallel_log_probs_from_logits": vocab_parallel_log_probs_from_logits,
        f"{_MEGATRON}:vocab_parallel_entropy": vocab_parallel_entropy,
        f"{_MEGATRON}:vocab_parallel_entropy_with_chunking": vocab_parallel_entropy_with_chunking,
        "verl.trainer.distillation.megatron.losses:_VocabParallelKLDivergence": _VocabParallelKLDivergence,
        "verl.utils.experimental.torch_functional:FusedLinearForPPO.forward": FusedLinearForPPO.forward,
        "verl.utils.kernel.linear_cross_entropy:linear_cross_entropy": linear_cross_entropy,
    },
    LEFT,
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report

if environment.switch(environment.VERL):
    install()
