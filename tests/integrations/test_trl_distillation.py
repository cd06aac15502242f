"""TRL's DistillationTrainer with this package's divergence: TRL's numbers, gradients and curves."""

import functools

import pytest
import torch

pytest.importorskip("trl", minversion="1.16")

import trl
from datasets import Dataset
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.trainer import distillation_trainer

from tests.integrations.test_trl import COLUMNS, STEPS, TOKENS, WIDTH, _model, _texts, _tokenizer, assert_same_curve
from vocab_parallel_ce.integrations import trl as fused

OWN_GKD = GKDTrainer.generalized_jsd_loss
OWN_DIVERGENCE = [distillation_trainer._chunked_divergence_loss]  # not by a name, which would be replaced too


@pytest.fixture(autouse=True)
def _trls_own_afterwards():
    yield
    fused.uninstall()
    assert [distillation_trainer._chunked_divergence_loss] == OWN_DIVERGENCE
    assert GKDTrainer.generalized_jsd_loss is OWN_GKD


@pytest.mark.reference
@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize("scales", [{}, {"student_final_logit_softcapping": 10.0, "teacher_logit_scale": 2.0}])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (1.0, 0.8), (0.3, 1.25)])
def test_distillation_has_trls_numbers(beta, temperature, scales, num_items):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, TOKENS, WIDTH), (2, TOKENS, 24), (COLUMNS, WIDTH), (COLUMNS, 24), (COLUMNS,), (COLUMNS,)
    *made, bias, teacher_bias = (torch.randn(shape, generator=generator) for shape in shapes)
    mask, found = torch.rand(2, TOKENS, generator=generator).gt(0.3).long(), []
    biases = {"student_lm_head_bias": bias, "teacher_lm_head_bias": teacher_bias, "temperature": temperature}
    fused.install()
    for function in (*OWN_DIVERGENCE, distillation_trainer._chunked_divergence_loss):
        hidden, teacher, weight, teacher_weight = made
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        heads = leaves[1], teacher_weight, mask, beta, num_items
        loss, *others = function(leaves[0], teacher, *heads, **biases, **scales)
        found.append([loss, *others, *torch.autograd.grad(loss, leaves)])
    assert fused.report().calls == {"distillation": 1}
    for value, own in zip(*reversed(found), strict=True):
        torch.testing.assert_close(value, own, rtol=2e-5, atol=2e-6)


@pytest.mark.reference
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_small_gradients_of_fp16_wait_for_the_loss_scale(beta):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).half() for shape in ((2, 9, 16), (2, 9, 8), (33, 16), (33, 8))]
    found = []
    fused.install()
    for function, dtype in ((*OWN_DIVERGENCE, torch.float64), (distillation_trainer._chunked_divergence_loss, None)):
        hidden, teacher, weight, teacher_weight = [tensor.to(dtype) for tensor in made]
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        loss, *_ = function(leaves[0], teacher, leaves[1], teacher_weight, torch.ones(2, 9), beta, 1e7)
        found.append(torch.autograd.grad(loss * 2.0**20, leaves))
    assert fused.report().calls == {"distillation": 1}
    for own, value in zip(*found, strict=True):
        torch.testing.assert_close(value.double(), own.double(), rtol=0, atol=2e-3 * float(own.abs().max()))


def gkd_inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    student, teacher = ((3 * torch.randn(2, TOKENS, COLUMNS, generator=generator)).to(dtype) for _ in range(2))
    labels = torch.where(torch.rand(2, TOKENS, generator=generator) > 0.3, 1, -100)
    return student, teacher, labels


@pytest.mark.reference
@pytest.mark.parametrize("num_items", [None, 11, torch.tensor(11)])
@pytest.mark.parametrize("reduction", ["batchmean", "sum"])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (1.0, 0.8), (0.3, 1.25)])
@pytest.mark.parametrize("has_labels", [True, False])
def test_gkd_has_trls_numbers(beta, temperature, reduction, num_items, has_labels):
    student, teacher, labels = gkd_inputs()
    found = []
    fused.install()
    for function in (OWN_GKD, GKDTrainer.generalized_jsd_loss, object.__new__(GKDTrainer).generalized_jsd_loss):
        leaf = student.clone().requires_grad_()
        given = {"beta": beta, "temperature": temperature, "reduction": reduction, "num_items_in_batch": num_items}
        loss = function(leaf * 1, teacher, labels if has_labels else None, **given)
        found.append((loss, *torch.autograd.grad(loss, leaf)))
    assert fused.report().calls == {"GKD": 2}
    for of_call in found[1:]:
        for value, own in zip(of_call, found[0], strict=True):
            torch.testing.assert_close(value, own, rtol=2e-5, atol=2e-6)


@pytest.mark.reference
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ((0.3, 1.5, "mean"), "GKD's reductions except batchmean and sum"),
        ((0.3, 1.5, "none"), "GKD's reductions except batchmean and sum"),
        ((0.3, -1.0, "batchmean", 7), "temperature, logit_scale or softcap that is not positive"),
    ],
)
def test_what_gkd_asks_for_beyond_a_tokens_divergence_is_left_to_trl(given, reason):
    student, teacher, labels = gkd_inputs()
    fused.install()
    found = GKDTrainer.generalized_jsd_loss(student, teacher, labels, *given)
    assert torch.equal(found, OWN_GKD(student, teacher, labels, *given))
    assert fused.report().calls == {reason: 1}


def perturbed_model():
    model, generator = _model(), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model


def gkd_trainer_of(common, beta):
    texts = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t}]} for t in _texts(3, 0)]
    args = GKDConfig(**common, max_new_tokens=4, beta=beta, lmbda=0.0, max_length=32)
    rows, tokenizer = Dataset.from_list(texts), _tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    return GKDTrainer(_model(), perturbed_model(), args, train_dataset=rows, processing_class=tokenizer)


def trainer_of(common, beta):
    rows, teacher = Dataset.from_list([{"prompt": text} for text in _texts(3, 0)]), perturbed_model()
    args = trl.DistillationConfig(**common, max_completion_length=4, beta=beta, temperature=0.9)
    return trl.DistillationTrainer(_model(), teacher, args, train_dataset=rows, processing_class=_tokenizer())


@pytest.mark.reference
@pytest.mark.parametrize("beta", [0.3, 1.0])
@pytest.mark.parametrize(("trainer", "counted"), [(trainer_of, "distillation"), (gkd_trainer_of, "GKD")])
def test_training_has_trls_curve(beta, trainer, counted, tmp_path):
    assert_same_curve(functools.partial(trainer, beta=beta), {counted: STEPS}, tmp_path)
