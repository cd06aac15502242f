"""Arguments of options, and which launches take the private path; these tests need no GPU."""

import ast
import inspect
import textwrap
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton

from vocab_parallel_ce.kernels import launch as launching
from vocab_parallel_ce.kernels.launch import TESTED_TRITON, Launch, launch_path, option_arguments
from vocab_parallel_ce.kernels.primitives import SMALL_CAP
from vocab_parallel_ce.spec import LossOptions

pytestmark = pytest.mark.reference

STREAM = 77


N_FLAGS = len(LossOptions._fields) - 7  # the last two are of rows, and no flags


def test_an_option_that_is_off_is_none():
    """None is a constant of a compiled kernel. 0 and 1 as floats are not: the option's code would stay."""
    off = option_arguments(LossOptions(7, 0.0, 0.0, 1.0, None))
    assert off == LossOptions(7, *[None] * (len(LossOptions._fields) - 1)) and off.ignore_index == 7
    every = LossOptions(-100, 0.1, 1e-4, 0.5, 30.0, *[True] * N_FLAGS)
    assert option_arguments(every) == every._replace(softcap=(30.0,))
    # A cap that no fp32 logit reaches.
    assert option_arguments(LossOptions(logit_scale=1e-3, softcap=3e38)).softcap == (3e38, 3e38)
    assert option_arguments(LossOptions(logit_scale=1e-30, softcap=1e30)).softcap is None


def test_numbers_have_the_types_that_launches_are_compiled_for():
    """A float would be a new argument type, and True another kernel than 1. A softcap's length says how large it is."""
    for cap, n in ((1.0, 1), (SMALL_CAP, 1), (SMALL_CAP + 1, 2)):
        arguments = option_arguments(LossOptions(-100, 1.0, 1.0, 2.0, cap, *[True] * N_FLAGS))
        assert [type(argument) for argument in arguments[:-2]] == [int, *[float] * 3, tuple, *[int] * N_FLAGS]
        assert arguments.softcap == (cap,) * n


IS_3_6 = triton.__version__.startswith("3.6.")


def parted(arguments):
    """Return what a function in C gets as the launch's arguments and the kernel's, which are one from Triton 3.7 on."""
    return (arguments[:13], arguments[13:]) if IS_3_6 else (arguments[:-1], tuple(arguments[-1]))


class Compiled:
    """What a launch of Triton's returns; ``record`` gets what its function in C would get."""

    def __init__(self, variant, record):
        from triton.backends.nvidia.driver import CudaLauncher

        self.run = CudaLauncher.__new__(CudaLauncher)
        self.run.launch = lambda *arguments: record(("private", variant, *parted(arguments)))
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, False
        self.run.gsan_enabled, self.run.num_ctas = False, 1
        for size in ("global_scratch_size", "profile_scratch_size", "global_scratch_align", "profile_scratch_align"):
            setattr(self.run, size, 0)
        if not IS_3_6:
            self.run.arg_annotations, self.run.kernel_signature = f"types {variant}", f"signature {variant}"
        self.function, self.packed_metadata = f"function {variant}", f"metadata {variant}"


