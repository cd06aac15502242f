"""One call of the loss: its arguments checked, then statistics -> exchange -> outputs and gradient.

    logits --online_softmax--> RowStats [N, K] --all_gather--> [R, N, K] --> loss, grad_logits

Public functions prepare a :class:`Call` and run it, most of them under autograd.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import agreement, checks
from vocab_parallel_ce.blocks import one_pass_config
from vocab_parallel_ce.collectives import all_gather_stats, begin_all_gather, group_position
from vocab_parallel_ce.layout import VECTOR_BYTES, row_layout, rows_are_disjoint
from vocab_parallel_ce.overwritten import check_not_overwritten
from vocab_parallel_ce.selection import Workload, gpu_of, select
from vocab_parallel_ce.shard import VocabShard
from vocab_parallel_ce.spec import LossOptions, TokenOutputs

# A private function: None in a PyTorch without it.
_top_saved_tensor_hooks: Callable[[bool], object] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)


class Call(NamedTuple):
    """One validated call: what runs, on which shard, and the options of the loss."""

    launchers: ModuleType
    one_pass: Callable[..., None] | None
    rank: int
    n_ranks: int
    shard: VocabShard
    options: LossOptions
    reduction: str
    gradient: str
    loss_shape: torch.Size
    group: Any
    num_items: Tensor | None  # [1], of a sum

    def statistics(
        self, logits: Tensor, labels: Tensor, outputs: TokenOutputs | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """``[R, N, K]`` statistics of all ranks, and the ``[1]`` divisor of a mean or a sum over items.

        ``outputs``, where given, are filled by the same launch: there must be one rank, and no mean.
        """
        stats, divisor = self.local_statistics(logits, labels, outputs)
        if self.n_ranks > 1:
            all_gather_stats(stats, self.rank, self.group)
        return stats, divisor

    def local_statistics(
        self, logits: Tensor, labels: Tensor, outputs: TokenOutputs | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """As :meth:`statistics`, with those of this rank alone."""
        shape = (self.n_ranks, labels.shape[0], len(self.options.statistics))
        stats = logits.new_empty(shape, dtype=torch.float32)
        counts = self.reduction == "mean"
        valid_rows = logits.new_empty(1, dtype=torch.int32) if counts else None
        self.launchers.online_softmax(
            logits,
            labels,
            stats,
            self.rank,
            valid_rows,
            outputs,
            self.num_items,
            shard=self.shard,
            options=self.options,
        )
        return stats, valid_rows if counts else self.num_items

    def begin_gather(self, stats: Tensor) -> Any:
        """Begin to fill ``stats [R, N, K]``, N > 0, with those of all ranks; its wait() must be called."""
        return begin_all_gather(stats, stats.narrow(0, self.rank, 1), self.group)

    def outputs(self, logits: Tensor, labels: Tensor) -> tuple[TokenOutputs, Tensor, Tensor | None]:
        """What was asked for, and the statistics and divisor it came from. Reads the logits once."""
        outputs = self.unfilled(logits)
        if self.n_ranks == 1 and self.reduction != "mean":
            stats, divisor = self.statistics(logits, labels, outputs)
        else:
            stats, divisor = self.statistics(logits, labels)
            self.launchers.token_outputs(
                stats, labels, divisor, outputs, shard=self.shard, options=self.options
            )
        return self.reduced(outputs), stats, divisor

    def unfilled(self, logits: Tensor) -> TokenOutputs:
        """Tensors for what was asked for.

        Unreduced losses are no view of something larger: autograd forbids to change a view that a
        Function returns, as ``loss += auxiliary_loss`` does.
        """
        shape, wanted = self.loss_shape, self.options
        loss = logits.new_empty(shape, dtype=torch.float32)
        if not (wanted.entropy or wanted.predictions):
            return TokenOutputs(loss, None, None, None)
        return TokenOutputs(
            loss,
            torch.empty_like(loss) if wanted.entropy else None,
            torch.empty_like(loss) if wanted.predictions else None,
            torch.empty_like(loss, dtype=torch.int64) if wanted.predictions else None,
        )

    def write_gradient(
        self,
        logits: Tensor,
        labels: Tensor,
        stats: Tensor,
        divisor: Tensor | None,
        *,
        into: Tensor,
        grad_output: Tensor | None = None,
        grad_entropy: Tensor | None = None,
        loss: Tensor | None = None,
    ) -> None:
        """Fill ``into``, laid out as ``logits`` or the same tensor, and ``loss [N]`` where given."""
        self.launchers.cross_entropy(
            logits,
            stats,
            labels,
            divisor,
            grad_output,
            grad_entropy,
            loss,
            into,
            shard=self.shard,
            options=self.options,
        )

    def outputs_and_gradient(self, logits: Tensor, labels: Tensor) -> TokenOutputs:
        """What was asked for; the gradient replaces ``logits``, which must be :func:`overwritable`."""
        outputs = self.unfilled(logits)
        self.fill(logits, labels, outputs)
        raise_version(logits)
        return self.reduced(outputs)

    def fill(self, logits: Tensor, labels: Tensor, outputs: TokenOutputs) -> None:
        """Fill ``outputs``; the gradient replaces ``logits``."""
        if self.one_pass is not None:
            counted, losses = self.reduction == "mean", outputs.loss.view(-1)
            self.one_pass(logits, labels, self.num_items, losses, counted=counted, options=self.options)
        else:
            self.fill_from(*self.statistics(logits, labels), logits, labels, outputs)

    def fill_from(
        self, stats: Tensor, divisor: Tensor | None, logits: Tensor, labels: Tensor, outputs: TokenOutputs
    ) -> None:
        """:meth:`fill` from the statistics of all ranks."""
        if self.options.predictions:
            self.launchers.token_outputs(
                stats, labels, divisor, outputs, shard=self.shard, options=self.options
            )
            self.write_gradient(logits, labels, stats, divisor, into=logits)
        else:
            losses = outputs.loss.view(-1)
            self.write_gradient(logits, labels, stats, divisor, into=logits, loss=losses)

    def reduced(self, outputs: TokenOutputs) -> TokenOutputs:
        """The divisor is in each of the losses already."""
        return outputs if self.reduction == "none" else outputs._replace(loss=outputs.loss.sum())


def checked_options(
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    smoothing_formula: str = "torch",
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    temperature: float = 1.0,
    entropy: bool = False,
    metrics: bool = False,
    vocab_size: int | None = None,
) -> LossOptions:
    """Checked options; ``vocab_size``, which ``"megatron"`` and ``metrics`` depend on, may be unknown yet.

    A temperature divides z: ``softcap * tanh(u / softcap) / T`` is that of ``u / T`` and ``softcap / T``.
    """
    checks.check_integer("ignore_index", ignore_index)
    checks.check_number("label_smoothing", label_smoothing, at_most=1)
    checks.check_choice("smoothing_formula", smoothing_formula, checks.SMOOTHING_FORMULAS)
    checks.check_number("z_loss", z_loss)
    checks.check_number("logit_scale", logit_scale, positive=True)
    checks.check_number("temperature", temperature, positive=True)
    if softcap is not None:
        checks.check_number("softcap", softcap, positive=True)
    checks.check_bool("return_metrics", metrics)
    checks.check_bool("entropy", entropy)
    smoothing = float(label_smoothing)
    if vocab_size is not None:
        if metrics:
            checks.check_exact_in_fp32(vocab_size)
        if smoothing_formula == "megatron":
            smoothing = checks.checked_megatron_smoothing(smoothing, vocab_size)
    logit_scale /= temperature
    checks.check_number("logit_scale / temperature", logit_scale, positive=True)
    if softcap is not None:
        softcap /= temperature
        checks.check_number("softcap / temperature", softcap, positive=True)
    return LossOptions(
        ignore_index=int(ignore_index),
        smoothing=smoothing,
        z_loss=float(z_loss),
        logit_scale=float(logit_scale),
        softcap=None if softcap is None else float(softcap),
        entropy=entropy,
        predictions=metrics,
    )


def prepare_call(
    logits: Tensor,
    labels: Tensor,
    *,
    group: Any,
    reduction: str,
    gradient: str,
    impl: str,
    num_items: int | Tensor | None = None,
    check_labels: bool = False,
    vocab_size: int | None = None,
    shard: VocabShard | None = None,
    may_hold_gradient: bool = False,
    **options: Any,
) -> Call:
    """Check the arguments of a public function and settle what runs; nothing is changed by it.

    ``may_hold_gradient``: do not look whether an earlier call has overwritten the logits.
    """
    checks.check_tensor("logits", logits)
    checks.check_tensor("labels", labels)
    if logits.dim() < 2 or logits.shape[-1] == 0 or labels.shape != logits.shape[:-1]:
        checks.check_logits(logits)
        checks.check_labels(labels, logits)
    rank, n_ranks = group_position(group)
    if shard is not None:
        shard = given_shard(shard, vocab_size, None, n_ranks)
    checks.check_no_transforms(logits)
    base = logits._base
    mode = gradient_mode(gradient, logits, base)
    description = (logits.dtype, logits.shape[-1], logits.layout, logits.device)
    of_labels = (labels.dtype, labels.device)
    position = (rank, n_ranks, vocab_size, shard)
    whole_vectors = mode == "in_forward" and _has_whole_vectors(logits)  # for one_pass alone
    modes = (reduction, mode, impl, check_labels, whole_vectors)
    settled = settle((*description, *of_labels, *position, *modes), options)
    if not may_hold_gradient:
        check_not_overwritten(logits)
    if num_items is not None:
        checks.check_num_items(num_items, reduction, logits)
        num_items = as_divisor(num_items, logits)
    call = settled(labels.shape, group, num_items)
    if check_labels:
        checks.check_label_range(labels, call.shard.vocab_size, call.options.ignore_index)
    if agreement.n_open and agreement.is_pending():
        others = {"reduction": reduction, "gradient": gradient, "impl": impl, "check_labels": check_labels}
        others["num_items"] = None if num_items is None else float(num_items)
        is_even = vocab_size is None and shard is None
        facts = call_facts("logits", labels.shape, logits, labels, call, options, is_even=is_even)
        facts += agreement.option_facts(others) + agreement.gradient_facts(logits=logits)
        report = agreement.Report("a loss over logits", facts, call.shard, agreement.labels_digest(labels))
        agreement.compare(group, report, labels)
    return call


def call_facts(
    subject: str,
    leading: torch.Size,
    tensor: Tensor,
    labels: Tensor,
    call: Call,
    options: dict[str, Any],
    *,
    is_even: bool,
) -> tuple[agreement.Fact, ...]:
    """What the ranks of every loss must have alike: the ``tensor`` of this name, labels and options.

    ``is_even``: the vocabulary's size follows from equal shards.
    """
    fact, size = agreement.Fact, call.shard.vocab_size
    shown = str(size)
    if is_even:
        shown += f" ({call.n_ranks} * {call.shard.n_columns} columns, without vocab_size= or shard=)"
    given = {name: p.default for name, p in inspect.signature(checked_options).parameters.items()} | options
    del given["vocab_size"]
    given["return_metrics"] = given.pop("metrics")
    ignore_index = given.pop("ignore_index")
    return (
        fact(subject, tuple(leading), f"leading dimensions {tuple(leading)}"),
        fact(subject, str(tensor.dtype), f"dtype {tensor.dtype}"),
        fact(subject, tensor.device.type, f"device type {tensor.device.type}"),
        fact("labels", str(labels.dtype), f"dtype {labels.dtype}"),
        fact("ignore_index", int(ignore_index), str(ignore_index)),
        fact("vocab_size", size, shown),
        *agreement.option_facts(given),
    )


def settle(
    values: tuple[Any, ...], options: dict[str, Any]
) -> Callable[[torch.Size, Any, Tensor | None], Call]:
    """:func:`_settled_call`, remembered if its arguments can be."""
    try:
        return _settled_call(*values, **options)
    except TypeError:
        # Of the cache, whose keys must be hashable, or of a check: the check says it better.
        pass
    return _settled_call.__wrapped__(*values, **options)


@functools.lru_cache(maxsize=1024, typed=True)
def _settled_call(
    dtype: torch.dtype,
    n_columns: int,
    layout: torch.layout,
    device: torch.device,
    labels_dtype: torch.dtype,
    labels_device: torch.device,
    rank: int,
    n_ranks: int,
    vocab_size: int | None,
    shard: VocabShard | None,
    reduction: str,
    gradient: str,
    impl: str,
    check_labels: bool,
    whole_vectors: bool,
    **options: Any,
) -> Callable[[torch.Size, Any, Tensor | None], Call]:
    """A :class:`Call` but for its last three fields: what training repeats every step follows from these."""
    checks.check_kind_of_logits(dtype, layout)
    checks.check_kind_of_labels(labels_dtype, labels_device, device)
    checks.check_choice("reduction", reduction, checks.REDUCTIONS)
    checks.check_choice("gradient", gradient, checks.GRADIENTS)
    checks.check_bool("check_labels", check_labels)
    shard = shard_of_logits(n_columns, rank, n_ranks, vocab_size, shard)
    row_options = checked_options(**options, vocab_size=shard.vocab_size)
    workload = Workload(
        n_ranks=n_ranks,
        gradient=gradient,
        options_on=row_options.beyond_z_loss,
        whole_vectors=whole_vectors and shard.n_valid == shard.n_columns,
        fits=one_pass_config(n_columns * dtype.itemsize) is not None,
    )
    gpu = gpu_of(device.index) if device.type == "cuda" else None
    implementation = select(device.type, impl, workload=workload, gpu=gpu).name
    launchers, one_pass = _launchers(implementation)
    return functools.partial(
        Call, launchers, one_pass, rank, n_ranks, shard, row_options, reduction, gradient
    )


def _has_whole_vectors(logits: Tensor) -> bool:
    """Whether a GPU's rows are whole, aligned vectors of 16 bytes."""
    if not logits.is_cuda or logits.layout != torch.strided:
        return False
    if logits.shape[-1] * logits.element_size() % VECTOR_BYTES != 0:
        return False
    layout = row_layout(logits)
    if layout is None:
        return False
    return math.gcd(logits.data_ptr(), layout.pitch * logits.element_size()) % VECTOR_BYTES == 0


