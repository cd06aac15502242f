"""The arguments of a head and its loss: checked, and planned as a :class:`LinearCall` and a local :class:`Head`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.collectives import gathered, group_position
from vocab_parallel_ce.head.arguments import (
    WEIGHT,
    Arguments,
    autocast_dtype,
    bytes_of_chunk,
    check_gradient,
    compare,
    mode_of,
    shape_of_tokens,
    with_local_rows,
)
from vocab_parallel_ce.head.chunks import (
    ANY_NUMBER,
    TokenOrder,
    chunk_of,
    chunks_of,
    default_tokens,
    kept_rows,
    order_of_ranks,
    order_of_valid,
)
from vocab_parallel_ce.head.expected import check_expected, warn_of_misfits
from vocab_parallel_ce.head.groups import RowGroups, of_no_group, order_of_groups
from vocab_parallel_ce.head.objective import RowObjective, check_objective, inverse, rows_of
from vocab_parallel_ce.kinds import Kinds
from vocab_parallel_ce.layout import flat
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import CHECKS, DEFAULTS, Known, Settings, known, shard_of_rank
from vocab_parallel_ce.plan import Call, Plan, PlanKey, cached_plan, checked_divisor, has_weights, plan_of_one_kind
from vocab_parallel_ce.run import takes_one_pass
from vocab_parallel_ce.spec import label_weights
from vocab_parallel_ce.summed import check_summed_once
from vocab_parallel_ce.targets import (
    Head,
    Tokens,
    are_prepared,
    check,
    check_can_be_saved,
    check_memory,
    prepare,
    present,
)


class HeadPlan(NamedTuple):
    """What runs, except the tensors and the group."""

    plan: Plan  # of a chunk's logits: its reduction is sum or none
    shape: tuple[int, ...]  # of the tokens, with sequence parallelism of all ranks' tokens
    dtype: torch.dtype  # of the products
    logits_dtype: torch.dtype  # that, or fp32
    chunks: tuple[slice, ...]  # of all tokens
    longest: int  # tokens of a group that goes through in one chunk
    keep_logits: str
    kept_bytes: int  # of a token's kept logits
    mean_over: str  # as that of a plan of logits, if the number or the sum is needed before any launch; otherwise ""
    leaves_out: bool  # whether ignored tokens may be left out
    recomputes: bool  # whether backward may compute the gradients: it needs statistics, hidden states and weight
    needs_gradient: bool  # one of the head's tensors does
    scales: bool  # whether forward multiplies its gradients by what backward divides by
    is_one_program: bool  # whether forward, of one rank's only chunk with gradients, may be one program
    counts_in_launch: bool  # whether that counts a mean's valid tokens
    sequence_parallel: bool
    reduces: bool  # d_hidden, over several ranks


class LinearCall(NamedTuple):
    """One checked call: the loss of a chunk's logits, and how hidden states and weight take part."""

    head: HeadPlan
    call: Call
    chunks: tuple[slice, ...]  # rows
    order: TokenOrder | None  # None: rows are tokens
    is_valid: Tensor | None  # [N] bool: tokens that are not ignored; None: all
    overflow: Tensor | None  # [] fp32: 1, or NaN if more than valid_tokens are valid
    main_grad: Tensor | None
    parameter: Tensor | None  # the caller's weight, if it wants to know that main_grad has its gradient
    expected: Tensor | None  # [N] fp32 grad_output of reduction "none", whose gradients forward computes; 0 if ignored
    objective: RowObjective | None  # of log-probabilities
    scale: Tensor | None  # [1] fp32: what multiplies the gradients of forward until backward; None: 1
    n_kept: int  # number of rows whose logits are kept for backward

    @property
    def n_rows(self) -> int:
        """The number of rows of all chunks."""
        return self.chunks[-1].stop if self.chunks else 0

    @property
    def n_long(self) -> int:
        """The number of rows, the first ones, whose outputs an objective needs before it knows any derivative."""
        groups = None if self.objective is None else self.objective.groups
        return 0 if groups is None else groups.n_long


