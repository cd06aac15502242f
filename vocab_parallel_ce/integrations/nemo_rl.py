"""NeMo-RL's log-probabilities and distillation on shards of the vocabulary: on request, and undoable.

The functions and classes have the names, parameters, shapes and dtypes of NeMo-RL 0.7. :func:`install` replaces the
cores ``DistributedLogprob`` and ``ChunkedDistributedLogprob``, those of the same names with ``WithSampling``,
``from_parallel_hidden_states_to_logprobs``, and for distillation ``ChunkedDistributedGatherLogprob``,
``ChunkedDistributedEntropy`` and ``DistributedCrossEntropy``. So NeMo-RL's own functions, which roll and cut the
targets, gather over context parallelism and unpack sequences, stay as they are and call them. Tested is 0.7.0; of 0.8,
which is not released, ``ChunkedDistributedReverseKLToFixedLogits`` was read in main, after pull request 3978.

What differs: a target of -100 has log-probability 0 and exactly no gradient; another target outside the vocabulary
gives NaN, where NeMo-RL returns 0 with a gradient. Ranks whose shards are not equal are refused. Of logits that are
equal at the edge of a nucleus, top-p filtering keeps all; NeMo-RL's keeps those that its sort puts last.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce.api.distillation import distillation_loss
from vocab_parallel_ce.api.heads import linear_token_log_probs
from vocab_parallel_ce.api.logits import output_of, token_log_probs
from vocab_parallel_ce.api.sampling import sampling_threshold
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.integrations.log_probs import (
    ChunkedDistributedLogprob,
    DistributedLogprob,
    group_of_columns,
    head_options,
    whole_group,
)
from vocab_parallel_ce.integrations.rebind import Around, Switch, copy_of


class DistributedLogprobWithSampling:
    """Has ``apply``, as an autograd Function has.

    Example:
        >>> from vocab_parallel_ce.integrations import nemo_rl
        >>> logits, target = torch.tensor([[3.0, 3.0, 0.0, 0.0]]), torch.tensor([1])
        >>> nemo_rl.DistributedLogprobWithSampling.apply(logits, target, None, 2, 1.0)
        tensor([-0.6931])
    """

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Any,
        top_k: int | None,
        top_p: float | None,
        inference_only: bool = False,
    ) -> Tensor:
        """Return ``[...]`` fp32 log-probabilities of ``target [...]`` among the logits that a sampler keeps.

        ``top_k`` first, then the nucleus ``top_p`` of what it leaves. A target that they drop has ``-inf``. Overwrites
        nothing; backward writes the gradient into a new tensor. No logits are communicated.

        Collectives: those of ``sampling_threshold``, and one all_gather of 12 bytes per token; none in backward.

        Args:
            vocab_parallel_logits: ``[..., C]``, this rank's columns of equal shards.
            top_k: None or a number that is not positive leaves all.
            top_p: None or 1.0 leaves all.
            inference_only: build no graph.
        """
        group = whole_group(tp_group)
        kept = {"top_k": top_k if top_k is not None and top_k > 0 else None, "top_p": 1.0 if top_p is None else top_p}
        threshold = sampling_threshold(vocab_parallel_logits, **kept, group=group)  # type: ignore[arg-type]
        with torch.no_grad() if inference_only else nullcontext():
            return token_log_probs(
                vocab_parallel_logits, target, group=group, threshold=threshold, gradient="out_of_place"
            )


class ChunkedDistributedLogprobWithSampling:
    """Has ``apply``, as an autograd Function has.

    Example:
        >>> from vocab_parallel_ce.integrations import nemo_rl
        >>> logits, target = torch.tensor([[3.0, 3.0, 0.0, 0.0]]), torch.tensor([1])
        >>> nemo_rl.ChunkedDistributedLogprobWithSampling.apply(logits, target, None, 2, 1.0, 1024)
        tensor([-0.6931])
    """

    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        target: Tensor,
        tp_group: Any,
        top_k: int | None,
        top_p: float | None,
        chunk_size: int,
        inference_only: bool = False,
    ) -> Tensor:
        """Return what :class:`DistributedLogprobWithSampling` does, which needs no memory that chunks would save."""
        kept = top_k, top_p, inference_only
        return DistributedLogprobWithSampling.apply(vocab_parallel_logits, target, tp_group, *kept)


class _ChunkedDistributedGatherLogprob:
    @staticmethod
    def apply(
        vocab_parallel_logits: Tensor,
        global_indices: Tensor,
        vocab_start_index: int,
        vocab_end_index: int,
        chunk_size: int,
        tp_group: Any,
        inference_only: bool = False,
    ) -> Tensor:
        """Return ``[..., k]`` fp32 log-probabilities of ``k`` ids per token, as many as there are columns excepted."""
        columns = vocab_start_index, vocab_end_index
        rest = *columns, chunk_size, tp_group, inference_only
        return ChunkedDistributedLogprob.apply(vocab_parallel_logits, global_indices, *rest)


class _ChunkedDistributedEntropy:
    @staticmethod
    def apply(vocab_parallel_logits: Tensor, chunk_size: int, tp_group: Any, inference_only: bool = False) -> Tensor:
        """Return ``[...]`` fp32 ``sum_i p_i log p_i``: minus the entropy, as NeMo-RL's does."""
        with torch.no_grad() if inference_only else nullcontext():
            return -output_of("entropy", vocab_parallel_logits, whole_group(tp_group))


