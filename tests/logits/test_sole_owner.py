"""By default backward writes over the logits exactly if nobody else can see them, and nothing anybody reads changes."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.testing._internal.logging_tensor import LoggingTensor
from torch.testing._internal.two_tensor import TwoTensor

import vocab_parallel_ce as vp
from tests.integrations.test_transformer_engine import on_each_device  # Triton's interpreter runs in one thread
from tests.support.truth.budget import assert_within_budget
from vocab_parallel_ce import in_place

ROWS, WIDTH, COLUMNS = 6, 8, 40


class Produced(torch.autograd.Function):
    """Passes logits on in memory of their own, and notes whether their gradient comes back in it."""

    @staticmethod
    def forward(ctx, x, places):
        out = x.clone()
        ctx.address, ctx.places = out.data_ptr(), places
        return out

    @staticmethod
    def backward(ctx, grad):
        ctx.places.append(grad.data_ptr() == ctx.address)
        return grad, None


class Program:
    """A model whose logits a test may keep; ``held`` is whatever the test keeps until backward is over."""

    def __init__(self, impl_device, function="loss"):
        self.impl, device = impl_device
        generator = torch.Generator().manual_seed(5)
        made = (torch.randn(shape, generator=generator) for shape in ((ROWS, WIDTH), (COLUMNS, WIDTH)))
        self.hidden, weight = (t.to(device) for t in made)
        self.weight = weight.requires_grad_()
        self.labels = (self.hidden @ self.weight.t()).argmax(-1)  # accuracy 1
        self.targets = torch.rand(ROWS, COLUMNS, generator=generator).softmax(-1).to(device)
        self.function, self.places, self.held, self.factor = function, [], [], 1.0

    def logits(self):
        return Produced.apply(self.hidden @ self.weight.t(), self.places)

    def loss(self, logits, **options):
        loss = self._loss(logits, impl=self.impl, **options)
        if self.impl == "triton":
            gc.collect()  # the interpreter's launches hold their tensors in cycles
        return loss

    def _loss(self, logits, **options):
        labels, targets = self.labels.view(logits.shape[:-1]), self.targets.view(logits.shape)
        if self.function == "log_probs":
            return -vp.token_log_probs(logits, labels, **options).mean()
        if self.function == "distillation":
            return vp.distillation_loss(logits, targets.log(), **options)
        return vp.vocab_parallel_cross_entropy(logits, labels, **options)

    def expected(self, dtype):
        weight = self.weight.detach().to(dtype).requires_grad_()
        logits = self.hidden.to(dtype) @ weight.t()
        if self.function == "distillation":
            loss = F.cross_entropy(logits, self.targets.to(dtype))
        else:
            loss = F.cross_entropy(logits, self.labels)
        (grad,) = torch.autograd.grad(loss * self.factor, weight)
        return grad

    def check(self, *places):
        """The gradient is right, and where backward put it is ``places``."""
        assert_within_budget(self.weight.grad, self.expected(torch.float64), self.expected(torch.float32))
        assert tuple(self.places) == places


def holds(keep):
    """Return a program in which something else than a variable keeps what ``keep(logits)`` returns."""

    def run(program):
        logits = program.logits()
        loss = program.loss(logits)
        program.held.append(keep(logits))
        del logits
        loss.backward()

    return run


def in_a_thread(program):
    loss = program.loss(program.logits())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def with_hook(program):
    logits = program.logits()
    logits.register_hook(lambda grad: grad)
    logits.retain_grad()
    loss = program.loss(logits)
    del logits
    loss.backward()


def two_losses(program):
    logits, program.factor = program.logits(), 3.0
    total = program.loss(logits) + 2 * program.loss(logits)
    del logits
    total.backward()


def saved_and_later(program):
    """The product saves the logits, and its backward runs after the loss's: nodes run youngest first."""
    logits = program.logits()
    other = (logits * logits).sum() * 0
    total = program.loss(logits) + other
    del logits
    total.backward()


def kept_graph(program):
    loss, program.factor = program.loss(program.logits()), 2.0
    loss.backward(retain_graph=True)
    loss.backward()


def view_with_its_base(program):
    base = program.logits()
    program.loss(base.view(2, 3, COLUMNS)).backward()


class View(torch.autograd.Function):
    """Returns a view of a tensor that is in no graph, as ``DTensor.to_local`` does."""

    @staticmethod
    def forward(ctx, x):
        return x.detach().view_as(x)

    backward = staticmethod(lambda ctx, grad: grad)


