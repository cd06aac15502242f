"""Cross-entropy of logits sharded over the vocabulary, without gathering them."""

import torch

from vocab_parallel_ce.versions import require_torch

require_torch(torch.__version__)  # before an older one fails in another way

from vocab_parallel_ce.cross_entropy import LossMetrics, vocab_parallel_cross_entropy
from vocab_parallel_ce.linear.cross_entropy import linear_cross_entropy, linear_token_log_probs
from vocab_parallel_ce.log_probs import token_log_probs
from vocab_parallel_ce.modules import LinearCrossEntropy, VocabParallelCrossEntropy
from vocab_parallel_ce.outputs import TokenLogProbs
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft.cross_entropy import soft_cross_entropy
from vocab_parallel_ce.soft.distillation import distillation_loss
from vocab_parallel_ce.soft.linear_distillation import linear_distillation_loss
from vocab_parallel_ce.te_compat import cross_entropy_backward, cross_entropy_forward, parallel_cross_entropy
from vocab_parallel_ce.verify import verify_calls
from vocab_parallel_ce.verify_group import verify_group

__version__ = "0.1.0"

__all__ = [
    "LinearCrossEntropy",
    "LossMetrics",
    "TokenLogProbs",
    "VocabParallelCrossEntropy",
    "VocabShard",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "distillation_loss",
    "linear_cross_entropy",
    "linear_distillation_loss",
    "linear_token_log_probs",
    "parallel_cross_entropy",
    "soft_cross_entropy",
    "token_log_probs",
    "verify_calls",
    "verify_group",
    "vocab_parallel_cross_entropy",
]


def __dir__() -> list[str]:
    """Names for users: completion does not offer modules such as ``cross_entropy`` as if they were losses."""
    return [*__all__, "__version__", "integrations"]
