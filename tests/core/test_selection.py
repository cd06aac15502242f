"""Which implementation runs, and why: every condition, of machines that need not be there."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from tests.support.host.fresh import fresh_python
from vocab_parallel_ce import plan, selection, spec
from vocab_parallel_ce.blocks import ONE_PASS, ONE_PASS_SMOOTHING, fewest_rows_of_one_pass, units_of
from vocab_parallel_ce.environment import SAME_BITS
from vocab_parallel_ce.losses.labels import LABELS
from vocab_parallel_ce.options import Settings
from vocab_parallel_ce.selection import ONE_PASS_SHARED_MEMORY, obstacle_of_call, select
from vocab_parallel_ce.shard import VocabShard

pytestmark = pytest.mark.reference

WIDTH = 16384
WHOLE = VocabShard(0, WIDTH, WIDTH)
KEY = plan.PlanKey(torch.bfloat16, WIDTH, torch.device("cuda", 0), 0, 1, "in_forward", is_aligned=True)
OTHERS = ("mps", "xpu", "npu", "privateuseone")  # devices without kernels, which installing triton does not change

# What keeps one launch from doing a call on a GPU: (arguments of `obstacle`, what is said of it).
OBSTACLES = {
    "several ranks": ({"n_ranks": 2}, "one rank, got 2"),
    "unreduced": ({"gradient": "in_backward"}, "gradient 'in_forward', got 'in_backward'"),
    "out of place": ({"gradient": "out_of_place"}, "gradient 'in_forward', got 'out_of_place'"),
    "options": (
        {"options": spec.LossOptions(entropy=True, mean_logit=True)},
        "a loss that it computes, got entropy, mean_logit",
    ),
    "padding": ({"shard": VocabShard(0, WIDTH, WIDTH - 8)}, "logits without padded columns"),
    "off a boundary": ({"is_aligned": False}, "logits in memory that begins at 16 bytes"),
    "width": ({"n_columns": 2048}, "rows of a width in its table of measurements"),
}
SMALL = f"{ONE_PASS_SHARED_MEMORY} bytes of shared memory a program, got {ONE_PASS_SHARED_MEMORY - 1}"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which ``one_pass`` can run: returns its properties, and the modules that are missing, for changes."""
    properties, missing = SimpleNamespace(shared_memory_per_block_optin=ONE_PASS_SHARED_MEMORY), set()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(selection, "is_installed", lambda module: module not in missing)
    monkeypatch.setattr(selection, "triton_state", lambda: "compiler")
    selection.obstacle_of_gpu.cache_clear()
    yield properties, missing
    selection.obstacle_of_gpu.cache_clear()


def obstacle(shard=WHOLE, options=spec.PLAIN, **changes):
    return obstacle_of_call(LABELS, options, shard, KEY._replace(**changes))


def assert_leaves_the_call_to_triton(found, said):
    prefix, remedy = "impl: 'one_pass' needs ", "; 'auto' chooses what can run"
    with pytest.raises(ValueError, match=f"^{prefix}{said}.*{remedy}$"):
        select("cuda", "one_pass", found)
    assert select("cuda", "auto", found) == ("triton", f"a GPU, and triton is installed; one_pass needs {found}")


@pytest.mark.parametrize(
    ("device", "requested", "triton", "expected"),
    [
        ("cuda", "auto", "compiler", "triton"),
        ("cuda", "triton", "compiler", "triton"),
        ("cuda", "reference", "absent", "reference"),
        ("cpu", "auto", "compiler", "reference"),
        ("cpu", "auto", "interpreter", "reference"),
        ("cpu", "auto", "absent", "reference"),
        ("cpu", "auto", "too old", "reference"),
        ("cpu", "triton", "interpreter", "triton"),
        ("meta", "auto", "compiler", "reference"),
        *((device, "auto", "compiler", "reference") for device in OTHERS),
        *((device, "auto", "absent", "reference") for device in OTHERS),
        ("mps", "reference", "absent", "reference"),
    ],
)
def test_selection_without_a_call_names_what_runs_and_why(monkeypatch, device, requested, triton, expected):
    """As the scaling of a stored gradient and the command line ask."""
    monkeypatch.setattr(selection, "triton_state", lambda: triton)
    name, reason = select(device, requested)
    assert name == expected and reason


