"""The path of a call over hidden states: its autograd Function. ``loops`` has the loop over chunks.

A reduced loss computes its gradients in the forward pass, with three products in all; those of fp16 have a scale until
backward. Others keep 4 K R bytes per token on each rank, and recompute the logits in backward, except kept ones, with
grad_output in the one rounding.

A reduced loss with outputs that have a gradient does the first, and keeps what the second needs. If backward gets a
gradient of an output, or runs again, it recomputes, and does not use the gradients of forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vocab_parallel_ce.head import loops
from vocab_parallel_ce.head.loops import Gradients
from vocab_parallel_ce.head.plan import LinearCall
from vocab_parallel_ce.head.products import without_autocast
from vocab_parallel_ce.plan import Call
from vocab_parallel_ce.run import check_loss_alone, mark_constants, run_backward
from vocab_parallel_ce.spec import GradOutputs
from vocab_parallel_ce.targets import Head

HANDED_ON = (
    "linear cross-entropy: backward ran a second time, but the first has handed its gradients on; ask for "
    "gradient='in_backward' to run backward again"
)
OF_OBJECTIVES = (
    "linear_objective: backward ran a second time, but the first has handed its gradients on; call it again, or add "
    "what is computed of its loss before one backward"
)


class OverHead(torch.autograd.Function):
    """Saved: in_forward the gradients; to recompute head, divisor, kept logits, statistics, targets."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Any, linear: LinearCall) -> Any:
        ctx.linear, ctx.handed_on, ctx.device = linear, False, hidden.device
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.kind, ctx.has_overwritten, ctx.refusal = type(targets), False, HANDED_ON
        ctx.set_materialize_grads(False)
        local, plan = Head(hidden, weight, bias), linear.call.plan
        wanted = ctx.needs_input_grad[:3] if plan.gradient == "in_forward" else loops.NOTHING
        with without_autocast(hidden.device):
            outputs, gradients, stats, kept = loops.forward(linear, local, targets, wanted)
        saved = (*local, linear.call.divisor, kept, *stats, *targets) if linear.head.recomputes else ()
        ctx.save_for_backward(*gradients, *saved)
        if linear.objective is None:
            if plan.constants:
                mark_constants(ctx, outputs, plan)
            return outputs[: plan.n_outputs]
        # Backward needs neither the function nor its numbers.
        ctx.linear, ctx.refusal = linear._replace(objective=None), OF_OBJECTIVES
        ctx.mark_non_differentiable(*[output for output in outputs if output is not None])
        return loops.total_of(linear), *outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        gradients = run_backward(_gradients, ctx, grads, ctx.refusal)
        return *(gradients or (None, None, None)), None, None


over_head: Callable[..., Any] = super(torch.autograd.Function, OverHead).apply  # as run.over_logits


def _gradients(ctx: Any, saved: tuple[Any, ...], grads: GradOutputs) -> Gradients:
    """Return the gradients of hidden, weight and bias."""
    linear: LinearCall = ctx.linear
    plan, computed, saved = linear.call.plan, saved[:3], saved[3:]
    of_loss_alone = plan.gradient == "in_forward" and all([grad is None for grad in grads[1:]])
    if of_loss_alone and not ctx.has_overwritten:
        assert grads.loss is not None
        ctx.has_overwritten, ctx.handed_on = True, not linear.head.recomputes
        if linear.expected is None and linear.scale is None:
            gradients = loops.scaled(linear, computed, grads.loss)
        else:
            gradients = loops.scaled_by_factor(linear, computed, grads.loss, ctx.dtypes)
    else:
        if not linear.head.recomputes:
            check_loss_alone(grads)
        local, divisor, kept, n = Head(*saved[:3]), saved[3], saved[4], 5 + len(plan.launchers.widths)
        call = Call(plan._replace(gradient="in_backward"), linear.call.group, divisor)
        linear = linear._replace(call=call, scale=None)
        if kept is not None:
            # A later backward recomputes the logits. Of ``data``, autograd counts no versions.
            kept, ctx.has_overwritten = None if ctx.has_overwritten else kept.data, True
        targets, stats, wanted = ctx.kind(*saved[n:]), saved[5:n], ctx.needs_input_grad[:3]
        with without_autocast(ctx.device):
            gradients = loops.backward(linear, local, targets, stats, wanted, grads, kept)
    d_hidden, d_weight, d_bias = gradients
    if d_weight is None or linear.main_grad is None:
        return gradients
    if linear.parameter is None:
        return d_hidden, None, d_bias
    # Megatron-LM's hooks wait for a gradient.
    linear.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return d_hidden, torch.zeros_like(d_weight, dtype=linear.parameter.dtype), d_bias
