"""Distillation of a head from a teacher's head, or its k tokens: logits are made in chunks of tokens.

For each chunk of tokens both products are made, the student's into the buffer of ``linear.pipeline``, and the gradient
replaces the student's logits there. Reduced losses compute their gradients in forward, with the products of
``linear_cross_entropy`` and one more for the teacher. Unreduced ones, and fp16, do it in backward, which makes the
logits again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.backward import Refusals, run_backward
from vocab_parallel_ce.collectives import group_position
from vocab_parallel_ce.cross_entropy import public
from vocab_parallel_ce.layout import per_row
from vocab_parallel_ce.linear import pipeline
from vocab_parallel_ce.linear.cross_entropy import split_keywords
from vocab_parallel_ce.linear.hidden_states import HiddenStates
from vocab_parallel_ce.linear.pipeline import Gradients, Products, Wanted
from vocab_parallel_ce.linear.plan import Arguments, Inputs, LinearCall, plan_linear_call
from vocab_parallel_ce.options import Settings, divided_by, keyword_defaults, with_keywords
from vocab_parallel_ce.plan import Plan
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.soft import divergence_spec, topk
from vocab_parallel_ce.soft.distillation import LAUNCHERS, check_columns, checked_columns, checked_options, checked_topk
from vocab_parallel_ce.soft.divergence_spec import DivergenceOptions
from vocab_parallel_ce.soft.pairs import PairCall, check_beside, launchers_of
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
NOTHING: Wanted = (False, False, False)
REFUSALS = Refusals("linear distillation: backward ran a second time; its gradients are gone: call the loss again")


class Teacher(NamedTuple):
    """The teacher's local tensors."""

    hidden: Tensor  # [N, D']
    weight: Tensor  # [C', D']
    bias: Tensor | None  # [C']


class KnownTokens(NamedTuple):
    """A teacher that is known at k tokens, in the order of the rows."""

    log_probs: Tensor  # [M, k] fp32
    columns: Tensor  # [M, k] int64, of topk.known_columns


class Distillation(NamedTuple):
    """One checked call."""

    linear: LinearCall
    teacher: Teacher | KnownTokens
    pair: PairCall  # of a chunk's logits


@public(lambda keywords: True)
@checks.naming(hidden="student_hidden", weight="student_weight", bias="student_bias")
@with_keywords(KEYWORDS)
def linear_distillation_loss(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    group: Any = None,
    teacher_ids: Tensor | None = None,
    teacher_log_probs: Tensor | None = None,
    rest: str = "ignore",
    divergence: str = "forward",
    beta: float = 0.5,
    labels: Tensor | None = None,
    hard_weight: float = 0.0,
    num_items: float | Tensor | None = None,
    **keywords: Any,
) -> Tensor:
    """:func:`distillation_loss` of ``hidden @ weight.T + bias`` of both models, which are made in chunks of tokens.

    Overwrites nothing. Forward computes the gradients of the student's tensors, and backward scales them, once. For
    ``"none"`` and fp16, backward makes the logits again and computes them, and may run again. The teacher's tensors get
    none. ``torch.compile`` breaks the graph here.

    Collectives: per chunk one all_gather of the statistics of :func:`distillation_loss` ("js": two) in forward, and one
    all_reduce of the gradient of ``student_hidden`` where that is computed.

    Args:
        student_hidden: ``[..., D]`` bf16, fp16 or fp32, at least two dimensions, the same on every rank.
        student_weight: ``[C, D]``, this rank's rows of the head, of the dtype of ``student_hidden``, or a DTensor.
        teacher_hidden: ``[..., D']``, of the same leading dimensions. Must not require a gradient.
        teacher_weight: ``[C', D']``, of the dtype of ``teacher_hidden``, from the same column on.
        student_bias, teacher_bias: ``[C]`` and ``[C']``, or None.
        teacher_ids, teacher_log_probs, rest: as in :func:`distillation_loss`, instead of the teacher's head.
        chunk_tokens, memory_budget, reduce_hidden_grad: as in :func:`linear_cross_entropy`, of the student's logits.
        others: as in :func:`distillation_loss`.

    Returns:
        fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``.

    Raises:
        TypeError, ValueError: as :func:`linear_cross_entropy`.
        RuntimeError: from backward, if it runs again over scaled gradients, or with ``create_graph``.
    """
    temperature = keywords.pop("temperature", 1.0)
    settings, head = split_keywords(keywords, KEYWORDS, linear_distillation_loss)
    settings = divided_by(num_items, settings)
    options = checked_options(divergence, beta, hard_weight, labels, settings._replace(temperature=temperature))
    if labels is None:  # nothing is ignored
        settings, options = settings._replace(ignore_index=-100), options._replace(ignore_index=-100)
    checks.check_hidden(student_hidden)
    heads, tokens = (teacher_hidden, teacher_weight, teacher_bias), (teacher_ids, teacher_log_probs)
    known = _checked_tokens(heads, tokens, rest, options, student_hidden)
    teacher = _checked_teacher(*heads, student_hidden) if known is None else None
    of_rows = student_hidden.new_zeros(student_hidden.shape[:-1], dtype=torch.int64) if labels is None else labels
    given = Arguments(student_hidden, student_weight, of_rows, student_bias, group, num_items, None)
    also: dict[str, Any] = {}
    if verify.open_calls:
        also = _comparable(teacher, tokens) | options._asdict() | {"labels": labels is not None, "rest": rest}
    needs_gradient = any(t is not None and t.requires_grad for t in (student_hidden, student_weight, student_bias))
    beside = [tensor for tensor in (*heads, *tokens) if tensor is not None and torch.is_grad_enabled()]

    def check(plan: Plan) -> None:
        if teacher is not None:
            of_rows = group_position(group)
            check_columns(teacher.weight.shape[0], plan.shard, settings, *of_rows, subject="teacher_weight: rows")
        if needs_gradient and plan.gradient != "in_forward" and any(tensor.is_inference() for tensor in beside):
            raise ValueError("teacher: expected no tensor made in torch.inference_mode(), got one; pass its clone()")

    linear, inputs = plan_linear_call(given, settings, head, check, **also)
    plan, of_call = linear.call.plan, (group, linear.call.num_items)
    if teacher is not None:
        is_js, n_statistics = options.divergence == "js", len(divergence_spec.statistics(options))
        pair = PairCall(plan, launchers_of(plan, *LAUNCHERS), options, n_statistics, is_js, *of_call)
        call = Distillation(linear, teacher, pair)
    else:
        pair = PairCall(plan, topk.TopK(plan.launchers), known, topk.N_STATISTICS, False, *of_call)
        call = Distillation(linear, _known_tokens(*tokens, labels, settings, linear), pair)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs):
        loss: Tensor = _LinearDistillation.apply(*inputs, call)
    else:
        with torch.no_grad(), torch.autocast(student_hidden.device.type, enabled=False):
            loss = _forward(call, inputs)[0]
    return loss.view(of_rows.shape) if settings.reduction == "none" else loss


