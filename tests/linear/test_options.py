"""``HeadOptions``: checked where it is made, a value like any other, and taken by every function of a head."""

import copy
import dataclasses
import inspect
import pickle
import typing

import pytest
import torch

import vocab_parallel_ce as vp
from vocab_parallel_ce import HeadOptions
from vocab_parallel_ce.head import plan

pytestmark = pytest.mark.reference

TOKENS, WIDTH, COLUMNS = 6, 5, 12
EACH = {  # a value of each field that is not its default
    "gradient": "in_backward",
    "impl": "reference",
    "check_labels": True,
    "sequence_parallel": True,
    "chunk_size": "1KiB",
    "logits_dtype": torch.float32,
    "keep_logits": "2GiB",
    "reduce_hidden_grad": False,
    "own_tokens": True,
    "average": False,
    "max_tokens": 8,
    "valid_tokens": "count",
}


def tensors():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, WIDTH, generator=generator) for n in (TOKENS, COLUMNS))
    return hidden.requires_grad_(), weight.requires_grad_(), torch.tensor([3, -100, 0, 11, 7, 3])


def minus(log_probs):
    return -log_probs


def distilled(hidden, weight, labels, **keywords):
    teacher = vp.Head(2 * hidden.detach(), weight.detach())
    return vp.linear_distillation_loss(vp.Head(hidden, weight), teacher, labels=labels, hard_weight=1.0, **keywords)


# Each returns the mean of -log_prob.
FUNCTIONS = {
    "linear_cross_entropy": vp.linear_cross_entropy,
    "linear_token_log_probs": lambda h, w, y, **keywords: -vp.linear_token_log_probs(h, w, y, **keywords).sum() / 5,
    "linear_objective": lambda h, w, y, **keywords: vp.linear_objective(h, w, y, minus, **keywords)[0],
    "linear_distillation_loss": distilled,
}
REFUSED = {
    "linear_cross_entropy": {},
    "linear_token_log_probs": {"gradient": ("in_forward", "'auto' or 'in_backward'")},
    "linear_objective": {"gradient": ("in_backward", "'auto' or 'in_forward'"), "keep_logits": ("all", "'none'")},
    "linear_distillation_loss": {
        "sequence_parallel": (True, "False"),
        "own_tokens": (True, "False"),
        "logits_dtype": (torch.float32, "None"),
        "valid_tokens": (5, "None"),
    },
}


def results(function, *others, **keywords):
    hidden, weight, labels = tensors()
    loss = function(hidden, weight, labels, *others, **keywords)
    return [loss.detach(), *torch.autograd.grad(loss, (hidden, weight))]


def test_the_fields():
    assert [field.name for field in dataclasses.fields(HeadOptions)] == [*EACH]
    assert all(p.kind is p.KEYWORD_ONLY for p in inspect.signature(HeadOptions).parameters.values())


@pytest.mark.parametrize("field", EACH)
def test_a_record_is_a_value(field):
    needs = {"own_tokens": True} if field in ("average", "max_tokens") else {}
    made = [HeadOptions(**needs, **{field: copy.copy(EACH[field])}) for _ in range(2)]
    assert made[0] == made[1] != HeadOptions(**needs) and hash(made[0]) == hash(made[1])
    shown = "".join(f"{name}={value!r}, " for name, value in needs.items()) + f"{field}={EACH[field]!r}"
    assert repr(made[0]) == f"HeadOptions({shown})" and repr(HeadOptions()) == "HeadOptions()"
    for same in (copy.deepcopy(made[0]), pickle.loads(pickle.dumps(made[0])), dataclasses.replace(made[0])):
        assert same == made[0] and {same: 1}[made[1]] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made[0], field, EACH[field])


@pytest.mark.parametrize("function", REFUSED)
def test_a_function_refuses_fields_that_it_has_no_use_for(function):
    for field, (value, expected) in REFUSED[function].items():
        got = rf"options\.{field}: expected {expected} in this function, got {value!r}; leave it out$"
        with pytest.raises(ValueError, match=f"^{got}"):
            results(FUNCTIONS[function], options=HeadOptions(**{field: value}))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_options_are_a_record(function):
    with pytest.raises(TypeError, match=r"^options: expected a HeadOptions or None, got dict; pass HeadOptions\("):
        results(FUNCTIONS[function], options={"chunk_size": 4})


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_field_among_the_keywords_is_an_error_that_says_where_it_goes(function):
    for field, value in EACH.items():
        remedy = rf"; pass options=HeadOptions\({field}=\.\.\.\)$"
        with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument '{field}'{remedy}"):
            results(FUNCTIONS[function], **{field: value})
    with pytest.raises(TypeError, match=rf"^{function}\(\) got an unexpected keyword argument 'chunks'$"):
        results(FUNCTIONS[function], chunks=4)


