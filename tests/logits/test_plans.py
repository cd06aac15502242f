"""What a call remembers of calls before: nothing that another fact of a tensor, a setting or PyTorch's state changes.

A kind of call differs from the usual one in one fact. Warm, after calls of other kinds, it has the same bits as cold,
leaves the same memory alone, or raises the same error.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext

import hypothesis
import numpy
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from tests.support.kernels.interpreted_programs import interpreted_programs
from tests.support.kernels.launch_shapes import forget_plans
from vocab_parallel_ce import VocabShard, distillation_loss, token_log_probs, vocab_parallel_cross_entropy

ROWS, COLUMNS = 2, 48


def divergence(logits, labels, *, teacher, **options):
    return distillation_loss(logits, teacher, labels=labels, **options)


FUNCTIONS = {"loss": vocab_parallel_cross_entropy, "log_probs": token_log_probs, "divergence": divergence}


class Subclass(torch.Tensor):
    pass


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def inference(make):
    with torch.inference_mode():
        return make()


def negative(values):
    return torch.complex(values, -values).conj().imag


LEAVES = {
    "bf16": lambda: made(ROWS, COLUMNS).bfloat16(),
    "fp16": lambda: made(ROWS, COLUMNS).half(),
    "fp64": lambda: made(ROWS, COLUMNS).double(),
    "int64": lambda: made(ROWS, COLUMNS).long(),
    "fewer columns": lambda: made(ROWS, COLUMNS - 1),
    "one token": lambda: made(1, COLUMNS),
    "two dimensions of tokens": lambda: made(2, ROWS // 2, COLUMNS),
    "a single row": lambda: made(COLUMNS),
    "a parameter": lambda: nn.Parameter(made(ROWS, COLUMNS)),
    "a subclass": lambda: made(ROWS, COLUMNS).as_subclass(Subclass),
    "an inference tensor": lambda: inference(lambda: made(ROWS, COLUMNS)),
    "sparse": lambda: made(ROWS, COLUMNS).to_sparse(),
    "on the meta device": lambda: made(ROWS, COLUMNS).to("meta"),
}
LOGITS = {  # of a leaf
    "a leaf": lambda leaf: leaf,
    "a view of a leaf": lambda leaf: leaf.view(ROWS, COLUMNS),
    "a view": lambda leaf: (leaf * 1).view(ROWS, COLUMNS),
    "without a gradient": lambda leaf: leaf.detach(),
    "rows apart": lambda leaf: torch.cat([leaf, leaf], dim=1)[:, :COLUMNS],
    "off a boundary": lambda leaf: torch.cat([leaf.new_zeros(1), leaf.flatten()])[1:].view(ROWS, COLUMNS),
    "column-major": lambda leaf: leaf.t().contiguous().t(),
    "a negative view": negative,
}
LABELS = {
    "int32": lambda labels: labels.int(),
    "strided": lambda labels: labels.repeat_interleave(2)[::2],
    "one less": lambda labels: labels[1:],
    "floating-point": lambda labels: labels.float(),
    "a subclass": lambda labels: labels.as_subclass(Subclass),
    "an inference tensor": lambda labels: inference(labels.clone),
    "ignored": lambda labels: torch.full_like(labels, -100),
    "outside": lambda labels: labels + COLUMNS,
}
SETTINGS = [
    *({"logit_scale": each} for each in (1, 1.0, True, numpy.float32(1), numpy.True_, 2, -0.0, 0, float("nan"))),
    *({"ignore_index": each} for each in (1, 1.0, True, numpy.int64(1))),
    *({"check_labels": each} for each in ("auto", True, 1, 0)),
    *({"vocab_size": each} for each in (COLUMNS, COLUMNS - 2, 48.0, True, VocabShard(0, COLUMNS, COLUMNS))),
    *({"gradient": each} for each in ("in_forward", "in_backward", "out_of_place")),
    *({"outputs": each} for each in (("entropy",), ["lse", "predictions"])),
]
OF_THE_LOSS = [
    *({"z_loss": each} for each in (1, 1.0, True, numpy.float64(1), 0, -0.0, float("nan"))),
    *({"label_smoothing": each} for each in (0, 1, True, 0.5)),
    *({"reduction": each} for each in ("none", "sum")),
    *({"num_items": each} for each in (2, 2.0, True, torch.tensor(2), torch.tensor([[2.0]]))),
    *({"class_weight": each} for each in (torch.ones(COLUMNS), torch.ones(COLUMNS).half(), torch.ones(3))),
]
WITH_GRADIENT = {"class_weight": torch.ones(COLUMNS, requires_grad=True)}  # only without a graph
OF_LOG_PROBS = [
    *({"temperature": each} for each in (1, 2.0, True, torch.tensor(2.0), torch.ones(ROWS), torch.ones(3))),
    {"temperature": negative(-torch.ones(ROWS))},
    {"threshold": torch.zeros(ROWS)},
    {"threshold": torch.zeros(ROWS, requires_grad=True)},
]
TEACHER = made(ROWS, COLUMNS) * 0.5 + 1
TEACHERS = {  # rows of the two tensors that lie alike or not, in either of them
    "the same": TEACHER,
    "bf16": TEACHER.bfloat16(),
    "fp64": TEACHER.double(),
    "expanded": TEACHER[:1].expand(ROWS, COLUMNS),
    "fewer columns": TEACHER[:, 1:],
    "one token": TEACHER[:1],
    "a gradient": TEACHER.clone().requires_grad_(),
    **{name: LOGITS[name](TEACHER) for name in ("rows apart", "off a boundary", "column-major", "a negative view")},
}
GRAD = (torch.enable_grad, torch.no_grad)
STATES = {
    "no_grad": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "saved-tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "a default device": lambda: torch.device("meta"),
}


def kinds_of_divergences():
    kinds = {"usual": {"keywords": {"teacher": TEACHER}}}
    for name, teacher in TEACHERS.items():
        kinds |= {f"{name}, teacher": {"keywords": {"teacher": teacher}}}
        kinds |= {f"{name}, teacher, rows apart": {"keywords": {"teacher": teacher}, "logits": LOGITS["rows apart"]}}
    return kinds


def kinds_of(function):
    if function == "divergence":
        return kinds_of_divergences()
    kinds = {"usual": {}, "logits that are kept": {"keeps": True}}
    kinds |= {f"{name}, logits": {"leaf": make} for name, make in LEAVES.items()}
    kinds |= {f"{name}, of logits": {"logits": change} for name, change in LOGITS.items()}
    kinds |= {f"{name}, labels": {"labels": change} for name, change in LABELS.items()}
    own = OF_THE_LOSS if function == "loss" else OF_LOG_PROBS
    kinds |= {f"{i}, {each}": {"keywords": each} for i, each in enumerate(SETTINGS + own)}
    if function == "loss":
        a_leaf = {"keywords": WITH_GRADIENT, "logits": LOGITS["a leaf"]}
        kinds |= {f"a weight with a gradient, {state}": {**a_leaf, "state": state} for state in GRAD}
    return kinds | {f"under {name}": {"state": state} for name, state in STATES.items()}


KINDS = {function: kinds_of(function) for function in FUNCTIONS}


def seen(tensor):
    """All of a tensor that another call must have too."""
    values = None if tensor.is_meta else tensor.detach().to_dense().double().nan_to_num(7e7).tolist()
    return str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad, values


def outcome(
    function,
    impl_device,
    leaf=lambda: made(ROWS, COLUMNS),
    logits=lambda leaf: leaf * 1,
    labels=lambda labels: labels,
    keywords=None,
    state=nullcontext,
    keeps=False,
):
    """What a call and its backward return, and the logits if they are kept; or the error."""
    impl, device = impl_device
    leaf = leaf()
    leaf = leaf if leaf.is_meta or leaf.is_inference() else leaf.to(device)
    ids = labels(torch.arange(leaf.shape[:-1].numel(), device=device).view(leaf.shape[:-1]))
    keywords = {"check_labels": False, **(keywords or {})}  # looks at no label, as a GPU's usual call
    keywords = {key: each.to(device) if isinstance(each, torch.Tensor) else each for key, each in keywords.items()}
    if leaf.is_floating_point() and not leaf.is_inference():
        leaf = leaf.requires_grad_()
    try:
        with state():
            kept = [logits(leaf)]
            found = FUNCTIONS[function](kept[0] if keeps else kept.pop(), ids, impl=impl, **keywords)
        values = (
            [found] if isinstance(found, torch.Tensor) else [each for each in vars(found).values() if each is not None]
        )
        if values[0].requires_grad:
            values[0].sum().backward()
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return [*map(seen, values + kept), None if leaf.grad is None else seen(leaf.grad)]


def cold(function, impl_device, kind):
    forget_plans()
    return outcome(function, impl_device, **KINDS[function][kind])


WHERE = [pytest.param("cpu", marks=pytest.mark.reference), pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", WHERE)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_kind_after_each_other_is_as_alone(function, device):
    where, wrong = ("auto", device), []
    expected = {kind: cold(function, where, kind) for kind in KINDS[function]}
    assert not isinstance(expected["usual"], str)
    for before, after in itertools.product(KINDS[function], repeat=2):
        cold(function, where, before)
        if outcome(function, where, **KINDS[function][after]) != expected[after]:
            wrong.append(f"{after}; after {before}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("function", FUNCTIONS)
@hypothesis.settings(
    max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
@hypothesis.given(data=st.data())
def test_calls_in_any_order_are_as_alone(function, impl_device, data):
    kinds = data.draw(st.lists(st.sampled_from(sorted(KINDS[function])), min_size=3, max_size=6))
    expected = [cold(function, impl_device, kind) for kind in kinds]
    forget_plans()
    with interpreted_programs() if impl_device == ("triton", "cpu") else nullcontext():
        for kind, right in zip(kinds * 2, expected * 2, strict=True):
            assert outcome(function, impl_device, **KINDS[function][kind]) == right, kind
