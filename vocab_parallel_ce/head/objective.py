"""An objective of each token inside a head: a function of its log-probability, and of numbers known beforehand.

The loop over chunks calls it with the outputs of some rows, before their gradient: its derivatives by the outputs are
the grad_outputs of the rows. So a head has three products for any objective, as for a mean.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.head.chunks import TokenOrder
from vocab_parallel_ce.layout import flat
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.plan import checked_divisor, saved_as_it_is
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Tokens

MIXES = (
    "objective: expected each token's number to depend on its own numbers, got another when others were left out "
    "or changed: it mixes tokens, or changes with each call; a mean or a sequence's ratio takes two steps "
    "(docs/objective.md)"
)


_checked: set[Any] = set()  # keys of functions that mix no tokens
MOST_CHECKED = 1024


class Objective(NamedTuple):
    """What a caller passes."""

    function: Callable[..., Tensor]  # (log_probs [n] or [n, k], name=[n, ...], ...) -> [n]; of no labels by name alone
    tokens: Mapping[str, Tensor]  # [...] each, or [..., m]
    reduction: str  # "mean" or "sum"
    num_items: float | Tensor | None
    is_checked: bool  # whether the function is checked at its first call
    of_loss: str = "log_probs"  # what the loss is to the function; "divergence" without labels


def check_objective(objective: Objective, tokens: Tokens, settings: Settings) -> None:
    """Raise unless the objective can be called with the tokens' numbers."""
    function: Any = objective.function  # of any type, as are the tokens
    if not callable(function):
        got = type(function).__name__
        raise TypeError(f"objective: expected a function of log_probs and others, got {got}; pass one")
    by_name: Any = objective.tokens
    if not isinstance(by_name, Mapping):
        got = type(by_name).__name__
        raise TypeError(f"tokens: expected a dict of tensors by their names, got {got}; pass {{'advantage': ...}}")
    for name, numbers in by_name.items():
        subject = f"tokens[{name!r}]"
        if type(name) is not str:
            raise TypeError(f"tokens: expected names as keys, got {name!r}; pass the name of an argument of objective")
        if name in ("log_probs", "divergence", *settings.outputs):
            raise ValueError(f"{subject}: expected a name of its own, got that of an output; pass another")
        checks.expect(subject, numbers, None, on=tokens.tensor, subject=tokens.subject)
        checks.check_requires_no_gradient(subject, numbers)
        if tokens.shape not in (numbers.shape, numbers.shape[:-1]):
            expected, remedy = f"that of the tokens, {tuple(tokens.shape)}", "pass those of all ranks' tokens"
            raise ValueError(f"{subject}: shape must be {expected}, got {tuple(numbers.shape)}; {remedy}")
    checks.check_no_transforms(*by_name.values(), objective.num_items)
    checks.check_choice("reduction", objective.reduction, ("mean", "sum"))
    checks.check_bool("check_objective", objective.is_checked)


