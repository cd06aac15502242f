"""Megatron-Core overlaps communication: parameters gathered while a step runs, and experts' exchanges.

The distributed optimizer, its buckets and the schedules are Megatron's own.
"""

import warnings

import pytest
import torch

from tests.support.ranks.pools import device_of, in_ranks

pytest.importorskip("megatron.core")

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining

from tests.support.frameworks import megatron_stubs as stubs
from tests.support.frameworks.megatron_cuda import late_gathers, without_cuda
from vocab_parallel_ce.integrations import megatron

in_two_ranks = in_ranks((2,), (), (2,))
LINEAR = {"linear": True}
N_STEPS, N_MICRO_BATCHES = 2, 2


class Trained:
    """A model whose optimizer's state, and the step of its weights, is cut over the ranks."""

    def __init__(self, device, overlaps, fusion=False, **options):
        self.device, made = device, stubs.small_model("gpt", device, **options)
        # Buckets of a few parameters: the output layer's is not the one of the first layers.
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            overlap_param_gather=overlaps,
            bucket_size=2000,
        )
        self.model = DistributedDataParallel(made.config, config, made)
        made.output_layer.gradient_accumulation_fusion = fusion
        wanted = OptimizerConfig(
            lr=0.05, adam_eps=1e-2, use_distributed_optimizer=True, overlap_param_gather=overlaps, clip_grad=1.0
        )
        self.optimizer = get_megatron_optimizer(wanted, [self.model], use_gloo_process_groups=False)

    def step(self, number, rank):
        """Losses of micro-batches, which differ on each rank."""
        self.zero_grad()
        losses = []
        for i in range(N_MICRO_BATCHES):
            inputs = stubs.batch(self.device, 10 * number + 2 * i + rank)
            with self.model.no_sync() if i + 1 < N_MICRO_BATCHES else warnings.catch_warnings():
                losses.append(self.model(**inputs))
                stubs.masked_mean(losses[-1], inputs["loss_mask"]).backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return torch.stack(losses).detach()

    def zero_grad(self):
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def weights(self):
        if self.model.ddp_config.overlap_param_gather:
            self.model.disable_forward_pre_hook()  # gathers what is still to come
        return {name: parameter.detach().clone() for name, parameter in self.model.module.named_parameters()}


def _trained(rank, group, impl, options):
    """Losses and weights of training: Megatron's without overlap, and ours with it."""
    device = device_of(rank, group)
    kinds = {"apart": None, "logits": {}, "linear": LINEAR, "fusion": LINEAR}
    found, calls = {}, {}
    with stubs.megatron_ranks(rank, group, 1), without_cuda(device), late_gathers():
        for kind, asked in kinds.items():
            trained = Trained(device, kind != "apart", kind == "fusion", **options)
            with megatron.installed(impl=impl, **asked) if asked is not None else warnings.catch_warnings():
                losses = torch.stack([trained.step(number, rank) for number in range(N_STEPS)])
                calls[kind] = megatron.report().calls
            found[kind] = losses, trained.weights()
        unhooked = Trained(device, True, **options)
        unhooked.step(0, rank)
        unhooked.zero_grad()
        unhooked.model.remove_forward_pre_hook_handles[unhooked.model.module.output_layer].remove()
        with megatron.installed(impl=impl, **LINEAR):
            early = unhooked.model(**stubs.batch(device, 10 + rank)).detach()
    return found, calls, early


