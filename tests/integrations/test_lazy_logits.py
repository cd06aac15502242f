"""Lazy logits: the fused loss where it can be, real logits everywhere else, and the same numbers in both."""

import copy
import io
import math
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.cases.flat import linear_cross_entropy
from vocab_parallel_ce.integrations.lazy_head import Head
from vocab_parallel_ce.integrations.lazy_logits import LazyLogits, Recorded, lazy_logits

pytestmark = pytest.mark.reference
D, V, SHAPE = 8, 21, (2, 5)


class Recording(Head):
    def __init__(self, hidden, weight):
        super().__init__(hidden, (weight,))
        self.weight, self.events = weight, []

    def logits(self, hidden, weight):
        return F.linear(hidden, weight)

    def loss(self, hidden, labels, n_columns, **options):
        return linear_cross_entropy(hidden, self.weight, labels, vocab_size=n_columns, check_labels=True, **options)

    def report(self, event):
        self.events.append(event)


def of(head):
    return lazy_logits(head, Recorded(head.hidden, V))


def inputs(dtype=torch.float32, scale=3.0):
    torch.manual_seed(0)
    hidden = (scale * torch.randn(*SHAPE, D)).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    labels = torch.randint(0, V - 2, SHAPE)
    labels[0, :2] = -100
    return hidden, weight, labels


def both(program, dtype=torch.float32, scale=3.0):
    """What a program returns of lazy logits, and of real ones, or its error; and the events of the lazy ones."""
    results = []
    for lazy in (False, True):
        hidden, weight, labels = inputs(dtype, scale)
        head = Recording(hidden, weight)
        try:
            made = program(of(head) if lazy else F.linear(hidden, weight), labels, hidden, weight)
            results.append([each.detach() for each in made])
        except RuntimeError as error:
            results.append(str(error).partition("which is")[0])
    return *results[::-1], head.events


def with_gradients(loss_of):
    """A program: a loss, and its gradients by hidden states and weight."""

    def program(logits, labels, hidden, weight):
        loss = loss_of(logits, labels)
        upstream = torch.linspace(0.5, 2.0, loss.numel(), dtype=loss.dtype).view(loss.shape)
        return loss, *torch.autograd.grad(loss, (hidden, weight), upstream)

    return program


def shifted(logits, labels):
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))


def softcapped(logits, labels):
    return F.cross_entropy((torch.tanh(0.3 * logits / 5.0) * 5.0).view(-1, V), labels.view(-1))


def masked(logits, labels):
    mask = torch.tensor([1, 1, 0, 1]) == 1
    rows = logits[:, :-1][mask.expand(2, -1)]
    return F.cross_entropy(rows, labels[:, 1:][mask.expand(2, -1)], reduction="sum") / 3


FUSED = {
    "shifted": shifted,
    "softcap": softcapped,
    "mask": masked,
    "module": lambda z, y: torch.nn.CrossEntropyLoss(reduction="none")(z.reshape(-1, V), y.flatten()),
    "keywords": lambda z, y: F.cross_entropy(input=z.flatten(0, 1), target=y.flatten()),
    "scale, then softcap": lambda z, y: F.cross_entropy(((z * 0.2).tanh() * 3)[0], y[0], label_smoothing=0.2),
    "softcap twice scaled": lambda z, y: F.cross_entropy((z.mul(0.2).tanh().mul(3) / 2)[1], y[1]),
    "first columns": lambda z, y: F.cross_entropy(z[..., : V - 2].reshape(-1, V - 2), y.view(-1)),
    "first columns by three": lambda z, y: F.cross_entropy(
        z[:, 1:, : V - 1].contiguous().view(-1, V - 1), y[:, 1:].reshape(-1)
    ),
    "rows by ids": lambda z, y: F.cross_entropy(z[torch.tensor([1, 1, 0]), 2], y[torch.tensor([1, 1, 0]), 2]),
    "cast and clone": lambda z, y: F.cross_entropy(z.clone().to("cpu", torch.float32).view(10, V), y.view(10)),
    "ignore_index": lambda z, y: F.cross_entropy(z.view(-1, V), y.clamp(min=0).view(-1), ignore_index=3),
}
REAL = {
    "negative scale": (lambda z, y: F.cross_entropy((-z).view(-1, V), y.view(-1)), "neg"),
    "negative factor": (lambda z, y: F.cross_entropy((-1.5 * z).view(-1, V), y.view(-1)), "mul"),
    "tensor factor": (lambda z, y: F.cross_entropy((z * torch.tensor(2.0)).view(-1, V), y.view(-1)), "mul"),
    "class weights": (
        lambda z, y: F.cross_entropy(z.view(-1, V), y.view(-1), torch.linspace(1, 2, V)),
        "cross_entropy",
    ),
    "probabilities": (lambda z, y: F.cross_entropy(z.view(-1, V), torch.full((10, V), 1 / V)), "cross_entropy"),
    "transposed": (lambda z, y: F.cross_entropy(z.transpose(1, 2), y), "transpose"),
    "last columns": (lambda z, y: F.cross_entropy(z[..., 2:].reshape(-1, V - 2), y.view(-1)), "__getitem__"),
    "log_softmax": (lambda z, y: F.nll_loss(F.log_softmax(z, -1).view(-1, V), y.view(-1)), "log_softmax"),
    "second tanh": (lambda z, y: F.cross_entropy(z.tanh().tanh().view(-1, V), y.view(-1)), "tanh"),
    "mixed rows": (lambda z, y: F.cross_entropy(z.reshape(2, -1), torch.tensor([3, 40])), "reshape"),
    "half": (lambda z, y: F.cross_entropy(z.bfloat16().float().view(-1, V), y.view(-1)), "bfloat16"),
}


