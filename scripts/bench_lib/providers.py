"""Everything that is measured: this project, PyTorch and other projects, for logits and for a head.

A provider is a name, what it takes, what it returns and what it needs installed. It is imported when it is first used.
If that fails, it is absent, with the reason. Each is called alike: ``step(inputs, reduction, group)`` returns the
losses and then the gradients of ``inputs.tensors``, as ``torch.autograd.grad`` returns them to a training step. Logits
may be overwritten.

In the lambdas: m the module, x logits, h hidden, w weight, y labels, r the reduction, g the group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench_lib import cases, peers
from bench_lib.calls import Row, baseline_package, called, of_head, rows_of
from bench_lib.cases import EAGER, EAGER_16, IN_FORWARD, OURS, Case, Inputs
from bench_lib.peers import LossOf, Step

OUR_PACKAGE = "vocab-parallel-ce"
ones = cache(torch.ones)  # upstream gradients, which a training step has before it calls the loss's backward


def through_autograd(losses_of: Callable[[Inputs, str, Any], Any], *, reduces_hidden: bool = True) -> Step:
    """Losses and gradients of ``losses_of``, which may return several losses.

    If not ``reduces_hidden``, the gradient of hidden is summed over the ranks afterwards.
    """

    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        loss = losses_of(inputs, reduction, group)
        losses = loss if isinstance(loss, tuple) else (loss,)
        if inputs.upstreams is None:
            upstream = [ones(each.shape, dtype=each.dtype, device=each.device) for each in losses]
        else:
            upstream = [inputs.upstreams[each.dtype] for each in losses]
        grads = torch.autograd.grad(losses, inputs.tensors, upstream)
        if group is not None and not reduces_hidden:
            dist.all_reduce(grads[0], group=group)
        return (*(each.detach() for each in losses), *grads)

    return step


@dataclass(frozen=True)
class Provider:
    """One way to compute a loss and its gradients.

    ``takes`` is ``"logits"`` or ``"head"``. ``returns`` is what it computes, if not the cross-entropy of the reduction
    asked for. ``module`` and ``distribution`` are what it needs installed. ``loss_from`` makes the loss from the
    imported module; if ``is_step``, the whole step. ``context`` is around its calls. ``only`` is the reduction that it
    is timed with, if not all. ``baseline`` names the same call of another commit. If not ``is_whole``, its gradients
    are parts, which are not compared.
    """

    name: str
    loss_from: Callable[[Any], Any]
    module: str
    distribution: str
    takes: str = "logits"
    returns: Row | None = None
    of_one_rank: bool = True
    of_several: bool = True
    is_step: bool = False
    is_whole: bool = True
    reduces_hidden: bool = True
    only: str | None = None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    baseline: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.module == OURS

    def absent(self, ranks: int) -> str | None:
        """Why it cannot run here on this number of ranks, or None."""
        if ranks > 1 and not self.of_several:
            return "needs the whole vocabulary on one rank"
        if ranks == 1 and not self.of_one_rank:
            return "needs several ranks"
        try:
            self.step  # noqa: B018
        except ImportError as error:
            return f"not installed: {first_line(error)}"
        except Exception as error:  # another project's import may raise anything; it is reported
            return f"cannot be imported: {type(error).__name__}: {first_line(error)}"
        return None

    @cached_property
    def step(self) -> Step:
        made = self.loss_from(peers.imported(self.module))
        if self.is_step:
            return made

        def losses_of(inputs: Inputs, reduction: str, group: Any) -> Any:
            return made(*inputs.tensors, inputs.labels, reduction, group)

        return through_autograd(losses_of, reduces_hidden=self.reduces_hidden)


def version_of(package: str, module: str) -> str:
    """Return the version of an installed package; of one that is only sources on the path, what they say, or "source".

    Raises:
        ImportError: there is neither.
    """
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        found: str = getattr(importlib.import_module(module), "__version__", "source")
        return found.partition("+")[0]  # NeMo-RL adds the commit of whatever repository its sources lie in


def first_line(error: BaseException) -> str:
    """The first line of the message that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def chosen(names: str | None, known: Sequence[Provider]) -> list[Provider]:
    """Those of a comma-separated list, in the order of ``known``, or all."""
    known_names = [provider.name for provider in known]
    wanted = [name.strip() for name in (names or "all").split(",")]
    for name in wanted:
        if name not in (*known_names, "all"):
            raise ValueError(f"providers: expected all or some of {', '.join(known_names)}; got {name!r}")
    return [provider for provider in known if provider.name in wanted or "all" in wanted]