def chunks(program):
    logits = program.logits()
    losses = []
    for rows in range(0, ROWS, 2):
        part = copy.copy(program)
        part.labels, part.targets = program.labels[rows : rows + 2], program.targets[rows : rows + 2]
        losses.append(part.loss(logits[rows : rows + 2]) / 3)
    del logits
    sum(losses).backward()


def weakly_held_base(program):
    base = program.logits()
    loss = program.loss(base.view(2, 3, COLUMNS))
    program.held.append(weakref.ref(base))
    del base
    loss.backward()


def frozen_by_a_closure(program):
    logits = program.logits()
    loss = program.loss(logits)
    program.held.append(lambda: logits.argmax(-1))
    loss.backward()
    assert torch.equal(program.held[0](), program.labels)


class KeepsOnItsContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.x = x
        return x.sum() * 0

    @staticmethod
    def backward(ctx, grad):
        return torch.zeros_like(ctx.x)


def kept_by_a_function(program):
    logits = program.logits()
    other = KeepsOnItsContext.apply(logits)
    loss = program.loss(logits) + other
    del logits
    loss.backward()


def profiled(program):
    with torch.autograd.profiler.profile():
        program.loss(program.logits()).backward()


# What a program does, and where backward puts its gradients.
IN_PLACE = {
    "nobody": lambda program: program.loss(program.logits()).backward(),
    "a hook": with_hook,
    "another thread": in_a_thread,
    "a copy": holds(torch.clone),
    "views": lambda program: program.loss(program.logits().view(1, ROWS, COLUMNS)).backward(),
    "a view of a view": lambda p: p.loss(p.logits().view(2, 3, -1).transpose(0, 1).transpose(0, 1)).backward(),
    "a profiler": profiled,
    "anomaly mode": lambda program: program.loss(program.logits()).backward(),
}
IN_NEW_TENSORS = {
    "a variable": holds(lambda logits: logits),
    "a list": holds(lambda logits: [logits]),
    "a closure": frozen_by_a_closure,
    "detach": holds(torch.Tensor.detach),
    ".data": holds(lambda logits: logits.data),
    "numpy": holds(lambda logits: logits.detach().numpy() if logits.device.type == "cpu" else logits.detach()),
    "dlpack": holds(lambda logits: torch.utils.dlpack.to_dlpack(logits.detach())),
    "the storage": holds(torch.Tensor.untyped_storage),
    "a view": holds(lambda logits: logits[0]),
    "a weak reference": holds(weakref.ref),
    "a weak reference to the storage": holds(lambda logits: weakref.ref(logits.untyped_storage())),
    "a weak reference to a base": weakly_held_base,
    "a base": view_with_its_base,
    "a context": kept_by_a_function,
    "a view of a tensor in no graph": lambda program: program.loss(View.apply(program.logits())).backward(),
}
SEVERAL = {
    "two losses": (two_losses, (False,)),
    "saved by another operation": (saved_and_later, (False,)),
    "a kept graph": (kept_graph, (False, True)),
    "chunks": (chunks, (False,)),
}


@pytest.mark.interpreted(3)
@pytest.mark.parametrize("function", ("loss", "log_probs", "distillation"))
@pytest.mark.parametrize("owner", (*IN_PLACE, *IN_NEW_TENSORS))
def test_logits_are_overwritten_exactly_if_nobody_sees_them(impl_device, owner, function):
    """Accuracy after backward was 0, and 1 once the loss was compiled."""
    program = Program(impl_device, function)
    with torch.autograd.set_detect_anomaly(owner == "anomaly mode"):
        (IN_PLACE | IN_NEW_TENSORS)[owner](program)
    if function == "distillation":
        program.targets = program.targets.log().softmax(-1)
    program.check(owner in IN_PLACE)
    if owner in ("a variable", "detach", ".data"):
        assert torch.equal(program.held[0].argmax(-1), program.labels)


@pytest.mark.reference
@pytest.mark.parametrize("is_view", (False, True))
@pytest.mark.parametrize("wrapper", (TwoTensor, LoggingTensor))
def test_a_tensor_that_a_subclass_wraps_keeps_its_values(wrapper, is_view):
    leaf = wrapper(*(torch.randn(ROWS, COLUMNS) for _ in range(2 if wrapper is TwoTensor else 1))).requires_grad_()
    logits = leaf * 1
    wrapped = logits.a if wrapper is TwoTensor else logits.elem
    before = wrapped.clone()
    labels = torch.arange(ROWS)
    if is_view:
        logits, labels = logits.view(2, 3, COLUMNS), labels.view(2, 3)
    loss = vp.vocab_parallel_cross_entropy(logits, labels)
    del logits
    loss.backward()
    assert torch.equal(wrapped, before) and leaf.grad is not None


