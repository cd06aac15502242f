"""TRL's fused head with this package's core: the numbers, gradients and training curves of TRL's own."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.budget import assert_within_budget
from tests.support.collectives import messages_of
from tests.support.ranks import in_ranks

pytest.importorskip("trl", minversion="1.16")

import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer import utils

from vocab_parallel_ce.integrations import trl as fused

in_two_ranks = in_ranks((2,), (), ())
TOKENS, WIDTH, COLUMNS = 7, 16, 33
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OURS = ("log_probs", "entropy", "mean_logits", "is_top1")
WITHOUT_MEAN = ("log_probs", "entropy", "is_top1")
OWN_NAMES = {name: getattr(utils, name) for name in ("_ChunkedLogProbFunction", "DTensor")}
OWN_CORE = OWN_NAMES["_ChunkedLogProbFunction"]
WORDS = [f"word{i}" for i in range(40)]
# Logged numbers that are times or sizes of the machine, or counts that are times a rate.
UNLIKE = ("runtime", "per_second", "time", "flos")


@pytest.fixture(autouse=True)
def _trls_own_afterwards():
    yield
    fused.uninstall()
    assert {name: getattr(utils, name) for name in OWN_NAMES} == OWN_NAMES


def _head(dtype=torch.float32, tokens=TOKENS, bias=True, seed=0):
    """Hidden states, weight, bias and labels. Half of the labels are predicted, and logits reach beyond 10."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, added = (
        (scale * torch.randn(*shape, generator=generator)).to(dtype)
        for scale, shape in ((1.5, (tokens, WIDTH)), (1.0, (COLUMNS, WIDTH)), (1.0, (COLUMNS,)))
    )
    logits = F.linear(hidden.double(), weight.double(), added.double() if bias else None)
    labels = torch.randint(COLUMNS, (tokens,), generator=generator)
    labels[::2] = logits.argmax(-1)[::2]
    return hidden, weight, added if bias else None, labels


def _by_name(values):
    return {name: value for name, value in zip(FIELDS, values, strict=True) if value is not None}


