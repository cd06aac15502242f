"""Random calls over hidden states and a head."""

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.random.beside import Beside, gradients_of, no_check, teacher_options, with_labels, with_tokens
from tests.support.random.call import UNITS, WIDTH, Call, assert_near, half_digit
from tests.support.random.inputs import NEG_INF
from tests.support.random.logits import alike
from tests.support.random.public import Given
from tests.support.random.truth import Numbers, Truth, finite, of_teacher
from tests.support.ranks.in_turn import in_turn


class Head(NamedTuple):
    """Hidden states, and a head whose rows beyond the vocabulary are padding."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None

    def rows(self, start: int, stop: int) -> "Head":
        """A rank's rows."""
        return Head(self.hidden, self.weight[start:stop], None if self.bias is None else self.bias[start:stop])

    def leaves(self, trained: dict[str, bool]) -> "Head":
        tensors = self._asdict().items()
        return Head(*(None if t is None else nn.Parameter(t, trained[name]) for name, t in tensors))


def head_of(call: Call, dtype: torch.dtype, *, is_exact: bool, has_bias: bool) -> Head:
    """Of 16 bits, products are exact: small multiples of 1/4."""
    draw, rows = call.draw, call.bounds[-1][1]
    if is_exact:
        hidden = draw.ids((*call.leading, WIDTH), 3) - 1.0
        weight, bias = (draw.ids(shape, 17) / 4.0 - 2 for shape in ((rows, WIDTH), (rows,)))
    else:
        hidden, weight, bias = draw.normal(*call.leading, WIDTH), draw.normal(rows, WIDTH), draw.normal(rows)
    if has_bias and draw.has(0.15) and call.function == "linear_token_log_probs":
        bias = bias.masked_fill(draw.uniform(rows) < 0.1, NEG_INF)
        bias[0] = 0.0
    hidden = draw.placed(hidden.to(dtype), draw.rng.choice(("contiguous", "gaps", "transposed", "offset")))
    weight = draw.placed(weight.to(dtype), draw.rng.choice(("contiguous", "contiguous", "gaps", "offset")))
    return Head(hidden, weight, bias.to(dtype) if has_bias else None)


def logits_of(head: Head, vocab_size: int) -> Tensor:
    logits = head.hidden.double() @ head.weight[:vocab_size].double().t()
    return logits if head.bias is None else logits + head.bias[:vocab_size].double()


def rounding_of(head: Head, is_exact: bool) -> Tensor:
    """What a product of fp32 may be off, in last digits of 1."""
    sizes = finite(head.hidden).abs().double() @ head.weight.abs().double().t()
    largest = sizes.amax(-1) + (0.0 if head.bias is None else finite(head.bias).abs().max().double())
    return largest * (not is_exact)


def head_settings(call: Call, labels: Tensor, head: Head) -> Tensor | None:
    """Take the options of a head; return the main_grad of the vocabulary."""
    draw, n_tokens = call.draw, labels.numel()
    call.settings["reduce_hidden_grad"] = draw["reduce_hidden_grad"]
    if draw["chunks"] == "tokens":
        call.settings["chunk_tokens"] = draw.rng.randint(1, max(n_tokens, 1))
    elif draw["chunks"] == "bytes":
        n_columns = max(stop - start for start, stop in call.bounds)
        call.settings["memory_budget"] = draw.rng.randint(1, max(n_tokens, 1)) * 8 * n_columns
    is_none = draw["reduction"] == "none" or "log_probs" in call.function
    if draw["gradient"] == "in_backward" or (is_none and draw["gradient"] != "in_forward"):
        call.settings["keep_logits"] = ("none", "all")[draw.index % 2]
    if call.function == "linear_distillation_loss":
        return None
    call.settings["logits_dtype"] = draw["logits_dtype"]
    if draw["valid_tokens"]:
        n_valid = int((labels != draw["ignore_index"]).sum())
        call.settings["valid_tokens"] = n_valid + draw.rng.randint(0, 2)
    return draw.normal(*head.weight.shape) if draw["main_grad"] else None


