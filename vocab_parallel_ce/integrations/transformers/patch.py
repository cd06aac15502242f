"""Replace the forwards of transformers' models, and undo it."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from vocab_parallel_ce.api.call import settings_of
from vocab_parallel_ce.api.heads import KEYWORDS
from vocab_parallel_ce.head.plan import check_head_settings
from vocab_parallel_ce.integrations import log_installed, warn_if_newer
from vocab_parallel_ce.integrations.transformers.heads import (
    calls,
    forward_under_way,
    is_lazy_here,
    lazy_head,
    note_unfused,
)
from vocab_parallel_ce.integrations.transformers.rewritten import rewritten_forward
from vocab_parallel_ce.options import Advanced, check_settings

MECHANISMS = ("lazy", "rewrite")
COMPILED = "torch.compile traced the forward; install(mechanism='rewrite') is fused there"
TRACED = "torch.jit.trace cannot record the fused loss"
WITHOUT_LABELS = (
    "a call for training had no labels; the loss is computed from its logits (label_smoothing_factor, "
    "compute_loss_func, a loss of your own)"
)
OPTIONS = {name: KEYWORDS[name] for name in ("chunk_size", "gradient", "impl")}


class Replaced(NamedTuple):
    """What :func:`uninstall` needs to undo one replacement."""

    owner: weakref.ref[Any]  # a class or a model
    name: str
    before: Any  # None: inherited
    after: Callable[..., Any]  # the function, if it is a model's method


_replaced: list[Replaced] = []


def install(
    target: Any = None, *, mechanism: str = "lazy", imported_later: bool = True, **options: Any
) -> dict[str, str]:
    """Fuse head and loss of transformers' models, wherever labels are given.

    Args:
        target: a model, a class of models, or None for every class of transformers' causal language models.
        mechanism: ``"lazy"``: the model's own forward runs, and its head returns logits that are made only if
            somebody looks at them. ``"rewrite"``: a forward made from its source, which can be compiled.
        imported_later: with ``target=None``, also classes that are imported after this call.
        options: ``chunk_size``, ``gradient`` and ``impl`` of :func:`linear_cross_entropy`.

    Returns:
        For each class ``"installed"``, or why its forward was left alone.

    Raises:
        TypeError: target is neither a model nor a class of models; an option has another name.
        ValueError: the forward of a target asked for by name cannot be replaced.
    """
    if mechanism not in MECHANISMS:
        raise ValueError(f"mechanism: expected one of {', '.join(MECHANISMS)}, got {mechanism!r}")
    settings, head_settings = settings_of(options, OPTIONS, install, Advanced())
    check_head_settings(settings, head_settings)
    check_settings(settings, 1)
    warn_if_newer("transformers")
    if target is None:
        verdicts = {cls.__name__: _install(cls, mechanism, options) for cls in imported_classes()}
        if imported_later:
            _install_when_built(mechanism, options)
        _log(verdicts, imported_later)
        return verdicts
    owner = owner_of(target)
    verdict = _install(owner, mechanism, options)
    name = _name(owner)
    if verdict != "installed":
        raise ValueError(f"{name}: {verdict}")
    _log({name: verdict}, False)
    return {name: verdict}


def _log(verdicts: dict[str, str], imported_later: bool) -> None:
    """Log which classes are fused and which not; the log of a call says what of it is not."""
    computed = [name for name, verdict in verdicts.items() if verdict == "installed"]
    left = {name: verdict for name, verdict in verdicts.items() if verdict != "installed"}
    later = ["classes that are imported later"] if imported_later else []
    log_installed("transformers", computed + later, left | {"calls without labels": "they have no loss to fuse"})


def uninstall(target: Any = None) -> dict[str, str]:
    """Undo :func:`install` for a model, a class, or everything; return what became of each forward."""
    owner = None if target is None else owner_of(target)
    verdicts = {}
    for replaced in reversed(_replaced.copy()):
        its_owner = replaced.owner()
        if its_owner is not None and owner is not None and its_owner is not owner:
            continue
        _replaced.remove(replaced)
        if its_owner is not None:
            verdicts[_name(its_owner)] = _restore(its_owner, replaced)
    if owner is not None and not verdicts and hasattr(vars(owner).get("forward"), "vocab_parallel_ce"):
        del owner.forward  # a copy of an installed model
        verdicts[_name(owner)] = "restored"
    if owner is not None and not verdicts and hasattr(getattr(owner, "forward", None), "vocab_parallel_ce"):
        verdicts[_name(owner)] = "left alone: its class is installed; uninstall() the class, or everything"
    return verdicts


def _restore(owner: Any, replaced: Replaced) -> str:
    if isinstance(owner, type):
        calls.pop(owner, None)  # they are of models that compiled the class's forward
    current = vars(owner).get(replaced.name)
    if getattr(current, "__func__", current) is not replaced.after:
        return "left alone: something else has replaced it since"
    if replaced.before is None:
        delattr(owner, replaced.name)
    else:
        setattr(owner, replaced.name, replaced.before)
    return "restored"


def imported_classes() -> list[type]:
    """Return transformers' causal language models whose modules are imported."""
    names = causal_lm_names()
    found: dict[str, type] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("transformers.models.") and ".modeling_" in module_name:
            found |= {n: c for n, c in vars(module).items() if n in names and c.__module__ == module_name}
    return [found[name] for name in sorted(found)]


