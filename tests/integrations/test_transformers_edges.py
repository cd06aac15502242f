"""Ways to call an installed model that are rare: hooks of all modules, nested calls, threads, wrong arguments."""

import sys
import threading

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

transformers = pytest.importorskip("transformers")

from vocab_parallel_ce.integrations.lazy_logits import LazyLogits  # noqa: E402
from vocab_parallel_ce.integrations.transformers import audit, install  # noqa: E402
from vocab_parallel_ce.integrations.transformers.patch import TRACED, WITHOUT_LABELS  # noqa: E402
from vocab_parallel_ce.integrations.transformers.tiny import tiny_inputs, tiny_model  # noqa: E402

pytestmark = pytest.mark.reference
Llama = transformers.LlamaForCausalLM


def replace_head(model):
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)


def replace_weight(model):
    model.lm_head.weight = nn.Parameter(2 * model.lm_head.weight.detach())


@pytest.mark.parametrize("mechanism", ["lazy", "rewrite"])
@pytest.mark.parametrize("replace", [replace_head, replace_weight])
def test_logits_are_those_of_the_head_that_was_called(llama, mechanism, replace):
    model, inputs = llama, tiny_inputs(llama)
    expected, head = model(**inputs).logits, model.lm_head.weight
    install(model, mechanism=mechanism)
    outputs = model(**inputs)
    replace(model)
    assert torch.equal(outputs.logits.detach(), expected)
    found, gradient = (torch.autograd.grad(z.logsumexp(-1).sum(), head)[0] for z in (outputs.logits, expected))
    assert torch.equal(found, gradient) and not torch.equal(model(**inputs).logits.detach(), expected)


@pytest.mark.parametrize("mechanism", ["lazy", "rewrite"])
def test_another_loss_of_the_logits_has_their_softcap(mechanism):
    model = tiny_model(transformers.Gemma2ForCausalLM)
    inputs = tiny_inputs(model)

    def loss():
        logits = model(**inputs).logits.flatten(0, 1)
        return nn.functional.cross_entropy(logits, inputs["labels"].flatten().clamp(min=0))

    expected = loss()
    install(model, mechanism=mechanism)
    torch.testing.assert_close(loss(), expected, rtol=1e-5, atol=0.0)


@pytest.fixture
def _switches_often():
    """Let threads take turns in the middle of a forward."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("_switches_often")
def test_threads_may_call_one_model(llama):
    """Two with labels, two without."""
    model, inputs = llama, tiny_inputs(llama)
    expected = model(**inputs)
    install(model)
    found, errors = [], []

    def run(labels):
        given = inputs if labels else {key: value for key, value in inputs.items() if key != "labels"}
        try:
            for _ in range(40):
                outputs = model(**given)
                if labels:
                    found.append(outputs.loss.item())
                is_lazy = isinstance(outputs.logits, LazyLogits)
                assert is_lazy == labels
                assert torch.equal(outputs.logits.detach(), expected.logits)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and found == pytest.approx([expected.loss.item()] * 80, rel=1e-6)
    assert audit(model)["fused"] == 80
    assert "_compiled_call_impl" not in vars(model.lm_head)


def test_the_head_stays_patched_while_a_thread_may_call_it(llama):
    model, inputs = llama, tiny_inputs(llama)
    install(model)

    def another_thread_trains(module, args):  # between this thread's look at the patch and its call, at worst
        handle.remove()
        thread = threading.Thread(target=lambda: model(**inputs))
        thread.start()
        thread.join()
        assert "_compiled_call_impl" in vars(model.lm_head)

    handle = model.model.layers[0].register_forward_pre_hook(another_thread_trains)
    assert not isinstance(model(inputs["input_ids"]).logits, LazyLogits)
    assert "_compiled_call_impl" not in vars(model.lm_head)


@pytest.mark.parametrize("mechanism", ["lazy", "rewrite"])
def test_calls_without_labels_count_if_they_train(llama, mechanism):
    model, (ids, *_) = llama, tiny_inputs(llama).values()
    install(Llama, mechanism=mechanism)
    model.train()
    with torch.no_grad():
        model(ids)
    model.eval()(ids)
    assert audit(model) == {}
    model.train()(ids)
    torch.compile(model, backend="eager", fullgraph=True)(ids)
    assert audit(model) == {WITHOUT_LABELS: 2}


class Loss(nn.Module):
    """A model for ``torch.jit.trace``, which takes tensors and returns them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        return self.model(ids, labels=labels, use_cache=False).loss


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_jit_trace_records_the_models_own_loss(llama):
    (ids, labels, *_) = tiny_inputs(llama).values()
    expected = Loss(llama)(ids, labels)
    install(llama)
    traced = torch.jit.trace(Loss(llama), (ids, labels), check_trace=False)
    torch.testing.assert_close(traced(ids, labels), expected, rtol=1e-5, atol=0.0)
    assert audit(llama) == {TRACED: 1}


def test_fake_tensors_run_the_models_own_loss(llama):
    install(llama)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        outputs = llama(**{name: mode.from_tensor(v) for name, v in list(tiny_inputs(llama).items())[:2]})
        assert outputs.loss.shape == () and outputs.logits.argmax(-1).shape == (2, 12)
    assert audit(llama) == {"hidden states without values, FakeTensor on cpu": 1}
