"""Log-probabilities at k given ids per token. Labels of one more dimension than tokens have are given ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks
from vocab_parallel_ce.api.call import over_head, over_logits
from vocab_parallel_ce.head.plan import Arguments, Head
from vocab_parallel_ce.losses.given_ids import GIVEN_IDS, IGNORED, Ids, marked
from vocab_parallel_ce.options import HeadSettings, Settings
from vocab_parallel_ce.spec import is_ignored


def are_given_ids(labels: Any, tokens: Any) -> bool:
    """Return whether ``labels [..., k]`` are given ids of ``tokens``, logits or hidden states of as many dimensions."""
    if not (isinstance(labels, Tensor) and isinstance(tokens, Tensor)):
        return False
    return labels.dim() == tokens.dim() > 1 and labels.dtype in checks.LABEL_DTYPES


def check_ids_alone(labels: Tensor, tokens: Tensor, outputs: Sequence[str], sampling: Any) -> None:
    """Raise ValueError if a call with given ids asks for something else too."""
    refused = {"outputs": outputs or None, "sampling": sampling}
    got = [f"{name}={value!r}" for name, value in refused.items() if value is not None]
    if got:
        raise ValueError(
            f"labels: expected one per token with outputs or sampling, {tuple(tokens.shape[:-1])}, got "
            f"{tuple(labels.shape)}, given ids, and {got[0]}; ask for them in a call of their own"
        )


def of_logits(logits: Tensor, given: Ids, settings: Settings, *, group: Any, n_known: int = 0) -> Tensor:
    """Return ``[..., k]`` log-probabilities at ``given.ids``, and one more of the rest of the first ``n_known``."""
    given, settings = _of_call(given, logits, "logits", settings, n_known)
    return over_logits(GIVEN_IDS, logits, given, settings, group=group).loss


def of_head(
    tensors: Head,
    given: Ids,
    settings: Settings,
    head: HeadSettings,
    *,
    group: Any,
    n_known: int = 0,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return the same of the logits of a head."""
    given, settings = _of_call(given, tensors.hidden, "hidden", settings, n_known)
    # The labels that a head knows say which tokens are left out.
    labels = torch.where((given.ids == IGNORED).all(dim=-1), IGNORED, 0)
    arguments = Arguments(tensors, labels, given, group, None, main_grad)
    return over_head(GIVEN_IDS, arguments, settings, head).loss


def _of_call(given: Ids, tokens: Tensor, subject: str, settings: Settings, n_known: int) -> tuple[Ids, Settings]:
    """Return ids whose ignored ones no other can be, and the settings of the call; ``subject`` are the ``tokens``."""
    checks.check_integer("ignore_index", settings.ignore_index)
    checks.check_labels(given.ids, tokens, subject)
    if given.ids.shape[-1] == 0:
        raise ValueError(f"labels: expected at least one given id per token, got shape {tuple(given.ids.shape)}")
    ids = marked(given.ids, is_ignored(given.ids, settings.ignore_index))
    settings = settings._replace(reduction="none", ignore_index=IGNORED, n_ids=ids.shape[-1], n_known=n_known)
    return given._replace(ids=ids), settings
