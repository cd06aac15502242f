"""Log-probabilities at k given ids per token, and divergences from a teacher that is known at k tokens, out of these.

Labels of one more dimension than tokens have are given ids. The forward divergence alone has a loss of its own,
``losses.known_tokens``, whose statistics are sums: it exchanges less, and a head can compute its gradient in forward.
The other divergences need each log-probability:

    forward   sum_k q_k (log q_k - log s_k)
    reverse   sum_k s_k (log s_k - log q_k)
    js        sum_k beta q_k (log q_k - log m_k) + (1 - beta) s_k (log s_k - log m_k),  m = beta q + (1 - beta) s

With ``rest="bucket"`` the other tokens are one more, of ``1 - sum_k s_k`` and ``1 - sum_k q_k``, which counts as at
least half an eps. A hard label is one more given id.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import is_traced, over_head, over_logits
from vocab_parallel_ce.beside import check_beside, check_labels_beside, check_requires_no_gradient, checked_divisor
from vocab_parallel_ce.head.plan import Arguments, Head
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.divergences import check_hard_weight, divergence_options, log_ratios, rows_of_mean
from vocab_parallel_ce.losses.given_ids import GIVEN_IDS, IGNORED, Ids, marked
from vocab_parallel_ce.losses.known_tokens import MOST_MASS, Tokens, check_tokens, check_values
from vocab_parallel_ce.options import REDUCTIONS, HeadSettings, Settings
from vocab_parallel_ce.plan import comparable
from vocab_parallel_ce.spec import NAN, NEG_INF, is_ignored

LogProbsAt = Callable[..., Tensor]  # (given ids, settings=, n_known=) -> log-probabilities


def are_given_ids(labels: Any, tokens: Any) -> bool:
    """Return whether ``labels [..., k]`` are given ids of ``tokens``, logits or hidden states of as many dimensions."""
    if not (isinstance(labels, Tensor) and isinstance(tokens, Tensor)):
        return False
    return labels.dim() == tokens.dim() > 1 and labels.dtype in checks.LABEL_DTYPES


def check_ids_alone(labels: Tensor, tokens: Tensor, outputs: Sequence[str], top_k: int | None, sampling: Any) -> None:
    """Raise ValueError if a call with given ids asks for something else too."""
    refused = {"outputs": outputs or None, "top_k": top_k, "sampling": sampling}
    got = [f"{name}={value!r}" for name, value in refused.items() if value is not None]
    if got:
        raise ValueError(
            f"labels: expected one per token with outputs, top_k or sampling, {tuple(tokens.shape[:-1])}, got "
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


def has_own_loss(settings: Settings) -> bool:
    """Return whether ``losses.known_tokens`` computes the divergence."""
    return settings.divergence == "forward" and settings.hard_weight == 0


def divergence(
    given: Tokens, student: Tensor, subject: str, settings: Settings, num_items: Any, log_probs_at: LogProbsAt
) -> Tensor:
    """Return the loss of ``student``, logits or hidden states, which ``subject`` is."""
    check_given(given, student, subject, settings)
    labels = given.labels
    divisor = None if num_items is None else _divisor(num_items, settings.reduction, student)
    log_q = given.log_probs.detach().to(compute_dtype(student.dtype))
    left_out = log_q == NEG_INF
    if labels is not None:
        left_out = left_out | is_ignored(labels, settings.ignore_index).unsqueeze(-1)
    mass = log_q.masked_fill(left_out, NEG_INF).exp().sum(dim=-1)
    log_q = log_q.masked_fill((mass > MOST_MASS).unsqueeze(-1), NAN)
    ids, k = marked(given.ids, left_out), given.ids.shape[-1]
    if labels is not None:
        hard = marked(labels, is_ignored(labels, settings.ignore_index))
        ids = torch.cat([ids, hard.unsqueeze(-1)], dim=-1)
    if divisor is not None:  # of 0 items no row counts: a NaN in one must not reach the gradient as 0 * NaN
        divisor = divisor.to(log_q.dtype)  # a quotient has the wider dtype of both
        left_out, ids = left_out | (divisor == 0), ids.masked_fill(divisor == 0, IGNORED)
    n_known = k if settings.rest == "bucket" else 0
    compared = None
    if verify.open_calls:
        options = comparable(settings, num_items)
        compared = {name: options[name] for name in ("reduction", "num_items")}
    beside, inner = Ids(ids, None, given.log_probs, compared), settings._replace(ignore_index=IGNORED)
    found = log_probs_at(beside, settings=inner, n_known=n_known)
    rows = _terms(found[..., :k], log_q, left_out, settings).sum(dim=-1)
    if n_known:
        log_r = (1 - mass).clamp(min=torch.finfo(log_q.dtype).eps / 2)
        rows = rows + _terms(found[..., -1], log_r.log(), left_out.all(dim=-1), settings)
    if labels is not None:
        of_label, hard_weight = found[..., k], float(settings.hard_weight)
        if hard_weight == 1:
            rows = rows.masked_fill(rows.isinf(), 0.0)  # times 0 it would be NaN
        if hard_weight:
            rows = (1 - hard_weight) * rows - hard_weight * of_label
        rows = torch.where(of_label.isnan(), NAN, rows)  # a label outside the vocabulary
    if settings.reduction == "none":
        return rows
    if settings.reduction == "mean":
        divisor = rows_of_mean(labels, student, settings).to(rows.dtype)
    total = rows.sum()
    if divisor is None:
        return total
    is_none = divisor == 0  # of which autograd must see no quotient: 0 / 0 is NaN
    return torch.where(is_none, 0.0, total / divisor.masked_fill(is_none, 1)).reshape(())


def check_given(given: Tokens, student: Tensor, subject: str, settings: Settings) -> None:
    """Check what this way takes, besides what the student's log-probabilities check."""
    checks.check_tensor(subject, student)
    divergence_options(settings)
    check_hard_weight(settings, given.labels)
    checks.check_choice("reduction", settings.reduction, REDUCTIONS)
    check_tokens(given, student, settings, subject)
    if is_traced():
        check_requires_no_gradient(**{"teacher.log_probs": given.log_probs})
    else:
        check_beside("teacher.log_probs", given.log_probs, student, settings)
    check_labels_beside(given.labels, student)
    if settings.hard_weight and settings.temperature != 1:
        raise ValueError(
            f"hard_weight: expected temperature=1 with a TopKTeacher, got {settings.temperature}; add "
            "vocab_parallel_cross_entropy yourself"
        )
    if settings.gradient == "in_forward":
        raise ValueError(
            "gradient: 'in_forward' takes a TopKTeacher with divergence='forward' and no hard_weight, got "
            f"divergence={settings.divergence!r} and hard_weight={settings.hard_weight:g}; use another mode"
        )
    if settings.check_labels and is_traced():
        raise ValueError(
            "check_labels: expected False in compiled code with a TopKTeacher, except for divergence='forward' without "
            "hard_weight, because the check waits for the device, got True"
        )
    if settings.check_labels:
        check_values(given, settings.ignore_index, None)  # their range is that of given ids