# Of checked calls: a HeadPlan each.
_kinds = Kinds()


def plan_linear_call(loss: Loss, arguments: Arguments, settings: Settings) -> tuple[LinearCall, Head, Any]:
    """Check the arguments and plan the call. Also return the tensors of this rank's head, and targets of its rows.

    What was checked is not checked again in a call that differs in values and memory alone. Changes nothing.
    """
    position = (0, 1) if arguments.group is None else group_position(arguments.group)
    parameter = arguments.head.weight
    checks.check_no_transforms(*arguments.head, *arguments.targets, *arguments[3:6])
    arguments, settings = with_local_rows(arguments, settings, position)
    planned = cached_head_plan(loss, arguments, settings, position)
    (hidden, *_), targets, group, num_items, main_grad, expected_grad_output, objective = arguments
    plan, local = planned.plan, Head._make([t if t is None else t.resolve_neg() for t in arguments.head])
    if planned.reduces and planned.needs_gradient and hidden.grad_fn is not None:
        check_summed_once(hidden, group)
    tokens = Tokens(hidden, "hidden", planned.shape)
    if not plan.is_prepared:
        check_memory(targets, tokens, settings)
        targets = prepare(targets, tokens, settings, plan)
    together = None if objective is None else check_objective(objective, tokens, settings)
    divisor = None if num_items is None else checked_divisor(num_items, settings.reduction, hidden)
    ignored = loss.ignored(targets, plan.options)
    ignored = ignored if together is None else of_no_group(together, ignored, hidden.device)
    is_valid = hidden.new_ones(math.prod(planned.shape), dtype=torch.bool) if ignored is None else ~ignored
    count = is_valid.sum(0, keepdim=True) if planned.leaves_out or planned.mean_over == "rows" else None
    chunks, overflow, order, groups = planned.chunks, None, None, None
    if together is not None:
        found = order_of_groups(together, is_valid, chunks, planned.longest, settings.check_labels)
        chunks, order, groups, overflow = found
    elif planned.sequence_parallel:
        order = order_of_ranks(chunks, is_valid.shape[0], plan.n_ranks, hidden.device)
    elif planned.leaves_out:
        assert count is not None
        order, overflow = order_of_valid(is_valid, count, settings.head.valid_tokens, settings.check_labels)
        chunks = chunks if order is None else chunks_of(order.token_of_row.shape[0], chunks[0].stop)
    if order is not None:
        targets = loss.in_order(targets, order, settings)
    if planned.recomputes and planned.needs_gradient:
        for name, target, _ in present(targets):
            check_can_be_saved(name, target)
    expected = None
    if expected_grad_output is not None:
        warn_of_misfits()
        expected = torch.where(is_valid, flat(expected_grad_output.detach()).float(), 0.0)
    row_objective = None if objective is None else rows_of(objective, is_valid, order, groups, hidden, plan.dtype)
    if verify.pending.get() is not None:
        compare(arguments._replace(head=local), expected, is_valid, plan.shard, planned.dtype, settings)
    if planned.mean_over:  # last: it may be a collective
        divisor = count if planned.mean_over == "rows" else _divisor_of_weights(plan, targets, group)
    linear = LinearCall(
        head=planned,
        call=Call(plan, group, divisor),
        chunks=chunks,
        order=order,
        is_valid=None if ignored is None else is_valid,
        overflow=overflow,
        main_grad=main_grad,
        parameter=parameter if main_grad is not None and hasattr(parameter, "grad_added_to_main_grad") else None,
        expected=expected,
        objective=row_objective,
        scale=scale_of(planned, is_valid, divisor, expected, row_objective) if planned.scales else None,
        n_kept=0 if planned.keep_logits == "none" else rows_to_keep(planned, chunks, groups),
    )
    return linear, local, targets


