"""Put this package's losses in the place of Megatron-Core's, and undo it."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Iterator
from typing import Any

from vocab_parallel_ce.checks import check_bool
from vocab_parallel_ce.integrations import Report
from vocab_parallel_ce.integrations.megatron import linear, losses
from vocab_parallel_ce.integrations.rebind import Around, Switch, copy_of

CORE = "megatron.core"
LANGUAGE_MODULE = f"{CORE}.models.common.language_module.language_module"
LOSSES = {
    f"{CORE}.tensor_parallel.cross_entropy:vocab_parallel_cross_entropy": Around(
        lambda _: copy_of(losses.vocab_parallel_cross_entropy)
    ),
    f"{CORE}.fusions.fused_cross_entropy:fused_vocab_parallel_cross_entropy": Around(
        lambda _: copy_of(losses.fused_vocab_parallel_cross_entropy)
    ),
    f"{LANGUAGE_MODULE}:te_parallel_cross_entropy": Around(  # None without TransformerEngine
        lambda _: copy_of(losses.te_parallel_cross_entropy), optional=True
    ),
    f"{LANGUAGE_MODULE}:LanguageModule.compute_language_model_loss": Around(losses.noted),
}
LAZY, PREDICTIONS = (Around(make, optional=True) for make in (linear.with_lazy_logits, linear.with_predictions))
LINEAR = {  # optional: no version has all of them, and MambaModel may inherit its forward
    # The schedule of build_schedule_plan calls _postprocess alone; a subclass may have one of its own, without ours.
    f"{CORE}.models.gpt.gpt_model:GPTModel.forward": LAZY,
    f"{CORE}.models.gpt.gpt_model:GPTModel._postprocess": LAZY,
    f"{CORE}.models.hybrid.hybrid_model:HybridModel.forward": LAZY,
    f"{CORE}.models.mamba.mamba_model:MambaModel.forward": LAZY,
    f"{CORE}.transformer.multi_token_prediction:_compute_mtp_acceptance_counts": PREDICTIONS,
}
LEFT = {"output_layer": "install(linear=True) fuses it with the loss"}
LEFT_OF_LINEAR = {"output_layer of T5Model and BertModel": "their forward is not replaced; the loss of their logits is"}


_switch = Switch("Megatron-Core 0.16 to 0.19", LOSSES, calls=losses.calls)
_installed: dict[str, Any] = {}  # of install(); empty: nothing is installed


def install(*, linear: bool = False, **options: Any) -> Report:
    """Compute Megatron-Core's losses with this package, in models that exist and in those to come.

    Args:
        linear: also fuse the output layer with its loss, in ``GPTModel``, ``HybridModel`` and ``MambaModel`` and their
            heads of multi-token prediction, whose logits are then made in chunks of tokens. Where ``forward`` is given
            ``loss_mask``, the gradients are computed in the forward pass.
        options: ``z_loss``, ``gradient``, ``impl``, ``check_labels`` and ``vocab_size`` of
            :func:`vocab_parallel_cross_entropy`; of :class:`HeadOptions` also ``chunk_size``.
            With ``linear=True``, ``gradient="in_backward"`` is for losses that more than ``loss_mask`` multiplies, and
            overwrites no logits that were made. Without it, that name overwrites logits, whoever keeps them.

    Returns:
        the report. Its ``calls`` are of the loss of logits and of the linear loss, and what made logits.

    Raises:
        ImportError: Megatron-Core is not installed.
        TypeError, ValueError: an option has another name, or does not fit.
        ValueError: it is installed with other options.
    """
    check_bool("linear", linear)
    of_logits, of_head = losses.split_options(linear, **options)
    requested = {"linear": linear, **options}
    if _installed:
        if requested != _installed:
            raise ValueError(f"megatron: is installed with {_installed}, got {requested}; uninstall() first")
        return report()
    importlib.import_module(LANGUAGE_MODULE)
    _switch.stand_ins, _switch.left = (LOSSES | LINEAR, LEFT_OF_LINEAR) if linear else (LOSSES, LEFT)
    _switch.left = {**_switch.left, **_bound_before()}
    _switch.install()
    _installed.update(requested)
    losses.options.update(of_logits)
    losses.head_options.update(of_head)
    losses.fallbacks.clear()
    return report()


def _bound_before() -> dict[str, str]:
    """Return the models that keep a loss of Megatron's, bound when they were built: no name reaches it."""
    module = importlib.import_module(LANGUAGE_MODULE)
    names = [target.rpartition(":")[::2] for target in LOSSES]
    own = [getattr(importlib.import_module(path), name, None) for path, name in names]
    models = [each for each in gc.get_objects() if issubclass(type(each), module.LanguageModule)]
    bound = [vars(model).get("vocab_parallel_cross_entropy") for model in models]
    n_models = sum(any(loss is each for each in own) for loss in bound if loss is not None)
    why = "they bound Megatron-Core's loss when they were built; build them after install()"
    return {f"the loss of {n_models} models that exist": why} if n_models else {}


def uninstall() -> None:
    """Give Megatron-Core its own names back, also in modules that were imported after :func:`install`.

    Raises:
        RuntimeError: something else replaced one of them since; nothing is changed.
    """
    _switch.uninstall()
    _installed.clear()
    losses.options.clear()
    losses.head_options.clear()


@contextlib.contextmanager
def installed(**options: Any) -> Iterator[Report]:
    """Do :func:`install` with ``options``, and :func:`uninstall` at the end of the ``with`` block."""
    was_installed = bool(_installed)
    try:
        yield install(**options)
    finally:
        if not was_installed:
            uninstall()


report = _switch.report