@pytest.mark.parametrize(
    ("device", "requested", "triton", "reason"),
    [
        ("cuda", "auto", "absent", "not installed"),
        ("cuda", "one_pass", "absent", "not installed"),
        ("cuda", "auto", "too old", "needs the package triton, 3.6 or newer, got .*; upgrade it"),
        ("cpu", "triton", "too old", "needs the package triton, 3.6 or newer, got .*; upgrade it"),
        ("cpu", "triton", "compiler", "TRITON_INTERPRET=1"),
        *((device, "triton", "compiler", f"got tensors on {device}, .*use impl='auto'") for device in OTHERS),
        *((device, "one_pass", "absent", f"got tensors on {device}, .*use impl='auto'") for device in OTHERS),
        ("cpu", "one_pass", "compiler", "'one_pass' needs a GPU and triton's compiler, got cpu"),
        ("cuda", "one_pass", "interpreter", "'one_pass' needs a GPU .* got cuda and triton's interpreter"),
        ("cuda", "one_pass", "compiler", "'one_pass' needs a call to decide on"),
        ("cuda", "symmetric", "compiler", "expected one of 'auto', 'reference', 'triton', 'one_pass', got"),
    ],
)
def test_what_cannot_run_raises_with_the_unmet_condition(monkeypatch, device, requested, triton, reason):
    monkeypatch.setattr(selection, "triton_state", lambda: triton)
    with pytest.raises(ValueError, match=f"^impl: .*{reason}"):
        select(device, requested)


@pytest.mark.parametrize("name", OBSTACLES)
def test_an_obstacle_leaves_the_call_to_triton_and_is_told(gpu, name):
    arguments, said = OBSTACLES[name]
    assert_leaves_the_call_to_triton(obstacle(**arguments), said)
    on_the_cpu = obstacle(**arguments, device=torch.device("cpu"))
    assert on_the_cpu == obstacle(**arguments)


@pytest.mark.parametrize("lacks", ("another maker", "old triton", "small GPU"))
def test_a_gpu_that_one_launch_does_not_suit_leaves_all_calls_to_triton(monkeypatch, gpu, lacks):
    properties, missing = gpu
    if lacks == "another maker":
        monkeypatch.setattr(torch.version, "hip", "6.4")
    elif lacks == "old triton":
        missing.add("triton.experimental.gluon.language.nvidia.ampere")
    else:
        properties.shared_memory_per_block_optin -= 1
    said = {"another maker": "an NVIDIA GPU, got another maker's", "small GPU": SMALL}
    for arguments in ({}, {"n_ranks": 2}):
        assert_leaves_the_call_to_triton(obstacle(**arguments), said.get(lacks, "a triton with Gluon's asynchronous"))


def test_a_padded_shard_is_not_for_one_pass(monkeypatch, gpu):
    """It would read the padding, whatever that holds."""
    monkeypatch.setattr(plan, "kernels_of", lambda name: (None, name))
    names = [
        plan.make_plan(LABELS, Settings(vocab_size=size), KEY).launchers.one_pass for size in (None, WIDTH, WIDTH - 8)
    ]
    assert names == ["one_pass", "one_pass", "triton"]


def test_a_loss_per_row_has_the_bits_of_one_implementation(monkeypatch, gpu):
    """Whatever the number of rows; of a reduced loss the faster one runs, unless it is named."""
    monkeypatch.setattr(plan, "kernels_of", lambda name: (None, name))
    few = fewest_rows_of_one_pass(2 * WIDTH)
    for impl, expected in {"auto": [0, few, few], "one_pass": [0, 0, 0]}.items():
        made = [plan.make_plan(LABELS, Settings(reduction=r, impl=impl), KEY) for r in ("none", "sum", "mean")]
        assert [each.launchers.one_pass for each in made] == ["one_pass"] * 3
        assert few > 1 and [each.launchers.one_pass_rows for each in made] == expected


