"""TRL's fused head with this package's core: the numbers, gradients and training curves of TRL's own."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.support.ranks.collectives import assert_refused, error_of, messages_of
from tests.support.ranks.pools import in_ranks
from tests.support.truth.budget import assert_within_budget

pytest.importorskip("trl", minversion="1.16")

import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.trainer import utils

from vocab_parallel_ce.integrations import trl as fused

in_two_ranks = in_ranks((2,), (), ())
TOKENS, WIDTH, COLUMNS, STEPS = 7, 16, 33, 6
FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
OWN_NAMES = {name: getattr(utils, name) for name in ("_ChunkedLogProbFunction", "DTensor")}
OWN_CORE = OWN_NAMES["_ChunkedLogProbFunction"]
WORDS = [f"word{i}" for i in range(40)]


@pytest.fixture(autouse=True)
def _trls_own_afterwards():
    yield
    fused.uninstall()
    assert {name: getattr(utils, name) for name in OWN_NAMES} == OWN_NAMES


def _head(dtype=torch.float32, tokens=TOKENS, bias=True):
    """Hidden states, weight, bias and labels. Half of the labels are predicted, and logits reach beyond 10."""
    generator = torch.Generator().manual_seed(0)
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


def _logits(hidden, weight, bias, temperature=1.0, softcap=None, logit_scale=1.0):
    z = F.linear(hidden, weight, bias) * logit_scale
    return (z if softcap is None else softcap * torch.tanh(z / softcap)) / temperature


def _oracle(hidden, weight, bias, labels, *options):
    z = _logits(hidden, weight, bias, *options)
    log_p = z.log_softmax(-1)
    log_probs = log_p.gather(-1, labels[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    results = {"log_probs": log_probs, "entropy": entropy, "log_sum_sq_probs": (2 * log_p).logsumexp(-1).detach()}
    return {**results, "mean_logits": z.mean(-1).detach(), "is_top1": z.argmax(-1) == labels}


def _results(core, head, outputs, temperature=1.0, softcap=None, logit_scale=1.0):
    """Outputs by name, and gradients by random ones of log_probs and entropy."""
    *leaves, labels = head
    leaves = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    if core is _oracle:
        found = _oracle(*leaves, labels, temperature, softcap, logit_scale)
        found = {name: found[name] for name in outputs}
    else:
        found = _by_name(core.apply(*leaves, labels, temperature, 20, softcap, logit_scale, outputs))
    seed = torch.Generator().manual_seed(1)
    grads = {name: torch.randn(len(labels), generator=seed) for name in ("log_probs", "entropy")}
    sum((found[name] * grads[name].to(found[name].dtype)).sum() for name in grads if name in found).backward()
    named = zip(("hidden", "weight", "bias"), leaves, strict=True)
    return found, {name: leaf.grad for name, leaf in named if leaf is not None}


def _assert_same(found, own, tolerance=1e-5):
    """Fail unless each of both differs by at most ``tolerance`` of the largest element."""
    assert found.keys() == own.keys()
    for name, value in found.items():
        actual, expected = value.detach().double(), own[name].detach().double()
        assert actual.shape == expected.shape, name
        if actual.numel():
            assert float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max()), name


def _assert_as_trl(head, outputs, **options):
    """Not worse than TRL's own core, beside fp64."""
    fused.install()
    found, grads = _results(utils._ChunkedLogProbFunction, head, outputs, **options)
    assert fused.report().calls == {"fused": 1}
    peer, peer_grads = _results(OWN_CORE, head, outputs, **options)
    in_fp64 = [t if t is None or not t.is_floating_point() else t.double() for t in head]
    truth, true_grads = _results(_oracle, in_fp64, outputs, **options)
    assert found.keys() == peer.keys() == set(outputs) and grads.keys() == peer_grads.keys()
    assert [found[name].requires_grad for name in outputs] == [peer[name].requires_grad for name in outputs]
    # A mean is the largest logit and the mean of differences from it.
    largest = max([0.0, *_logits(*in_fp64[:3], **options).abs().flatten().tolist()])
    for name in outputs:
        if name == "is_top1":
            assert torch.equal(found[name], peer[name]) and torch.equal(found[name], truth[name])
        else:
            assert_within_budget(found[name], truth[name], peer[name], largest * (name == "mean_logits"))
    for name, grad in grads.items():
        assert_within_budget(grad, true_grads[name], peer_grads[name])
    return found