@pytest.mark.parametrize("case", SEVERAL)
def test_several_users_of_the_logits(impl_device, case):
    run, places = SEVERAL[case]
    program = Program(impl_device)
    run(program)
    program.check(*places)


def test_one_of_two_losses_is_the_last_to_see_them(impl_device):
    """The first backward writes a new tensor, and the second over the logits. It was an error."""
    program = Program(impl_device)
    logits, program.factor = program.logits(), 2.0
    first, second = program.loss(logits), program.loss(logits)
    del logits
    second.backward(retain_graph=True)
    del second
    gc.collect()  # of backward too
    first.backward()
    program.check(False, True)


@pytest.mark.reference
def test_a_metric_after_backward_is_the_same_with_and_without_the_compiler():
    """It printed 1.0, 0.0, 1.0."""
    program = Program(("auto", "cpu"))
    compiled = torch.compile(lambda z: vp.vocab_parallel_cross_entropy(z, program.labels), backend="aot_eager")
    for function in (lambda z: F.cross_entropy(z, program.labels), program.loss, compiled):
        z = program.hidden @ program.weight.t()
        kept = z.detach()
        function(z).backward()
        assert torch.equal(kept.argmax(-1), program.labels)


class Keeps(TorchFunctionMode):
    """Holds every tensor that a function returns."""

    def __init__(self):
        super().__init__()
        self.held = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.held.append(found)
        return found


@pytest.mark.reference
def test_a_first_call_under_a_function_mode_measures_nothing_wrong(monkeypatch):
    """The mode's references counted as nobody's: from then on logits that a variable held were overwritten."""
    monkeypatch.setattr(in_place, "alone", [])
    first, second = Program(("auto", "cpu")), Program(("auto", "cpu"))
    with Keeps():
        first.loss(first.logits()).backward()
    IN_NEW_TENSORS["a variable"](second)
    second.check(False)


@pytest.mark.reference
def test_another_process_may_see_shared_memory():
    program = Program(("auto", "cpu"))
    logits = program.logits()
    logits.detach().share_memory_()  # as a queue between processes does; it moves the memory
    address, found = logits.data_ptr(), []
    logits.register_hook(lambda grad: found.append(grad.data_ptr() == address))
    loss = program.loss(logits)
    del logits
    loss.backward()
    assert found == [False]


@pytest.mark.parametrize("case", ("a tracer", "no private function", "a free-threaded Python", "never measured"))
@pytest.mark.reference
def test_what_cannot_be_counted_is_not_overwritten(monkeypatch, case):
    program = Program(("auto", "cpu"))
    if case == "no private function":
        monkeypatch.setattr(in_place, "keeps_graph", None)
    elif case == "a free-threaded Python":
        monkeypatch.setattr(in_place, "_has_gil", False)
    monkeypatch.setattr(in_place, "alone", [])
    if case == "a tracer":
        monkeypatch.setattr("sys.gettrace", lambda: print)
    elif case == "never measured":
        monkeypatch.setattr(in_place, "measure", lambda: None)
    program.loss(program.logits()).backward()
    program.check(False)


@on_each_device
def test_threads_at_once(impl_device):
    """Counts are of objects, so other threads' logits do not disturb them, nor do they see each other's."""
    programs = [Program(impl_device) for _ in range(4)]

    def train(program):
        for _ in range(10):
            program.weight.grad = None
            program.loss(program.logits()).backward()

    threads = [threading.Thread(target=train, args=(program,)) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for program in programs:
        program.check(*[True] * 10)


@pytest.mark.nccl
def test_replicas_of_data_parallel():
    """Each replica is in a thread of its own, and its logits are gathered into new ones."""
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, COLUMNS).cuda()
    hidden, labels = torch.randn(ROWS, WIDTH, device="cuda"), torch.arange(ROWS, device="cuda")
    logits = nn.DataParallel(model, [0, 1])(hidden)
    vp.vocab_parallel_cross_entropy(logits, labels).backward()
    found = model.weight.grad.clone()
    torch.testing.assert_close(logits, model(hidden))
    model.zero_grad()
    F.cross_entropy(model(hidden), labels).backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=1e-4, atol=1e-6)
