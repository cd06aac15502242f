"""Find the head, the logits and the loss in the source of a causal language model's ``forward``.

What is understood ::

    logits = self.lm_head(hidden_states)
    logits = logits / self.config.logits_scaling
    loss = None
    if labels is not None:
        loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)

is a call of the head, then casts, scales and a softcap of the logits, then the loss. Between them only plain names may
be bound. The logits may only be read into the output. Everything else raises :class:`NotUnderstood`.
"""

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

HIDDEN = "_hidden"  # the name that the argument of the head is given
_TANH = ("torch.tanh", "nn.functional.tanh", "torch.nn.functional.tanh", "F.tanh")
_CASTS = ("float", "to", "contiguous")  # the loss is taken in fp32, whatever the dtype


class NotUnderstood(Exception):
    """The message says why a forward is left as it is."""


class Loss(NamedTuple):
    """``if labels is not None: <name> = self.loss_function(<logits>, labels, <arguments>)``."""

    guard: ast.If
    name: str
    logits: str  # the local name of the logits
    arguments: list[ast.keyword]  # all except logits and labels


class Region(NamedTuple):
    """The statements of a forward's body from the head to the loss: ``body[first:last]``, the guard at ``last``."""

    first: int
    last: int
    loss: Loss
    head: str  # "self.lm_head"
    hidden: ast.expr  # the argument of the head, which `logits_statements` have as HIDDEN
    logits_statements: list[ast.stmt]
    other_statements: list[ast.stmt]
    scale: ast.expr | None
    softcap: ast.expr | None


class _Step(NamedTuple):
    kind: str  # "base", "cast", "*", "/", "tanh" or "softcap"
    operand: ast.expr


def find_region(function: ast.FunctionDef) -> Region:
    """Return what makes the logits and the loss in ``function``, or raise :class:`NotUnderstood`."""
    parameters = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
    if parameters[:1] != ["self"] or "labels" not in [*parameters, *(a.arg for a in function.args.kwonlyargs)]:
        raise NotUnderstood("no labels: forward has no parameters `self` and `labels`")
    loss = _find_loss(function)
    last = function.body.index(loss.guard)
    first = next((i for i in range(last) if _reads_or_binds(function.body[i], loss.logits)), last)
    if first == last:
        raise NotUnderstood(f"no head: `{loss.logits}` is not made before the loss")
    head, steps = _head_and_steps(function.body[first], loss.logits)
    hidden, head.args[0] = head.args[0], ast.Name(HIDDEN, ast.Load())
    made, others = [function.body[first]], list[ast.stmt]()
    for statement in function.body[first + 1 : last]:
        if _reads_or_binds(statement, loss.logits):
            steps += _steps_of(statement, loss.logits)
            made.append(statement)
        else:
            _check_other(statement, made)
            others.append(statement)
    scale, softcap = _scale_and_softcap(steps)
    region = Region(first, last, loss, ast.unparse(head.func), hidden, made, others, scale, softcap)
    _check_uses(function, region)
    return region


def _find_loss(function: ast.FunctionDef) -> Loss:
    calls = [node for node in ast.walk(function) if _method_of(node) == "loss_function"]
    if not calls:
        raise NotUnderstood(_why_no_loss(function))
    if len(calls) > 1:
        raise NotUnderstood("several losses: self.loss_function is called more than once")
    call = calls[0]
    assert isinstance(call, ast.Call)
    guard = next(statement for statement in function.body if call in ast.walk(statement))
    if not isinstance(guard, ast.If):
        raise NotUnderstood(f"no guard: expected `if labels is not None` above the loss, got {_quote(guard)}")
    statement = next((s for s in guard.body if isinstance(s, ast.Assign) and s.value is call), None)
    if statement is None:
        raise NotUnderstood(f"nested guards: the loss stands in a block below `if {ast.unparse(guard.test)}`")
    if not _is(guard.test, "labels is not None"):
        raise NotUnderstood(f"guard: expected `labels is not None` above the loss, got {_quote(guard.test)}")
    if guard.orelse:
        raise NotUnderstood(f"else: without labels it does more, {_quote(guard.orelse[0])}")
    name = _target(statement)
    if name is None:
        raise NotUnderstood(f"loss: expected one name for it, got {_quote(statement)}")
    logits, arguments = _loss_arguments(call)
    for other in guard.body:
        if other is not statement:
            what = "read or changed logits" if _reads_or_binds(other, logits) else "loss"
            raise NotUnderstood(f"{what}: alongside self.loss_function stands {_quote(other)}")
    return Loss(guard, name, logits, arguments)


