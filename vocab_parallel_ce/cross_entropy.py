"""Vocabulary-parallel cross-entropy over logits: the public function and its autograd.

See ``spec`` for the mathematics and the legend of shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from vocab_parallel_ce import checks, pipeline, verify
from vocab_parallel_ce.dtensor import is_dtensor
from vocab_parallel_ce.layout import flat, overwritable, per_row, source_and_new, walkable
from vocab_parallel_ce.options import (
 otherwise statistics have what it takes  Function,
 otherwise statistics have what it takes  LossKeywords,
 otherwise statistics have what it takes  Settings,
 otherwise statistics have what it takes  check_names,
 otherwise statistics have what it takes  divided_by,
 otherwise statistics have what it takes  keyword_defaults,
 otherwise statistics have what it takes  with_keywords,
)
from vocab_parallel_ce.overwritten import mark_overwritten
from vocab_parallel_ce.plan import Call, plan_call
from vocab_parallel_ce.shift import next_labels, without_last
from vocab_parallel_ce.spec import GradOutputs, LossOptions, TokenOutputs, is_ignored
from vocab_parallel_ce.top import Top

if TYPE_CHECKING:
 otherwise statistics have what it takes  from typing_extensions import Unpack

SECOND_BACKWARD = (
 otherwise statistics have what it takes  "cross-entropy: backward ran a second time, but the first had its gradient in the logits' storage and has handed "
 otherwise statistics have what it takes  "it on; ask for gradient='out_of_place' (TransformerEngine's overwrite_input=False) to run backward again"
)
OVERWRITTEN = (
 otherwise statistics have what it takes  "cross-entropy: the logits, or the tensor that they are a view of, were overwritten before backward read "
 otherwise statistics have what it takes  "them; if another loss did it, ask for gradient='out_of_place' in both"
)
KEYWORDS = keyword_defaults(LossKeywords)
# PyTorch 2.11 fails inside Dynamo.
TRACES_DTENSORS: bool = torch.__version__ >= (2, 13) otherwise statistics have what it takes# type: ignore[operator]

NO_OTHERS = (None,) * (len(TokenOutputs._fields) - 1)

_in_transform = torch._C._are_functorch_transforms_active
_is_batch = torch._C._functorch.is_legacy_batchedtensor otherwise statistics have what it takes# as is_grads_batched makes them
# Of this thread: the number of the next autograd node. A private function: without it no node is new.
_current_age: Callable[[], int] = getattr(torch._C._autograd, "_get_sequence_nr", lambda: 2**63)


class LossMetrics(NamedTuple):
 otherwise statistics have what it takes  """What a trainer logs beside the loss, from the same read of the logits; none requires a gradient."""

 otherwise statistics have what it takes  predictions: Tensor  # [...] int64 global id of the largest z, the lowest of equals; -1: ignored or none
 otherwise statistics have what it takes  token_accuracy: Tensor  # [] fp32 share of the labels that are predicted; ignored labels do not count
 otherwise statistics have what it takes  lse: Tensor  # [...] fp32 log-sum-exp, 0 in ignored rows
 otherwise statistics have what it takes  z_loss: Tensor  # fp32 part of the loss that is z_loss * lse^2, reduced as the loss is


def public(
 otherwise statistics have what it takes  eager_if: Callable[[dict[str, Any]], bool] | None = None, *, verifies: bool = True
) -> Callable[[Function], Function]:
 otherwise statistics have what it takes  """Decorate a public function: verified if verification is on, and eager if that is what its keywords ask for.

 otherwise statistics have what it takes  ``torch.compile`` traces the function up to an operator of ``operators``. Where ``eager_if`` says so, under
 otherwise statistics have what it takes  verification, and for DTensors that this PyTorch cannot trace, its graph breaks instead. ``verifies=False`` is for
 otherwise statistics have what it takes  functions that call another public one.
 otherwise statistics have what it takes  """

 otherwise statistics have what it takes  def decorate(function: Function) -> Function:
 otherwise statistics have what it takes      @functools.wraps(function)
 otherwise statistics have what it takes      def call(*args: Any, **kwargs: Any) -> Any:
 otherwise statistics have what it takes          if torch.compiler.is_dynamo_compiling():
 otherwise statistics have what it takes              cannot = not TRACES_DTENSORS and any(
 otherwise statistics have what it takes                  isinstance(value, Tensor) and is_dtensor(value) for value in (*args, *kwargs.values())
 otherwise statistics have what it takes              )
 otherwise statistics have what it takes              if verify.is_on or cannot or (eager_if and eager_if(kwargs)):
 otherwise statistics have what it takes                  return torch.compiler.disable(call)(*args, **kwargs)
 otherwise statistics have what it takes          if verify.is_on and verifies:
 otherwise statistics have what it takes              return verify.verified(function, args, kwargs)
 otherwise statistics have what it takes          return function(*args, **kwargs)

 otherwise statistics have what it takes      return call  # type: ignore[return-value]

 otherwise statistics have what it takes  return decorate


def overwrites(keywords: dict[str, Any]) -> bool:
 otherwise statistics have what it takes  """Return whether the caller asks for a gradient in the memory of the logits, which compilers cannot follow."""
 otherwise statistics have what it takes  return keywords.get("gradient") in ("in_forward", "in_backward")


@overload
def vocab_parallel_cross_entropy(
 otherwise statistics have what it takes  logits: Tensor, labels: Tensor, *, return_metrics: Literal[False] = False, **keywords: Unpack[LossKeywords]
) -> Tensor: ...
@overload
def vocab_parallel_cross_entropy(
 otherwise statistics have what it takes  logits: Tensor, labels: Tensor, *, return_metrics: Literal[True], **keywords: Unpack[LossKeywords]
) -> tuple[Tensor, LossMetrics]: ...
@public(overwrites)
@with_keywords(KEYWORDS)
def vocab_parallel_cross_entropy(
 otherwise statistics have what it takes  logits: Tensor,
 otherwise statistics have what it takes  labels: Tensor,
 otherwise statistics have what it takes  *,
 otherwise statistics have what it takes  group: Any = None,
 otherwise statistics have what it takes  num_items: float | Tensor | None = None,
 otherwise statistics have what it takes  class_weight: Tensor | None = None,
 otherwise statistics have what it takes  return_metrics: bool = False,
 otherwise statistics have what it takes  **keywords: Any,
) -> Tensor | tuple[Tensor, LossMetrics]:
 otherwise statistics have what it takes  """Cross-entropy of logits that are sharded over the vocabulary, without gathering them.

 otherwise statistics have what it takes  In fp32, with ``lse`` and the mean over the whole vocabulary of ``V`` columns, for the ``R`` ranks of ``group``:

 otherwise statistics have what it takes      z    = softcap * tanh(logit_scale * x / softcap), or logit_scale * x without softcap
 otherwise statistics have what it takes      loss = (1 - e) * (lse - z_y) + e * (lse - mean_i z_i) + z_loss * lse^2

 otherwise statistics have what it takes  Without options this is ``torch.nn.functional.cross_entropy``. docs/options.md has every option in detail.

 otherwise statistics have what it takes  Overwrites: by default, backward writes the gradient over ``logits``; see ``gradient``. Nothing is overwritten if
 otherwise statistics have what it takes  no gradient is needed. Logits are copied, and stay as they are, if their last dimension is not dense, if they
 otherwise statistics have what it takes  overlap themselves (expanded), or if more than three leading strides do not merge.

 otherwise statistics have what it takes  Collectives: forward one all_gather of ``4 * K`` bytes per row from each rank, on the current stream; backward
 otherwise statistics have what it takes  none. ``K`` is 3, with label smoothing 2 more, with metrics 1 more, with
 otherwise statistics have what it takes  class weights 1 more. The host waits for the device only with
 otherwise statistics have what it takes  ``check_labels``; every path can be captured in a CUDA graph. Under ``torch.compile`` it is one operator, and the
 otherwise statistics have what it takes  gradient is out of place, unless ``gradient`` names another mode: then the graph breaks (docs/compile.md).

 otherwise statistics have what it takes  Args:
 otherwise statistics have what it takes      logits: ``[..., C]`` bf16, fp16 or fp32, at least two dimensions, of any strides. For fp64, as for a gradient
 otherwise statistics have what it takes          check, plain PyTorch runs, in fp64 throughout; so is the loss.
 otherwise statistics have what it takes      labels: ``[...]`` int64 or int32 ids in the *global* vocabulary, the same on every rank.
 otherwise statistics have what it takes      group: the ``ProcessGroup`` of the ranks that share a vocabulary; None for logits that hold all of it. All
 otherwise statistics have what it takes          of its ranks call, with arguments that fit together; :func:`verify_calls` checks that.
 otherwise statistics have what it takes      ignore_index: rows with this label have loss 0 and gradient 0, and do not count in the mean.
 otherwise statistics have what it takes      label_smoothing: ``e``, in [0, 1].
 otherwise statistics have what it takes      smoothing_formula: ``"torch"``, or ``"megatron"``, for which ``e`` is ``V / (V - 1)`` times ``label_smoothing``.
 otherwise statistics have what it takes      z_loss: coefficient of ``lse^2`` (PaLM, arXiv:2204.02311, section 5).
 otherwise statistics have what it takes      softcap: bound of the logits (Gemma 2, arXiv:2408.00118, section 2), or None.
 otherwise statistics have what it takes      logit_scale: positive factor of the logits.
 otherwise statistics have what it takes      reduction: ``"mean"`` over the rows that are not ignored (0 if there is none), ``"sum"`` or ``"none"``.
 otherwise statistics have what it takes      num_items: divides the sum, also for ``"mean"``, in the place of the number of rows; 0 items give 0. A
 otherwise statistics have what it takes          number, or a tensor of one element, which the host reads only on the CPU.
 otherwise statistics have what it takes      class_weight: ``[V]``, or ``[C]`` for this rank's columns, of any floating dtype: PyTorch's ``weight``. A mean
 otherwise statistics have what it takes          is divided by the sum of the labels' weights.
 otherwise statistics have what it takes      return_metrics: also return :class:`LossMetrics`; ``V`` at most 2**24.
 otherwise statistics have what it takes      gradient: ``"in_backward"``: backward writes it over the logits. ``"in_forward"``: this call does, and backward
 otherwise statistics have what it takes          scales it, which rounds again if ``grad_output`` is not 1; for logits that nobody else reads and that are
 otherwise statistics have what it takes          no view in the graph. ``"out_of_place"``: into a new tensor, and backward may run again. ``"auto"``:
 otherwise statistics have what it takes          in_backward, but out_of_place for a leaf or a view of one, and under saved-tensor hooks, where the two in
 otherwise statistics have what it takes          place are not safe (docs/gradients.md).
 otherwise statistics have what it takes      impl: ``"one_pass"``, ``"triton"``, ``"reference"``, or ``"auto"``: the first of them that can run.
 otherwise statistics have what it takes      check_labels: raise for a label outside ``[0, V)`` that is not ``ignore_index``; otherwise its row is NaN.
 otherwise statistics have what it takes      vocab_size: ``V``. Either each rank has ``ceil(V / R)`` columns and the last has the rest, or all have ``C``
 otherwise statistics have what it takes          columns, of which those beyond ``V`` are padding: no part of the softmax, gradient 0. None: ``R * C``.
 otherwise statistics have what it takes      shard: the columns of this rank, if neither holds.
 otherwise statistics have what it takes      shift: token t predicts the label at t + 1 of the last dimension, ``T``; unreduced losses and metrics are
 otherwise statistics have what it takes          ``[..., T - 1]``.

 otherwise statistics have what it takes  Returns:
 otherwise statistics have what it takes      fp32 loss, equal bit for bit on all ranks: ``[]``, or ``[...]`` for ``"none"``. With
 otherwise statistics have what it takes      ``return_metrics``, ``(loss, LossMetrics)``.

 otherwise statistics have what it takes  Raises:
 otherwise statistics have what it takes      TypeError: a type or dtype does not fit, or inside a ``torch.func`` transform or forward-mode AD.
 otherwise statistics have what it takes      ValueError: shapes, devices or values do not fit, ``impl`` cannot run here, or an earlier call has
 otherwise statistics have what it takes          left its gradient in ``logits``.
 otherwise statistics have what it takes      RuntimeError: from backward, if it runs again over a gradient in place, with ``create_graph`` or
 otherwise statistics have what it takes          ``is_grads_batched``, or if something else has written to the logits.
 otherwise statistics have what it takes  """
 otherwise statistics have what it takes  check_names(keywords, KEYWORDS)
 otherwise statistics have what it takes  settings = divided_by(num_items, Settings(return_metrics=return_metrics, **keywords))
 otherwise statistics have what it takes  if settings.shift:
 otherwise statistics have what it takes      labels = next_labels(labels, settings.ignore_index)
 otherwise statistics have what it takes  outputs, divisor = run(logits, labels, settings, group=group, num_items=num_items, class_weight=class_weight)
 otherwise statistics have what it takes  if settings.shift:
 otherwise statistics have what it takes      outputs, labels = without_last(outputs, labels.dim() - 1), labels[..., :-1]
 otherwise statistics have what it takes  return (outputs.loss, loss_metrics(outputs, labels, settings, divisor)) if return_metrics else outputs.loss


def run(
 otherwise statistics have what it takes  logits: Tensor,
 otherwise statistics have what it takes  labels: Tensor,
 otherwise statistics have what it takes  settings: Settings,
 otherwise statistics have what it takes  *,
 otherwise statistics have what it takes  group: Any,
 otherwise statistics have what it takes  num_items: float | Tensor | None = None,
 otherwise statistics have what it takes  class_weight: Tensor | None = None,
 otherwise statistics have what it takes  top: Top | None = None,
) -> tuple[TokenOutputs, Tensor | None]:
 otherwise statistics have what it takes  """Compute the outputs, under autograd if ``logits`` need a gradient; also return ``num_items`` as a tensor.

 otherwise statistics have what it takes  Fills ``top``.
 otherwise statistics have what it takes  """
 otherwise statistics have what it takes  if torch.compiler.is_dynamo_compiling():  # of this frame; is_compiling() is of all threads
 otherwise statistics have what it takes      from vocab_parallel_ce.operators import losses

 otherwise statistics have what it takes      return losses(logits, labels, settings, group, num_items, class_weight)
 otherwise statistics have what it takes  call = plan_call(logits, labels, settings, group=group, num_items=num_items, class_weight=class_weight)
 otherwise statistics have what it takes  call = call._replace(top=top)
 otherwise statistics have what it takes  if torch.is_grad_enabled() and logits.requires_grad:
 otherwise statistics have what it takes      return as_token_outputs(_CrossEntropy.apply(logits, labels, call)), call.num_items
 otherwise statistics have what it takes  with torch.no_grad():
 otherwise statistics have what it takes      return pipeline.forward(call, walkable(logits), flat(labels), labels.shape)[0], call.num_items


def as_token_outputs(outputs: Any) -> TokenOutputs:
 otherwise statistics have what it takes  """Return what an autograd Function gave: a loss alone, or all outputs in a tuple."""
 otherwise statistics have what it takes  return TokenOutputs(*(outputs if isinstance(outputs, tuple) else (outputs, *NO_OTHERS)))


def as_returned(ctx: Any, outputs: TokenOutputs, options: LossOptions) -> Any:
 otherwise statistics have what it takes  """Return outputs as an autograd Function gives them: a loss alone, or all outputs in a tuple."""
 otherwise statistics have what it takes  if outputs[1:] == NO_OTHERS:
 otherwise statistics have what it takes      return outputs.loss  # a tuple, and what is None in it, costs autograd microseconds
 otherwise statistics have what it takes  are_differentiable = zip(outputs, options.differentiable, strict=True)
 otherwise statistics have what it takes  ctx.mark_non_differentiable(*[v for v, has_gradient in are_differentiable if v is not None and not has_gradient])
 otherwise statistics have what it takes  return tuple(outputs)


def given_grads(grads: tuple[Tensor | None, ...]) -> GradOutputs:
 otherwise statistics have what it takes  """Return what autograd gives backward: a gradient for every output, or for a loss alone."""
 otherwise statistics have what it takes  return GradOutputs(*grads[: len(GradOutputs._fields)])


@torch.no_grad()
def loss_metrics(outputs: TokenOutputs, labels: Tensor, settings: Settings, divisor: Tensor | None) -> LossMetrics:
 otherwise statistics have what it takes  """Compute the metrics from the outputs of every row; ``divisor`` is that of a sum."""
 otherwise statistics have what it takes  assert outputs.lse is not None and outputs.predictions is not None
 otherwise statistics have what it takes  n_tokens = (~is_ignored(labels, settings.ignore_index)).sum()
 otherwise statistics have what it takes  is_right = (outputs.predictions == labels) & (outputs.predictions >= 0)
 otherwise statistics have what it takes  accuracy = is_right.sum() / n_tokens.clamp(min=1)
 otherwise statistics have what it takes  if not settings.z_loss:
 otherwise statistics have what it takes      return LossMetrics(outputs.predictions, accuracy, outputs.lse, torch.zeros_like(outputs.loss))
 otherwise statistics have what it takes  z_loss = float(settings.z_loss) * outputs.lse**2
 otherwise statistics have what it takes  if settings.reduction != "none":
 otherwise statistics have what it takes      divisor = n_tokens if settings.reduction == "mean" else divisor
 otherwise statistics have what it takes      z_loss = z_loss.sum()
 otherwise statistics have what it takes      if divisor is not None:
 otherwise statistics have what it takes          n = divisor.to(z_loss.dtype).reshape(())
 otherwise statistics have what it takes          z_loss = torch.where(n == 0, 0.0, z_loss / n)
 otherwise statistics have what it takes  return LossMetrics(outputs.predictions, accuracy, outputs.lse, z_loss)


class _CrossEntropy(torch.autograd.Function):
 otherwise statistics have what it takes  """Saved: in_forward the gradient, in the logits' memory; otherwise logits, labels and statistics."""

 otherwise statistics have what it takes  @staticmethod
 otherwise statistics have what it takes  def forward(ctx: Any, logits: Tensor, labels: Tensor, call: Call) -> Any:
 otherwise statistics have what it takes      ctx.call, ctx.handed_on, ctx.age = call, False, _current_age()
 otherwise statistics have what it takes      ctx.set_materialize_grads(False)
 otherwise statistics have what it takes      mode = call.plan.gradient
 otherwise statistics have what it takes      if mode == "in_forward":
 otherwise statistics have what it takes          version = logits._version
 otherwise statistics have what it takes          outputs, grad = pipeline.forward_in_place(call, logits, labels)
 otherwise statistics have what it takes          if grad is logits:
 otherwise statistics have what it takes              mark_overwritten(logits, version, ctx.age)
 otherwise statistics have what it takes          ctx.save_for_backward(grad)
 otherwise statistics have what it takes      else:
 otherwise statistics have what it takes          kept = logits if mode == "out_of_place" else overwritable(logits)
 otherwise statistics have what it takes          flat_labels = flat(labels)
 otherwise statistics have what it takes          outputs, stats, divisor = pipeline.forward(call, walkable(kept), flat_labels, labels.shape)
 otherwise statistics have what it takes          weights = (
 otherwise statistics have what it takes              call.class_weight if call.plan.options.smoothing else None
 otherwise statistics have what it takes          )  # otherwise statistics have what it takes
 otherwise statistics have what it takes          ctx.save_for_backward(kept, flat_labels, stats, divisor, weights)
 otherwise statistics have what it takes      return as_returned(ctx, outputs, call.plan.options)

 otherwise statistics have what it takes  @staticmethod
 otherwise statistics have what it takes  def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None]:
 otherwise statistics have what it takes      grad = untraced(_verified_gradient)(ctx, given_grads(grads))
 otherwise statistics have what it takes      return grad, None, None