def _checked_tokens(
    heads: tuple[Any, ...], tokens: tuple[Any, ...], rest: str, options: DivergenceOptions, student: Tensor
) -> topk.TopKOptions | None:
    """Check a teacher that is known at k tokens; None if there is none."""
    if all(tensor is None for tensor in tokens):
        checks.check_choice("rest (without teacher_ids)", rest, ("ignore",))
        return None
    for name, tensor in zip(("teacher_hidden", "teacher_weight", "teacher_bias"), heads, strict=True):
        if tensor is not None:
            raise ValueError(f"{name}: expected None with teacher_ids and teacher_log_probs, got a tensor")
    known = checked_topk(tokens[0], tokens[1], rest, options, student, "student_hidden")
    if torch.is_grad_enabled() and tokens[1].requires_grad:
        raise TypeError("teacher_log_probs: expected a tensor that requires no gradient, got one; pass its detach()")
    check_beside("teacher_log_probs", tokens[1])
    return known


def _comparable(teacher: Teacher | None, tokens: tuple[Any, ...]) -> dict[str, Any]:
    """Return what verification compares of a teacher."""
    if teacher is None:
        of_ids, of_log_probs = map(verify.shown, tokens)
        return {"call": "a head and teacher_ids", "teacher_ids": of_ids, "teacher_log_probs": of_log_probs}
    return {"call": "two heads", "teacher_hidden": teacher.hidden}


def _known_tokens(
    ids: Any, log_probs: Any, labels: Tensor | None, settings: Settings, linear: LinearCall
) -> KnownTokens:
    """Return checked tokens in the order of the rows."""
    shard = linear.call.plan.shard
    teacher = KnownTokens(*checked_columns(ids, log_probs, labels, settings, shard, torch.float32))
    if linear.order is None:
        return teacher
    return KnownTokens(
        linear.order.to_rows(teacher.log_probs, 0.0), linear.order.to_rows(teacher.columns, topk.IGNORED)
    )


def _checked_teacher(hidden: Any, weight: Any, bias: Any, student: Tensor) -> Teacher:
    """Check the teacher's tensors."""
    for name, tensor in {"teacher_hidden": hidden, "teacher_weight": weight, "teacher_bias": bias}.items():
        if name == "teacher_bias" and tensor is None:
            continue
        checks.check_tensor(name, tensor)
        checks.check_parameter(name, tensor)
        check_beside(name, tensor)
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


