"""The losses as ``nn.Module``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor, nn
from torch.nn.utils import parametrize

from vocab_parallel_ce import checks
from vocab_parallel_ce.api import heads, logits
from vocab_parallel_ce.api.call import asked_for, checked_advanced, is_traced, public, settings_of, top_of
from vocab_parallel_ce.api.heads import linear_cross_entropy
from vocab_parallel_ce.api.logits import vocab_parallel_cross_entropy
from vocab_parallel_ce.collectives import NamedGroup, group_position
from vocab_parallel_ce.dtensor import is_dtensor, parallel_hooks, process_group_of
from vocab_parallel_ce.head.plan import check_head_settings
from vocab_parallel_ce.options import (
    OTHER_NAMES,
    Advanced,
    LinearLogProbKeywords,
    LinearLossKeywords,
    Settings,
    check_names,
    check_settings,
    meant_by,
    with_keywords,
)

# By name, because torch.distributed is not imported here.
WRAPPED_BY_FSDP = {"FSDPModule", "FullyShardedDataParallel"}
# What a caller may think is an option of a module, and where it belongs instead, if anywhere.
KEYWORDS_OF_OTHERS = {*LinearLossKeywords.__annotations__, *LinearLogProbKeywords.__annotations__}
KEYWORDS_OF_OTHERS |= OTHER_NAMES.keys() | set(Advanced._fields)
GIVEN_ELSEWHERE = {
    "num_items": "at each call of the module",
    "in_features": "when the module is made",
    "head": "when the module is made",
    "columns": "when the module is made",
    "bias": "as that of the head",
}
Module = TypeVar("Module", bound=type[nn.Module])


class _LossModule(nn.Module):
    """A loss whose options are attributes: what is set is checked, and used from the next call on."""

    names: ClassVar[dict[str, Any]]  # the options that are attributes, with their defaults
    class_weight: Tensor | None  # a buffer
    options: dict[str, Any]  # those given, except class_weight

    def set_options(self, options: dict[str, Any]) -> None:
        """Check all options together and take them."""
        raise NotImplementedError

    def __setattr__(self, name: str, value: Any) -> None:
        is_made = "options" in self.__dict__
        if is_made and name == "class_weight" and value is not None:
            checks.check_class_weight(value)
        # A subclass may have attributes of any other name.
        is_new = is_made and "names" in type(self).__dict__ and not name.startswith("_") and not hasattr(self, name)
        if (is_new and name in GIVEN_ELSEWHERE) or (is_made and name == "head"):
            raise TypeError(
                f"{name}: expected {GIVEN_ELSEWHERE[name]}, got it as an attribute of {type(self).__name__}"
            )
        if is_new and (name in KEYWORDS_OF_OTHERS or meant_by(name, self.names) is not None):
            check_names({name: value}, self.names, type(self))
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle has: the group by its name and ranks."""
        return {**self.__dict__, "options": {**self.options, "group": NamedGroup.of(self.options["group"])}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        group = state["options"]["group"]
        options = {**state["options"], "group": None if group is None else group.found()}
        super().__setstate__({**state, "options": options})

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _with_attributes(**names: Any) -> Callable[[Module], Module]:
    """Decorate a module with a property for each of its options, of this default."""

    def attribute(name: str, default: Any) -> property:
        def read(module: Any) -> Any:
            return module.options.get(name, default)

        def write(module: Any, value: Any) -> None:
            module.set_options({**module.options, name: value})

        return property(read, write)

    def decorate(cls: Module) -> Module:
        for name, default in names.items():
            if not hasattr(cls, name):
                setattr(cls, name, attribute(name, default))
        cls.names = {"class_weight": None, **names}  # type: ignore[attr-defined]
        return cls

    return decorate


@_with_attributes(group=None, outputs=(), top_k=None, **logits.KEYWORDS)
class VocabParallelCrossEntropy(_LossModule):
    """:func:`vocab_parallel_cross_entropy` with its options checked; it has no parameters.

    The options are attributes; one that is set is checked, and used from the next call on.
    ``class_weight`` is a buffer, as ``weight`` is of ``torch.nn.CrossEntropyLoss``.

    Example:
        >>> from vocab_parallel_ce import VocabParallelCrossEntropy
        >>> loss_of = VocabParallelCrossEntropy(label_smoothing=0.1)
        >>> loss_of
        VocabParallelCrossEntropy(1 rank, label_smoothing=0.1)
        >>> round(loss_of(torch.zeros(2, 4), torch.tensor([1, 2])).item(), 4)
        1.3863
    """

    @with_keywords(logits.KEYWORDS)
    def __init__(
        self,
        *,
        group: Any = None,
        class_weight: Tensor | None = None,
        outputs: Sequence[str] = (),
        top_k: int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        _register_class_weight(self, class_weight)
        check_names(keywords, logits.KEYWORDS, type(self))
        self.set_options({"group": group, "outputs": outputs, "top_k": top_k, **keywords})

    def set_options(self, options: dict[str, Any]) -> None:
        """Check all options together and take them."""
        options = {**options, "group": process_group_of(options["group"])}
        settings = {name: value for name, value in options.items() if name != "group"}
        settings |= asked_for(options["outputs"], options["top_k"])
        options["outputs"] = settings["outputs"]
        n_ranks = group_position(options["group"])[1]
        top_of(Settings(**settings))
        check_settings(Settings(**settings), n_ranks)
        self.n_ranks, self.options = n_ranks, options

    def forward(self, logits: Tensor, labels: Tensor, num_items: float | Tensor | None = None) -> Any:
        """Loss of ``logits [..., C]`` and ``labels [...]``, or :class:`Outputs` if some are asked for.

        ``num_items``, what the sum is divided by, changes from step to step and therefore comes here.
        """
        given: dict[str, Any] = {"num_items": num_items, "class_weight": self.class_weight}
        return vocab_parallel_cross_entropy(logits, labels, **given, **self.options)

    def extra_repr(self) -> str:
        return _shown(self, self.n_ranks)


@_with_attributes(group=None, outputs=(), top_k=None, advanced=None, **heads.KEYWORDS)
class LinearCrossEntropy(_LossModule):
    """:func:`linear_cross_entropy` with its head fixed, and its options checked.

    The options are attributes; one that is set is checked, and used from the next call on.
    Call it inside the forward of the module that FSDP wraps: there the head's weight is whole. A head that
    ``parallelize_module`` cut, by ``ColwiseParallel()`` or an embedding by ``RowwiseParallel()``, needs no
    ``group``: that of its mesh is taken, and ``hidden`` is a plain tensor, the same on every rank.

    Args:
        head: the ``nn.Linear`` (its bias too) or ``nn.Embedding`` of this rank's ``C`` rows. It is shared: it
            stays in the ``state_dict`` of its owner alone, and its weight is looked up at each call. None for
            a head of this module's own, ``self.own``.
        in_features, columns, bias: ``D``, ``C`` and whether there is a bias, of a head of its own. ``C`` may be 0 on a
            rank with ``vocab_size``.
        class_weight: a buffer, as ``weight`` is of ``torch.nn.CrossEntropyLoss``.
        others: as in :func:`linear_cross_entropy`.

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

    @with_keywords(heads.KEYWORDS)
    def __init__(
        self,
        head: nn.Linear | nn.Embedding | None = None,
        *,
        in_features: int | None = None,
        columns: int | None = None,
        bias: bool = False,
        group: Any = None,
        class_weight: Tensor | None = None,
        outputs: Sequence[str] = (),
        top_k: int | None = None,
        advanced: Advanced | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__()
        _register_class_weight(self, class_weight)
        options: dict[str, Any] = {"group": process_group_of(group), "outputs": outputs, "top_k": top_k}
        options |= {"advanced": advanced, **keywords}
        _check_options(options, type(self))
        checks.check_bool("bias", bias)
        if head is None and in_features is None and columns is None:
            raise TypeError("head: expected a head, or in_features and columns of one of its own, got neither")
        if head is None:
            n_features = checks.checked_count("in_features", in_features)
            no_columns = columns == 0 and keywords.get("vocab_size") is not None  # on this rank of several
            n_columns = 0 if no_columns else checks.checked_count("columns", columns)
            self.own = nn.Linear(n_features, n_columns, bias=bias)
        elif in_features is not None or columns is not None or bias:
            raise ValueError(
                "head: expected it, or in_features, columns and bias of one of its own, got both; pass the head alone, "
                "which has its own bias"
            )
        # In a tuple: what is shared is no submodule of this module.
        self.shared = () if head is None else (head,)
        _check_head(self.head)
        if self.head.weight.dim() != 2:
            raise ValueError(f"weight: expected shape [C, D], got {tuple(self.head.weight.shape)}")
        self.options = options

    def set_options(self, options: dict[str, Any]) -> None:
        """Check all options together and take them."""
        options = {**options, "group": process_group_of(options["group"])}
        _check_options(options, type(self))
        self.options = options

    @property
    def head(self) -> Any:
        """The module that the weight and bias belong to: the one given, or this module's own."""
        return self.shared[0] if self.shared else self.own

    @property
    def group(self) -> Any:
        """The ranks that share the vocabulary: those given, or those that tensor parallelism cut it over."""
        group = self.options["group"]
        parallel = parallel_hooks(self.head) if group is None else None
        return group if parallel is None else parallel.group

    @group.setter
    def group(self, group: Any) -> None:
        self.set_options({**self.options, "group": group})

    @public()
    def forward(self, hidden: Tensor, labels: Tensor, num_items: float | Tensor | None = None) -> Any:
        """Loss of ``hidden [..., D]`` and ``labels [...]``, or :class:`Outputs` if some are asked for."""
        _check_head(self.head)
        options = {**self.options, "bias": getattr(self.head, "bias", None), "group": self.group}
        options["class_weight"] = self.class_weight
        return linear_cross_entropy(hidden, self.head.weight, labels, num_items=num_items, **options)

    def extra_repr(self) -> str:
        return _shown(self, group_position(self.group)[1], weight=tuple(self.head.weight.shape))


def _check_options(options: dict[str, Any], module: type[LinearCrossEntropy]) -> None:
    """Check the options of a head and its loss."""
    not_settings = ("group", "outputs", "top_k", "advanced")
    keywords = {name: value for name, value in options.items() if name not in not_settings}
    advanced = checked_advanced(options["advanced"], *Advanced._fields)
    asked = asked_for(options["outputs"], options["top_k"])
    options["outputs"] = asked["outputs"]
    settings, head_settings = settings_of(keywords, heads.KEYWORDS, module, advanced, **asked)
    check_head_settings(settings, head_settings, knows_grad_output=advanced.expected_grad_output is not None)
    top_of(settings)
    check_settings(settings, group_position(options["group"])[1])


def _register_class_weight(module: nn.Module, class_weight: Tensor | None) -> None:
    if class_weight is not None:
        checks.check_class_weight(class_weight)
    module.register_buffer("class_weight", class_weight)


def _shown(module: _LossModule, n_ranks: int, **others: Any) -> str:
    """Return the ranks, ``others``, and the options that are not their defaults; of class weights the shape."""
    options = {name: value for name, value in module.options.items() if name not in ("group", "advanced")}
    shown = others | {name: value for name, value in options.items() if value != module.names[name]}
    for name, value in (module.options.get("advanced") or Advanced())._asdict().items():
        if not isinstance(value, Tensor) and value != Advanced._field_defaults[name]:
            shown[name] = value
    if module.class_weight is not None:
        shown["class_weight"] = tuple(module.class_weight.shape)
    return ", ".join(["1 rank" if n_ranks == 1 else f"{n_ranks} ranks", *(f"{n}={v!r}" for n, v in shown.items())])


def _check_head(head: Any) -> None:
    """Check that ``head`` multiplies by its weight, adds its bias and does nothing else."""
    if isinstance(head, Tensor):
        raise TypeError(
            f"head: expected an nn.Linear or nn.Embedding, got a {type(head).__name__}, which would stay if "
            "its module got another weight; pass the module, or call linear_cross_entropy with the weight"
        )
    if any(base.__name__ in WRAPPED_BY_FSDP for base in type(head).__mro__):
        raise ValueError(
            "head: FSDP wraps it, so its weight is whole only in its own forward, which this loss would skip; "
            "wrap the module that holds the head and the loss instead, and call it inside the module that FSDP wraps"
        )
    if not isinstance(head, nn.Module):
        raise TypeError(
            f"head: expected an nn.Linear or nn.Embedding, got {type(head).__name__}; pass the module, or in_features= "
            "and columns= for a head of its own"
        )
    if parametrize.is_parametrized(head):
        raise ValueError("head: expected no parametrizations, got some; remove them")
    if type(head) not in (nn.Linear, nn.Embedding):
        raise TypeError(
            f"head: expected exactly an nn.Linear or nn.Embedding, got {type(head).__name__}, which may do "
            "more than multiply by its weight (LoRA, quantisation); merge it, or compute its logits and use "
            "VocabParallelCrossEntropy"
        )
    _check_hooks(head)
    if not (is_dtensor(head.weight) or is_traced()):
        checks.check_parameter("weight", head.weight)


def _check_hooks(head: nn.Module) -> None:
    """Check that it has no hooks, except those of tensor parallelism, which the loss does itself."""
    forward_hooks = head._forward_hooks or head._forward_pre_hooks
    parallel = parallel_hooks(head) if forward_hooks else None
    of_backward = head._backward_hooks or head._backward_pre_hooks
    if of_backward or "forward" in vars(head) or (forward_hooks and parallel is None):
        raise ValueError("head: has hooks or a patched forward, which this loss would skip; remove them")
    if parallel is None:
        return
    # An embedding's hooks are about token ids.
    if type(head) is nn.Linear and not all(layout.is_replicate() for layout in parallel.input_layouts):
        raise ValueError(
            "head: tensor parallelism must have input_layouts=Replicate(), because this loss skips its "
            f"hooks, got {parallel.input_layouts}; use ColwiseParallel() and pass whole hidden states, or "
            "parts with sequence_parallel=True"
        )
    if not is_dtensor(head.weight):
        raise ValueError(
            "head: tensor parallelism cut it, so its weight must be a DTensor, got a "
            f"{type(head.weight).__name__}; pass the new weight through distribute_tensor"
        )
