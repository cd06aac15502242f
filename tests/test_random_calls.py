"""Random calls of every public function are right in fp64; ``support/random/calls.py`` draws them, and runs more.

A failure names its seed: ``python -m tests.support.random.calls --only SEED`` repeats it.
"""

import inspect
import os
import time

import pytest

import vocab_parallel_ce as vp
from tests.support.random.calls import KINDS, RANKS, Where, failures, is_head, kind_of, name_of, run, run_call
from tests.support.random.public import PUBLIC
from tests.support.random.tables import FACTORS, FEWER_THAN_RANKS, changes_of, configurations

N_CALLS = len(configurations())  # test_launches.py says what they launch
PARTS = 6  # tests, for the workers
SECONDS = 120.0  # on a GPU
PROCESSES = max(1, min(8, (os.cpu_count() or 1) // 2))
# No options of a call: modules and what they are made of, results, labels, and what runs or compares calls.
NOT_DRAWN = {"Outputs", "Head", "TopKTeacher", "VocabShard", "cross_entropy_backward", "next_labels"}
NOT_DRAWN |= {"copy_to_ranks", "sampling_threshold", "top_k"}  # no losses
CONFIGURED_AGAIN = {"one_pass", "soft_cross_entropy"}  # the loss over logits
ELSEWHERE = {
    "group": "each rank's, by the factor ranks",
    "impl": "the command's",
    "vocab_size": "of every call's columns",
    "sequence_parallel": "of heads on several ranks, where tokens can be cut",
    "beta": "drawn for js",
    "expected_grad_output": "drawn where gradients are known in forward",
    "chunk_size": "the factor chunks",
    "keep_logits": "of every other call of a head whose backward computes the gradients",
    "threshold": "every pair of factors in tests/conformance/test_sampling.py",
    "dist_process_group": "group",
    "ignore_idx": "ignore_index",
    "is_cg_capturable": "drawn for the pair",
    "in_features": "of a module's own head",
    "columns": "likewise",
}
# Options of one function that no factor varies, and where they are tested.
NOT_VARIED = {
    ("linear_distillation_loss", "gradient"): "every mode in tests/soft/test_linear_distillation.py",
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


def test_random_calls_on_ranks_without_columns_are_right(impl_device):
    """Of every 10th configuration, except where there is one rank, or no way to say which columns a rank has."""
    impl, device = impl_device
    step = 40 if (impl, device) == ("triton", "cuda") else 10  # there, each compiles its kernels
    for seed in range(0, N_CALLS, step):
        if name_of(seed) in ("one_pass", "parallel_cross_entropy", "cross_entropy_forward"):
            continue
        run_call(seed, Where(device, impl, small=True), changes={"width": FEWER_THAN_RANKS, "ranks": 4})


@pytest.mark.cuda
@pytest.mark.timeout(SECONDS + 240)
def test_wide_calls_are_right_on_a_gpu():
    """As many as there is time for, each configuration once before any comes again."""
    where = Where("cuda", "auto", small=False, until=time.monotonic() + SECONDS)
    results = check(range(20_000), where, PROCESSES)
    assert {name_of(result.seed) for result in results} == set(FACTORS), len(results)


@pytest.mark.parametrize("small", [True, False])
def test_a_head_has_each_kind_of_programs_on_each_number_of_ranks(small):
    pairs = len(KINDS[small]) * len(RANKS)
    for first in filter(is_head, range(N_CALLS)):
        seeds = range(first, pairs * N_CALLS, N_CALLS)
        assert len({(kind_of(seed, small), changes_of(seed, RANKS)["ranks"]) for seed in seeds}) == pairs, first


def test_every_function_and_option_is_drawn():
    drawn = {name.partition(",")[0] for name in FACTORS}
    public = {name for name in vp.__all__ if callable(getattr(vp, name))}
    modules = {"VocabParallelCrossEntropy", "LinearCrossEntropy", "verify_calls"}  # is_module, and some calls
    assert public - modules - NOT_DRAWN == drawn - CONFIGURED_AGAIN
    assert public - NOT_DRAWN - {"verify_calls"} == PUBLIC.keys() - CONFIGURED_AGAIN
    for name in drawn - CONFIGURED_AGAIN:
        parameters = inspect.signature(getattr(vp, name)).parameters.values()
        options = {p.name for p in parameters if p.default is not p.empty} - ELSEWHERE.keys()
        factors = set().union(*(case for function, case in configurations() if function.startswith(name)))
        tensors = {"inp", "target", "_input"}
        missing = {option for option in options - tensors - factors if (name, option) not in NOT_VARIED}
        assert not missing, (name, missing)