class RowObjective(NamedTuple):
    """An objective and its numbers in the order of a head's rows."""

    function: Callable[..., Tensor]
    tokens: dict[str, Tensor]  # [M] each, or [M, m]
    is_valid: Tensor  # [M] bool: rows that are not ignored
    factor: Tensor  # [1]: 1 / divisor, 0 for a divisor of 0
    losses: Tensor  # [M]: filled by `fill` and `fill_and_differentiate`; 0 for ignored rows
    may_be_of_none: bool  # whether ``num_items`` may be 0
    key: Any  # of a function to check; None: it is not
    errors: list[Exception] | None  # under verification: raised later, since the other ranks go on
    of_loss: str

    def fill(self, rows: slice, outputs: TokenOutputs) -> None:
        """Fill the losses of ``rows`` from their outputs."""
        try:
            self.losses[rows] = self._values(rows, self._named(outputs))
        except Exception as error:
            self._defer(error)

    def fill_and_differentiate(self, rows: slice, outputs: TokenOutputs, scale: Tensor | None) -> GradOutputs:
        """Do the same, and return the derivatives of :meth:`total` by the outputs, times ``scale [1]``."""
        factor = (self.factor if scale is None else self.factor * scale).expand(rows.stop - rows.start)
        try:
            values, grads = self._differentiated(rows, outputs, factor)
            if self.key is not None and self.key not in _checked:
                self._check(rows, outputs)
            self.losses[rows] = values
        except Exception as error:
            self._defer(error)
            grads = {name: torch.zeros_like(each) for name, each in _differentiable(self._named(outputs)).items()}
        return GradOutputs(loss=grads.pop(self.of_loss), **grads)

    def _defer(self, error: Exception) -> None:
        if self.errors is None:
            raise error
        self.errors.append(error)

    def total(self) -> Tensor:
        """Return the reduced loss ``[]``."""
        return self.losses.sum() * self.factor.squeeze(0)  # no view: a caller may add to it in place

    def counted(self, targets: Any, grads: GradOutputs, ignore_index: int) -> Any:
        """Return targets whose gradients are 0 if the divisor is, or what multiplies a divergence that has no labels.

        Whatever the logits hold: a divergence that does not count may be infinite.
        """
        is_alone = self.of_loss == "divergence"
        if not (self.may_be_of_none or is_alone):
            return targets
        is_left = (self.factor == 0) | (grads.loss == 0) if is_alone else self.factor == 0
        field = "ids" if hasattr(targets, "ids") else "labels"
        labels = getattr(targets, field)
        labels = targets.logits.new_zeros(targets.logits.shape[0], dtype=torch.int64) if labels is None else labels
        return targets._replace(**{field: torch.where(is_left, ignore_index, labels)})

    def _differentiated(self, rows: slice, outputs: TokenOutputs, factors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the numbers of some rows, and the derivatives of their sum, each times a factor."""
        named = self._named(outputs)
        leaves = {name: output.requires_grad_() for name, output in _differentiable(named).items()}
        with torch.enable_grad(), saved_as_it_is():
            values = self._values(rows, named)
            if not values.requires_grad:
                raise ValueError(
                    "objective: expected a function of log_probs, or of an output that has a gradient, got numbers "
                    "without one; do not detach them"
                )
            _check_no_other_leaf(values, tuple(leaves.values()))
            derivatives = torch.autograd.grad(values, tuple(leaves.values()), factors, allow_unused=True)
        for leaf in leaves.values():
            leaf.register_hook(_refuse_kept)
        grads = zip(leaves.items(), derivatives, strict=True)
        return values.detach(), {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in grads}

    def _values(self, rows: slice, named: dict[str, Tensor]) -> Tensor:
        """Return the checked numbers of some rows, 0 for ignored ones."""
        # Copies: the function may write to its arguments.
        others = {name: output.clone() for name, output in named.items()}
        others |= {name: numbers[rows].clone() for name, numbers in self.tokens.items()}
        first, is_valid = [others.pop("log_probs")] if "log_probs" in others else [], self.is_valid[rows]
        try:
            values = self.function(*first, **others)
        except TypeError:
            check_takes(self.function, others, bool(first))
            raise
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got = getattr(values, "dtype", type(values).__name__)
            raise TypeError(f"objective: expected floating-point numbers in a tensor, got {got}; return one per token")
        if values.layout is not torch.strided:
            raise TypeError(f"objective: expected a dense tensor, got layout {values.layout}; return its to_dense()")
        if values.shape != is_valid.shape or values.device != is_valid.device:
            expected, got = (f"{tuple(each.shape)} on {each.device}" for each in (is_valid, values))
            raise ValueError(f"objective: expected a number of each token, {expected}, got {got}; return that shape")
        return torch.where(is_valid, values.to(self.losses.dtype), 0.0)

    def _named(self, outputs: TokenOutputs) -> dict[str, Tensor]:
        """Return the outputs that there are, by the names of their arguments."""
        names = (self.of_loss, *TokenOutputs._fields[1:])
        return {name: output.detach() for name, output in zip(names, outputs, strict=True) if output is not None}

    def _check(self, rows: slice, outputs: TokenOutputs) -> None:
        """Raise if the function mixes tokens; remember it if there were enough to tell. Waits for the device."""
        index = self.is_valid[rows].nonzero().squeeze(1)
        n_valid = len(index)
        if n_valid == 0:
            return
        index = index.repeat(2) if n_valid == 1 else index
        tokens = {name: numbers[rows][index] for name, numbers in self.tokens.items()}
        if n_valid == 1:  # and another, of other numbers
            tokens |= {name: torch.stack([t[0], 2 * t[1]]) for name, t in tokens.items() if t.is_floating_point()}
        alone = self._replace(tokens=tokens, is_valid=self.is_valid[rows][index])
        some = TokenOutputs._make([None if each is None else each[index] for each in outputs])
        try:
            with torch.autograd.set_detect_anomaly(False):
                alone._check_each_alone(slice(0, len(index)), some)
                alone._check_each_changed(some)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # Of a single token the function may not take the other one's numbers.
            if n_valid == 1 and (error.__cause__ is not None or not str(error).startswith(MIXES)):
                return
            raise
        if n_valid > 1:
            if len(_checked) >= MOST_CHECKED:
                _checked.clear()
            _checked.add(self.key)

    def _moved(self, outputs: TokenOutputs, rows: Tensor, factor: float, step: Tensor) -> TokenOutputs:
        """Return outputs with other log-probabilities and divergences in ``rows [n]``: ``factor`` times, and a step."""

        def moved(output: Tensor, sign: int) -> Tensor:
            changed = factor * output + sign * _along_rows(step, output)
            return torch.where(_along_rows(rows, output), changed, output)

        sign = -1 if self.of_loss == "log_probs" else 1  # no log-probability is positive, and no divergence negative
        divergence = None if outputs.divergence is None else moved(outputs.divergence, 1)
        return outputs._replace(loss=moved(outputs.loss, sign), divergence=divergence)

    def _check_each_changed(self, outputs: TokenOutputs) -> None:
        """Raise unless a row has the same number and derivative if every second row gets far numbers of its own.

        Each row stays at its place, so that even rounding is the same.
        """
        rows, ones = slice(0, len(outputs.loss)), outputs.loss.new_ones(len(outputs.loss))
        values, grads = self._differentiated(rows, outputs, ones)
        for first in range(2):
            own = slice(first, None, 2)
            is_far = torch.ones_like(ones, dtype=torch.bool)
            is_far[own] = False
            for factor, step in ((0.01, 0.0 * ones), (4.0, 5 * ones)):
                far = self._moved(outputs, is_far, factor, step)
                try:
                    others, of_others = self._differentiated(rows, far, ones)
                except torch.OutOfMemoryError:
                    raise
                except Exception:  # it may refuse such numbers
                    continue
                is_right = _are_close(values[own], others[own])
                if not (is_right and all(_are_close(g[own], of_others[name][own]) for name, g in grads.items())):
                    raise ValueError(MIXES)

    def _check_each_alone(self, rows: slice, outputs: TokenOutputs) -> None:
        """Raise unless every second row has the same number and derivative alone, and so have the rows between."""
        ones = outputs.loss.new_ones(len(outputs.loss))
        spread = torch.arange(len(ones), device=ones.device, dtype=ones.dtype) * 0.6180339887 % 1
        # As they are, a policy may be its own reference, or its teacher, which hides a mean of their difference.
        outputs = self._moved(outputs, spread >= 0, 1.0, 0.5 * spread)
        values, grads = self._differentiated(rows, outputs, ones)
        # Of other weights no sum of two rows is a multiple of one. A power of two rounds nothing.
        weights = 2.0 ** (4 * spread).floor()
        for first in range(min(2, len(ones))):
            own = slice(first, None, 2)
            half = TokenOutputs._make([None if each is None else each[own] for each in outputs])
            half_rows = slice(rows.start + first, rows.stop, 2)
            try:
                alone, grads_alone = self._differentiated(half_rows, half, ones[own])
                _, weighted = self._differentiated(half_rows, half, weights[own])
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError, ValueError) as error:  # of the whole there was none
                raise ValueError(f"{MIXES}. Numbers of all tokens must be in tokens=") from error
            is_right = _are_close(values[own], alone)
            is_right &= all(_are_close(grad[own], grads_alone[name]) for name, grad in grads.items())
            is_right &= all(
                _are_close(grads_alone[name] * _along_rows(weights[own], grad), grad) for name, grad in weighted.items()
            )
            if not is_right:
                raise ValueError(MIXES)


def key_of(function: Any) -> tuple[Any, ...]:
    """Return what stands for a function among those that are checked: its code, those of functions in its closure, its
    class, and the constants that a ``functools.partial`` gives it; of one without code, as ``torch.neg``, itself.
    """
    given: list[Any] = []
    keys: list[Any] = []  # of functions that a partial calls
    while isinstance(function, functools.partial):
        keys += [key_of(each) for each in function.args if callable(each)]
        given += [*function.args, *[each for pair in function.keywords.items() for each in pair]]
        function = function.func
    itself = function
    if isinstance(function, torch.nn.Module):
        function = function.forward
    elif not hasattr(function, "__code__"):
        function = type(function).__call__
    function, owner = inspect.unwrap(function), getattr(function, "__self__", None)
    with suppress(ValueError):  # a cell that is not filled yet
        given += [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    codes = [getattr(each, "__code__", type(each)) for each in given if callable(each)]
    constants = [each for each in given if isinstance(each, bool | int | float | str)]
    kind = owner if isinstance(owner, type) else type(owner)
    return getattr(function, "__code__", itself), kind, *codes, *constants, *keys


def _refuse_kept(_: Tensor) -> None:
    """Raise from a backward through what a function has kept of its arguments."""
    raise RuntimeError(
        "objective: expected no loss of a tensor that a call of the function had kept, got its backward, which would "
        "add nothing to hidden and weight; return it as part of the objective, or keep its detach()"
    )


def check_takes(function: Callable[..., Any], names: Iterable[str], has_labels: bool) -> None:
    """Raise TypeError if a function cannot be called with log-probabilities of labels and keywords of these names."""
    first = ["log_probs"] if has_labels else []
    try:
        inspect.signature(function, follow_wrapped=False).bind(*first, **dict.fromkeys(names))
    except TypeError as error:
        called = ", ".join((*first, *(f"{name}=..." for name in names)))
        raise TypeError(f"objective: must take ({called}), and it does not: {error}") from error
    except ValueError:  # it has no signature that can be read
        return


def rows_of(
    objective: Objective, is_valid: Tensor, order: TokenOrder | None, hidden: Tensor, dtype: torch.dtype
) -> RowObjective:
    """Return a checked objective as the chunks need it; its losses are of ``dtype``."""
    if objective.num_items is None:
        divisor = is_valid.sum().reshape(1) if objective.reduction == "mean" else is_valid.new_ones(1)
    else:
        divisor = checked_divisor(objective.num_items, "sum", hidden)
    n_axes = hidden.dim() - 1  # of the tokens
    tokens = {name: flat(t.detach(), t.dim() - n_axes + 1) for name, t in objective.tokens.items()}
    if order is not None:
        tokens = {name: order.to_rows(numbers, 0) for name, numbers in tokens.items()}
        is_valid = order.to_rows(is_valid, False)
    factor = inverse(divisor.to(dtype))
    given = objective.num_items is not None
    if given:
        is_valid = is_valid & (divisor != 0)
    losses = is_valid.new_zeros(is_valid.shape, dtype=dtype)
    captures = hidden.is_cuda and torch.cuda.is_current_stream_capturing()  # a CUDA graph: nothing may wait
    key = key_of(objective.function) if objective.is_checked and not captures else None
    errors: list[Exception] | None = [] if verify.pending.get() is not None else None
    return RowObjective(objective.function, tokens, is_valid, factor, losses, given, key, errors, objective.of_loss)


def inverse(divisor: Tensor) -> Tensor:
    """Return ``1 / divisor``, 0 for a divisor of 0."""
    return torch.where(divisor == 0, 0.0, 1 / divisor)


def _differentiable(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return those of named outputs that have a gradient."""
    return {name: output for name, output in named.items() if name in ("log_probs", *GradOutputs._fields)}


def _along_rows(numbers: Tensor, like: Tensor) -> Tensor:
    """Return ``numbers [n]`` as factors of ``like [n]`` or ``[n, k]``."""
    return numbers.unsqueeze(-1) if like.dim() > 1 else numbers


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal except for rounding, which is relative to the largest number too."""
    largest = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, 1e-4, 1e-6 * largest + torch.finfo(a.dtype).tiny, equal_nan=True)


def _check_no_other_leaf(values: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Raise if a tensor besides ``leaves`` would get a gradient from ``values``, which nobody asks for."""
    nodes: list[Any] = [values.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)  # of a leaf
        if variable is not None and not any(variable is leaf for leaf in leaves):
            raise ValueError(
                f"objective: expected no tensor that requires a gradient but its arguments, got one of shape "
                f"{tuple(variable.shape)}, whose gradient would be lost; pass its detach()"
            )
        following = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= following
        nodes += following
