"""What launchers make of options, and which launches take the short way; no GPU is needed to look at it."""

from types import SimpleNamespace

import pytest
import torch

from vocab_parallel_ce.kernels import launch as launching
from vocab_parallel_ce.kernels.launch import option_arguments
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

    def __init__(self, calls):
        self.calls, self.variants = calls, 0

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


@pytest.fixture
def calls(monkeypatch):
    """What is launched; no variant is known before, and none after."""
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: STREAM))
    monkeypatch.setattr(launching.triton.runtime, "driver", driver)
    monkeypatch.setattr(launching, "_compiled", {})
    return []


BUFFER = torch.zeros(64)
OTHER = torch.zeros(64)


def arguments(tensor=BUFFER, layout=(0, 1, 1, 64, 0, 0), divisor=None, inner=(OTHER, None, 1), columns=64):
    return (tensor, layout, divisor, inner, columns, (-100, None, 0.5))


def launch(kernel, given, programs=3, sizes=(5, 6), constants=None, num_warps=4):
    constants = {"LANES": 32, "EDGES": False} if constants is None else constants
    launching.launch(kernel, programs, given, sizes, constants, num_warps=num_warps)


def kinds(calls):
    return [call[0] for call in calls]


def test_a_launch_like_one_before_takes_the_short_way(calls):
    """Other tensors, row counts and programs are the same variant, and arrive as they are now."""
    kernel = Kernel(calls)
    launch(kernel, arguments())
    moved, other = torch.zeros(64), torch.zeros(64)
    launch(kernel, arguments(tensor=moved, inner=(other, None, 1)), programs=9, sizes=(7, 8))
    first, second = calls
    options = {"LANES": 32, "EDGES": False, "num_warps": 4}
    assert first == ("looked up", (3,), (*arguments(), 5, 6), options)
    addresses = (moved.data_ptr(), (0, 1, 1, 64, 0, 0), None, (other.data_ptr(), None, 1), 64)
    assert second == (
        "short",
        0,
        (9, 1, 1, STREAM, "function 0", "metadata 0", None, None, None)
        + (*addresses, (-100, None, 0.5), 7, 8, 32, False),
    )


DIFFERENT = {
    "dtype": {"given": arguments(tensor=BUFFER.bfloat16())},
    "dtype in a tuple": {"given": arguments(inner=(OTHER.double(), None, 1))},
    "a tensor for None": {"given": arguments(divisor=OTHER)},
    "a tensor for None in a tuple": {"given": arguments(inner=(OTHER, BUFFER, 1))},
    "None for a tensor in a tuple": {"given": arguments(inner=(None, OTHER, 1))},
    "an integer": {"given": arguments(columns=65)},
    "an integer in a tuple": {"given": arguments(layout=(0, 1, 1, 65, 0, 0))},
    "warps": {"num_warps": 8},
    "a constant": {"constants": {"LANES": 64, "EDGES": False}},
    "another constant": {"constants": {"LANES": 32, "EDGES": True}},
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_a_variant_depends_on(calls, name):
    kernel = Kernel(calls)
    different = {"given": arguments()} | DIFFERENT[name]
    launch(kernel, arguments())
    launch(kernel, **different)
    assert kinds(calls) == ["looked up", "looked up"]
    launch(kernel, arguments())
    launch(kernel, **different)
    assert [call[:2] for call in calls[2:]] == [("short", 0), ("short", 1)]


def test_kernels_do_not_share_variants(calls):
    first, second = Kernel(calls), Kernel(calls)
    for kernel in (first, second):
        launch(kernel, arguments())
    assert kinds(calls) == ["looked up", "looked up"]


class OnDevice(torch.Tensor):
    """Said to be on the GPU ``index``."""

    index = 0

    def get_device(self):
        return self.index


def test_each_device_has_its_own_variants(calls):
    kernel = Kernel(calls)
    on_gpus = []
    for index in (0, 1):
        tensor = BUFFER.as_subclass(OnDevice)
        tensor.index = index
        on_gpus.append(arguments(tensor=tensor))
    for given in (*on_gpus, *on_gpus):
        launch(kernel, given)
    assert kinds(calls) == ["looked up", "looked up", "short", "short"]
    assert [call[1] for call in calls[2:]] == [0, 1]


@pytest.mark.parametrize(
    "shifted",
    (
        {"given": arguments(tensor=BUFFER[1:])},
        {"given": arguments(divisor=OTHER[3:])},
        {"given": arguments(inner=(OTHER[2:], None, 1))},
        {"given": arguments(), "sizes": (5, 2**31)},
    ),
    ids=("tensor", "second tensor", "tensor in a tuple", "size"),
)
def test_what_triton_specialises_on_is_left_to_triton(calls, shifted):
    """Alignment and the width of integers are no part of a key: such launches are not remembered either."""
    kernel = Kernel(calls)
    for _ in range(2):
        launch(kernel, **shifted)
    aligned = {"given": arguments(divisor=OTHER)} if "divisor" in shifted else {"given": arguments()}
    launch(kernel, **aligned)
    launch(kernel, **shifted)
    launch(kernel, **aligned)
    assert kinds(calls) == ["looked up"] * 4 + ["short"]


def test_a_size_that_still_fits_takes_the_short_way(calls):
    kernel = Kernel(calls)
    for _ in range(2):
        launch(kernel, arguments(), sizes=(0, 2**31 - 1))
    assert kinds(calls) == ["looked up", "short"]


def test_launches_under_a_profilers_hook_go_through_triton(calls, monkeypatch):
    """Triton calls the hooks; the short way passes none."""
    kernel, hooks = Kernel(calls), SimpleNamespace(calls=[])
    knobs = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hooks))
    monkeypatch.setattr(launching, "knobs", knobs)
    for hooks.calls in ([], [print], []):
        launch(kernel, arguments())
    assert kinds(calls) == ["looked up", "looked up", "short"]


def test_hooks_of_an_older_triton_are_one_function_or_none(monkeypatch):
    for hook, observed in ((None, False), (print, True)):
        monkeypatch.setattr(
            launching, "knobs", SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=hook))
        )
        assert launching._is_observed() == observed


def test_variants_do_not_pile_up(calls, monkeypatch):
    """A weight that is annealed is a new variant every step."""
    monkeypatch.setattr(launching, "MOST_VARIANTS", 8)
    kernel = Kernel(calls)
    for columns in range(30):
        launch(kernel, arguments(columns=columns))
        assert 1 <= len(launching._compiled) <= 8
    launch(kernel, arguments(columns=29))
    assert kinds(calls) == ["looked up"] * 30 + ["short"]


def test_nothing_is_remembered_of_the_interpreter(calls):
    """It compiles nothing and returns None."""

    class Interpreted(Kernel):
        def __getitem__(self, grid):
            return lambda *arguments, **options: self.calls.append(("looked up",))

    kernel = Interpreted(calls)
    for _ in range(2):
        launch(kernel, arguments())
    assert kinds(calls) == ["looked up", "looked up"] and not launching._compiled
