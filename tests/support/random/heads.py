"""Random calls over hidden states and a head."""

import functools
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.support.random.beside import Beside, divergence_from, teacher_options, with_labels
from tests.support.random.call import UNITS, WIDTH, Call, Settings, alike, assert_near, half_digit, size_of
from tests.support.random.inputs import NEG_INF
from tests.support.random.public import Given
from tests.support.random.truth import Numbers, Truth, finite, with_divergence


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
    if has_bias and draw.has(0.15) and call.function == "linear_token_log_probs" and not draw["teacher"]:
        bias = bias.masked_fill(draw.uniform(rows) < 0.1, NEG_INF)
        bias[0] = 0.0
    hidden = draw.placed(hidden.to(dtype), draw.rng.choice(("contiguous", "gaps", "transposed", "offset")))
    weight = draw.placed(weight.to(dtype), draw.rng.choice(("contiguous", "contiguous", "gaps", "offset", "columns")))
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
    is_none = draw["reduction"] == "none" or ("log_probs" in call.function and not draw["in_objective"])
    if draw["gradient"] == "in_backward" or (is_none and draw["gradient"] != "in_forward"):
        call.settings["keep_logits"] = ("none", "all")[draw.index % 2]
    if call.function == "linear_distillation_loss":
        return None
    call.settings["logits_dtype"] = draw["logits_dtype"]
    if draw["valid_tokens"]:
        n_valid = int((labels != draw["ignore_index"]).sum())
        call.settings["valid_tokens"] = n_valid + draw.rng.randint(0, 2)
    return draw.normal(*head.weight.shape) if draw["main_grad"] else None


def beside_head(call: Call, labels: Tensor, is_exact: bool, logits: Tensor, rounding: Tensor) -> Beside:
    if call.function == "linear_distillation_loss":
        return with_two_heads(call, labels, is_exact)
    beside = with_labels(call, labels, logits, rounding)
    return with_teacher_beside(call, labels, is_exact, beside) if call.draw["teacher"] else beside


class OfTeacher(NamedTuple):
    """A teacher's head, and the logits that it gives."""

    head: Head
    logits: Tensor
    rounding: Tensor

    def given(self, call: Call, rank: int) -> Given:
        rows = self.head.rows(*call.bounds[rank])._asdict()
        return {f"teacher_{name}": tensor for name, tensor in rows.items()}


def teacher_of(call: Call, is_exact: bool) -> OfTeacher:
    draw = call.draw
    dtype = call.dtype if draw["autocast"] or draw.index % 2 else torch.bfloat16
    exact = dtype != torch.float32 or is_exact
    head = head_of(call, dtype, is_exact=exact, has_bias=draw.has(0.5))
    return OfTeacher(head, logits_of(head, call.vocab_size), rounding_of(head, exact))


def with_two_heads(call: Call, labels: Tensor, is_exact: bool) -> Beside:
    """The divergence of two heads; in an objective each may have a cap and a scale."""
    settings, of = teacher_options(call, labels), teacher_of(call, is_exact)
    own: Settings = {}
    if call.take("in_linear_objective").get("in_linear_objective"):
        own = caps_of(call)
        call.settings |= caps_of(call)
    compute = divergence_from(call, of.logits, settings.get("labels"), of.rounding, call.settings, own)
    return Beside(compute, lambda rank: {**of.given(call, rank), **settings, "teacher_options": own})


def caps_of(call: Call) -> Settings:
    rng = call.draw.rng
    return {"softcap": rng.choice((None, 7.0)), "logit_scale": rng.choice((1.0, 1.3))}


def with_teacher_beside(call: Call, labels: Tensor, is_exact: bool, beside: Beside) -> Beside:
    """Log-probabilities in an objective, and the divergence from a teacher that has options of its own."""
    of, rng, kind = teacher_of(call, is_exact), call.draw.rng, call.draw["teacher"]
    own = {**caps_of(call), "divergence": kind, "temperature": rng.choice((1.0, 2.0))}
    own["beta"] = rng.choice((0.5, 0.1, 0.8)) if kind == "js" else 0.5
    call.settings["outputs"] = ("divergence", *call.settings.get("outputs", ()))

    def compute(logits: Tensor, rounding: Tensor) -> Truth:
        of_labels = beside.compute(logits, rounding)
        return with_divergence(of_labels, logits, of.logits, labels, call.of_oracle, own, rounding, of.rounding)

    return Beside(compute, lambda rank: {**beside.tensors(rank), **of.given(call, rank), "teacher_options": own})


