"""What Megatron-Core's distributed optimizer and overlapped schedule ask of CUDA, stubbed so that they run on a CPU.

On a GPU nothing of CUDA is stubbed.
"""

import contextlib
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from torch.overrides import TorchFunctionMode

from tests.support.frameworks.megatron_stubs import NoEvent, NoStream


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA, and names the types of tensors as if they were there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1:
            return found.replace("torch.", "torch.cuda.")
        return found


def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What Megatron's function returns for a tensor on CUDA: it leaves one on the CPU as it is."""
    return tensor.numpy() if as_numpy and tensor is not None else tensor


@contextlib.contextmanager
def without_cuda(device: torch.device):
    """Let code for CUDA run on a CPU: devices, types, streams and events, which are in order there anyway."""
    with contextlib.ExitStack() as stack:
        # Without TransformerEngine, Megatron's router reads a name that is not there.
        if not hasattr(moe_utils, "te_general_gemm"):
            stack.enter_context(patch.object(moe_utils, "te_general_gemm", None, create=True))
        if device.type == "cpu":
            stubs = [
                (torch.cuda, "Event", NoEvent),
                (torch.cuda, "Stream", NoStream),
                (torch.cuda, "stream", nullcontext),
                (torch.cuda.nvtx, "range_push", lambda message: None),
                (torch.cuda.nvtx, "range_pop", lambda: None),
                (torch.Tensor, "record_stream", lambda tensor, stream: None),
                (token_dispatcher, "maybe_move_tensor_to_cpu", on_cpu),
            ]
            for owner, name, stub in stubs:
                stack.enter_context(patch.object(owner, name, stub))
            stack.enter_context(OnCpu())
        yield


class LateGather:
    """The handle of a gather that is done when somebody waits for it, and not before."""

    def __init__(self, bucket_group: Any, gather: Any) -> None:
        self.bucket_group, self.gather = bucket_group, gather

    def wait(self) -> None:
        self.bucket_group.param_gather_handle = None
        self.gather(self.bucket_group, force_sync=True)


@contextlib.contextmanager
def late_gathers():
    """Let each asynchronous gather of parameters come as late as it may: who reads too early reads old values."""
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    own = group.start_param_sync

    def start_param_sync(self: Any, force_sync: bool = False) -> None:
        if force_sync or not self.ddp_config.overlap_param_gather:
            return own(self, force_sync=force_sync)
        assert self.param_gather_handle is None
        self.param_gather_handle, self.param_gather_dispatched = LateGather(self, own), True

    with patch.object(group, "start_param_sync", start_param_sync):
        yield
