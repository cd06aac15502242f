"""Every public function on a device without kernels, as MPS, XPU and NPUs are: PyTorch's spare backend, without values.

    python -m tests.support.host.other_device

Prints as JSON, for each call, the devices and dtypes of all that operators take and return, forward and backward, and
what ``impl="triton"`` says. Needs a process of its own, because a process has one spare backend.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import vocab_parallel_ce as vp
from tests.support.cases import flat
from tests.support.cases.logits import EVERY
from tests.support.ranks.collectives import error_of, recorded
from vocab_parallel_ce import checks

NAME, TOKENS, COLUMNS, WIDTH = "npu", 6, 40, 8
OUTPUTS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")


def calls_on(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Return calls of every function, loss and kind of option, which pass on ``impl``."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype).requires_grad_()

    logits, hidden, weight, bias = (
        random(TOKENS, COLUMNS),
        random(TOKENS, WIDTH),
        random(COLUMNS, WIDTH),
        random(COLUMNS),
    )
    labels, ids = torch.arange(TOKENS, device=device), torch.arange(TOKENS * 4, device=device).view(TOKENS, 4)
    per_class, per_token = torch.rand(COLUMNS, device=device), torch.rand(TOKENS, device=device)
    of_teacher = torch.rand(TOKENS, COLUMNS, device=device)
    bounds = torch.arange(0, 7, 3, device=device)
    ce, linear = vp.vocab_parallel_cross_entropy, flat.linear_cross_entropy
    student, teacher = vp.Head(hidden, weight, bias), vp.Head(hidden.detach(), weight.detach())
    calls: dict[str, Callable[..., Any]] = {
        "every option": lambda **k: ce(logits * 1, labels, class_weight=per_class, **EVERY, **k),
        "outputs": lambda **k: ce(logits * 1, labels, outputs=OUTPUTS, **EVERY, **k),
        "in forward": lambda **k: ce(logits * 1, labels, gradient="in_forward", num_items=5, **EVERY, **k),
        "in place": lambda **k: ce(logits * 1, labels, gradient="in_backward", reduction="none", **k),
        "padding": lambda **k: ce(logits * 1, labels, vocab_size=37, **k),
        "packed": lambda **k: ce(logits * 1, vp.next_labels(labels, cu_seqlens=bounds), **k),
        "log-probs": lambda **k: vp.token_log_probs(logits * 1, labels, temperature=per_token, outputs=OUTPUTS, **k),
        "head": lambda **k: linear(hidden, weight, labels, bias=bias, chunk_size=4, **EVERY, **k),
        "head, outputs": lambda **k: linear(hidden, weight, labels, outputs=OUTPUTS, chunk_size=4, **k),
        "head, fp32": lambda **k: linear(hidden, weight, labels, logits_dtype=torch.float32, chunk_size=4, **k),
        "head, valid": lambda **k: linear(hidden, weight, labels, valid_tokens=5, chunk_size=4, **k),
        "head, kept": lambda **k: linear(hidden, weight, labels, reduction="none", keep_logits="all", **k),
        "head, log-probs": lambda **k: flat.linear_token_log_probs(hidden, weight, labels, temperature=per_token, **k),
        "top-k teacher": lambda **k: vp.distillation_loss(logits * 1, vp.TopKTeacher(ids, ids * -1.0, "bucket"), **k),
    }
    for kind in ("forward", "reverse", "js"):
        given = {"divergence": kind, "temperature": 2.0, "labels": labels, "hard_weight": 0.5}
        calls[kind] = lambda given=given, **k: vp.distillation_loss(logits * 1, of_teacher.to(dtype), **given, **k)
        calls[f"head, {kind}"] = lambda given=given, **k: flat.linear_distillation_loss(student, teacher, **given, **k)
    return calls


def found_in(values: Any) -> list[str]:
    """Return the devices and dtypes of all tensors, except single numbers of the CPU, which may go anywhere."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    kinds = [f"{t.device.type} {t.dtype}" for t in tensors if t.dim() > 0 or t.device.type == NAME]
    return kinds + [str(value) for value in tree_leaves(values) if isinstance(value, torch.dtype)]


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16]  # autocast asks, also to be off
    warnings.simplefilter("ignore")  # of pointers of tensors without values
    # The package takes what follows for tensors that have values, as it takes those of a real device.
    checks.has_no_values = lambda tensor: False  # type: ignore[assignment]
    checks.check_parameter = lambda name, tensor: None  # type: ignore[assignment]
    report: dict[str, Any] = {}
    with FakeTensorMode():
        for dtype in (torch.float32, torch.bfloat16):
            for name, call in calls_on(torch.device(NAME, 0), dtype).items():
                with recorded(lambda func, args, kwargs: found_in((args, kwargs))) as calls:
                    found = call()
                    results = [value for value in tree_leaves(found) if value is not None]
                    sum(value.float().sum() for value in results if value.requires_grad).backward()
                kinds = {kind for each in calls for kind in each} | set(found_in(results))
                report[f"{name}, {dtype}"] = {"kinds": sorted(kinds), "triton": error_of(partial(call, impl="triton"))}
    print(json.dumps(report), flush=True)
    os._exit(0)  # PyTorch may abort while Python ends: docs/options.md#errors


if __name__ == "__main__":
    main()
