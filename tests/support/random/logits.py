"""Random calls over logits, on one rank or several."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.random.beside import Beside, with_labels, with_teacher
from tests.support.random.call import UNITS, Call, alike, assert_near, size_of
from tests.support.random.inputs import NEG_INF
from tests.support.random.public import Given, backward_of_pair
from tests.support.random.tables import IN_FORWARD
from tests.support.random.truth import Numbers


def beside_logits(call: Call, logits: Tensor, labels: Tensor) -> Beside:
    if call.function == "distillation_loss":
        return with_teacher(call, logits, labels)
    return with_labels(call, labels, logits, call.no_rounding())


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


class LogitsCase(NamedTuple):
    """A call that is ready to be made."""

    call: Call
    logits: Tensor  # of the vocabulary
    rounding: Tensor  # of the logits
    labels: Tensor
    beside: Beside
    leaves: list[Leaf]  # of each rank
    given: list[Given]  # to each rank
    kept: list[Tensor]  # copies of the ranks' logits
    upstream: Numbers | None = None  # where the call must know it

    def autocast(self) -> Any:
        return nullcontext()

    def backward(self, rank: int, returned: Numbers, upstream: Numbers) -> None:
        call, leaf = self.call, self.leaves[rank]
        if call.function == "cross_entropy_forward":
            grad = backward_of_pair(returned["gradient"], upstream["loss"], call.draw["is_cg_capturable"])
            leaf.grads.append(grad)
            return
        torch.autograd.backward([returned[name] for name in upstream], list(upstream.values()))
        if leaf.leaf is leaf.logits:
            assert leaf.leaf.grad is not None
            leaf.grads.append(leaf.leaf.grad)

    def gradients(self, rank: int) -> Numbers:
        (grad,) = self.leaves[rank].grads
        return {"logits": grad}

    def check_gradients(self, truth: Tensor, bound: Tensor, upstream: Numbers) -> None:
        call, draw = self.call, self.call.draw
        preserves = "overwrite_input" in draw.case and not draw["overwrite_input"]
        if draw["gradient"] in ("auto", "out_of_place") or preserves:
            is_kept = [alike(leaf.logits, kept) for leaf, kept in zip(self.leaves, self.kept, strict=True)]
            assert all(is_kept), "logits were written"
        in_forward = "overwrite_input" not in draw.case and draw["gradient"] in (None, "in_forward")
        factor = size_of(upstream)
        if in_forward and call.dtype == torch.float16:  # forward's gradient may be less than fp16 can hold
            bound = bound + factor * 2.0**-24 / (UNITS * 2.0**-23)
        for rank, (start, stop) in enumerate(call.bounds):
            grad = self.gradients(rank)["logits"]
            assert grad.dtype == call.dtype, f"gradient: dtype {grad.dtype}"
            valid = max(min(stop, call.vocab_size) - start, 0)
            assert not bool(grad[..., valid:].any()), "gradient of padded columns"
            columns = slice(start, start + valid)
            expected = truth[..., columns]
            # Of a row that is NaN, an excluded column may be 0.
            is_0 = (self.logits[..., columns] == NEG_INF) & expected.isnan() & (grad[..., :valid] == 0)
            expected, name = expected.masked_fill(is_0, 0.0), f"gradient of rank {rank}"
            assert_near(name, grad[..., :valid], expected, bound[..., columns].nan_to_num(0.0), 1 + in_forward, factor)


def ready(call: Call) -> LogitsCase:
    draw, labels = call.draw, call.labels()
    logits = draw.logits(call.leading, call.vocab_size, labels, call.dtype, call.mask())
    beside = beside_logits(call, logits, labels)
    if call.of_oracle.get("num_items") != 0:
        logits = draw.with_bad_row(logits)
    leaves = [leaf_of(call, call.shard_of(logits, rank)) for rank in range(call.ranks)]
    given = [
        {"logits": leaf.logits, **beside.tensors(rank), **call.settings, **call.of_rank(rank)}
        for rank, leaf in enumerate(leaves)
    ]
    kept = [leaf.logits.detach().clone() for leaf in leaves]
    return LogitsCase(call, logits, call.no_rounding(), labels, beside, leaves, given, kept)
