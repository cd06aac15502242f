"""Measures a training step of Megatron-Core's GPTModel: its own losses, and this project's over logits and linear.

    torchrun --nproc-per-node 2 scripts/bench_megatron.py --json results.json

Forward and backward of one model of random weights, in bf16. The providers take turns in every round.

First with tensor parallelism over all ranks, and ``forward`` given the loss mask or not. Then with data parallelism
over all ranks: each has its share of the tokens, Megatron's distributed optimizer takes a step too, and its collectives
overlap with the computation or do not. With tensor parallelism over all ranks there would be nothing to overlap, since
a group of data parallelism has one rank.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from bench_lib.clock import Ranks, joined_ranks, nothing
from bench_lib.documents import Result, new_document, parser_of, run
from bench_lib.measure import measured
from bench_lib.peers import engine
from bench_lib.providers import first_line
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from vocab_parallel_ce.integrations import megatron

example = import_module("examples.megatron_gpt")
SHAPE = {"columns": 128256, "width": 4096, "heads": 32, "length": 1024}
ROWS = (8, 24)  # of that length: 8192 and 24576 tokens
ENGINE = "Megatron-Core, TransformerEngine's loss"
PROVIDERS: dict[str, Any] = {
    "Megatron-Core": None,
    "Megatron-Core, fused": None,
    ENGINE: None,
    "vocab_parallel_ce, logits": {},
    "vocab_parallel_ce, linear": {"linear": True},
}


class Case(NamedTuple):
    """``rows`` are those of all ranks together."""

    rows: int
    gives_mask: bool = True
    overlaps: bool | None = None  # None: without data parallelism


TENSOR_PARALLEL = [Case(rows, gives_mask) for gives_mask in (True, False) for rows in ROWS]
DATA_PARALLEL = [Case(rows, overlaps=overlaps) for overlaps in (False, True) for rows in ROWS]


def name_of(case: Case, length: int) -> str:
    name = f"{case.rows * length} tokens"
    if case.overlaps is not None:
        return f"{name}, data parallel{', overlap' if case.overlaps else ''}"
    return name if case.gives_mask else f"{name}, forward without loss_mask"


def engine_loss(logits: Any, labels: Any, group: Any, is_cg_capturable: bool = False) -> Any:
    """As Megatron-Core calls TransformerEngine's loss, which it imports only with all of TransformerEngine."""
    return engine().parallel_cross_entropy(logits, labels, 0.0, False, group, -100, is_cg_capturable)


@contextlib.contextmanager
def provided(name: str, model: Any) -> Iterator[None]:
    model.config.cross_entropy_loss_fusion = name in ("Megatron-Core, fused", ENGINE)
    model.config.cross_entropy_fusion_impl = "te" if name == ENGINE else "native"
    options = PROVIDERS[name]
    module = import_module("megatron.core.models.common.language_module.language_module")
    with contextlib.ExitStack() as stack:
        if name == ENGINE:
            stack.enter_context(patch.object(module, "te_parallel_cross_entropy", engine_loss))
        if options is not None:
            stack.enter_context(megatron.installed(**options))
        yield


def data_parallel(model: Any, overlaps: bool) -> tuple[Any, Callable[[], object]]:
    """Return the model in Megatron's wrapper, and what ends a step: the gradients' sum, and a step of rate 0."""
    overlap = {"overlap_param_gather": overlaps, "use_distributed_optimizer": True}
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlaps, **overlap)
    wrapped = DistributedDataParallel(model.config, config, model)
    wanted = OptimizerConfig(optimizer="adam", lr=0.0, bf16=True, params_dtype=torch.bfloat16, **overlap)
    optimizer = get_megatron_optimizer(wanted, [wrapped], use_gloo_process_groups=False)

    def end() -> None:
        wrapped.finish_grad_sync()
        optimizer.step()

    return wrapped, end


def measure(model: Any, case: Case, shape: dict[str, Any], ranks: Ranks, rounds: int) -> list[Result]:
    end: Callable[[], object] = nothing
    rows, seed, trained = case.rows, 0, model
    if case.overlaps is not None:
        rows, seed = rows // ranks.size, ranks.rank
        trained, end = data_parallel(model, case.overlaps)
    inputs = example.batch(shape["columns"], (rows, shape["length"]), ranks.device, seed=seed)
    mask = inputs["loss_mask"]
    given = {name: value for name, value in inputs.items() if case.gives_mask or name != "loss_mask"}

    def step() -> torch.Tensor:
        loss = example.loss_of(trained, given, mask)
        loss.backward()
        end()
        return loss.detach()

    def forget() -> None:
        model.zero_grad(set_to_none=True)
        if trained is not model:
            trained.zero_grad_buffer()

    contexts = {name: partial(provided, name, model) for name in PROVIDERS}
    return measured(name_of(case, shape["length"]), contexts, step, forget, ranks, rounds)


def main() -> None:
    words = parser_of(__doc__).parse_args()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron asks for
    modules = {"megatron-core": "megatron.core"}
    with joined_ranks() as ranks:
        parallel_state.initialize_model_parallel(ranks.size)

        def measure_case(case: Case) -> list[Result]:
            size = ranks.size if case.overlaps is None else 1
            if parallel_state.get_tensor_model_parallel_world_size() != size:
                parallel_state.destroy_model_parallel()
                parallel_state.initialize_model_parallel(size)
            return measure(example.build(**SHAPE), case, SHAPE, ranks, words.rounds)

        absent = {}
        try:
            engine()
            modules["transformer-engine"] = "transformer_engine"
        except Exception as error:  # another project's import may raise anything; it is reported
            absent[ENGINE] = f"cannot be imported: {type(error).__name__}: {first_line(error)}"
            del PROVIDERS[ENGINE]
        document = new_document("megatron", words.rounds, modules) | {"shape": SHAPE, "absent": absent}
        run(document, [*TENSOR_PARALLEL, *DATA_PARALLEL], measure_case, ranks, words.json)
        parallel_state.destroy_model_parallel()


if __name__ == "__main__":
    main()
