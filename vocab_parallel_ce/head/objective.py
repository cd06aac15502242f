"""An objective of each token inside a head: a function of its log-probability, and of numbers known beforehand.

The loop over chunks calls it with the outputs of some rows, before their gradient: its derivatives by the outputs are
the grad_outputs of the rows. So a head has three products for any objective, as for a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.head.chunks import TokenOrder
from vocab_parallel_ce.head.functions import check_takes, key_of
from vocab_parallel_ce.head.groups import RowGroups, check_groups, check_numbers
from vocab_parallel_ce.layout import flat
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.plan import checked_divisor, saved_as_it_is
from vocab_parallel_ce.spec import GradOutputs, TokenOutputs
from vocab_parallel_ce.targets import Tokens

MIXES = (
    "objective: expected each token's number to depend on its own numbers, got another when others were left out "
    "or changed: it mixes tokens, or changes with each call; of sequences or pairs pass together, of a batch take two "
    "steps (docs/objective.md)"
)
MIXES_GROUPS = (
    "objective: expected each group's number to depend on its own tokens and numbers, got another when other groups "
    "were left out or changed: it mixes groups, or changes with each call (docs/objective.md)"
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
    together: Tensor | None = None  # [...] ids of groups; then the function gets them whole, and returns [k]
    numbers: Mapping[str, Tensor] = {}  # [G, ...] each: of groups


def check_objective(objective: Objective, tokens: Tokens, settings: Settings) -> Tensor | None:
    """Raise unless the objective can be called with the tokens' numbers. Return ``[N]`` ids of its groups, if any."""
    function: Any = objective.function  # of any type, as are the tokens
    if not callable(function):
        got = type(function).__name__
        raise TypeError(f"objective: expected a function of log_probs and others, got {got}; pass one")
    by_name, taken = objective.tokens, ("log_probs", "divergence", *settings.outputs)
    taken = taken if objective.together is None else (*taken, "groups")
    check_numbers("tokens", by_name, taken, "advantage", tokens)
    if objective.together is not None:
        check_groups(objective.together, objective.numbers, (*taken, *by_name), tokens, settings)
    elif objective.numbers:
        raise ValueError("numbers: expected none without together, got some; pass each token's group, or tokens")
    for name, numbers in by_name.items():
        if tokens.shape not in (numbers.shape, numbers.shape[:-1]):
            expected, remedy = f"that of the tokens, {tuple(tokens.shape)}", "pass those of all ranks' tokens"
            raise ValueError(f"tokens[{name!r}]: shape must be {expected}, got {tuple(numbers.shape)}; {remedy}")
    checks.check_no_transforms(*by_name.values(), objective.num_items)
    checks.check_choice("reduction", objective.reduction, ("mean", "sum"))
    checks.check_bool("check_objective", objective.is_checked)
    return None if objective.together is None else flat(objective.together)


