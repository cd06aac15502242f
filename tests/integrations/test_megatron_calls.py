"""Calls of Megatron-Core's losses: labels, padding, hooks, gradient buffers, refusals."""

import copy
import logging
import warnings

import pytest
import torch

from tests.support.ranks.collectives import error_of
from tests.support.ranks.pools import device_of, in_ranks
from tests.support.truth.budget import assert_within_budget

pytest.importorskip("megatron.core")

from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from tests.support.frameworks import megatron_stubs as stubs
from vocab_parallel_ce.integrations import megatron
from vocab_parallel_ce.integrations.megatron import losses

in_two_ranks = in_ranks((2,), (), (2,))
LINEAR = {"linear": True}


@pytest.fixture(autouse=True)
def _megatrons_own_afterwards():
    yield
    megatron.uninstall()
    assert not megatron.report().installed


def _signatures(rank, group, impl):
    """Losses and gradients of our functions as Megatron and others call them, of its own, and in fp64."""
    device, generator = device_of(rank, group), torch.Generator().manual_seed(0)
    whole = 4 * torch.randn(stubs.LENGTH, stubs.BATCH, stubs.COLUMNS, generator=generator)
    target = torch.randint(stubs.REAL_SIZE, whole.shape[:2], generator=generator)
    weights, negative = torch.randn(whole.shape[:2], generator=generator), target.clone()
    negative[0], negative[1, 0] = -1, -100

    def truth(labels=target, smoothing=0.0, columns=stubs.COLUMNS):
        """With NeMo's formula of label smoothing, as Megatron's source has it, but over the whole vocabulary."""
        leaf = whole.double()[..., :columns].requires_grad_()
        log_probs = leaf.log_softmax(-1)
        label_log_probs = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        others = (log_probs.sum(-1) - label_log_probs) / (columns - 1)
        loss = -((1 - smoothing) * label_log_probs + smoothing * others).masked_fill(labels < 0, 0.0)
        loss.backward(weights.double())
        gradient = torch.nn.functional.pad(leaf.grad, (0, stubs.COLUMNS - columns))
        return loss.detach(), gradient.chunk(2, -1)[rank]

    def run(name, labels, *args, function=None, options=None, **kwargs):
        leaf = (whole.chunk(2, -1)[rank].to(device) * 1).requires_grad_()
        with megatron.installed(impl=impl, **(options or {})):
            loss = (function or getattr(losses, name))(leaf * 1, labels.to(device), *args, **kwargs)
        loss.backward(weights.to(device))
        return loss.detach(), leaf.grad

    with stubs.megatron_ranks(rank, group, 2):
        native, name = tensor_parallel.vocab_parallel_cross_entropy, "vocab_parallel_cross_entropy"
        return {
            "Megatron's own": (run(name, target, function=native), truth()),
            "group by name": (run(name, target, tp_group=group), truth()),
            "group of Megatron": (run(name, target), truth()),
            "fused": (run("fused_vocab_parallel_cross_entropy", target, group), truth()),
            "engine": (run("te_parallel_cross_entropy", target, group, True), truth()),
            "smoothing": (run(name, target, 0.1), truth(smoothing=0.1)),
            "ignored": (run(name, negative), truth(negative)),
            "smoothing of a padded vocabulary": (
                run(name, target, 0.1, options={"vocab_size": stubs.REAL_SIZE}),
                truth(smoothing=0.1, columns=stubs.REAL_SIZE),
            ),
            "padded": (run(name, target, options={"vocab_size": stubs.REAL_SIZE}), truth(columns=stubs.REAL_SIZE)),
        }


@in_two_ranks
def test_signatures_smoothing_labels_and_padding(rank_pool, impl):
    for results in rank_pool.run(_signatures, impl):
        for name, (ours, truth) in results.items():
            actual = [tensor.double() for tensor in ours]
            torch.testing.assert_close(actual, list(truth), rtol=1e-5, atol=1e-5, msg=name)
        loss, gradient = results["ignored"][0]
        assert not loss[0].any() and not loss[1, 0] and not gradient[0].any() and not gradient[1, 0].any()


def _bound(rank, group, impl):
    """What install() says of a model that bound Megatron's loss, and then one of ours, as 0.20 may when it is built."""
    with stubs.megatron_ranks(rank, group, 2):
        model, found = stubs.small_model("gpt", device_of(rank, group)), []
        for loss in (tensor_parallel.vocab_parallel_cross_entropy, losses.fused_vocab_parallel_cross_entropy):
            model.vocab_parallel_cross_entropy = loss
            with megatron.installed(linear=True) as report:
                found.append(report.left.get("the loss of 1 models that exist", ""))
        return found


