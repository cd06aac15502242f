"""Random programs around a loss, drawn from a seed: what reads its inputs, what wraps it, how backward runs.

A case is plain data, the same on every rank. ``ranks/test_random_programs.py`` says which cases are left out.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

WIDTH = 12
IN_PLACE = ("in_forward", "in_backward", True)  # modes asked for by name


class Use(NamedTuple):
    """One call of a loss."""

    function: str
    gradient: str | bool | None  # gradient=, or overwrite_input= of TransformerEngine's signature
    options: dict[str, Any]
    view: str  # of VIEWS: what of the shared tensor it reads
    labels: int  # seed
    ignored: float  # share of rows
    grad_output: str  # of GRAD_OUTPUTS


class Case(NamedTuple):
    """A program; ``shared`` are the logits of a rank, or the hidden states of a linear loss."""

    name: str
    family: str  # "logits" or "linear"
    ranks: int
    dtype: torch.dtype
    leading: tuple[int, ...]
    columns: int  # per rank
    source: str  # of SOURCES: how ``shared`` is computed from leaves
    losses: tuple[Use, ...]
    head: str = "leaf"  # of a linear loss: "leaf", "rows" of one, "scaled", "frozen" or a "module"
    before: str = ""  # of REGULARISERS, over ``shared`` before the losses
    after: str = ""  # and after them; over the head too
    evaluates: str = ""  # without a gradient, "before" the losses or "after" backward
    reads: str = ""  # ``shared`` without a gradient, after the "loss" or after "backward"
    watch: str = ""  # of the first loss's input: "hook", "late hook" or "retain_grad"
    wrappers: tuple[str, ...] = ()  # of WRAPPERS, the outermost first
    around: str = "all"  # what they wrap: "all", every loss ("losses"), the "first", or "before"
    plan: str = "sum"  # of backward: "sum", "together", "separate", "grad" or "twice"
    steps: int = 1  # of gradient accumulation
    sgd: bool = False


def _within(context: Callable[..., Any], function: Callable[..., Any], *args: Tensor) -> Any:
    with context():
        return function(*args)


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _compiled(function: Callable[..., Any], *args: Tensor) -> Any:
    torch.compiler.reset()
    return torch.compile(lambda *args: function(*args), backend="aot_eager")(*args)


WRAPPERS: dict[str, Callable[..., Any]] = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "save_on_cpu": partial(_within, save_on_cpu),
    "identity": partial(_within, partial(saved_tensors_hooks, _unchanged, _unchanged)),
    "copies": partial(_within, partial(saved_tensors_hooks, lambda t: t.detach().clone(), _unchanged)),
    "compiled": _compiled,  # slow, and never drawn
}


def wrapped(names: Sequence[str], function: Callable[..., Any], *args: Tensor) -> Any:
    for name in reversed(names):
        function = partial(WRAPPERS[name], function)
    return function(*args)


# What a source makes of the first leaf, or of the product of two.
SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "leaf": lambda p: p,
    "scaled": lambda p: p * 1.5,
    "product": lambda x: x,
    "written": lambda x: x.mul_(0.8),
    "float": lambda x: x.float() if x.dtype == torch.bfloat16 else x * 1,
    "sigmoid": lambda x: x.sigmoid(),
    "softmax": lambda x: x.softmax(-1),
}
OF_ONE_LEAF = ("leaf", "scaled")
SAVES_ITS_OUTPUT = ("sigmoid", "softmax")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "flat": lambda x: x.view(-1, x.shape[-1]),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "later rows": lambda x: x[1:],
    "earlier rows": lambda x: x[..., :-1, :],
    "first chunk": lambda x: x.chunk(2)[0],
    "second chunk": lambda x: x.chunk(2)[1],
    "transpose": lambda x: x.unsqueeze(0).transpose(0, 1) if x.dim() == 2 else x.transpose(0, 1),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "every other": lambda x: x[::2],
    "columns": lambda x: x[..., 1:-2],
    "strided columns": lambda x: x[..., ::2],
}
OF_COLUMNS = ("columns", "strided columns")

REGULARISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "lse": lambda x: 0.1 * x.logsumexp(-1).pow(2).mean(),
    "square": lambda x: 0.1 * x.pow(2).mean(),
    "softmax": lambda x: x.softmax(-1).pow(2).sum(),
}

GRAD_OUTPUTS = ("one", "factor", "random", "expanded")  # random calls have every layout


def hooked(case: Case, index: int) -> bool:
    """Whether hooks are active when the graph of this loss is made: not in a reentrant checkpoint's."""
    if case.around == "before" or (case.around == "first" and index > 0):
        return False
    innermost_first = case.wrappers[::-1]
    outside = innermost_first.index("reentrant") if "reentrant" in innermost_first else None
    return bool(innermost_first[:outside])


