"""Megatron-Core's losses, computed by this package: switched on by :func:`install`, and undoable."""

from __future__ import annotations

from vocab_parallel_ce.integrations.megatron.losses import output_processor
from vocab_parallel_ce.integrations.megatron.patch import install, installed, report, uninstall

__all__ = ["install", "installed", "output_processor", "report", "uninstall"]