@functools.cache
def causal_lm_names() -> frozenset[str]:
    """Return the names of the classes that transformers' auto mapping has for causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return frozenset(names.values())


def lazy_forward(original: Callable[..., Any], options: dict[str, Any], owner: Any) -> Callable[..., Any]:
    """Return a forward that runs ``original`` with a lazy head, if labels are given."""
    labels_of, note_compiled = _labels_of(original), _noting_compiled(owner)

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
            if self.training and torch.is_grad_enabled() and not is_lazy_here(self.get_output_embeddings()):
                note_unfused(self, WITHOUT_LABELS)
            with forward_under_way():
                return original(self, *args, **kwargs)
        if torch._C._is_tracing():
            note_unfused(self, TRACED)
            return original(self, *args, **kwargs)
        with lazy_head(self, options) as record:
            outputs = original(self, *args, **_of_no_items(kwargs))
        record.end()
        return outputs

    return forward


def _rewritten(original: Callable[..., Any], options: dict[str, Any], owner: Any) -> Callable[..., Any]:
    """Return the rewritten forward, which calls without labels are noted of."""
    labels_of, note_compiled = _labels_of(original), _noting_compiled(owner)
    rewritten = rewritten_forward(original, options)

    @functools.wraps(rewritten)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if labels_of(args, kwargs) is None and self.training and torch.is_grad_enabled():
            if torch.compiler.is_dynamo_compiling():
                note_compiled(WITHOUT_LABELS)
            elif not is_lazy_here(self.get_output_embeddings()):
                note_unfused(self, WITHOUT_LABELS)
        return rewritten(self, *args, **_of_no_items(kwargs))

    return forward


def _of_no_items(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` that give the loss of no items, 0 / 0, the value 0: with infinity for ``num_items_in_batch`` 0.

    The model's own loss function divides by it, and on a GPU nobody may look at it.
    """
    n = kwargs.get("num_items_in_batch")
    if isinstance(n, torch.Tensor):
        n = n if n.is_floating_point() else n.float()  # as the quotient of an fp32 sum and an integer is computed
        return kwargs | {"num_items_in_batch": n.masked_fill(n == 0, math.inf)}
    return kwargs if n is None or n else kwargs | {"num_items_in_batch": math.inf}


def _labels_of(original: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a function that takes the labels out of the arguments of a forward without ``self``."""
    position = list(inspect.signature(original).parameters).index("labels") - 1

    def labels_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = kwargs.get("labels")
        return args[position] if labels is None and position < len(args) else labels

    return labels_of


def _noting_compiled(owner: Any) -> Callable[[str], None]:
    """Return what notes, once per compilation, that a forward was compiled. It is no part of the graph."""
    reference = weakref.ref(owner)

    def note(event: str) -> None:
        found = reference()
        if found is not None:
            note_unfused(found, event)

    # What torch.compiler.assume_constant_result does, which imports the compiler.
    note._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return note


def _install(owner: Any, mechanism: str, options: dict[str, Any]) -> str:
    """Replace the forward of a class or a model; return ``"installed"``, or why not."""
    cls: Any = owner if isinstance(owner, type) else type(owner)
    current = vars(owner).get("forward") if owner is not cls else None
    if current is None or getattr(current, "__func__", None) is cls.forward:  # or what a pickled model has
        current = cls.forward
    if getattr(current, "vocab_parallel_ce", None) == (mechanism, options):
        return "installed"
    if hasattr(current, "vocab_parallel_ce"):
        return f"has mechanism and options {current.vocab_parallel_ce} already: uninstall() them first"
    if current is not cls.forward or inspect.unwrap(cls.forward).__module__ not in {c.__module__ for c in cls.__mro__}:
        return "something else has replaced its forward: install() before that"
    original = cls.forward
    if "labels" not in inspect.signature(original).parameters:
        return "its forward takes no labels"
    try:
        forward = {"lazy": lazy_forward, "rewrite": _rewritten}[mechanism](original, options, owner)
    except ValueError as error:
        return f"cannot be rewritten: {error}"
    forward.vocab_parallel_ce = (mechanism, options)  # type: ignore[attr-defined]
    before = vars(owner).get("forward") if owner is cls else None
    _replaced.append(Replaced(weakref.ref(owner), "forward", before, forward))
    owner.forward = forward if owner is cls else forward.__get__(owner)
    return "installed"


def _install_when_built(mechanism: str, options: dict[str, Any]) -> None:
    """Install for each class when its first model is built: its module is complete then."""
    from transformers import PreTrainedModel

    base: Any = PreTrainedModel
    original = base.__init__
    if hasattr(original, "vocab_parallel_ce"):
        return

    seen = set(imported_classes())

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        for cls in type(self).__mro__:
            known = cls.__name__ in causal_lm_names() and cls.__module__.startswith("transformers.")
            if known and cls not in seen:
                seen.add(cls)
                _install(cls, mechanism, options)
        original(self, *args, **kwargs)

    build.vocab_parallel_ce = True  # type: ignore[attr-defined]
    _replaced.append(Replaced(weakref.ref(base), "__init__", original, build))
    base.__init__ = build


def owner_of(target: Any) -> Any:
    """Return the class, or the model inside PEFT's, DDP's or a compiler's wrapper."""
    inner = target
    while isinstance(inner, nn.Module):
        target, modules = inner, inner._modules
        if hasattr(target, "get_base_model"):
            inner = target.get_base_model()
        else:
            inner = modules.get(
                "_orig_mod", None if hasattr(target, "get_output_embeddings") else modules.get("module")
            )
    is_model = isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, nn.Module))
    if not is_model or not hasattr(target, "get_output_embeddings"):
        raise TypeError(f"target: expected a model of transformers, its class, or None, got {target!r:.80}")
    return target


def _name(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
