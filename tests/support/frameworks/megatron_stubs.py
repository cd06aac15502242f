"""Small models of Megatron-Core, and stubs of what it asks of CUDA, so that they run on a CPU.

Stubbed on a CPU alone: the current device, streams, and the states of CUDA's random numbers (there is no dropout).
The models have local modules, not TransformerEngine's. Their norm is PyTorch's, on a GPU too.
"""

import contextlib
import copy
import importlib
import inspect
import warnings
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.ranks.pools import device_of, groups_of_its_own

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TransformerEngine and Apex are not installed
    megatron = pytest.importorskip("megatron.core", exc_type=ImportError)
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

VERSION = tuple(int(part) for part in megatron.__version__.split(".")[:2])
COLUMNS, WIDTH, LENGTH, BATCH = 64, 32, 8, 2  # columns of all ranks
REAL_SIZE = 61  # the last columns are padding
needs_hybrid = pytest.mark.skipif(VERSION < (0, 17), reason=f"{megatron.__version__} has no hybrid_layer_pattern")


def norm(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.RMSNorm:
    """PyTorch's norm as Apex's is with sequence parallelism, which Megatron's wrapper of it refuses."""
    made = torch.nn.RMSNorm(hidden_size, eps)
    made.weight.sequence_parallel = config.sequence_parallel
    return made


class NoEvent:
    """Stands for a CUDA event."""

    def __init__(self, **options: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...


class NoStream:
    """Stands for a CUDA stream."""

    def __init__(self, **options: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> NoEvent:
        return NoEvent()


@contextlib.contextmanager
def megatron_ranks(rank: int, group: Any, tensor_parallel_size: int, **sizes: int):
    """In a rank: Megatron's groups over the world, of other ``sizes`` too, and on a CPU the stubs."""
    is_cpu = device_of(rank, group).type == "cpu"
    with contextlib.ExitStack() as stack:
        if is_cpu:
            stubs = {
                "current_device": lambda: torch.device("cpu"),
                "current_stream": NoStream,
                "synchronize": nullcontext,
            }
            for name, stub in stubs.items():
                stack.enter_context(patch.object(torch.cuda, name, stub))
            stack.enter_context(patch.object(CudaRNGStatesTracker, "fork", lambda self, name="": nullcontext()))
        stack.enter_context(patch.object(WrappedTorchNorm, "__new__", norm))
        if is_cpu:
            stack.enter_context(groups_of_its_own())
        parallel_state.initialize_model_parallel(tensor_parallel_size, **sizes)
        if not is_cpu:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            MTPLossLoggingHelper.tracker.clear()


def config_of(
    dtype: torch.dtype, mtp: bool = False, n_mtp: int = 2, sequence_parallel: bool = False, **options: Any
) -> Any:
    size = parallel_state.get_tensor_model_parallel_world_size()
    known = inspect.signature(TransformerConfig).parameters
    quiet = {"cuda_graph_scope": [], "normalization": "RMSNorm"} if VERSION < (0, 17) else {"normalization": "RMSNorm"}
    return TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        use_cpu_initialization=True,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,
        mtp_num_layers=n_mtp if mtp else None,
        tensor_model_parallel_size=size,
        sequence_parallel=sequence_parallel and size > 1,
        **{name: value for name, value in (quiet | options).items() if name in known},
    )


def small_model(
    name: str, device: torch.device, *, tied: bool = False, dtype: torch.dtype = torch.float32, **options: Any
):
    """A ``gpt`` or ``hybrid`` model with random weights, the same on every rank of data parallelism."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = config_of(dtype, **options)
        make = {"gpt": gpt_model, "hybrid": hybrid_model}[name]
        arguments = {"vocab_size": COLUMNS, "max_sequence_length": LENGTH, "position_embedding_type": "none"}
        model = make(config, share_embeddings_and_output_weights=tied, **arguments)
    if dtype != torch.float32:
        model.to(dtype)
    return model.to(device).train()


def gpt_model(config: Any, **arguments: Any) -> Any:
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, normalization="RMSNorm")
    arguments["position_embedding_type"] = "rope"
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(config, spec, mtp_block_spec=mtp, **arguments)


def hybrid_model(config: Any, **arguments: Any) -> Any:
    """Attention and MLP, from GPT's local modules: the specification of hybrid layers needs TransformerEngine."""
    kind, place = ("Mamba", "ssm.mamba_block") if VERSION < (0, 18) else ("Hybrid", "models.hybrid.hybrid_block")
    block = importlib.import_module(f"megatron.core.{place}")
    model = importlib.import_module(f"megatron.core.models.{kind.lower()}.{kind.lower()}_model")
    prediction = importlib.import_module("megatron.core.transformer.multi_token_prediction")
    mlp_layer = importlib.import_module("megatron.core.ssm.mlp_layer")
    specs = importlib.import_module("megatron.core.transformer.spec_utils")
    local = get_gpt_layer_local_spec(normalization="RMSNorm")
    attention, mlp = copy.deepcopy(local), copy.deepcopy(local)
    layer, own = type(local.submodules), vars(local.submodules)
    attention.submodules = layer(**{n: own[n] for n in ("input_layernorm", "self_attention", "self_attn_bda")})
    mlp.module = mlp_layer.MLPLayer
    mlp.submodules = layer(**{n: own[n] for n in ("pre_mlp_layernorm", "mlp", "mlp_bda")})
    head = prediction.MultiTokenPredictionLayerSubmodules(
        enorm=WrappedTorchNorm,
        hnorm=WrappedTorchNorm,
        eh_proj=tensor_parallel.ColumnParallelLinear,
        mtp_model_layer=None,
        layer_norm=WrappedTorchNorm,
    )
    heads = prediction.MultiTokenPredictionBlockSubmodules(
        layer_specs=[specs.ModuleSpec(module=prediction.MultiTokenPredictionLayer, submodules=head)]
    )
    stack = getattr(block, f"{kind}StackSubmodules")(
        attention_layer=attention,
        mlp_layer=mlp,
        mtp_block_spec=specs.ModuleSpec(module=prediction.MultiTokenPredictionBlock, submodules=heads),
    )
    pattern = "*-/*/*" if config.mtp_num_layers else "*-"
    with patch.object(block, "TENorm", WrappedTorchNorm):
        spec = specs.ModuleSpec(module=getattr(block, f"{kind}Stack"), submodules=stack)
        return getattr(model, f"{kind}Model")(config, spec, hybrid_layer_pattern=pattern, **arguments)


def batch(device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Tokens, labels and a loss mask with zeros, the first row among them."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, REAL_SIZE, (BATCH, LENGTH + 1), generator=generator)
    mask = (torch.rand(BATCH, LENGTH, generator=generator) < 0.7).float()
    mask[0, 0] = 0.0
    causal = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    made = {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(LENGTH).expand(BATCH, -1),
        "attention_mask": causal,
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
    }
    return {name: value.to(device) for name, value in made.items()}


def masked_mean(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The loss of Megatron's training script."""
    return (losses.float() * mask).sum() / mask.sum()


def step(model: Any, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses per token, and the gradients of their masked mean."""
    model.zero_grad()
    losses = model(**inputs)
    masked_mean(losses, inputs["loss_mask"]).backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return losses.detach(), found


def predicted() -> dict[str, torch.Tensor]:
    """What Megatron has logged of its heads of multi-token prediction, which starts anew."""
    tracker = MTPLossLoggingHelper.tracker
    found = {name: value.clone() for name, value in tracker.items() if isinstance(value, torch.Tensor)}
    tracker.clear()
    return found