def _divisor(num_items: Any, reduction: str, student: Tensor) -> Tensor | None:
    if is_traced():
        from vocab_parallel_ce.operators import divisor_of

        return divisor_of(num_items, reduction, student)
    return checked_divisor(num_items, reduction, student)


def _terms(log_s: Tensor, log_q: Tensor, left_out: Tensor, settings: Settings) -> Tensor:
    """Return the terms of a divergence; 0 where an outcome is left out."""
    log_q, log_s = log_q.masked_fill(left_out, 0.0), log_s.masked_fill(left_out, 0.0)
    q = log_q.exp()
    # An outcome that the student excludes, by a logit of -inf, must not make its gradient NaN.
    excluded = log_s == NEG_INF
    own = log_s.masked_fill(excluded, 0.0)
    if settings.divergence == "forward":
        terms = q * (log_q - log_s)
    elif settings.divergence == "reverse":
        terms = (own.exp() * (own - log_q)).masked_fill(excluded, 0.0)
    else:
        beta = float(settings.beta)
        # Constants: what the mixture adds to the gradient of both terms cancels.
        of_student, of_teacher = log_ratios(own.detach(), log_q, beta)
        of_student = (own.exp() * of_student).masked_fill(excluded, 0.0)
        terms = beta * q * of_teacher.masked_fill(excluded, -math.log(beta)) + (1 - beta) * of_student
    return terms.masked_fill(left_out, 0.0)
