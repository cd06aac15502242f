"""Random calls of every public function are right in fp64; ``support/random_calls.py`` draws them, and runs more.

A failure names its seed: ``python -m tests.support.random_calls --only SEED`` repeats it.
"""

import inspect
import os
import time

import pytest

import vocab_parallel_ce as vp
from tests.support.random_calls import Where, failures, name_of, run
from tests.support.random_public import PUBLIC
from tests.support.random_tables import FACTORS, configurations

N_CALLS = len(configurations())  # test_launches.py says what they launch
PARTS = 6  # tests, for the workers
SECONDS = 120.0  # on a GPU
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))
# No options of a call: modules and what they are made of, results, and what runs or compares calls.
NOT_DRAWN = {"Outputs", "Head", "TopKTeacher", "VocabShard", "cross_entropy_backward"}
ELSEWHERE = {
    "group": "each rank's, by the factor ranks",
    "impl": "the command's",
    "shard": "of every call's columns",
    "vocab_size": "likewise",
    "sequence_parallel": "of heads on several ranks, where tokens can be cut",
    "sequence_dim": "likewise",
    "beta": "drawn for js",
    "memory_budget": "the factor chunks",
    "chunk_size": "likewise",
    "expected_grad_output": "drawn where gradients are in forward and the reduction is none",
    "dist_process_group": "group",
    "ignore_idx": "ignore_index",
    "is_cg_capturable": "drawn for the pair",
    "in_features": "of a module's own head",
    "columns": "likewise",
}


def check(seeds, where, processes=1):
    results = run(seeds, where, processes)
    assert not failures(results), failures(results)
    return results


@pytest.mark.quick
@pytest.mark.interpreted(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_random_calls_are_right(impl_device, part):
    impl, device = impl_device
    n_calls = 12 if (impl, device) == ("triton", "cuda") else N_CALLS  # there, each compiles its kernels
    seeds = range(part, n_calls, PARTS)
    assert len(check(seeds, Where(device, impl, small=True))) == len(seeds)


@pytest.mark.cuda
@pytest.mark.timeout(SECONDS + 240)
def test_wide_calls_are_right_on_a_gpu():
    """As many as there is time for, each configuration once before any comes again."""
    where = Where("cuda", "auto", small=False, until=time.monotonic() + SECONDS)
    results = check(range(20_000), where, PROCESSES)
    assert {name_of(result.seed) for result in results} == set(FACTORS), len(results)


def test_every_function_and_option_is_drawn():
    drawn = {name.partition(",")[0] for name in FACTORS}
    public = {name for name in vp.__all__ if callable(getattr(vp, name))}
    modules = {"VocabParallelCrossEntropy", "LinearCrossEntropy", "verify_calls"}  # is_module, and some calls
    assert public - modules - NOT_DRAWN == drawn - {"one_pass"}
    assert public - NOT_DRAWN - {"verify_calls"} == PUBLIC.keys()
    for name in drawn - {"one_pass"}:
        parameters = inspect.signature(getattr(vp, name)).parameters.values()
        options = {p.name for p in parameters if p.default is not p.empty} - ELSEWHERE.keys()
        factors = set().union(*(case for function, case in configurations() if function.startswith(name)))
        beside = {"student_bias": "bias", "teacher_bias": "bias", "teacher_ids": "k", "teacher_log_probs": "k"}
        given = {"inp", "target", "_input", "teacher_logits", "teacher_hidden", "teacher_weight"}
        missing = {beside.get(option, option) for option in options - given} - factors
        assert not missing, (name, missing)
