"""Classes and models of transformers: which have a loss to fuse, and what they are called."""

from __future__ import annotations

import functools
import gc
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

# Where wrappers that have the attributes of a model hold it: a compiler's, FSDP1's, Fabric's.
HOLDERS = ("_orig_mod", "_fsdp_wrapped_module", "_original_module")
DISPATCHED = "_old_forward"  # where accelerate puts the forward of a model that it gives one of its own
INSTALLED = "vocab_parallel_ce.integrations.transformers.patch"


def imported_classes() -> list[type]:
    """Return the classes of language models that are imported, a class after those that it inherits from."""
    module = sys.modules.get("transformers.modeling_utils")
    classes: list[type] = [] if module is None else [module.PreTrainedModel]
    for cls in classes:  # which grows meanwhile
        classes += cls.__subclasses__()
    return sorted(filter(is_language_model, dict.fromkeys(classes)), key=lambda cls: (len(cls.__mro__), path_of(cls)))


def is_language_model(cls: Any) -> bool:
    """Return whether the forward of a class takes labels, and its models have a head that makes logits of tokens.

    transformers knows the head of a model by its attribute ``lm_head``, or by ``get_output_embeddings`` of its class.
    A model that generates tokens has one, too, perhaps inside of another model.
    """
    if "labels" not in inspect.signature(cls.forward).parameters and not has_other_forward(cls):
        return False
    from transformers import PreTrainedModel

    if cls.get_output_embeddings is not PreTrainedModel.get_output_embeddings:
        return True
    codes = [getattr(vars(base).get("__init__"), "__code__", None) for base in cls.__mro__]
    has_head = any(code is not None and "lm_head" in code.co_names for code in codes)
    return has_head or any(base.__name__ == "GenerationMixin" for base in cls.__mro__)


def has_other_forward(cls: Any) -> bool:
    """Return whether something else has replaced the forward of a class."""
    return inspect.unwrap(cls.forward).__module__ not in {base.__module__ for base in cls.__mro__}


@functools.cache
def causal_lm_names() -> frozenset[str]:
    """Return the names of the classes that transformers' auto mapping has for causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return frozenset(names.values())


def head_of(model: Any) -> Any:
    """Return what a model says is its head, or None."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # of a base class whose other models have one
        return None


def owner_of(target: Any) -> Any:
    """Return the class, or the model inside the wrapper of PEFT, DDP, FSDP1, Fabric, DeepSpeed or a compiler."""
    inner = target
    while isinstance(inner, nn.Module):
        target, modules = inner, inner._modules
        held = next((modules[name] for name in HOLDERS if name in modules), None)
        if held is not None:
            inner = held
        elif hasattr(target, "get_base_model"):
            inner = target.get_base_model()
        else:
            inner = None if hasattr(target, "get_output_embeddings") else modules.get("module")
    is_model = isinstance(target, nn.Module) or (isinstance(target, type) and issubclass(target, nn.Module))
    if not is_model or not hasattr(target, "get_output_embeddings"):
        raise TypeError(f"target: expected a model of transformers, its class, or None, got {target!r:.80}")
    return target


def slot_of(owner: Any) -> str:
    """Return the attribute with the forward of a class or a model: what accelerate has dispatched calls another."""
    return DISPATCHED if DISPATCHED in vars(owner) else "forward"


def maker_of(forward: Any) -> str:
    """Return the module whose code runs: ``functools.wraps`` copies every name and attribute but this."""
    while hasattr(forward, "__func__") or isinstance(forward, functools.partial):
        forward = forward.func if isinstance(forward, functools.partial) else forward.__func__
    return str(getattr(forward, "__globals__", {}).get("__name__", type(forward).__module__))


def not_reached(model: Any) -> str | None:
    """Return why calls of a model with a forward of its own do not come to an installed one, or None."""
    forward = vars(model).get(slot_of(model))
    if forward is None:
        return None
    maker = maker_of(vars(model)["forward"])
    if maker.partition(".")[0] == "trl":  # which asks functools.wraps for a signature, and calls nothing of it
        return "TRL gave it a head of its own, which trl.install() computes from TRL 1.16 on"
    if is_installed(inspect.unwrap(forward, stop=is_installed)):
        return None
    return f"its forward, by {maker}, is from before install(): make it after"


def is_installed(forward: Any) -> bool:
    """Return whether a function or method was made by ``install()``."""
    return maker_of(forward) == INSTALLED


def live_models(classes: Iterable[type]) -> list[Any]:
    """Return the models of some classes, or of classes made from them, that have a forward of their own."""
    bases = tuple(classes)
    if not _models_in_memory(bases):
        return []
    gc.collect()  # the forward of a model holds the model: a user may have dropped it before
    return _models_in_memory(bases)


def _models_in_memory(bases: tuple[type, ...]) -> list[Any]:
    known, found = dict[type, bool](), list[Any]()
    for each in gc.get_objects():
        cls = type(each)
        if cls not in known:
            known[cls] = issubclass(cls, bases)
        if known[cls] and "forward" in vars(each):
            found.append(each)
    return found


def put_back(owner: Any, name: str, before: Any) -> None:
    """Give an attribute with a forward its value of before, None if it was inherited."""
    if before is None and name == DISPATCHED:
        before = type(owner).forward.__get__(owner)
    if before is None:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def labels_taker(original: Callable[..., Any]) -> Callable[[tuple[Any, ...], dict[str, Any]], Any]:
    """Return a function that takes the labels out of the arguments of a forward without ``self``."""
    position = list(inspect.signature(original).parameters).index("labels") - 1

    def labels_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        labels = kwargs.get("labels")
        return args[position] if labels is None and position < len(args) else labels

    return labels_of


def path_of(owner: Any) -> str:
    """Return the name of a class with its module, or what says that it is one model of that class."""
    cls = owner if isinstance(owner, type) else type(owner)
    return f"{cls.__module__}.{cls.__qualname__}{'' if cls is owner else ' (one model)'}"


def name_of(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
