"""What launchers make of options, and which launches take the short way; no GPU is needed to look at it."""

from types import SimpleNamespace

import pytest
import torch

from vocab_parallel_ce.kernels import launch as launching
from vocab_parallel_ce.kernels.launch import Launch, dtypes_of, option_arguments
from vocab_parallel_ce.spec import LossOptions

pytestmark = pytest.mark.reference

STREAM = 77


def test_an_option_that_is_off_is_none():
    """None is a constant of a compiled kernel, 0 and 1 as floats are not: the option's code would stay."""
    assert option_arguments(LossOptions(7)) == (7, None, None, None, None, None, None)
    assert option_arguments(LossOptions(7, 0.0, 0.0, 1.0, None)) == (7, *[None] * 6)
    every = LossOptions(-100, 0.1, 1e-4, 0.5, 30.0, True, True)
    assert option_arguments(every) == (-100, 0.1, 1e-4, 0.5, 30.0, 1, 1)


def test_numbers_keep_the_types_that_launches_are_compiled_for():
    """A float would be a new argument type, and True another kernel than 1."""
    arguments = option_arguments(LossOptions(-100, 1.0, 1.0, 2.0, 1.0, True, True))
    assert [type(argument) for argument in arguments] == [int, float, float, float, float, int, int]


class Kernel:
    """A kernel whose launches, and those of the variants it is compiled to, are written down.

    An entry is ``("looked up", grid, arguments, options)`` or ``("short", variant, arguments)``.
    """

    def __init__(self):
        self.calls, self.variants = [], 0

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append(("looked up", grid, arguments, options))
            variant, self.variants = self.variants, self.variants + 1
            return SimpleNamespace(
                run=lambda *arguments: self.calls.append(("short", variant, arguments)),
                function=f"function {variant}",
                packed_metadata=f"metadata {variant}",
            )

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
SIZES = (5, 6)


def launch_of(kernel):
    return Launch(kernel, VALUES, {"LANES": 32, "EDGES": False}, num_warps=4)


def test_a_launch_like_one_before_takes_the_short_way(kernel):
    """Other tensors, row counts and programs are the same variant, and arrive as they are now."""
    launch = launch_of(kernel)
    launch(3, (BUFFER, None, OTHER), SIZES)
    moved, other = torch.zeros(64), torch.zeros(64)
    launch(9, (moved, None, other), (7, 8))
    first, second = kernel.calls
    options = {"LANES": 32, "EDGES": False, "num_warps": 4}
    assert first == ("looked up", (3,), (BUFFER, None, OTHER, *VALUES, *SIZES), options)
    addresses = (moved.data_ptr(), None, other.data_ptr())
    hooks = (None, None, None)
    start = (9, 1, 1, STREAM, "function 0", "metadata 0", *hooks)
    assert second == ("short", 0, (*start, *addresses, *VALUES, 7, 8, 32, False))


DIFFERENT = {
    "dtype": (BUFFER.bfloat16(), None, OTHER),
    "dtype of another": (BUFFER, None, OTHER.to(torch.int64)),
    "a tensor for None": (BUFFER, OTHER, OTHER),
    "None for a tensor": (BUFFER, None, None),
    "None in another place": (BUFFER, OTHER, None),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_launches_of_other_dtypes_are_others(name):
    """What a launch does not look at itself is in the key under which each kernel keeps its launches."""
    usual = (BUFFER, None, OTHER)
    assert dtypes_of(usual) == dtypes_of((torch.ones(3), None, torch.ones(2, 2)))
    assert dtypes_of(DIFFERENT[name]) != dtypes_of(usual)


def test_launches_do_not_share_variants(kernel):
    """Each has values and constants of its own."""
    for launch in (launch_of(kernel), launch_of(kernel)):
        launch(3, (BUFFER, None, OTHER), SIZES)
    assert kernel.kinds == ["looked up", "looked up"]


class OnDevice(torch.Tensor):
    """Said to be on the GPU ``index``."""

    index = 0

    def get_device(self):
        return self.index


def test_each_device_has_its_own_variants_and_is_made_current(kernel, monkeypatch):
    """The launch goes to the current GPU, whichever holds the tensors."""
    current, made_current = [0], []

    class Device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            made_current.append(self.index)
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", Device)
    on_gpus = []
    for index in (0, 1):
        tensor = BUFFER.as_subclass(OnDevice)
        tensor.index = index
        on_gpus.append((tensor, None, OTHER))
    launch = launch_of(kernel)
    for tensors in (*on_gpus, *on_gpus):
        launch(3, tensors, SIZES)
    assert kernel.kinds == ["looked up", "looked up", "short", "short"]
    assert [call[1] for call in kernel.calls[2:]] == [0, 1]
    assert made_current == [1, 1] and current == [0]


NOT_KNOWN = {
    "first tensor": ((BUFFER[1:], None, OTHER), SIZES),
    "another tensor": ((BUFFER, OTHER[3:], OTHER), SIZES),
    "last tensor": ((BUFFER, None, OTHER[2:]), SIZES),
    "size": ((BUFFER, None, OTHER), (5, 2**31)),
    "first size": ((BUFFER, None, OTHER), (2**31, 5)),
}


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_what_triton_specialises_on_is_left_to_triton(kernel, name):
    """Alignment and the width of integers are no part of a key: such launches are not remembered either."""
    tensors, sizes = NOT_KNOWN[name]
    aligned = tuple(None if t is None else BUFFER for t in tensors)
    launch = launch_of(kernel)
    for _ in range(2):
        launch(3, tensors, sizes)
    for _ in range(2):
        launch(3, aligned, SIZES)
    launch(3, tensors, sizes)
    assert kernel.kinds == ["looked up", "looked up", "looked up", "short", "looked up"]


def test_a_size_that_still_fits_takes_the_short_way(kernel):
    launch = launch_of(kernel)
    for _ in range(2):
        launch(3, (BUFFER, None, OTHER), (0, 2**31 - 1))
    assert kernel.kinds == ["looked up", "short"]


@pytest.mark.parametrize("which", ("launch_enter_hook", "launch_exit_hook"))
def test_launches_under_a_profilers_hook_go_through_triton(kernel, monkeypatch, which):
    """Triton calls the hooks; the short way passes none."""
    hooks = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    setattr(runtime, which, hooks)
    monkeypatch.setattr(launching, "knobs", SimpleNamespace(runtime=runtime))
    launch = launch_of(kernel)
    for hooks.calls in ([], [print], []):
        launch(3, (BUFFER, None, OTHER), SIZES)
    assert kernel.kinds == ["looked up", "looked up", "short"]


def test_hooks_of_an_older_triton_are_one_function_or_none(monkeypatch):
    for hook, observed in ((None, False), (print, True)):
        runtime = SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=None)
        monkeypatch.setattr(launching, "knobs", SimpleNamespace(runtime=runtime))
        assert launching._is_observed() == observed


def test_nothing_is_remembered_of_the_interpreter(kernel, monkeypatch):
    """It compiles nothing and returns None."""
    calls = []
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: lambda *_, **__: calls.append(grid))
    launch = launch_of(kernel)
    for _ in range(2):
        launch(3, (BUFFER, None, OTHER), SIZES)
    assert calls == [(3,), (3,)] and not launch.variants


def test_nothing_is_remembered_on_rocm(kernel, monkeypatch):
    """Its compiler also specialises on whether a tensor has 2 GiB, which changes with the rows."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    launch = launch_of(kernel)
    for _ in range(2):
        launch(3, (BUFFER, None, OTHER), SIZES)
    assert kernel.kinds == ["looked up", "looked up"]
