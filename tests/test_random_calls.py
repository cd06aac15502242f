"""Random calls of every public function are right in fp64; ``support/random/calls.py`` draws them.

The last number in a test's name is the seed, which decides everything. ``VPCE_RANDOM_CASES`` is the number of calls,
and ``VPCE_RANDOM_FIRST`` the first seed.
"""

import inspect

import pytest
import torch

import vocab_parallel_ce as vp
from tests.support.random.calls import KINDS, RANKS, Where, is_head, kind_of, name_of, run_call, seeds
from tests.support.random.public import PUBLIC
from tests.support.random.tables import FACTORS, FEWER_THAN_RANKS, changes_of, configurations
from vocab_parallel_ce.options import HEAD_FIELDS

pytestmark = pytest.mark.filterwarnings("ignore")

N_CALLS = len(configurations())  # test_launches.py says what they launch
# On a GPU, each configuration has each kind of programs.
SEEDS = seeds(N_CALLS * (len(KINDS[False]) if torch.cuda.is_available() else 1))
# No options of a call: modules and what they are made of, results, labels, and what runs or compares calls.
NOT_DRAWN = {"Outputs", "Head", "HeadOptions", "VocabShard", "cross_entropy_backward", "next_labels"}
NOT_DRAWN |= {"TopKTeacher"}  # every pair of its options in tests/soft/test_topk.py
NOT_DRAWN |= {"copy_to_ranks", "logits_at", "sampling_threshold", "top_k"}  # no losses
NOT_DRAWN |= {"linear_objective", "Teacher"}  # some calls of linear_token_log_probs
CONFIGURED_AGAIN = {"one_pass"}  # the loss over logits
ELSEWHERE = {
    "group": "each rank's, by the factor ranks",
    "impl": "the command's",
    "vocab_size": "of every call's columns",
    "sequence_parallel": "of heads on several ranks, where tokens can be cut",
    "own_tokens": "tests/ranks/test_own_tokens.py",
    "average": "with own_tokens",
    "max_tokens": "with own_tokens",
    "beta": "drawn for js",
    "expected_grad_output": "drawn where gradients are known in forward",
    "chunk_size": "the factor chunks",
    "keep_logits": "of every other call of a head whose backward computes the gradients",
    "dist_process_group": "group",
    "ignore_idx": "ignore_index",
    "is_cg_capturable": "drawn for the pair",
    "in_features": "of a module's own head",
    "columns": "likewise",
}
# Options of one function that no factor varies, and where they are tested.
NOT_VARIED = {
    ("linear_distillation_loss", "gradient"): "every mode in tests/soft/test_linear_distillation.py",
    ("linear_token_log_probs", "gradient"): "in backward alone",
}


@pytest.mark.quick(N_CALLS // 6)
@pytest.mark.interpreted(len(SEEDS))
@pytest.mark.parametrize("seed", SEEDS)
def test_random_calls_are_right(impl_device, seed):
    """Compiled kernels have wide rows, too."""
    impl, device = impl_device
    is_compiled = (impl, device) == ("triton", "cuda")
    run_call(seed, Where(device, "auto" if is_compiled else impl, small=not is_compiled))


def test_random_calls_on_ranks_without_columns_are_right(impl_device):
    """Of every 10th configuration, except where there is one rank, or no way to say which columns a rank has."""
    impl, device = impl_device
    step = 40 if (impl, device) == ("triton", "cuda") else 10  # there, each compiles its kernels
    for seed in range(0, N_CALLS, step):
        if name_of(seed) in ("one_pass", "parallel_cross_entropy", "cross_entropy_forward"):
            continue
        run_call(seed, Where(device, impl, small=True), changes={"width": FEWER_THAN_RANKS, "ranks": 4})


def test_means_of_class_weights_on_ranks_are_right(impl_device):
    """What divides them is of all ranks. No pair of values asks for it."""
    impl, device = impl_device
    seeds = [seed for seed in range(N_CALLS) if name_of(seed) == "vocab_parallel_cross_entropy"][:8]
    for seed in seeds:
        weighting = {"class_weight": ("whole", "columns")[seed % 2], "label_smoothing": (0.0, 0.1)[seed // 2 % 2]}
        changes = {"reduction": "mean", "num_items": None, "outputs": (), "ranks": 2 + seed % 2, **weighting}
        run_call(seed, Where(device, impl, small=True), changes=changes)


@pytest.mark.parametrize("small", [True, False])
def test_a_head_has_each_kind_of_programs_on_each_number_of_ranks(small):
    pairs = len(KINDS[small]) * len(RANKS)
    for first in filter(is_head, range(N_CALLS)):
        rounds = range(first, pairs * N_CALLS, N_CALLS)
        assert len({(kind_of(seed, small), changes_of(seed, RANKS)["ranks"]) for seed in rounds}) == pairs, first


def test_every_function_and_option_is_drawn():
    drawn = FACTORS.keys()
    public = {name for name in vp.__all__ if callable(getattr(vp, name))}
    modules = {"VocabParallelCrossEntropy", "LinearCrossEntropy", "verify_calls"}  # is_module, and some calls
    assert public - modules - NOT_DRAWN == drawn - CONFIGURED_AGAIN
    assert public - NOT_DRAWN - {"verify_calls"} == PUBLIC.keys() - CONFIGURED_AGAIN
    for name in drawn - CONFIGURED_AGAIN:
        parameters = inspect.signature(getattr(vp, name)).parameters.values()
        options = {p.name for p in parameters if p.default is not p.empty}
        options = (options - {"options"} | {*HEAD_FIELDS} if "options" in options else options) - ELSEWHERE.keys()
        factors = set().union(*(case for function, case in configurations() if function.startswith(name)))
        tensors = {"inp", "target", "_input"}
        missing = {option for option in options - tensors - factors if (name, option) not in NOT_VARIED}
        assert not missing, (name, missing)
