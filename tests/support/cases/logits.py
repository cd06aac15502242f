"""One call over whole logits on one rank, of the loss or of log-probabilities, and what it must return."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.cases.inputs import NAN, Batch, batch, padded_shard, with_a_broad_row
from tests.support.truth import oracle
from tests.support.truth.budget import assert_within_budget, of_small_cap
from vocab_parallel_ce import Outputs, token_log_probs, vocab_parallel_cross_entropy
from vocab_parallel_ce.options import DIFFERENTIABLE as OF_EVERY_LOSS

# Few rows: the interpreter takes tens of milliseconds for each.
COLUMNS, ROWS = 21, 4
REDUCTIONS = ("mean", "sum", "none")
GRADIENTS = ("in_forward", "in_backward", "out_of_place")
DIVISORS = {
    "mean": {"reduction": "mean"},
    "none": {"reduction": "none"},
    "sum": {"reduction": "sum"},
    "sum / int": {"reduction": "sum", "num_items": 7},
    "sum / int64": {"reduction": "sum", "num_items": torch.tensor(7)},
    "sum / fp32": {"reduction": "sum", "num_items": torch.tensor(6.5)},
    "mean / float": {"num_items": 6.25},
}
EVERY = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 10.0, "logit_scale": 0.4}
_ORACLE_OPTIONS = {name for name, p in inspect.signature(oracle.values).parameters.items() if p.default is not p.empty}


class Results(NamedTuple):
    """What a call returned, flat, and the gradient of the logits."""

    outputs: tuple[Tensor, ...]  # loss and metrics; or log-probabilities and entropy
    grad: Tensor

    @property
    def loss(self) -> Tensor:
        return self.outputs[0]


OUTPUTS = ("entropy", "lse", "sum_sq_probs", "mean_logit", "predictions")
DIFFERENTIABLE = tuple(name for name in OF_EVERY_LOSS if name != "divergence")  # of labels
METRICS = ("predictions",)


def of_every_output(found: Outputs) -> tuple[Tensor, ...]:
    """What the oracle's ``every_output`` returns, and predictions."""
    both = torch.stack([found.lse, found.mean_logit], dim=-1)
    return found.log_probs, found.entropy, found.lse, 1 + found.sum_sq_probs, both, found.predictions


def grads_of_every_output(rows: int) -> list[Tensor]:
    """Random ones of the outputs of :func:`of_every_output` that have a gradient."""
    return [random_grad_output(rows, seed=i) for i in range(3)]