def shard_of_logits(
    n_columns: int, rank: int, n_ranks: int, vocab_size: int | None, shard: VocabShard | None
) -> VocabShard:
    """The shard that was given, or that follows from the size of the vocabulary, or from equal shards."""
    if shard is not None:
        return given_shard(shard, vocab_size, n_columns, n_ranks)
    if vocab_size is None:
        return VocabShard.even(n_columns, rank, n_ranks)
    return VocabShard.of_rank(vocab_size, rank, n_ranks, n_columns)


def given_shard(shard: object, vocab_size: int | None, n_columns: int | None, n_ranks: int) -> VocabShard:
    """``shard`` checked, against ``n_columns`` where they are known."""
    if not isinstance(shard, VocabShard):
        raise TypeError(f"shard: expected a VocabShard, got {type(shard).__name__}")
    if vocab_size is not None:
        raise ValueError("shard: has a vocab_size itself, got vocab_size too")
    return shard.checked(n_columns, n_ranks)


def as_divisor(num_items: int | Tensor, logits: Tensor) -> Tensor:
    """``num_items``, checked, as a kernel divides by it: ``[1]`` on the device of ``logits``."""
    if isinstance(num_items, Tensor) and num_items.device == logits.device:
        return num_items.detach().reshape(1)
    return logits.new_full((1,), float(num_items), dtype=torch.float32)


