"""Check arguments. Every error says: argument: what was expected, what was got; what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

HEAD_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LOGITS_DTYPES = (*HEAD_DTYPES, torch.float64)
LABEL_DTYPES = (torch.int64, torch.int32)
FP32 = torch.finfo(torch.float32)
NO_COLUMNS = "if this rank has none of the vocabulary, pass vocab_size= on every rank"
NOT_ONE_HOT = "pass the global id of each token; of one-hot labels that is argmax(-1), of all ranks' columns"
CAST_HEAD = "cast one, or call under torch.autocast"
NOT_WEIGHT = (
    "weight: expected weights of classes as class_weight, got weight; rename it (a head's weight goes to "
    "linear_cross_entropy, or in the head to LinearCrossEntropy)"
)
IN_TRANSFORM = (
    "cross-entropy: expected a call outside of torch.func transforms, got one inside (grad, jvp, vmap, or "
    "is_grads_batched); use a plain backward, or torch.nn.functional.cross_entropy"
)


@contextmanager
def naming(**names: str) -> Iterator[None]:
    """Let errors name the caller's parameters: ``names`` of what is checked. Also decorates a function."""
    try:
        yield
    except (TypeError, ValueError) as error:
        subject, rest = re.match(r"(\w*)(.*)", str(error), re.DOTALL).groups()  # type: ignore[union-attr]
        renamed = re.sub(r"that of (\w+)", lambda match: f"that of {names.get(match[1], match[1])}", rest)
        if subject not in names and renamed == rest:
            raise
        raise type(error)(names.get(subject, subject) + renamed).with_traceback(error.__traceback__) from None


def check_tensor(name: str, tensor: object) -> None:
    """Raise unless it is a plain tensor: no DTensor or MaskedTensor, and nothing that a collective has yet to fill."""
    kind = type(tensor).__name__
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {kind}")
    if hasattr(tensor, "placements"):
        raise TypeError(
            f"{name}: expected this rank's part as a plain torch.Tensor, got a {kind} of global shape "
            f"{tuple(tensor.shape)}; pass its to_local(); vocab_parallel_ce.integrations.dtensor takes DTensor logits"
        )
    check_no_mask(name, tensor)
    if hasattr(tensor, "trigger_wait"):
        raise TypeError(f"{name}: expected a torch.Tensor that has arrived, got {kind}; pass its wait()")


def check_dense(name: str, tensor: Tensor) -> None:
    check_no_mask(name, tensor)
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name}: expected a dense tensor, got layout {tensor.layout}; pass its to_dense()")


def check_no_mask(name: str, tensor: Tensor) -> None:
    if type(tensor).__name__ == "MaskedTensor":
        raise TypeError(
            f"{name}: expected a tensor without a mask, got MaskedTensor; pass its get_data() or to_tensor()"
        )


def has_no_values(tensor: Tensor) -> bool:
    """Return whether a tensor has only a shape."""
    return tensor.is_meta or type(tensor).__name__ == "FakeTensor"


def device_of_values(tensor: Tensor) -> torch.device:
    """Return where kernels find the values; a FakeTensor has none, whatever device it stands for."""
    return torch.device("meta") if has_no_values(tensor) else tensor.device


def is_traced() -> bool:
    """Return whether this call goes into a graph as an operator: of ``torch.compile``, or of ``torch.export``."""
    # is_compiling() is of all threads. An export that is not strict runs eager code on tensors without values.
    return torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()


in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def check_no_transforms(*tensors: object) -> None:
    """Raise TypeError inside a ``torch.func`` transform, and for tensors of forward-mode AD."""
    if in_transform():
        raise TypeError(IN_TRANSFORM)
    # The public unpack_dual takes a microsecond to say that there is no level.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    if any(isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise TypeError(
            "cross-entropy: expected tensors without a tangent, got a dual tensor of forward-mode AD; use "
            "backward, or torch.nn.functional.cross_entropy"
        )


def check_no_trace() -> None:
    """Raise TypeError inside ``torch.jit.trace``, where sizes are no numbers."""
    if torch._C._is_tracing():
        raise TypeError(
            "cross-entropy: expected a call outside of torch.jit.trace, which cannot record it, got one inside; use "
            "torch.compile or torch.export, or torch.nn.functional.cross_entropy"
        )


def recorded_backward(name: str = "cross-entropy") -> RuntimeError:
    """Return the error of a backward that autograd records."""
    return RuntimeError(
        f"{name}: expected backward without create_graph, got one with it, though its gradient cannot be "
        "differentiated again; use torch.nn.functional.cross_entropy for second derivatives"
    )


