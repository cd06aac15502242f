"""Random calls over logits, on one rank or several."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.random.beside import (
    Beside,
    gradients_of,
    no_check,
    with_labels,
    with_targets,
    with_teacher,
    with_tokens,
)
from tests.support.random.call import UNITS, Call, assert_near
from tests.support.random.inputs import NEG_INF
from tests.support.random.public import Given, backward_of_pair
from tests.support.random.tables import IN_FORWARD
from tests.support.random.truth import Numbers, Truth, of_labels
from tests.support.ranks.in_turn import in_turn


def with_te(call: Call, labels: Tensor) -> Beside:
    """TransformerEngine's names."""
    draw = call.draw
    call.common(("label_smoothing", "ignore_index"))
    call.of_oracle["reduction"] = call.settings["reduction"] = "mean" if draw["reduce_loss"] else "none"
    if "overwrite_input" in draw.case:
        call.settings["overwrite_input"] = draw["overwrite_input"]

    def compute(x: Tensor, rounding: Tensor) -> Truth:
        return of_labels(x, labels, call.of_oracle, ("loss",), rounding)

    return Beside(compute, lambda rank: {"labels": labels}, no_check)


def beside_logits(call: Call, logits: Tensor, labels: Tensor) -> Beside:
    if call.function == "soft_cross_entropy":
        return with_targets(call, logits)
    if call.function == "distillation_loss":
        return with_tokens(call, labels) if "rest" in call.draw.case else with_teacher(call, logits, labels)
    return with_te(call, labels) if "reduce_loss" in call.draw.case else with_labels(call, labels)


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


class OfLogits(NamedTuple):
    """A call that is ready to be made."""

    logits: Tensor  # of the vocabulary
    beside: Beside
    leaves: list[Leaf]  # of each rank
    given: list[Given]  # to each rank


def ready(call: Call) -> OfLogits:
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
    given = [
        {"logits": leaf.logits, **beside.tensors(rank), **call.settings, **call.of_rank(rank)}
        for rank, leaf in enumerate(leaves)
    ]
    return OfLogits(logits, beside, leaves, given)


def of_logits(call: Call) -> None:
    draw = call.draw
    logits, beside, leaves, given = ready(call)
    kept = [leaf.logits.detach().clone() for leaf in leaves]
    of_ranks = in_turn(call.ranks, lambda rank, group: call.invoke(given[rank], group))
    found = of_ranks[0]
    rounding = torch.zeros(call.leading, dtype=torch.float64, device=draw.device)
    truth, upstream, grad = gradients_of(call, beside, logits, rounding, found)
    for leaf, of_rank in zip(leaves, of_ranks, strict=True):
        backward(call, leaf, of_rank, upstream)
    call.check_outputs(found, truth)
    beside.check(found, logits.double(), rounding)
    for name in found.keys() - {"gradient"}:
        assert all(alike(of_rank[name], found[name]) for of_rank in of_ranks), f"{name}: differs between the ranks"
    preserves = "overwrite_input" in draw.case and not draw["overwrite_input"]
    if draw["gradient"] in ("auto", "out_of_place") or preserves:
        assert all(alike(leaf.logits, own) for leaf, own in zip(leaves, kept, strict=True)), "logits were written"
    check_gradient(call, leaves, truth.of_gradient(upstream), grad, upstream, logits == NEG_INF)


def backward(call: Call, leaf: Leaf, found: Numbers, upstream: Numbers) -> None:
    if call.function == "cross_entropy_forward":
        leaf.grads.append(backward_of_pair(found["gradient"], upstream["loss"], call.draw["is_cg_capturable"]))
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
    stays = ("overwrite_input" in draw.case, draw["gradient"] not in (None, "in_forward"))
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
