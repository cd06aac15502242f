"""Classes and models of transformers: which have a loss to fuse, and what they are called."""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

from torch import nn


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


def path_of(owner: Any) -> str:
    """Return the name of a class with its module, or what says that it is one model of that class."""
    cls = owner if isinstance(owner, type) else type(owner)
    return f"{cls.__module__}.{cls.__qualname__}{'' if cls is owner else ' (one model)'}"


def name_of(owner: Any) -> str:
    return owner.__name__ if isinstance(owner, type) else type(owner).__name__