def mode(case: Case, index: int) -> str:
    """The way of this loss over logits; "auto" is out of place for all that anybody can see."""
    use = case.losses[index]
    named = {False: "out_of_place", True: "in_backward", "auto": "out_of_place"}.get(use.gradient, use.gradient)  # type: ignore
    if named is not None:
        return str(named)
    may_overwrite = case.source != "leaf" and not hooked(case, index) and not use.view
    in_forward = may_overwrite and use.options["reduction"] == "mean"
    return "in_forward" if in_forward else "out_of_place"


def must_run(case: Case) -> bool:
    """Whether no error is right."""
    indices = range(len(case.losses))
    if case.family == "logits":
        return all(mode(case, index) == "out_of_place" for index in indices)
    return case.plan != "twice" or not any(_hands_on(case, index) for index in indices)


def relies_on_versions(case: Case) -> bool:
    """Whether logits may be overwritten that others have saved: only a raised version tells autograd."""
    others = len(case.losses) > 1 or case.before or case.source in SAVES_ITS_OUTPUT
    return case.family == "logits" and bool(others) and not must_run(case)


def _hands_on(case: Case, index: int) -> bool:
    """Whether a linear loss hands its gradients on, and no checkpoint computes them again."""
    use = case.losses[index]
    is_wrapped = case.around in ("all", "losses") or (case.around == "first" and index == 0)
    runs_again = is_wrapped and "reentrant" in case.wrappers
    return use.gradient != "in_backward" and use.options["reduction"] != "none" and not runs_again


def left_out(case: Case) -> bool:
    """Whether README says of this case that it may be wrong without an error."""
    if case.plan == "grad" and "reentrant" in case.wrappers:
        return True  # PyTorch refuses it
    if case.family == "linear":
        return case.source == "float"  # a head has the dtype of the hidden states
    modes = [mode(case, index) for index in range(len(case.losses))]
    by_name = any(use.gradient in IN_PLACE for use in case.losses)
    others = len(modes) > 1 or case.before or case.after or case.source in SAVES_ITS_OUTPUT
    if by_name and others and set(case.wrappers) - {"reentrant"}:
        return True
    if "in_forward" in modes and (case.after or case.reads == "loss"):
        return True
    is_safe = set(modes) == {"out_of_place"}
    if case.reads == "backward" and not is_safe:
        return True
    if case.around in ("first", "before") and {"identity", "save_on_cpu"} & set(case.wrappers) and not is_safe:
        return True
    return case.sgd and case.source == "leaf" and by_name


def draw(family: str, ranks: int, index: int) -> Case:
    """Case ``index``; the same on every machine."""
    name = f"{family}-{ranks}-{index}"
    rng = random.Random(name)
    while True:
        case = _drawn(rng, name, family, ranks)
        if not left_out(case):
            return case


def _drawn(rng: random.Random, name: str, family: str, ranks: int) -> Case:
    leading = rng.choice([(7,), (8,), (2, 4), (3, 4), (4, 2)])
    dtype = rng.choice([torch.float32] * 4 + [torch.bfloat16])
    case = Case(name, family, ranks, dtype, leading, rng.choice([9, 16, 21]), "product", ())
    case = case._replace(losses=(_use(rng, family),), plan=rng.choice(["sum", "together", "grad", "separate"]))
    features = list(_FEATURES)
    if family == "linear":
        features += ["head", "kept graph", "kept graph"]  # beside that, hooks endanger no linear loss
    else:
        features.remove("head")
    for feature in rng.sample(features, rng.choice([1, 2, 2, 3])):
        case = _FEATURES[feature](rng, case)
    return case


def _wrappers(rng: random.Random, case: Case) -> Case:
    names = rng.choices(list(WRAPPERS), weights=[3, 2, 2, 2, 2, 0], k=rng.choice([1, 1, 2]))
    return case._replace(wrappers=tuple(names), around=rng.choice(["all", "all", "all", "losses"]))


