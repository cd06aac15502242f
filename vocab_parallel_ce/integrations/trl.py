"""TRL's fused head, computed by this package: only on request, and undoable.

The trainers of TRL 1.16 take the log-probabilities of the labels, and more, from one autograd Function, which the
forward of ``trl.trainer.utils.add_fused_lm_head`` calls. :func:`install` replaces that Function, also for models that
have this forward already. A head that tensor parallelism cut stays cut: TRL gathers its weight. It also replaces the
divergences of ``DistillationTrainer``, a function of the hidden states and heads of student and teacher, and of
``trl.experimental.gkd.GKDTrainer``, one of both logits. Of TRL 1.9 it replaces the last alone, and reports the others.
"""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.api.distillation import distillation_loss
from vocab_parallel_ce.api.heads import linear_token_log_probs
from vocab_parallel_ce.api.objective import linear_objective
from vocab_parallel_ce.checks import check_bool
from vocab_parallel_ce.dtensor import group_of_rows, is_dtensor
from vocab_parallel_ce.integrations import Report
from vocab_parallel_ce.integrations.log_probs import divergence_of, head_options
from vocab_parallel_ce.integrations.rebind import Around, Switch
from vocab_parallel_ce.integrations.transformers.fsdp import fsdp_shard
from vocab_parallel_ce.targets import Head, Teacher

CORE = "trl.trainer.utils:_ChunkedLogProbFunction"
DIVERGENCE = "trl.trainer.distillation_trainer:_chunked_divergence_loss"
GKD = "trl.experimental.gkd.gkd_trainer:GKDTrainer.generalized_jsd_loss"
TP = "tp"  # the name that transformers and accelerate give tensor parallelism's dimension of a mesh
OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OWN_NAMES = {"log_sum_sq_probs": "sum_sq_probs", "mean_logits": "mean_logit", "is_top1": "predictions"}
LEFT = {
    f"outputs other than {', '.join(OUTPUTS)}": "this package has none of them",
    "temperature, logit_scale or softcap that is not positive": "this package refuses them",
    "DeepSpeed ZeRO-3, of DistillationTrainer": "its loss is outside of the engine's forward, which gathers the head",
    "GKD's reductions except batchmean and sum": "this package has a number for each token, not for each of its logits",
}
OF_TRL_1_9 = ["last_hidden", "weight", "targets", "temperature", "chunk_size", "final_logit_softcapping", "logit_scale"]
_calls: Counter[str] = Counter()
_options = {"own_tokens": False}  # of `install`


class _NoTensor:
    """Stands for DTensor where TRL asks if it must gather the head: never, :class:`_Core` decides."""