class _DistributedCrossEntropy:
    @staticmethod
    def apply(student_logits: Tensor, target_logits: Tensor, group: Any, inference_only: bool = False) -> Tensor:
        """Return ``[...]`` fp32 ``-sum_i t_i log s_i``: KL(t || s), and the entropy of ``t``, which has no gradient."""
        entropy = output_of("entropy", target_logits.detach(), whole_group(group))
        return _divergence("forward", student_logits, target_logits, group, inference_only) + entropy


class _ChunkedDistributedReverseKLToFixedLogits:
    @staticmethod
    def apply(student: Tensor, teacher: Tensor, chunk_size: int, tp_group: Any, inference_only: bool = False) -> Tensor:
        """Return ``[...]`` fp32 KL(student || teacher), for NeMo-RL 0.8's ``on_policy_distillation.full``."""
        return _divergence("reverse", student, teacher, tp_group, inference_only)


def _divergence(divergence: str, student: Tensor, teacher: Tensor, group: Any, inference_only: bool) -> Tensor:
    options: dict[str, Any] = {"divergence": divergence, "reduction": "none", "gradient": "out_of_place"}
    with torch.no_grad() if inference_only else nullcontext():
        return distillation_loss(student, teacher.detach(), group=whole_group(group), **options)


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Return ``[b, s - 1]`` fp32: of each token of ``target [b, s]`` after the first, the log-probability.

    The logits are ``[b, s, C]``, or longer, as padding leaves them. ``chunk_size`` changes nothing.

    Raises:
        ValueError: context parallelism; call :func:`install` and NeMo-RL's own function.

    Example:
        >>> from vocab_parallel_ce.integrations import nemo_rl
        >>> tokens = torch.tensor([[0, 3, 1]])
        >>> nemo_rl.from_parallel_logits_to_logprobs(torch.zeros(1, 3, 4), tokens, 0, 4, None)
        tensor([[-1.3863, -1.3863]])
    """
    _check_no_context_parallelism(cp_group, "install() and NeMo-RL's own function")
    n_tokens = target.shape[1]
    target = F.pad(target.roll(-1, dims=-1), (0, max(0, vocab_parallel_logits.shape[1] - n_tokens)))
    if sampling_params is not None and ((sampling_params.top_k or 0) > 0 or sampling_params.top_p not in (None, 1.0)):
        group = group_of_columns(vocab_start_index, vocab_end_index, vocab_parallel_logits.shape[-1], tp_group)
        kept = sampling_params.top_k, sampling_params.top_p, inference_only
        log_probs = DistributedLogprobWithSampling.apply(vocab_parallel_logits, target, group, *kept)
    else:
        columns = vocab_start_index, vocab_end_index
        log_probs = DistributedLogprob.apply(vocab_parallel_logits, target, *columns, tp_group, inference_only)
    return log_probs[:, : n_tokens - 1]


def from_parallel_hidden_states_to_logprobs(
    tensor_parallel_hidden_states: Tensor,
    output_weight_layer: Tensor,
    runtime_gather_output: bool | None,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Any,
    inference_only: bool = False,
    cp_group: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Return ``[b, s - 1]`` fp32: of each token of ``target [b, s]`` after the first, the log-probability.

    ``tensor_parallel_hidden_states`` are ``[s / R, b, D]``, this rank's part of the sequence, as Megatron's sequence
    parallelism leaves it, and so is their gradient. That of ``output_weight_layer [C, D]`` is summed in fp32 and
    rounded once. ``runtime_gather_output`` changes nothing, there and here; ``chunk_size`` not here.

    Raises:
        ValueError: context parallelism, which NeMo-RL does not support here either, or columns that are not this
            rank's ``[rank * C, (rank + 1) * C)``.

    Example:
        >>> from vocab_parallel_ce.integrations import nemo_rl
        >>> hidden, head, tokens = torch.ones(3, 1, 5), torch.zeros(4, 5), torch.tensor([[0, 3, 1]])
        >>> nemo_rl.from_parallel_hidden_states_to_logprobs(hidden, head, None, tokens, 0, 4, None)
        tensor([[-1.3863, -1.3863]])
    """
    _check_no_context_parallelism(cp_group, "the logits' function")
    group = group_of_columns(vocab_start_index, vocab_end_index, output_weight_layer.shape[0], tp_group)
    with torch.no_grad() if inference_only else nullcontext():
        log_probs = linear_token_log_probs(
            tensor_parallel_hidden_states,
            output_weight_layer,
            target.roll(-1, dims=-1).t(),
            group=group,
            options=head_options(sequence_parallel=group_position(group)[1] > 1),
        )
    return log_probs.t()[:, :-1]


