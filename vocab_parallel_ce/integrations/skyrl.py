"""SkyRL's log-probabilities and entropies on shards of the vocabulary, computed by this package: on request, undoable.

The functions and classes have the names, parameters, shapes and dtypes of SkyRL 0.4. :func:`install` replaces the cores
``DistributedLogprob``, ``ChunkedDistributedLogprob`` and ``FusedLinearChunkedDistributedLogprob``, and
``vocab_parallel_entropy``. SkyRL's functions around them, which roll the targets, gather over context parallelism and
unpack sequences, stay as they are and call them.

What differs: a target outside of the vocabulary raises on a CPU and gives NaN on a GPU, where SkyRL returns a number
with a gradient; -100 gives 0
without one. Ranks whose shards are not equal are refused.
"""

from __future__ import annotations

from torch import Tensor

from vocab_parallel_ce.api.logits import output_of
from vocab_parallel_ce.integrations.log_probs import (
    ChunkedDistributedLogprob,
    DistributedLogprob,
    FusedLinearChunkedDistributedLogprob,
    tensor_parallel_group,
)
from vocab_parallel_ce.integrations.rebind import Switch

LEFT = {
    "fused_lm_head_logprob_backend='triton'": "it names SkyRL's kernel",
    "entropies of a head, fused": "they are SkyRL's chunks, weighted in each; linear_token_log_probs has both at once",
    "context parallelism and packed sequences": "they are SkyRL's code around these functions",
    "soft cross-entropy of multi-token prediction": "it has a mask of its own; call distillation_loss",
}


def vocab_parallel_entropy(
    vocab_parallel_logits: Tensor, chunk_size: int | None = None, chunk_memory_mb: int = 512
) -> Tensor:
    """Return the entropies ``[...]`` of ``[..., C]`` logits, in their dtype; the arithmetic is fp32.

    It needs no memory that chunks would save. Overwrites nothing.

    Collectives: one all_gather of 16 bytes per token over the tensor-parallel group; SkyRL's has three all_reduces.
    """
    return output_of("entropy", vocab_parallel_logits, tensor_parallel_group()).to(vocab_parallel_logits.dtype)


MODULE = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
_switch = Switch(
    "SkyRL 0.4",
    {
        f"{MODULE}:DistributedLogprob": DistributedLogprob,
        f"{MODULE}:ChunkedDistributedLogprob": ChunkedDistributedLogprob,
        f"{MODULE}:FusedLinearChunkedDistributedLogprob": FusedLinearChunkedDistributedLogprob,
        f"{MODULE}:vocab_parallel_entropy": vocab_parallel_entropy,
    },
    LEFT,
)
install, uninstall, installed, report = _switch.install, _switch.uninstall, _switch.installed, _switch.report