class Kernel:
    """A kernel that records its launches, and those of its compiled variants.

    A record is ``("public", grid, arguments, options)`` or
    ``("private", variant, the launch's arguments, the kernel's)``.
    """

    def __init__(self):
        self.calls, self.variants, self.edit = [], 0, lambda run: None

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append(("public", grid, arguments, options))
            variant, self.variants = self.variants, self.variants + 1
            compiled = Compiled(variant, self.calls.append)
            self.edit(compiled.run)
            self.compiled = weakref.ref(compiled)
            return compiled

        return run

    @property
    def kinds(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def kernel(monkeypatch):
    active = SimpleNamespace(get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launching, "driver", SimpleNamespace(active=active))
    return Kernel()


VALUES = ((0, 1, 1, 64, 0, 0), None, 64, (-100, None, 0.5))
BUFFER, OTHER = torch.zeros(64), torch.zeros(64)
TENSORS, SIZES = (BUFFER, None, OTHER), (5, 6)


def launch_of(kernel):
    return Launch(kernel, VALUES, {"LANES": 32, "EDGES": False}, num_warps=4)


def kinds_of(kernel, n_launches=2):
    """Return the ways of equal launches of a new Launch."""
    launch = launch_of(kernel)
    for _ in range(n_launches):
        launch(3, TENSORS, SIZES)
    return kernel.kinds


def test_a_launch_like_one_before_takes_the_private_way(kernel):
    """Other tensors, sizes of 32 bits and programs are the same variant, and arrive as they are now."""
    launch = launch_of(kernel)
    launch(3, TENSORS, SIZES)
    moved, other = torch.zeros(64), torch.zeros(64)
    launch(9, (moved, None, other), (7, 2**31 - 1))
    first, second = kernel.calls
    options = {"LANES": 32, "EDGES": False, "num_warps": 4, "enable_fp_fusion": True}
    assert first == ("public", (3,), (*TENSORS, *VALUES, *SIZES), options)
    kind, variant, (*start, _), arguments = second
    assert (kind, variant, start[:7]) == ("private", 0, [9, 1, 1, STREAM, "function 0", False, False])
    assert arguments == (moved.data_ptr(), None, other.data_ptr(), *VALUES, 7, 2**31 - 1, 32, False)


def test_a_remembered_kernel_stays_on_the_gpu(kernel):
    """From Triton 3.8 on, a kernel that nobody holds is unloaded, for example after its cache was cleared."""
    launch = launch_of(kernel)
    launch(0, TENSORS, SIZES)  # no programs are no launch
    assert kernel.calls == []
    launch(3, TENSORS, SIZES)
    assert kernel.compiled() is not None
    assert kinds_of(kernel, 1) == ["public", "public"]  # another launch has variants of its own


def test_the_private_way_passes_what_this_tritons_own_launch_passes():
    """Nothing of it is documented, so each version is read."""
    from triton.runtime.jit import JITFunction

    tree = ast.parse(textwrap.dedent(inspect.getsource(JITFunction.run)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "kernel.run"]
    assert [ast.unparse(argument) for argument in calls[0].args] == [
        *("grid_0", "grid_1", "grid_2", "stream", "kernel.function", "kernel.packed_metadata"),
        *("launch_metadata", "knobs.runtime.launch_enter_hook", "knobs.runtime.launch_exit_hook"),
        "*bound_args.values()",
    ]
    assert len(calls) == 1


def test_the_private_way_calls_what_this_tritons_launcher_calls(kernel, monkeypatch):
    """The launcher is asked itself: its function in C gets the same."""
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())
    launch = launch_of(kernel)
    launch(3, TENSORS, SIZES)
    compiled = kernel.compiled()
    addresses = [None if tensor is None else tensor.data_ptr() for tensor in TENSORS]
    arguments = (*addresses, *VALUES, *SIZES, *launch.tail)
    compiled.run(3, 1, 1, STREAM, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
    launch(3, TENSORS, SIZES)
    _, tritons, ours = kernel.calls
    assert tritons == ours and ours[0] == "private"


def test_what_tritons_launcher_looks_at_is_known():
    """Anything more than this may be a reason to leave a launch to it."""
    from triton.backends.nvidia.driver import CudaLauncher

    tree = ast.parse(textwrap.dedent(inspect.getsource(CudaLauncher.__call__)))
    names = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    sizes = {f"{kind}_scratch_{of}" for kind in ("global", "profile") for of in ("size", "align")}
    passed = {"launch", "launch_cooperative_grid", "launch_pdl", "num_ctas", "arg_annotations", "kernel_signature"}
    assert {name[5:] for name in names if name.startswith("self.")} <= sizes | passed | {"gsan_enabled"}


@pytest.mark.parametrize("name", ("global_scratch_size", "profile_scratch_size", "gsan_enabled"))
def test_a_variant_that_takes_memory_is_left_to_triton(kernel, name):
    """Its launcher allocates it at each launch: for a profiler's or a sanitizer's instrumentation."""
    kernel.edit = lambda run: setattr(run, name, 16)
    assert kinds_of(kernel, 3) == ["public", "public", "public"]


@pytest.mark.parametrize(
    "different",
    (
        (BUFFER.bfloat16(), None, OTHER),
        (BUFFER, None, OTHER.to(torch.int64)),
        (BUFFER, OTHER, OTHER),
        (BUFFER, None, None),
        (BUFFER, OTHER, None),
    ),
)
def test_other_dtypes_are_another_variant(kernel, different):
    """So is a tensor that is not given. The number of a variant is in its function's name."""
    launch = launch_of(kernel)
    for tensors in (TENSORS, different, TENSORS, different):
        launch(3, tensors, SIZES)
    assert [call[:2] for call in kernel.calls[2:]] == [("private", 0), ("private", 1)]


class OnDevice(torch.Tensor):
    """A tensor that claims to be on the GPU ``index``."""

    index = 0

    def get_device(self):
        return self.index


def test_each_device_has_its_own_variants_and_is_made_current(kernel, monkeypatch):
    """A launch goes to the current GPU, also if another one holds the tensors."""
    current, made_current = [0], []

    @contextmanager
    def device(index):
        made_current.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(launching, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    on_gpus = []
    for index in (0, 1):
        tensor = BUFFER.as_subclass(OnDevice)
        tensor.index = index
        on_gpus.append((tensor, None, OTHER))
    launch = launch_of(kernel)
    for tensors in (*on_gpus, *on_gpus):
        launch(3, tensors, SIZES)
    assert kernel.kinds == ["public", "public", "private", "private"]
    assert [call[1] for call in kernel.calls[2:]] == [0, 1]
    assert made_current == [1, 1] and current == [0]


NOT_KNOWN = {
    "first tensor": ((BUFFER[1:], None, OTHER), SIZES),
    "another tensor": ((BUFFER, OTHER[3:], OTHER), SIZES),
    "last tensor": ((BUFFER, None, OTHER[2:]), SIZES),
    "size": (TENSORS, (5, 2**31)),
    "first size": (TENSORS, (2**31, 5)),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_triton_specialises_on_is_left_to_triton(kernel, name):
    """Alignment and the width of integers are not in a key. Such launches are not remembered either."""
    tensors, sizes = NOT_KNOWN[name]
    aligned = tuple(None if t is None else BUFFER for t in tensors)
    launch = launch_of(kernel)
    for arguments in ((tensors, sizes), (aligned, SIZES)):
        launch(3, *arguments)
        launch(3, *arguments)
    launch(3, tensors, sizes)
    assert kernel.kinds == ["public", "public", "public", "private", "public"]


@pytest.mark.parametrize("which", ("launch_enter_hook", "launch_exit_hook"))
def test_launches_under_a_profilers_hook_go_through_triton(kernel, monkeypatch, which):
    """Triton calls the hooks; the private way passes none."""
    hooks = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    setattr(runtime, which, hooks)
    monkeypatch.setattr(launching, "knobs", SimpleNamespace(runtime=runtime))
    launch = launch_of(kernel)
    for hooks.calls in ([], [print], []):
        launch(3, TENSORS, SIZES)
    assert kernel.kinds == ["public", "public", "private"]
    # In older versions, a hook is one function or None.
    for hook, expected in ((None, "private"), (print, "public")):
        setattr(runtime, which, hook)
        launch(3, TENSORS, SIZES)
        assert kernel.kinds[-1] == expected


def test_nothing_is_remembered_of_the_interpreter(kernel, monkeypatch):
    """It compiles nothing and returns None."""
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *_, **__: self.calls.append(grid))
    assert kinds_of(kernel) == [3, 3]


TESTED = [f"{version}.1" for version in TESTED_TRITON]
OTHER_VERSIONS = ("3.5.1", "3.60.0", "3.99.0+git1", "4.0")


@pytest.mark.parametrize("hip, version", [*((None, v) for v in (*TESTED, *OTHER_VERSIONS)), ("6.4", TESTED[0])])
def test_only_tested_versions_without_rocm_take_the_private_way(kernel, monkeypatch, hip, version):
    """ROCm's compiler also specialises on whether a tensor has 2 GiB, which changes with the rows."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(triton, "__version__", version)
    is_private = hip is None and version in TESTED
    assert kinds_of(kernel) == ["public", "private" if is_private else "public"]
    if is_private:
        assert launch_path() == "private launch, as in triton 3.6, 3.7, 3.8, 3.9"
    elif hip:
        assert launch_path().startswith("triton's own launch: ROCm")
    else:
        assert launch_path() == f"triton's own launch: triton {version} was not tested, only 3.6, 3.7, 3.8, 3.9"


@pytest.mark.parametrize("can_overlap, overlaps", ((True, True), (True, False), (False, True)))
def test_a_launch_overlaps_where_gpus_can(kernel, monkeypatch, can_overlap, overlaps):
    """Only a kernel that waits may be launched so."""
    monkeypatch.setattr(launching, "can_overlap", lambda: can_overlap)
    waits = Launch(SimpleNamespace(arg_names=["x", "A", "OVERLAPS"]), (), {"A": 1}, num_warps=4, overlaps=overlaps)
    does = can_overlap and overlaps
    assert waits.tail == (1, does) and waits.compiler.get("launch_pdl", False) == does
    assert "launch_pdl" not in Launch(kernel, (), {"A": 1}, num_warps=4, overlaps=overlaps).compiler


@pytest.mark.parametrize(
    "gpus, hip, interprets", (((), 0, 0), (((9, 0), (8, 0)), 0, 0), (((9, 0),), 1, 0), (((9, 0),), 0, 1))
)
def test_which_gpus_can_overlap(monkeypatch, gpus, hip, interprets):
    """Only if all of them can: a kernel is compiled for the first that it runs on."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index])
    monkeypatch.setattr(torch.version, "hip", "7.0" if hip else None)
    monkeypatch.setattr(launching.knobs.runtime, "interpret", bool(interprets))
    assert not launching.can_overlap.__wrapped__()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (12, 0))
    assert launching.can_overlap.__wrapped__() == (not hip and not interprets)
