"""Rewritten forwards give the same numbers, and look like the old ones from outside; others are declined, and why."""

import functools
import inspect
import linecache
import textwrap
import traceback
from collections.abc import Callable
from types import MethodType
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vocab_parallel_ce.integrations.transformers.rewrite import Declined, Rewritten, rewrite, rewrite_source

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


class Model(nn.Module):
    """A model with logits that a softcap or a scale changes much."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.lm_head = nn.Embedding(V, 8), nn.Linear(8, V, bias=False)
        self.vocab_size, self.c, self.scale = V, 3.0, 0.3
        self.loss_function = causal_loss
        self.double()
        with torch.no_grad():
            self.lm_head.weight.mul_(10)

    def model(self, input_ids):
        return self.embed(input_ids).cumsum(1)


class Decorated(Model):
    _tag = "mine"

    def model(self, input_ids):
        return -super().model(input_ids)

    @with_tag
    @auto_docstring
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, tag: str = _tag, **kwargs) -> Output:
        """Text with
        two lines, the second at no indentation."""
        self.__secret = tag
        hidden = super(Decorated, self).model(input_ids) + super().model(input_ids)  # of the parent, twice  # noqa: UP008
        logits = self.lm_head(hidden) / self.scale
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
        return Output(loss=loss, logits=logits)


FORWARD = """\
def forward(self, input_ids, labels=None, **kwargs):
    hidden = self.model(input_ids)
    logits = self.lm_head(hidden)
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
    return Output(loss=loss, logits=logits)