@in_two_ranks
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"mtp": True}], ids=["own head", "tied", "mtp"])
def test_parameters_that_are_gathered_while_the_step_runs(rank_pool, impl, options):
    """The output layer's hook waits for its weight before the linear loss reads it."""
    n_losses = N_STEPS * N_MICRO_BATCHES * (3 if "mtp" in options else 1)
    kinds = {"logits": "loss of logits", "linear": "linear loss, gradients in forward"}
    kinds["fusion"] = kinds["linear"]
    for found, calls, early in rank_pool.run(_trained, impl, options):
        losses, weights = found["apart"]
        for kind, (losses_, weights_) in found.items():
            torch.testing.assert_close(losses_, losses, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(weights_, weights, rtol=1e-4, atol=1e-5)
            assert kind == "apart" or calls[kind] == {kinds[kind]: n_losses}
        # The control: without the hook the second step has old values of the part that the other rank steps.
        has_weight = "tied" not in options
        assert torch.allclose(early, losses[1, 0], rtol=1e-2, atol=1e-2) != has_weight


def _whole_head(hidden_states, output_layer, output_weight, labels, compute_language_model_loss, **_):
    """An ``output_processor`` that computes what Megatron computes without one."""
    logits, _ = output_layer(hidden_states, weight=output_weight)
    return compute_language_model_loss(labels, logits)


def _scheduled_step(model, device, processor):
    """Losses and gradients of three micro-batches in Megatron's schedule, as its configuration says."""
    model.zero_grad()
    losses = []
    batches = [stubs.batch(device, seed) for seed in range(3)]
    more = {} if processor is None else {"output_processor": processor}

    def forward_step(iterator, model, return_schedule_plan=False):
        inputs = next(iterator)
        run = model.build_schedule_plan if return_schedule_plan else model

        def loss_function(output):
            losses.append(output.detach().clone())
            loss = stubs.masked_mean(output, inputs["loss_mask"])
            return loss, {"loss": loss.detach()}

        return run(**inputs, **more), loss_function

    forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=stubs.LENGTH,
        micro_batch_size=stubs.BATCH,
    )
    return torch.stack(losses), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _scheduled(rank, group, impl, size, processor, options):
    device = device_of(rank, group)
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "expert_model_parallel_size": 2}
    experts |= {"expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
    sizes = {name: experts[name] for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")}
    kinds = {"logits": {}, "linear": LINEAR, "in backward": {**LINEAR, "gradient": "in_backward"}}
    found = {}
    with stubs.megatron_ranks(rank, group, size, **sizes), without_cuda(device):
        model = stubs.small_model("gpt", device, **experts, **options)
        apart = *_scheduled_step(model, device, processor), stubs.predicted()
        # Set afterwards: the configuration refuses it for fp32, in which numbers are compared sharply.
        model.config.overlap_moe_expert_parallel_comm = True
        for kind, asked in kinds.items():
            with megatron.installed(impl=impl, **asked):
                found[kind] = *_scheduled_step(model, device, processor), stubs.predicted(), megatron.report().calls
    return apart, found


SCHEDULED = [
    pytest.param(1, None, {}, id="tp 1"),
    pytest.param(1, None, {"tied": True, "mtp": True, "n_mtp": 1}, id="tied, mtp, tp 1"),
    pytest.param(2, None, {"sequence_parallel": True}, id="sequence"),
    pytest.param(2, _whole_head, {"sequence_parallel": True}, id="output_processor"),
]


@in_two_ranks
@pytest.mark.parametrize("size,processor,options", SCHEDULED)
def test_the_schedule_that_overlaps_the_exchanges_of_experts(rank_pool, impl, size, processor, options):
    """It does not call the model's forward; the linear loss is the same there."""
    if processor is not None and stubs.VERSION < (0, 18):
        pytest.skip(f"{stubs.megatron.__version__} has no output_processor")
    n_losses = 6 if "mtp" in options else 3
    expected = {"logits": {"loss of logits": n_losses}}
    for kind, when in {"linear": "forward", "in backward": "backward"}.items():
        expected[kind] = {f"linear loss, gradients in {when}": n_losses}
    for apart, found in rank_pool.run(_scheduled, impl, size, processor, options):
        for kind, (losses, gradients, predicted, calls) in found.items():
            torch.testing.assert_close((losses, predicted), (apart[0], apart[2]), rtol=1e-5, atol=1e-5)
            assert gradients.keys() == apart[1].keys()
            for name, gradient in gradients.items():
                largest = float(apart[1][name].abs().max())
                torch.testing.assert_close(gradient, apart[1][name], rtol=0, atol=1e-5 * largest)
            assert calls == expected[kind]
