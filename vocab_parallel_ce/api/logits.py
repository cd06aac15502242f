"""Losses and log-probabilities over logits: the public functions. ``spec`` has the mathematics and the legend."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from vocab_parallel_ce import checks
from vocab_parallel_ce.api.call import TensorOrOutputs, overwrites, public, record_of, run_logits, split_temperature
from vocab_parallel_ce.api.given_ids import ids_or_labels, loss_and_targets
from vocab_parallel_ce.losses.labels import LABELS, Labels
from vocab_parallel_ce.options import LogProbSettings, LossSettings, divided_by, settings_of


@public(overwrites, LossSettings)
def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    num_items: float | Tensor | None = None,
    class_weight: Tensor | None = None,
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool | str = "auto",
    **keywords: Unpack[LossSettings],
) -> TensorOrOutputs:
    """Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

    In fp32, with ``lse`` and the mean over the whole vocabulary of ``V`` columns, for the ``R`` ranks of ``group``::

        z    = softcap * tanh(logit_scale * x / softcap), or logit_scale * x without softcap
        loss = (1 - e) * (lse - z_y) + e * (lse - mean_i z_i) + z_loss * lse^2

    Without options this is ``torch.nn.functional.cross_entropy``. docs/options.md has every option in detail.
    Probabilities as labels are a teacher: see :func:`distillation_loss`.

    Overwrites: by default nothing that anybody can still read; see ``gradient``. Not counted are work queued on another
    CUDA stream, other processes with a CUDA tensor's memory, and weak references of C++. Nothing is overwritten if no
    gradient is needed. Logits are copied, and stay as they are, if their last dimension is not dense, if they overlap
    themselves (expanded), or if more than three leading strides do not merge.

    Collectives: forward one all_gather of ``4 * K`` bytes per row from each rank, on the current stream; backward
    none. ``K`` is 3, with label smoothing 2 more, with class weights 1 more.
    Outputs add to it: 1 each for ``"entropy"``, ``"sum_sq_probs"`` and predictions, 2 for ``"mean_logit"`` without
    smoothing. The host waits for the device only with ``check_labels=True``; every
    path can be captured in a CUDA graph. Under ``torch.compile`` it is one operator, and the
    gradient is out of place, unless ``gradient`` names another mode: then the graph breaks (docs/compile.md).

    Args:
        logits: ``[..., C]`` bf16, fp16 or fp32, at least two dimensions, of any strides. For fp64, as for a gradient
            check, plain PyTorch runs, in fp64 throughout; so is the loss.
        labels: ``[...]`` int64 or int32 ids in the *global* vocabulary, the same on every rank; :func:`next_labels`
            makes those of the next token.
        group: the ``ProcessGroup`` of the ranks that share a vocabulary, or a ``DeviceMesh`` of one dimension; None for
            logits that hold all of it. All of its ranks call, with arguments that fit together; :func:`verify_calls`
            checks that.
        ignore_index: rows with this label have loss 0 and gradient 0, and do not count in the mean.
        label_smoothing: ``e``, in [0, 1].
        z_loss: coefficient of ``lse^2`` (PaLM, arXiv:2204.02311, section 5).
        softcap: bound of the logits (Gemma 2, arXiv:2408.00118, section 2), or None.
        logit_scale: positive factor of the logits.
        reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or ``"none"``.
        num_items: divides the sum, also for ``"mean"``, in the place of the number of rows; 0 items give 0. A
            number, or a tensor of one element, which the host reads only on the CPU.
        class_weight: ``[V]``, or ``[C]`` for this rank's columns, of any floating dtype: PyTorch's ``weight``. A mean
            is divided by the sum of the labels' weights.
        outputs: names of fields of :class:`Outputs` to return alongside the loss: ``("entropy", "predictions")``.
            ``V`` is at most 2**24 for predictions.
        gradient: where it is written. ``"auto"``: over the logits if nobody else can see them when backward runs,
            otherwise into a new tensor (docs/gradients.md). ``"out_of_place"``: into a new tensor. ``"in_backward"``:
            over the logits, whoever holds them. ``"in_forward"``: the same in this call, and backward scales it, which
            rounds again if ``grad_output`` is not 1; for logits that are no view in the graph. The last two are
            refused under saved-tensor hooks (a checkpoint that is not reentrant, ``save_on_cpu``). With
            ``"in_forward"`` backward raises if it gets a
            gradient of another output than the loss.
        impl: ``"one_pass"``, ``"triton"``, ``"reference"``, or ``"auto"``: the first of them that can run.
        check_labels: whether to raise ValueError for a label outside ``[0, V)`` that is not ``ignore_index``;
            otherwise its row is NaN. ``"auto"``: where labels are on the CPU, also in compiled code. True: always,
            for which the host waits for the device. False: never.
        vocab_size: ``V``. Either each rank has ``ceil(V / R)`` columns until none are left, so that the last ones may
            have fewer, or none; or all have ``C`` columns, of which those beyond ``V`` are padding: no part of the
            softmax, gradient 0. If neither holds, a :class:`VocabShard` that says which columns this rank has. None:
            ``R * C``, on every rank.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``. With ``outputs``, an
        :class:`Outputs`.

    Raises:
        TypeError: a type or dtype does not fit, or inside a ``torch.func`` transform or forward-mode AD.
        ValueError: shapes, devices or values do not fit, ``impl`` cannot run here, or an earlier call has
            left its gradient in ``logits``.
        RuntimeError: from backward, if it runs again over a gradient in place, with ``create_graph`` or
            ``is_grads_batched``, or if something else has written to the logits.

    Example:
        >>> from vocab_parallel_ce import vocab_parallel_cross_entropy
        >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 3.0]], requires_grad=True)
        >>> labels = torch.tensor([0, -100])  # the second row is ignored
        >>> loss = vocab_parallel_cross_entropy(logits, labels)
        >>> round(loss.item(), 4)
        0.2395
        >>> loss.backward()
        >>> logits.grad
        tensor([[-0.2130,  0.1065,  0.1065],
                [ 0.0000,  0.0000,  0.0000]])
    """
    settings = settings_of(gradient=gradient, impl=impl, check_labels=check_labels, **keywords)
    if num_items is not None:
        settings = divided_by(num_items, settings)
    losses = run_logits(LABELS, logits, Labels(labels, class_weight), settings, group=group, num_items=num_items)
    return record_of("loss", losses, settings) if settings.outputs else losses.loss


@public(overwrites, LogProbSettings)
def token_log_probs(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any = None,
    temperature: float | Tensor = 1.0,
    threshold: Tensor | None = None,
    gradient: str = "auto",
    impl: str = "auto",
    check_labels: bool | str = "auto",
    **keywords: Unpack[LogProbSettings],
) -> TensorOrOutputs:
    """Log-probability of each label, and what else is asked of the whole distribution, from one read of the logits.

    Computes::

        p = softmax(z),  log_prob = log p_y,  entropy = -sum_i p_i log p_i

    in fp32, with ``z`` the scaled and capped logits of :func:`vocab_parallel_cross_entropy`, divided by the
    temperature. ``log_prob``, ``entropy`` and ``lse`` are differentiable; one pass computes their gradients.

    Labels of as many dimensions as the logits are ``k`` given ids per token, whose log-probabilities are returned. An
    id may be given twice. Their gradient is one pass too.

    Overwrites: as :func:`vocab_parallel_cross_entropy`, by default nothing that a counted reader can still read.

    Collectives: those of :func:`vocab_parallel_cross_entropy`; of given ids, ``K`` is ``k + 3``.

    Args:
        labels: ``[...]`` int64 or int32 global ids, the same on every rank. Or ``[..., k]`` given ids:
            one that is ``ignore_index`` has log-probability 0. One outside ``[0, V)`` raises, or has NaN, as the
            gradient of its token: see ``check_labels``. They take no ``outputs``.
        temperature: positive; divides the logits after the cap. A number, or a floating-point tensor of one element, or
            of one for each label, without a gradient. The host does not read a tensor: where it is not positive and
            finite in fp32, outputs and gradient are NaN, except of ignored tokens.
        outputs: names of fields of :class:`Outputs`, as in the loss.
        threshold: logits below it take no part, as if they were ``-inf``: a floating-point tensor of one element, or of
            one for each label, without a gradient, as :func:`sampling_threshold` returns it. Outputs are then of the
            distribution that a sampler used. A label below it has ``-inf``; if its own gradient is infinite or NaN,
            that of all columns below is NaN. One above all logits of a token that is not ignored raises on a CPU, where
            plain PyTorch computes; elsewhere that token is NaN. Not with given ids and ``"mean_logit"``.
        ignore_index: tokens with this label have outputs and gradient 0.
        gradient: ``"auto"``, ``"in_backward"`` or ``"out_of_place"``.
        others: as in :func:`vocab_parallel_cross_entropy`.

    Returns:
        fp32 log-probabilities of the labels' shape, equal bit for bit on all ranks; with ``outputs``, an
        :class:`Outputs`.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`vocab_parallel_cross_entropy`.

    Example:
        >>> from vocab_parallel_ce import token_log_probs
        >>> found = token_log_probs(torch.zeros(2, 4), torch.tensor([1, 3]), outputs=("entropy",))
        >>> found.log_probs
        tensor([-1.3863, -1.3863])
        >>> found.entropy
        tensor([1.3863, 1.3863])
    """
    number, tensor = split_temperature(temperature)
    derived = {"temperature": number, "reduction": "none", **ids_or_labels(labels, logits)}
    settings = settings_of(gradient=gradient, impl=impl, check_labels=check_labels, **keywords, **derived)
    checks.check_choice("gradient", gradient, ("auto", "in_backward", "out_of_place"))
    loss, targets = loss_and_targets(labels, logits, None, settings, tensor, threshold, group)
    losses = run_logits(loss, logits, targets, settings, group=group)
    return record_of("log_probs", losses, settings) if settings.outputs else losses.loss


def output_of(name: str, logits: Tensor, group: Any = None) -> Tensor:
    """Return one of the fp32 ``outputs`` ``[...]`` of ``logits [..., C]``, without labels. Overwrites nothing."""
    any_labels = torch.zeros(logits.shape[:-1], dtype=torch.int32, device=logits.device)
    values = token_log_probs(logits, any_labels, group=group, outputs=(name,), gradient="out_of_place")
    value: Tensor = getattr(values, name)
    return value
