"""How a random call is passed to the public functions, and what they return.

Only this one of the files of random calls knows the parameters and results of the package. A case says in its own words
what it passes on one rank: tensors by name (``logits``, or ``hidden``, ``weight``, ``bias``; ``labels``, ``targets``,
``teacher`` and so on), and settings. If a parameter is renamed, the adapter here changes, and no
case does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import vocab_parallel_ce as vp
from tests.support.cases import flat

Given = dict[str, Any]
Returned = dict[str, Tensor]


def invoke(name: str, given: Given) -> Returned:
    """Call the public function or module; return its outputs by name. A ``shard`` is ``(start, stop, V)``."""
    return PUBLIC[name](_in_words_of_the_package(given))


def _in_words_of_the_package(given: Given) -> Given:
    given = dict(given)
    shard, budget = given.pop("shard", None), given.pop("memory_budget", None)
    if shard is not None:
        given["vocab_size"] = vp.VocabShard(*shard)
    if budget is not None:
        given["chunk_size"] = f"{budget}B"
    if "chunk_tokens" in given:
        given["chunk_size"] = given.pop("chunk_tokens")
    return given


def verified() -> Any:
    return vp.verify_calls()


def backward_of_pair(gradient: Tensor, grad_output: Tensor, is_cg_capturable: bool) -> Tensor:
    return vp.cross_entropy_backward(gradient, grad_output, is_cg_capturable=is_cg_capturable)


def _taken(given: Given, *names: str) -> list[Any]:
    """The first arguments, which are passed by position, where there are such."""
    return [given.pop(name) for name in names if name in given]


def _loss(returned: Any) -> Returned:
    if not isinstance(returned, vp.Outputs):
        return {"loss": returned}
    return {name: value for name, value in vars(returned).items() if value is not None}


def _log_probs(returned: Any) -> Returned:
    found = _loss(returned)
    return found if "log_probs" in found else {"log_probs": found["loss"]}


def _cross_entropy(given: Given) -> Returned:
    return _loss(vp.vocab_parallel_cross_entropy(*_taken(given, "logits", "labels"), **given))


def _module(given: Given) -> Returned:
    tensors, num_items = _taken(given, "logits", "labels"), given.pop("num_items", None)
    return _loss(vp.VocabParallelCrossEntropy(**given)(*tensors, num_items))


def _token_log_probs(given: Given) -> Returned:
    return _log_probs(vp.token_log_probs(*_taken(given, "logits", "labels"), **given))


def _distillation_loss(given: Given) -> Returned:
    return _loss(vp.distillation_loss(*_taken(given, "logits", "teacher"), **given))


def _linear_cross_entropy(given: Given) -> Returned:
    return _loss(flat.linear_cross_entropy(*_taken(given, "hidden", "weight", "labels"), **given))


def _linear_module(given: Given) -> Returned:
    weight, bias = given.pop("weight"), given.pop("bias")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight, layer.bias = weight, bias
    tensors, num_items = _taken(given, "hidden", "labels"), given.pop("num_items", None)
    return _loss(flat.LinearCrossEntropy(layer, **given)(*tensors, num_items))


def _linear_objective(given: Given, upstream: Returned) -> Returned:
    """The sum of the outputs, each times its upstream gradient: its derivatives are those."""

    def objective(log_probs: Tensor, **numbers: Tensor) -> Tensor:
        numbers["log_probs"] = log_probs
        values = sum((numbers[f"d_{name}"] * numbers[name] for name in upstream), torch.zeros_like(log_probs))
        return values if values.dim() == 1 else values.sum(-1)  # of several ids

    if "teacher_options" in given:
        head = [given.pop(f"teacher_{name}") for name in vp.Head._fields]
        given["teacher"] = vp.Teacher(*head, **given.pop("teacher_options"))
    given |= {"objective": objective, "tokens": {f"d_{name}": value for name, value in upstream.items()}}
    loss, found = flat.linear_objective(*_taken(given, "hidden", "weight", "labels"), reduction="sum", **given)
    return {"objective": loss, **_loss(found)}


def _linear_token_log_probs(given: Given) -> Returned:
    if "upstream" in given:
        return _linear_objective(given, given.pop("upstream"))
    return _log_probs(flat.linear_token_log_probs(*_taken(given, "hidden", "weight", "labels"), **given))


def _linear_distillation_loss(given: Given) -> Returned:
    student = vp.Head(*_taken(given, "hidden", "weight", "bias"))
    teacher = vp.Head(*(given.pop(f"teacher_{name}", None) for name in vp.Head._fields))
    of_teacher = given.pop("teacher_options")
    if given.pop("in_linear_objective", False):
        return _objective_of_teacher(given, student, teacher, of_teacher)
    return _loss(flat.linear_distillation_loss(student, teacher, **given))


def _objective_of_teacher(given: Given, student: vp.Head, head: vp.Head, of_teacher: Given) -> Returned:
    """The same loss as an objective of the divergence and, with a hard weight, the log-probabilities."""
    hard_weight, options = given.pop("hard_weight", 0.0), ("temperature", "divergence", "beta")
    own = {name: given.pop(name) for name in options if name in given} | of_teacher
    teacher = vp.Teacher(*head, **own)

    def objective(log_probs: Tensor | None = None, *, divergence: Tensor) -> Tensor:
        values = (1 - hard_weight) * divergence
        return values if log_probs is None else values - hard_weight * log_probs

    labels = given.pop("labels", None)
    loss, found = flat.linear_objective(*student[:2], labels, objective, bias=student.bias, teacher=teacher, **given)
    assert found.divergence is not None and not found.divergence.requires_grad
    return {"loss": loss}


def _of_te(given: Given) -> list[Any]:
    """TransformerEngine's arguments; it has no others."""
    tensors = _taken(given, "logits", "labels", "label_smoothing")
    return [*tensors, given["reduction"] == "mean", *_taken(given, "group", "ignore_index")]


def _parallel_cross_entropy(given: Given) -> Returned:
    """``overwrite_input`` None leaves it out. A mean is ``[1]`` there."""
    is_mean, overwrite = given["reduction"] == "mean", given["overwrite_input"]
    keywords = {} if overwrite is None else {"overwrite_input": overwrite}
    loss = vp.parallel_cross_entropy(*_of_te(given), **keywords)
    return {"loss": loss.squeeze(0) if is_mean else loss}


def _cross_entropy_forward(given: Given) -> Returned:
    loss, gradient = vp.cross_entropy_forward(*_of_te(given))
    return {"loss": loss, "gradient": gradient}


PUBLIC: dict[str, Callable[[Given], Returned]] = {
    "vocab_parallel_cross_entropy": _cross_entropy,
    "VocabParallelCrossEntropy": _module,
    "token_log_probs": _token_log_probs,
    "distillation_loss": _distillation_loss,
    "linear_cross_entropy": _linear_cross_entropy,
    "LinearCrossEntropy": _linear_module,
    "linear_token_log_probs": _linear_token_log_probs,
    "linear_distillation_loss": _linear_distillation_loss,
    "parallel_cross_entropy": _parallel_cross_entropy,
    "cross_entropy_forward": _cross_entropy_forward,
}