def assert_equal(found, expected, rtol=2e-6):
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        assert (own - other).abs().max() <= rtol * other.abs().max()


@pytest.mark.parametrize("name", FUSED)
def test_the_loss_is_fused_and_the_numbers_are_those_of_the_logits(name):
    found, expected, events = both(with_gradients(FUSED[name]))
    assert events == ["fused"]
    assert_equal(found, expected)


@pytest.mark.parametrize("name", REAL)
def test_anything_else_makes_the_logits(name):
    program, operation = REAL[name]
    found, expected, events = both(with_gradients(program))
    assert events == [f"{operation} made the logits"]
    assert_equal(found, expected, rtol=0)


def plain(logits, labels):
    return F.cross_entropy(logits.view(-1, V), labels.view(-1))


def test_bf16_logits_give_pytorchs_dtypes():
    found, expected, events = both(with_gradients(plain), torch.bfloat16)
    assert events == ["fused"]
    assert_equal(found, expected, rtol=2**-7)


def test_labels_beyond_the_vocabulary_are_an_error_as_in_pytorch():
    with pytest.raises(ValueError, match="labels"):
        plain(lazy_pair()[1], torch.full((10,), V))


def test_a_view_that_shares_memory_sees_what_is_written_and_a_product_does_not():
    def loss_of(logits, labels):
        view, product = logits.view(-1, V), logits * 2
        logits[..., 3] = -5.0
        product /= 4
        return F.cross_entropy(view, labels.view(-1)) + plain(product, labels)

    found, expected, events = both(with_gradients(loss_of))
    assert events == ["__setitem__ made the logits"]
    assert_equal(found, expected, rtol=1e-7)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_logits_of_a_checkpoint_are_looked_at(use_reentrant):
    def model(hidden, weight, labels, lazy):
        logits = of(Recording(hidden, weight)) if lazy else F.linear(hidden, weight)
        return plain(logits, labels), logits

    def program(logits, labels, hidden, weight):
        is_lazy = type(logits) is LazyLogits
        loss, logits = checkpoint(model, hidden, weight, labels, is_lazy, use_reentrant=use_reentrant)
        best = logits.argmax(-1)
        (loss + logits.logsumexp(-1).mean()).backward()
        return best, loss, hidden.grad, weight.grad

    assert_equal(*both(program)[:2])


def lazy_pair():
    hidden, weight, _ = inputs()
    head = Recording(hidden, weight)
    return head, of(head), F.linear(hidden, weight)


def test_metadata_makes_no_logits():
    head, lazy, real = lazy_pair()
    assert lazy.shape == real.shape and lazy.dtype == real.dtype and lazy.device == real.device
    assert (lazy.ndim, lazy.dim(), len(lazy), lazy.numel(), lazy.size(-1)) == (3, 3, 2, real.numel(), V)
    assert lazy.requires_grad and lazy.is_contiguous() and lazy.stride() == real.stride()
    assert isinstance(lazy, torch.Tensor) and torch.is_tensor(lazy) and torch.is_floating_point(lazy)
    assert head.events == []


LOOKS = {
    "numpy": lambda z: torch.from_numpy(z.detach().numpy()),
    "argmax": lambda z: z.argmax(-1),
    "cat": lambda z: torch.cat([torch.zeros(1, 5, V), z]),
    "repr": lambda z: torch.tensor(len(repr(z).partition("grad_fn")[0])),
    "aten": lambda z: torch.ops.aten.mul.Tensor(z, z),
}


@pytest.mark.parametrize("name", LOOKS)
def test_whoever_looks_sees_real_logits(name):
    head, lazy, real = lazy_pair()
    found = LOOKS[name](lazy)
    assert type(found) is torch.Tensor and torch.equal(found, LOOKS[name](real))
    assert len(head.events) == 1


def saved(logits):
    file = io.BytesIO()
    torch.save({"logits": logits}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)["logits"]


@pytest.mark.parametrize("copied", [lambda z: pickle.loads(pickle.dumps(z)), saved, copy.deepcopy, torch.Tensor.tolist])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_lazy_logits_are_copied_as_a_plain_tensor(mode, copied):
    with mode():
        head, lazy, real = lazy_pair()
    found = copied(lazy)
    assert type(found) in (torch.Tensor, list) and torch.equal(torch.as_tensor(found), real)


