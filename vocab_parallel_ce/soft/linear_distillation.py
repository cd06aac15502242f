"""Distillation of a head from a teacher's head: neither's logits exist as a whole.

For each chunk of tokens both products are made, the student's into the buffer of ``linear.pipeline``, and the gradient
replaces the student's logits there. Gradients are computed in forward, with the products of ``linear_cross_entropy``
and one more for the teacher.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.backward import Refusals, run_backward
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.cross_entropy import public
from vocab_parallel_ce.linear import pipeline
from vocab_parallel_ce.linear.cross_entropy import split_keywords
from vocab_parallel_ce.linear.hidden_states import HiddenStates
from vocab_parallel_ce.linear.pipeline import Gradients, Products, Wanted
from vocab_parallel_ce.linear.plan import Arguments, Inputs, LinearCall, plan_linear_call
from vocab_parallel_ce.options import divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft import divergence_spec
from vocab_parallel_ce.soft.distillation import LAUNCHERS, check_columns, checked_options
from vocab_parallel_ce.soft.divergence_spec import DivergenceOptions
from vocab_parallel_ce.soft.pairs import PairCall, launchers_of
from vocab_parallel_ce.soft.pairs import forward as forward_of_pair
from vocab_parallel_ce.spec import GradOutputs


class LinearDistillationKeywords(TypedDict, total=False):
    """Keywords, as type checkers see them; :class:`Settings` and :class:`HeadSettings` have their defaults."""

    ignore_index: int
    temperature: float
    reduction: str
    impl: str
    check_labels: bool
    vocab_size: int | None
    shard: VocabShard | None
    reduce_hidden_grad: bool
    chunk_tokens: int | str
    memory_budget: int | None


KEYWORDS = keyword_defaults(LinearDistillationKeywords)
REFUSALS = Refusals("linear distillation: backward ran a second time; its gradients are gone: call the loss again")


class Teacher(NamedTuple):
    """The teacher's local tensors."""

    hidden: Tensor  # [N, D']
    weight: Tensor  # [C', D']
    bias: Tensor | None  # [C']


class Distillation(NamedTuple):
    """One checked call."""

    linear: LinearCall
    teacher: Teacher
    launchers: ModuleType
    options: DivergenceOptions


@public(lambda keywords: True)
@checks.naming(hidden="student_hidden", weight="student_weight", bias="student_bias")
@with_keywords(KEYWORDS)
def linear_distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    group: Any = None,
    divergence: str = "forward",
    beta: float = 0.5,
    labels: Tensor | None = None,
    hard_weight: float = 0.0,
    num_items: float | Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """:func:`distillation_loss` of ``hidden @ weight.T + bias`` of both models, which never exist as a whole.

    Overwrites nothing. Forward computes the gradients of the student's tensors, and backward scales them. The
    teacher's tensors get none. ``torch.compile`` breaks the graph here.

    Collectives: per chunk one all_gather of the statistics of :func:`distillation_loss` ("js": two), and one all_reduce
    of the gradient of ``student_hidden``.

    Args:
        student_hidden: ``[..., D]`` bf16, fp16 or fp32, at least two dimensions, the same on every rank.
        student_weight: ``[C, D]``, this rank's rows of the head, of the dtype of ``student_hidden``, or a DTensor.
        teacher_hidden: ``[..., D']``, of the same leading dimensions. Must not require a gradient.
        teacher_weight: ``[C', D']``, of the dtype of ``teacher_hidden``, from the same column on.
        student_bias, teacher_bias: ``[C]`` and ``[C']``, or None.
        reduction: ``"mean"`` or ``"sum"``; ``"none"`` only without a gradient.
        chunk_tokens, memory_budget, reduce_hidden_grad: as in :func:`linear_cross_entropy`, of the student's logits.
        others: as in :func:`distillation_loss`.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError: as :func:`linear_cross_entropy`; also for fp16 with a gradient, which would underflow.
        RuntimeError: from backward, if it runs again, or with ``create_graph``.
    """
    temperature = keywords.pop("temperature", 1.0)
    settings, head = split_keywords(keywords, KEYWORDS, linear_distillation_loss)
    settings = divided_by(num_items, settings)
    options = checked_options(divergence, beta, hard_weight, labels, settings._replace(temperature=temperature))
    if labels is None:  # nothing is ignored
        settings, options = settings._replace(ignore_index=-100), options._replace(ignore_index=-100)
    checks.check_hidden(student_hidden)
    teacher = _checked_teacher(teacher_hidden, teacher_weight, teacher_bias, student_hidden)
    of_rows = student_hidden.new_zeros(student_hidden.shape[:-1], dtype=torch.int64) if labels is None else labels
    given = Arguments(student_hidden, student_weight, of_rows, student_bias, group, num_items, None)
    also: dict[str, Any] = {}
    if verify.open_calls:
        of_teacher = f"shape {tuple(teacher_hidden.shape)}, norm {float(teacher.hidden.float().norm()):.4g}"
        also = {"call": "two heads", "labels": labels is not None, "teacher_hidden": of_teacher} | options._asdict()
    linear, inputs = plan_linear_call(given, settings, head, **also)
    plan = linear.call.plan
    position = group_position(group)
    check_columns(teacher.weight.shape[0], plan.shard, settings, *position, subject="teacher_weight: rows")
    call = Distillation(linear, teacher, launchers_of(plan, *LAUNCHERS), options)
    if not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs)):
        with torch.no_grad(), torch.autocast(student_hidden.device.type, enabled=False):
            loss = _forward(call, inputs, (False, False, False))[0]
        return loss.view(of_rows.shape) if settings.reduction == "none" else loss
    if settings.reduction == "none" or plan.gradient != "in_forward":
        asked = f"reduction={settings.reduction!r} of {linear.dtype}"
        raise ValueError(f"reduction: expected 'mean' or 'sum' of bf16 or fp32 with a gradient, got {asked}")
    result: Tensor = _LinearDistillation.apply(*inputs, call)
    return result


