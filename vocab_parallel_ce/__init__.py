"""Cross-entropy of logits sharded over the vocabulary, without gathering them."""

from vocab_parallel_ce.cross_entropy import vocab_parallel_cross_entropy
from vocab_parallel_ce.modules import VocabParallelCrossEntropy
from vocab_parallel_ce.te_compat import (
    cross_entropy_backward,
    cross_entropy_forward,
    parallel_cross_entropy,
)

__version__ = "0.1.0"

__all__ = [
    "VocabParallelCrossEntropy",
    "cross_entropy_backward",
    "cross_entropy_forward",
    "parallel_cross_entropy",
    "vocab_parallel_cross_entropy",
]