def test_one_rank_with_the_bits_of_several_does_not_run_one_pass(monkeypatch, gpu):
    """It walks a row in an order of its own, and a loss per row would be one_pass's from the first row on."""
    monkeypatch.setenv(SAME_BITS, "1")
    units_of.cache_clear()
    assert_leaves_the_call_to_triton(obstacle(), "a row in the order of one rank, got the bits of several")
    assert obstacle(VocabShard(0, WIDTH + 4, WIDTH + 4), n_columns=WIDTH + 4) is None  # no whole units
    units_of.cache_clear()


def test_one_pass_runs_where_nothing_stands_in_its_way(gpu):
    properties, _ = gpu
    properties.shared_memory_per_block_optin = 10**6
    assert obstacle() is None
    assert select("cuda", "auto", None) == ("one_pass", "one read and one write")
    for name in ("one_pass", "triton", "reference"):
        assert select("cuda", name, None) == (name, "asked for")


def test_options_that_one_pass_lacks_are_named_and_off_by_default():
    on = spec.LossOptions(-100, 0.1, 0.1, 0.5, lse=True)
    assert LABELS.beyond_one_pass(spec.PLAIN) == LABELS.beyond_one_pass(on) == ()
    assert LABELS.beyond_one_pass(spec.LossOptions(class_weight=True)) == ()
    outputs = ("entropy", "sum_sq_probs", "mean_logit", "predictions")
    on = on._replace(**dict.fromkeys(outputs, True), softcap=30.0, class_weight=True)
    assert LABELS.beyond_one_pass(on) == (*outputs, "softcap", "label_smoothing with class_weight")


def test_smoothing_has_fewer_widths():
    smoothing, between = spec.LossOptions(smoothing=0.1), ONE_PASS_SMOOTHING[0][1] + 16
    assert LABELS.one_pass_config(spec.PLAIN, between) and LABELS.one_pass_config(smoothing, between) is None
    for options, table in ((spec.PLAIN, ONE_PASS), (smoothing, ONE_PASS_SMOOTHING)):
        most = table[-1][1]
        assert LABELS.one_pass_config(options, most) and LABELS.one_pass_config(options, most + 16) is None


def test_a_triton_without_gluon_is_no_error(monkeypatch):
    """Of an old Triton the parent packages are missing, of a newer one the module alone."""

    def no_parent(name):
        raise ModuleNotFoundError(name)

    for find_spec in (no_parent, lambda name: None):
        monkeypatch.setattr(selection.importlib.util, "find_spec", find_spec)
        assert selection.is_installed.__wrapped__("triton.experimental.gluon.language.nvidia.ampere") is False


def test_every_function_runs_on_a_device_without_kernels_and_without_float64():
    """Forward and backward stay on it: MPS has no float64, and a tensor on the CPU would not mix."""
    backend_registration = pytest.importorskip("torch.utils.backend_registration")
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch has no spare backend without C++")
    result = fresh_python("-m", "tests.support.host.other_device")
    assert result.returncode == 0, result.stderr[-2000:]
    report = json.loads(result.stdout)
    assert len(report) == 40
    dtypes = ("bool", "int32", "int64", "float32", "bfloat16")
    expected = {f"{device}torch.{dtype}" for device in ("npu ", "") for dtype in dtypes}
    for name, found in report.items():
        assert {"npu torch.float32"} <= set(found["kinds"]) <= expected, (name, found)
        assert found["triton"].startswith("ValueError: impl: 'triton' needs "), (name, found)
        assert "got tensors on npu, for which there are no kernels" in found["triton"], (name, found)
