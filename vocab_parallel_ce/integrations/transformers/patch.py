"""Replace the forwards of transformers' models, and undo it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from vocab_parallel_ce.integrations import Report, check_known, log_installed, logger, warn_if_newer
from vocab_parallel_ce.integrations.transformers.heads import (
    calls,
    count,
    forward_under_way,
    is_lazy_here,
    lazy_head,
    note_unfused,
)
from vocab_parallel_ce.integrations.transformers.rewritten import rewritten_forward
from vocab_parallel_ce.integrations.transformers.targets import (
    DISPATCHED,
    has_other_forward,
    head_of,
    imported_classes,
    is_installed,
    is_language_model,
    labels_taker,
    live_models,
    name_of,
    not_reached,
    owner_of,
    path_of,
    put_back,
    slot_of,
)
from vocab_parallel_ce.options import HeadOptions

MECHANISMS = ("lazy", "rewrite")
COMPILED = "torch.compile traced the forward; install(mechanism='rewrite') is fused there"
TRACED = "torch.jit.trace cannot record the fused loss"
WITHOUT_LABELS = (
    "a call for training had no labels; the loss is computed from its logits (label_smoothing_factor, "
    "compute_loss_func, a loss of your own)"
)
NO_HEAD = "get_output_embeddings() returns no head"
NO_LANGUAGE_MODEL = "its forward takes no labels, or its models have no head that makes logits of tokens"
WHEN_BUILT = "each class of language models, when its first model is built"
OPTIONS = ("chunk_size", "gradient", "impl", "valid_tokens", "own_tokens", "max_tokens")


class Replaced(NamedTuple):
    """What :func:`uninstall` needs to undo one replacement."""

    owner: weakref.ref[Any]  # a class or a model
    name: str
    before: Any  # None: inherited
    after: Callable[..., Any]  # the function, if it is a model's method


_replaced: list[Replaced] = []
_left = weakref.WeakKeyDictionary[Any, str]()  # classes that install() of everything left alone -> why
_labelled = threading.local()  # models: those whose call with labels is under way in this thread


def install(target: Any = None, *, mechanism: str = "lazy", imported_later: bool = True, **options: Any) -> Report:
    """Fuse head and loss of transformers' models, wherever labels are given.

    Args:
        target: a model, a class of models, or None for every class of language models whose forward takes labels:
            causal and masked ones, encoder-decoders, those of images and speech, and subclasses of your own.
        mechanism: ``"lazy"``: the model's own forward runs, and its head returns logits that are made only if
            somebody looks at them. ``"rewrite"``: a forward made from its source, which can be compiled.
        imported_later: with ``target=None``, also classes that are imported after this call.
        options: of :class:`HeadOptions`. ``valid_tokens`` is ``"count"`` by default where gradients are computed and no
            CUDA graph is captured. With ``own_tokens``, heads in an FSDP2 unit of their own are not gathered.

    Returns:
        The report: which forwards are replaced, which are left and why, and what became of all calls so far.

    Raises:
        TypeError: target is neither a model nor a class of models; an option has another name.
        ValueError: the forward of a target passed explicitly cannot be replaced.
    """
    check_options(mechanism, **options)
    warn_if_newer("transformers")
    if target is None:
        _check_same(mechanism, options)
        classes = imported_classes()
        _install_bound(classes, mechanism, options)
        for cls in classes:
            _install_class(cls, mechanism, options)
        if imported_later:
            _install_when_built(mechanism, options)
    else:
        owner = owner_of(target)
        is_headless = isinstance(owner, type) and not is_language_model(owner)
        if isinstance(owner, type):
            _install_bound([owner], mechanism, options)
        reason = NO_LANGUAGE_MODEL if is_headless else _install(owner, mechanism, options)
        if reason is not None:
            raise ValueError(f"{name_of(owner)}: {reason}")
    made = report()
    log_installed("transformers", made.rebound, made.left)
    for what, why in made.left.items():
        if what.endswith(" (one model)"):
            logger.warning("vocab_parallel_ce: %s: %s", what, why)
    return made


def check_options(mechanism: str = "lazy", **options: Any) -> None:
    """Raise what :func:`install` raises for options; nothing is installed."""
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism: expected one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    check_known(options, OPTIONS)
    HeadOptions(**options)  # checks them


def _check_same(mechanism: str, options: dict[str, Any]) -> None:
    """Raise unless the classes that are installed have this mechanism and these options."""
    for owner, after in [(each.owner(), each.after) for each in _replaced]:
        other = getattr(after, "vocab_parallel_ce", None)
        if isinstance(owner, type) and other != (mechanism, options):
            raise ValueError(f"{name_of(owner)}: has mechanism and options {other} already: uninstall() them first")


def report() -> Report:
    """Return which forwards are replaced now, which are left and why, and what became of all calls so far."""
    rebound, left = set(), {path_of(cls): reason for cls, reason in _left.items()}
    owners = [owner for owner in (each.owner() for each in _replaced if each.name != "__init__") if owner is not None]
    classes = [owner for owner in owners if isinstance(owner, type)]
    for model in [each for each in owners if not isinstance(each, type)] + (live_models(classes) if classes else []):
        reason = not_reached(model)
        if reason is not None:
            left[f"{name_of(model)} (one model)"] = reason
    for replaced in _replaced:
        owner, reason = replaced.owner(), _reason(replaced.after)
        if replaced.name == "__init__":
            rebound.add(WHEN_BUILT)
        elif owner is not None and reason is not None:
            left[path_of(owner)] = reason
        elif owner is not None:
            rebound.add(f"{path_of(owner)}.forward")
    if rebound:
        left["calls without labels"] = "they have no loss to fuse"
    counted = dict(sum([*calls.values()], Counter[str]()))
    return Report("transformers", tuple(sorted(rebound)), left, {"fused": 0} | counted if rebound else counted)


def why_not_reached(model: Any) -> str | None:
    """Return why calls of a model that was installed, or whose class was, do not come to its forward, or None."""
    is_target = is_installed(type(model).forward) or any(each.owner() is model for each in _replaced)
    return not_reached(model) if is_target else None


def uninstall(target: Any = None) -> dict[str, str]:
    """Undo :func:`install` for a model, a class, or everything; return what became of each forward."""
    owner = None if target is None else owner_of(target)
    verdicts = {}
    for cls in [each for each in _left if owner is None or each is owner]:
        del _left[cls]
        calls.pop(cls, None)
    for replaced in reversed(_replaced.copy()):
        its_owner = replaced.owner()
        if its_owner is not None and owner is not None and its_owner is not owner:
            continue
        _replaced.remove(replaced)
        if its_owner is not None:
            verdicts[name_of(its_owner)] = _restore(its_owner, replaced)
    forward = None if owner is None or verdicts else vars(owner).get(slot_of(owner))
    if is_installed(forward) and getattr(forward, "__func__", None) is not getattr(type(owner), "forward", None):
        put_back(owner, slot_of(owner), None)  # of a copy of an installed model
        verdicts[name_of(owner)] = "restored"
    if owner is not None and not verdicts and hasattr(getattr(owner, "forward", None), "vocab_parallel_ce"):
        verdicts[name_of(owner)] = "left alone: its class is installed; uninstall() the class, or everything"
    return verdicts


def _restore(owner: Any, replaced: Replaced) -> str:
    if isinstance(owner, type):
        calls.pop(owner, None)  # they are of models that compiled the class's forward
    name = replaced.name if isinstance(owner, type) else slot_of(owner)  # accelerate may have come or gone since
    current = vars(owner).get(name)
    if getattr(current, "__func__", current) is not replaced.after:
        return "left alone: something else has replaced it since"
    put_back(owner, name, replaced.before)
    return "restored"


def lazy_forward(original: Callable[..., Any], options: dict[str, Any], owner: Any) -> Callable[..., Any]:
    """Return a forward that runs ``original`` with a lazy head, if labels are given."""
    labels_of, note_compiled = labels_taker(original), _noting_compiled(owner)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if labels_of(args, kwargs) is not None:
                note_compiled(COMPILED)
            elif self.training and torch.is_grad_enabled():
                note_compiled(WITHOUT_LABELS)
            return original(self, *args, **kwargs)
        if torch._C._are_functorch_transforms_active():
            return original(self, *args, **kwargs)
        if labels_of(args, kwargs) is None:
            _note_without_labels(self)
            with forward_under_way():
                return original(self, *args, **kwargs)
        if torch._C._is_tracing() or head_of(self) is None:
            reason = TRACED if torch._C._is_tracing() else NO_HEAD
            return _counted(original, reason, self, args, kwargs)
        with _call_with_labels(self), lazy_head(self, options) as record:
            outputs = original(self, *args, **_without_items(kwargs))
        record.end()
        return outputs

    return forward


def _rewritten(original: Callable[..., Any], options: dict[str, Any], owner: Any) -> Callable[..., Any]:
    """Return the rewritten forward, which calls without labels are noted of."""
    labels_of, note_compiled = labels_taker(original), _noting_compiled(owner)
    rewritten = rewritten_forward(original, options)

    @functools.wraps(rewritten)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_labelled = labels_of(args, kwargs) is not None
        if torch.compiler.is_dynamo_compiling():
            if not is_labelled and self.training and torch.is_grad_enabled():
                note_compiled(WITHOUT_LABELS)
            return rewritten(self, *args, **_without_items(kwargs))
        if not is_labelled:
            _note_without_labels(self)
            return rewritten(self, *args, **kwargs)
        with _call_with_labels(self):
            return rewritten(self, *args, **_without_items(kwargs))

    return forward


def _without_items(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` that give the loss of no items, 0 / 0, the value 0: with infinity for ``num_items_in_batch`` 0.

    The model's own loss function divides by it, and on a GPU nobody may look at it.
    """
    n = kwargs.get("num_items_in_batch")
    if isinstance(n, torch.Tensor):
        n = n if n.is_floating_point() else n.float()  # as the quotient of an fp32 sum and an integer is computed
        return kwargs | {"num_items_in_batch": n.masked_fill(n == 0, math.inf)}
    return kwargs if n is None or n else kwargs | {"num_items_in_batch": math.inf}