def _why_no_loss(function: ast.FunctionDef) -> str:
    for node in ast.walk(function):
        if (
            isinstance(node, ast.ListComp)
            and isinstance(node.elt, ast.Call)
            and _same(node.elt.func, node.generators[0].target)
        ):
            return f"several heads: {_quote(node)}"
    calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    if any(ast.unparse(call.func).split(".")[-1] in ("CrossEntropyLoss", "cross_entropy") for call in calls):
        if any(isinstance(node, ast.Slice) and _is(node.upper, "-1") for node in ast.walk(function)):
            return "inline loss: a cross-entropy that shifts by itself; only self.loss_function is rewritten"
        return "aligned labels: a cross-entropy of labels that are not shifted"
    for call in calls:
        if _method_of(call) and any(_is(argument, "labels") for argument in call.args):
            return f"composite: head and loss are made in {_quote(call)}"
    return "no loss: self.loss_function is not called"


def _loss_arguments(call: ast.Call) -> tuple[str, list[ast.keyword]]:
    """Return the name of the logits, and the loss's arguments except logits and labels."""
    if len(call.args) > 3 or any(isinstance(argument, ast.Starred) for argument in call.args):
        raise NotUnderstood(f"loss: expected (logits, labels, vocab_size, **kwargs), got {_quote(call)}")
    positional = zip(("logits", "labels", "vocab_size"), call.args, strict=False)
    keywords = [*(ast.keyword(name, value) for name, value in positional), *call.keywords]
    values = {keyword.arg: keyword.value for keyword in keywords}
    logits = values.get("logits")
    if not isinstance(logits, ast.Name):
        raise NotUnderstood(f"read or changed logits: expected a name in {_quote(call)}")
    if not _is(values.get("labels"), "labels"):
        raise NotUnderstood(f"aliased labels: the loss is not taken of `labels` itself in {_quote(call)}")
    others = [keyword for keyword in keywords if keyword.arg not in ("logits", "labels")]
    if any(_reads_or_binds(keyword.value, logits.id) for keyword in others):
        raise NotUnderstood(f"read or changed logits: in an argument of {_quote(call)}")
    return logits.id, others


def _head_and_steps(statement: ast.stmt, logits: str) -> tuple[ast.Call, list[_Step]]:
    """Return the call of the head in ``logits = ...``, and what is done to its output in the same statement."""
    if isinstance(statement, ast.If):
        raise NotUnderstood(f"head in a branch: {_quote(statement)}")
    steps = None
    if isinstance(statement, ast.Assign) and _target(statement) == logits:
        steps = _steps_from(statement.value, _is_head_call)
    if steps is None:
        raise NotUnderstood(f"composite: expected {logits} = self.<head>(<hidden>), got {_quote(statement)}")
    head = steps[0].operand
    assert isinstance(head, ast.Call)
    return head, steps[1:]


def _steps_of(statement: ast.stmt, logits: str) -> list[_Step]:
    """Return what one statement does to the logits."""
    if any(_is(node, "self.training") for node in ast.walk(statement) if isinstance(node, ast.Attribute)):
        raise NotUnderstood(f"self.training: the logits depend on it in {_quote(statement)}")
    if isinstance(statement, ast.If):
        return [_guarded_softcap(statement, logits)]
    steps = None
    if isinstance(statement, ast.Assign) and _target(statement) == logits:
        steps = _steps_from(statement.value, lambda node: _is(node, logits))
    if steps is None or any(_reads_or_binds(step.operand, logits) for step in steps[1:]):
        raise NotUnderstood(f"read or changed logits: {_quote(statement)}")
    return steps[1:]


def _steps_from(value: ast.expr, is_base: Callable[[ast.expr], bool]) -> list[_Step] | None:
    """Return the steps from a base to ``value``, the base first, or None if there are steps of another kind."""
    if is_base(value):
        return [_Step("base", value)]
    for inner, step in _last_steps(value):
        steps = _steps_from(inner, is_base)
        if steps is not None:
            return [*steps, step]
    return None


def _last_steps(value: ast.expr) -> Iterator[tuple[ast.expr, _Step]]:
    """Yield each way to see ``value`` as one step from an inner expression."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        yield value.left, _Step("*", value.right)
        yield value.right, _Step("*", value.left)
    elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
        yield value.left, _Step("/", value.right)
    elif isinstance(value, ast.Call):
        arguments = ast.Tuple([*value.args, *(keyword.value for keyword in value.keywords)], ast.Load())
        if ast.unparse(value.func) in _TANH and len(arguments.elts) == 1:
            yield arguments.elts[0], _Step("tanh", ast.Tuple([], ast.Load()))
        elif isinstance(value.func, ast.Attribute) and value.func.attr in _CASTS:
            yield value.func.value, _Step("cast", arguments)


def _scale_and_softcap(steps: list[_Step]) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the scale that comes before the softcap, and the softcap."""
    scale: ast.expr | None = None
    softcap: ast.expr | None = None
    for kind, operand in _join_softcaps(steps):
        if softcap is not None:
            raise NotUnderstood("read or changed logits: they are scaled or capped again after the softcap")
        if kind == "softcap":
            softcap = operand
        elif kind == "*":
            scale = operand if scale is None else ast.BinOp(scale, ast.Mult(), operand)
        else:
            scale = ast.BinOp(scale or ast.Constant(1.0), ast.Div(), operand)
    return scale, softcap