def beside_head(call: Call, head: Head, labels: Tensor, is_exact: bool) -> Beside:
    if call.function != "linear_distillation_loss":
        return with_labels(call, labels)
    return with_tokens(call, labels) if "rest" in call.draw.case else with_two_heads(call, labels, is_exact)


def with_two_heads(call: Call, labels: Tensor, is_exact: bool) -> Beside:
    draw = call.draw
    given = teacher_options(call, labels)
    dtype = call.dtype if draw["autocast"] or draw.index % 2 else torch.bfloat16
    exact = dtype != torch.float32 or is_exact
    other = head_of(call, dtype, is_exact=exact, has_bias=draw.has(0.5))
    teacher = logits_of(other, call.vocab_size)

    def compute(x: Tensor, rounding: Tensor) -> Truth:
        of_other = rounding_of(other, exact)
        return of_teacher(x, teacher, given.get("labels"), call.of_oracle, rounding, of_other)

    def tensors(rank: int) -> Given:
        own = other.rows(*call.bounds[rank])._asdict()
        return {**{f"teacher_{name}": tensor for name, tensor in own.items()}, **given}

    return Beside(compute, tensors, no_check)


class OfHead(NamedTuple):
    """A call that is ready to be made."""

    head: Head  # of the vocabulary, and its padding
    beside: Beside
    heads: list[Head]  # of each rank
    given: list[Given]  # to each rank
    trained: dict[str, bool]
    is_exact: bool
    upstream: Numbers | None  # where the call must know it

    def autocast(self, call: Call) -> Any:
        return torch.autocast(call.draw.device, torch.bfloat16) if call.draw["autocast"] else nullcontext()


def ready(call: Call) -> OfHead:
    draw = call.draw
    outside = draw["class_weight"] is None or draw["reduction"] != "mean"
    labels = draw.labels(call.leading, call.vocab_size, may_be_outside=outside)
    is_exact = draw["autocast"] or call.dtype != torch.float32
    head = head_of(call, call.dtype, is_exact=is_exact, has_bias=draw["bias"])
    trained = {"hidden": draw["trains"] != "head", "weight": draw["trains"] != "hidden"}
    trained["bias"] = trained["weight"] and head.bias is not None
    heads = [head.rows(start, stop).leaves(trained) for start, stop in call.bounds]
    main_grad = head_settings(call, labels, head)
    upstream = None
    if draw["gradient"] == "in_forward" and draw["reduction"] == "none" and draw["num_items"] is None:
        upstream = {"loss": draw.upstream(call.leading, torch.float32)}
        call.settings["expected_grad_output"] = upstream["loss"] * 0.5
    beside = beside_head(call, head, labels, is_exact)
    given = []
    for rank, own in enumerate(heads):
        of_rank = {**own._asdict(), **beside.tensors(rank), **call.settings, **call.of_rank(rank)}
        given.append(of_rank if main_grad is None else of_rank | {"main_grad": main_grad[slice(*call.bounds[rank])]})
    return OfHead(head, beside, heads, given, trained, is_exact, upstream)


def with_parts(call: Call, case: OfHead) -> OfHead:
    """Give each rank its part of the tokens, if the call is sequence parallel."""
    if not call.draw.case.get("sequence_parallel"):
        return case
    heads = []
    for rank, (head, given) in enumerate(zip(case.heads, case.given, strict=True)):
        part = nn.Parameter(head.hidden.detach().chunk(call.ranks)[rank], case.trained["hidden"])
        heads.append(head._replace(hidden=part))
        given |= {"hidden": part, "sequence_parallel": True}
    return case._replace(heads=heads)


