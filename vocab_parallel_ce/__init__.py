"""Cross-entropy of logits sharded over the vocabulary, without gathering them."""

import torch

from vocab_parallel_ce.versions import __version__ as __version__
from vocab_parallel_ce.versions import require_torch

require_torch(torch.__version__)  # before an older one fails in another way

from vocab_parallel_ce.api.call import Outputs
from vocab_parallel_ce.api.copy_to_ranks import copy_to_ranks
from vocab_parallel_ce.api.distillation import Head, TopKTeacher, distillation_loss, linear_distillation_loss
from vocab_parallel_ce.api.heads import linear_cross_entropy, linear_token_log_probs
from vocab_parallel_ce.api.logits import token_log_probs, vocab_parallel_cross_entropy
from vocab_parallel_ce.api.logits_at import logits_at
from vocab_parallel_ce.api.modules import LinearCrossEntropy, VocabParallelCrossEntropy
from vocab_parallel_ce.api.next_labels import next_labels
from vocab_parallel_ce.api.objective import linear_objective
from vocab_parallel_ce.api.sampling import sampling_threshold
from vocab_parallel_ce.api.top_k import top_k
from vocab_parallel_ce.integrations.transformer_engine import (
    cross_entropy_backward,
    cross_entropy_forward,
    parallel_cross_entropy,
)
from vocab_parallel_ce.options import HeadOptions
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.targets import Teacher
from vocab_parallel_ce.verify import verify_calls

__all__ = [
    "Head",
    "HeadOptions",
    "LinearCrossEntropy",
    "Outputs",
    "Teacher",
    "TopKTeacher",
    "VocabParallelCrossEntropy",
    "VocabShard",
    "copy_to_ranks",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "distillation_loss",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_objective",
    "linear_token_log_probs",
    "logits_at",
    "next_labels",
    "parallel_cross_entropy",
    "sampling_threshold",
    "token_log_probs",
    "top_k",
    "verify_calls",
    "vocab_parallel_cross_entropy",
]


def __dir__() -> list[str]:
    """Names for users: completion does not offer modules."""
    return [*__all__, "__version__", "integrations"]
