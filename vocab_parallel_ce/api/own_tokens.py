"""Heads whose ranks have tokens of their own: FSDP2's shard is a vocabulary shard, and hidden states are sent.

Each rank computes its rows for the tokens of all ranks, padded to the most that one has, with sequence parallelism:
``hidden`` gets the gradient of its rank's loss. What is per token is sent with the labels in one all_gather.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vocab_parallel_ce import checks, verify
from vocab_parallel_ce.collectives import gathered, group_position
from vocab_parallel_ce.dtensor import is_dtensor, local_rows
from vocab_parallel_ce.head.arguments import Arguments, autocast_dtype, check_gradient, mode_of, shard_of_dtensor
from vocab_parallel_ce.head.expected import check_expected
from vocab_parallel_ce.head.objective import check_objective, inverse
from vocab_parallel_ce.head.plan import LinearCall
from vocab_parallel_ce.layout import compute_dtype
from vocab_parallel_ce.losses.base import Loss
from vocab_parallel_ce.options import CHECKS, Settings
from vocab_parallel_ce.plan import checked_divisor, comparable, has_weights
from vocab_parallel_ce.spec import TokenOutputs
from vocab_parallel_ce.targets import ROLES, Head, Tokens, check, fill_of, present

SHARE = "own_share"  # of an objective, the name of what each token's number is multiplied by


class OwnTokens(NamedTuple):
    """Which of all ranks' tokens are this rank's: the first ``n`` of part ``rank``; a part has ``most``."""

    group: Any
    rank: int
    n_ranks: int
    n: int
    most: int

    def part(self, of_all: Tensor) -> Tensor:
        """Return ``[n, ...]`` of this rank's tokens from ``[R * most, ...]`` of all."""
        return of_all.narrow(0, self.rank * self.most, self.n)

    def of_all(self, parts: Sequence[Tensor], fills: Sequence[Any]) -> list[Tensor]:
        """Return ``[R * most, ...]`` of all ranks of each ``[n, ...]``; ``fills`` stand where a rank has no token.

        Collectives: one all_gather of the bytes of ``most`` tokens.
        """
        if not parts:
            return []
        padded = [
            torch.cat([t, t.new_full((self.most - self.n, *t.shape[1:]), fill)])
            for t, fill in zip(parts, fills, strict=True)
        ]
        rows = [t.reshape(self.most, -1).view(torch.uint8) for t in padded]
        every = gathered(torch.cat(rows, dim=1), self.rank, self.n_ranks, self.group).flatten(0, 1)
        split = every.split([row.shape[1] for row in rows], dim=1)
        split = [s.clone(memory_format=torch.contiguous_format) for s in split]  # copies, as dtypes need their boundary
        return [s.view(t.dtype).view(-1, *t.shape[1:]) for s, t in zip(split, padded, strict=True)]