def _oracle(hidden, weight, bias, labels, temperature, softcap, logit_scale):
    z = F.linear(hidden, weight, bias) * logit_scale
    z = (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature
    log_p = z.log_softmax(-1)
    log_probs = log_p.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return {"log_probs": log_probs, "entropy": entropy, "mean_logits": z.mean(-1), "is_top1": z.argmax(-1) == labels}


def _results(core, head, outputs, temperature=1.0, softcap=None, logit_scale=1.0):
    """Outputs by name, and gradients by random ones of log_probs and entropy."""
    *leaves, labels = head
    leaves = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    if core is _oracle:
        found = _oracle(*leaves, labels, temperature, softcap, logit_scale)
        found = {name: found[name] for name in outputs}
    else:
        found = _by_name(core.apply(*leaves, labels, temperature, 20, softcap, logit_scale, outputs))
    generator = torch.Generator().manual_seed(1)
    grads = {name: torch.randn(len(labels), generator=generator) for name in ("log_probs", "entropy")}
    sum((found[name] * grads[name].to(found[name].dtype)).sum() for name in grads if name in found).backward()
    return found, {name: leaf.grad for name, leaf in zip(("hidden", "weight", "bias"), leaves, strict=True) if leaf is not None}


def _assert_close(actual, truth, peer, tokens):
    if tokens > 1:
        assert_within_budget(actual, truth, peer)
    else:
        torch.testing.assert_close(actual, truth.float(), rtol=1e-5, atol=1e-6)


def _assert_as_trl(head, outputs, **options):
    """Not worse than TRL's own core, beside fp64. The rounding of a single token has no budget: it is close."""
    fused.install()
    found, grads = _results(utils._ChunkedLogProbFunction, head, outputs, **options)
    assert fused.report().fused == 1 and not fused.report().own
    peer, peer_grads = _results(OWN_CORE, head, outputs, **options)
    in_fp64 = [t if t is None or not t.is_floating_point() else t.double() for t in head]
    truth, true_grads = _results(_oracle, in_fp64, outputs, **options)
    assert found.keys() == peer.keys() == set(outputs)
    for name in outputs:
        assert found[name].dtype == peer[name].dtype and found[name].requires_grad == peer[name].requires_grad, name
        if name == "is_top1":
            assert torch.equal(found[name], peer[name]) and torch.equal(found[name], truth[name])
        else:
            _assert_close(found[name], truth[name], peer[name], len(head[0]))
    assert grads.keys() == peer_grads.keys()
    for name, grad in grads.items():
        _assert_close(grad, true_grads[name], peer_grads[name], len(head[0]))
    return found


@pytest.mark.reference
@pytest.mark.parametrize("tokens", [TOKENS, 1, 0])
@pytest.mark.parametrize(
    ("outputs", "bias", "options"),
    [
        (("log_probs",), False, {}),
        (("log_probs", "entropy"), False, {"temperature": 0.7}),
        (WITHOUT_MEAN, False, {"softcap": 5.0}),
        (("log_probs", "is_top1"), True, {"logit_scale": 0.25}),
        (OURS, True, {}),
        (OURS, True, {"temperature": 0.7, "logit_scale": 1.5}),
        (WITHOUT_MEAN, True, {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.5}),
    ],
    ids=["plain", "temperature", "softcap", "scale", "bias", "temperature and scale", "all"],
)
def test_core_is_trls(outputs, bias, options, tokens):
    found = _assert_as_trl(_head(tokens=tokens, bias=bias), outputs, **options)
    if "is_top1" in outputs and tokens == TOKENS:
        assert 0 < int(found["is_top1"].sum()) < TOKENS


@pytest.mark.reference
def test_bf16_is_trls():
    _assert_as_trl(_head(torch.bfloat16), OURS, temperature=0.7)


@pytest.mark.reference
def test_the_first_of_equal_logits_is_top1():
    hidden, weight, _, labels = _head(bias=False)
    weight[1], weight[30] = 5 * hidden[0], 5 * hidden[0]
    head = hidden[:1].repeat(2, 1), weight, None, torch.tensor([1, 30])
    assert _assert_as_trl(head, WITHOUT_MEAN)["is_top1"].tolist() == [True, False]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("reason", "outputs", "options"),
    [
        ("outputs", FIELDS, {}),
        ("mean_logits", OURS, {"softcap": 5.0}),
        ("positive", OURS, {"logit_scale": -1.0}),
        ("positive", OURS, {"logit_scale": 0.0}),
        ("positive", ("log_probs",), {"softcap": 0.0}),
        ("positive", ("log_probs",), {"temperature": -0.5}),
        ("ZeRO-3", OURS, {}),
    ],
)
def test_what_is_left_to_trl_is_counted_and_its_own_to_the_bit(reason, outputs, options):
    fused.install()
    hidden, weight, bias, labels = _head()
    if reason == "ZeRO-3":
        weight.ds_id = 1
    given = hidden, weight, bias, labels, options.get("temperature", 1.0), 20
    given += options.get("softcap"), options.get("logit_scale", 1.0), outputs
    found, own = (_by_name(core.apply(*given)) for core in (utils._ChunkedLogProbFunction, OWN_CORE))
    assert found.keys() == own.keys() == set(outputs)
    assert all(torch.equal(found[name], own[name]) for name in own)
    report = fused.report()
    assert report.fused == 0 and list(report.own.values()) == [1] and reason in next(iter(report.own))
    assert set(report.own) <= set(report.left_to_trl)


@pytest.mark.reference
def test_install_twice_is_once_and_uninstall_restores():
    fused.uninstall()
    first = fused.install()
    replaced = {name: getattr(utils, name) for name in OWN_NAMES}
    assert first.installed and not set(replaced.values()) & set(OWN_NAMES.values())
    assert fused.install() == first and {name: getattr(utils, name) for name in OWN_NAMES} == replaced
    fused.uninstall()
    assert {name: getattr(utils, name) for name in OWN_NAMES} == OWN_NAMES and not fused.report().installed


@pytest.mark.reference
def test_what_something_else_replaced_is_not_undone(monkeypatch):
    fused.install()
    with monkeypatch.context() as patch:
        patch.setattr(utils, "_ChunkedLogProbFunction", OWN_CORE)
        patch.setattr(utils, "DTensor", None)
        with pytest.raises(RuntimeError, match=r"trl\.trainer\.utils\._ChunkedLogProbFunction: something else"):
            fused.uninstall()


@pytest.mark.reference
def test_another_fused_head_is_refused(monkeypatch):
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", torch.autograd.Function)
    with pytest.raises(ValueError, match=r"trl: expected the fused head of TRL 1\.16, got another in TRL 1\."):
        fused.install()
    assert not fused.report().installed


def _model(dtype=torch.float32, seed=0, **config):
    torch.manual_seed(seed)
    sizes = {"vocab_size": len(WORDS) + 3, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**sizes, **ids, num_attention_heads=2, initializer_range=0.3, **config)
    return LlamaForCausalLM(config).to(dtype)


def _forward(model, labels, is_installed, **settings):
    """The fields of a fused forward, and the gradients of the parameters."""
    model = copy.deepcopy(model)
    (fused.install if is_installed else fused.uninstall)()
    utils.add_fused_lm_head(model, outputs=OURS, **settings)
    found = model(input_ids=labels.clamp(min=0), labels=labels, fused_lm_head=True)
    (found.loss + 0.1 * found.entropy.sum()).backward()
    return found, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.reference
