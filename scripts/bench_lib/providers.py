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
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from bench_lib.cases import IGNORE_INDEX, IN_FORWARD, OURS, REDUCTIONS, Case, Inputs
from bench_lib.rows import Row

QUACK_CHUNK_TOKENS = 4096  # its own default
TRL_COLUMNS = 32768  # of a chunk of the vocabulary, as TRL's trainers ask for
FP32_LOGITS, FP32 = f"{OURS}[fp32 logits]", {"logits_dtype": torch.float32}
KEPT_LOGITS, KEPT = f"{OURS}[kept logits]", {"keep_logits": "all"}
OUR_PACKAGE = "vocab-parallel-ce"
LossOf: TypeAlias = Callable[..., Any]  # of (*tensors, labels, reduction, group)
Step: TypeAlias = Callable[[Inputs, str, Any], tuple[Tensor, ...]]


@cache
def ones(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The upstream gradient, which a training step has before it calls the loss's backward."""
    return torch.ones(shape, dtype=dtype, device=device)


def through_autograd(losses_of: Callable[[Inputs, str, Any], Any], *, reduces_hidden: bool = True) -> Step:
    """Losses and gradients of ``losses_of``, which may return several losses.

    If not ``reduces_hidden``, the gradient of hidden is summed over the ranks afterwards.
    """

    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        loss = losses_of(inputs, reduction, group)
        losses = loss if isinstance(loss, tuple) else (loss,)
        if inputs.upstreams is None:
            upstream = [ones(each.shape, each.dtype, each.device) for each in losses]
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
    imported module; if ``is_step``, the whole step. ``context`` is around its calls. ``refuses`` gives the reason to
    refuse a case, or None. ``gradient`` says when this project writes it. ``baseline`` names the same call of another
    commit. If not ``is_whole``, its gradients are parts, which are not compared.
    """

    name: str
    loss_from: Callable[[Any], Any]
    module: str
    distribution: str
    takes: str = "logits"
    returns: Row | None = None
    of_one_rank: bool = True
    of_several: bool = True
    is_default: bool = True
    is_step: bool = False
    is_whole: bool = True
    reduces_hidden: bool = True
    refuses: Callable[[Case], str | None] = lambda case: None
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    gradient: str | None = None
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
        made = self.loss_from(importlib.import_module(self.module))
        if self.is_step:
            return made

        def losses_of(inputs: Inputs, reduction: str, group: Any) -> Any:
            return made(*inputs.tensors, inputs.labels, reduction, group)

        return through_autograd(losses_of, reduces_hidden=self.reduces_hidden)

    @property
    def version(self) -> str:
        return version_of(self.distribution, self.module.partition(".")[0])


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
    """Those of a comma-separated list, in the order of ``known``; ``all`` stands for the default ones."""
    known_names = [provider.name for provider in known]
    wanted = [name.strip() for name in (names or "all").split(",")]
    for name in wanted:
        if name not in (*known_names, "all"):
            raise ValueError(f"providers: expected all or some of {', '.join(known_names)}; got {name!r}")
    return [provider for provider in known if provider.name in wanted or (provider.is_default and "all" in wanted)]


def reduced(losses: Tensor, reduction: str) -> Tensor:
    """For a loss without a mean of its own: its user takes it."""
    return losses.mean() if reduction == "mean" else losses


def _is_reduced(case: Case) -> str | None:
    is_reduced = case.kind != "none"
    return None if is_reduced else "in_forward is for reduced losses: the grad_output of each token comes after forward"


def _is_mean(case: Case) -> str | None:
    return None if case.kind == "mean" else "timed with the means alone"


def _is_unreduced(case: Case) -> str | None:
    return None if case.kind == "none" else "a reduced loss makes its logits once: there are none to keep"


def _ours(name: str, gradient: str = "in_backward", **options: str) -> Provider:
    """In place by name: the default takes a new tensor, since the caller of ``torch.autograd.grad`` has the logits."""
    options["gradient"] = gradient
    return Provider(
        name,
        lambda m: lambda x, y, r, g: m.vocab_parallel_cross_entropy(x, y, group=g, reduction=r, **options),
        OURS,
        OUR_PACKAGE,
        of_several=options.get("impl") != "one_pass",
        is_default="impl" not in options,
        refuses=_is_reduced if gradient == "in_forward" else lambda case: None,
        gradient=gradient,
    )


def _unfused(ours: Any) -> LossOf:
    """Nobody else reads the logits, so a reduced loss may write their gradient in forward."""
    how = {"mean": "in_forward", "none": "auto"}
    return lambda h, w, y, r, g: ours.vocab_parallel_cross_entropy(
        functional.linear(h, w), y, group=g, reduction=r, gradient=how[r]
    )


def _eager(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return functional.cross_entropy(logits.float(), labels, reduction=reduction)


def _eager_linear(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), labels, reduction=reduction)


def _loss_parallel(parallel: Any) -> Step:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh_of = cache(DeviceMesh.from_group)

    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        (logits,) = inputs.tensors
        mesh = mesh_of(group, logits.device.type)
        shards = DTensor.from_local(logits.float(), mesh, [Shard(1)], run_check=False)
        with parallel.loss_parallel():
            loss: Any = functional.cross_entropy(shards, inputs.labels, reduction=reduction)
            (grad,) = torch.autograd.grad(loss, logits, torch.ones_like(loss))  # the loss is a DTensor
        return loss.to_local(), grad

    return step


def _torch_fused(nn: Any) -> LossOf:
    """With options given, since only then it works in chunks."""
    if not hasattr(nn.functional, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy")
    options = nn.LinearCrossEntropyOptions()
    return lambda h, w, y, r, g: nn.functional.linear_cross_entropy(h, w, y, reduction=r, options=options)


def _liger(liger: Any) -> LossOf:
    sharded = liger.LigerVocabParallelCrossEntropy()
    whole = {kind: liger.LigerCrossEntropyLoss(reduction=kind) for kind in REDUCTIONS}
    return lambda x, y, r, g: whole[r](x, y) if g is None else reduced(sharded(x[:, None], y[:, None], g).view(-1), r)


def _liger_linear(liger: Any, **options: Any) -> LossOf:
    modules = {kind: liger.LigerFusedLinearCrossEntropyLoss(reduction=kind, **options) for kind in REDUCTIONS}
    return lambda h, w, y, r, g: modules[r](w, h, y)


def _quack(quack: Any, in_place: bool) -> LossOf:
    return lambda x, y, r, g: quack.cross_entropy(x, y, reduction=r, inplace_backward=in_place)


def _quack_kernel(quack: Any) -> Step:
    """Loss and gradient of one launch: without autograd, and without the mean's weight."""

    @torch.no_grad()
    def step(inputs: Inputs, reduction: str, group: Any) -> tuple[Tensor, ...]:
        logits = inputs.tensors[0].detach()
        loss, grad = quack.cross_entropy_fwd(logits, inputs.labels, return_dx=True, inplace_backward=True)
        return loss, grad

    return step


def _quack_linear(quack: Any, **options: bool) -> LossOf:
    """As its module chooses: in chunks, or with the whole logits if nothing is reduced."""
    whole, chunked = quack.linear_cross_entropy_func, quack.chunked_linear_cross_entropy

    def loss_of(h: Tensor, w: Tensor, y: Tensor, r: str, g: Any) -> Any:
        if r == "none":
            return whole(h, w, None, y, reduction=r, inplace_backward=True)
        # Its kernel for scaled exponentials refuses chunks of as many tokens as there are hidden elements.
        chunk = QUACK_CHUNK_TOKENS // (1 if options or h.shape[-1] != QUACK_CHUNK_TOKENS else 2)
        return chunked(h, w, y, chunk, reduction=r, tuned=False, **options)

    return loss_of


def _trl_linear(utils: Any) -> LossOf:
    """Its log-probabilities, of tokens that are not ignored, as its trainers call them."""

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        live = labels != IGNORE_INDEX
        given = hidden[live], weight, None, labels[live], 1.0, TRL_COLUMNS, None, 1.0, ()
        losses: Tensor = -utils._ChunkedLogProbFunction.apply(*given)[0]
        every = torch.zeros_like(labels, dtype=losses.dtype)
        return losses.mean() if reduction == "mean" else every.masked_scatter(live, losses)

    return loss_of


def _flash(flash: Any) -> LossOf:
    loss = partial(flash.cross_entropy_loss, inplace_backward=True)
    return lambda x, y, r, g: reduced(loss(x, y, process_group=g)[0], r)


def _flash_linear(flash: Any) -> LossOf:
    losses_of = _flash(flash)

    def loss_of(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Tensor:
        losses: Tensor = losses_of(functional.linear(hidden, weight), labels, "none", group)
        return losses.sum() / (labels != IGNORE_INDEX).sum() if reduction == "mean" else losses

    return loss_of


def _engine(engine: Any, **options: bool) -> LossOf:
    def loss_of(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        is_mean = reduction == "mean"
        loss = engine.parallel_cross_entropy(logits[None], labels[None], 0.0, is_mean, group, **options)
        return loss.reshape(() if is_mean else -1)

    return loss_of


@cache
def group_of_one() -> Any:
    """The group of this process alone, for a loss that needs one."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def _megatron(megatron: Any) -> LossOf:
    loss = megatron.fused_vocab_parallel_cross_entropy
    return lambda x, y, r, g: reduced(loss(x[:, None], y[:, None], g or group_of_one()).view(-1), r)


def _megatron_unfused(megatron: Any) -> LossOf:
    loss = megatron.vocab_parallel_cross_entropy
    return lambda x, y, r, g: reduced(loss(x[:, None], y[:, None], tp_group=g or group_of_one()).view(-1), r)


def _cut(cut: Any, **options: Any) -> LossOf:
    return lambda h, w, y, r, g: cut.linear_cross_entropy(h, w, y, reduction=r, **options)


FLASH, LIGER = "flash_attn.ops.triton.cross_entropy", "liger_kernel.transformers"
MEGATRON, LOSS_PARALLEL = "megatron.core.fusions.fused_cross_entropy", "torch.distributed.tensor.parallel"
QUACK, ENGINE = "quack.cross_entropy", "transformer_engine.pytorch.cross_entropy"
_head = partial(Provider, takes="head")
_linear = partial(_head, module=OURS, distribution=OUR_PACKAGE)
_torch = partial(Provider, module="torch.nn", distribution="torch", of_several=False)
_torch_head = partial(_torch, takes="head")
_quacks = partial(Provider, distribution="quack-kernels", of_several=False)
_quack_head = partial(_quacks, takes="head", module="quack.linear_cross_entropy")
_engines = partial(Provider, module=ENGINE, distribution="transformer-engine")
_cuts = partial(_head, module="cut_cross_entropy", distribution="cut-cross-entropy", of_several=False)

PROVIDERS: tuple[Provider, ...] = (
    _ours(OURS),
    _ours(IN_FORWARD, gradient="in_forward"),
    _ours(f"{OURS}[triton]", impl="triton"),
    _ours(f"{OURS}[one_pass]", impl="one_pass", gradient="in_forward"),
    _torch("torch eager", lambda m: _eager),
    # Without dynamic=False a second shape gets kernels for any number of rows.
    _torch("torch.compile", lambda m: torch.compile(_eager, dynamic=False)),
    Provider("loss_parallel", _loss_parallel, LOSS_PARALLEL, "torch", of_one_rank=False, is_step=True),
    Provider("liger-kernel", _liger, LIGER, "liger-kernel"),
    _quacks("quack-kernels", partial(_quack, in_place=True), QUACK),
    _quacks("quack-kernels (out of place)", partial(_quack, in_place=False), QUACK),
    _quacks(
        "quack-kernels (kernel alone)",
        _quack_kernel,
        QUACK,
        is_step=True,
        refuses=_is_mean,
        returns=Row("cross_entropy", {"reduction": "none"}),
    ),
    Provider("flash-attn", _flash, FLASH, "flash-attn"),
    # Before transformer-engine: it looks for that when it is imported.
    Provider("megatron-core", _megatron, MEGATRON, "megatron-core"),
    Provider(
        "megatron-core (unfused)", _megatron_unfused, "megatron.core.tensor_parallel.cross_entropy", "megatron-core"
    ),
    _engines("transformer-engine", _engine),
    _engines("transformer-engine (overwrite)", partial(_engine, overwrite_input=True)),
    _linear(OURS, lambda m: lambda h, w, y, r, g: m.linear_cross_entropy(h, w, y, group=g, reduction=r)),
    _linear(FP32_LOGITS, lambda m: lambda h, w, y, r, g: m.linear_cross_entropy(h, w, y, group=g, reduction=r, **FP32)),
    _linear(
        KEPT_LOGITS,
        lambda m: lambda h, w, y, r, g: m.linear_cross_entropy(h, w, y, group=g, reduction=r, **KEPT),
        refuses=_is_unreduced,
    ),
    _linear(f"F.linear + {OURS}", _unfused, reduces_hidden=False),
    _torch_head("torch eager", lambda m: _eager_linear),
    _torch_head("torch.compile", lambda m: torch.compile(_eager_linear, dynamic=False)),
    _torch_head("F.linear_cross_entropy", _torch_fused),
    _head("F.linear + flash-attn", _flash_linear, FLASH, "flash-attn", reduces_hidden=False),
    _head("liger-kernel", _liger_linear, LIGER, "liger-kernel", of_several=False),
    # It sums the weight's gradient in bf16, unless told not to.
    _head(
        "liger-kernel (fp32 sum)",
        partial(_liger_linear, accum_dtype=torch.float32),
        LIGER,
        "liger-kernel",
        of_several=False,
    ),
    # It leaves blocks of small probabilities out of the gradients, unless told not to.
    _cuts("cut-cross-entropy", _cut),
    _cuts("cut-cross-entropy (exact)", partial(_cut, filter_eps=None)),
    # It scales exponentials instead of logits where it can, unless told not to.
    _quack_head("quack-kernels", _quack_linear),
    _quack_head("quack-kernels (base)", partial(_quack_linear, use_scaled_exp=False), refuses=_is_mean),
    _head("trl", _trl_linear, "trl.trainer.utils", "trl", of_several=False),
)