def gradient_mode(gradient: str, logits: Tensor, base: Tensor | None) -> str:
    """The mode that runs: ``"auto"`` is in place in backward if nobody can be harmed without an error.

    ``base`` is that of ``logits`` if they are a view.

    Raises:
        ValueError: ``"in_forward"`` of a view in a graph. A version raised in backward would come too late
            for a backward that runs before and uses a saved value; raised in forward, it makes autograd
            replace the view's node, and hooks on it or on a view between it and its base would be lost.
    """
    if gradient == "auto":
        return "in_backward" if may_overwrite(logits if base is None else base) else "out_of_place"
    if gradient == "in_forward" and torch.is_grad_enabled() and _is_view_in_graph(logits):
        raise ValueError(
            "gradient: 'in_forward' overwrites logits during forward, which autograd allows for no view "
            "of another tensor in a graph, got logits that are one; pass the tensor itself, with any leading "
            "dimensions (no .view, no slice), or use 'in_backward'"
        )
    return gradient


def may_overwrite(owner: Tensor) -> bool:
    """Whether autograd notices everyone who needs what is overwritten in ``owner``, the logits or their base.

    It does not for a leaf, or a view of one: the memory is a parameter's, or that of a tensor which no graph
    knows (a DTensor's local one). Nor under saved-tensor hooks: versions of what went through them are not
    compared.
    """
    if owner.is_leaf or _top_saved_tensor_hooks is None:
        return False
    return _top_saved_tensor_hooks(True) is None


