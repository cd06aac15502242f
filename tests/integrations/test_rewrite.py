"""Rewritten forwards give the same numbers, and look like the old ones from outside."""

import functools
import inspect
import textwrap
import traceback
from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vocab_parallel_ce.integrations.transformers.rewrite import Declined, Rewritten, rewrite

pytestmark = pytest.mark.reference

V = 99


class Lazy(NamedTuple):
    """Stands for the lazy logits."""

    hidden: torch.Tensor
    make: Callable[[], torch.Tensor]


def stand_in_lazy(model, head, hidden, replay):
    return Lazy(hidden, replay)


def stand_in_loss(model, head, hidden, labels, *, logits, scale, softcap, **arguments):
    """Compute the loss from what was captured, with the model's own loss function."""
    assert isinstance(logits, Lazy)
    made = head(hidden)
    made = made if scale is None else made * scale
    made = made if softcap is None else softcap * torch.tanh(made / softcap)
    return model.loss_function(logits=made, labels=labels, **arguments)


def causal_loss(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_):
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    logits, shift_labels = logits.reshape(-1, vocab_size), shift_labels.reshape(-1)
    loss = F.cross_entropy(logits, shift_labels, ignore_index=ignore_index, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


class Output(NamedTuple):
    loss: torch.Tensor | None
    logits: torch.Tensor | Lazy
    extra: object = None


def with_tag(function):
    """A decorator that changes what is returned, as those of transformers do."""

    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs)._replace(extra="tag")

    return wrapper


def auto_docstring(function):
    function.__doc__ = "written by auto_docstring"
    return function


class Config(SimpleNamespace):
    def get(self, name):
        return getattr(self, name)


