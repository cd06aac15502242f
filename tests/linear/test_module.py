"""The module of a fused projection and loss, and the heads that it shares or owns."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.cases.flat import LinearCrossEntropy
from tests.support.cases.inputs import IGNORE_INDEX
from tests.support.cases.linear import COLUMNS, WIDTH, Results, assert_right, projection
from tests.support.truth.budget import assert_within_budget


def _inputs(device, **settings):
    inputs = projection(**settings)
    return inputs, inputs.hidden.to(device).requires_grad_(), inputs.labels.to(device)


def _linear(inputs, device):
    head = nn.Linear(WIDTH, COLUMNS, bias=inputs.bias is not None)
    head.load_state_dict({name: getattr(inputs, name) for name in head.state_dict()})
    return head.to(device)


SHARED = {
    "linear": _linear,
    "embedding": lambda inputs, device: nn.Embedding.from_pretrained(inputs.weight.clone(), freeze=False).to(device),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", SHARED)
def test_a_head_that_is_shared_gets_its_gradient_and_stays_its_owners(impl_device, name):
    """A checkpoint that had it twice could not be loaded into a model that ties it."""
    impl, device = impl_device
    inputs, hidden, labels = _inputs(device, bias=True)
    head = SHARED[name](inputs, device)
    owner = nn.ModuleList([head])
    module = LinearCrossEntropy(head, impl=impl, label_smoothing=0.1, reduction="sum")
    assert [*owner.state_dict()][0] == "0.weight" and not module.state_dict() and not list(module.parameters())
    loss = module(hidden, labels, num_items=3)
    loss.backward()
    bias = getattr(head, "bias", None)
    inputs = inputs if bias is not None else inputs._replace(bias=None)
    results = Results((loss,), hidden.grad, head.weight.grad, None if bias is None else bias.grad)
    assert_right(results, inputs, label_smoothing=0.1, reduction="sum", num_items=3)


def test_a_head_of_its_own_is_in_its_state(impl_device):
    impl, device = impl_device
    for bias in (False, True):
        inputs, hidden, labels = _inputs(device, bias=bias)
        module = LinearCrossEntropy(None, in_features=WIDTH, columns=COLUMNS, bias=bias, impl=impl).to(device)
        state = module.state_dict()
        assert [tuple(value.shape) for value in state.values()] == [(COLUMNS, WIDTH), (COLUMNS,)][: 1 + bias]
        assert all(parameter.requires_grad for parameter in module.parameters())
        module.load_state_dict(dict(zip(state, (inputs.weight, inputs.bias), strict=False)))
        loss = module(hidden, labels)
        loss.backward()
        gradients = [parameter.grad for parameter in module.parameters()] + [None]
        assert_right(Results((loss,), hidden.grad, *gradients[:2]), inputs)


class TiedModel(nn.Module):
    """An embedding whose weight is the head of the loss as well."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(COLUMNS, WIDTH)
        self.loss = LinearCrossEntropy(self.embedding, **options)

    def forward(self, tokens, labels):
        return self.loss(self.embedding(tokens).tanh(), labels)


def _tied_losses(weight, tokens, labels):
    """PyTorch's loss and gradient of the weight in fp64, and in fp32."""
    for dtype in (torch.float64, torch.float32):
        leaf = weight.detach().cpu().to(dtype).requires_grad_()
        hidden = F.embedding(tokens.cpu(), leaf).tanh()
        loss = F.cross_entropy(F.linear(hidden, leaf).view(-1, COLUMNS), labels.cpu().view(-1))
        loss.backward()
        yield loss, leaf.grad


def _assert_tied(loss, gradient, *given):
    for actual, *expected in zip((loss, gradient), *_tied_losses(*given), strict=True):
        assert_within_budget(actual, *expected)


def test_a_tied_embedding_gets_the_gradient_of_both_of_its_uses(impl_device):
    impl, device = impl_device
    torch.manual_seed(0)
    model = TiedModel(impl=impl, chunk_size=2).to(device)
    tokens = torch.tensor([[3, 1, 4], [1, 5, 9]], device=device)
    labels = torch.tensor([[1, 4, IGNORE_INDEX], [5, 9, 2]], device=device)
    weight = model.embedding.weight
    loss = model(tokens, labels)
    loss.backward()
    _assert_tied(loss, weight.grad, weight, tokens, labels)
    assert list(model.state_dict()) == ["embedding.weight"]
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]


@pytest.mark.reference
def test_a_copy_of_a_model_shares_its_own_embedding():
    tokens = torch.tensor([3, 1, 4])
    model = TiedModel()
    twin = copy.deepcopy(model)
    twin(tokens, tokens).backward()
    assert model.embedding.weight.grad is None and twin.embedding.weight.grad.any()
    # What is cast, moved, or replaced is looked up anew.
    twin = twin.to(torch.bfloat16)
    twin(tokens, tokens).backward()
    twin.embedding.weight = nn.Parameter(torch.zeros(COLUMNS, WIDTH))
    loss = twin(tokens, tokens)
    loss.backward()
    assert twin.embedding.weight.grad is not None
    assert loss.item() == pytest.approx(torch.tensor(float(COLUMNS)).log().item())