def test_modules_say_the_same():
    hidden, weight, labels = tensors()
    with pytest.raises(TypeError, match=r"^LinearCrossEntropy\(\) got .*'chunk_size'; pass options=HeadOptions\("):
        vp.LinearCrossEntropy(in_features=WIDTH, columns=COLUMNS, chunk_size=4)
    with pytest.raises(TypeError, match=r"^VocabParallelCrossEntropy\(\) got .*'chunk_size'$"):
        vp.VocabParallelCrossEntropy(chunk_size=4)
    with pytest.raises(TypeError, match=r"^LinearCrossEntropy\(\) got .*'temperature'$"):
        vp.LinearCrossEntropy(in_features=WIDTH, columns=COLUMNS, temperature=2.0)
    with pytest.raises(ValueError, match="^gradient: 'in_forward' cannot know the grad_output of reduction 'none'"):
        vp.LinearCrossEntropy(
            in_features=WIDTH, columns=COLUMNS, reduction="none", options=HeadOptions(gradient="in_forward")
        )
    module = vp.LinearCrossEntropy(in_features=WIDTH, columns=COLUMNS, options=HeadOptions(chunk_size=4))
    assert "options=HeadOptions(chunk_size=4)" in repr(module)
    module.options = {"chunk_size": 2}
    with pytest.raises(TypeError, match="^options: expected a HeadOptions"):
        module(hidden, labels)
    for name, value in EACH.items():
        with pytest.raises(AttributeError, match=rf"^{name}: expected it in options.*write module.options = Head"):
            setattr(module, name, value)


def test_a_subclass_of_a_module_has_its_own_signature():
    class Scaled(vp.VocabParallelCrossEntropy):
        def __init__(self, alpha):
            super().__init__(logit_scale=alpha)

    assert [*inspect.signature(Scaled).parameters] == ["alpha"] and Scaled(2.0).logit_scale == 2.0


@pytest.mark.parametrize("name", [name for name in vp.__all__ if inspect.isfunction(getattr(vp, name))])
def test_type_hints_are_known(name):
    function = getattr(vp, name)
    assert typing.get_type_hints(function)
    annotations = [each.annotation for each in inspect.signature(function, eval_str=True).parameters.values()]
    assert not any(isinstance(each, str) for each in annotations)


def test_equal_records_are_one_kind_of_call():
    """Its key is the value: a record that is made for each call costs no plan."""
    plan._kinds.forget()
    for chunk_size in (2, 2, 3, 2):
        results(vp.linear_cross_entropy, options=HeadOptions(chunk_size=chunk_size))
    assert len([kind for kind in plan._kinds.by_key.values() if kind.made is not None]) == 2
    results(vp.linear_cross_entropy, options=None)
    results(vp.linear_cross_entropy, options=HeadOptions())
    assert len([kind for kind in plan._kinds.by_key.values() if kind.made is not None]) == 3


def made_inside(h, w, y, size="auto"):
    return vp.linear_cross_entropy(h, w, y, options=HeadOptions(chunk_size=size, gradient="in_backward"))


def passed_in(h, w, y, options):
    return vp.linear_cross_entropy(h, w, y, options=options)


CONSTANT, IN_BACKWARD = HeadOptions(chunk_size="1KiB", valid_tokens=5), HeadOptions(gradient="in_backward")


def a_constant(h, w, y):
    return vp.linear_cross_entropy(h, w, y, options=CONSTANT)


CALLS = {
    "made inside": (made_inside, [(), (3,), (4,), (5,), ("1KiB",)]),
    "passed in": (
        passed_in,
        [(None,), (HeadOptions(chunk_size=3),), (IN_BACKWARD,), (CONSTANT,)],
    ),
    "a constant": (a_constant, [()]),
}


@pytest.mark.parametrize("name", CALLS)
def test_compiled_code_takes_a_record(name):
    function, values = CALLS[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for others in values:
        found = [results(f, *others) for f in (function, compiled)]
        assert all(map(torch.equal, *found)), others
