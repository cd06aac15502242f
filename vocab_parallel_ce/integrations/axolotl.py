"""axolotl: a plugin that fuses head and loss, as ``transformers.install()`` does.

Name it in the YAML file, with options of :func:`~vocab_parallel_ce.integrations.transformers.install` if you need any::

    plugins:
      - vocab_parallel_ce.integrations.axolotl.CrossEntropyPlugin
    vocab_parallel_ce:
      chunk_size: 4096
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from axolotl.utils.logging import get_logger
from pydantic import BaseModel, model_validator

from vocab_parallel_ce.integrations import warn_if_newer
from vocab_parallel_ce.integrations.transformers import install, report, uninstall
from vocab_parallel_ce.integrations.transformers.patch import check_options

OTHERS = (
    *("cut_cross_entropy", "chunked_cross_entropy", "flash_attn_cross_entropy"),
    *("liger_cross_entropy", "liger_fused_linear_cross_entropy"),
)
LOG = get_logger("axolotl.vocab_parallel_ce")  # axolotl prints information of loggers of its own name alone


class CrossEntropyArgs(BaseModel):
    """What axolotl's configuration gets: the options of ``install()``. It is checked before data sets are made."""

    vocab_parallel_ce: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_vocab_parallel_ce(self) -> CrossEntropyArgs:
        """Raise for an option that install() does not take, and for another cross-entropy."""
        check_options(**(self.vocab_parallel_ce or {}))
        for name in OTHERS:  # of axolotl's own fields, and of those that its plugins add, with their defaults
            if getattr(self, name, None):
                raise ValueError(
                    f"{name}: expected one cross-entropy, got this one and CrossEntropyPlugin of vocab_parallel_ce; "
                    f"set {name}: false, or take one of both out of plugins"
                )
        return self


class CrossEntropyPlugin(BasePlugin):
    """Installs before axolotl builds the model, logs what it replaced, and gives it back after the training."""

    def get_input_args(self) -> str:
        return f"{__name__}.{CrossEntropyArgs.__name__}"

    def pre_model_load(self, cfg: Any) -> None:
        warn_if_newer("axolotl")
        install(**(cfg.vocab_parallel_ce or {}))

    def post_model_load(self, cfg: Any, model: Any) -> None:
        LOG.info("vocab_parallel_ce: %s", report())

    def post_train_unload(self, cfg: Any) -> None:
        uninstall()