def _unfused(original: Callable[..., Any], reason: str, owner: Any) -> Callable[..., Any]:
    """Return a forward that runs ``original``, and counts its calls with labels."""
    labels_of, note_compiled = labels_taker(original), _noting_compiled(owner)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            if labels_of(args, kwargs) is not None:
                note_compiled(reason)
            return original(self, *args, **kwargs)
        if labels_of(args, kwargs) is None:
            _note_without_labels(self)
            return original(self, *args, **kwargs)
        return _counted(original, reason, self, args, kwargs)

    return forward


def calls_inside(model: nn.Module) -> Counter[str]:
    """Return what became of the calls of a model, and of models that it is made of."""
    return sum((calls[each] for each in model.modules() if each in calls), Counter())


def _counted(original: Callable[..., Any], reason: str, model: Any, args: Any, kwargs: Any) -> Any:
    """Call ``original``, and count ``reason`` unless a model inside of this one says what became of its call."""
    before = sum(calls_inside(model).values())
    with _call_with_labels(model):
        outputs = original(model, *args, **kwargs)
    if sum(calls_inside(model).values()) == before:
        note_unfused(model, reason)
    return outputs


@contextlib.contextmanager
def _call_with_labels(model: Any) -> Iterator[None]:
    models = _labelled.__dict__.setdefault("models", [])
    models.append(model)
    try:
        yield
    finally:
        models.pop()