def _check_no_context_parallelism(cp_group: Any, instead: str) -> None:
    if cp_group is not None and group_position(cp_group)[1] > 1:
        raise ValueError(f"cp_group: expected None or one rank, got {group_position(cp_group)[1]}; call {instead}")


_MODULE = "nemo_rl.distributed.model_utils"
_switch = Switch(
    "NeMo-RL 0.7",
    {
        f"{_MODULE}:DistributedLogprob": DistributedLogprob,
        f"{_MODULE}:ChunkedDistributedLogprob": ChunkedDistributedLogprob,
        f"{_MODULE}:DistributedLogprobWithSampling": DistributedLogprobWithSampling,
        f"{_MODULE}:ChunkedDistributedLogprobWithSampling": ChunkedDistributedLogprobWithSampling,
        f"{_MODULE}:from_parallel_hidden_states_to_logprobs": from_parallel_hidden_states_to_logprobs,
        f"{_MODULE}:ChunkedDistributedGatherLogprob": _ChunkedDistributedGatherLogprob,
        f"{_MODULE}:ChunkedDistributedEntropy": _ChunkedDistributedEntropy,
        f"{_MODULE}:DistributedCrossEntropy": _DistributedCrossEntropy,
        f"{_MODULE}:ChunkedDistributedReverseKLToFixedLogits": Around(
            lambda _: copy_of(_ChunkedDistributedReverseKLToFixedLogits), optional=True
        ),
    },
    {
        "context parallelism and packed sequences": "they are NeMo-RL's code around these functions",
        "logits at a teacher's top k": "NeMo-RL's zero_outside_topk=False reads these alone",
        "divergences between tokenizers": "they take the log-probabilities of all columns",
    },
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
