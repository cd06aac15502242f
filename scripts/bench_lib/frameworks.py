"""What frameworks call for losses and log-probabilities, without and with this project, and what torch.compile makes.

Providers as in ``providers``, with the same letters in the lambdas. A framework is measured if it can be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench_lib.calls import ENTROPY, JS, MOST_WEIGHT, OBJECTIVE, REVERSE, WITHOUT_ENTROPY, Row, cispo
from bench_lib.cases import OURS, SEQUENCE, Inputs
from bench_lib.peers import PARALLEL, LossOf, Step, in_loss_parallel, loss_parallel, of_dtensor
from bench_lib.providers import OUR_PACKAGE, Provider, through_autograd

TRL_COLUMNS = 32768  # of a chunk of the vocabulary, as TRL's trainers ask for
LOG_PROBS, BOTH = Row("log_probs", {}), Row("log_probs", {"outputs": ENTROPY})
SUM, SUM_OF_LOG_PROBS = Row("cross_entropy", {"reduction": "sum"}), Row("log_probs", {"reduction": "sum"})
MEAN = Row("cross_entropy", {"reduction": "mean"})


def both(name: str, loss_from: Callable[[Any], LossOf], integration: str, module: str, **fields: Any) -> list[Provider]:
    """A framework's own function, without and with ``install()`` of this project's integration."""

    def installed() -> Any:
        return importlib.import_module(f"{OURS}.integrations.{integration}").installed()

    distribution = integration.replace("_", "-")
    own = Provider(name, loss_from, module, distribution, **fields)
    return [own, Provider(f"{name}, installed", loss_from, module, distribution, context=installed, **fields)]


def _openrlhf(utils: Any) -> LossOf:
    def log_probs(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> tuple[Tensor, Tensor]:
        """As its actor: in fp32, the entropy first."""
        wide = logits[None].float()
        entropy = utils.compute_entropy(wide)
        return utils.log_probs_from_logits(wide, labels[None])[0], entropy[0]

    return log_probs


def _trl(utils: Any) -> LossOf:
    given = 1.0, TRL_COLUMNS, None, 1.0, ("log_probs", "entropy")
    return lambda h, w, y, r, g: utils._ChunkedLogProbFunction.apply(h, w, None, y, *given)[:2]


def _verl_ppo(verl: Any) -> LossOf:
    head = verl.FusedLinearForPPO()
    return lambda h, w, y, r, g: tuple(head(h, w, y))


def _verl_head(verl: Any) -> LossOf:
    return lambda h, w, y, r, g: tuple(verl.linear_cross_entropy(h, w, y))


def _verl_logits(verl: Any) -> LossOf:
    return lambda x, y, r, g: verl.logprobs_from_logits(x[None], y[None])[0]


_of_head: dict[str, Any] = {"takes": "head", "returns": BOTH}
RL_PROVIDERS = (
    *both("verl FusedLinearForPPO", _verl_ppo, "verl", "verl.utils.experimental.torch_functional", **_of_head),
    *both("verl linear_cross_entropy", _verl_head, "verl", "verl.utils.kernel.linear_cross_entropy", **_of_head),
    *both("verl logits", _verl_logits, "verl", "verl.utils.torch_functional", returns=LOG_PROBS),
    *both("OpenRLHF logits", _openrlhf, "openrlhf", "openrlhf.models.utils", returns=BOTH),
    *both("TRL fused head", _trl, "trl", "trl.trainer.utils", **_of_head),
)


def _dtensor(ours: Any, **options: Any) -> LossOf:
    dtensor = importlib.import_module(f"{OURS}.integrations.dtensor")
    return of_dtensor(lambda x, y, r: dtensor.cross_entropy(x, y, reduction="sum", **options))


def _titan(titan: Any) -> Any:
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend("partial_dtensor")
    return titan


def _nemo(nemo: Any) -> LossOf:
    """Of every token: NeMo-RL's functions around it shift the labels, and have one token less."""

    def log_probs(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        start = group.rank() * logits.shape[-1]
        given = logits[None], labels[None], start, start + logits.shape[-1], group, False
        return nemo.DistributedLogprob.apply(*given).sum()

    return log_probs


@cache
def _verl_on_ranks() -> None:
    state: Any = importlib.import_module("megatron.core.parallel_state")
    state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())


def _verl(functions: Any) -> LossOf:
    _verl_on_ranks()
    return lambda x, y, r, g: functions.vocab_parallel_log_probs_from_logits(x[None], y[None]).sum()


def _verl_with_entropy(functions: Any) -> LossOf:
    _verl_on_ranks()

    def log_probs(logits: Tensor, labels: Tensor, reduction: str, group: Any) -> tuple[Tensor, Tensor]:
        """As verl's engine: log-probabilities from a copy."""
        kept = logits[None].clone()
        entropy = functions.vocab_parallel_entropy(logits[None])
        return functions.vocab_parallel_log_probs_from_logits(kept, labels[None])[0], entropy[0]

    return log_probs


def _titan_loss(titan: Any) -> LossOf:
    return of_dtensor(lambda x, y, r: _titan(titan).cross_entropy_loss(x, y))


def _titan_log_probs(titan: Any) -> LossOf:
    return of_dtensor(lambda x, y, r: _titan(titan).compute_logprobs(x, y).sum())