def _note_without_labels(model: Any) -> None:
    """Note a call for training without labels, unless it is a part of one with labels."""
    if not (model.training and torch.is_grad_enabled()) or is_lazy_here(head_of(model)):
        return
    outer = _labelled.__dict__.get("models", ())
    if not any(module is model for each in outer for module in each.modules()):
        note_unfused(model, WITHOUT_LABELS)


def _noting_compiled(owner: Any) -> Callable[[str], None]:
    """Return what notes, once per compilation, that a forward was compiled. It is no part of the graph."""
    reference = weakref.ref(owner)

    def note(event: str) -> None:
        target = reference()
        if target is not None:
            note_unfused(target, event)

    # What torch.compiler.assume_constant_result does, which imports the compiler.
    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note


def _install(owner: Any, mechanism: str, options: dict[str, Any], counts: bool = False) -> str | None:
    """Replace the forward of a class or a model; return why not, or None. ``counts``: one that counts calls, then."""
    cls: Any = owner if isinstance(owner, type) else type(owner)
    name = slot_of(owner)
    current = vars(owner).get(name) if owner is not cls else None
    if current is None or getattr(current, "__func__", None) is cls.forward:  # or what a pickled model has
        current = cls.forward
    if getattr(current, "vocab_parallel_ce", None) == (mechanism, options):
        return _reason(current)
    if hasattr(current, "vocab_parallel_ce"):
        return f"has mechanism and options {current.vocab_parallel_ce} already: uninstall() them first"
    if current is not cls.forward or has_other_forward(cls):
        return "something else has replaced its forward: install() before that"
    original = cls.forward
    if "labels" not in inspect.signature(original).parameters:
        return "its forward takes no labels"
    reason = None
    try:
        forward = {"lazy": lazy_forward, "rewrite": _rewritten}[mechanism](original, options, owner)
    except ValueError as error:
        reason = f"cannot be rewritten: {error}"
        if not counts:
            return reason
        forward = _unfused(original, reason, owner)
    forward.vocab_parallel_ce, forward.reason = (mechanism, options), reason  # type: ignore[attr-defined]
    before = vars(owner).get(name) if owner is cls or name == DISPATCHED else None
    _replaced.append(Replaced(weakref.ref(owner), name, before, forward))
    setattr(owner, name, forward if owner is cls else forward.__get__(owner))
    return reason