class RowObjective(NamedTuple):
    """An objective and its numbers in the order of a head's rows. It has ``K`` numbers: of rows, or of groups."""

    function: Callable[..., Tensor]
    tokens: dict[str, Tensor]  # [M] each, or [M, m]
    is_valid: Tensor  # [K] bool: those that are not ignored
    factor: Tensor  # [1]: 1 / divisor, 0 for a divisor of 0
    losses: Tensor  # [K]: filled by `fill` and `fill_and_differentiate`; 0 for ignored ones
    may_be_of_none: bool  # whether ``num_items`` may be 0
    key: Any  # of a function to check; None: it is not
    errors: list[Exception] | None  # under verification: raised later, since the other ranks go on
    of_loss: str
    groups: RowGroups | None

    def _within(self, rows: slice) -> slice:
        return rows if self.groups is None else self.groups.within(rows)

    def fill(self, rows: slice, outputs: TokenOutputs) -> None:
        """Fill the losses of ``rows`` from their outputs."""
        try:
            self.losses[self._within(rows)] = self._values(rows, self._named(outputs))
        except Exception as error:
            self._defer(error)

    def fill_and_differentiate(self, rows: slice, outputs: TokenOutputs, scale: Tensor | None) -> GradOutputs:
        """Do the same, and return the derivatives of :meth:`total` by the outputs, times ``scale [1]``."""
        own = self._within(rows)
        factor = (self.factor if scale is None else self.factor * scale).expand(own.stop - own.start)
        try:
            values, grads = self._differentiated(rows, outputs, factor)
            if self.key is not None and self.key not in _checked:
                self._check(rows, outputs)
            self.losses[own] = values
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
        """Return the numbers of some rows, and the derivatives of the sum of each times its factor."""
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
        if self.groups is not None and not self.groups.ends:
            return named[self.of_loss].flatten()[:0]  # of no group there is nothing to call it with
        # Copies: the function may write to its arguments.
        others = {name: output.clone() for name, output in named.items()}
        others |= {name: numbers[rows].clone() for name, numbers in self.tokens.items()}
        if self.groups is not None:
            others |= self.groups.arguments(rows)
        first, is_valid = [others.pop("log_probs")] if "log_probs" in others else [], self.is_valid[self._within(rows)]
        try:
            values = self.function(*first, **others)
        except TypeError:
            check_takes(self.function, others, bool(first))
            raise
        of = "token" if self.groups is None else "group"
        if not isinstance(values, Tensor) or not values.is_floating_point():
            got = getattr(values, "dtype", type(values).__name__)
            raise TypeError(f"objective: expected floating-point numbers in a tensor, got {got}; return one per {of}")
        if values.layout is not torch.strided:
            raise TypeError(f"objective: expected a dense tensor, got layout {values.layout}; return its to_dense()")
        if values.shape != is_valid.shape or values.device != is_valid.device:
            expected, got = (f"{tuple(each.shape)} on {each.device}" for each in (is_valid, values))
            raise ValueError(f"objective: expected a number of each {of}, {expected}, got {got}; return that shape")
        return torch.where(is_valid, values.to(self.losses.dtype), 0.0)

    def _named(self, outputs: TokenOutputs) -> dict[str, Tensor]:
        """Return the outputs that there are, by the names of their arguments."""
        names = (self.of_loss, *TokenOutputs._fields[1:])
        return {name: output.detach() for name, output in zip(names, outputs, strict=True) if output is not None}

    def _check(self, rows: slice, outputs: TokenOutputs) -> None:
        """Raise if the function mixes tokens or groups; remember it if there were enough to tell. Waits."""
        own, index, groups = self._within(rows), cast(Any, slice(None)), self.groups
        if groups is not None and own.stop - own.start < 2:
            return  # without a wait, since there may never be more
        is_valid = self.is_valid[own]
        n_valid = int(is_valid.sum())
        if n_valid == 0:
            return
        if groups is not None:
            groups = groups.at(rows)
        else:
            index = is_valid.nonzero().squeeze(1).repeat(2 if n_valid == 1 else 1)
        tokens = {name: numbers[rows][index] for name, numbers in self.tokens.items()}
        if n_valid == 1:  # and another, of other numbers
            tokens |= {name: torch.stack([t[0], 2 * t[1]]) for name, t in tokens.items() if t.is_floating_point()}
        alone = self._replace(tokens=tokens, is_valid=is_valid[index], groups=groups)
        some = TokenOutputs._make([None if each is None else each[index] for each in outputs])
        try:
            with torch.autograd.set_detect_anomaly(False):
                alone._check_each_alone(some)
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

        Each row stays at its place, so that even rounding is the same. For groups likewise.
        """
        rows, step = slice(0, len(outputs.loss)), outputs.loss.new_tensor(5.0).expand(len(outputs.loss))
        ones = outputs.loss.new_ones(len(self.is_valid))
        values, grads = self._differentiated(rows, outputs, ones)
        for first in range(2):
            own, own_rows, _ = self._every_second(first)
            is_far = torch.ones_like(step, dtype=torch.bool)
            is_far[own_rows] = False
            for factor, far_step in ((0.01, 0 * step), (4.0, step)):
                far = self._moved(outputs, is_far, factor, far_step)
                try:
                    others, of_others = self._differentiated(rows, far, ones)
                except torch.OutOfMemoryError:
                    raise
                except Exception:  # it may refuse such numbers
                    continue
                is_right = _are_close(values[own], others[own])
                same = all(_are_close(g[own_rows], of_others[name][own_rows]) for name, g in grads.items())
                if not (is_right and same):
                    raise ValueError(MIXES if self.groups is None else MIXES_GROUPS)

    def _every_second(self, first: int) -> tuple[slice, Any, RowObjective]:
        """Return every second number, which rows it is of, and the objective of these alone."""
        own = slice(first, None, 2)
        rows, groups = (own, None) if self.groups is None else self.groups.every_second(first)
        tokens = {name: numbers[rows] for name, numbers in self.tokens.items()}
        return own, rows, self._replace(tokens=tokens, is_valid=self.is_valid[own], groups=groups)

    def _check_each_alone(self, outputs: TokenOutputs) -> None:
        """Raise unless every second row, or group, has the same number and derivative alone, and so have the others."""
        mixes, ones = MIXES if self.groups is None else MIXES_GROUPS, outputs.loss.new_ones(len(self.is_valid))
        n_rows = len(outputs.loss)
        spread = torch.arange(n_rows, device=ones.device, dtype=ones.dtype) * 0.6180339887 % 1
        # As they are, a policy may be its own reference, or its teacher, which hides a mean of their difference.
        outputs = self._moved(outputs, spread >= 0, 1.0, 0.5 * spread)
        values, grads = self._differentiated(slice(0, n_rows), outputs, ones)
        # Of other weights no sum of two rows is a multiple of one. A power of two rounds nothing.
        weights = 2.0 ** (4 * spread[: len(ones)]).floor()
        for first in range(min(2, len(ones))):
            own, rows, of_half = self._every_second(first)
            half = TokenOutputs._make([None if each is None else each[rows] for each in outputs])
            half_rows, of_rows = slice(0, len(half.loss)), weights[own]
            of_rows = of_rows if of_half.groups is None else of_half.groups.groups.to_tokens(of_rows)
            try:
                alone, grads_alone = of_half._differentiated(half_rows, half, ones[own])
                _, weighted = of_half._differentiated(half_rows, half, weights[own])
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, IndexError, ValueError) as error:  # of the whole there was none
                raise ValueError(f"{mixes}. Numbers of all tokens must be in tokens=") from error
            is_right = _are_close(values[own], alone)
            is_right &= all(_are_close(grad[rows], grads_alone[name]) for name, grad in grads.items())
            is_right &= all(
                _are_close(grads_alone[name] * _along_rows(of_rows, grad), grad) for name, grad in weighted.items()
            )
            if not is_right:
                raise ValueError(mixes)


def _refuse_kept(_: Tensor) -> None:
    """Raise from a backward through what a function has kept of its arguments."""
    raise RuntimeError(
        "objective: expected no loss of a tensor that a call of the function had kept, got its backward, which would "
        "add nothing to hidden and weight; return it as part of the objective, or keep its detach()"
    )


def rows_of(
    objective: Objective,
    is_valid: Tensor,
    order: TokenOrder | None,
    groups: RowGroups | None,
    hidden: Tensor,
    dtype: torch.dtype,
) -> RowObjective:
    """Return a checked objective as the chunks need it; its losses are of ``dtype``."""
    if groups is not None:
        groups, is_valid = groups.having(objective.numbers), is_valid.new_ones(len(groups.ends))
    if objective.num_items is None:
        divisor = is_valid.sum().reshape(1) if objective.reduction == "mean" else is_valid.new_ones(1)
    else:
        divisor = checked_divisor(objective.num_items, "sum", hidden)
    n_axes = hidden.dim() - 1  # of the tokens
    tokens = {name: flat(t.detach(), t.dim() - n_axes + 1) for name, t in objective.tokens.items()}
    if order is not None:
        tokens = {name: order.to_rows(numbers, 0) for name, numbers in tokens.items()}
        is_valid = order.to_rows(is_valid, False) if groups is None else is_valid
    factor = inverse(divisor.to(dtype))
    given = objective.num_items is not None
    if given:
        is_valid = is_valid & (divisor != 0)
    losses = is_valid.new_zeros(is_valid.shape, dtype=dtype)
    captures = hidden.is_cuda and torch.cuda.is_current_stream_capturing()  # a CUDA graph: nothing may wait
    key = (groups is None, key_of(objective.function)) if objective.is_checked and not captures else None
    errors: list[Exception] | None = [] if verify.pending.get() is not None else None
    of_loss = objective.of_loss
    return RowObjective(objective.function, tokens, is_valid, factor, losses, given, key, errors, of_loss, groups)


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