"""
CAP = "loss = None\n    if self.c is not None:\n        logits = torch.tanh(logits / self.c) * self.c"
HEAD, NONE, GUARD = "logits = self.lm_head(hidden)", "loss = None", "if labels is not None:"
LOSS, RETURN = "loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)", "return Output("
REWRITTEN = {
    "plain": (),
    "sliced": (
        (HEAD, "logits = self.lm_head(hidden[:, slice(0, None), :].to(self.lm_head.weight.dtype)).to(torch.float64)"),
        ("(logits, labels, self.vocab_size,", "(logits=logits, labels=labels, vocab_size=V,"),
    ),
    "casts": (
        (
            HEAD,
            "lm_logits = self.lm_head(hidden).to(torch.float64).contiguous()\n"
            "    lm_logits = lm_logits.to(hidden.device)",
        ),
        (LOSS, "loss = self.loss_function(lm_logits, labels, vocab_size=self.vocab_size, other=1, **kwargs)"),
        (
            "return Output(loss=loss, logits=logits)",
            "output = (lm_logits,) + (7,)\n    return Output(*((loss,) + output))",
        ),
    ),
    "softcap": ((NONE, CAP),),
    "named softcap": ((NONE, CAP.replace("self.c", "c").replace("if c is", "if (c := self.c) is")),),
    "scale and softcap": (
        (
            HEAD,
            "logits = self.scale * self.lm_head(hidden) / 1.7\n"
            "    logits = nn.functional.tanh(logits / self.c) * self.c",
        ),
        (RETURN, "if labels is not None:\n        loss += 0.5\n    return Output("),
    ),
}


def model_of(name: str) -> type[Model]:
    """A model with a forward of ``REWRITTEN``, whose source ``inspect`` finds."""
    if name == "decorated":
        return Decorated
    source = FORWARD
    for old, new in REWRITTEN[name]:
        assert source.count(old) == 1
        source = source.replace(old, new)
    filename = f"<the forward: {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = dict(globals())
    exec(compile(source, filename, "exec"), namespace)
    return type("Made", (Model,), {"forward": namespace["forward"]})


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
@pytest.mark.parametrize("name", [*REWRITTEN, "decorated"])
def test_a_rewritten_forward_gives_the_same_numbers(name: str, arguments: dict) -> None:
    kind, inputs = model_of(name), {**batch(), **arguments}
    model, code = kind(), kind.forward.__code__
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
    assert kind.forward.__code__ is code, "rewrite must not change the class"


def test_a_softcap_that_is_off_is_none() -> None:
    for kind in (model_of("softcap"), model_of("named softcap")):
        model = kind()
        model.c = None
        expected, _ = loss_and_gradients(model, kind.forward, batch())
        got, _ = loss_and_gradients(model, rewritten(kind.forward).forward, batch())
        assert torch.equal(got.loss, expected.loss) and torch.equal(got.logits.make(), expected.logits)


def test_the_head_runs_only_to_make_the_logits_and_what_it_is_called_with_runs_once() -> None:
    calls = []
    model = model_of("plain")()
    model.lm_head.register_forward_hook(lambda *_: calls.append("head"))
    model.embed.register_forward_hook(lambda *_: calls.append("hidden"))
    new = rewrite(type(model).forward, lambda *_, **__: torch.zeros(()), stand_in_lazy)
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
    kind = model_of("scale and softcap")
    model, new = kind(), rewritten(kind.forward).forward
    expected, gradients = loss_and_gradients(model, kind.forward, batch())
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
    forward = model_of("plain").forward
    assert reason(with_tag(forward)).startswith("wrapped: ")
    assert reason(rewritten(forward).forward).startswith("rewritten before: ")
    for changed in (FORWARD.replace("self.model", "-self.model"), FORWARD.replace("loss = None", "loss = 1")):
        with monkeypatch.context() as patch:
            patch.setattr(inspect, "getsource", lambda _, changed=changed: changed)
            assert reason(forward).startswith("stale source: ")
    with monkeypatch.context() as patch:
        patch.delitem(globals(), "with_tag")
        assert reason(Decorated.forward).startswith("decorator: `@with_tag` cannot be applied again")


DECLINED = [
    ("no labels", "labels=None, ", ""),
    ("no loss", LOSS, "loss = 0"),
    ("several losses", LOSS, f"{LOSS}\n        {LOSS}"),
    ("aligned labels", LOSS, "loss = CrossEntropyLoss()(logits.view(-1, 9), labels.view(-1))"),
    ("inline loss", LOSS, "loss = F.cross_entropy(logits[:, :-1].view(-1, 9), labels[:, 1:].view(-1))"),
    ("several heads", f"{HEAD}\n    {NONE}\n    {GUARD}\n        {LOSS}", "logits = [h(hidden) for h in self.heads]"),
    ("composite", LOSS, "loss = self.compute_loss(logits, labels)"),
    ("composite", HEAD, "logits = self.lm_head(hidden, input_ids)"),
    ("composite", HEAD, "logits = self.lm_head(hidden) + self.other_head(hidden)"),
    ("composite", HEAD, "logits = self.model.lm_head(hidden)"),
    ("composite", HEAD, "logits = hidden @ self.lm_head.weight.T"),
    ("no head", HEAD, "scores = self.lm_head(hidden)"),
    ("head in a branch", HEAD, "if self.a: logits = self.lm_head(hidden)\n    else: logits = self.b(hidden)"),
    ("no guard", f"{GUARD}\n        {LOSS}", LOSS),
    ("no guard", f"{GUARD}\n        {LOSS}", f"{LOSS} if labels is not None else None"),
    ("nested guards", GUARD, "if labels is not None:\n      if self.training:"),
    ("guard: ", GUARD, "if labels is not None and self.training:"),
    ("guard: ", GUARD, "targets = labels\n    if targets is not None:"),
    ("else: ", LOSS, f"{LOSS}\n    else:\n        self.count = 0"),
    ("loss: expected one name", "loss = self.loss", "self.loss = self.loss"),
    ("loss: expected (logits", "self.vocab_size, ", "self.vocab_size, 9, "),
    ("loss: alongside", LOSS, f"labels = labels.clone()\n        {LOSS}"),
    ("aliased labels", "(logits, labels,", "(logits, targets,"),
    ("changed labels", NONE, "loss = None\n    labels = input_ids"),
    ("read or changed logits", LOSS, f"{LOSS}\n        loss = loss + logits.logsumexp(-1).mean()"),
    ("read or changed logits", "self.vocab_size", "logits.shape[-1]"),
    ("read or changed logits", "(logits, labels,", "(logits[:, 1:], labels,"),
    ("read or changed logits", NONE, "loss = None\n    logits = logits[..., :5]"),
    ("read or changed logits", NONE, "loss = None\n    logits = self.cap(logits)"),
    ("read or changed logits", NONE, "loss = None\n    logits = logits / logits.std()"),
    ("read or changed logits", NONE, "loss = None\n    logits = torch.tanh(logits)"),
    ("read or changed logits", NONE, "loss = None\n    logits = torch.tanh(logits / 3) * 4"),
    ("read or changed logits", NONE, "loss = None\n    logits = torch.tanh(logits / 3) * 3 * 2"),
    ("read or changed logits", NONE, "loss = None\n    best = logits.argmax(-1)"),
    ("read or changed logits", NONE, "loss = None\n    logits += 1"),
    ("read or changed logits", RETURN, "best = logits.argmax(-1)\n    return Output("),
    ("read or changed logits", RETURN, "logits[:, 0] = 0\n    return Output("),
    ("read or changed logits", RETURN, "del logits\n    return Output("),
    ("read or changed logits", "logits=logits)", "logits=logits.float())"),
    ("composite", "hidden = self.model(", "logits = hidden = self.model("),
    ("conditional logits", NONE, "loss = None\n    if self.scale is not None:\n        logits = logits * self.scale"),
    ("conditional logits", NONE, "loss = None\n    if self.c:\n        logits = torch.tanh(logits / self.c) * self.c"),
    ("conditional logits", NONE, f"{CAP}\n    else:\n        logits = logits * 2"),
    ("self.training", NONE, "loss = None\n    if not self.training:\n        logits = logits.float()"),
    ("between head and loss", NONE, "loss = None\n    self.count += 1"),
    ("between head and loss", NONE, "loss = None\n    last = kwargs.pop('last')"),
    ("changed operand", HEAD, "logits = self.lm_head(hidden) * scale\n    scale = 2"),
    ("changed operand", f"{HEAD}", "logits = self.lm_head(hidden) * labels\n    loss = 1\n    logits = logits * loss"),
    ("rewritten before", NONE, "_replay = loss = None"),
    ("layout", f"    {HEAD}", f"    a = 1; {HEAD}"),
    ("layout", HEAD, f'{HEAD}\n    note = """two\nlines"""'),
    ("no source", "def forward", "class forward"),
    ("no source", "return Output(", "return Output(("),
]


@pytest.mark.parametrize(("reason", "old", "new"), DECLINED, ids=[f"{i}-{case[0]}" for i, case in enumerate(DECLINED)])
def test_a_source_is_declined_for_a_reason(reason: str, old: str, new: str) -> None:
    assert not isinstance(rewrite_source(FORWARD), Declined) and FORWARD.count(old) == 1
    found = rewrite_source(FORWARD.replace(old, new))
    assert isinstance(found, Declined) and found.reason.startswith(reason), found
    indented = rewrite_source(textwrap.indent(FORWARD.replace(old, new), "    "))
    assert indented == found