def _checked_teacher(hidden: Any, weight: Any, bias: Any, student: Tensor) -> Teacher:
    """Check the teacher's tensors."""
    for name, tensor in {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_bias": bias}.items():
        if name == "teacher_bias" and tensor is None:
            continue
        checks.check_tensor(name, tensor)
        checks.check_parameter(name, tensor)
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise TypeError(f"{name}: expected a tensor that requires no gradient, got one; pass its detach()")
        if tensor.device != student.device or tensor.dtype != hidden.dtype:
            expected = f"{hidden.dtype} on {student.device} (autocast leaves the teacher as it is)"
            raise ValueError(f"{name}: expected {expected}, got {tensor.dtype} on {tensor.device}; convert it")
    if hidden.shape[:-1] != student.shape[:-1] or hidden.dim() < 2:
        expected = f"that of student_hidden up to the last dimension, {tuple(student.shape)}"
        raise ValueError(f"teacher_hidden: shape must be {expected}, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(f"teacher_weight: expected shape [C', {hidden.shape[-1]}], got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"teacher_bias: expected shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    bias = None if bias is None else bias.detach()
    return Teacher(hidden.detach().reshape(-1, hidden.shape[-1]), weight.detach(), bias)


def _forward(call: Distillation, inputs: Inputs, wanted: Wanted) -> tuple[Tensor, Gradients]:
    """Return the loss of all tokens, and the gradients of their sum that are wanted."""
    linear, teacher, options = call.linear, call.teacher, call.options
    plan, divisor = linear.call.plan, linear.call.num_items
    n_statistics, is_js = len(divergence_spec.statistics(options)), options.divergence == "js"
    pair = PairCall(plan, call.launchers, options, n_statistics, is_js, linear.call.group, divisor)
    products = Products(linear, inputs, wanted)
    others = HiddenStates(linear._replace(dtype=teacher.hidden.dtype), teacher.hidden, False)
    losses = []
    for (rows, states), (_, teacher_states) in zip(products.hidden.chunks(), others.chunks(), strict=True):
        logits, labels = products.logits(states), inputs.labels[rows]
        teacher_logits = torch.nn.functional.linear(teacher_states, teacher.weight, teacher.bias)
        loss, stats, mixture = forward_of_pair(pair, logits, teacher_logits, labels)
        losses.append(loss)
        if any(wanted):
            ones = loss.new_ones(1).expand(logits.shape[0])
            own = {"shard": plan.shard, "options": options}
            call.launchers.gradient(logits, teacher_logits, labels, stats, mixture, divisor, ones, logits, **own)
            d_hidden = products.hidden.new_gradient(rows)
            products.write_d_hidden(logits, d_hidden)
            del logits
            products.finish_chunk(rows, states, d_hidden)
    gradients = products.gradients()
    if plan.reduction == "none":
        of_rows = torch.cat(losses) if losses else inputs.hidden.new_empty(0, dtype=torch.float32)
        return of_rows if linear.order is None else linear.order.to_tokens(of_rows, 0.0), gradients
    return torch.stack(losses).sum() if losses else inputs.hidden.new_zeros((), dtype=torch.float32), gradients


class _LinearDistillation(torch.autograd.Function):
    """Saved: the gradients of the student's hidden states, weight and bias."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: Distillation
    ) -> Tensor:
        ctx.linear, ctx.handed_on, ctx.device = call.linear, False, hidden.device
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden.device.type, enabled=False):
            loss, gradients = _forward(call, Inputs(hidden, weight, bias, labels), ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> Any:
        gradients = run_backward(_gradients, ctx, (grad_loss,), REFUSALS, ctx.linear.call.group, ctx.device)
        return *(gradients or (None, None, None)), None, None


def _gradients(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Gradients:
    ctx.handed_on = True
    return pipeline.scaled(ctx.linear, saved, grads.loss)