@in_two_ranks
def test_models_that_bound_their_loss_are_named(rank_pool, impl):
    for theirs, ours in rank_pool.run(_bound, impl):
        assert theirs.endswith("build them after install()") and not ours


# Each option of install(linear=True), with a value that is not the default.
OPTIONS = [
    {"gradient": "in_backward"},
    {"gradient": "in_backward", "chunk_size": 4},
    {"z_loss": 0.1},
    {"vocab_size": stubs.REAL_SIZE, "check_labels": True},
]


def _option_on_the_fallback(rank, group, impl, asked, dtype):
    """A step with ``asked``, and one whose logits a hook keeps: Megatron's, those then and after two backwards."""
    device, kept, said = device_of(rank, group), [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("vocab_parallel_ce").addHandler(handler)
    with stubs.megatron_ranks(rank, group, 2):
        model, inputs = stubs.small_model("gpt", device, dtype=dtype, sequence_parallel=True), stubs.batch(device)
        inference = {name: value for name, value in inputs.items() if name not in ("labels", "loss_mask")}
        native = model(**inference).detach()
        with megatron.installed(impl=impl, **LINEAR, **asked):
            fused = stubs.step(model, inputs)
            assert torch.equal(model(**inference), native)
            model.output_layer.register_forward_hook(lambda module, args, output: kept.append(output[0].detach()))
            model.zero_grad()
            losses_, before = model(**inputs), kept[0].clone()
            loss = stubs.masked_mean(losses_, inputs["loss_mask"])
            second = asked.get("gradient") == "in_backward"
            loss.backward(retain_graph=second)
            if second:
                loss.backward()
            gradients = {name: p.grad / (2 if second else 1) for name, p in model.named_parameters()}
    logging.getLogger("vocab_parallel_ce").removeHandler(handler)
    looks = native.transpose(0, 1), before, kept[0]
    return fused, (losses_.detach(), gradients), looks, megatron.report().calls, said


@pytest.mark.parametrize(
    "asked,dtype", [*((asked, torch.float32) for asked in OPTIONS), (OPTIONS[0], torch.bfloat16)], ids=str
)
@in_two_ranks
def test_an_option_of_the_head_on_the_fallback_path(rank_pool, impl, asked, dtype):
    """It means there what it means to the head: no number changes, and "in_backward" overwrites no logits."""
    for fused, found, (native, before, after), calls, said in rank_pool.run(
        _option_on_the_fallback, impl, asked, dtype
    ):
        assert torch.equal(before, native) and torch.equal(after, native)
        assert calls["loss of logits"] == 1 and calls["detach made the logits"] == 1
        (line,) = [each for each in said if "loss is over logits" in each]
        assert line.endswith("not the linear one: detach made the logits")
        if dtype == torch.float32:
            torch.testing.assert_close(found, fused, rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(found[0], fused[0], rtol=2e-2, atol=2e-2)


@pytest.mark.reference
def test_each_option_is_tried_on_the_fallback_path():
    tried = {name for asked in OPTIONS for name in asked} | {"impl"}
    assert tried == set(losses.OPTIONS)


def _buffers(rank, group, impl, tied, overlap):
    """Gradient buffers of Megatron's DDP after two micro-batches, by its own loss and by ours."""
    device = device_of(rank, group)
    with stubs.megatron_ranks(rank, group, 1):
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, use_distributed_optimizer=False
        )
        found = {}
        for kind, asked in {"fp32": None, "native": None, "linear": LINEAR, "fusion": LINEAR}.items():
            dtype = torch.float32 if kind == "fp32" else torch.bfloat16
            made = stubs.small_model("gpt", device, tied=tied, dtype=dtype)
            model = DistributedDataParallel(made.config, config, made)
            # Megatron's own fusion needs an extension of CUDA, ours does not.
            model.module.output_layer.gradient_accumulation_fusion = kind == "fusion"
            for _ in range(2):  # steps: buffers and flags start anew
                model.zero_grad_buffer()
                for number in range(2):
                    with model.no_sync() if number == 0 else warnings.catch_warnings():
                        inputs = stubs.batch(device, number + 2 * rank)
                        with megatron.installed(impl=impl, **asked) if asked else warnings.catch_warnings():
                            stubs.masked_mean(model(**inputs), inputs["loss_mask"]).backward()
                model.finish_grad_sync()
            found[kind] = {name: p.main_grad.clone() for name, p in model.module.named_parameters()}
            assert all(p.grad is None for p in model.module.parameters())
        return found


@in_two_ranks
@pytest.mark.parametrize("tied,overlap", [(False, True), (True, True), (True, False)])
def test_gradient_buffers_over_micro_batches(rank_pool, impl, tied, overlap):
    for found in rank_pool.run(_buffers, impl, tied, overlap):
        for kind in ("linear", "fusion"):
            for name, gradient in found["native"].items():
                assert_within_budget(found[kind][name], found["fp32"][name].double(), gradient)
        weight = "embedding.word_embeddings.weight" if tied else "output_layer.weight"
        assert not torch.equal(found["fusion"][weight], found["linear"][weight])  # no rounding to bf16


def _beside(rank, group, impl, dtype):
    """The head's gradient of the loss and of one of kept logits: Megatron's, and ours, added to a buffer or not."""
    device = device_of(rank, group)
    with stubs.megatron_ranks(rank, group, 2):
        model, inputs = stubs.small_model("gpt", device, sequence_parallel=True), stubs.batch(device)
        weight, kept, found = model.output_layer.weight, [], []

        def keep(layer, args, output):
            kept.append(output[0])
            return None if megatron.report().installed else (output[0].clone(), output[1])  # Megatron writes to them

        model.output_layer.register_forward_hook(keep)
        for asked in (None, LINEAR):
            model.zero_grad()
            model.output_layer.gradient_accumulation_fusion = bool(asked)
            weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=dtype), False
            with megatron.installed(impl=impl, **asked) if asked else warnings.catch_warnings():
                loss = stubs.masked_mean(model(**inputs), inputs["loss_mask"])
            (loss + kept.pop().logsumexp(-1).square().mean()).backward()
            found.append(weight.grad.clone())
        return *found, weight.main_grad, weight.grad_added_to_main_grad