def can_see_saved_tensor_hooks() -> bool:
    """Whether this PyTorch can say if saved-tensor hooks are active. If not, nothing is overwritten."""
    return _top_saved_tensor_hooks is not None


def scale_in_place(grad_logits: Tensor, grad_output: Tensor) -> Tensor:
    """Multiply the gradient of a two-step forward by the grad_output; returns ``grad_logits``."""
    checks.check_logits(grad_logits)
    checks.check_grad_output(grad_output, grad_logits)
    if row_layout(grad_logits) is None or not rows_are_disjoint(grad_logits):
        raise ValueError(
            "_input: expected the tensor that cross_entropy_forward returned, whose rows are dense and "
            f"share no memory, got shape {tuple(grad_logits.shape)}, strides {grad_logits.stride()}"
        )
    launchers, _ = _launchers(select(grad_logits.device.type).name)
    launchers.element_mul(grad_logits, per_row(grad_output, grad_logits))
    raise_version(grad_logits)
    return grad_logits


def walkable(logits: Tensor) -> Tensor:
    """``logits``, or a contiguous copy where kernels cannot walk their rows."""
    return logits if logits.is_contiguous() or row_layout(logits) is not None else logits.contiguous()


def overwritable(logits: Tensor) -> Tensor:
    """``logits``, or a contiguous copy where rows cannot be walked or share memory with each other."""
    if logits.is_contiguous():
        return logits
    logits = walkable(logits)
    return logits if rows_are_disjoint(logits) else logits.contiguous()


