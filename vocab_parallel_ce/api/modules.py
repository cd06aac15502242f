"""The losses as ``nn.Module``."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

from vocab_parallel_ce import checks
from vocab_parallel_ce.api.call import TensorOrOutputs, public, unexpected
from vocab_parallel_ce.api.heads import linear_cross_entropy
from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy
from vocab_parallel_ce.collectives import NamedGroup, group_position
from vocab_parallel_ce.dtensor import is_dtensor, parallel_hooks, process_group_of
from vocab_parallel_ce.head.arguments import check_gradient
from vocab_parallel_ce.options import HEAD_FIELDS, Settings, check_settings, head_settings, settings_of

# By name, because torch.distributed is not imported here.
WRAPPED_BY_FSDP = {"FSDPModule", "FullyShardedDataParallel"}


class _LossModule(nn.Module):
    """A loss whose options are attributes; each call takes and checks them as they are then."""

    defaults: ClassVar[dict[str, Any]]  # of the options
    __signature__: ClassVar[inspect.Signature]
    group: Any

    def __init_subclass__(cls, function: Callable[..., Any] | None = None) -> None:
        """Take the options of ``function``, except what each call of a module takes anew."""
        super().__init_subclass__()
        if function is None:
            if "__init__" in vars(cls):  # of a caller's subclass
                _, *others = inspect.signature(cls.__init__).parameters.values()
                cls.__signature__ = inspect.Signature(others)
            return
        parameters = inspect.signature(function).parameters.values()
        options = [p for p in parameters if p.default is not p.empty and p.name not in ("num_items", "bias")]
        _, *others = inspect.signature(cls.__init__).parameters.values()
        others = [p for p in others if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        cls.defaults = {p.name: p.default for p in options}
        cls.__signature__ = inspect.Signature([*others, *options])

    def __init__(self, *positional: Any, **keywords: Any) -> None:
        """Check the keywords, and make them attributes."""
        super().__init__()
        if positional:
            got = f"{len(positional)} arguments; pass options by name, as class_weight="
            raise TypeError(f"{type(self).__name__}: expected keywords alone, got {got}")
        if "weight" in keywords:
            raise TypeError(checks.NOT_WEIGHT)
        if not keywords.keys() <= self.defaults.keys():
            raise unexpected(type(self), keywords, self.defaults)
        keywords = self.defaults | keywords
        values = {name: value for name, value in keywords.items() if name in Settings._fields}
        class_weight = keywords.pop("class_weight")
        if class_weight is not None:
            checks.expect("class_weight", class_weight)
            checks.check_requires_no_gradient("class_weight", class_weight)
        self.register_buffer("class_weight", class_weight)
        keywords["group"] = process_group_of(keywords["group"])
        for name, value in keywords.items():
            setattr(self, name, value)
        if "options" in keywords:
            settings = head_settings(keywords["options"], **values)
            check_gradient(settings, knows_grad_output=keywords["expected_grad_output"] is not None)
        else:
            settings = settings_of(**values)
        check_settings(settings, group_position(keywords["group"])[1])

    def _options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.defaults}

    def _shown(self, n_ranks: int, **others: Any) -> str:
        """Return the ranks, ``others``, and the options that are not their defaults; of class weights the shape."""
        for name, value in self._options().items():
            if name == "class_weight" and value is not None:
                others[name] = tuple(value.shape)
            elif name != "group" and not isinstance(value, Tensor) and value != self.defaults[name]:
                others[name] = value
        return ", ".join(["1 rank" if n_ranks == 1 else f"{n_ranks} ranks", *(f"{n}={v!r}" for n, v in others.items())])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: the group by its name and ranks."""
        return {**self.__dict__, "group": NamedGroup.of(process_group_of(self.group))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = state["group"]
        super().__setstate__({**state, "group": None if group is None else group.resolve()})


class VocabParallelCrossEntropy(_LossModule, function=vocab_parallel_cross_entropy):
    """:func:`vocab_parallel_cross_entropy` with its options fixed; it has no parameters.

    It takes the keywords of the function's signature, except ``num_items``. They are checked, and are attributes:
    each call takes them as they are then. ``class_weight`` is a buffer, as ``weight`` is of
    ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> from vocab_parallel_ce import VocabParallelCrossEntropy
        >>> loss_of = VocabParallelCrossEntropy(label_smoothing=0.1)
        >>> loss_of
        VocabParallelCrossEntropy(1 rank, label_smoothing=0.1)
        >>> round(loss_of(torch.zeros(2, 4), torch.tensor([1, 2])).item(), 4)
        1.3863
    """

    def forward(self, logits: Tensor, labels: Tensor, num_items: float | Tensor | None = None) -> TensorOrOutputs:
        """Loss of ``logits [..., C]`` and ``labels [...]``, or :class:`Outputs` if some are asked for.

        ``num_items``, what the sum is divided by, changes from step to step and therefore comes here.
        """
        return vocab_parallel_cross_entropy(logits, labels, num_items=num_items, **self._options())

    def extra_repr(self) -> str:
        return self._shown(group_position(process_group_of(self.group))[1])


class LinearCrossEntropy(_LossModule, function=linear_cross_entropy):
    """:func:`linear_cross_entropy` with its head and options fixed.

    The options are checked, and are attributes: each call takes them as they are then.
    Call it inside the forward of the module that FSDP wraps: there the head's weight is whole. A head that
    ``parallelize_module`` cut, by ``ColwiseParallel()`` or an embedding by ``RowwiseParallel()``, needs no
    ``group``: that of its mesh is taken, and ``hidden`` is a plain tensor, the same on every rank.

    Args:
        head: the ``nn.Linear`` (its bias too) or ``nn.Embedding`` of this rank's ``C`` rows. If a module has it as an
            attribute when the loss is made, it is shared: it stays in the ``state_dict`` and the ``parameters()`` of
            its owner alone. Otherwise it becomes this module's own, ``self.linear``. Its weight is looked up at each
            call. None for a new head.
        in_features, columns, bias: ``D``, ``C`` and whether there is a bias, of a new head. ``C`` may be 0 on a
            rank with ``vocab_size``.
        keywords: the other keywords of the function, except ``num_items``; ``options`` is a :class:`HeadOptions`.
            ``class_weight`` is a buffer, as ``weight`` is of ``torch.nn.CrossEntropyLoss``.

    Raises:
        TypeError: the head is not a module, or does more than its weight says (LoRA, quantisation, a subclass).
        ValueError: the head is parametrised, has hooks, or FSDP wraps the head itself.

    Example:
        >>> from vocab_parallel_ce import LinearCrossEntropy
        >>> head = torch.nn.Embedding(4, 3, _weight=torch.eye(4, 3))
        >>> loss_of = LinearCrossEntropy(head, reduction="sum")
        >>> loss = loss_of(torch.ones(2, 3), torch.tensor([0, 3]))
        >>> round(loss.item(), 4)
        3.4286
    """

    linear: nn.Linear | nn.Embedding  # unless the head is shared

    def __init__(
        self,
        head: nn.Linear | nn.Embedding | None = None,
        *positional: Any,
        in_features: int | None = None,
        columns: int | None = None,
        bias: bool = False,
        **keywords: Any,
    ) -> None:
        if positional:
            sizes = (head, *positional)
            sizes = sizes if all(isinstance(each, int) for each in sizes) else ("D", "C")
            shown = ", ".join(f"{n}={v}" for n, v in zip(("in_features", "columns", "bias"), sizes, strict=False))
            expected, got = "a head, or keywords alone", f"{len(positional) + 1} arguments"
            raise TypeError(f"LinearCrossEntropy: expected {expected}, got {got}; pass {shown} and options by name")
        super().__init__(**keywords)
        checks.check_bool("bias", bias)
        if head is None and in_features is None and columns is None:
            raise TypeError("head: expected a head, or in_features and columns of one of its own, got neither")
        if head is None:
            n_features = checks.checked_count("in_features", in_features)
            no_columns = columns == 0 and self.vocab_size is not None  # on this rank of several
            n_columns = 0 if no_columns else checks.checked_count("columns", columns)
            self.linear = nn.Linear(n_features, n_columns, bias=bias)
        elif in_features is not None or columns is not None or bias:
            raise ValueError(
                "head: expected it, or in_features, columns and bias of one of its own, got both; pass the head alone, "
                "which has its own bias"
            )
        if head is not None:
            _check_head(head)
        # In a tuple: what is shared is no submodule of this module.
        self.shared = (head,) if head is not None and _has_owner(head) else ()
        if head is not None and not self.shared:
            self.linear = head
        if self.head.weight.dim() != 2:
            raise ValueError(f"weight: expected shape [C, D], got {tuple(self.head.weight.shape)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what is a field of ``options``: as an attribute of its own it would do nothing."""
        if name in HEAD_FIELDS:
            remedy = f"write module.options = HeadOptions({name}=...)"
            raise AttributeError(f"{name}: expected it in options, got an attribute of its own; {remedy}")
        super().__setattr__(name, value)

    @property
    def head(self) -> Any:
        """The module that has the weight and the bias: the one that was passed, or ``linear``."""
        return self.shared[0] if self.shared else self.linear

    def _group(self) -> Any:
        """Return the ranks that share the vocabulary: ``group``, or those that tensor parallelism cut it over."""
        parallel = parallel_hooks(self.head) if self.group is None else None
        return process_group_of(self.group) if parallel is None else parallel[0]

    @public()
    def forward(self, hidden: Tensor, labels: Tensor, num_items: float | Tensor | None = None) -> TensorOrOutputs:
        """Loss of ``hidden [..., D]`` and ``labels [...]``, or :class:`Outputs` if some are asked for."""
        if "head" in self._modules:  # nn.Module keeps what is assigned there, where the property does not look
            raise TypeError("head: expected when the module is made, got it as an attribute; make a new module")
        _check_head(self.head)
        options = {**self._options(), "bias": getattr(self.head, "bias", None), "group": self._group()}
        return linear_cross_entropy(hidden, self.head.weight, labels, num_items=num_items, **options)

    def extra_repr(self) -> str:
        return self._shown(group_position(self._group())[1], weight=tuple(self.head.weight.shape))


def _has_owner(head: nn.Module) -> bool:
    """Return whether a module has the head among its children."""
    for children in gc.get_referrers(head):
        if isinstance(children, dict):
            # The attributes hold it, and are a dict or not, as the version of Python has it.
            holders = gc.get_referrers(children)
            attributes = [each for each in holders if type(each) is dict and each.get("_modules") is children]
            owners = gc.get_referrers(*attributes)
            if any(isinstance(each, nn.Module) and each._modules is children for each in holders + owners):
                return True
    return False


def _check_head(head: Any) -> None:
    """Check that ``head`` multiplies by its weight, adds its bias and does nothing else."""
    if any(base.__name__ in WRAPPED_BY_FSDP for base in type(head).__mro__):
        raise ValueError(
            "head: FSDP wraps it, so its weight is whole only in its own forward, which this loss would skip; "
            "wrap the module that holds the head and the loss instead, and call it inside the module that FSDP wraps"
        )
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"head: expected an nn.Linear or nn.Embedding, got {type(head).__name__}; pass the module, or in_features= "
            "and columns= for a head of its own, or call linear_cross_entropy with a weight"
        )
    if parametrize.is_parametrized(head):
        names = ", ".join(dict(head.parametrizations.named_children()))  # type: ignore[union-attr]
        raise ValueError(f"head: expected no parametrizations, got one of {names}; remove it")
    if type(head) not in (nn.Linear, nn.Embedding):
        raise TypeError(
            f"head: expected exactly an nn.Linear or nn.Embedding, got {type(head).__name__}, which may do "
            "more than multiply by its weight (LoRA, quantisation); merge it, or compute its logits and use "
            "VocabParallelCrossEntropy"
        )
    _check_hooks(head)
    if not (is_dtensor(head.weight) or checks.is_traced()):
        checks.check_parameter("weight", head.weight)


def _check_hooks(head: nn.Module) -> None:
    """Check that it has no hooks, except those of tensor parallelism, which the loss does itself."""
    forward_hooks = head._forward_hooks or head._forward_pre_hooks
    parallel = parallel_hooks(head) if forward_hooks else None
    backward_hooks = head._backward_hooks or head._backward_pre_hooks
    if backward_hooks or "forward" in vars(head) or (forward_hooks and parallel is None):
        raise ValueError("head: has hooks or a patched forward, which this loss would skip; remove them")
    if parallel is None:
        return
    _, layouts = parallel
    # An embedding's hooks are about token ids.
    if type(head) is nn.Linear and not all(layout.is_replicate() for layout in layouts):
        raise ValueError(
            "head: tensor parallelism must have input_layouts=Replicate(), because this loss skips its "
            f"hooks, got {layouts}; use ColwiseParallel() and pass whole hidden states, or "
            "parts with options=HeadOptions(sequence_parallel=True)"
        )
    if not is_dtensor(head.weight):
        raise ValueError(
            "head: tensor parallelism cut it, so its weight must be a DTensor, got a "
            f"{type(head.weight).__name__}; pass the new weight through distribute_tensor"
        )