def of_head(call: Call) -> None:
    case = with_parts(call, ready(call))
    beside, given = case.beside, case.given
    logits, rounding = logits_of(case.head, call.vocab_size).detach(), rounding_of(case.head, case.is_exact).detach()
    before = [own["main_grad"].clone() for own in given if "main_grad" in own]

    made: list[tuple[Truth, Numbers, Tensor]] = []  # by the rank that comes first

    def of_rank(rank: int, group: Any) -> Numbers:
        with case.autocast(call):
            found = call.invoke(given[rank], group)
        if not made:
            made.append(gradients_of(call, beside, logits, rounding, found, case.upstream))
        used = made[0][1]
        with torch.autograd.set_multithreading_enabled(False):  # backward may wait for the other ranks' threads
            torch.autograd.backward([found[name] for name in used], list(used.values()))
        return found

    found, *others = in_turn(call.ranks, of_rank)
    truth, used, grad = made[0]
    call.check_outputs(found, truth)
    beside.check(found, logits, rounding)
    for name in found:
        assert all(alike(other[name], found[name]) for other in others), f"{name}: differs between the ranks"
    of_product = torch.bfloat16 if call.draw["autocast"] else call.dtype
    main_grads = (torch.cat(before), torch.cat([own["main_grad"] for own in given])) if before else None
    check_head(call, case, whole_gradients(call, case), grad, truth.of_gradient(used), used, of_product, main_grads)


def whole_gradients(call: Call, case: OfHead) -> Head:
    """The gradients of the vocabulary, and of all tokens."""
    of_ranks = [Head(*(None if leaf is None else leaf.grad for leaf in head)) for head in case.heads]
    hidden = [own.hidden for own in of_ranks]
    if hidden[0] is None or call.ranks == 1:
        whole = hidden[0]
    elif call.draw["sequence_parallel"]:
        whole = torch.cat(hidden)
    elif call.draw["reduce_hidden_grad"]:
        whole = hidden[0]
        assert all(alike(own, whole) for own in hidden), "gradient of hidden: differs between the ranks"
    else:
        whole = functools.reduce(torch.add, [own.double() for own in hidden]).to(call.dtype)
    rows = [[own.weight for own in of_ranks], [own.bias for own in of_ranks]]
    return Head(whole, *(None if parts[0] is None else torch.cat(parts) for parts in rows))


def check_head(
    call: Call,
    case: OfHead,
    found_of: Head,
    grad: Tensor,
    bound: Tensor,
    upstream: Numbers,
    of_product: torch.dtype,
    main_grads: tuple[Tensor, Tensor] | None,  # before and after
) -> None:
    """Check the gradients of products of the gradient of the logits, which is rounded to the products' dtype."""
    valid, flat, head, trained = call.vocab_size, grad.flatten(0, -2), case.head, case.trained
    hidden, weight = head.hidden.detach().double().flatten(0, -2), head.weight.detach().double()[:valid]
    unit = UNITS * 2.0**-23
    factor = max((float(value.abs().max()) for value in upstream.values() if value.numel()), default=1.0)
    half = 0.0 if of_product == torch.float32 else half_digit(grad.to(of_product)) / unit
    least = 2.0**-24 * max(factor, 1.0) / unit if of_product == torch.float16 else 0.0
    of_logits = bound.flatten(0, -2) + finite(flat).abs() * (2 * half + 2) + least
    roundings = 2 if of_product == call.dtype else 3
    of_sum = finite(flat).abs() * half * (call.ranks - 1)  # each rank rounds its part of the hidden states' gradient
    for name, (truth, of_error) in {
        "hidden": (flat @ weight, (of_logits + of_sum) @ weight.abs()),
        "weight": (flat.t() @ hidden, of_logits.t() @ hidden.abs()),
        "bias": (flat.sum(0), of_logits.sum(0)),
    }.items():
        if not trained.get(name):
            continue
        found = getattr(found_of, name)
        if name == "weight" and main_grads is not None:
            assert found is None, "weight: a gradient beside main_grad"
            main_grad, found = main_grads
            truth, of_error = truth + main_grad[:valid].double(), of_error + main_grad[:valid].abs().double()
        assert found is not None, f"{name}: no gradient"
        found = found.flatten(0, -2) if name == "hidden" else found
        if name != "hidden":
            rest = found[valid:] if name == "bias" or main_grads is None else found[valid:] - main_grad[valid:]
            assert not bool(rest.any()), f"gradient of padded rows of {name}"
            found = found[:valid]
        of_error = of_error + half * roundings * finite(truth).abs()
        assert_near(f"gradient of {name}", found, truth, of_error, factor=factor)