def expect(
    name: str,
    tensor: Tensor,
    dtypes: tuple[torch.dtype, ...] | None = (),
    remedy: str = "",
    *,
    on: Tensor | None = None,
    subject: str = "logits",
) -> None:
    """Raise unless it is a plain, dense tensor of one of ``dtypes``: ``()`` is any floating-point one, None is any.

    ``on`` is a tensor whose device it must have, the caller's ``subject``. ``remedy`` is for another dtype.
    """
    if type(tensor) is not Tensor:
        check_tensor(name, tensor)
    if tensor.layout is not torch.strided:
        check_dense(name, tensor)
    if dtypes is not None and not (tensor.dtype in dtypes if dtypes else tensor.is_floating_point()):
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes) or "floating point"
        raise TypeError(f"{name}: dtype must be {names}, got {tensor.dtype}{remedy}")
    if on is not None and tensor.device != on.device:
        raise ValueError(f"{name}: device must be that of {subject}, {on.device}, got {tensor.device}")


def check_logits(logits: Tensor) -> None:
    """Raise unless they are a plain, dense tensor ``[..., C]`` of a supported dtype, with rows and columns."""
    expect("logits", logits, LOGITS_DTYPES)
    shape = logits.shape
    if len(shape) < 2:
        raise ValueError(f"logits: expected shape [..., C] with rows, got {tuple(shape)}; pass a single row as [1, C]")
    if shape[-1] == 0:
        raise ValueError(f"logits: last dimension must have columns, got {tuple(shape)}; {NO_COLUMNS}")


def check_labels(labels: Tensor, tokens: Tensor, subject: str = "logits", name: str = "labels") -> None:
    """Raise unless they are integer ids on the device of ``tokens``, which is ``subject``."""
    remedy = f"; pass ids as {name}.long()"
    if isinstance(labels, Tensor) and labels.dtype.is_floating_point:
        remedy = f"; pass integer ids; of probabilities, distillation_loss(logits, {name}.log()) has the same gradient"
    expect(name, labels, LABEL_DTYPES, remedy, on=tokens, subject=subject)


def check_hidden(hidden: Tensor) -> None:
    """Raise unless it is a plain, dense tensor ``[..., D]`` of a supported dtype, with rows."""
    expect("hidden", hidden, HEAD_DTYPES)
    if hidden.dim() < 2 or hidden.shape[-1] == 0:
        expected = "shape [..., D] with rows and features"
        raise ValueError(f"hidden: expected {expected}, got {_shape(hidden)}; pass a single token as [1, D]")


def check_has_values(hidden: Tensor) -> None:
    if has_no_values(hidden):
        what = "one on the meta device" if hidden.is_meta else "a FakeTensor"
        raise TypeError(
            f"hidden: expected a tensor with values, by which tokens are left out, got {what}; for shapes alone, "
            "compute the logits and pass them to vocab_parallel_cross_entropy"
        )


def check_head(
    weight: Any, bias: Any, hidden: Tensor, dtype: torch.dtype | None, *, of: str = "", remedy: str = CAST_HEAD
) -> None:
    """Raise unless ``weight [C, D]`` and ``bias [C]`` fit a product with ``hidden [..., D]``.

    ``dtype`` is what theirs must be, with the ``remedy``; None under autocast, which turns any supported one into its
    own. ``of`` is what stands before the names in messages.
    """
    for name, tensor in {f"{of}weight": weight, f"{of}bias": bias}.items():
        if name.endswith("bias") and bias is None:
            continue
        check_parameter(name, tensor)
        if dtype is not None and tensor.dtype != dtype:
            raise TypeError(f"{name}: dtype must be that of {of}hidden, {dtype}, got {tensor.dtype}; {remedy}")
        expect(name, tensor, on=hidden, subject=f"{of}hidden")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        remedy = "; pass its t()" if weight.dim() == 2 and weight.shape[0] == hidden.shape[-1] else ""
        raise ValueError(f"{of}weight: expected shape [C, {hidden.shape[-1]}], got {_shape(weight)}{remedy}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{of}bias: expected shape {_shape(weight)[:1]}, got {_shape(bias)}")


def check_parameter(name: str, tensor: object) -> None:
    """Raise unless it is a dense floating-point tensor or parameter that means what it holds."""
    if not isinstance(tensor, Tensor):
        field = name.rpartition(".")[2]
        or_none = (" or None", ", or None if it has none") if field == "bias" else ("", "")
        got = type(tensor).__name__
        raise TypeError(f"{name}: expected a torch.Tensor{or_none[0]}, got {got}; pass the head's {field}{or_none[1]}")
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{name}: expected a plain tensor or parameter, got a {type(tensor).__name__}, whose values a product may "
            "not see as they are; dequantise or merge it, or compute its logits and pass them to "
            "vocab_parallel_cross_entropy"
        )
    expect(name, tensor, HEAD_DTYPES, "; a quantised head must be dequantised first")


def check_main_grad(main_grad: Tensor, weight: Tensor) -> None:
    expect("main_grad", main_grad, (torch.float32,))
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        expected = f"{_shape(weight)} on {weight.device}"
        raise ValueError(f"main_grad: expected shape {expected}, got {_shape(main_grad)} on {main_grad.device}")
    if main_grad.is_neg():
        raise ValueError("main_grad: must hold its own numbers, got a view of negative ones; pass its resolve_neg()")
    if not main_grad.is_contiguous():
        raise ValueError(f"main_grad: must be contiguous, got strides {main_grad.stride()}")


