"""TransformerEngine's names and signatures, for programs that call its loss today.

``inp``, ``target``, ``ignore_idx``, ``dist_process_group`` and ``reduce_loss`` are this project's
``logits``, ``labels``, ``ignore_index``, ``group`` and ``reduction="mean"``, which error messages use.

:func:`parallel_cross_entropy` is that of 2.20.2. The two steps are those of 2.7 to 2.17, whose first step writes the
gradient over its input. That of 2.18 writes another tensor, and 2.20.2 saves statistics in its place.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import checks, reference, run
from vocab_parallel_ce.api.call import Function, public
from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy
from vocab_parallel_ce.dtensor import process_group_of
from vocab_parallel_ce.layout import per_row, row_layout, rows_are_disjoint
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.plan import kernels_of, plan_call
from vocab_parallel_ce.selection import select
from vocab_parallel_ce.targets import Role, Tokens, check_target


@public(eager_if=lambda keywords: bool(keywords.get("overwrite_input")))
def parallel_cross_entropy(
    inp: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool = False,
    _input: Tensor | None = None,
) -> Tensor:
    """``parallel_cross_entropy`` of TransformerEngine 2.20.2: :func:`vocab_parallel_cross_entropy` by its names.

    Args:
        inp: ``[..., C]`` this rank's logits. ``_input`` is its deprecated name; ``inp`` is then None.
        target: ``[...]`` global ids, or all of them in one dimension.
        label_smoothing: in [0, 1].
        reduce_loss: True: the mean over the rows that are not ignored; False: the loss of each row.
        dist_process_group: the ranks that share a vocabulary, with equal shards, or None.
        ignore_idx: rows with this label have loss 0 and gradient 0.
        is_cg_capturable: accepted; every path can be captured in a CUDA graph.
        overwrite_input: False: ``inp`` stays as it is, and the gradient is a new tensor. True: backward writes the
            gradient over ``inp``, which nobody may read from then on; ValueError under saved-tensor hooks.

    Returns:
        as :func:`vocab_parallel_cross_entropy`, except that a mean is ``[1]``, as that library's is.

    Collectives, Raises: as :func:`vocab_parallel_cross_entropy`.

    Example:
        >>> from vocab_parallel_ce import parallel_cross_entropy
        >>> logits, labels = torch.zeros(2, 4), torch.tensor([1, 2])
        >>> parallel_cross_entropy(logits, labels)
        tensor([1.3863, 1.3863])
        >>> parallel_cross_entropy(logits, labels, reduce_loss=True)
        tensor([1.3863])
    """
    if _input is not None:
        if inp is not None and inp is not _input:
            raise TypeError("_input: is the deprecated name of inp, got both")
        warnings.warn("_input is deprecated, use inp", FutureWarning, stacklevel=_frames_of_ours())
        inp = _input
    if isinstance(target, Tensor) and target.is_floating_point():
        raise TypeError(f"target: dtype must be int64 or int32, got {target.dtype}")
    checks.check_bool("overwrite_input", overwrite_input)
    loss = vocab_parallel_cross_entropy(
        inp,
        _row_targets(target, inp),
        group=dist_process_group,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction=_reduction(reduce_loss),
        gradient="in_backward" if overwrite_input else "out_of_place",
    )
    return loss.reshape(1) if reduce_loss else loss


def _called_as_installed(function: Function) -> Function:
    """Decorate a step of the pair: a call in the form of another version gets an error that says so."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            name, expected = function.__name__, ", ".join(signature.parameters)
            raise TypeError(
                f"{name}: expected ({expected}), as in TransformerEngine 2.7 to 2.17, got another version's call: "
                f"{error}; the pair of 2.20.2 saves statistics, not the gradient: call parallel_cross_entropy, which "
                "is that of 2.20.2"
            ) from None
        return function(*args, **kwargs)

    return call  # type: ignore[return-value]