def test_logits_are_made_in_the_modes_of_the_head():
    hidden, weight, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        lazy = of(Recording(hidden, weight))
        real = F.linear(hidden, weight)
    with torch.no_grad():
        made = lazy + 0
        assert made.dtype == torch.bfloat16 and torch.equal(made, real)
    assert lazy.make().requires_grad
    with torch.no_grad():
        without = of(Recording(hidden, weight))
    assert not without.requires_grad and not (without + 0).requires_grad


def assign_data(tensor):
    tensor.data = 2 * tensor.data


@pytest.mark.parametrize("changed", ["weight", "hidden"])
@pytest.mark.parametrize("change", [assign_data, lambda tensor: tensor.add_(1.0)])
def test_logits_looked_at_after_a_change_are_refused(changed, change):
    head, lazy, real = lazy_pair()
    seen = of(head)
    with torch.no_grad():
        change(getattr(head, changed))
    with pytest.raises(RuntimeError, match="an optimizer's step"):
        lazy.argmax(-1)
    assert not head.is_made and type(seen) is LazyLogits


def test_logits_that_were_made_before_a_step_stay():
    head, lazy, real = lazy_pair()
    assert torch.equal(lazy.detach(), real)
    with torch.no_grad():
        head.weight.add_(1.0)
    assert torch.equal(lazy.detach(), real)


@pytest.mark.parametrize("is_frozen", (True, False))
def test_backward_computes_no_gradient_that_nobody_needs(monkeypatch, is_frozen):
    """Of a weight that is frozen when the head is called, or when backward runs; as autograd of real logits."""
    gradients, made = [], []
    for lazy in (True, False):
        hidden, weight, _ = inputs()
        head = Recording(hidden, weight.requires_grad_(not is_frozen))
        monkeypatch.setattr(head, "gradients", lambda *args, of=head.gradients: made.append(of(*args)) or made[0])
        logits = of(head) if lazy else F.linear(hidden, weight)
        weight.requires_grad_(is_frozen)
        logits.square().sum().backward()
        gradients.append((hidden.grad, weight.grad))
    assert [grad is None for grad in made[0]] == [False, True]
    assert torch.equal(gradients[0][0], gradients[1][0]) and gradients[0][1] is gradients[1][1] is None


LATER = {
    "loss": lambda z: plain(z, torch.zeros(10, dtype=torch.int64)),
    "softmax": lambda z: z.softmax(-1),
    "slice": lambda z: z[:, :-1].float() + 0,
    "times": lambda z: (z * 2).view(-1, V) + 0,
    "clone": lambda z: z.clone() + 0,
    "make": lambda z: getattr(z, "make", z.clone)(),
    "compiled": torch.compile(lambda z: z.float().logsumexp(-1), backend="eager"),
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", LATER)
def test_logits_made_without_gradients_are_read_after_their_mode(read, mode):
    hidden, weight, _ = inputs()
    with mode():
        lazy, real = of(Recording(hidden, weight)), F.linear(hidden, weight)
    found = LATER[read](lazy)
    torch.testing.assert_close(found, LATER[read](real), rtol=1e-5, atol=1e-5)
    assert not found.requires_grad


def test_logits_that_are_scaled_without_gradients_have_none_later():
    head, lazy, _ = lazy_pair()
    with torch.no_grad():
        half = lazy / 2
    assert not half.requires_grad and not plain(half, torch.zeros(10, dtype=torch.int64)).requires_grad


@pytest.mark.parametrize("write", [lambda z: z.detach().fill_(7), lambda z: F.relu(z, inplace=True)])
def test_a_copy_does_not_see_what_is_written_later(write):
    head, lazy, real = lazy_pair()
    copied = lazy.clone()
    write(lazy)
    assert torch.equal(copied.detach(), real)


def test_an_optimizer_that_raises_no_version_is_noticed_by_the_loss_too():
    head, lazy, real = lazy_pair()
    other = of(Recording(*inputs()[:2]))
    head.weight.grad = torch.ones_like(head.weight)
    optimizer = torch.optim.AdamW([head.weight], fused=True)
    optimizer.step()
    for read in (lambda: lazy.argmax(-1), lambda: F.cross_entropy(lazy.view(-1, V), torch.zeros(10).long())):
        with pytest.raises(RuntimeError, match="an optimizer's step"):
            read()
    assert torch.equal(other.detach(), real)


def test_nothing_keeps_the_hidden_states():
    head, lazy, real = lazy_pair()
    dead = weakref.ref(head)
    lazy.float().view(-1, V)
    del head, lazy
    assert dead() is None


def test_the_softcap_matters_here():
    """A control: the other tests' logits are large enough that a lost softcap or scale is seen."""
    (loss, *_), (without, *_) = (both(with_gradients(each))[0] for each in (softcapped, plain))
    assert not math.isclose(loss, without, rel_tol=0.1)