def _install_bound(classes: list[type], mechanism: str, options: dict[str, Any]) -> None:
    """Replace what models have bound of their classes' forwards, before these change: accelerate does that."""
    for model in live_models(classes):
        if getattr(vars(model).get(slot_of(model)), "__func__", None) is type(model).forward:
            _install(model, mechanism, options, counts=True)


def _reason(forward: Any) -> str | None:
    """Return why a forward of this module does not fuse, or None."""
    return getattr(forward, "reason", None)


def _install_class(cls: Any, mechanism: str, options: dict[str, Any]) -> None:
    """Replace the forward of a class, or say once why not."""
    reason = _install(cls, mechanism, options, counts=True)
    if reason is None or _reason(cls.forward) is not None:  # which counts, and says it at the first call
        _left.pop(cls, None)
    elif cls not in _left:
        _left[cls] = reason
        count(calls.setdefault(cls, Counter()), reason)
        logger.warning("vocab_parallel_ce: %s: its forward is left alone: %s", cls.__name__, reason)


def _install_when_built(mechanism: str, options: dict[str, Any]) -> None:
    """Install for each class when its first model is built: its module is complete then."""
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    original = base.__init__
    if hasattr(original, "vocab_parallel_ce"):
        return
    seen = weakref.WeakSet(imported_classes())

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        for cls in reversed(type(self).__mro__):
            if cls not in seen and issubclass(cls, base):
                seen.add(cls)
                if is_language_model(cls):
                    _install_class(cls, mechanism, options)
        original(self, *args, **kwargs)

    build.vocab_parallel_ce = (mechanism, options)  # type: ignore[attr-defined]
    _replaced.append(Replaced(weakref.ref(base), "__init__", original, build))
    base.__init__ = build