TITAN, NEMO = "torchtitan.components.loss", "nemo_rl.distributed.model_utils"
VERL_RANKS = "verl.utils.megatron.tensor_parallel"
_torch = partial(Provider, module=PARALLEL, distribution="torch", context=in_loss_parallel, returns=SUM)
_ours = partial(Provider, module=OURS, distribution=OUR_PACKAGE, returns=SUM)
FRAMEWORK_PROVIDERS = (
    _torch("torch loss_parallel (logits.float())", loss_parallel),
    _torch("torch loss_parallel (16-bit logits)", partial(loss_parallel, dtype=torch.bfloat16)),
    _ours("DTensor loss", _dtensor),
    _ours("DTensor loss, in_backward", partial(_dtensor, gradient="in_backward")),
    *both("torchtitan loss", _titan_loss, "torchtitan", TITAN, returns=SUM),
    *both("torchtitan log-probs", _titan_log_probs, "torchtitan", TITAN, returns=SUM_OF_LOG_PROBS),
    *both("NeMo-RL log-probs", _nemo, "nemo_rl", NEMO, returns=SUM_OF_LOG_PROBS),
    *both("verl log-probs", _verl, "verl", VERL_RANKS, returns=SUM_OF_LOG_PROBS),
    *both("verl log-probs and entropy", _verl_with_entropy, "verl", VERL_RANKS, returns=BOTH),
)


def _pytorch_head(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels)


def _over_logits(ours: Any, gradient: str = "auto") -> LossOf:
    return lambda h, w, y: ours.vocab_parallel_cross_entropy(h @ w.t(), y, gradient=gradient)


def _mean(loss_of: Callable[..., Tensor]) -> LossOf:
    def marked(hidden: Tensor, weight: Tensor, labels: Tensor, reduction: str, group: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return loss_of(hidden, weight, labels)

    return marked


_compile = partial(torch.compile, fullgraph=True)
_of_torch = partial(Provider, module="torch", distribution="torch", takes="head", returns=MEAN, of_several=False)
_of_ours = partial(_of_torch, module=OURS, distribution=OUR_PACKAGE)
COMPILE_PROVIDERS = (
    _of_torch("PyTorch, compiled (logits.float())", lambda m: _mean(_compile(_pytorch_head))),
    _of_ours(OURS, lambda m: _mean(_over_logits(m))),
    _of_ours(f"{OURS}, out_of_place", lambda m: _mean(_over_logits(m, "out_of_place"))),
    _of_ours(f"{OURS}, compiled", lambda m: _mean(_compile(_over_logits(m)))),
    _of_ours(f"{OURS}, reduce-overhead", lambda m: _mean(_compile(_over_logits(m), mode="reduce-overhead"))),
    _of_ours(f"{OURS}, linear", lambda m: _mean(m.linear_cross_entropy)),
    _of_ours(f"{OURS}, linear, compiled", lambda m: _mean(_compile(m.linear_cross_entropy))),
)


def _trl_objective(utils: Any) -> Step:
    log_probs_of = _trl(utils)

    def loss_of(inputs: Inputs, reduction: str, group: Any) -> Tensor:
        log_probs, entropy = log_probs_of(*inputs.tensors, inputs.labels, reduction, group)
        return cispo(log_probs, inputs.alongside("advantage"), inputs.alongside("old"), entropy).mean()

    return through_autograd(loss_of)


def _liger_objective(losses: Any) -> Step:
    """Its head of GRPO and the like, which takes an advantage for each sequence and knows no entropies."""
    head = losses.LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="cispo", epsilon_high=MOST_WEIGHT)

    def loss_of(inputs: Inputs, reduction: str, group: Any) -> Any:
        hidden, weight = inputs.tensors
        labels, old = (each.view(-1, SEQUENCE) for each in (inputs.labels, inputs.alongside("old")))
        advantages = inputs.alongside("advantage").view(-1, SEQUENCE)[:, 0]
        of_sequences = hidden.view(*labels.shape, -1), weight, labels, torch.ones_like(labels), advantages
        return head(*of_sequences, old_per_token_logps=old)[0]

    return through_autograd(loss_of)


def _trl_teacher(trainer: Any, beta: float) -> Step:
    def loss_of(inputs: Inputs, reduction: str, group: Any) -> Tensor:
        (hidden, weight), (of_teacher, teacher_weight) = inputs.tensors, inputs.alongside("teacher")
        mask = torch.ones_like(inputs.labels)[None]
        heads = weight, teacher_weight, mask, beta
        loss: Tensor = trainer._chunked_divergence_loss(hidden[None], of_teacher[None], *heads)[0]
        return loss

    return through_autograd(loss_of)


LIGER = "liger_kernel.chunked_loss"
_objective = partial(Provider, takes="head", is_step=True, of_several=False, returns=OBJECTIVE)
OBJECTIVE_PROVIDERS = (
    _objective("TRL log-probs and objective", _trl_objective, "trl.trainer.utils", "trl"),
    _objective("liger-kernel (without entropy)", _liger_objective, LIGER, "liger-kernel", returns=WITHOUT_ENTROPY),
)
_of_trl = partial(_objective, module="trl.trainer.distillation_trainer", distribution="trl")
TEACHER_PROVIDERS = (
    _of_trl("TRL, reverse", partial(_trl_teacher, beta=1.0), returns=REVERSE),
    _of_trl("TRL, js", partial(_trl_teacher, beta=0.5), returns=JS),
)
