"""Rewrite a causal language model's ``forward`` so that it trains without its logits.

Source to source: for ``torch.compile``, and for whoever wants to read what runs. Without labels the old
lines run as they are. With labels, two injected functions are called instead of the head and ``self.loss_function`` ::

    _hidden = hidden_states
    def _replay():
        logits = self.lm_head(_hidden)
        return logits
    logits = _lazy_logits(self, self.lm_head, _hidden, _replay)
    loss = _fused_loss(self, self.lm_head, _hidden, labels, logits=logits, scale=None, softcap=None,
                       vocab_size=self.config.vocab_size, **kwargs)

Nothing of transformers is imported.
"""

import __future__

import ast
import builtins
import dis
import functools
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from vocab_parallel_ce.integrations.transformers.rewrite_match import HIDDEN, NotUnderstood, Region, find_region

LOSS, LAZY, _REPLAY = "_fused_loss", "_lazy_logits", "_replay"
_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
# Decorators that only write a docstring. The new function is given the old one's.
_DOCUMENTATION = ("auto_docstring", "add_start_docstrings_to_model_forward", "add_code_sample_docstrings")


class Declined(NamedTuple):
    """Why a forward is left as it is."""

    reason: str


class Rewritten(NamedTuple):
    """A new forward, not yet in place of the old one."""

    forward: Callable[..., Any]
    source: str


def rewrite(forward: Callable[..., Any], loss: Callable[..., Any], lazy: Callable[..., Any]) -> Rewritten | Declined:
    """Return a new forward that calls ``loss`` and ``lazy`` if it is given labels, or why there is none.

    ``forward``: the function of a class, with its decorators. It is not changed. The new one has its globals, closure
    (``super()`` works), defaults, annotations, signature and docstring. The decorators in its source are applied again;
    if it has other wrappers, or if its source is not what runs, it is declined.

    ``loss(self, head, hidden, labels, *, logits, scale, softcap, **arguments)`` returns the loss. ``head`` would be
    called with ``hidden``. ``logits`` is what ``lazy`` returned. ``scale`` and ``softcap`` are None or what ``self``
    has: usually numbers, but ``loss`` must check. ``arguments`` are those of ``self.loss_function``, such as
    ``vocab_size`` and ``num_items_in_batch``. That function may have been replaced, which ``loss`` must check too.

    ``lazy(self, head, hidden, replay)`` returns the ``logits`` of the output. ``replay()`` runs the old lines on
    ``hidden``, with the weights, the autocast and the gradient mode of the moment.
    """
    try:
        return _rewrite(forward, {LOSS: loss, LAZY: lazy})
    except NotUnderstood as error:
        return Declined(str(error))


def rewrite_source(source: str) -> str | Declined:
    """Return the new source of a forward, or why there is none.

    ``source``: one function with its decorators. The new source has its indentation and all its other lines.
    """
    try:
        return _rewrite_source(source)
    except NotUnderstood as error:
        return Declined(str(error))


def _rewrite(forward: Callable[..., Any], injected: dict[str, Callable[..., Any]]) -> Rewritten:
    old = inspect.unwrap(forward)
    if not isinstance(old, FunctionType):
        raise NotUnderstood(f"no source: expected a function of Python, got {type(old).__name__}")
    try:
        source = inspect.getsource(old)
    except (OSError, TypeError) as error:
        raise NotUnderstood(f"no source: {error}") from None
    compiled = _compile(source, old, [], old.__code__.co_filename)
    if _fingerprint(compiled) != _fingerprint(old.__code__):
        raise NotUnderstood("stale source: it is not what runs; the file changed, or the function was transformed")
    new = _rewrite_source(source)
    filename = f"<rewritten {old.__code__.co_filename}:{old.__code__.co_firstlineno}>"
    code = _compile(new, old, list(injected), filename)
    _resolve_globals(code, old.__globals__)
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    cells |= {name: CellType(function) for name, function in injected.items()}
    function = FunctionType(
        code, old.__globals__, old.__name__, old.__defaults__, tuple(cells[name] for name in code.co_freevars)
    )
    _copy_attributes(old, function)
    decorated = _decorate(function, _parse(source).decorator_list)
    if not isinstance(decorated, FunctionType) or _layers(decorated) != _layers(forward):
        raise NotUnderstood("wrapped: forward has wrappers that its source does not show")
    _copy_attributes(forward, decorated)
    linecache.cache[filename] = (len(new), None, [line + "\n" for line in new.split("\n")], filename)
    return Rewritten(decorated, textwrap.dedent(new))


def _rewrite_source(source: str) -> str:
    function = _parse(source)
    taken = {HIDDEN, _REPLAY, LOSS, LAZY} & set(re.findall(r"\w+", source))
    if taken:
        raise NotUnderstood(f"rewritten before: the source uses the name `{min(taken)}`")
    region = find_region(function)
    guard, start = region.loss.guard, function.body[region.first]
    lines = source.split("\n")
    indent = lines[guard.lineno - 1][: guard.col_offset]
    text = "\n".join(
        [
            *lines[: start.lineno - 1],
            f"{indent}if labels is None:",
            textwrap.indent("\n".join(lines[start.lineno - 1 : guard.lineno - 1]), " " * 4),
            f"{indent}else:",
            textwrap.indent(_compose(region), indent + " " * 4),
            *lines[guard.end_lineno :],
        ]
    )
    _check_kept(_parse(source).body, _parse(text).body, region)
    return text


