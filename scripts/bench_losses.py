"""Measures class weights, soft targets, distillation, outputs of log-probabilities and fp32 logits, in bf16.

    python scripts/bench_losses.py --json scripts/results/losses_1gpu.json
    torchrun --nproc-per-node 2 scripts/bench_losses.py --json scripts/results/losses_2gpu.json

Forward and backward, the gradient over the logits, device time. The providers take turns in every round. ``ratio`` is
to the first of them: ``copy`` is one read and one write of the logits. A step over logits is four calls, each on its
own. Several ranks cut the vocabulary; all of them have the same numbers in their logits. A machine without a GPU can
try it with ``--tiny``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_lib.cases import divided
from bench_lib.options import baseline_package
from bench_lib.steps import head_of, measured, parser_of, run
from bench_lib.timing import Ranks, joined_ranks
from torch import Tensor

from vocab_parallel_ce import (
    distillation_loss,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_token_log_probs,
    soft_cross_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

LOGITS, LINEAR = ((4096, 128256), (8192, 32064)), ((4096, 4096, 128256), (16384, 4096, 128256))
TINY = ((16, 200),), ((16, 8, 200),)
OUTPUTS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "is_top1", "rank")
CALLS, TOP = 4, 64
Providers = dict[str, Callable[..., Any]]
Made = Callable[[], list[list[Tensor]]]  # the tensors of each call


def over_logits(n_tokens: int, vocab_size: int, ranks: Ranks) -> tuple[Providers, Made]:
    """Return the providers, of logits, and what makes these anew."""
    device, group, n_columns = ranks.device, ranks.group, divided(vocab_size, ranks.size)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    source, teacher = (random(n_tokens, n_columns).mul_(3).bfloat16() for _ in range(2))
    probs, out = teacher.softmax(-1) / ranks.size, torch.empty_like(source)
    labels = torch.randint(0, vocab_size, (n_tokens,), device=device, generator=generator)
    class_weight, temperature = random(n_columns).abs(), random(n_tokens).abs() + 0.5
    in_place: Any = {"gradient": "in_backward", "group": group}
    loss = partial(vocab_parallel_cross_entropy, labels=labels, group=group)
    log_probs = partial(token_log_probs, labels=labels, **in_place)
    soft = partial(soft_cross_entropy, target_probs=probs, **in_place)
    distillation = partial(distillation_loss, teacher_logits=teacher, **in_place)
    top = teacher[:, :TOP].log_softmax(-1).float()  # which columns the teacher knows does not matter
    ids = torch.arange(TOP, device=device).expand(n_tokens, -1)

    providers: Providers = {
        "copy": lambda x: out.copy_(x.detach())[0, 0],
        "mean": partial(loss, **in_place),
        "mean, class_weight": partial(loss, class_weight=class_weight, **in_place),
        "mean, label_smoothing": partial(loss, label_smoothing=0.1, **in_place),
        "mean, class_weight and label_smoothing": partial(
            loss, class_weight=class_weight, label_smoothing=0.1, **in_place
        ),
        "mean, in_forward": partial(loss, gradient="in_forward"),
        "mean, in_forward, class_weight": partial(loss, class_weight=class_weight, gradient="in_forward"),
        "soft_cross_entropy": soft,
        "soft_cross_entropy, class_weight": partial(soft, class_weight=class_weight),
        "soft_cross_entropy, class_weight and label_smoothing": partial(
            soft, class_weight=class_weight, label_smoothing=0.1
        ),
        **{f"distillation, {name}": partial(distillation, divergence=name) for name in ("forward", "reverse", "js")},
        "distillation, forward, hard_weight": partial(distillation, labels=labels, hard_weight=0.5),
        f"distillation, top {TOP}": partial(distillation_loss, teacher_ids=ids, teacher_log_probs=top, **in_place),
        "token_log_probs": log_probs,
        **{f"token_log_probs, {name}": partial(log_probs, outputs=(name,)) for name in OUTPUTS},
        f"token_log_probs, top_k={TOP}": partial(log_probs, top_k=TOP),
        "token_log_probs, a temperature per token": partial(log_probs, temperature=temperature),
    }
    return providers, lambda: [[source.clone().requires_grad_()] for _ in range(CALLS)]


def of_heads(n_tokens: int, width: int, vocab_size: int, ranks: Ranks, baseline: Any) -> tuple[Providers, Made]:
    """Return the providers, of hidden states and a weight, and what makes these anew."""
    device, n_columns = ranks.device, divided(vocab_size, ranks.size)
    cut: Any = {"group": ranks.group}
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(n_tokens, width, device=device, generator=generator).bfloat16()
    weight = torch.randn(n_columns, width, device=device, generator=generator).mul_(0.05).bfloat16()
    labels = torch.randint(0, vocab_size, (n_tokens,), device=device, generator=generator)
    class_weight = torch.rand(n_columns, device=device, generator=generator)
    teacher = hidden.flip(0), weight.flip(1)
    wide: Any = {"logits_dtype": torch.float32}
    loss, log_probs = (partial(of, labels=labels, **cut) for of in (linear_cross_entropy, linear_token_log_probs))
    providers: Providers = {
        "linear": loss,
        "linear, logits_dtype": partial(loss, **wide),
        "linear, class_weight": partial(loss, class_weight=class_weight),
        "linear, distillation": lambda *student: linear_distillation_loss(student[0], student[1], *teacher, **cut),
        "linear, log_probs": log_probs,
        "linear, log_probs, logits_dtype": partial(log_probs, **wide),
    }
    if ranks.size == 1:  # on several, the gradient of the hidden states would need an all_reduce too
        providers["two matmuls and distillation"] = lambda *student: distillation_loss(
            F.linear(*student), F.linear(*teacher)
        )
    else:
        providers["linear, sequence_parallel"] = lambda hidden, weight: loss(
            hidden.chunk(ranks.size)[ranks.rank], weight, sequence_parallel=True
        )
    if baseline is not None:
        providers["linear, baseline"] = partial(baseline.linear_cross_entropy, labels=labels, **cut)
        providers["linear, log_probs, baseline"] = partial(baseline.linear_token_log_probs, labels=labels, **cut)
    return providers, lambda: [[hidden.requires_grad_(), weight.requires_grad_()]]


def measure(shape: tuple[int, ...], ranks: Ranks, rounds: int, baseline: Any) -> dict[str, Any]:
    of_shape: Any = over_logits if len(shape) == 2 else partial(of_heads, baseline=baseline)
    providers, made = of_shape(*shape, ranks)
    calls: list[list[Tensor]] = []
    ones = {shape: torch.ones(shape, device=ranks.device) for shape in (torch.Size(), torch.Size(shape[:1]))}

    def step(name: str) -> Tensor:
        for tensors in calls:
            found = providers[name](*tensors)
            found = [found] if isinstance(found, Tensor) else [out for out in found if out is not None]
            outputs = [found[0], *(out for out in found[1:] if out.requires_grad)]
            if outputs[0].requires_grad:
                torch.autograd.grad(outputs, tensors, [ones[out.shape] for out in outputs])
        return outputs[0].detach().sum()

    def forget() -> None:
        calls.clear()
        calls.extend(made())

    case, contexts = " x ".join(map(str, shape)), dict.fromkeys(providers, nullcontext)
    return measured(case, contexts, step, forget, ranks.timer(), rounds, is_queued=True)


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--baseline", type=Path, metavar="DIR", help="another checkout, for its linear losses")
    words = parser.parse_args()
    baseline = None if words.baseline is None else baseline_package(words.baseline)
    with joined_ranks() as ranks:
        shapes = [shape for kind in (TINY if words.tiny else (LOGITS, LINEAR)) for shape in kind]
        head = head_of("losses")
        run(head, shapes, lambda shape: measure(shape, ranks, words.rounds, baseline), ranks, words.json)


if __name__ == "__main__":
    main()
