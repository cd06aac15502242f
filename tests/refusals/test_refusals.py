"""Wrong arguments of every public function: refused with their subject, before anything is changed."""

import contextlib

import pytest
import torch
from torch.utils._pytree import tree_leaves

import vocab_parallel_ce as vp
from tests.refusals import divergences, heads, labels, logits, objectives, others

pytestmark = pytest.mark.reference
TABLES = [*logits.TABLES, *heads.TABLES, *objectives.TABLES, *divergences.TABLES, *labels.TABLES, *others.TABLES]
CASES = [pytest.param(table, *row, id=table.id_of(row)) for table in TABLES for row in table.rows]


@pytest.mark.quick
@pytest.mark.parametrize(("table", "changed", "error", "message"), CASES)
def test_refused_before_anything_is_changed(table, changed, error, message):
    arguments = table.arguments(changed)
    kept = [(tensor, tensor.detach().clone()) for tensor in tree_leaves(arguments) if has_values(tensor)]
    versions = [None if tensor.is_inference() else tensor._version for tensor, _ in kept]
    with pytest.raises(error, match=f"^{message}") as raised:
        table.function(**arguments)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None
    for (tensor, before), version in zip(kept, versions, strict=True):
        assert tensor.is_inference() or tensor._version == version
        assert torch.equal(tensor, before)


def has_values(value):
    return type(value) in (torch.Tensor, torch.nn.Parameter) and not value.is_meta and not value.is_sparse


@pytest.mark.parametrize(
    "function",
    (
        *(vp.vocab_parallel_cross_entropy, vp.token_log_probs, vp.linear_cross_entropy, vp.distillation_loss),
        *(vp.VocabParallelCrossEntropy, vp.LinearCrossEntropy),
    ),
)
def test_an_unknown_name_is_refused_as_python_does(function):
    tensors = () if isinstance(function, type) else (logits.LOGITS, logits.LABELS)
    for how in (contextlib.nullcontext(), vp.verify_calls()):
        with how, pytest.raises(TypeError, match="got an unexpected keyword argument 'labels_smoothing'"):
            function(*tensors, labels_smoothing=0.1)