SWAPS = {
    "load_state_dict": lambda head, new: head.load_state_dict({"weight": new}, assign=True),
    "assignment": lambda head, new: setattr(head, "weight", nn.Parameter(new)),
}


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.reference
def test_a_weight_in_the_place_of_the_first_is_the_one_that_is_trained(swap):
    inputs, hidden, labels = _inputs("cpu")
    head = SHARED["embedding"](inputs._replace(weight=torch.full_like(inputs.weight, 7.0)), "cpu")
    module, first = LinearCrossEntropy(head), head.weight
    SWAPS[swap](head, inputs.weight.clone())
    assert head.weight is not first
    loss = module(hidden, labels)
    loss.backward()
    assert first.grad is None
    assert_right(Results((loss,), hidden.grad, head.weight.grad, None), inputs)


@pytest.mark.reference
def test_functional_call_trains_the_weight_that_it_is_given():
    torch.manual_seed(0)
    model = TiedModel()
    tokens, labels = torch.tensor([3, 1, 4, 1]), torch.tensor([1, 4, IGNORE_INDEX, 2])
    new = torch.randn(COLUMNS, WIDTH, requires_grad=True)
    loss = torch.func.functional_call(model, {"embedding.weight": new}, (tokens, labels))
    loss.backward()
    assert model.embedding.weight.grad is None
    _assert_tied(loss, new.grad, new, tokens, labels)


class OfAModel(nn.Module):
    """A loss whose head is an attribute of the model too: before the loss is made, after it, or never."""

    def __init__(self, when):
        super().__init__()
        head = nn.Linear(WIDTH, COLUMNS, bias=False)
        if when == "before":
            self.head = head
        self.loss = LinearCrossEntropy(head)
        if when == "after":
            self.head = head

    def forward(self, hidden, labels):
        return self.loss(hidden, labels)


NAMES = {
    "never": ["loss.linear.weight"],
    "before": ["head.weight"],
    "after": ["loss.linear.weight", "head.weight"],
}


@pytest.mark.reference
@pytest.mark.parametrize("when", NAMES)
@pytest.mark.parametrize("way", (lambda model: model, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))))
def test_an_optimizer_moves_the_head_whoever_owns_it(when, way):
    """Copies and pickles too. A head that nobody owned was in no parameters(): it never moved."""
    model, inputs = OfAModel(when), projection()
    first = model.loss.head.weight.detach().clone()
    twin = way(model)
    assert list(twin.state_dict()) == NAMES[when] and len(list(twin.parameters())) == 1
    assert twin.loss.head.weight is next(twin.parameters())
    expected = F.linear(inputs.hidden.double(), leaf := first.double().requires_grad_())
    F.cross_entropy(expected, inputs.labels, ignore_index=IGNORE_INDEX).backward()
    twin(inputs.hidden, inputs.labels).backward()
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    assert torch.allclose(twin.loss.head.weight.double(), first.double() - 0.5 * leaf.grad, rtol=1e-5, atol=1e-6)
    assert twin is model or torch.equal(model.loss.head.weight, first)


OWNERS = {
    "ModuleList": lambda head: nn.ModuleList([head]),
    "Sequential": lambda head: nn.Sequential(nn.Identity(), head),
    "ModuleDict": lambda head: nn.ModuleDict({"head": head}),
    "a loss": LinearCrossEntropy,
}


@pytest.mark.reference
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("head", (lambda: nn.Linear(WIDTH, COLUMNS), lambda: nn.Embedding(COLUMNS, WIDTH)))
def test_a_head_is_the_losss_own_unless_a_module_has_it(name, head):
    """Not a dict, a list, a variable, nor a module that is gone."""
    head = head()
    holders = [head], {"_modules": head}, {"_modules": {"head": head}}
    owner = OWNERS[name](head)
    shared = LinearCrossEntropy(head)
    assert shared.head is head and not list(shared.parameters()) and head in owner.modules()
    del owner
    alone = LinearCrossEntropy(head)
    assert alone.linear is alone.head is head is holders[0][0] and list(alone.parameters()) == list(head.parameters())


@pytest.mark.reference
def test_nothing_looks_for_the_owner_of_what_is_no_head(monkeypatch):
    """Thousands of objects hold a small number: to look at each of them took minutes."""
    monkeypatch.setattr(gc, "get_referrers", lambda *objects: pytest.fail("looked for an owner"))
    with pytest.raises(TypeError, match=r"head: expected an nn.Linear or nn.Embedding, got int.*in_features"):
        LinearCrossEntropy(8)