@in_two_ranks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_of_kept_logits_adds_to_the_same_buffer(rank_pool, impl, dtype):
    for native, grad, main_grad, is_added in rank_pool.run(_beside, impl, dtype):
        full, empty = (main_grad, grad) if dtype == torch.float32 else (grad, main_grad)
        torch.testing.assert_close(full, native, rtol=1e-4, atol=1e-6)
        assert not empty.any() and is_added == (dtype == torch.float32)


class LoRA(tensor_parallel.ColumnParallelLinear):
    """A head that adds to the product."""


def _refused(rank, group, impl):
    device = device_of(rank, group)
    attempts = {}
    with stubs.megatron_ranks(rank, group, 2):
        inputs = stubs.batch(device)

        def attempt(name, change=None, asked=LINEAR, **options):
            model = stubs.small_model("gpt", device, **options)
            if change is not None:
                change(model.output_layer)
            with megatron.installed(impl=impl, **asked):
                attempts[name] = error_of(lambda: model(**inputs))

        def defer(layer):
            layer.config = copy.copy(layer.config)
            layer.config.defer_embedding_wgrad_compute = True

        attempt("class", lambda layer: setattr(layer, "__class__", LoRA))
        attempt("forward", lambda layer: setattr(layer, "forward", layer.forward))
        attempt("bias", lambda layer: setattr(layer, "bias", torch.nn.Parameter(torch.zeros(2, device=device))))
        attempt("backward hook", lambda layer: layer.register_full_backward_hook(print))
        attempt("deferred", defer)
        attempt("gathered", lambda layer: setattr(layer, "gather_output", True))
        attempt("gathered logits", lambda layer: setattr(layer, "gather_output", True), {})
        return attempts


@in_two_ranks
def test_output_layers_that_are_refused(rank_pool, impl):
    messages = {
        "class": "output_layer: is a tests.integrations.test_megatron_calls.LoRA, not a ColumnParallelLinear",
        "forward": "output_layer: has a forward of its own",
        "bias": "output_layer: has a bias, which the linear loss cannot do; install() without linear=True",
        "backward hook": "output_layer: has backward hooks",
        "deferred": "output_layer: has config.defer_embedding_wgrad_compute",
        "gathered": "logits: expected this rank's columns of output_layer, 32, got 64, which were gathered",
        "gathered logits": "logits: expected this rank's columns of output_layer, 32, got 64",
    }
    for attempts in rank_pool.run(_refused, impl):
        for name, message in messages.items():
            assert message.split(".*")[0] in attempts[name] and message.split(".*")[-1] in attempts[name], attempts[
                name
            ]