def _compose(region: Region) -> str:
    """The statements for given labels."""
    loss, head, hidden = region.loss, region.head, ast.unparse(region.hidden)
    scale, softcap = (None if node is None else ast.unparse(node) for node in (region.scale, region.softcap))
    arguments = ", ".join(
        f"{keyword.arg}={ast.unparse(keyword.value)}" if keyword.arg else f"**{ast.unparse(keyword.value)}"
        for keyword in loss.arguments
    )
    others = [ast.unparse(statement) for statement in region.other_statements]
    replay = "\n".join(ast.unparse(statement) for statement in region.logits_statements)
    fused = [
        f"{HIDDEN} = {hidden}",
        *(other for other in others if other != f"{loss.name} = None"),
        "",
        f"def {_REPLAY}():",
        textwrap.indent(f"{replay}\nreturn {loss.logits}", " " * 4),
        "",
        f"{loss.logits} = {LAZY}(self, {head}, {HIDDEN}, {_REPLAY})",
        f"{loss.name} = {LOSS}(",
        f"    self, {head}, {HIDDEN}, labels, logits={loss.logits},",
        f"    scale={scale}, softcap={softcap},",
        f"    {arguments}",
        ")",
    ]
    return "\n".join(fused)


def _check_kept(old: list[ast.stmt], new: list[ast.stmt], region: Region) -> None:
    """Refuse lines that were not moved whole: two statements on one line, or a string over several lines."""
    branch = new[region.first] if len(new) > region.first else None
    kept = branch.body if isinstance(branch, ast.If) else []
    now = [*new[: region.first], *kept, *new[region.first + 1 :]]
    before = [*old[: region.last], *old[region.last + 1 :]]
    if list(map(ast.dump, now)) != list(map(ast.dump, before)):
        raise NotUnderstood("layout: the lines from the head to the loss cannot be indented")


def _parse(source: str) -> ast.FunctionDef:
    """Return the function that ``source`` defines, with its line numbers."""
    indented = source.startswith((" ", "\t"))
    try:
        body = ast.parse(f"if True:\n{source}" if indented else source).body
    except SyntaxError as error:
        raise NotUnderstood(f"no source: it cannot be parsed, {error.msg}") from None
    if indented and isinstance(body[0], ast.If):
        ast.increment_lineno(body[0], -1)
        body = body[0].body
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise NotUnderstood("no source: expected one plain function")
    return body[0]


def _compile(source: str, old: FunctionType, injected: list[str], filename: str) -> CodeType:
    """Return the code of the function, compiled in its class, with the injected names as free variables."""
    definition = _parse(source)
    factory = ast.parse(f"def _({', '.join([*old.__code__.co_freevars, *injected])}): pass")
    outer = factory.body[0]
    assert isinstance(outer, ast.FunctionDef)
    path = old.__qualname__.split(".")[:-1]
    # The class makes super() and names such as self.__secret mean what they meant.
    in_class = bool(path) and path[-1] != "<locals>"
    outer.body = [ast.ClassDef(path[-1], [], [], [definition], [])] if in_class else [definition]
    function_name = path[-1] if in_class else definition.name
    if function_name not in old.__code__.co_freevars:
        outer.body.insert(0, ast.Global([function_name]))
    flags = old.__code__.co_flags & _FUTURE
    code = compile(ast.fix_missing_locations(factory), filename, "exec", flags=flags, dont_inherit=True)
    return next(each for each in _codes(code) if each.co_name == definition.name)


def _fingerprint(code: CodeType) -> tuple[object, ...]:
    """Return what tells one function from another, except loads and calls, which depend on the module's imports."""
    constants = [constant for constant in code.co_consts if not isinstance(constant, CodeType)]
    constants = [constant for constant in constants if "<locals>" not in str(constant)]  # of Python 3.10: paths
    operations = [
        (instruction.opname, instruction.argrepr if instruction.opname in ("BINARY_OP", "COMPARE_OP") else "")
        for instruction in dis.get_instructions(code)
        if not instruction.opname.startswith(("LOAD", "CALL", "PRECALL", "PUSH_NULL", "EXTENDED_ARG"))
    ]
    return code.co_names, code.co_varnames, constants, operations


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield ``code`` and all code in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _resolve_globals(code: CodeType, namespace: dict[str, Any]) -> None:
    for part in _codes(code):
        for instruction in dis.get_instructions(part):
            name = instruction.argval
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name not in namespace and not hasattr(builtins, name):
                    raise NotUnderstood(f"unknown name: the module of forward has no `{name}`")


def _decorate(function: FunctionType, decorators: list[ast.expr]) -> Callable[..., Any]:
    """Return ``function`` under the decorators of its source, except those that only write docstrings."""
    decorated: Callable[..., Any] = function
    for decorator in reversed(decorators):
        text = ast.unparse(decorator)
        if text.partition("(")[0].split(".")[-1] in _DOCUMENTATION:
            continue
        try:
            decorated = eval(text, function.__globals__)(decorated)
        except Exception as error:
            raise NotUnderstood(f"decorator: `@{text}` cannot be applied again, {error!r}") from error
    return decorated


def _layers(function: Callable[..., Any]) -> list[object]:
    """Return the code of each wrapper of ``function``."""
    layers = []
    while hasattr(function, "__wrapped__"):
        layers.append(getattr(function, "__code__", type(function)))
        function = function.__wrapped__
    return layers


def _copy_attributes(source: Callable[..., Any], target: Callable[..., Any]) -> None:
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__kwdefaults__"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    vars(target).update({name: value for name, value in vars(source).items() if name != "__wrapped__"})