def _wrapped_in_part(rng: random.Random, case: Case) -> Case:
    around = rng.choice(["first", "before"])
    name = rng.choice(["copies", "reentrant", "checkpoint"])
    case = _FEATURES["before" if around == "before" else "second loss"](rng, case)
    return case._replace(wrappers=(name,), around=around)


def _second_loss(rng: random.Random, case: Case) -> Case:
    first = case.losses[0]
    second = rng.choice([first._replace(labels=first.labels + 1), _use(rng, case.family)])
    second = second._replace(view=rng.choice([first.view, rng.choice(_views(case.family))]))
    return case._replace(losses=(first, second))


def _view(rng: random.Random, case: Case) -> Case:
    views = _views(case.family)
    return case._replace(losses=tuple(use._replace(view=rng.choice(views)) for use in case.losses))


_FEATURES: dict[str, Callable[[random.Random, Case], Case]] = {
    "wrappers": _wrappers,
    "other wrappers": _wrappers,
    "wrapped in part": _wrapped_in_part,
    # Hooks and the loss alone: there a mode asked for by name must refuse the second backward itself.
    "kept graph": lambda rng, case: _wrappers(rng, case)._replace(plan="twice"),
    # The loss in a wrapper, and again outside over what it may have overwritten there.
    "called again": lambda rng, case: _wrappers(rng, case)._replace(around="losses", evaluates="after"),
    "second loss": _second_loss,
    "before": lambda rng, case: case._replace(before=rng.choice(list(REGULARISERS))),
    "after": lambda rng, case: case._replace(after=rng.choice(list(REGULARISERS))),
    "source": lambda rng, case: case._replace(source=rng.choice(list(SOURCES))),
    "leaf": lambda rng, case: case._replace(source="leaf", sgd=rng.random() < 0.5),
    "view": _view,
    "watch": lambda rng, case: case._replace(watch=rng.choice(["hook", "late hook", "retain_grad"])),
    "plan": lambda rng, case: case._replace(plan=rng.choice(["separate", "twice"])),
    "evaluates": lambda rng, case: case._replace(evaluates=rng.choice(["before", "after"])),
    "reads": lambda rng, case: case._replace(reads=rng.choice(["loss", "backward"])),
    "steps": lambda rng, case: case._replace(steps=2, sgd=rng.random() < 0.5),
    "head": lambda rng, case: case._replace(head=rng.choice(["rows", "scaled", "frozen", "module"])),
}


def _views(family: str) -> list[str]:
    return [name for name in VIEWS if family == "logits" or name not in OF_COLUMNS]


def _use(rng: random.Random, family: str) -> Use:
    function = rng.choice(["loss", "loss", "log_probs", "module"] + ["te", "te"] * (family == "logits"))
    options: dict[str, Any] = {}
    if function == "te":
        gradient = rng.choice([None, None, True, False])
    elif family == "linear":
        gradient = rng.choice(["auto", "auto", "in_forward", "in_backward"])
    else:
        gradient = rng.choice(["auto"] * 5 + ["in_forward", "in_backward", "out_of_place"])
    options["reduction"] = rng.choice(["mean", "none"] + ["sum"] * (function != "te"))
    if function == "log_probs":
        options["reduction"] = "none"
        options.update(_some(rng, temperature=0.7, outputs=("entropy",), softcap=8.0, logit_scale=0.6))
        gradient = "auto" if gradient == "in_forward" else gradient
    elif function == "te":
        options.update(_some(rng, label_smoothing=0.1))
    else:
        options.update(_some(rng, label_smoothing=0.1, z_loss=0.02, softcap=8.0, logit_scale=0.6))
        options.update(_some(rng, outputs=("lse",)) if gradient != "in_forward" else {})  # which has no other gradient
        if options["reduction"] == "sum":
            options.update(_some(rng, num_items=rng.choice([5, torch.tensor(5), 0])))
    if family == "linear":
        options["chunk_tokens"] = rng.choice(["auto", 1, 3, 4])
        if options["reduction"] == "none" and gradient == "in_forward":
            gradient = "in_backward"
        if function == "log_probs":
            gradient = "in_backward"
    if rng.random() < 0.2:
        options["ignore_index"] = 3
    ignored = rng.choice([0.0, 0.0, 0.3, 0.3, 1.0])
    return Use(function, gradient, options, "", rng.randrange(10**6), ignored, rng.choice(GRAD_OUTPUTS))


def _some(rng: random.Random, **options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if rng.random() < 0.25}
