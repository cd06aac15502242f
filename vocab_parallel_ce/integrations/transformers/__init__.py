"""Hugging Face transformers: head and loss are one, without changing a line of a model.

``install()`` does it; importing this module does it too if the variable ``VOCAB_PARALLEL_CE_TRANSFORMERS`` is on.
"""

from vocab_parallel_ce import environment
from vocab_parallel_ce.integrations.transformers.audit_models import audit
from vocab_parallel_ce.integrations.transformers.losses import causal_lm_loss
from vocab_parallel_ce.integrations.transformers.patch import install, report, uninstall
from vocab_parallel_ce.integrations.transformers.tensor_parallel import shard_lm_head

__all__ = ["audit", "causal_lm_loss", "install", "report", "shard_lm_head", "uninstall"]

if environment.switch(environment.TRANSFORMERS):
    install()