@public(eager_if=lambda keywords: True)
@_called_as_installed
@torch.no_grad()
def cross_entropy_forward(
    _input: Tensor, target: Tensor, label_smoothing: float, reduce_loss: bool, dist_process_group: Any, ignore_idx: int
) -> tuple[Tensor, Tensor]:
    """First step of TransformerEngine 2.7's pair, up to 2.17: return the fp32 loss, and ``_input`` with its gradient.

    It is without autograd, and overwrites ``_input`` whether or not it requires a gradient. If its last dimension is
    not dense, or it overlaps itself, the second result is a copy instead. A mean is ``[]``. Arguments, collectives,
    errors: as :func:`parallel_cross_entropy`; TypeError for a call in the form of 2.20.2, whose pair returns other
    tensors.

    Example:
        >>> from vocab_parallel_ce import cross_entropy_forward
        >>> loss, grad = cross_entropy_forward(torch.zeros(1, 4), torch.tensor([1]), 0.0, True, None, -100)
        >>> round(loss.item(), 4)
        1.3863
        >>> grad
        tensor([[ 0.2500, -0.7500,  0.2500,  0.2500]])
    """
    target = _row_targets(target, _input)
    settings = Settings(
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction=_reduction(reduce_loss),
        gradient="in_forward",
    )
    targets, group = Labels(target), process_group_of(dist_process_group)
    call, targets = plan_call(LABELS, _input, targets, settings, group)
    (loss,), grad = run.forward_in_place(call, _input, targets)
    return loss, grad


@public(eager_if=lambda keywords: True)
@_called_as_installed
@torch.no_grad()
def cross_entropy_backward(_input: Tensor, grad_output: Tensor, is_cg_capturable: bool = False) -> Tensor:
    """Second step of the pair: scale, in place, and return the gradient that :func:`cross_entropy_forward` returned.

    Collectives: none. If ``grad_output`` is one element equal to 1, the device leaves ``_input`` as it is.

    Args:
        _input: ``[..., C]`` the second result of :func:`cross_entropy_forward`.
        grad_output: one element, or one per row, of any strides.
        is_cg_capturable: accepted; nothing here synchronises.

    Raises:
        TypeError, ValueError: ``_input`` or ``grad_output`` is not as described, or the call is in another version's
            form.

    Example:
        >>> from vocab_parallel_ce import cross_entropy_backward, cross_entropy_forward
        >>> loss, grad = cross_entropy_forward(torch.zeros(1, 4), torch.tensor([1]), 0.0, True, None, -100)
        >>> cross_entropy_backward(grad, torch.tensor(2.0))
        tensor([[ 0.5000, -1.5000,  0.5000,  0.5000]])
    """
    checks.check_logits(_input)
    tokens = Tokens(_input, "_input", _input.shape[:-1])
    check_target("grad_output", _row_targets(grad_output, _input), Role("numbers", ("rows",)), tokens)
    checks.check_no_transforms(_input, grad_output)
    if _input.is_neg() or row_layout(_input) is None or not rows_are_disjoint(_input):
        raise ValueError(
            "_input: expected the tensor that cross_entropy_forward returned, whose rows are dense and "
            f"share no memory, got shape {tuple(_input.shape)}, strides {_input.stride()}"
        )
    requested = "reference" if _input.dtype == torch.float64 else "auto"
    kernels = kernels_of(select(_input.device.type, requested)[0])
    element_mul = reference.element_mul if kernels is None else kernels.outputs.element_mul
    element_mul(_input, per_row(grad_output.resolve_neg(), _input))
    run.raise_version(_input)
    return _input


def _frames_of_ours() -> int:
    """Return a ``stacklevel`` that points at the caller of this package: verification and the compiler add frames."""
    if torch.compiler.is_dynamo_compiling():
        return 3  # the compiler cannot look at frames
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (
        "vocab_parallel_ce",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    return level


def _row_targets(target: Any, logits: Any) -> Any:
    """Return a flattened ``target [N]`` in the shape of the rows of ``logits [..., C]``."""
    if not (isinstance(target, Tensor) and isinstance(logits, Tensor)) or target.dim() != 1 or logits.dim() < 3:
        return target
    rows = logits.shape[:-1]
    return target.reshape(rows) if target.numel() == math.prod(rows) else target


def _reduction(reduce_loss: object) -> str:
    if not isinstance(reduce_loss, bool):
        raise TypeError(f"reduce_loss: expected a bool, got {type(reduce_loss).__name__}")
    return "mean" if reduce_loss else "none"