class HeadCase(NamedTuple):
    """A call that is ready to be made."""

    call: Call
    head: Head  # of the vocabulary, and its padding
    logits: Tensor  # of the vocabulary
    rounding: Tensor  # of the logits
    labels: Tensor
    beside: Beside
    heads: list[Head]  # of each rank
    given: list[Given]  # to each rank
    upstream: Numbers | None  # where the call must know it
    main_grad: Tensor | None  # of the vocabulary, before the call

    def autocast(self) -> Any:
        draw = self.call.draw
        return torch.autocast(draw.device, torch.bfloat16) if draw["autocast"] else nullcontext()

    def backward(self, rank: int, returned: Numbers, upstream: Numbers) -> None:
        """An objective has multiplied the outputs by their upstream gradients."""
        outputs = [returned[name] for name in upstream]
        if "objective" not in returned:
            torch.autograd.backward(outputs, list(upstream.values()))
            return
        terms = torch.cat(
            [
                (value.double() * output.double()).flatten()
                for value, output in zip(upstream.values(), outputs, strict=True)
            ]
        )
        assert_near("objective", returned["objective"], terms.sum(), terms.abs().sum())
        returned["objective"].backward()

    def gradients(self, rank: int) -> Numbers:
        leaves = self.heads[rank]._asdict().items()
        grads = {name: leaf.grad for name, leaf in leaves if leaf is not None and leaf.grad is not None}
        main_grad = self.given[rank].get("main_grad")
        return grads if main_grad is None else grads | {"main_grad": main_grad}

    def whole_gradients(self) -> Numbers:
        """The gradients of the vocabulary, and of all tokens."""
        call, of_ranks = self.call, [self.gradients(rank) for rank in range(self.call.ranks)]
        whole = {name: torch.cat([grads[name] for grads in of_ranks]) for name in of_ranks[0] if name != "hidden"}
        hidden = [grads["hidden"] for grads in of_ranks if "hidden" in grads]
        if not hidden:
            return whole
        if call.draw["sequence_parallel"]:
            whole["hidden"] = torch.cat(hidden)
        elif call.ranks == 1 or call.draw["reduce_hidden_grad"]:
            whole["hidden"] = hidden[0]
            assert all(alike(grad, hidden[0]) for grad in hidden), "gradient of hidden: differs between the ranks"
        else:
            whole["hidden"] = functools.reduce(torch.add, [grad.double() for grad in hidden]).to(call.dtype)
        return whole

    def check_gradients(self, truth: Tensor, bound: Tensor, upstream: Numbers) -> None:
        """Check the gradients of products of the gradient of the logits, which is rounded to the products' dtype."""
        call, head, valid, flat = self.call, self.head, self.call.vocab_size, truth.flatten(0, -2)
        hidden, weight = head.hidden.double().flatten(0, -2), head.weight.double()[:valid]
        of_product = torch.bfloat16 if call.draw["autocast"] else call.dtype
        unit, factor = UNITS * 2.0**-23, size_of(upstream)
        half = 0.0 if of_product == torch.float32 else half_digit(truth.to(of_product)) / unit
        least = 2.0**-24 * max(factor, 1.0) / unit if of_product == torch.float16 else 0.0
        of_logits = bound.flatten(0, -2) + finite(flat).abs() * (2 * half + 2) + least
        roundings = 2 if of_product == call.dtype else 3
        of_sum = (
            finite(flat).abs() * half * (call.ranks - 1)
        )  # each rank rounds its part of the hidden states' gradient
        expected = {
            "hidden": (flat @ weight, (of_logits + of_sum) @ weight.abs()),
            "weight": (flat.t() @ hidden, of_logits.t() @ hidden.abs()),
            "bias": (flat.sum(0), of_logits.sum(0)),
        }
        leaves = self.heads[0]._asdict().items()
        expected = {name: expected[name] for name, leaf in leaves if leaf is not None and leaf.requires_grad}
        grads, padded = self.whole_gradients(), {name: 0.0 for name in ("weight", "bias")}
        if self.main_grad is not None:
            value, of_error = expected.pop("weight")
            before, padded["main_grad"] = self.main_grad[:valid].double(), self.main_grad[valid:]
            expected["main_grad"] = (value + before, of_error + before.abs())
        assert grads.keys() == expected.keys(), f"gradients of {sorted(grads)}, expected of {sorted(expected)}"
        for name, (value, of_error) in expected.items():
            grad = grads[name].flatten(0, -2) if name == "hidden" else grads[name][:valid]
            if name in padded:
                assert bool((grads[name][valid:] == padded[name]).all()), f"gradient of padded rows of {name}"
            of_error = of_error + half * roundings * finite(value).abs()
            assert_near(f"gradient of {name}", grad, value, of_error, factor=factor)


def ready(call: Call) -> HeadCase:
    draw, labels = call.draw, call.labels()
    is_exact = draw["autocast"] or call.dtype != torch.float32
    head = head_of(call, call.dtype, is_exact=is_exact, has_bias=draw["bias"])
    trained = {"hidden": draw["trains"] != "head", "weight": draw["trains"] != "hidden"}
    trained["bias"] = trained["weight"]
    main_grad = head_settings(call, labels, head)
    before = None if main_grad is None else main_grad.clone()
    upstream = None
    if draw["gradient"] == "in_forward" and draw["reduction"] == "none" and draw["num_items"] is None:
        upstream = {"loss": draw.upstream(call.leading, torch.float32)}
        call.settings["expected_grad_output"] = upstream["loss"] * 0.5
    if draw["in_objective"]:
        names = ("log_probs", *(name for name in draw["outputs"] if name in ("entropy", "lse")))
        names += ("divergence",) if draw["teacher"] else ()
        shape = call.leading if call.n_ids is None else (*call.leading, call.n_ids)
        upstream = {name: draw.upstream(shape, torch.float32) for name in names}
        call.settings["upstream"] = upstream
    logits, rounding = logits_of(head, call.vocab_size), rounding_of(head, is_exact)
    beside = beside_head(call, labels, is_exact, logits, rounding)
    call.take("sequence_parallel")
    heads, given = [], []
    for rank, (start, stop) in enumerate(call.bounds):
        rows = head.rows(start, stop)
        if draw["sequence_parallel"]:
            rows = rows._replace(hidden=head.hidden.chunk(call.ranks)[rank])
        leaves = rows.leaves(trained)
        of_rank = {**leaves._asdict(), **beside.tensors(rank), **call.settings, **call.of_rank(rank)}
        heads.append(leaves)
        given.append(of_rank if main_grad is None else of_rank | {"main_grad": main_grad[start:stop]})
    return HeadCase(call, head, logits, rounding, labels, beside, heads, given, upstream, before)