def _is_cut_by_tensor_parallelism(weight: Any) -> bool:
    """Return what the name of the mesh's dimension says; without a name nobody can tell."""
    names = weight.device_mesh.mesh_dim_names
    sharded = [dim for dim, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if sharded and names is None:
        raise ValueError(
            "lm_head.weight: a DTensor on a mesh without names does not tell if tensor parallelism or FSDP cut it, "
            f'expected names, got {weight.device_mesh}; name the dimension "{TP}", or otherwise if FSDP cut it'
        )
    return any(names[dim] == TP for dim in sharded)


def _gathered(tensor: Any) -> Any:
    """Return the whole tensor. Its gradient is averaged over the ranks of data parallelism, as FSDP does."""
    if not is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import Partial, Replicate

    names = tensor.device_mesh.mesh_dim_names or [""] * tensor.device_mesh.ndim
    return tensor.full_tensor(grad_placements=[Replicate() if name == TP else Partial("avg") for name in names])


class _Core:
    """Stands for TRL's autograd Function."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Any,
        bias: Any,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"),
    ) -> tuple[Tensor | None, ...]:
        """Return log_probs, entropy, log_sum_sq_probs, mean_logits and is_top1, each ``[N]``, or None if not asked."""
        requested = [OWN_NAMES.get(name, name) for name in outputs if name != "log_probs"]
        scales: dict[str, Any] = {
            "softcap": final_logit_softcapping,
            "logit_scale": logit_scale,
            "temperature": temperature,
        }
        reason = _why_left_to_trl((), scales, outputs)
        stays_cut = is_dtensor(weight) and _is_cut_by_tensor_parallelism(weight) and not reason
        _calls[reason or "fused"] += 1
        is_own = _options["own_tokens"] and not stays_cut and not reason and fsdp_shard(weight) is weight
        if not (stays_cut or is_own):
            weight, bias = _gathered(weight), _gathered(bias)
        if reason:
            tensors = hidden, weight, bias, targets, temperature, chunk_size
            core: Any = _switch.original(CORE)
            return core.apply(*tensors, final_logit_softcapping, logit_scale, outputs)
        if not (is_own or torch.is_autocast_enabled(hidden.device.type)):  # which casts the products alone
            weight, bias = (None if t is None else t.to(hidden.dtype) for t in (weight, bias))
        group = group_of_rows("lm_head.weight", weight) if is_dtensor(weight) else None
        # lse costs nothing, and makes the result a record also if nothing else is asked for.
        record: Any = linear_token_log_probs(
            hidden,
            weight,
            targets,
            bias=bias,
            group=group,
            outputs=("lse", *requested),
            **scales,
            options=head_options(own_tokens=is_own),
        )
        sums, mean = record.sum_sq_probs, record.mean_logit  # as TRL's own, without a gradient
        is_top1 = None
        if record.predictions is not None:
            is_top1 = (record.predictions == targets) & (record.predictions >= 0)
        return record.log_probs, record.entropy, None if sums is None else sums.log(), mean, is_top1


def _why_left_to_trl(
    weights: tuple[Tensor, ...], scales: dict[str, Any], outputs: tuple[str, ...] = (), is_reduced: bool = True
) -> str | None:
    """Return the first of ``LEFT`` that holds, or None."""
    holds = (
        not set(outputs) <= set(OUTPUTS),
        not all(scale is None or scale > 0 for scale in scales.values()),
        any(hasattr(weight, "ds_id") for weight in weights),
        not is_reduced,
    )
    return next((reason for reason, is_so in zip(LEFT, holds, strict=True) if is_so), None)


def _whole(head: Head, *, is_constant: bool = False) -> Head:
    """Return a head whose weight and bias are whole, and of the hidden states' dtype if autocast casts nothing."""
    hidden, *others = head
    casts = is_constant or not torch.is_autocast_enabled(hidden.device.type)  # which casts the student's products alone
    dtype = hidden.dtype if casts else None
    whole = [None if tensor is None else _gathered(tensor).to(dtype) for tensor in others]
    tensors: list[Any] = [each if each is None or not is_constant else each.detach() for each in (hidden, *whole)]
    return Head(*tensors)


def _of_divergence(log_probs: Tensor, divergence: Tensor, entropy: Tensor) -> Tensor:
    return divergence


def _chunked_divergence_loss(
    student_hidden_states: Tensor,
    teacher_hidden_states: Tensor,
    student_lm_head_weight: Any,
    teacher_lm_head_weight: Any,
    completion_mask: Tensor,
    beta: float,
    num_items_in_batch: Any = None,
    student_lm_head_bias: Any = None,
    teacher_lm_head_bias: Any = None,
    student_logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    student_final_logit_softcapping: float | None = None,
    teacher_final_logit_softcapping: float | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the mean divergence of the tokens that count, the sum of the student's entropies, and their number.

    Four matmuls, where TRL's takes six, and eight for ``beta`` in between.
    """
    scales = {"temperature": temperature, "student": student_logit_scale, "teacher": teacher_logit_scale}
    caps = {"cap": student_final_logit_softcapping, "teacher's": teacher_final_logit_softcapping}
    heads = student_lm_head_weight, teacher_lm_head_weight
    reason = _why_left_to_trl(heads, scales | caps)
    _calls[reason or "distillation"] += 1
    if reason:
        original: Any = _switch.original(DIVERGENCE)
        of_student = student_lm_head_bias, teacher_lm_head_bias, student_logit_scale, teacher_logit_scale
        hidden = student_hidden_states, teacher_hidden_states
        result: tuple[Tensor, Tensor, Tensor] = original(
            *hidden, *heads, completion_mask, beta, num_items_in_batch, *of_student, *caps.values(), temperature
        )
        return result
    student = Head(student_hidden_states, student_lm_head_weight, student_lm_head_bias)
    known = Head(teacher_hidden_states, teacher_lm_head_weight, teacher_lm_head_bias)
    scaled = teacher_final_logit_softcapping, teacher_logit_scale, temperature
    states, weight, bias = _whole(student)
    found: Any
    loss, found = linear_objective(
        states,
        weight,
        torch.where(completion_mask != 0, 0, -100),  # entropies need a label; any will do
        _of_divergence,
        outputs=("divergence", "entropy"),
        reduction="mean" if num_items_in_batch is None else "sum",
        num_items=num_items_in_batch,
        check_objective=False,
        bias=bias,
        softcap=student_final_logit_softcapping,
        logit_scale=student_logit_scale,
        temperature=temperature,
        teacher=Teacher(*_whole(known, is_constant=True), *scaled, **divergence_of(beta)),
    )
    return loss, found.entropy.sum(), (completion_mask != 0).sum()


def _generalized_jsd_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    num_items_in_batch: Any = None,
) -> Tensor:
    """Return the divergence of the tokens that count, fp32, without another tensor of the logits' size."""
    is_reduced = num_items_in_batch is not None or reduction in ("batchmean", "sum")
    reason = _why_left_to_trl((), {"temperature": temperature}, is_reduced=is_reduced)
    _calls[reason or "GKD"] += 1
    if reason:
        own: Any = _switch.original(GKD)
        given = labels, beta, temperature, reduction, num_items_in_batch
        result: Tensor = own(student_logits, teacher_logits, *given)
        return result
    is_mean = num_items_in_batch is None and reduction == "batchmean"
    if is_mean and labels is None:
        is_mean, num_items_in_batch = False, max(len(student_logits), 1)
    options = divergence_of(beta) | {"reduction": "mean" if is_mean else "sum", "num_items": num_items_in_batch}
    if labels is not None:
        labels = torch.where(labels == -100, labels, 0)  # a mask: any id will do
    return distillation_loss(student_logits, teacher_logits.detach(), labels=labels, temperature=temperature, **options)


def _stand_in(core: Any) -> Any:
    """Return what stands for TRL's Function, if that has the parameters of TRL 1.16; ImportError leaves TRL 1.9's."""
    expected, got = [*inspect.signature(_Core.apply).parameters], [*inspect.signature(core.forward).parameters][1:]
    if got == OF_TRL_1_9:
        raise ImportError("TRL 1.9's, which takes no bias and no outputs, stays TRL's; install trl 1.16")
    if got != expected:
        version = importlib.import_module("trl").__version__
        raise ValueError(f"trl: expected the fused head of TRL 1.16, got another in TRL {version}; install trl 1.16")
    return _Core


_switch = Switch(
    "TRL 1.16",
    {
        CORE: Around(_stand_in, everywhere=False),
        DIVERGENCE: _chunked_divergence_loss,
        GKD: _generalized_jsd_loss,
        "trl.trainer.utils:DTensor": Around(lambda _: _NoTensor, optional=True, everywhere=False),  # TRL 1.9 has none
    },
    LEFT,
    _calls,
)
uninstall, installed, report = _switch.uninstall, _switch.installed, _switch.report


def install(*, own_tokens: bool = False) -> Report:
    """Replace TRL's functions, as :meth:`Switch.install` does.

    Args:
        own_tokens: heads that FSDP2 cut in a unit of their own are not gathered for log-probabilities
            (:class:`HeadOptions`); ``DistillationTrainer`` gathers both heads as before.
    """
    check_bool("own_tokens", own_tokens)
    made = _switch.install()
    _options["own_tokens"] = own_tokens
    return made