class Model(nn.Module):
    """A model with logits that a softcap or a scale changes much."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(V, 8), nn.Linear(8, V, bias=False)
        self.config = Config(vocab_size=V, cap=3.0, logits_scaling=1.7, logit_scale=0.3)
        self.loss_function = causal_loss
        self.double()
        with torch.no_grad():
            self.lm_head.weight.mul_(10)

    def trunk(self, input_ids):
        return self.embed(input_ids).cumsum(1)


class Plain(Model):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.trunk(input_ids)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        hidden = None
        return Output(loss=loss, logits=logits, extra=hidden)


class Sliced(Model):
    def forward(self, input_ids, *, labels=None, logits_to_keep=0, **kwargs):
        hidden = self.trunk(input_ids)
        loss = None
        logits = self.lm_head(hidden[:, slice(-logits_to_keep, None), :].to(self.lm_head.weight.dtype)).to(
            torch.float64
        )
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=V, **kwargs)
        return Output(loss=loss, logits=logits)


class Casts(Model):
    def forward(self, input_ids, labels=None, **kwargs):
        lm_logits = self.lm_head(self.trunk(input_ids)).to(torch.float64).contiguous()
        lm_logits = lm_logits.to(self.embed.weight.device)
        loss = None
        if labels is not None:
            loss = self.loss_function(lm_logits, labels, vocab_size=self.config.vocab_size, other=1, **kwargs)
        output = (lm_logits,) + ("extra",)
        return Output(*((loss,) + output)) if loss is not None else Output(None, *output)


class GuardedCap(Model):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.trunk(input_ids)
        logits = self.lm_head(hidden)
        if self.config.cap is not None:
            logits = logits / self.config.cap
            logits = torch.tanh(logits)
            logits = logits * self.config.cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return Output(loss=loss, logits=logits)


class NamedCap(Model):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.trunk(input_ids)
        logits = self.lm_head(hidden)
        if (cap := self.config.get("cap")) is not None:
            logits = logits / cap
            logits = torch.tanh(logits)
            logits = logits * cap
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return Output(loss=loss, logits=logits)


class ScaledCap(Model):
    def forward(self, input_ids, labels=None, **kwargs):
        hidden = self.trunk(input_ids)
        logits = self.config.logit_scale * self.lm_head(hidden) / self.config.logits_scaling
        cap = self.config.cap
        logits = nn.functional.tanh(logits / cap) * cap
        aux = None
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        if aux is None and labels is not None:
            loss += 0.5
        return Output(loss=loss, logits=logits)


class Decorated(Model):
    _tag = "mine"

    def trunk(self, input_ids):
        return -super().trunk(input_ids)

    @with_tag
    @auto_docstring
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, tag: str = _tag, **kwargs) -> Output:
        """Text with
        two lines, the second at no indentation."""
        self.__secret = tag
        hidden = super(Decorated, self).trunk(input_ids) + super().trunk(input_ids)  # of the parent, twice  # noqa: UP008
        logits = self.lm_head(hidden) / self.config.logits_scaling
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return Output(loss=loss, logits=logits)


PATTERNS = [Plain, Sliced, Casts, GuardedCap, NamedCap, ScaledCap, Decorated]


def rewritten(forward: Callable, loss: Callable = stand_in_loss) -> Rewritten:
    found = rewrite(forward, loss, stand_in_lazy)
    assert isinstance(found, Rewritten), found
    return found


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(V, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 5 == 0, -100)}


def loss_and_gradients(model: nn.Module, forward: Callable, inputs: dict) -> tuple:
    model.zero_grad()
    output = MethodType(forward, model)(**inputs)
    output.loss.backward()
    return output, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"num_items_in_batch": 9},
        {"num_items_in_batch": torch.tensor(9)},
        {"shift_labels": torch.arange(14).view(2, 7)},
        {"ignore_index": 3, "labels": torch.arange(14).view(2, 7)},
    ],
    ids=["plain", "int", "tensor", "shift_labels", "ignore_index"],
)
@pytest.mark.parametrize("kind", PATTERNS)
def test_a_rewritten_forward_gives_the_same_numbers(kind: type[Model], arguments: dict) -> None:
    model, inputs = kind(), {**batch(), **arguments}
    new = rewritten(kind.forward).forward
    output, gradients = loss_and_gradients(model, kind.forward, inputs)
    got, got_gradients = loss_and_gradients(model, new, inputs)
    torch.testing.assert_close(got.loss, output.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_gradients, gradients, rtol=1e-12, atol=1e-12)
    assert isinstance(got.logits, Lazy) and torch.equal(got.logits.make(), output.logits)
    assert got.extra == output.extra
    del inputs["labels"]
    inference, expected = MethodType(new, model)(**inputs), kind.forward(model, **inputs)
    assert inference.loss is None and torch.equal(inference.logits, expected.logits)
    assert kind.forward.__code__.co_filename == __file__, "rewrite must not change the class"


def test_a_softcap_that_is_off_is_none() -> None:
    for kind in (GuardedCap, NamedCap):
        model = kind()
        model.config.cap = None
        expected, _ = loss_and_gradients(model, kind.forward, batch())
        got, _ = loss_and_gradients(model, rewritten(kind.forward).forward, batch())
        assert torch.equal(got.loss, expected.loss) and torch.equal(got.logits.make(), expected.logits)


def test_the_head_runs_only_to_make_the_logits_and_what_it_is_called_with_runs_once() -> None:
    calls = []
    model = Casts()
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    model.embed.register_forward_hook(lambda *_: calls.append("hidden"))
    new = rewrite(Casts.forward, lambda *_, **__: torch.zeros(()), stand_in_lazy)
    output = MethodType(new.forward, model)(**batch())
    assert calls == ["hidden"]
    output.logits.make()
    assert calls == ["hidden", "head"]


def test_the_new_function_is_the_old_one_from_outside() -> None:
    new = rewritten(Decorated.forward).forward
    assert inspect.signature(new) == inspect.signature(Decorated.forward)
    assert inspect.signature(new).parameters["tag"].default == "mine"
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "__annotations__"):
        assert getattr(new, name) == getattr(Decorated.forward, name)
    assert new.__doc__ == "written by auto_docstring"
    assert inspect.unwrap(new).__globals__ is globals()
    model = Decorated()
    MethodType(new, model)(**batch())
    assert model._Decorated__secret == "mine"  # compiled in its class: private names and super() mean the same


def test_a_traceback_shows_the_new_source() -> None:
    def fails(*_, **__):
        raise RuntimeError("here")

    new = rewritten(Decorated.forward, fails)
    with pytest.raises(RuntimeError, match="here") as caught:
        MethodType(new.forward, Decorated())(**batch())
    frames = traceback.extract_tb(caught.value.__traceback__)
    frame = next(frame for frame in frames if frame.filename.startswith("<rewritten "))
    first = inspect.unwrap(new.forward).__code__.co_firstlineno
    lines = new.source.split("\n")
    assert frame.line == "loss = _fused_loss(" == lines[frame.lineno - 1].strip() and first == 1
    assert textwrap.dedent(inspect.getsource(new.forward)) == new.source
    assert "# of the parent, twice" in new.source and frame.name == "forward"


def test_compiled_as_one_graph() -> None:
    """Dynamo returns an object that holds a function: the logits are made outside of the graph."""
    model, new = ScaledCap(), rewritten(ScaledCap.forward).forward
    expected, gradients = loss_and_gradients(model, ScaledCap.forward, batch())
    compiled = torch.compile(new, fullgraph=True, backend="eager")
    got, got_gradients = loss_and_gradients(model, compiled, batch())
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got_gradients, gradients, rtol=1e-12, atol=1e-12)
    assert torch.equal(got.logits.make(), expected.logits)


def unwrapped_source(self, labels=None):
    logits = self.lm_head(self.hidden)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, not_yet_defined)  # noqa: F821
    return Output(loss=loss, logits=logits)


def test_a_function_that_cannot_be_made_again_is_declined(monkeypatch) -> None:
    def reason(forward: object) -> str:
        found = rewrite(forward, stand_in_loss, stand_in_lazy)
        assert isinstance(found, Declined)
        return found.reason

    namespace: dict = {}
    exec("def forward(self, labels=None): pass", namespace)
    assert reason(namespace["forward"]).startswith("no source: ")
    assert reason(len).startswith("no source: expected a function of Python")
    assert reason(unwrapped_source) == "unknown name: the module of forward has no `not_yet_defined`"
    assert reason(with_tag(Plain.forward)).startswith("wrapped: ")
    new = rewritten(Plain.forward).forward
    assert reason(new).startswith("rewritten before: ")
    text = inspect.getsource(Plain.forward)
    for changed in (text.replace("self.trunk", "-self.trunk"), text.replace("hidden = None", "hidden = 1")):
        with monkeypatch.context() as patch:
            patch.setattr(inspect, "getsource", lambda _, changed=changed: changed)
            assert reason(Plain.forward).startswith("stale source: ")
    with monkeypatch.context() as patch:
        patch.delitem(globals(), "with_tag")
        assert reason(Decorated.forward).startswith("decorator: `@with_tag` cannot be applied again")