def source_and_new(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The logits to read and a new tensor for their gradient, laid out alike: gaps cost a copy."""
    grad = torch.empty_like(logits)
    if row_layout(grad) is None:
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
    alike = grad.stride() == logits.stride() and logits.data_ptr() % 16 == grad.data_ptr() % 16
    return (logits, grad) if alike else (grad.copy_(logits), grad)


def per_row(grad_output: Tensor, logits: Tensor) -> Tensor:
    """``[N]`` view of an grad_output with one element for all rows (stride 0) or one for each."""
    if grad_output.numel() == 1:
        return grad_output.reshape(1).expand(logits.shape[:-1].numel())
    return grad_output if grad_output.dim() == 1 else grad_output.reshape(-1)


def flat(labels: Tensor) -> Tensor:
    """``[N]`` contiguous labels: a view where they are contiguous already."""
    if labels.dim() == 1 and labels.is_contiguous():
        return labels
    return labels.reshape(-1).contiguous()


def raise_version(overwritten: Tensor) -> None:
    """Autograd then refuses to use a saved value that has been overwritten.

    A view in a graph is left out: autograd would rebuild the view's node, which then is no longer the
    one that the graph holds, and gradients for the view and hooks on it would be lost.
    """
    if not _is_view_in_graph(overwritten):
        torch.autograd.graph.increment_version(overwritten)


def _is_view_in_graph(tensor: Tensor) -> bool:
    return tensor._is_view() and tensor.grad_fn is not None


def _launchers(implementation: str) -> tuple[ModuleType, Callable[..., None] | None]:
    if implementation == "reference":
        from vocab_parallel_ce import reference

        return reference, None
    from vocab_parallel_ce.kernels import launchers

    if implementation == "triton":
        return launchers, None
    from vocab_parallel_ce.kernels.one_pass import one_pass

    return launchers, one_pass
