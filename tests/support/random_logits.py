"""Random calls over logits, on one rank or several."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import vocab_parallel_ce as vp
from tests.support.random_beside import (
    Beside,
    gradients_of,
    no_check,
    with_labels,
    with_targets,
    with_teacher,
    with_tokens,
)
from tests.support.random_call import UNITS, Call, Settings, assert_near
from tests.support.random_inputs import NEG_INF
from tests.support.random_tables import IN_FORWARD
from tests.support.random_truth import Numbers, of_labels
from tests.support.ranks_in_turn import in_turn

LOG_PROBS = ("log_probs", "entropy", "lse", "sum_sq_probs", "mean_logit")


def with_te(call: Call, labels: Tensor) -> Beside:
    """TransformerEngine's names."""
    draw = call.draw
    call.common(("label_smoothing", "ignore_index"))
    call.of_oracle["reduction"] = "mean" if draw["reduce_loss"] else "none"
    smoothing, ignore_index = draw["label_smoothing"], draw["ignore_index"]

    def invoke(inputs: Tensor, own: Settings, rank: int) -> Numbers:
        given = (inputs, labels, smoothing, draw["reduce_loss"], own["group"], ignore_index)
        if call.function == "parallel_cross_entropy":
            return {"loss": vp.parallel_cross_entropy(*given, overwrite_input=draw["overwrite_input"])}
        loss, grad = vp.cross_entropy_forward(*given)
        return {"loss": loss, "gradient": grad}

    return Beside(lambda x, rounding: of_labels(x, labels, call.of_oracle, ("loss",), rounding), invoke, no_check)


def module_of(call: Call) -> Callable[..., Any]:
    def function(*tensors: Tensor, num_items: Any = None, impl: str, **keywords: Any) -> Any:
        return vp.VocabParallelCrossEntropy(impl=impl, **keywords)(*tensors, num_items)

    return function if call.draw["is_module"] else vp.vocab_parallel_cross_entropy


def beside_logits(call: Call, logits: Tensor, labels: Tensor) -> Beside:
    if call.function == "soft_cross_entropy":
        return with_targets(call, logits)
    if call.function == "distillation_loss":
        tokens = "rest" in call.draw.case
        return with_tokens(call, labels, vp.distillation_loss) if tokens else with_teacher(call, logits, labels)
    if "reduce_loss" in call.draw.case:
        return with_te(call, labels)
    return with_labels(call, labels, vp.token_log_probs if "outputs" in call.draw.case else module_of(call))


class Leaf(NamedTuple):
    """A rank's logits, what they are made of, and where their gradient will be."""

    logits: Tensor
    leaf: Tensor
    grads: list[Tensor]


def leaf_of(call: Call, values: Tensor) -> Leaf:
    draw, layout = call.draw, call.draw["layout"]
    place = draw.place(values.shape, layout)
    flat = place.filled(values)
    if call.function == "cross_entropy_forward":
        logits = place.view(flat)
        return Leaf(logits, logits, [])
    overwrites = draw["gradient"] == "in_forward" or ("overwrite_input" in draw.case and layout in IN_FORWARD)
    if layout == "leaf" or overwrites:
        leaf = place.view(flat).requires_grad_()
        logits = leaf if layout == "leaf" else leaf * 1
    else:
        leaf = flat.requires_grad_()
        logits = place.view(leaf * 1)
    grads: list[Tensor] = []
    if logits is not leaf:
        logits.register_hook(lambda grad: grads.append(grad.clone()))
    return Leaf(logits, leaf, grads)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same bits, except of NaN."""
    return torch.equal(a.detach().nan_to_num(7.0), b.detach().nan_to_num(7.0))


def of_logits(call: Call) -> None:
    draw = call.draw
    outside = draw["class_weight"] is None or draw["reduction"] != "mean"
    labels = draw.labels(call.leading, call.vocab_size, may_be_outside=outside)
    logits = draw.logits(call.leading, call.vocab_size, labels, call.dtype, call.mask())
    if draw["rest"] == "bucket":  # which counts as at least 2^-110 of the largest token
        logits = torch.where(logits == NEG_INF, logits, logits.clamp(-20, 20))
    beside = beside_logits(call, logits, labels)
    if not (call.of_oracle.get("num_items") == 0 or "rest" in draw.case):
        logits = draw.with_bad_row(logits)
    leaves = [leaf_of(call, call.shard_of(logits, rank)) for rank in range(call.ranks)]
    kept = [leaf.logits.detach().clone() for leaf in leaves]
    own = [call.of_rank(rank, None) for rank in range(call.ranks)]

    def forward(rank: int, group: Any) -> Numbers:
        return beside.invoke(leaves[rank].logits, own[rank] | {"group": group}, rank)

    of_ranks = in_turn(call.ranks, forward)
    found = of_ranks[0]
    rounding = torch.zeros(call.leading, dtype=torch.float64, device=draw.device)
    truth, upstream, grad = gradients_of(call, beside, logits, rounding, found)
    for leaf, of_rank in zip(leaves, of_ranks, strict=True):
        backward(call, leaf, of_rank, upstream)
    call.check_outputs(found, truth)
    beside.check(found, logits.double(), rounding)
    for name in found.keys() - {"gradient"}:
        assert all(alike(of_rank[name], found[name]) for of_rank in of_ranks), f"{name}: differs between the ranks"
    if draw["gradient"] in ("auto", "out_of_place") or draw["overwrite_input"] is False:
        assert all(alike(leaf.logits, own) for leaf, own in zip(leaves, kept, strict=True)), "logits were written"
    check_gradient(call, leaves, truth.of_gradient(upstream), grad, upstream, logits == NEG_INF)


def backward(call: Call, leaf: Leaf, found: Numbers, upstream: Numbers) -> None:
    if call.function == "cross_entropy_forward":
        way = {"is_cg_capturable": call.draw["is_cg_capturable"]}
        leaf.grads.append(vp.cross_entropy_backward(found["gradient"], upstream["loss"], **way))
        return
    torch.autograd.backward([found[name] for name in upstream], list(upstream.values()))
    if leaf.leaf is leaf.logits:
        assert leaf.leaf.grad is not None
        leaf.grads.append(leaf.leaf.grad)


def check_gradient(
    call: Call, leaves: list[Leaf], bound: Tensor, truth: Tensor, upstream: Numbers, excluded: Tensor
) -> None:
    """Of a row that is NaN, a column that is ``excluded`` may be 0."""
    draw = call.draw
    stays = (draw["overwrite_input"] is not None, draw["gradient"] not in (None, "in_forward"))
    in_forward = not any(stays)
    factor = max((float(value.abs().max()) for value in upstream.values() if value.numel()), default=0.0)
    if in_forward and call.dtype == torch.float16:  # forward's gradient may be less than fp16 can hold
        bound = bound + factor * 2.0**-24 / (UNITS * 2.0**-23)
    for rank, (start, stop) in enumerate(call.bounds):
        (grad,) = leaves[rank].grads
        assert grad.dtype == call.dtype, f"gradient: dtype {grad.dtype}"
        valid = max(min(stop, call.vocab_size) - start, 0)
        assert not bool(grad[..., valid:].any()), "gradient of padded columns"
        columns = slice(start, start + valid)
        expected = truth[..., columns]
        is_0 = excluded[..., columns] & expected.isnan() & (grad[..., :valid] == 0)
        expected, name = expected.masked_fill(is_0, 0.0), f"gradient of rank {rank}"
        assert_near(name, grad[..., :valid], expected, bound[..., columns].nan_to_num(0.0), 1 + in_forward, factor)
