"""NeMo-RL's log-probabilities on shards of the vocabulary, computed by this package: on request, and undoable.

The functions and classes have the names, parameters, shapes and dtypes of NeMo-RL 0.7. :func:`install` replaces the
cores ``DistributedLogprob`` and ``ChunkedDistributedLogprob``, and ``from_parallel_hidden_states_to_logprobs``. So
NeMo-RL's own functions, which roll and cut the targets, gather over context parallelism and unpack sequences, stay as
they are and call them; with top-k or top-p filtering they call NeMo-RL's own cores.

What differs: a target of -100 has log-probability 0 and exactly no gradient; another target outside the vocabulary
gives NaN, where NeMo-RL returns 0 with a gradient. Ranks whose shards are not equal are refused.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce.api.heads import linear_token_log_probs
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.integrations.log_probs import (
    ChunkedDistributedLogprob,
    DistributedLogprob,
    check_columns,
    kept_logits,
)
from vocab_parallel_ce.integrations.rebind import Switch


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
        ValueError: context parallelism, or top-k or top-p filtering; call :func:`install` and NeMo-RL's own function.

    Example:
        >>> from vocab_parallel_ce.integrations import nemo_rl
        >>> tokens = torch.tensor([[0, 3, 1]])
        >>> nemo_rl.from_parallel_logits_to_logprobs(torch.zeros(1, 3, 4), tokens, 0, 4, None)
        tensor([[-1.3863, -1.3863]])
    """
    _check_no_context_parallelism(cp_group, "install() and NeMo-RL's own function")
    if sampling_params is not None and ((sampling_params.top_k or 0) > 0 or sampling_params.top_p not in (None, 1.0)):
        raise ValueError(
            f"sampling_params: expected neither top_k nor top_p, got {sampling_params}; call install() and NeMo-RL's "
            "own function"
        )
    n_tokens = target.shape[1]
    target = F.pad(target.roll(-1, dims=-1), (0, max(0, vocab_parallel_logits.shape[1] - n_tokens)))
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
    group = dist.group.WORLD if tp_group is None else tp_group
    check_columns(vocab_start_index, vocab_end_index, output_weight_layer.shape[0], group)
    with torch.no_grad() if inference_only else nullcontext():
        log_probs = linear_token_log_probs(
            tensor_parallel_hidden_states,
            output_weight_layer,
            target.roll(-1, dims=-1).t(),
            group=group,
            sequence_parallel=group_position(group)[1] > 1,
            keep_logits=kept_logits(),
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
        f"{_MODULE}:from_parallel_hidden_states_to_logprobs": from_parallel_hidden_states_to_logprobs,
    },
    {
        "top-k and top-p filtering": "it changes the logits, and has cores of its own",
        "context parallelism and packed sequences": "they are NeMo-RL's code around these functions",
    },
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