def _forward(call: Distillation, inputs: Inputs, wanted: Wanted = NOTHING) -> tuple[Tensor, list[Any], Gradients]:
    """Return the loss of all tokens, each chunk's statistics, and the gradients of the sum that are wanted."""
    linear, products = call.linear, Products(call.linear, inputs, wanted)
    losses, kept = [], []
    for chunk in _chunks(call, products):
        ones = inputs.hidden.new_ones((), dtype=torch.float32) if any(wanted) else None
        loss, *statistics = _one_chunk(call, products, inputs, *chunk, None, ones)
        losses.append(loss)
        kept += statistics
    gradients = products.gradients()
    if linear.call.plan.reduction == "none":
        of_rows = torch.cat(losses) if losses else inputs.hidden.new_empty(0, dtype=torch.float32)
        return of_rows if linear.order is None else linear.order.to_tokens(of_rows, 0.0), kept, gradients
    sums = torch.stack(losses).sum() if losses else inputs.hidden.new_zeros((), dtype=torch.float32)
    return sums, kept, gradients


def _backward(call: Distillation, inputs: Inputs, kept: list[Any], grad_output: Tensor, wanted: Wanted) -> Gradients:
    """Return the gradients, from logits that are made again and each chunk's statistics."""
    products = Products(call.linear, inputs, wanted)
    of_rows = pipeline.to_rows(call.linear, grad_output, inputs.labels.shape[0])
    for index, chunk in enumerate(_chunks(call, products)):
        _one_chunk(call, products, inputs, *chunk, kept[2 * index : 2 * index + 2], of_rows[chunk[0]])
    return products.gradients()


def _chunks(call: Distillation, products: Products) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Yield rows, and the student's and the teacher's hidden states."""
    if isinstance(call.teacher, KnownTokens):
        for rows, states in products.hidden.chunks():
            yield rows, states, None
        return
    of_teacher = call.linear._replace(dtype=call.teacher.hidden.dtype)
    others = HiddenStates(of_teacher, call.teacher.hidden, False)
    for (rows, states), (_, teacher_states) in zip(products.hidden.chunks(), others.chunks(), strict=True):
        yield rows, states, teacher_states


def _one_chunk(
    call: Distillation,
    products: Products,
    inputs: Inputs,
    rows: slice,
    states: Tensor,
    teacher_states: Tensor | None,
    statistics: list[Any] | None,
    grad_output: Tensor | None,
) -> list[Any]:
    """Return loss and statistics of a chunk, or None and those given. With ``grad_output``, add its gradients."""
    pair, logits, loss = call.pair, products.logits(states), None
    if isinstance(call.teacher, KnownTokens):
        other, labels = call.teacher.log_probs[rows], call.teacher.columns[rows]
    else:
        assert teacher_states is not None
        other = torch.nn.functional.linear(teacher_states, call.teacher.weight, call.teacher.bias)
        labels = inputs.labels[rows]
    if statistics is None:
        loss, *statistics = forward_of_pair(pair, logits, other, labels)
    if grad_output is not None:
        own = {"shard": pair.plan.shard, "options": pair.options}
        factors = pair.divisor, per_row(grad_output, logits)
        pair.launchers.gradient(logits, other, labels, *statistics, *factors, logits, **own)
        d_hidden = products.hidden.new_gradient(rows)
        products.write_d_hidden(logits, d_hidden)
        products.finish_chunk(rows, states, d_hidden)
    return [loss, *statistics]


class _LinearDistillation(torch.autograd.Function):
    """Saved: in_forward the gradients of the student's tensors; otherwise all tensors, and each chunk's statistics."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, call: Distillation
    ) -> Tensor:
        ctx.linear, ctx.handed_on, ctx.device, ctx.pair = call.linear, False, hidden.device, call.pair
        ctx.of_teacher = type(call.teacher)
        ctx.set_materialize_grads(False)
        inputs = Inputs(hidden, weight, bias, labels)
        with torch.autocast(hidden.device.type, enabled=False):
            if call.linear.call.plan.gradient == "in_forward":
                loss, _, gradients = _forward(call, inputs, ctx.needs_input_grad[:3])
                ctx.save_for_backward(*gradients)
            else:
                loss, kept, _ = _forward(call, inputs)
                ctx.save_for_backward(*inputs, *call.teacher, call.pair.divisor, *kept)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> Any:
        gradients = run_backward(_gradients, ctx, (grad_loss,), REFUSALS, ctx.linear.call.group, ctx.device)
        return *(gradients or (None, None, None)), None, None


def _gradients(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Gradients:
    if ctx.linear.call.plan.gradient == "in_forward":
        ctx.handed_on = True
        return pipeline.scaled(ctx.linear, saved, grads.loss)
    n = 4 + len(ctx.of_teacher._fields)
    inputs, teacher, divisor, kept = Inputs(*saved[:4]), ctx.of_teacher(*saved[4:n]), saved[n], list(saved[n + 1 :])
    call = Distillation(ctx.linear, teacher, ctx.pair._replace(divisor=divisor))
    with torch.autocast(ctx.device.type, enabled=False):
        return _backward(call, inputs, kept, grads.loss, ctx.needs_input_grad[:3])
