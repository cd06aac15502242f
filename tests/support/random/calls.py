"""A random call of a public function, compared with fp64.

A seed decides everything: the configuration of ``random.tables``, of which there is a bounded number, and the rest, of
``random.inputs``. ``tests/test_random_calls.py`` makes the calls, and says how to make more of them, or one again.
"""

from __future__ import annotations

import math
import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.support.kernels.launch_shapes import BY_SIZE, ONE, SEVERAL, programs
from tests.support.random import heads, logits
from tests.support.random.call import UNITS, Call, alike, assert_near
from tests.support.random.public import Returned
from tests.support.random.tables import changes_of, configurations
from tests.support.random.truth import Numbers, Truth, finite, transformed
from tests.support.ranks.in_turn import in_turn

Ready = heads.HeadCase | logits.LogitsCase
RANKS = (1, 2, 3)  # of heads; logits have a factor
# How many programs the rows of small and of wide calls have: of itself, a small row has one.
KINDS = {True: (ONE, SEVERAL), False: (BY_SIZE, ONE, SEVERAL)}


class Where(NamedTuple):
    """What runs the calls."""

    device: str
    impl: str
    small: bool  # so that Triton's interpreter can run them


def seeds(n: int) -> range:
    """The first n, or those that the environment asks for."""
    first = int(os.environ.get("VPCE_RANDOM_FIRST", "0"))
    return range(first, first + int(os.environ.get("VPCE_RANDOM_CASES", n)))


def name_of(seed: int) -> str:
    return configurations()[seed % len(configurations())][0]


def is_head(seed: int) -> bool:
    return "trains" in configurations()[seed % len(configurations())][1]


def kind_of(seed: int, small: bool) -> str:
    """Another one in each round of the configurations, and in later rounds each with each number of a head's ranks."""
    turn, index = divmod(seed, len(configurations()))
    kinds = KINDS[small]
    return kinds[(index + turn + turn // math.lcm(len(kinds), len(RANKS))) % len(kinds)]


def ready(call: Call) -> Ready:
    return heads.ready(call) if call.is_head else logits.ready(call)


def run_call(seed: int, where: Where, kind: str | None = None, changes: dict[str, Any] | None = None) -> None:
    """Make the call of a seed, and check all that it returns.

    ``kind`` of programs, if it is not the seed's; ``changes`` replace values of the configuration.
    """
    replaced = {**(changes_of(seed, RANKS) if is_head(seed) else {}), **(changes or {})}
    call = Call(seed, where.device, where.impl, where.small, replaced)
    with programs(kind or kind_of(seed, where.small)):
        check(call)


def check(call: Call) -> None:
    case = ready(call)
    made: list[tuple[Truth, Numbers, Tensor]] = []  # by the rank that comes first

    def on_rank(rank: int, group: Any) -> Returned:
        with case.autocast():
            returned = call.invoke(case.given[rank], group)
        if not made:
            made.append(gradients_of(call, case, returned))
        with torch.autograd.set_multithreading_enabled(False):  # backward may wait for the other ranks' threads
            case.backward(rank, returned, made[0][1])
        return returned

    returned, *others = in_turn(call.ranks, on_rank)
    truth, upstream, grad = made[0]
    for name, value in truth.outputs.items():
        assert_near(name, returned[name], value, truth.bounds[name])
        assert returned[name].dtype == torch.promote_types(call.dtype, torch.float32), f"{name}: {returned[name].dtype}"
    extra = returned.keys() - {"loss", "log_probs", "objective", "gradient"}
    assert extra == set(call.settings.get("outputs", ())), f"outputs: got {sorted(extra)}"
    if "predictions" in returned:
        check_predictions(call, case, returned["predictions"])
    for name in returned.keys() - {"gradient"}:
        assert all(alike(other[name], returned[name]) for other in others), f"{name}: differs between the ranks"
    case.check_gradients(grad, truth.of_gradient(upstream), upstream)


def gradients_of(call: Call, case: Ready, returned: Returned) -> tuple[Truth, Numbers, Tensor]:
    """The truth, the upstream gradients, and the gradient of the logits in fp64."""
    leaf = case.logits.detach().double().requires_grad_()
    truth, upstream = case.beside.compute(leaf, case.rounding), case.upstream
    if upstream is None:
        is_pair = call.function == "cross_entropy_forward"  # without autograd
        names = [name for name in truth.outputs if is_pair or returned[name].requires_grad]
        if call.draw["gradient"] == "in_forward":  # which knows the loss's gradient alone
            names = ["loss"]
        upstream = call.upstream(returned, names)
    outputs = [truth.outputs[name] for name in upstream]
    factors = [value.to(output) for value, output in zip(upstream.values(), outputs, strict=True)]
    (grad,) = torch.autograd.grad(outputs, leaf, factors)
    return truth, upstream, grad


def check_predictions(call: Call, case: Ready, ids: Tensor) -> None:
    """Predictions are those of logits that cannot be told from the largest."""
    options, rounding = call.of_oracle, case.rounding
    z, temperature = transformed(case.logits.double(), options), options.get("temperature", 1.0)
    z_max, is_exact = z.amax(-1), options.get("softcap") is None and options.get("logit_scale", 1.0) == 1
    known = z_max.isfinite() & (case.labels != options.get("ignore_index", -100))
    if isinstance(temperature, Tensor):
        known, is_exact = known & ((temperature > 0) & temperature.isfinite()), False
    is_exact = is_exact and temperature == 1 and not rounding.any()
    slack = (rounding + finite(z).abs().amax(-1)) * (0 if is_exact else UNITS * 2.0**-23)
    assert torch.equal(ids >= 0, known), "predictions: known in other rows"
    assert bool((ids < z.shape[-1]).all()), "predictions: outside the vocabulary"
    at = z.gather(-1, ids.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert bool((at >= z_max - slack)[known].all()), "predictions: not the largest"
    if is_exact:
        columns = torch.arange(z.shape[-1], device=z.device)
        first = torch.where(z == z_max.unsqueeze(-1), columns, z.shape[-1]).amin(-1)
        assert torch.equal(ids[known], first[known]), "predictions: not the first of equals"
