"""Distillation from a teacher, over logits and over heads: the public functions.

Over heads, both products of a chunk of tokens are made, the student's into the buffer of ``head.loops``, and the
gradient replaces the student's logits there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.api.call import needs_eager, overwrites, public, run_head, run_logits
from vocab_parallel_ce.api.top_k_teacher import (
    TopKTeacher,
    checked_hard_weight,
    composed,
    divisor_of_losses,
    loss_of_head,
    loss_of_logits,
    reduced,
    with_hard_weight,
)
from vocab_parallel_ce.head.arguments import Arguments, check_gradient
from vocab_parallel_ce.head.objective import Objective
from vocab_parallel_ce.losses.divergences import DIVERGENCE, TeacherHead, TeacherLogits, check_divergence
from vocab_parallel_ce.options import (
    DivergenceSettings,
    HeadOptions,
    Settings,
    Takes,
    TeacherOptions,
    divided_by,
    head_settings,
    settings_of,
)
from vocab_parallel_ce.plan import comparable
from vocab_parallel_ce.spec import is_ignored
from vocab_parallel_ce.targets import Head, Role, Tokens, check_target

HEADS: Takes = {"own_tokens": (False,), "sequence_parallel": (False,), "logits_dtype": (None,), "valid_tokens": (None,)}


@public(overwrites, DivergenceSettings)
@checks.naming(logits="student_logits")
def distillation_loss(
    student_logits: Tensor,
    teacher: Tensor | TopKTeacher,
    *,
    group: Any = None,
    labels: Tensor | None = None,
    num_items: float | Tensor | None = None,
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool | str = "auto",
    **keywords: Unpack[DivergenceSettings],
) -> Tensor:
    """Divergence of a student's distribution from a teacher's, over sharded logits of both.

    In fp32, with ``s`` and ``t`` the softmax of the student's and the teacher's logits divided by ``temperature``,
    over the whole vocabulary::

        "forward"   KL(t || s)
        "reverse"   KL(s || t)
        "js"        beta * KL(t || m) + (1 - beta) * KL(s || m),  m = beta * t + (1 - beta) * s
        loss        (1 - hard_weight) * divergence + hard_weight * cross_entropy(student_logits, labels)

    "forward" is Hinton et al.'s (arXiv:1503.02531), "js" GKD's (arXiv:2306.13649, equation 1). Nothing multiplies by
    ``temperature ** 2``, as Hinton et al. do: do it yourself. docs/distillation.md has more.

    A :class:`TopKTeacher` is known at ``k`` tokens: the sums run over these, with ``t = exp(log_probs)``, and over the
    rest as one more: operations of PyTorch on the ``[..., k]`` log-probabilities of :func:`token_log_probs`. With
    ``hard_weight`` its temperature must be 1.

    Overwrites: as :func:`vocab_parallel_cross_entropy`, by default nothing that a counted reader can still read. The
    teacher's are never written, and get no gradient.

    Collectives: forward one all_gather of ``4 * K`` bytes per row from each rank, with ``K = 5``, 3 more with
    ``hard_weight``; "js" has ``K = 4``, and a second all_gather of 8 bytes. A :class:`TopKTeacher` has one of
    ``K = k + 3``, 1 more with ``labels``. Backward none.

    Args:
        student_logits: ``[..., C]`` bf16, fp16, fp32 or fp64, at least two dimensions, of any strides.
        teacher: logits ``[..., C']`` bf16, fp16, fp32 or fp64, from the same column on, or a :class:`TopKTeacher`.
            ``C'`` may differ from ``C`` by padding, if ``vocab_size`` says what is. Must not require a gradient.
        divergence, beta: as above; ``0 < beta < 1``, for "js" alone.
        labels: ``[...]`` int64 or int32 global ids, or None. Rows with ``ignore_index`` have loss and gradient 0.
        hard_weight: in [0, 1]; above 0 it needs ``labels``. The cross-entropy has temperature 1.
        reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or ``"none"``.
        gradient: as in :func:`vocab_parallel_cross_entropy`; of a :class:`TopKTeacher`, and with ``hard_weight``, not
            ``"in_forward"``.
        impl: ``"triton"``, ``"reference"`` or ``"auto"``.
        others: as in :func:`vocab_parallel_cross_entropy`, of the student's logits.

    Returns:
        fp32 loss, fp64 for fp64 logits, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.

    Example:
        >>> from vocab_parallel_ce import distillation_loss
        >>> student = torch.zeros(1, 2, requires_grad=True)
        >>> loss = distillation_loss(student, torch.tensor([[1.0, 0.0]]))
        >>> round(loss.item(), 4)
        0.1109
        >>> loss.backward()
        >>> student.grad
        tensor([[-0.2311,  0.2311]])
    """
    settings = settings_of(gradient=gradient, impl=impl, check_labels=check_labels, **keywords)
    settings = divided_by(num_items, settings)
    if isinstance(teacher, TopKTeacher):
        return loss_of_logits(student_logits, teacher, labels, settings, group, num_items)
    if not isinstance(teacher, Tensor):
        raise TypeError(_no_teacher(teacher))
    targets = TeacherLogits(teacher, labels)
    if not settings.hard_weight:
        return run_logits(DIVERGENCE, student_logits, targets, settings, group=group, num_items=num_items).loss
    hard_weight = checked_hard_weight(settings, labels)
    checks.check_choice("gradient, with hard_weight", gradient, ("auto", "in_backward", "out_of_place"))
    checks.check_tensor("student_logits", student_logits)
    tokens = Tokens(student_logits, "student_logits", student_logits.shape[:-1])
    divisor, targets = _counted(num_items, targets, tokens, settings)
    found: Any = run_logits(DIVERGENCE, student_logits, targets, _with_labels(settings), group=group)
    return reduced(with_hard_weight(found.divergence, found.loss, hard_weight), divisor, settings.reduction)


def _with_labels(settings: Settings) -> Settings:
    """Return the settings of unreduced log-probabilities at temperature 1 with a divergence alongside."""
    teacher = TeacherOptions(settings.divergence, settings.beta, settings.temperature)
    check_divergence(teacher)  # here they are the caller's keywords
    return settings._replace(
        teacher=teacher, temperature=1.0, outputs=("divergence",), negated=True, reduction="none", hard_weight=0.0
    )


def _counted(num_items: Any, targets: Any, tokens: Tokens, settings: Settings) -> tuple[Tensor | None, Any]:
    """Return what divides the sum of the losses, and targets of which none counts if that is 0."""
    check_target("labels", targets.labels, Role("ids", ("rows",)), tokens)
    ignored = is_ignored(targets.labels, settings.ignore_index)
    divisor = divisor_of_losses(num_items, ignored, tokens, settings)
    if verify.is_on:
        verify.also(comparable(settings._replace(vocab_size=None), num_items))  # in the caller's words
    if num_items is not None:
        assert divisor is not None
        ignore_index = settings.ignore_index
        targets = targets._replace(labels=torch.where(divisor == 0, ignore_index, targets.labels.long()))
    return divisor, targets


def _no_teacher(teacher: object) -> str:
    remedy = "; pass TopKTeacher(ids, log_probs)" if isinstance(teacher, tuple) else ""
    remedy = "; call linear_distillation_loss" if isinstance(teacher, Head) else remedy
    return f"teacher: expected logits or a TopKTeacher, got {type(teacher).__name__}{remedy}"


@public(needs_eager, DivergenceSettings)
@checks.naming(hidden="student.hidden", weight="student.weight", bias="student.bias")
def linear_distillation_loss(
    student: Head,
    teacher: Head | TopKTeacher,
    *,
    group: Any = None,
    labels: Tensor | None = None,
    num_items: float | Tensor | None = None,
    options: HeadOptions | None = None,
    **keywords: Unpack[DivergenceSettings],
) -> Tensor:
    """:func:`distillation_loss` of ``hidden @ weight.T + bias`` of two heads, which are made in chunks of tokens.

    Overwrites nothing. Forward computes the gradients of the student's tensors, and backward scales them, once. For
    ``"none"``, backward recomputes the logits, and may run again. The teacher's tensors get none.

    Collectives: those of :func:`linear_cross_entropy`, of the statistics of :func:`distillation_loss`. "js" has twice
    as many all_gathers of statistics, two per chunk where the others have one in all.

    Args:
        student: a :class:`Head`: the tensors that :func:`linear_cross_entropy` takes.
        teacher: a :class:`Head` of any hidden size, of the same leading dimensions and from the same column on, whose
            tensors must not require a gradient; or a :class:`TopKTeacher`.
        options: a :class:`HeadOptions` of the student's logits, without ``sequence_parallel``, ``logits_dtype`` and
            ``valid_tokens``. In compiled code a :class:`TopKTeacher` has ``gradient="in_backward"``.
        others: as in :func:`distillation_loss`.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError: as :func:`linear_cross_entropy`.
        RuntimeError: from backward, if it runs again over scaled gradients, or with ``create_graph``.

    Example:
        >>> from vocab_parallel_ce import Head, linear_distillation_loss
        >>> student = Head(torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True))
        >>> teacher = Head(torch.ones(2, 1), torch.tensor([[2.0], [0.0], [0.0], [0.0]]))
        >>> loss = linear_distillation_loss(student, teacher)
        >>> round(loss.item(), 4)
        0.468
        >>> loss.backward()
        >>> student.weight.grad.shape
        torch.Size([4, 3])
    """
    settings = divided_by(num_items, head_settings(options, takes=HEADS, **keywords))
    if not isinstance(student, Head):
        raise TypeError(f"student: expected a Head, got {type(student).__name__}")
    if isinstance(teacher, TopKTeacher):
        return loss_of_head(student, teacher, labels, settings, group, num_items)
    if not isinstance(teacher, Head):
        raise TypeError(
            f"teacher: expected a Head or a TopKTeacher, got {type(teacher).__name__}; a Teacher is linear_objective's"
        )
    targets = TeacherHead(*teacher, labels)
    arguments = Arguments(student, targets, group, num_items)
    if not settings.hard_weight:
        return run_head(DIVERGENCE, arguments, settings).loss
    hard_weight = checked_hard_weight(settings, labels)
    check_gradient(settings, knows_grad_output=False)
    checks.check_hidden(student.hidden)
    hidden = student.hidden
    divisor, targets = _counted(num_items, targets, Tokens(hidden, "student.hidden", hidden.shape[:-1]), settings)

    def objective(log_probs: Tensor, divergence: Tensor) -> Tensor:
        return with_hard_weight(divergence, log_probs, hard_weight)

    arguments = Arguments(student, targets, group, None, objective=Objective(objective, {}, "sum", divisor, False))
    return composed(DIVERGENCE, arguments, settings, _with_labels(settings))
