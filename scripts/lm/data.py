"""Real text for the language model: the running Python's own standard library, as BPE token ids.

Every file begins with the token `<|file|>`. The text before it cannot predict that a file ends there,
so the label that crosses from one file into the next is ignored in the loss.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

FILE_START = "<|file|>"
FILE_START_ID = 0
IGNORE_INDEX = -100
HELD_OUT_SHARE = 0.05
SKIPPED_DIRECTORIES = set(["__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"])


class TokenIds(NamedTuple):
    train: Tensor  # [tokens] int64
    held_out: Tensor  # [tokens] int64, whole files that training never sees


def read_corpus(max_characters: int | None) -> list[str]:
    """Texts of standard-library files, in a fixed shuffled order, cut off after `max_characters`."""
    root = Path(sysconfig.get_path("stdlib"))
    found = root.rglob("*.py")
    paths = sorted(path for path in found if SKIPPED_DIRECTORIES.isdisjoint(path.relative_to(root).parts[:-1]))
    # Sorted order would put whole topics into the held-out end, and into a corpus cut short.
    random.Random(0).shuffle(paths)
    texts: list[str] = []
    for path in paths:
        if max_characters is not None and sum(map(len, texts)) >= max_characters:
            break
        texts.append(path.read_bytes().decode("utf-8", errors="ignore"))
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"corpus: expected *.py files under {root}, got none")
    return texts


def load_token_ids(cache_directory: Path, vocab_size: int, max_characters: int | None, show_progress: bool) -> TokenIds:
    """Token ids of the corpus, from the cache, or encoded and added to it.

    The name of a cache entry is a hash of all that decides its content. It is put in place at once, so an interrupted
    or concurrent build never leaves an entry that reads wrong.
    """
    texts = read_corpus(max_characters)
    digest = hashlib.sha256(f"{platform.python_version()} {vocab_size} {FILE_START}".encode())
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    path = cache_directory / f"{digest.hexdigest()[:16]}.ids.npy"
    if not path.exists():
        cache_directory.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npy")
        np.save(part, _encoded(texts, vocab_size, show_progress))
        os.replace(part, path)
    return _split(torch.from_numpy(np.load(path).astype(np.int64)))


def _encoded(texts: list[str], vocab_size: int, show_progress: bool) -> Any:
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ModuleNotFoundError as error:
        message = "tokenizer: no text is cached, and training one needs the Python package 'tokenizers'"
        raise ValueError(f"{message}: {error}") from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[FILE_START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = tqdm(texts, "train tokenizer", unit="file", disable=not show_progress)
    tokenizer.train_from_iterator(files, trainer)
    size = tokenizer.get_vocab_size()
    if size != vocab_size:
        raise ValueError(f"tokenizer: expected {vocab_size} entries, got {size}; the corpus is too small")
    assert tokenizer.token_to_id(FILE_START) == FILE_START_ID
    pieces: list[list[int]] = []
    for first in tqdm(range(0, len(texts), 32), "encode", unit="batch", disable=not show_progress):
        for encoding in tokenizer.encode_batch_fast(texts[first : first + 32]):
            pieces += [[FILE_START_ID], encoding.ids]
    return np.concatenate([np.array(piece, np.uint16) for piece in pieces])


def _split(ids: Tensor) -> TokenIds:
    starts = (ids == FILE_START_ID).nonzero().flatten()
    after = starts[starts >= int(len(ids) * (1 - HELD_OUT_SHARE))]
    # A last file longer than the share is the whole of what is held out.
    boundary = int(after[0] if len(after) else starts[-1])
    return TokenIds(ids[:boundary], ids[boundary:])


def windows(ids: Tensor, offsets: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, both `[len(offsets), length]`, of the windows that begin at `offsets`."""
    span = torch.arange(length + 1, device=ids.device)
    window = ids[offsets[:, None] + span]
    labels = window[:, 1:]
    return window[:, :-1], labels.masked_fill(labels == FILE_START_ID, IGNORE_INDEX)


def random_offsets(ids: Tensor, length: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(len(ids) - length, (count,), generator=generator).to(ids.device)


def even_offsets(ids: Tensor, length: int, count: int) -> Tensor:
    return torch.linspace(0, len(ids) - length - 1, count, dtype=torch.float64).long().to(ids.device)
