"""Put this package's losses in the place of Megatron-Core's, and undo it."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from vocab_parallel_ce.checks import check_choice
from vocab_parallel_ce.integrations.megatron import linear, losses
from vocab_parallel_ce.linear.cross_entropy import LOSS_KEYWORDS, split_keywords
from vocab_parallel_ce.linear.plan import check_head_settings
from vocab_parallel_ce.options import check_settings

LANGUAGE_MODULE = "megatron.core.models.common.language_module.language_module"
MULTI_TOKEN = "megatron.core.transformer.multi_token_prediction"
FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {  # every name of them in Megatron's modules is rebound
    "vocab_parallel_cross_entropy": (
        "megatron.core.tensor_parallel.cross_entropy",
        losses.vocab_parallel_cross_entropy,
    ),
    "fused_vocab_parallel_cross_entropy": (
        "megatron.core.fusions.fused_cross_entropy",
        losses.fused_vocab_parallel_cross_entropy,
    ),
    "te_parallel_cross_entropy": (LANGUAGE_MODULE, losses.te_parallel_cross_entropy),  # None without TransformerEngine
}
MODELS = {  # those that this version of Megatron-Core has, for the linear loss
    "GPTModel": "megatron.core.models.gpt.gpt_model",
    "HybridModel": "megatron.core.models.hybrid.hybrid_model",
    "MambaModel": "megatron.core.models.mamba.mamba_model",
}
OPTIONS = {
    name: LOSS_KEYWORDS[name]
    for name in ("z_loss", "gradient", "impl", "check_labels", "vocab_size", "chunk_tokens", "memory_budget")
}


class Report(NamedTuple):
    """What :func:`install` rebound, and what was called since then."""

    installed: bool
    rebound: tuple[str, ...]  # full names
    calls: dict[str, int]  # of the loss of logits and of the linear loss, and what made its logits


class Rebound(NamedTuple):
    """One name that stands for something of this package."""

    owner: Any  # a module or a class
    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        prefix = f"{self.owner.__module__}." if isinstance(self.owner, type) else ""
        return f"{prefix}{self.owner.__name__}.{self.name}"


_rebound: list[Rebound] = []
_asked: dict[str, Any] = {}


def install(*, linear: bool = False, **options: Any) -> Report:
    """Compute Megatron-Core's losses with this package, in models that exist and in those to come.

    Args:
        linear: also fuse the output layer with its loss, in ``GPTModel``, ``HybridModel`` and ``MambaModel`` and their
            heads of multi-token prediction, so that the logits of all tokens never exist. Where ``forward`` is given
            ``loss_mask``, the gradients are computed in forward.
        options: ``z_loss``, ``gradient``, ``impl``, ``check_labels`` and ``vocab_size`` of
            :func:`vocab_parallel_cross_entropy`; of :func:`linear_cross_entropy` also ``chunk_tokens`` and
            ``memory_budget``. ``gradient="in_backward"`` is for losses that more than ``loss_mask`` multiplies.

    Returns:
        the report, with the names that were rebound.

    Raises:
        ImportError: Megatron-Core is not installed.
        TypeError, ValueError: an option has another name, or does not fit.
        ValueError: it is installed with other options.
    """
    settings, head_settings = split_keywords(options, OPTIONS)
    check_settings(settings, 1)
    not_linear = [name for name in ("chunk_tokens", "memory_budget") if name in options and not linear]
    if not_linear:
        raise ValueError(f"{not_linear[0]}: expected linear=True with it, got linear=False")
    known = ("auto", "in_backward") if linear else ("auto", "in_backward", "out_of_place")
    check_choice("gradient", settings.gradient, known)
    if linear:
        check_head_settings(settings._replace(gradient="auto"), head_settings)
    asked = {"linear": linear, **options}
    if _rebound:
        if asked != _asked:
            raise ValueError(f"megatron: is installed with {_asked}, got {asked}; uninstall() first")
        return report()
    importlib.import_module(LANGUAGE_MODULE)
    found = {name: getattr(importlib.import_module(module), name) for name, (module, _) in FUNCTIONS.items()}
    models = _models() if linear else []
    _asked.update(asked)
    losses.options.update(options)
    losses.calls.clear()
    for name, (_, ours) in FUNCTIONS.items():
        _rebind_function(name, found[name], ours)
    language_module = sys.modules[LANGUAGE_MODULE].LanguageModule
    _rebind(language_module, "compute_language_model_loss", losses.noted)
    for owner, name, make in models:
        _rebind(owner, name, make)
    return report()


def uninstall() -> None:
    """Give Megatron-Core its own names back, also in modules that were imported after :func:`install`.

    Raises:
        RuntimeError: something else replaced one of them since; nothing is changed.
    """
    for rebound in _rebound:
        if vars(rebound.owner).get(rebound.name) is not rebound.after:
            raise RuntimeError(f"{rebound}: something else replaced it after install(); undo that first")
    originals = {name: next((r.before for r in _rebound if r.name == name), None) for name in FUNCTIONS}
    while _rebound:
        owner, name, before, _ = _rebound.pop()
        setattr(owner, name, before)
    for name, (_, ours) in FUNCTIONS.items():
        for module in _modules_with(name, ours):
            setattr(module, name, originals[name])
    _asked.clear()
    losses.options.clear()


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[Report]:
    """Do :func:`install` with ``options``, and :func:`uninstall` at the end of the ``with`` block."""
    was_installed = bool(_rebound)
    try:
        yield install(**options)
    finally:
        if not was_installed:
            uninstall()


def report() -> Report:
    """Return what is installed, and the calls since then."""
    return Report(bool(_rebound), tuple(map(str, _rebound)), dict(losses.calls))


def _rebind_function(name: str, original: Any, ours: Callable[..., Any]) -> None:
    for module in _modules_with(name, original) if original is not None else ():
        _rebound.append(Rebound(module, name, original, ours))
        setattr(module, name, ours)


def _rebind(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    before = vars(owner)[name]
    _rebound.append(Rebound(owner, name, before, make(before)))
    setattr(owner, name, _rebound[-1].after)


def _modules_with(name: str, value: Any) -> list[Any]:
    """Return Megatron's imported modules in which ``name`` stands for ``value``."""
    modules = [module for key, module in list(sys.modules.items()) if key.split(".")[0] == "megatron"]
    return [module for module in modules if module is not None and vars(module).get(name) is value]


def _models() -> list[tuple[Any, str, Callable[[Any], Any]]]:
    """Return what the linear loss wraps, of what this version of Megatron-Core has."""
    found: list[tuple[Any, str, Callable[[Any], Any]]] = []
    for name, module in MODELS.items():
        with contextlib.suppress(ImportError):
            model = getattr(importlib.import_module(module), name)
            if "forward" in vars(model):
                found.append((model, "forward", linear.with_lazy_logits))
    multi_token = importlib.import_module(MULTI_TOKEN)
    if hasattr(multi_token, "_compute_mtp_acceptance_counts"):
        found.append((multi_token, "_compute_mtp_acceptance_counts", linear.with_predictions))
    return found