@pytest.mark.parametrize("compact", [False, True], ids=["all tokens", "compact"])
@pytest.mark.parametrize("ignored", ["some", "all"])
@pytest.mark.parametrize(
    ("settings", "dtype", "autocast"),
    [
        ({"temperature": 0.7}, torch.float32, False),
        ({"temperature": 0.7}, torch.float32, True),
        ({"cast_lm_head_to_fp32": True}, torch.bfloat16, True),
        ({"cast_lm_head_to_fp32": True}, torch.bfloat16, False),
    ],
    ids=["fp32", "autocast", "cast in autocast", "cast"],
)
def test_fused_forward_is_trls(monkeypatch, settings, dtype, autocast, ignored, compact):
    monkeypatch.setattr(utils, "_use_triton", lambda device: compact)
    labels = torch.randint(3, len(WORDS), (2, 9), generator=torch.Generator().manual_seed(3))
    labels[0, :4] = -100
    labels = labels if ignored == "some" else torch.full_like(labels, -100)
    model = _model(dtype, logit_scale=1.25)
    # The products of bf16 round logits. TRL rounds the mean of those, this package one of exact logits.
    tolerance = 1e-2 if autocast and "temperature" in settings else 1e-3 if dtype == torch.bfloat16 else 1e-5
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own, own_grads = _forward(model, labels, False, **settings)
        found, grads = _forward(model, labels, True, **settings)
    assert fused.report().fused == 1 and not fused.report().own
    for name in ("loss", *OURS, "label_mask"):
        torch.testing.assert_close(found[name], own[name], rtol=tolerance, atol=tolerance)
    assert grads.keys() == own_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, own_grads[name], rtol=tolerance, atol=tolerance)


def _tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _texts(n, words, seed):
    picks = torch.randint(len(WORDS), (n, words), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(WORDS[i] for i in row) for row in picks]


def _even_words(completions, **_):
    return [float(sum(int(word[4:]) % 2 == 0 for word in text.split() if word in WORDS)) for text in completions]


def _sft(common):
    rows = Dataset.from_list([{"text": text} for text in _texts(20, 7, 0)])
    args = trl.SFTConfig(**common, max_length=16)
    return trl.SFTTrainer(_model(), args, train_dataset=rows, processing_class=_tokenizer())


def _dpo(common):
    columns = zip(_texts(20, 3, 0), _texts(20, 4, 1), _texts(20, 5, 2), strict=True)
    rows = Dataset.from_list([{"prompt": p, "chosen": " " + c, "rejected": " " + r} for p, c, r in columns])
    args = trl.DPOConfig(**common, max_length=16)
    return trl.DPOTrainer(_model(), _model(), args, train_dataset=rows, processing_class=_tokenizer())


def _grpo(common):
    rows = Dataset.from_list([{"prompt": text} for text in _texts(20, 3, 0)])
    of_rewards = {"num_generations": 2, "max_completion_length": 4, "temperature": 0.7, "entropy_coef": 0.01}
    args = trl.GRPOConfig(**common, **of_rewards)
    return trl.GRPOTrainer(_model(), _even_words, args, train_dataset=rows, processing_class=_tokenizer())


def _curve(make, folder):
    """Every number that is logged in 10 steps, and the parameters afterwards."""
    common = {"output_dir": str(folder), "max_steps": 10, "per_device_train_batch_size": 2, "learning_rate": 1e-2}
    common |= {"logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = make({**common, "use_cpu": True, "bf16": False, "gradient_checkpointing": False})
    trainer.train()
    logged = [
        {name: value for name, value in step.items() if not any(word in name for word in UNLIKE)}
        for step in trainer.state.log_history
        if "loss" in step
    ]
    return logged, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.reference
@pytest.mark.parametrize(
    ("make", "calls", "moves"),
    [(_sft, 10, "loss"), (_dpo, 20, "loss"), (_grpo, 10, "grad_norm")],
    ids=["SFT", "DPO", "GRPO"],
)
def test_ten_steps_have_the_same_curve(make, calls, moves, tmp_path):
    own, own_parameters = _curve(make, tmp_path / "own")
    fused.install()
    found, parameters = _curve(make, tmp_path / "fused")
    assert fused.report().fused == calls and not fused.report().own
    assert len(own) == len(found) == 10 and own[0][moves] != own[-1][moves]
    for step, own_step in zip(found, own, strict=True):
        assert step == pytest.approx(own_step, rel=1e-4, abs=1e-5)
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter, own_parameters[name], rtol=1e-4, atol=1e-5)
