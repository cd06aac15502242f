"""Read the package's variables of the environment. All of them are read here, so that a word means the same in each."""

from __future__ import annotations

import os

ON, OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
VERIFY = "VOCAB_PARALLEL_CE_VERIFY"
TRANSFORMERS = "VOCAB_PARALLEL_CE_TRANSFORMERS"
VERL = "VOCAB_PARALLEL_CE_VERL"
KEEP_LOGITS = "VOCAB_PARALLEL_CE_KEEP_LOGITS"
SAME_BITS = "VOCAB_PARALLEL_CE_SAME_BITS"


def switch(name: str) -> bool:
    """Return whether variable ``name`` is on: a word of ``ON``, in any case. Unset and a word of ``OFF`` are off.

    Raises:
        ValueError: it is another word.
    """
    word = os.environ.get(name, "").strip().lower()
    if word not in (*ON, *OFF):
        raise ValueError(f"{name}: expected one of {', '.join((*ON, *OFF[1:]))}, or nothing, got {os.environ[name]!r}")
    return word in ON


def text(name: str, default: str) -> str:
    """Return the text of variable ``name``; ``default`` if it is unset or empty."""
    return os.environ.get(name, "").strip() or default