@pytest.mark.reference
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(TOKENS, torch.float32), (0, torch.float32), (TOKENS, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize(
    ("outputs", "bias", "options"),
    [
        (("log_probs",), False, {}),
        (("log_probs", "entropy"), False, {"temperature": 0.7}),
        (FIELDS, False, {"softcap": 5.0}),
        (("log_probs", "is_top1"), True, {"logit_scale": 0.25}),
        (FIELDS, True, {}),
        (FIELDS, True, {"temperature": 0.7, "logit_scale": 1.5}),
        (FIELDS, True, {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.5}),
    ],
    ids=["plain", "temperature", "softcap", "scale", "bias", "temperature and scale", "all"],
)
def test_core_is_trls(outputs, bias, options, tokens, dtype):
    found = _assert_as_trl(_head(dtype, tokens, bias), outputs, **options)
    if "is_top1" in outputs and tokens == TOKENS:
        assert 0 < int(found["is_top1"].sum()) < TOKENS


@pytest.mark.reference
def test_the_first_of_equal_logits_is_top1():
    hidden, weight, _, labels = _head(bias=False)
    weight[1], weight[30] = 5 * hidden[0], 5 * hidden[0]
    head = hidden[:1].repeat(2, 1), weight, None, torch.tensor([1, 30])
    assert _assert_as_trl(head, FIELDS)["is_top1"].tolist() == [True, False]


@pytest.mark.reference
@pytest.mark.parametrize(
    ("reason", "outputs", "options"),
    [
        ("outputs", ("log_probs", "another"), {}),
        ("positive", FIELDS, {"logit_scale": -1.0}),
        ("positive", FIELDS, {"logit_scale": 0.0}),
        ("positive", ("log_probs",), {"softcap": 0.0}),
        ("positive", ("log_probs",), {"temperature": -0.5}),
    ],
)
def test_what_is_left_to_trl_is_counted_and_its_own_to_the_bit(reason, outputs, options):
    fused.install()
    hidden, weight, bias, labels = _head()
    given = hidden, weight, bias, labels, options.get("temperature", 1.0), 20
    given += options.get("softcap"), options.get("logit_scale", 1.0), outputs
    found, own = (_by_name(core.apply(*given)) for core in (utils._ChunkedLogProbFunction, OWN_CORE))
    assert found.keys() == own.keys() == set(outputs) - {"another"}
    assert all(torch.equal(found[name], own[name]) for name in own)
    report = fused.report()
    assert list(report.calls.values()) == [1] and reason in next(iter(report.calls))
    assert set(report.calls) <= set(report.left)


def _model(dtype=torch.float32, **config):
    torch.manual_seed(0)
    sizes = {"vocab_size": len(WORDS) + 3, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(**sizes, **ids, num_attention_heads=2, initializer_range=0.3, **config)
    model = LlamaForCausalLM(config)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(len(WORDS) + 3))
    return model.to(dtype)


def _labels(part=0):
    labels = torch.randint(3, len(WORDS), (2, 6), generator=torch.Generator().manual_seed(part))
    labels[part, :3] = -100
    return labels


def _call(model, outputs, labels, **settings):
    """Fields of a fused forward, and the gradients of the parameters."""
    utils.add_fused_lm_head(model, outputs=outputs, **settings)
    found = model(input_ids=labels.clamp(min=0), labels=labels, fused_lm_head=True)
    (found.loss + 0.1 * found.entropy.mean()).backward()
    fields = ("loss", "label_mask", *outputs)
    return {name: found[name].detach() for name in fields}, {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.reference
@pytest.mark.parametrize(("ignored", "compact"), [("some", False), ("some", True), ("all", True)])
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
    labels = _labels() if ignored == "some" else torch.full((2, 6), -100)
    # With the temperature, products are bf16 under autocast; a cast head's are fp32, but its gradients bf16.
    tolerance = 2**-6 if autocast and "temperature" in settings else 2**-7 if dtype == torch.bfloat16 else 1e-5
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        own, own_grads = _call(_model(dtype, logit_scale=1.25), FIELDS, labels, **settings)
        fused.install()
        found, grads = _call(_model(dtype, logit_scale=1.25), FIELDS, labels, **settings)
    assert fused.report().calls == {"fused": 1}
    _assert_same(found, own, tolerance)
    _assert_same(grads, own_grads, tolerance)


def _tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def _texts(words, seed):
    picks = torch.randint(len(WORDS), (20, words), generator=torch.Generator().manual_seed(seed)).tolist()
    return [" ".join(WORDS[i] for i in row) for row in picks]


def _even_words(completions, **_):
    return [float(sum(int(word[4:]) % 2 == 0 for word in text.split() if word in WORDS)) for text in completions]


def _sft(common):
    rows = Dataset.from_list([{"text": text} for text in _texts(7, 0)])
    args = trl.SFTConfig(**common, max_length=16)
    return trl.SFTTrainer(_model(), args, train_dataset=rows, processing_class=_tokenizer())


def _dpo(common):
    columns = zip(_texts(3, 0), _texts(4, 1), _texts(5, 2), strict=True)
    rows = Dataset.from_list([{"prompt": p, "chosen": " " + c, "rejected": " " + r} for p, c, r in columns])
    args = trl.DPOConfig(**common, max_length=16)
    return trl.DPOTrainer(_model(), _model(), args, train_dataset=rows, processing_class=_tokenizer())


def _grpo(common):
    rows = Dataset.from_list([{"prompt": text} for text in _texts(3, 0)])
    of_rewards = {"num_generations": 2, "max_completion_length": 4, "temperature": 0.7, "entropy_coef": 0.01}
    args = trl.GRPOConfig(**common, **of_rewards)
    return trl.GRPOTrainer(_model(), _even_words, args, train_dataset=rows, processing_class=_tokenizer())


def _curve(make, folder):
    """Every number that is logged in the steps, and the parameters afterwards."""
    common = {"output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.1}
    # Adam would make a whole step of a gradient that is rounding alone.
    common |= {"optim": "sgd", "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    trainer = make({**common, "use_cpu": True, "bf16": False, "gradient_checkpointing": False})
    trainer.train()
    steps = [step for step in trainer.state.log_history if "loss" in step]
    for step in steps:
        step.pop("step_time", None)
    return steps, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def assert_same_curve(make, calls, folder):
    own, own_parameters = _curve(make, folder / "own")
    fused.install()
    found, parameters = _curve(make, folder / "fused")
    assert fused.report().calls == calls
    assert len(own) == len(found) == STEPS and own[0]["loss"] != own[-1]["loss"]
    for step, own_step in zip(found, own, strict=True):
        assert step == pytest.approx(own_step, rel=1e-5, abs=2e-6)
    _assert_same(parameters, own_parameters)


@pytest.mark.reference
@pytest.mark.parametrize(("make", "calls"), [(_sft, STEPS), (_dpo, 2 * STEPS), (_grpo, STEPS)])
def test_training_has_the_same_curve(make, calls, tmp_path):
    assert_same_curve(make, {"fused": calls}, tmp_path)


def _cut(model, mesh):
    """Cut the head as ``colwise_gather_output`` does: 43 rows, 22 and 21."""
    for name, parameter in model.lm_head.named_parameters():
        whole = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
        setattr(model.lm_head, name, torch.nn.Parameter(whole))
    return model


def _on_a_cut_head(rank, group):
    """One call, its report, and what TRL's own core says to a head that nobody may gather."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = _cut(_model(), mesh)
    fused.install()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", None)
        patch.setattr(DTensor, "redistribute", None)
        found, grads = _call(model, FIELDS, _labels(), temperature=0.7)
        fused.uninstall()
        refusal = error_of(lambda: _call(model, FIELDS, _labels(), temperature=0.7))
    whole = {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}
    return found, whole, isinstance(grads["lm_head.weight"], DTensor), fused.report(), refusal


@in_two_ranks
def test_a_head_cut_by_tensor_parallelism_has_the_numbers_of_one_rank(rank_pool, impl):
    """It is never gathered."""
    own, own_grads = _call(_model(), FIELDS, _labels(), temperature=0.7)
    for found, grads, is_cut, report, refusal in rank_pool.run(_on_a_cut_head):
        assert is_cut and report.calls == {"fused": 1} and "not callable" in refusal
        _assert_same(found, own)
        _assert_same(grads, own_grads)


def _in_fsdp(rank, group, how):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    model = _model()
    if how != "root's group":
        fully_shard(model.lm_head, mesh=mesh)
    fully_shard(model, mesh=mesh)
    fused.install(own_tokens=how == "own tokens")
    with pytest.MonkeyPatch.context() as patch:
        if how == "own tokens":
            patch.setattr(DTensor, "full_tensor", None)
        found, grads = _call(model, FIELDS, _labels(rank))
    fused.uninstall()
    return found, {name: grad.full_tensor() for name, grad in grads.items()}, fused.report()


@in_two_ranks
@pytest.mark.parametrize("how", ["root's group", "own group", "own tokens"])
def test_gradients_of_a_head_that_fsdp_cut_are_means_over_the_ranks(rank_pool, impl, how):
    (own, grads_0), (own_1, grads_1) = (_call(_model(), FIELDS, _labels(part)) for part in range(2))
    means = {name: (grads_0[name] + grads_1[name]) / 2 for name in grads_0}
    results = rank_pool.run(_in_fsdp, how)
    for (found, grads, report), expected in zip(results, (own, own_1), strict=True):
        assert report.calls == {"fused": 1}
        _assert_same(found, expected)
        _assert_same(grads, means)


def _refusals(rank, group):
    nobodys = init_device_mesh("cpu", (2,))
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    once, twice = _cut(_model(), nobodys), _cut(_model(), both["tp"])
    fully_shard(twice.lm_head, mesh=both["fsdp"])
    fused.install()
    attempts = {"no name": lambda: _call(once, FIELDS, _labels()), "cut twice": lambda: _call(twice, FIELDS, _labels())}
    messages = messages_of(attempts)
    fused.uninstall()
    return messages


@in_two_ranks
def test_a_head_that_anybody_may_have_cut_is_refused(rank_pool, impl):
    no_name = r'ValueError: lm_head\.weight: .*mesh without names.*name the dimension "tp"'
    cut_twice = r"ValueError: lm_head\.weight: .*tensor parallelism and FSDP both cut it"
    assert_refused(rank_pool.run(_refusals), {"no name": no_name, "cut twice": cut_twice})


@pytest.mark.reference
def test_of_trl_1_9_only_gkds_divergence_is_replaced(monkeypatch):
    class Core(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx, last_hidden, weight, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0
        ):
            raise NotImplementedError

    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", Core)
    monkeypatch.delattr(utils, "DTensor")
    monkeypatch.setitem(sys.modules, "trl.trainer.distillation_trainer", None)
    report = fused.install()
    assert report.rebound == ("trl.experimental.gkd.gkd_trainer.GKDTrainer.generalized_jsd_loss",)
    assert utils._ChunkedLogProbFunction is Core and "stays TRL's; install trl 1.16" in report.left[fused.CORE]
    assert {fused.CORE, fused.DIVERGENCE, "trl.trainer.utils:DTensor"} <= report.left.keys()