def row_providers(case: Case, baseline: Path | None = None) -> list[Provider]:
    """Every row of a case; each is followed by the same call of the checkout ``baseline``, which may have none."""
    found, other = [], None if baseline is None else baseline_package(baseline).__name__
    for name, row in rows_of(case).items():

        def step(package: Any, row: Row = row) -> Step:
            return through_autograd(lambda inputs, reduction, group: called(row, package, inputs, group))

        is_whole = not row.options.get("sequence_parallel")
        made = partial(_linear if case.is_head else _logits, returns=row, is_step=True, is_whole=is_whole)
        found.append(made(name, step, baseline=other and name + cases.BASELINE))
        if other is not None:
            found.append(made(name + cases.BASELINE, step, module=other))
    return found


def _over_logits(gradient: str) -> Callable[[Any], LossOf]:
    return lambda m: lambda x, y, r, g: m.vocab_parallel_cross_entropy(x, y, group=g, reduction=r, gradient=gradient)


def _over_linear(gradient: str) -> Callable[[Any], LossOf]:
    """Nobody else reads the logits, so the default writes over them too, in backward."""
    return lambda m: peers.after_linear(_over_logits(gradient)(m))


def _head_loss(**options: Any) -> Callable[[Any], LossOf]:
    return lambda m: lambda h, w, y, r, g: m.linear_cross_entropy(h, w, y, group=g, reduction=r, **of_head(m, options))


FLASH, LIGER = "flash_attn.ops.triton.cross_entropy", "liger_kernel.transformers"
LIGER_SHARDED = "liger_kernel.ops.fused_linear_scaled_cross_entropy"
MEGATRON, MEGATRON_UNFUSED = "megatron.core.fusions.fused_cross_entropy", "megatron.core.tensor_parallel.cross_entropy"
QUACK, FLA_LINEAR = "quack.cross_entropy", "fla.modules.fused_linear_cross_entropy"
UNREDUCED = Row("cross_entropy", {"reduction": "none"})
_logits = partial(Provider, module=OURS, distribution=OUR_PACKAGE)
_head = partial(Provider, takes="head")
_linear = partial(_logits, takes="head")
_unfused = partial(_linear, reduces_hidden=False)
_torch = partial(Provider, module="torch.nn", distribution="torch", of_several=False)
_sharded = partial(Provider, module=peers.PARALLEL, distribution="torch", of_one_rank=False)
_torch_head = partial(_torch, takes="head")
_quacks = partial(Provider, distribution="quack-kernels", of_several=False)
_quack_head = partial(_quacks, takes="head", module="quack.linear_cross_entropy")
_ligers = partial(_head, module=LIGER, distribution="liger-kernel", of_several=False)
_liger_sharded = partial(_head, module=LIGER_SHARDED, of_one_rank=False)
_flas = partial(Provider, distribution="fla-core")
_megatrons = partial(Provider, distribution="megatron-core")
_engines = partial(Provider, module=peers.ENGINE, distribution="transformer-engine")
_cuts = partial(_head, module="cut_cross_entropy", distribution="cut-cross-entropy", of_several=False)