def check_number(name: str, value: object, *, positive: bool = False, at_most: float = math.inf) -> None:
    """Raise unless fp32 can hold the number, and it is at least 0, or above 0, and at most ``at_most``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    number = float(value) if abs(value) <= FP32.max else math.inf  # type: ignore[operator]
    if not (FP32.tiny if positive else 0) <= number <= min(at_most, FP32.max):
        least, opening = ("positive", "(") if positive else ("at least 0", "[")
        expected = f"{least} and finite in fp32" if at_most == math.inf else f"in {opening}0, {at_most:g}]"
        raise ValueError(f"{name}: must be {expected}, got {value}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        kind = type(value)  # NumPy's is named bool, too
        got = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        raise TypeError(f"{name}: expected a bool, got {got}; pass True or False")


def check_flag_or_auto(name: str, value: object) -> None:
    if isinstance(value, str) and value != "auto":
        raise ValueError(f"{name}: expected 'auto', True or False, got {value!r}")
    if not isinstance(value, str | bool):
        raise TypeError(f"{name}: expected 'auto', True or False, got {type(value).__name__}")


def looks_at(values: Tensor, check_labels: bool | str) -> bool:
    """Return whether ids or numbers of them are checked: with ``"auto"`` where the host has their values already."""
    if check_labels != "auto":
        return bool(check_labels)
    is_recorded = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # by make_fx
    return values.is_cpu and not has_no_values(values) and not is_recorded


def may_look_at(values: Tensor, check_labels: bool | str) -> bool:
    """Return the same for all calls that are alike, also those that are recorded."""
    return values.is_cpu if check_labels == "auto" else bool(check_labels)


def check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{name}: must fit in int64, got {value}")


def checked_count(name: str, value: object) -> int:
    """Return ``value`` as a positive int."""
    check_integer(name, value)
    count = int(value)  # type: ignore[call-overload]
    if count < 1:
        raise ValueError(f"{name}: must be positive, got {value}")
    return count


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_num_items(num_items: object, reduction: str, logits: Tensor) -> None:
    """Raise unless it is a number, or a tensor of one element. The host reads only one on the CPU."""
    if reduction != "sum":
        raise ValueError(f"num_items: expected reduction 'mean' or 'sum' with it, got {reduction!r}")
    if not isinstance(num_items, Tensor):
        check_number("num_items", num_items)
        return
    check_requires_no_gradient("num_items", num_items)
    check_dense("num_items", num_items)
    if num_items.numel() != 1:
        raise ValueError(f"num_items: expected 1 element, got shape {_shape(num_items)}")
    if num_items.dtype == torch.bool or num_items.is_complex():
        raise TypeError(f"num_items: dtype must be integer or floating point, got {num_items.dtype}")
    if num_items.device.type == "cpu" and not float(num_items) >= 0:
        raise ValueError(f"num_items: must be at least 0, got {float(num_items)}")
    if num_items.device.type != "cpu" and num_items.device != logits.device:
        raise ValueError(f"num_items: device must be cpu or that of logits, {logits.device}, got {num_items.device}")


def check_requires_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TypeError(f"{name}: expected a tensor that requires no gradient, got one that does; pass its detach()")


def check_label_range(
    labels: Tensor, vocab_size: int, ignore_index: int, *, name: str = "labels", names_ignored: bool = True
) -> None:
    """Raise ValueError for the first label outside ``[0, vocab_size)``. Waits for the device.

    ``names_ignored``: ``ignore_index`` is the caller's.
    """
    if has_no_values(labels):
        what = f"a {type(labels).__name__} on {labels.device}"
        raise TypeError(f"{name}: expected values to check, got {what}, which has none; use check_labels=False")
    labels = labels.long()  # a comparison wraps what does not fit in the labels' dtype
    outside = ((labels < 0) | (labels >= vocab_size)) & (labels != ignore_index)
    count = int(outside.sum())
    if count:
        position = outside.nonzero()[0].tolist()
        value = int(labels[tuple(position)])
        got = f"{count} outside, the first at position {tuple(position)}: {value}"
        others = f" or ignore_index {ignore_index}" if names_ignored else ""
        raise ValueError(f"{name}: must be in [0, {vocab_size}){others}, got {got}")


def check_some_kept(threshold: Tensor, row_max: Tensor) -> None:
    """Raise ValueError if a threshold is above all logits of its row, of which ``row_max [N]`` is then ``-inf``."""
    if has_no_values(row_max):
        return
    above = threshold[(row_max == -math.inf) & (threshold > -math.inf)]
    if len(above):
        raise ValueError(
            f"threshold: must leave a logit above -inf in each row, got {len(above)} that leave none, the first "
            f"{float(above[0]):.7g}; find it by sampling_threshold, or give these tokens the label ignore_index"
        )


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
