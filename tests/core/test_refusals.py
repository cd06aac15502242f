"""Wrong arguments: refused by the functions and modules, with their subject, before anything changes."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import re

import numpy
import pytest
import torch

import vocab_parallel_ce as package
from vocab_parallel_ce import VocabParallelCrossEntropy, VocabShard, token_log_probs, vocab_parallel_cross_entropy

pytestmark = pytest.mark.reference

COLUMNS = 21
NAN, INF = float("nan"), float("inf")
ITEMS = {"reduction": "sum"}


def _positive(name):
    """Wrong values of a number that must be positive: 0 or less turns a padding of -inf into +inf or NaN.

    Kernels compute in fp32, where 1e39 is infinite and 1e-46 is 0.
    """
    message = f"{name}: must be positive and finite.*, got"
    wrong = (0, NAN, 1e39, 1e-46)
    return [
        *(({name: value}, ValueError, f"{message} {re.escape(str(value))}$") for value in wrong),
        ({name: "1"}, TypeError, f"{name}: expected a number, got str"),
        ({name: True}, TypeError, f"{name}: expected a number, got bool"),
    ]


OF_BOTH = [
    *_positive("softcap"),
    *_positive("logit_scale"),
    ({"softcap": torch.tensor(1.0)}, TypeError, "softcap: expected a number, got Tensor"),
    ({"logit_scale": None}, TypeError, "logit_scale: expected a number, got NoneType"),
    ({"ignore_index": -100.0}, TypeError, "ignore_index: expected an int, got float"),
    ({"check_labels": 1}, TypeError, "check_labels: expected a bool, got int"),
    ({"check_labels": numpy.bool_(True)}, TypeError, "check_labels: expected a bool, got numpy.bool"),
    ({"gradient": "inplace"}, ValueError, "gradient: expected one of .*, got 'inplace'"),
    ({"vocab_size": 0}, ValueError, "vocab_size: must be positive, got 0"),
    ({"vocab_size": 21.0}, TypeError, "vocab_size: expected an int, got float"),
    ({"vocab_size": 22}, ValueError, "logits: last dimension must be .*22.*, got 21"),
    ({"vocab_size": (0, 21, 21)}, TypeError, "vocab_size: expected an int, got tuple"),
    ({"vocab_size": VocabShard(0, 20, 20)}, ValueError, "logits: last dimension must be .*width 20.*, got 21$"),
    ({"vocab_size": VocabShard(21, 42, 42)}, ValueError, "vocab_size: .* one rank, got VocabShard.*start=21"),
    ({"vocab_size": VocabShard(0, 21, 42)}, ValueError, "vocab_size: .* one rank, got VocabShard.*vocab_size=42"),
    ({"vocab_size": VocabShard(-21, 0, 21)}, ValueError, "vocab_size: .*0 <= start <= stop, got"),
    ({"vocab_size": VocabShard(0, 21, 0)}, ValueError, "vocab_size: a shard must be columns of a vocabulary"),
    ({"vocab_size": VocabShard(0, 21, 21.0)}, TypeError, "vocab_size.vocab_size: expected an int, got float"),
]
OF_THE_LOSS = [
    ({"class_weight": [1.0] * COLUMNS}, TypeError, "class_weight: expected a torch.Tensor, got list"),
    ({"class_weight": torch.ones(COLUMNS).long()}, TypeError, "class_weight: dtype must be floating point, got"),
    ({"class_weight": torch.ones(COLUMNS).to_sparse()}, TypeError, "class_weight: expected a dense tensor, got layout"),
    ({"class_weight": torch.ones(COLUMNS, requires_grad=True)}, TypeError, "class_weight: .*requires no gradient"),
    *(
        ({"label_smoothing": value}, ValueError, rf"label_smoothing: must be in \[0, 1\], got {value}")
        for value in (1.01, NAN)
    ),
    ({"num_items": torch.tensor([3]).to_sparse()}, TypeError, "num_items: expected a dense tensor, got layout"),
    ({"label_smoothing": torch.tensor(0.1)}, TypeError, "label_smoothing: expected a number, got Tensor"),
    *(
        ({"z_loss": value}, ValueError, f"z_loss: must be at least 0.* got {re.escape(str(value))}$")
        for value in (-0.1, NAN, 10**400)
    ),
    ({"z_loss": None}, TypeError, "z_loss: expected a number, got NoneType"),
    ({"outputs": 1}, TypeError, "outputs: expected a tuple of names, .* got 1"),
    ({"reduction": "batchmean"}, ValueError, "reduction: expected one of 'mean'.* got 'batchmean'"),
    ({"num_items": 3, "reduction": "none"}, ValueError, "num_items: expected reduction 'mean' or 'sum' .* got 'none'"),
    *(
        ({"num_items": value, **ITEMS}, ValueError, f"num_items: must be at least 0.* got {value}")
        for value in (-1, NAN)
    ),
    ({"num_items": torch.tensor(-2), **ITEMS}, ValueError, "num_items: must be at least 0"),
    *(
        ({"num_items": value, **ITEMS}, TypeError, f"num_items: expected a number, got {name}")
        for value, name in ((True, "bool"), ("3", "str"))
    ),
    (
        {"num_items": torch.ones((), requires_grad=True), **ITEMS},
        TypeError,
        "num_items: expected a tensor that requires no gradient, got one",
    ),
    ({"num_items": torch.ones(2), **ITEMS}, ValueError, r"num_items: expected 1 element, got .*\(2,\)"),
    ({"num_items": torch.tensor(True), **ITEMS}, TypeError, "num_items: dtype .*torch.bool"),
    ({"num_items": torch.ones((), device="meta"), **ITEMS}, ValueError, "num_items: device .*cpu.*meta"),
]
OF_LOG_PROBS = [
    *_positive("temperature"),
    ({"outputs": "entropy"}, TypeError, "outputs: expected a tuple of names, .* got 'entropy'"),
    ({"gradient": "in_forward"}, ValueError, "gradient: expected one of 'auto', 'in_backward', .*in_forward"),
    ({"temperature": 1e-38, "logit_scale": 4.0}, ValueError, "temperature: must be positive and finite"),
]
LOGITS, LABELS = torch.randn(2, 3, COLUMNS), torch.zeros(2, 3, dtype=torch.int64)
TENSORS = [
    ({"logits": [1.0]}, TypeError, "logits: .*Tensor.*list"),
    ({"logits": LOGITS.to(torch.complex64)}, TypeError, "logits: dtype .*complex64"),
    ({"logits": LOGITS[0, 0], "labels": LABELS[0, 0]}, ValueError, r"logits: .*\(21,\)"),
    ({"logits": LOGITS[..., :0]}, ValueError, r"logits: .*\(2, 3, 0\)"),
    ({"labels": None}, TypeError, "labels: .*Tensor.*NoneType"),
    ({"labels": LABELS.short()}, TypeError, "labels: dtype .*int64.*int16"),
    ({"labels": LABELS.t()}, ValueError, r"labels: .*\(2, 3\).*\(3, 2\)"),
    (
        {"labels": LABELS.unsqueeze(-1).expand(2, 3, COLUMNS)},
        ValueError,
        r"labels: .*\(2, 3\), got \(2, 3, 21\); .*id.*probabilities",
    ),
    ({"labels": LABELS.to("meta")}, ValueError, "labels: device .*cpu.*meta"),
    ({"labels": LABELS + COLUMNS, "check_labels": True}, ValueError, "labels: .*6 outside"),
    ({"impl": "cuda"}, ValueError, "impl: .*'reference'.*'cuda'"),
    ({"impl": "one_pass"}, ValueError, "impl: 'one_pass' needs a GPU and triton's compiler, got cpu"),
    ({"group": "tp"}, TypeError, "group: .*ProcessGroup or None.*str"),
    ({"labels": LABELS.to_sparse()}, TypeError, "labels: expected a dense tensor, got layout torch.sparse_coo"),
]
OF_WEIGHTS = [
    ({"class_weight": torch.ones(COLUMNS + 1)}, ValueError, r"class_weight: expected shape \(21,\), got \(22,\)"),
    ({"class_weight": torch.ones(())}, ValueError, r"class_weight: expected shape .*, got \(\)"),
    ({"class_weight": torch.ones(COLUMNS, device="meta")}, ValueError, "class_weight: device .*cpu, got meta"),
    (
        {"class_weight": torch.ones(COLUMNS), "outputs": ("lse", "mean_logit")},
        ValueError,
        "outputs: expected no 'mean_logit' with class_weight",
    ),
]
PADDED = {"labels": torch.tensor([[0, 19, 20], [0, 0, 0]]), "vocab_size": 20, "check_labels": True}
OF_PADDING = [(PADDED, ValueError, r"labels: must be in \[0, 20\) .* 1 outside.*\(0, 2\): 20$")]
# A prediction travels as fp32, which has no 2**24 + 1.
MANY = torch.empty(2, 3, 2**24 + 1, device="meta")
OF_SIZES = [
    (
        {"logits": MANY, "labels": LABELS.to("meta"), "outputs": ("predictions",)},
        ValueError,
        r"vocab_size: must be at most 2\*\*24 .*got 16777217; leave",
    ),
]
CASES = [
    *(
        (vocab_parallel_cross_entropy, *case)
        for case in [*OF_BOTH, *TENSORS, *OF_PADDING, *OF_THE_LOSS, *OF_SIZES, *OF_WEIGHTS]
    ),
    *((token_log_probs, *case) for case in [*OF_BOTH, *TENSORS[::4], *OF_PADDING, *OF_LOG_PROBS]),
]


@pytest.mark.quick
@pytest.mark.parametrize(("function", "changed", "error", "message"), CASES)
def test_refused_before_anything_is_changed(function, changed, error, message):
    logits, labels = LOGITS.clone().requires_grad_() * 1, LABELS.clone()
    before = logits.detach().clone()
    with pytest.raises(error, match=f"^{message}") as raised:
        function(**{"logits": logits, "labels": labels, **changed})
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    assert torch.equal(logits, before) and logits._version == labels._version == 0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        case
        for case in [*OF_BOTH, *OF_THE_LOSS]
        if "num_items" not in case[0] and not isinstance(size := case[0].get("vocab_size"), VocabShard) and size != 22
    ]
    + [
        ({"vocab_size": VocabShard(0, 12, None)}, TypeError, "vocab_size.vocab_size: expected an int, got NoneType"),
        ({"outputs": ("predictions",), "vocab_size": 2**25}, ValueError, "vocab_size: must be at most"),
    ],
)
def test_the_module_refuses_them_when_it_is_made(options, error, message):
    with pytest.raises(error, match=f"^{message}") as raised:
        VocabParallelCrossEntropy(**options)
    assert raised.value.__context__ is None


@pytest.mark.parametrize(
    "function",
    (
        *(vocab_parallel_cross_entropy, token_log_probs, package.linear_cross_entropy, package.distillation_loss),
        *(package.VocabParallelCrossEntropy, package.LinearCrossEntropy),
    ),
)
def test_an_unknown_name_is_refused_as_python_does(function):
    tensors = () if isinstance(function, type) else (LOGITS, LABELS)
    for how in (contextlib.nullcontext(), package.verify_calls()):
        with how, pytest.raises(TypeError, match="got an unexpected keyword argument 'labels_smoothing'"):
            function(*tensors, labels_smoothing=0.1)


CALL = (torch.randn(2, 12), torch.tensor([0, 1]))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"z_loss": 1}, {"z_loss": True}),
        ({"ignore_index": 1}, {"ignore_index": 1.0}),
        ({"check_labels": True}, {"check_labels": 1}),
        ({"vocab_size": 12}, {"vocab_size": 12.0}),
        ({"vocab_size": VocabShard(0, 12, 12)}, {"vocab_size": VocabShard(False, 12, 12)}),
    ],
    ids=str,
)
def test_an_equal_value_of_another_type_is_refused_before_and_after_the_right_one(right, wrong):
    """``True == 1``, and both have one hash: what was checked for one must not let the other pass."""
    (name,) = wrong
    message = f"^{name}[.:].* expected (an int|a number|a bool), got "
    for _ in range(2):
        with pytest.raises(TypeError, match=message) as raised:
            vocab_parallel_cross_entropy(*CALL, **wrong)
        assert raised.value.__context__ is None
        vocab_parallel_cross_entropy(*CALL, **right)


def test_a_tensor_of_another_library_is_checked_in_every_call():
    """What it is may be said by the tensor, not by its type."""

    class Wrapper(torch.Tensor):
        pass

    plain, part = (CALL[0].as_subclass(Wrapper) for _ in range(2))
    part.placements = ("Shard",)
    vocab_parallel_cross_entropy(plain, CALL[1])
    with pytest.raises(TypeError, match="^logits: expected this rank's part as a plain torch.Tensor"):
        vocab_parallel_cross_entropy(part, CALL[1])


def test_fields_of_a_shard_may_be_numpy_integers():
    shard = VocabShard(*map(numpy.int64, (0, 12, 11)))
    loss = vocab_parallel_cross_entropy(*CALL, vocab_size=shard)
    expected = torch.nn.functional.cross_entropy(CALL[0][:, :11].double(), CALL[1])
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)


def _caches():
    """Everything in the package that ``functools.lru_cache`` made."""
    modules = [package]
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if "__main__" not in info.name:
            modules.append(importlib.import_module(info.name))
    found = {id(value): value for module in modules for value in vars(module).values()}
    return [value for value in found.values() if isinstance(value, functools._lru_cache_wrapper)]


def test_caches_are_bounded_and_a_call_like_one_before_is_found_in_them():
    """A weight or a temperature that is annealed has a new value every step, and shapes change too."""
    pytest.importorskip("triton")
    caches = _caches()

    def has_several_arguments(code):
        return code.co_argcount > 1 or code.co_flags & inspect.CO_VARARGS

    # One without a bound has one key a process, a device or a group.
    of_calls = [cache for cache in caches if has_several_arguments(cache.__wrapped__.__code__)]
    assert of_calls and all(cache.cache_info().maxsize for cache in of_calls)

    def entries():
        return sum(cache.cache_info().currsize for cache in caches)

    for cache in of_calls:  # earlier tests may have filled them
        cache.cache_clear()
    vocab_parallel_cross_entropy(*CALL, z_loss=1)
    with pytest.raises(TypeError, match="^z_loss: "):  # equal to 1, and no number
        vocab_parallel_cross_entropy(*CALL, z_loss=True)
    vocab_parallel_cross_entropy(*CALL, z_loss=0.1)
    before = entries()
    for step in range(3):
        vocab_parallel_cross_entropy(CALL[0] + step, CALL[1], z_loss=0.1)
        with pytest.raises(ValueError, match="^label_smoothing: "):  # errors are not remembered
            vocab_parallel_cross_entropy(*CALL, label_smoothing=2.0)
    assert entries() == before
    vocab_parallel_cross_entropy(*CALL, z_loss=0.2734375)
    assert entries() > before
