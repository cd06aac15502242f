"""The options of the modules are attributes: read, and used by the next call."""

import copy

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.cases import linear
from vocab_parallel_ce import LinearCrossEntropy, VocabParallelCrossEntropy

INPUTS = linear.projection("some_ignored", 6)
GIVEN = {"logits": (INPUTS.logits(), INPUTS.labels), "linear": (INPUTS.hidden, INPUTS.labels)}
FUNCTIONS = {
    "logits": vp.vocab_parallel_cross_entropy,
    "linear": lambda hidden, labels, **options: vp.linear_cross_entropy(hidden, INPUTS.weight, labels, **options),
}
SET = {
    "label_smoothing": 0.1,
    "z_loss": 0.02,
    "softcap": 5.0,
    "logit_scale": 0.5,
    "reduction": "none",
    "ignore_index": int(INPUTS.labels[0]),
    "class_weight": torch.linspace(0.5, 2.0, len(INPUTS.weight)),
}
pytestmark = pytest.mark.reference


@pytest.fixture(params=GIVEN)
def kind(request):
    return request.param


def module_of(kind, **options):
    if kind == "logits":
        return VocabParallelCrossEntropy(**options)
    return LinearCrossEntropy(torch.nn.Embedding.from_pretrained(INPUTS.weight), **options)


@pytest.mark.parametrize("is_compiled", (False, True))
def test_each_is_read_and_one_that_is_set_is_used_at_the_next_call(kind, is_compiled):
    module, function = module_of(kind, label_smoothing=0.3, vocab_size=len(INPUTS.weight)), FUNCTIONS[kind]
    assert (module.label_smoothing, module.z_loss, module.group, module.vocab_size) == (
        0.3,
        0.0,
        None,
        len(INPUTS.weight),
    )
    call, options = torch.compile(module, backend="eager") if is_compiled else module, {"label_smoothing": 0.3}
    assert torch.equal(call(*GIVEN[kind]), function(*GIVEN[kind], **options))
    for name, value in SET.items():
        setattr(module, name, value)
        options[name] = value
        assert getattr(module, name) is value
        assert torch.equal(call(*GIVEN[kind]), function(*GIVEN[kind], **options)), name
    assert "reduction='none'" in repr(module) and "softcap=5.0" in repr(module)
    assert copy.deepcopy(module).softcap == 5.0


def test_other_attributes_may_be_set_as_of_every_module(kind):
    """Frameworks keep what is theirs on modules."""
    module = module_of(kind)
    module.step, module.ds_id, module._hook, module.tag = 3, 1, None, torch.nn.Identity()
    module.forward = module.forward
    module.eval().train()
    assert module.step == 3 and not {*module.state_dict()} - {"linear.weight"}


def test_a_head_that_is_set_is_refused_at_the_call():
    """nn.Module would keep it as a submodule, and this one's head would stay."""
    module = module_of("linear")
    module.head = torch.nn.Linear(4, 8)
    with pytest.raises(TypeError, match="^head: expected when the module is made, got it as an attribute"):
        module(*GIVEN["linear"])


def test_a_subclass_has_attributes_of_its_own():
    class Own(VocabParallelCrossEntropy):
        def __init__(self):
            super().__init__(label_smoothing=0.1)
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.temperature, self.outputs = 2.0, ("lse",)

    module = Own()
    module.z_loss = 0.02
    assert (module.temperature, module.label_smoothing, module.z_loss) == (2.0, 0.1, 0.02)
    assert module(*GIVEN["logits"]).lse is not None
