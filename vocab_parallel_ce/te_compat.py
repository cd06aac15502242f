"""TransformerEngine's names and signatures, for programs that call its loss today.

``inp``, ``target``, ``ignore_idx``, ``dist_process_group`` and ``reduce_loss`` are this project's
``logits``, ``labels``, ``ignore_index``, ``group`` and ``reduction="mean"``, which error messages use.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce import pipeline
from vocab_parallel_ce.cross_entropy import public, vocab_parallel_cross_entropy


@public
def parallel_cross_entropy(
    inp: Tensor | None = None,
    target: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Any = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
    *,
    overwrite_input: bool | None = None,
    _input: Tensor | None = None,
) -> Tensor:
    """TransformerEngine's ``parallel_cross_entropy``; see ``vocab_parallel_cross_entropy``.

    Collectives: forward one all_gather where ``dist_process_group`` has several ranks, backward none.

    Args:
        inp: ``[..., C]`` this rank's logits, bf16, fp16 or fp32. Required.
        target: ``[...]`` int64 or int32 global ids. Required.
        label_smoothing: in [0, 1].
        reduce_loss: True for the mean over the rows that are not ignored, shape ``[]``; False for
            the loss of each row, in ``target``'s shape.
        dist_process_group: the ranks that share a vocabulary, or None.
        ignore_idx: rows with this label have loss 0 and gradient 0.
        is_cg_capturable: accepted; every path can be captured in a CUDA graph.
        overwrite_input: True: backward writes the gradient over ``inp`` (TransformerEngine 2.20's
            meaning). False: into a new tensor. None: forward writes the gradient of a mean over ``inp``, and
            backward scales it; for an unreduced loss, fp16, and a view of another tensor it is True's way.
            Under saved-tensor hooks, and for a leaf or a view of one, it is False's way.
        _input: deprecated name of ``inp``.

    Returns:
        fp32 loss.

    Raises:
        TypeError, ValueError: as ``vocab_parallel_cross_entropy``.
    """
    if _input is not None:
        if inp is not None:
            raise TypeError("_input: is the deprecated name of inp, got both")
        warnings.warn("_input is deprecated, use inp", FutureWarning, stacklevel=3)
        inp = _input
    if overwrite_input not in (None, True, False):
        raise TypeError(f"overwrite_input: expected a bool or None, got {overwrite_input!r}")
    return vocab_parallel_cross_entropy(
        inp,  # type: ignore[arg-type]  # None is refused there, as every other type is
        target,  # type: ignore[arg-type]
        group=dist_process_group,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction=_reduction(reduce_loss),
        gradient=_gradient(inp, reduce_loss, overwrite_input),
    )


@public
@torch.no_grad()
def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: Any,
    ignore_idx: int,
) -> tuple[Tensor, Tensor]:
    """First step of the pair without autograd: the loss, and its gradient in ``_input``'s storage.

    Overwrites ``_input`` whether or not it requires a gradient. Logits whose last dimension is not
    dense, or that overlap themselves, are copied; the second result is then the copy.
    Collectives: one all_gather where ``dist_process_group`` has several ranks.

    Args:
        _input: ``[..., C]`` this rank's logits, bf16, fp16 or fp32.
        target: ``[...]`` int64 or int32 global ids.
        label_smoothing, reduce_loss, dist_process_group, ignore_idx: as in
            :func:`parallel_cross_entropy`.

    Returns:
        The fp32 loss, ``[]`` or in ``target``'s shape, and the tensor that holds the gradient.

    Raises:
        TypeError, ValueError: as ``vocab_parallel_cross_entropy``.
    """
    call = pipeline.prepare_call(
        _input,
        target,
        group=dist_process_group,
        ignore_index=ignore_idx,
        label_smoothing=label_smoothing,
        reduction=_reduction(reduce_loss),
        gradient="in_forward",
        impl="auto",
        may_hold_gradient=True,
    )
    grad = pipeline.overwritable(_input)
    loss = call.outputs_and_gradient(grad, pipeline.flat(target)).loss
    return loss, grad


@public
@torch.no_grad()
def cross_entropy_backward(_input: Tensor, grad_output: Tensor, is_cg_capturable: bool = False) -> Tensor:
    """Second step of the pair: scale the gradient that :func:`cross_entropy_forward` left in ``_input``.

    Overwrites ``_input``; where ``grad_output`` is one element equal to 1, the device leaves it as it
    is. Collectives: none.

    Args:
        _input: ``[..., C]`` the second result of :func:`cross_entropy_forward`.
        grad_output: grad_output: one element, or one for each row, of any strides.
        is_cg_capturable: accepted; nothing here synchronises.

    Returns:
        ``_input``.

    Raises:
        TypeError, ValueError: ``_input`` or ``grad_output`` is not as described.
    """
    return pipeline.scale_in_place(_input, grad_output)


def _gradient(logits: object, reduce_loss: bool, overwrite_input: bool | None) -> str:
    """``gradient=`` of :func:`vocab_parallel_cross_entropy`, which checks ``logits``."""
    if overwrite_input is not None:
        return "in_backward" if overwrite_input else "out_of_place"
    if not reduce_loss or not isinstance(logits, Tensor) or logits.dtype == torch.float16:
        return "auto"
    return "in_forward" if logits._base is None and pipeline.may_overwrite(logits) else "auto"


def _reduction(reduce_loss: object) -> str:
    if not isinstance(reduce_loss, bool):
        raise TypeError(f"reduce_loss: expected a bool, got {type(reduce_loss).__name__}")
    return "mean" if reduce_loss else "none"
