"""torchtitan's own registry: ``--override.imports vocab_parallel_ce.integrations.torchtitan_loss.cross_entropy``."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.config.override import derive, override

from vocab_parallel_ce import checks
from vocab_parallel_ce.integrations import torchtitan
from vocab_parallel_ce.options import IMPLEMENTATIONS


class Loss(CrossEntropyLoss):
    """torchtitan's ``CrossEntropyLoss``, computed by this package."""

    @dataclass(kw_only=True, slots=True)
    class Config(CrossEntropyLoss.Config):
        """``gradient`` and ``impl`` are those of ``install()``."""

        gradient: str = "auto"
        impl: str = "auto"

    def __init__(self, config: Any, *, compile_config: Any = None) -> None:
        """Check the options, and compile the loss if ``compile_config`` says so."""
        checks.check_choice("gradient", config.gradient, torchtitan.GRADIENTS)
        checks.check_choice("impl", config.impl, ("auto", *IMPLEMENTATIONS))
        torchtitan.load()
        super().__init__(config)
        options = {"vocab_size": config.global_vocab_size, "gradient": config.gradient, "impl": config.impl}
        self.fn = functools.partial(torchtitan.summed_loss, options)
        self._maybe_compile(compile_config)


@override(target=CrossEntropyLoss.Config, exact=True, description="cross-entropy of vocab_parallel_ce")
def cross_entropy(config: Any, **options: Any) -> Any:
    """Return the loss's config in the place of torchtitan's, with ``gradient`` and ``impl`` of ``options``."""
    return derive(config, Loss.Config, **options)