def every_output(logits: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Every output of :func:`token_log_probs`, as :func:`of_every_output` says."""
    return of_every_output(token_log_probs(logits, labels, outputs=OUTPUTS, **options))


OF_ORACLE = {token_log_probs: oracle.of_log_probs, every_output: oracle.of_every_output}  # others have a loss


def of_oracle(options: dict[str, Any]) -> dict[str, Any]:
    """The options that change what is right; the others say how it is computed."""
    return {name: value for name, value in options.items() if name in _ORACLE_OPTIONS}


def flat_outputs(result: Any) -> tuple[Tensor, ...]:
    """The tensors of what a function returned: loss and metrics, or log-probabilities and entropy."""
    return tuple(tensor for tensor in tree_leaves(result) if tensor is not None)


def backward(outputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None]) -> None:
    """Of every output with a ``grad_output`` that is not None; without any, that of the first is 1."""
    pairs = [
        (output, grad_output.to(output.device).expand(output.shape))
        for output, grad_output in zip(outputs, grad_outputs or (torch.ones(()),), strict=False)
        if grad_output is not None and output.requires_grad
    ]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))


def broad_rows(kind: str, rows: int = ROWS, vocab_size: int = COLUMNS, **settings: Any) -> Batch:
    """``rows`` of a kind, the last of which is that of :func:`with_a_broad_row`."""
    return with_a_broad_row(batch(kind, rows=rows - 1, vocab_size=vocab_size, **settings))


def random_grad_output(rows: int = ROWS, seed: int = 0) -> Tensor:
    """Different in every token; not near 0 in the last, which is the broad one."""
    grad_output = torch.randn(rows, generator=torch.Generator().manual_seed(seed))
    grad_output[-1:] = 1.5
    return grad_output


def zero_first_grad_output(rows: int, seed: int = 0) -> Tensor:
    """That of :func:`random_grad_output`, but 0 in the first token, unless that is the last."""
    grad_output = random_grad_output(rows, seed)
    grad_output[:-1][:1] = 0
    return grad_output


def run(
    impl_device: tuple[str, str],
    logits: Tensor,
    labels: Tensor,
    *grad_outputs: Tensor | None,
    function: Callable[..., Any] = vocab_parallel_cross_entropy,
    padding: int = 0,
    fill: float = NAN,
    **options: Any,
) -> Results:
    """Results over a copy of ``logits``, a leaf; backward is run once.

    Args:
        grad_outputs: of the outputs; without one it is 1, and an output with None is not used.
        padding: so many columns, which hold ``fill``, follow the vocabulary.
    """
    impl, device = impl_device
    if padding:
        options["vocab_size"] = logits.shape[-1]
        logits = padded_shard(logits, 0, logits.shape[-1] + padding, fill)
    leaf = logits.clone().to(device).requires_grad_()
    on_device = labels.to(device)
    before, version = on_device.clone(), on_device._version
    outputs = flat_outputs(function(leaf, on_device, impl=impl, **options))
    backward(outputs, grad_outputs)
    assert torch.equal(on_device, before) and on_device._version == version, "labels were written"
    return Results(tuple(output.detach().cpu() for output in outputs), leaf.grad.cpu())


def check(
    impl_device: tuple[str, str],
    logits: Tensor,
    labels: Tensor,
    *grad_outputs: Tensor | None,
    **options: Any,
) -> Results:
    """:func:`run`, whose results must be the oracle's, metrics included."""
    results = run(impl_device, logits, labels, *grad_outputs, **options)
    assert_right(results, logits, labels, *grad_outputs, **options)
    return results


def assert_right(
    results: Results,
    logits: Tensor,
    labels: Tensor,
    *grad_outputs: Tensor | None,
    function: Callable[..., Any] = vocab_parallel_cross_entropy,
    **options: Any,
) -> None:
    """``results`` over the whole vocabulary, on any device, are the oracle's of ``logits`` on the CPU."""
    given, of = of_oracle(options), OF_ORACLE.get(function, oracle.of_loss)
    if function is token_log_probs:
        assert len(results.outputs) == 1 + len(options.get("outputs", ()))
    *truth, truth_grad = oracle.with_gradient(of, logits.double(), labels, *grad_outputs, **given)
    *peer, peer_grad = oracle.with_gradient(of, oracle.at_least_fp32(logits), labels, *grad_outputs, **given)
    for triple in zip(results.outputs, truth, peer, strict=False):
        assert_within_budget(*triple, magnitude=of_small_cap(logits.dtype, **options))
    roundings = 1 + (options.get("gradient") == "in_forward")  # backward multiplies what forward has written
    assert_within_budget(results.grad, truth_grad, peer_grad, roundings=roundings)
    if options.get("outputs") == METRICS:
        assert_predictions(results.outputs[1], oracle.predictions_fp64(logits, labels, **given))


def assert_predictions(found: Tensor, truth: Tensor) -> None:
    """Equal, and not differentiable."""
    assert not found.requires_grad
    assert found.dtype == torch.int64 and torch.equal(found.cpu(), truth)


class Leaves:
    """Logits as a model produces them, not a leaf, and losses over them."""

    def __init__(self, impl_device, kind="some_ignored", *, rows=6, columns=75, dtype=torch.float32) -> None:
        self.impl, device = impl_device
        self.made = batch(kind, rows=rows, vocab_size=columns, dtype=dtype)
        self.values, self.labels = (tensor.to(device) for tensor in self.made)
        self.source = self.values.clone().requires_grad_()
        self.logits = self.source * 1

    def loss(self, logits: Tensor | None = None, labels: Tensor | None = None, **options: Any) -> Tensor:
        """Of all logits, or of those and of as many of the first labels."""
        logits = self.logits if logits is None else logits
        labels = self.labels[: logits.shape[0]] if labels is None else labels
        return vocab_parallel_cross_entropy(logits, labels, impl=self.impl, **options)

    def grad_output(self, loss: Tensor) -> Tensor:
        return torch.rand(loss.shape, generator=torch.Generator().manual_seed(3)).to(loss.device)

    def assert_right(self, loss: Tensor, grad: Tensor, grad_output: Tensor, **options: Any) -> None:
        assert_right(Results((loss,), grad), *self.made, grad_output, **options)

    def logits_are_untouched(self) -> bool:
        return torch.equal(self.logits, self.values)