# In place by name: the default takes a new tensor, since the caller of ``torch.autograd.grad`` has the logits.
PROVIDERS: tuple[Provider, ...] = (
    _logits(OURS, _over_logits("in_backward")),
    # The grad_output of each token comes after the forward pass.
    _logits(IN_FORWARD, _over_logits("in_forward"), only="mean"),
    _torch(EAGER, lambda m: peers.eager),
    # Without dynamic=False a second shape gets kernels for any number of rows.
    _torch(cases.COMPILED, lambda m: torch.compile(peers.eager, dynamic=False)),
    _sharded(cases.SHARDED, peers.loss_parallel, context=peers.in_loss_parallel),
    Provider("liger-kernel", peers.liger_loss, LIGER, "liger-kernel"),
    _quacks("quack-kernels", partial(peers.quack_loss, in_place=True), QUACK),
    _quacks("quack-kernels (out of place)", partial(peers.quack_loss, in_place=False), QUACK),
    _quacks("quack-kernels (kernel alone)", peers.quack_kernel, QUACK, is_step=True, only="mean", returns=UNREDUCED),
    Provider("flash-attn", peers.in_place_loss, FLASH, "flash-attn"),
    _flas("fla-core", peers.in_place_loss, peers.FLA),
    _flas("fla-core (Gluon)", peers.fla_gluon_loss, f"{peers.FLA}.gluon", context=peers.in_gluon),
    # Before transformer-engine: it looks for that when it is imported.
    _megatrons("megatron-core", lambda m: peers.sharded_losses(m.fused_vocab_parallel_cross_entropy), MEGATRON),
    _megatrons(
        "megatron-core (unfused)",
        lambda m: peers.sharded_losses(lambda x, y, g: m.vocab_parallel_cross_entropy(x, y, tp_group=g)),
        MEGATRON_UNFUSED,
    ),
    _engines("transformer-engine", peers.engine_loss),
    _engines("transformer-engine (overwrite)", partial(peers.engine_loss, overwrite_input=True)),
    _linear(OURS, _head_loss()),
    _linear(f"{OURS}[fp32 logits]", _head_loss(logits_dtype=torch.float32)),
    _linear(f"{OURS}[kept logits]", _head_loss(keep_logits="all"), only="none"),
    _unfused(cases.UNFUSED, _over_linear("auto")),
    _unfused(cases.UNFUSED_IN_FORWARD, _over_linear("in_forward"), only="mean"),
    _torch_head(EAGER, lambda m: peers.after_linear(peers.eager)),
    _torch_head(cases.COMPILED, lambda m: torch.compile(peers.after_linear(peers.eager), dynamic=False)),
    _torch_head(EAGER_16, lambda m: peers.after_linear(peers.eager_16)),
    _torch_head(cases.COMPILED_16, lambda m: torch.compile(peers.after_linear(peers.eager_16), dynamic=False)),
    _torch_head("F.linear_cross_entropy", peers.torch_linear),
    _head("F.linear + flash-attn", peers.flash_linear, FLASH, "flash-attn", reduces_hidden=False),
    _ligers("liger-kernel", peers.liger_linear),
    # It sums the weight's gradient in bf16, unless told not to.
    _ligers("liger-kernel (fp32 sum)", partial(peers.liger_linear, accum_dtype=torch.float32)),
    _liger_sharded("liger-kernel (sharded)", peers.liger_sharded, distribution="liger-kernel"),
    _liger_sharded("liger-kernel (NVSHMEM)", peers.liger_native, distribution="liger-cute-kernels"),
    # It leaves blocks of small probabilities out of the gradients, unless told not to.
    _cuts("cut-cross-entropy", peers.cut_linear),
    _cuts("cut-cross-entropy (exact)", partial(peers.cut_linear, filter_eps=None)),
    # It scales exponentials instead of logits where it can, unless told not to.
    _quack_head("quack-kernels", peers.quack_linear),
    _quack_head("quack-kernels (base)", partial(peers.quack_linear, use_scaled_exp=False), only="mean"),
    _flas("fla-core", peers.fla_linear, FLA_LINEAR, takes="head", only="mean"),
)