def cached_head_plan(loss: Loss, arguments: Arguments, settings: Settings, position: tuple[int, int]) -> HeadPlan:
    """Return the plan of a call, which is checked and made once."""
    try:
        tensors, targets, group, _, main_grad, expected, objective = arguments
        takes_groups = None if objective is None else objective.together is not None
        state = torch.is_grad_enabled(), autocast_dtype(tensors.hidden), group is None, takes_groups
        of_settings = settings if type(settings) is Known else known(settings)
        facts = loss, of_settings, position, state
        kind = _kinds.find(facts, (*tensors, *targets, main_grad, expected))
    except (AttributeError, RuntimeError, TypeError):  # no tensor, no strides, or no hash: the checks name it
        kind = None
    planned = None if kind is None else kind.made
    if planned is None:
        planned = checked_head_plan(loss, arguments, settings, position)
        if kind is not None:
            kind.made = planned = planned._replace(plan=plan_of_one_kind(planned.plan))
    return planned


def checked_head_plan(loss: Loss, arguments: Arguments, settings: Settings, position: tuple[int, int]) -> HeadPlan:
    """Check the arguments, except their memory and ``num_items``, and choose what runs."""
    (hidden, weight, bias), targets, group, _, main_grad, expected_grad_output, _ = arguments
    checks.check_hidden(hidden)
    checks.check_has_values(hidden)
    tokens = Tokens(hidden, "hidden", shape_of_tokens(hidden, position[1], settings.head))
    check(targets, tokens)
    loss.check(targets, tokens, settings)
    CHECKS["reduction"]("reduction", settings.reduction)  # the plan of a chunk has another
    autocast = autocast_dtype(hidden)
    dtype = autocast or hidden.dtype
    checks.check_head(weight, bias, hidden, None if autocast else dtype)
    if main_grad is not None:
        checks.check_main_grad(main_grad, weight)
    check_gradient(settings, knows_grad_output=arguments.knows_grad_output)
    if expected_grad_output is not None:
        check_expected(expected_grad_output, tokens, settings)
    planned = make_head_plan(loss, arguments, settings, dtype, tokens.shape, position)
    if settings.head.sequence_parallel and group is None:
        raise ValueError(
            "sequence_parallel: expected the group whose ranks hold the parts, got group=None; pass group="
        )
    return planned


