"""What a table of refusals is made of."""

import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

EITHER = (TypeError, ValueError)
NAN = float("nan")
# Arguments that replace valid ones (``teacher.ids``: a field of one), the error, and the beginning of its message as a
# regular expression. The first argument is the one that is wrong, or that needs the others.
Row = tuple[dict[str, Any], type[Exception] | tuple[type[Exception], ...], str]


class Table(NamedTuple):
    """A function, arguments that it takes, and what it refuses in their place."""

    name: str
    function: Callable[..., Any]
    valid: Callable[[], dict[str, Any]]
    rows: list[Row]

    def id_of(self, row: Row) -> str:
        """``function-argument-fault``."""
        return "-".join((self.name, *(f"{name}-{fault_of(value)}" for name, value in row[0].items())))

    def arguments(self, changed: dict[str, Any]) -> dict[str, Any]:
        """The valid ones with those of a row in their place."""
        arguments = self.valid()
        for name, value in changed.items():
            record, _, field = name.partition(".")
            arguments[record] = arguments[record]._replace(**{field: value}) if field else value
        return arguments


def fault_of(value: Any) -> str:
    """A wrong value in a word or two."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__ if isinstance(value, (nn.Module, list, tuple)) else repr(value)
    words = [str(value.dtype).removeprefix("torch."), "x".join(map(str, value.shape)) or "scalar"]
    words += [type(value).__name__] * (type(value) is not torch.Tensor)
    words += [value.device.type] * (value.device.type != "cpu")
    words += ["sparse"] * value.is_sparse + ["requires_grad"] * value.requires_grad
    return " ".join(words + ["inference"] * value.is_inference())


def number(name: str) -> list[Row]:
    """Wrong values of a number that must be positive: 0 or less turns a padding of -inf into +inf or NaN.

    Kernels compute in fp32, where 1e39 is infinite and 1e-46 is 0.
    """
    message = f"{name}: must be positive and finite.*, got"
    return [
        *(({name: value}, ValueError, f"{message} {re.escape(str(value))}$") for value in (0, NAN, 1e39, 1e-46)),
        ({name: "1"}, TypeError, f"{name}: expected a number, got str"),
        ({name: True}, TypeError, f"{name}: expected a number, got bool"),
    ]


def _masked(value: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is a prototype
        return torch.masked.masked_tensor(value.detach(), torch.ones_like(value, dtype=torch.bool))


# What a tensor may be in place of itself, apart from other dtypes, and what the message says then.
FAULTS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "None": (lambda t: None, TypeError, ".*torch.Tensor.* got NoneType"),
    "list": (lambda t: t.tolist(), TypeError, ".*(torch.Tensor|a tensor).* got list"),
    "number": (lambda t: 0.0, TypeError, ".*torch.Tensor.* got float"),
    "bool": (lambda t: True, TypeError, ".*torch.Tensor.* got bool"),
    "meta": (lambda t: t.detach().to("meta"), ValueError, ".*cpu.*meta"),
    "sparse": (lambda t: t.detach().to_sparse(), TypeError, ".*expected a dense tensor"),
    # A MaskedTensor, whose mask nothing here would see.
    "masked": (_masked, TypeError, "expected a tensor without a mask, got MaskedTensor; pass its get_data"),
    "grad": (lambda t: t.detach().clone().requires_grad_(), TypeError, ".*(requires|needs) no gradient.*detach"),
}


CONSTANT = "list int64 sparse masked grad"  # of one that is floating point


def tensor(name: str, value: torch.Tensor, faults: str, subject: str = "", **others: Any) -> list[Row]:
    """A tensor as another: each of ``faults`` is a key of :data:`FAULTS`, or a dtype; with ``others`` it would do."""
    rows: list[Row] = []
    for fault in faults.split():
        make, error, words = FAULTS.get(fault, (lambda t, d=fault: t.to(getattr(torch, d)), TypeError, ".*dtype"))
        rows.append(({name: make(value), **others}, error, f"{subject or re.escape(name)}: {words}"))
    return rows