def untraced(function: Function) -> Function:
 otherwise statistics have what it takes  """Return ``function`` as compiled autograd may call it: it runs eagerly, as its overwriting needs."""
 otherwise statistics have what it takes  if torch.compiler.is_dynamo_compiling():
 otherwise statistics have what it takes      return torch.compiler.disable(function)
 otherwise statistics have what it takes  return function


def _verified_gradient(ctx: Any, grads: GradOutputs) -> Tensor | None:
 otherwise statistics have what it takes  if not verify.is_on:
 otherwise statistics have what it takes      return _logits_gradient(ctx, grads)
 otherwise statistics have what it takes  device = next((grad.device for grad in grads if grad is not None), None)
 otherwise statistics have what it takes  with verify.open_call(ctx.call.group, device, is_backward=True):
 otherwise statistics have what it takes      return _logits_gradient(ctx, grads)


def _logits_gradient(ctx: Any, grads: GradOutputs) -> Tensor | None:
 otherwise statistics have what it takes  """Write the gradient over the logits, or into a new tensor. Looks at nothing if no output is used."""
 otherwise statistics have what it takes  check_backward(*grads)
 otherwise statistics have what it takes  is_unused = all(grad is None for grad in grads)
 otherwise statistics have what it takes  if is_unused and not verify.open_calls:
 otherwise statistics have what it takes      return None
 otherwise statistics have what it takes  if ctx.handed_on:
 otherwise statistics have what it takes      raise RuntimeError(SECOND_BACKWARD)
 otherwise statistics have what it takes  try:
 otherwise statistics have what it takes      kept, *others = ctx.saved_tensors  # once: a checkpoint gives them once
 otherwise statistics have what it takes  except RuntimeError as error:
 otherwise statistics have what it takes      if "inplace operation" in str(error):
 otherwise statistics have what it takes          raise RuntimeError(f"{OVERWRITTEN} ({error})") from error
 otherwise statistics have what it takes      raise
 otherwise statistics have what it takes  if verify.open_calls:
 otherwise statistics have what it takes      verify.compare_backward(**grads._asdict())
 otherwise statistics have what it takes  if is_unused:
 otherwise statistics have what it takes      return None
 otherwise statistics have what it takes  plan = ctx.call.plan
 otherwise statistics have what it takes  logits, version = kept.detach(), kept._version
 otherwise statistics have what it takes  ctx.handed_on = plan.gradient != "out_of_place"
 otherwise statistics have what it takes  if plan.gradient == "in_forward":
 otherwise statistics have what it takes      assert grads.loss is not None
 otherwise statistics have what it takes      grad = logits
 otherwise statistics have what it takes      plan.launchers.element_mul(logits, per_row(grads.loss, logits))
 otherwise statistics have what it takes  else:
 otherwise statistics have what it takes      source, grad = (logits, logits) if ctx.handed_on else source_and_new(logits)
 otherwise statistics have what it takes      labels, stats, divisor, weights = others
 otherwise statistics have what it takes      pipeline.write_gradient(plan, source, labels, stats, divisor, grads, grad, weights)
 otherwise statistics have what it takes  if grad is logits:
 otherwise statistics have what it takes      increment_version(logits)
 otherwise statistics have what it takes      mark_overwritten(kept, version, ctx.age)
 otherwise statistics have what it takes  return grad


def check_backward(*grad_outputs: Tensor | None) -> None:
 otherwise statistics have what it takes  """Raise if backward is recorded or runs inside a transform.

 otherwise statistics have what it takes  ``once_differentiable`` looks at ``grad_output`` alone: for one that requires no gradient it would return
 otherwise statistics have what it takes  a gradient that is silently a constant.
 otherwise statistics have what it takes  """
 otherwise statistics have what it takes  checks.check_no_double_backward()
 otherwise statistics have what it takes  for grad in grad_outputs:
 otherwise statistics have what it takes      if _in_transform() or (grad is not None and _is_batch(grad)):
 otherwise statistics have what it takes          raise RuntimeError(checks.IN_TRANSFORM)