class _Part(torch.autograd.Function):
    """Outputs of all ranks' tokens -> those of this rank's. Backward gathers their gradients, which all ranks have."""

    @staticmethod
    def forward(ctx: Any, own: OwnTokens, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.own = own
        ctx.set_materialize_grads(False)
        parts = tuple([own.part(output).clone() for output in outputs])
        ctx.mark_non_differentiable(*[p for p, output in zip(parts, outputs, strict=True) if not output.requires_grad])
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = iter(ctx.own.of_all(present := [grad for grad in grads if grad is not None], [0.0] * len(present)))
        return None, *[None if grad is None else next(found) for grad in grads]


class _OwnSum(torch.autograd.Function):
    """This rank's ``value`` of a sum over all tokens, whose gradient is there once: NaN if ranks differ in theirs."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, value: Tensor, own: OwnTokens) -> Tensor:
        ctx.own = own
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        every = gathered(grad.reshape(1), ctx.own.rank, ctx.own.n_ranks, ctx.own.group)
        return torch.where((every == every[0]).all(), grad, torch.nan), None, None


def losses(loss: Loss, arguments: Arguments, settings: Settings, run: Callable[..., TokenOutputs]) -> TokenOutputs:
    """Compute the outputs of this rank's tokens by ``run``, which computes those of all."""
    tokens, shares = _checked(loss, arguments, settings), None
    if settings.reduction != "none":
        shares, settings, expected = _shares(loss, arguments, tokens, settings)
        arguments = arguments._replace(num_items=None, expected_grad_output=expected)
    own, arguments, settings = _of_all(arguments, settings)
    found = run(loss, arguments, settings)
    values = iter(_Part.apply(own, *[each for each in found if each is not None]))
    parts = TokenOutputs._make([each if each is None else next(values).unflatten(0, tokens.shape) for each in found])
    return parts if shares is None else parts._replace(loss=(parts.loss.flatten() * shares).sum())


def objective_of(
    loss: Loss, arguments: Arguments, settings: Settings, run: Callable[..., tuple[Tensor, TokenOutputs, LinearCall]]
) -> tuple[Tensor, TokenOutputs]:
    """Compute an objective of this rank's tokens, and the outputs, by ``run``, which computes those of all.

    Each token's number is multiplied by its share of its rank's loss over the largest share of all, by which forward
    scales fp16; ``num_items`` is the inverse of that.
    """
    tokens, objective = _checked(loss, arguments, settings), arguments.objective
    assert objective is not None
    of_loss = settings._replace(reduction=objective.reduction)
    shares, *_ = _shares(loss, arguments._replace(num_items=objective.num_items), tokens, of_loss)
    own, arguments, settings = _of_all(arguments, settings, shares)
    total, found, linear = run(loss, arguments, settings)
    assert linear.objective is not None
    of_rows = linear.objective.losses * linear.objective.factor
    of_tokens = of_rows if linear.order is None else linear.order.to_tokens(of_rows, 0, [-1])
    parts = [each if each is None else own.part(each).unflatten(0, tokens.shape) for each in found]
    return _OwnSum.apply(total, own.part(of_tokens).sum(), own), TokenOutputs._make(parts)


def _shared(function: Callable[..., Tensor], *args: Tensor, own_share: Tensor, **named: Tensor) -> Tensor:
    """Return an objective's numbers times the shares of their tokens; what is not one per token is refused later.

    Without a share it is 0, and so are its derivatives, whatever the function makes of padding.
    """
    is_out = own_share == 0

    def masked(each: Tensor) -> Tensor:
        is_left = is_out.unsqueeze(-1) if each.dim() > 1 else is_out
        return torch.where(is_left, each.detach(), each) if each.requires_grad else each

    values = function(*map(masked, args), **{name: masked(each) for name, each in named.items()})
    fits = isinstance(values, Tensor) and values.shape == own_share.shape
    return torch.where(is_out, 0.0, values * own_share) if fits else values


def _checked(loss: Loss, arguments: Arguments, settings: Settings) -> Tokens:
    """Check this rank's arguments, and return its tokens. Under verification all ranks compare theirs."""
    (hidden, weight, bias), group, options = arguments.head, arguments.group, settings.head
    checks.check_hidden(hidden)
    checks.check_no_transforms(*arguments.head, *arguments.targets)
    if group is None:
        raise ValueError("own_tokens: expected the group that shares the vocabulary, got group=None; pass group=")
    for name, parameter in {"weight": weight, "bias": weight if bias is None else bias}.items():
        if not is_dtensor(parameter):
            raise TypeError(
                f"{name}: expected a DTensor with own_tokens, got {type(parameter).__name__}; wrap the head alone in "
                "fully_shard, and call this where FSDP has not gathered it"
            )
    if arguments.main_grad is not None:
        raise ValueError("main_grad: expected None with own_tokens, got a tensor; a DTensor has a gradient")
    if has_weights(arguments.targets) and settings.reduction == "mean":
        raise ValueError("class_weight: expected None for a mean with own_tokens, got a tensor; pass num_items")
    tokens = Tokens(hidden, "hidden", tuple(hidden.shape[:-1]))
    check(arguments.targets, tokens)
    loss.check(arguments.targets, tokens, settings)
    CHECKS["reduction"]("reduction", settings.reduction)
    check_gradient(settings, knows_grad_output=arguments.knows_grad_output)
    if arguments.expected_grad_output is not None:
        check_expected(arguments.expected_grad_output, tokens, settings)
    if arguments.objective is not None:
        check_objective(arguments.objective, tokens, settings)
    if options.max_tokens is not None and math.prod(tokens.shape) > options.max_tokens:
        got = f"{math.prod(tokens.shape)}, got {options.max_tokens}"
        raise ValueError(f"max_tokens: must be at least the number of this rank's tokens, {got}")
    call = verify.pending.get()
    if call is not None:
        facts = comparable(settings, None) | {"hidden.dtype": hidden.dtype, "hidden.shape[-1]": hidden.shape[-1]}
        facts |= {name: "a tensor" for name, *_ in present(arguments.targets)}
        if arguments.objective is not None:
            facts |= {f"tokens[{name!r}].dtype": each.dtype for name, each in arguments.objective.tokens.items()}
        verify.compare({"equal": facts | {"bias": "None" if bias is None else "a tensor"}})
        verify.pending.set(call)  # the call of all tokens is compared too
    return tokens


def _shares(
    loss: Loss, arguments: Arguments, tokens: Tokens, settings: Settings
) -> tuple[Tensor, Settings, Tensor | None]:
    """Return ``[n]`` what each token's loss is multiplied by, the settings of unreduced ones, and what is expected."""
    hidden = tokens.tensor
    ignored = loss.ignored(arguments.targets, settings)
    is_valid = hidden.new_ones(tokens.shape, dtype=torch.bool) if ignored is None else ~ignored
    divisor = is_valid.sum() if settings.reduction == "mean" else is_valid.new_ones(())
    if arguments.num_items is not None:
        divisor = checked_divisor(arguments.num_items, "sum", hidden)
    shares = (is_valid * inverse(divisor.float())).flatten()
    if settings.gradient == "auto" and settings.asks_for_differentiable:
        gradient = "in_backward"
    else:
        gradient, _ = mode_of(arguments, settings, autocast_dtype(hidden) or hidden.dtype)
    expected = shares.view(tokens.shape) if gradient == "in_forward" else None
    return shares, settings._replace(reduction="none", gradient=gradient), expected


def _of_all(
    arguments: Arguments, settings: Settings, shares: Tensor | None = None
) -> tuple[OwnTokens, Arguments, Settings]:
    """Return the arguments of all ranks' tokens and this rank's rows, and their settings.

    Collectives: an all_gather of the number of tokens, for which the host waits, unless ``max_tokens`` says it; and one
    of what is per token.
    """
    (hidden, *parameters), group, options = arguments.head, arguments.group, settings.head
    (rank, n_ranks), n, most = group_position(group), hidden[..., 0].numel(), options.max_tokens
    shard = shard_of_dtensor(arguments.head, settings, rank, n_ranks)
    named = zip(("weight", "bias"), parameters, strict=True)
    rows: Any = [_rows(*each, hidden, group, averages=options.average) for each in named]
    if most is None:
        most = int(gathered(torch.tensor([n], device=hidden.device), rank, n_ranks, group).max())
    own = OwnTokens(group, rank, n_ranks, n, max(1, most))
    sent, n_axes = _per_token(arguments, settings, shares), hidden.dim() - 1
    parts = [part.detach().reshape(n, *part.shape[n_axes:]) for part, _ in sent.values()]
    found = dict(zip(sent, own.of_all(parts, [fill for _, fill in sent.values()]), strict=True))
    arguments = arguments._replace(
        head=Head(F.pad(hidden.flatten(0, -2), (0, 0, 0, own.most - n)), *rows),
        targets=arguments.targets._replace(**{name: each for (of, name), each in found.items() if of == "targets"}),
        expected_grad_output=found.get(("expected", "")),
    )
    if arguments.objective is not None:
        numbers = {name: each for (of, name), each in found.items() if of == "objective"}
        largest = numbers[SHARE].amax()
        numbers[SHARE] = numbers[SHARE] * inverse(largest)
        function = functools.partial(_shared, arguments.objective.function)
        changes: Any = {"function": function, "tokens": numbers, "reduction": "sum", "num_items": inverse(largest)}
        arguments = arguments._replace(objective=arguments.objective._replace(**changes))
    changed = dataclasses.replace(options, own_tokens=False, average=True, max_tokens=None, sequence_parallel=True)
    return own, arguments, settings._replace(vocab_size=shard, head=changed)


def _per_token(
    arguments: Arguments, settings: Settings, shares: Tensor | None
) -> dict[tuple[str, str], tuple[Tensor, Any]]:
    """Return what there is of each token, ``[..., any]``, with what stands where there is none."""
    targets, expected, shape = arguments.targets, arguments.expected_grad_output, arguments.head.hidden.shape[:-1]
    sent: dict[tuple[str, str], tuple[Tensor, Any]] = {}
    for field, _, role, _ in ROLES[type(targets)]:
        target = getattr(targets, field)
        if target is not None and role.axes[0] in ("rows", "tokens"):
            is_one_of_all = role.kind == "numbers" and target.numel() == 1
            target = target.reshape(()).expand(shape) if is_one_of_all else target
            dtypes = {"ids": torch.int64, "numbers": compute_dtype(arguments.head.hidden.dtype)}  # of any rank
            target = target.to(dtypes.get(role.kind, target.dtype))
            sent["targets", field] = target, 0 if role.kind == "head" else fill_of(role, settings)
    if expected is not None:
        sent["expected", ""] = expected, 0
    if arguments.objective is not None and shares is not None:
        numbers = {**arguments.objective.tokens, SHARE: shares.view(shape)}
        sent |= {("objective", name): (each, 0) for name, each in numbers.items()}
    return sent


def _rows(name: str, parameter: Any, hidden: Tensor, group: Any, *, averages: bool) -> Tensor | None:
    """Return this rank's rows in the dtype of ``hidden``; backward averages their gradient over the ranks."""
    if parameter is None:
        return None
    rows = local_rows(name, parameter, group)
    if averages and rows.requires_grad:
        n_ranks = parameter.device_mesh.size()  # of replicas too
        rows.register_hook(lambda grad: grad / n_ranks)
    return rows if autocast_dtype(hidden) else rows.to(hidden.dtype)