def _join_softcaps(steps: list[_Step]) -> list[_Step]:
    """Return the steps without casts, and with each ``/ cap``, ``tanh``, ``* cap`` as one softcap."""
    left = [step for step in steps if step.kind != "cast"]
    joined: list[_Step] = []
    while left:
        if [step.kind for step in left[:3]] == ["/", "tanh", "*"] and _same(left[0].operand, left[2].operand):
            joined.append(_Step("softcap", left[0].operand))
            left = left[3:]
        elif left[0].kind == "tanh":
            raise NotUnderstood("read or changed logits: a tanh without the same cap on both sides")
        else:
            joined.append(left.pop(0))
    return joined


def _guarded_softcap(statement: ast.If, logits: str) -> _Step:
    """Return the softcap of ``if cap is not None: ...``. The test may give the cap a name: ``(name := cap)``."""
    test = statement.test
    if isinstance(test, ast.Compare) and _is(test, f"{ast.unparse(test.left)} is not None") and not statement.orelse:
        cap, name = test.left, test.left
        if isinstance(test.left, ast.NamedExpr):
            cap, name = test.left.value, test.left.target
        joined = _join_softcaps([step for inner in statement.body for step in _steps_of(inner, logits)])
        if len(joined) == 1 and joined[0].kind == "softcap" and _same(joined[0].operand, name):
            return _Step("softcap", cap)
    raise NotUnderstood(f"conditional logits: {_quote(statement)}")


def _check_other(statement: ast.stmt, made: list[ast.stmt]) -> None:
    """Refuse what may change an operand of the logits or the loss between the two."""
    name = _target(statement)
    if name is None or any(isinstance(node, ast.Call) for node in ast.walk(statement)):
        raise NotUnderstood(f"between head and loss: {_quote(statement)}")
    if name == "labels":
        raise NotUnderstood(f"changed labels: {_quote(statement)}")
    if any(_reads_or_binds(earlier, name) for earlier in made):
        raise NotUnderstood(f"changed operand: the logits were made with `{name}` before {_quote(statement)}")


def _check_uses(function: ast.FunctionDef, region: Region) -> None:
    """Refuse logits that are read, or made of what changes later: they may be made later."""
    logits = region.loss.logits
    used = [node for statement in region.logits_statements for node in _names_in(statement) if node.id != logits]
    bound = {node.id for node in used if _is_bound(node)}
    for statement in (*function.body[: region.first], *region.other_statements, *function.body[region.last + 1 :]):
        handed_out = _handed_out(statement)
        for node in _names_in(statement):
            if node.id in bound or (node.id == logits and node not in handed_out):
                raise NotUnderstood(f"read or changed logits: `{node.id}` in {_quote(statement)}")
    changed = {
        node.id for statement in function.body[region.last :] for node in _names_in(statement) if _is_bound(node)
    }
    for node in used:
        if node.id in changed:
            raise NotUnderstood(f"changed operand: the logits are made with `{node.id}`, which changes after them")


def _handed_out(statement: ast.stmt) -> list[ast.expr]:
    """Return what a statement puts into a tuple, or into keywords of a class, that it returns or gives a name."""
    values = [node.value for node in ast.walk(statement) if isinstance(node, (ast.Return, ast.Assign))]
    handed_out: list[ast.expr] = []
    while values:
        value = values.pop()
        if isinstance(value, ast.Tuple):
            handed_out += value.elts
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id[:1].isupper():
            handed_out += [keyword.value for keyword in value.keywords]
        elif isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
            values += [value.left, value.right]
        elif isinstance(value, ast.IfExp):
            values += [value.body, value.orelse]
    return handed_out


def _method_of(node: ast.AST) -> str | None:
    """Return ``name`` if ``node`` is a call ``self.name(...)``, else None."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is(node.func.value, "self"):
        return node.func.attr
    return None


def _names_in(node: ast.AST) -> list[ast.Name]:
    """Return every plain name in ``node``."""
    return [each for each in ast.walk(node) if isinstance(each, ast.Name)]


def _quote(node: ast.AST) -> str:
    """Return the source of ``node`` on one short line."""
    text = " ".join(ast.unparse(node).split())
    return f"`{text if len(text) <= 100 else text[:97] + '...'}`"


def _is_head_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and bool(_method_of(node)) and len(node.args) == 1 and not node.keywords


def _target(statement: ast.stmt) -> str | None:
    """Return the one plain name that an assignment binds, else None."""
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
        targets = [statement.target]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else None


def _reads_or_binds(node: ast.AST, name: str) -> bool:
    return any(each.id == name for each in _names_in(node))


def _is_bound(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _is(node: ast.AST | None, text: str) -> bool:
    return node is not None and ast.unparse(node) == text


def _same(a: ast.AST, b: ast.AST) -> bool:
    return ast.unparse(a) == ast.unparse(b)
