"""Any objective of each token inside a head: the public function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from vocab_parallel_ce.api.call import Outputs, public, record_of, run_objective, split_temperature
from vocab_parallel_ce.api.given_ids import check_threshold, ids_or_labels, loss_and_targets
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.head.arguments import Arguments
from vocab_parallel_ce.head.objective import Objective
from vocab_parallel_ce.losses.divergences import DIVERGENCE, TeacherHead
from vocab_parallel_ce.options import (
    HeadOptions,
    ObjectiveSettings,
    Takes,
    TeacherOptions,
    checked_outputs,
    head_settings,
)
from vocab_parallel_ce.targets import Head, Teacher

OF_GROUPS: Takes = {"gradient": ("auto", "in_forward")}
OBJECTIVES: Takes = {**OF_GROUPS, "keep_logits": ("none",)}


@public(lambda keywords: True, ObjectiveSettings)  # a Python function is no operator
def linear_objective(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor | None,
    objective: Callable[..., Tensor],
    *,
    tokens: Mapping[str, Tensor] | None = None,
    together: Tensor | None = None,
    numbers: Mapping[str, Tensor] | None = None,
    outputs: Sequence[str] = (),
    reduction: str = "mean",
    num_items: float | Tensor | None = None,
    check_objective: bool = True,
    bias: Tensor | None = None,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    threshold: Tensor | None = None,
    teacher: Teacher | None = None,
    main_grad: Tensor | None = None,
    options: HeadOptions | None = None,
    **keywords: Unpack[ObjectiveSettings],
) -> tuple[Tensor, Outputs]:
    """Mean or sum of any function of a token's log-probabilities, with the gradients of ``hidden`` and ``weight``.

    ``hidden @ weight.T + bias`` is made in chunks of tokens, as in :func:`linear_cross_entropy`, once: forward calls
    ``objective`` with the log-probabilities of a chunk, and its derivatives multiply the gradient of the chunk's
    logits. So PPO, GRPO or any other objective costs the three products and the memory of a mean, where
    :func:`linear_token_log_probs` computes the logits twice. docs/objective.md has examples.

    Collectives: those of :func:`linear_cross_entropy` with gradients in the forward pass; without gradients, and before
    those of groups longer than a chunk, one all_gather, or two per chunk with ``"js"``. With sequence parallelism and
    ``together``, one all_gather of ``hidden`` and one reduce_scatter of its gradient.

    Args:
        hidden, weight, labels: as in :func:`linear_cross_entropy`.
        objective: called as ``objective(log_probs, entropy=..., advantage=...)`` with what ``outputs`` and ``tokens``
            name, ``[n]`` each, of some of the tokens in any order. Returns ``[n]``, of each token from its own numbers
            alone, in operations of PyTorch, outside of autocast. It gets copies. Values of ignored tokens do not
            count, be they NaN. Of labels ``[..., k]``, which are given ids, log-probabilities are ``[n, k]``, 0 for an
            id that is ``ignore_index``; a token is ignored if all its ids are. They take no ``outputs``.
        tokens: by name, numbers that are known beforehand, ``[...]`` or ``[..., m]`` and of any dtype, the same on
            every rank; the function gets ``[n]`` or ``[n, m]``. They get no gradient.
        together: group ids ``[...] >= 0``, int32 or int64, -1 for none, the same on every rank. One call of
            ``objective`` then has all tokens of each of its ``k`` groups, and returns ``[k]``, of each group from its
            own tokens; a mean is over groups. It gets ``groups`` too: ``groups.sum(x)`` and ``groups.mean(x)`` make
            ``[k]`` of ``[n]``, ``groups.to_tokens(y)`` ``[n]`` of ``[k]``. Tokens that are ignored, or of no group,
            are left out, and so are groups without others. A group that is longer than a chunk takes a fourth
            product, unless ``keep_logits`` has its logits. The call waits for the device once. It does not if the ids
            are on the CPU and ``hidden`` is on a GPU: then those of ignored tokens must be -1, otherwise the loss is
            NaN, or ValueError is raised where ``check_labels`` looks.
        numbers: by name, numbers of groups, ``[G]`` or ``[G, m]``: that of group ``i`` is at ``i``. The function gets
            all, and ``groups.of(numbers)`` are those of its groups, ``[k]``.
        outputs: names as in :func:`token_log_probs`, for ``objective`` and in the result; in ``objective`` those
            without a gradient are constants.
        reduction: ``"mean"`` divides by the number of labels that are not ignored; or ``"sum"``.
        num_items: divides the sum in place of that number: a number ``>= 0``, or a tensor of one element.
        check_objective: at the first call of each function (of its code) with gradients, raise ValueError if a
            token's value or derivative changes when others are left out or changed, as those of a mean would. This
            call waits for the device, and calls the function 10 times more; later calls and CUDA graphs do not. With
            one valid token it cannot tell, and checks the next call too. False: no check, for instance for dropout.
        temperature, threshold: as in :func:`token_log_probs`; not of the divergence, so they raise without labels.
        teacher: a :class:`Teacher` of the same tokens, whose head makes its logits chunk by chunk. ``objective`` gets
            the ``divergence`` of each token too, and its derivative multiplies the gradient of that: four products,
            whatever the weights. ``labels`` may be None, and then ``objective`` gets no ``log_probs``, and no token is
            ignored; they are not given ids. The teacher gets no gradient.
        options: a :class:`HeadOptions`, without ``gradient="in_backward"``, and ``keep_logits`` only with ``together``.
        others: as in :func:`linear_cross_entropy`.

    Returns:
        the loss ``[]``, and an :class:`Outputs` of ``log_probs`` and ``outputs``, of the shape of ``labels``, which
        have no gradient.

    Raises:
        TypeError, ValueError: as :func:`linear_cross_entropy`; also if ``objective`` returns no number per token, one
            that depends on no argument with a gradient, or one that depends on another tensor that requires a gradient,
            which would be lost.
        RuntimeError: from backward, if it runs a second time, or with ``create_graph``.

    Example:
        >>> from vocab_parallel_ce import linear_objective
        >>> hidden, head = torch.ones(2, 3, requires_grad=True), torch.zeros(4, 3, requires_grad=True)
        >>> def reinforce(log_probs, advantage):
        ...     return -advantage * log_probs
        >>> tokens = {"advantage": torch.tensor([1.0, -1.0])}
        >>> loss, found = linear_objective(hidden, head, torch.tensor([0, 3]), reinforce, tokens=tokens)
        >>> loss.backward()
        >>> found.log_probs, head.grad[:, 0]
        (tensor([-1.3863, -1.3863]), tensor([-0.5000,  0.0000,  0.0000,  0.5000]))
    """
    number, tensor = split_temperature(temperature)
    derived = {"temperature": number, "reduction": "none", "gradient": "in_forward", **ids_or_labels(labels, hidden)}
    if teacher is not None:
        outputs, of_teacher = with_divergence(teacher, labels, outputs, hidden)
        if labels is None:
            check_none_of_labels(temperature, threshold)
        derived |= of_teacher
    takes = OBJECTIVES if together is None else OF_GROUPS
    settings = head_settings(options, takes=takes, outputs=outputs, **keywords, **derived)
    name = "log_probs"
    if teacher is None:
        loss, targets = loss_and_targets(labels, hidden, weight, settings, tensor, threshold, group)
    else:
        if threshold is not None:
            check_threshold(settings)
        loss, targets = DIVERGENCE, TeacherHead(*teacher_head(teacher, group), labels, tensor, threshold)
        name = name if settings.negated else "divergence"
    tokens, numbers = ({} if each is None else each for each in (tokens, numbers))
    of_tokens = Objective(objective, tokens, reduction, num_items, check_objective, name, together, numbers)
    arguments = Arguments(Head(hidden, weight, bias), targets, group, None, main_grad, objective=of_tokens)
    total, found = run_objective(loss, arguments, settings)
    return total, record_of(name, found, settings)


def with_divergence(
    teacher: Teacher, labels: Tensor | None, outputs: Sequence[str], hidden: Tensor
) -> tuple[Sequence[str], dict[str, Any]]:
    """Return the outputs with the divergence, and the settings of a teacher; without labels it is no output."""
    if type(teacher) is not Teacher:
        raise TypeError(f"teacher: expected a Teacher, got {type(teacher).__name__}; pass Teacher(hidden, weight)")
    _, _, _, softcap, logit_scale, temperature, divergence, beta = teacher
    of_teacher: dict[str, Any] = {"teacher": TeacherOptions(divergence, beta, temperature, softcap, logit_scale)}
    others = tuple([name for name in checked_outputs(outputs) if name != "divergence"])
    if labels is None:
        if others:
            raise ValueError(f"outputs: expected none but 'divergence' without labels, got {others}; pass labels")
        return (), of_teacher | {"negated": False}
    if isinstance(labels, Tensor) and labels.dim() == hidden.dim() > 1:
        raise ValueError(f"labels: expected one per token with a teacher, got given ids, {tuple(labels.shape)}")
    return (*others, "divergence"), of_teacher | {"negated": True}


def check_none_of_labels(temperature: float | Tensor, threshold: Tensor | None) -> None:
    """Raise if there is what changes a label's log-probability alone, not a divergence."""
    name = "threshold" if threshold is not None else "temperature"
    if threshold is not None or isinstance(temperature, Tensor) or temperature != 1:
        raise ValueError(f"{name}: expected none without labels, got one; pass labels, or Teacher(temperature=...)")


def teacher_head(teacher: Teacher, group: Any) -> Head:
    """Return a teacher's head with this rank's rows of DTensors."""
    rows: dict[str, Any] = {"weight": teacher.weight, "bias": teacher.bias}
    for name, tensor in rows.items():
        if tensor is not None and is_dtensor(tensor):
            rows[name] = local_rows(f"teacher.{name}", tensor, group)
    return Head(teacher.hidden, **rows)