def make_head_plan(
    loss: Loss,
    arguments: Arguments,
    settings: Settings,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    position: tuple[int, int],
) -> HeadPlan:
    """Choose what runs for checked arguments, products of ``dtype`` and tokens of ``shape``."""
    (hidden, weight, _), (rank, n_ranks), options = arguments.head, position, settings.head
    class_weight, logits_dtype = has_weights(arguments.targets), options.logits_dtype or dtype
    gradient, scales = mode_of(arguments, settings, dtype)
    # If "auto" computes the gradient of the loss in the forward pass, an output may still get one: only backward knows.
    recomputes = gradient == "in_backward" or (settings.gradient == "auto" and settings.asks_for_differentiable)
    shard = shard_of_rank(settings, weight.shape[0], rank, n_ranks, subject=WEIGHT)
    extras = {
        "expected_grad_output": arguments.knows_grad_output,
        "logits_dtype": logits_dtype != dtype,
        "fp16": scales,
        "outputs with a gradient (gradient='in_forward' gives them none)": recomputes,
    }
    named = tuple(name for name, is_there in extras.items() if is_there)
    key = PlanKey(logits_dtype, weight.shape[0], hidden.device, rank, n_ranks, gradient, class_weight, named)
    reduction = "none" if settings.reduction == "none" else "sum"  # a mean is a sum that is divided
    # Cached apart from the number of tokens, which may be another at each step.
    of_chunk = settings._replace(vocab_size=shard, reduction=reduction, gradient=gradient, head=DEFAULTS)
    plan = cached_plan(loss, of_chunk, key)
    keep_logits = options.keep_logits if gradient == "in_backward" or arguments.has_groups else "none"
    width = -(-shard.vocab_size // n_ranks)  # of every rank, so that the chunks are the same
    kept_bytes, element_size = width * logits_dtype.itemsize, sum(d.itemsize for d in {dtype, logits_dtype})
    n_tokens, sequence_parallel = math.prod(shape), options.sequence_parallel and n_ranks > 1
    by_default = default_tokens(hidden.shape[-1], width, *bytes_of_chunk(arguments, element_size, scales))
    sizes = hidden.shape[-1], width, element_size, kept_bytes
    chunk, longest = (chunk_of(options.chunk_size, keep_logits, n, *sizes, by_default) for n in (n_tokens, ANY_NUMBER))
    chunks = chunks_of(n_tokens, max(n_ranks, chunk // n_ranks * n_ranks) if sequence_parallel else chunk)
    needs_gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments.head)
    # To record a call keeps all that it makes, and a teacher's logits are large.
    has_more = loss.HeadTargets is not loss.Targets or recomputes or scales or arguments.knows_grad_output
    is_one_program = needs_gradient and gradient == "in_forward" and n_ranks == len(chunks) == 1 and not has_more
    mean_over = ("weights" if class_weight else "rows") if settings.reduction == "mean" else ""
    can_count = n_tokens <= plan.launchers.counted_rows and not takes_one_pass(plan, n_tokens)
    counts_in_launch = is_one_program and mean_over == "rows" and options.valid_tokens is None and can_count
    return HeadPlan(
        plan=plan._replace(is_prepared=are_prepared(arguments.targets, settings)),
        shape=shape,
        dtype=dtype,
        logits_dtype=logits_dtype,
        chunks=chunks,
        longest=max(chunk, longest),
        keep_logits=keep_logits,
        kept_bytes=kept_bytes,
        mean_over="" if counts_in_launch else mean_over,
        leaves_out=options.valid_tokens is not None or (hidden.device.type == "cpu" and not sequence_parallel),
        recomputes=recomputes,
        needs_gradient=needs_gradient,
        scales=scales,
        is_one_program=is_one_program,
        counts_in_launch=counts_in_launch,
        sequence_parallel=sequence_parallel,
        reduces=options.reduce_hidden_grad and n_ranks > 1,
    )


def rows_to_keep(planned: HeadPlan, chunks: tuple[slice, ...], groups: RowGroups | None) -> int:
    """Return the number of rows whose logits are kept, the first ones; of groups those of long ones alone."""
    if groups is None:
        return kept_rows(planned.keep_logits, chunks, planned.kept_bytes)
    return min(kept_rows(planned.keep_logits, planned.chunks, planned.kept_bytes), groups.n_long)


def scale_of(
    planned: HeadPlan, is_valid: Tensor, divisor: Tensor | None, expected: Tensor | None, objective: RowObjective | None
) -> Tensor:
    """Return ``[1]`` fp32, what multiplies fp16 gradients until backward: for a mean 16 times a power of two near N.

    Those of 1 / N would underflow before a loss scale multiplies them. These are 16 to 32 times the derivative of a
    token's own loss, times its class weight over the mean one.
    """
    if objective is not None:
        factor = objective.factor
    elif expected is not None:
        factor = F.pad(expected.abs(), (0, 1)).amax(0, keepdim=True)
    else:
        tokens = is_valid.sum(0, keepdim=True) if planned.mean_over == "weights" else divisor
        factor = is_valid.new_ones(1) if tokens is None else inverse(tokens)
    exponent = torch.frexp(factor.float()).exponent.clamp(-120, 126)
    return torch.exp2((5 - exponent).float())


def _divisor_of_weights(plan: Plan, targets: Any, group: Any) -> Tensor:
    """Return ``[1]``, the sum of the class weights of all labels.

    Collectives: on several ranks one all_gather of 4 bytes.
    """
    shard, options = plan.shard, plan.options
    weights = label_weights(targets.class_weight, targets.labels, shard.start, shard.vocab_size, options)
    return gathered(weights.sum().reshape(1), plan.rank, plan.n_ranks, group).sum().reshape(1)
