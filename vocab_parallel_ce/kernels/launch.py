"""What all launchers share: the launch itself, and the arguments for options and for strided tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.runtime import driver

from vocab_parallel_ce.blocks import Block, Shape
from vocab_parallel_ce.kernels.primitives import SMALL_CAP
from vocab_parallel_ce.layout import LINE_BYTES, VECTOR_BYTES, RowLayout, aligned_base, row_layout
from vocab_parallel_ce.program import Step, recording
from vocab_parallel_ce.spec import PLAIN, LossOptions
from vocab_parallel_ce.versions import TESTED, minor

# The private launch is what Triton's own launch does in these; tests/kernels/test_launch.py compares them.
TESTED_TRITON = tuple(minor(row.triton) for row in TESTED)
# Private: torch.cuda.current_device looks first if CUDA is initialised.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
cache_launches = functools.lru_cache(maxsize=1024)  # per kernel; widths and options repeat every step


class Rows(NamedTuple):
    """How the rows of one tensor, or of two, lie, as a part of a launch's key."""

    layout: RowLayout
    has_edges: bool
    other_layout: RowLayout | None = None  # None: there is one tensor
    alike: bool = False  # each two rows begin at the same position of a line


class Launch:
    """Launch a kernel for given values and constants, and remember its compiled variants.

    On every call, Triton works out which compiled variant the arguments need. That takes longer than the launch.
    With a version in ``TESTED_TRITON``, a Launch stores the variant per device and the tensors' dtypes, None for
    one that is not given, and calls its function in C.

    The kernel must not specialise on ``sizes``, the integers that change from call to call. It gets the
    ``LossOptions`` among ``values`` as :func:`option_arguments` returns them. ``compiler`` are the compiler's other
    options. One that ``overlaps`` begins before the launch before it has ended, where GPUs can, and waits inside.
    """

    def __init__(
        self,
        kernel: Any,
        values: tuple[Any, ...],
        constants: dict[str, Any],
        *,
        num_warps: int,
        overlaps: bool = False,
        **compiler: int,
    ) -> None:
        self.kernel = kernel
        self.values = tuple([option_arguments(v) if isinstance(v, LossOptions) else v for v in values])
        self.constants = constants
        self.num_warps = num_warps
        if torch.version.hip is not None:
            compiler.pop("maxnreg", None)  # its compiler has no bound of registers
        if "OVERLAPS" in getattr(kernel, "arg_names", ()):
            self.constants = constants = {**constants, "OVERLAPS": overlaps and can_overlap()}
            compiler |= {"launch_pdl": True} if constants["OVERLAPS"] else {}
        # Triton 3.9 warns that 3.10 fuses nothing by default; fused, a version changes no bits.
        self.compiler = {"num_warps": num_warps, "enable_fp_fusion": True, **compiler}
        self.tail = tuple(constants.values())
        self.is_private = _no_private_launch() is None
        self.variants: dict[tuple[Any, ...], Step] = {}  # without grid and others

    def __call__(self, n_programs: int, tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...]) -> None:
        """Run ``kernel[(n_programs,)](*tensors, *values, *sizes, **constants)`` on the first tensor's device.

        Triton's own path serves tensors off a 16-byte boundary, and launches that a profiler's hook observes.
        """
        if n_programs == 0:
            return
        device = tensors[0].get_device()  # type: ignore[union-attr]
        if device >= 0 and device != current_device():
            with torch.cuda.device(device):  # a launch goes to the current GPU
                return self(n_programs, tensors, sizes)
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (device, *[None if tensor is None else tensor.dtype for tensor in tensors])
        is_aligned = all([not address or address % VECTOR_BYTES == 0 for address in addresses])
        special = not is_aligned or max(sizes) >= 2**31 or not can_launch(device)
        variant, others = None if special else self.variants.get(key), self.values + sizes + self.tail
        if variant is not None:
            variant.run(n_programs, device, addresses, others)
        else:
            compiled = self.kernel[(n_programs,)](*tensors, *self.values, *sizes, **self.constants, **self.compiler)
            # The interpreter compiles nothing and returns None.
            if self.is_private and not special and compiled is not None and not _takes_more(compiled.run):
                self.variants[key] = variant = step_of(compiled)
        if recording.steps is not None:
            step = None if variant is None else variant._replace(grid=n_programs, others=others)
            recording.steps.append((step, tensors))


def step_of(compiled: Any) -> Step:
    """Return what Triton's launcher in Python calls for a kernel without hooks and without memory of its own."""
    run, metadata, nothing = compiled.run, compiled.packed_metadata, (None, None)
    start: tuple[Any, ...] = (compiled.function, run.launch_cooperative_grid, run.launch_pdl)
    has_sequence = hasattr(run, "kernel_signature")  # not in Triton 3.6
    if has_sequence:
        start = *start, metadata, None, *nothing, *nothing, run.arg_annotations, run.kernel_signature
    else:
        start = *start, *nothing, metadata, None, *nothing
    return Step(run.launch, 0, driver.active.get_current_stream, start, (), has_sequence, compiled)


def can_launch(device: int) -> bool:
    """Whether a variant can be launched on ``device`` as it is: it is the current one, and no profiler observes."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    is_observed = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return (device < 0 or device == current_device()) and not is_observed


def _takes_more(run: Any) -> bool:
    """Whether Triton's launcher allocates memory at each launch of a variant: for sanitizers and profilers."""
    return bool(run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False))


@functools.cache
def can_overlap() -> bool:
    """Whether each GPU here can begin a launch before the one before has ended: from sm_90 on."""
    gpus = range(torch.cuda.device_count()) if torch.version.hip is None and not knobs.runtime.interpret else ()
    return len(gpus) > 0 and min(map(torch.cuda.get_device_capability, gpus)) >= (9, 0)


def launch_path() -> str:
    """Say which path launches take, and why."""
    reason = _no_private_launch()
    if reason is None:
        return f"private launch, as in triton {', '.join(TESTED_TRITON)}"
    return f"triton's own launch: {reason}"


def _no_private_launch() -> str | None:
    """Return why the private launch is not used, or None if it is."""
    if torch.version.hip is not None:
        return "ROCm's variants also depend on whether a tensor has 2 GiB"
    if triton.__version__.startswith(tuple([f"{tested}." for tested in TESTED_TRITON])):
        return None
    return f"triton {triton.__version__} was not tested, only {', '.join(TESTED_TRITON)}"


def walk_launch(
    kernel: Any,
    rows: Rows,
    values: tuple[Any, ...],
    block: Block,
    compiler: dict[str, Any] | None = None,
    **constants: Any,
) -> Launch:
    """Return the Launch of a kernel that walks rows in tiles: its layout comes first, SHAPE after ``constants``.

    ``compiler`` are the compiler's other options.
    """
    constants["SHAPE"] = Shape(rows.has_edges, block.lanes, block.vector, rows.alike, block.units, block.tiles)
    values = (rows.layout, *values)
    return Launch(kernel, values, constants, num_warps=block.num_warps, **(compiler or {}))


def row_arguments(logits: Tensor) -> tuple[Tensor, Rows]:
    """Return the base and the ``Rows`` for a kernel that walks the rows of ``logits [..., C]``.

    Rows that begin at a line of 128 bytes and are whole vectors of 16 bytes have no head and no tail.
    """
    n_columns, size = logits.shape[-1], logits.element_size()
    if logits.is_contiguous() and logits.data_ptr() % VECTOR_BYTES == 0:
        return logits, _contiguous_rows(n_columns, size)
    line = LINE_BYTES // size
    layout = row_layout(logits)
    assert layout is not None, "rows that kernels cannot walk are copied before any launch"
    base, misaligned = aligned_base(logits)
    layout = layout._replace(offset=misaligned)
    is_whole = n_columns * size % VECTOR_BYTES == 0
    return base, Rows(layout, not is_whole or layout.pitch % line != 0)


def pair_arguments(logits: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Rows]:
    """Return the bases of two tensors ``[..., C]`` of equal leading dimensions, and their ``Rows``."""
    base, rows = row_arguments(logits)
    other_base, (other_layout, *_) = row_arguments(other)
    line = LINE_BYTES // logits.element_size()  # 8 vectors of the walk
    distances = (x - y for x, y in zip(rows.layout, other_layout, strict=True))
    alike = rows.layout[1:3] == other_layout[1:3] and all(distance % line == 0 for distance in distances)
    return base, other_base, Rows(*rows[:2], other_layout, alike)


@functools.lru_cache(maxsize=1024)
def begin_at_vectors(layout: RowLayout, element_size: int) -> bool:
    """Return whether rows begin at boundaries of 16 bytes."""
    return layout.pitch * element_size % VECTOR_BYTES == 0


@functools.lru_cache(maxsize=1024)
def _contiguous_rows(n_columns: int, element_size: int) -> Rows:
    return Rows(RowLayout(0, 1, 1, n_columns, 0, 0), n_columns * element_size % LINE_BYTES != 0)


def option_arguments(options: LossOptions) -> LossOptions:
    """Return ``options`` for a kernel: an option that is off is None, so its code is not compiled.

    ``ignore_index`` is always on. A flag that is on is 1: Triton compiles another kernel for True. A softcap that
    changes no fp32 logit is off: its inverse may be 0 in fp32. Any other is a tuple, of which kernels see the length:
    it is there once up to SMALL_CAP, and twice above.
    """
    values: dict[str, Any] = {name: None if v == getattr(PLAIN, name) else v for name, v in options._asdict().items()}
    values["ignore_index"] = options.ignore_index
    values |= {name: 1 for name, value in values.items() if value is True}
    if options.softcap is not None:
        largest = torch.finfo(torch.float32).max * options.logit_scale / options.softcap
        is_off = largest <= 2e-4  # tanh(a) = a * (1 - a^2 / 3) is a in fp32
        n = 1 if options.softcap <= SMALL_CAP else 2
        values["softcap"] = None if is_off else (options.softcap,) * n
    return LossOptions(**values)
