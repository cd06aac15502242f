"""Compile every kernel for a GPU that need not be there, and report its machine code as JSON.

    python -m tests.support.kernels.compile_kernels cuda:90 [--instructions]

Needs a process of its own without ``TRITON_INTERPRET``, which replaces the compiler. Prints one JSON list
with one entry per variant of a representative set.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.support.kernels.kernel_variants import DTYPES, Variant, variants
from vocab_parallel_ce.blocks import THREADS_PER_WARP
from vocab_parallel_ce.kernels import launch

TRITON_NAMES = {torch.int64: "i64", torch.int32: "i32"} | {dtype: name for name, dtype in DTYPES.items()}
INSTRUCTIONS = "--instructions"  # counts them, which takes half a second a kernel
ASYNCHRONOUS_COPY = r"(cp\.async\.c[ag]\S*) \[[^\]]*\], \[[^\]]*\], (\w+)"


def source_of(variant: Variant) -> ASTSource:
    """Return the kernel as the launch specialises it: each pointer at a 16-byte boundary.

    None and the integer 1 are constants, as in a launch. Other integers are not known, unless ``is_specialised``.
    """
    own, names = variant.launch, variant.launch.kernel.arg_names
    arguments = (*variant.dtypes, *own.values)
    constexprs: dict[tuple[int, ...], object] = {(names.index(name),): v for name, v in own.constants.items()}
    attrs: dict[tuple[int, ...], object] = {}

    def type_of(argument: Any, path: tuple[int, ...]) -> Any:
        if isinstance(argument, tuple):
            kinds = [type_of(part, (*path, i)) for i, part in enumerate(argument)]
            return type(argument)(*kinds) if hasattr(argument, "_fields") else tuple(kinds)
        if isinstance(argument, torch.dtype):
            attrs[path] = [["tt.divisibility", 16]]
            return f"*{TRITON_NAMES[argument]}"
        if argument is None or argument == 1 and isinstance(argument, int):
            constexprs[path] = argument
            return "constexpr"
        if variant.is_specialised and isinstance(argument, int) and argument % 16 == 0:
            attrs[path] = [["tt.divisibility", 16]]
        return "fp32" if isinstance(argument, float) else "i32"

    signature = dict.fromkeys(names, "i32") | dict.fromkeys(own.constants, "constexpr")
    signature |= {names[i]: type_of(argument, (i,)) for i, argument in enumerate(arguments)}
    if variant.ctas_per_sm is None:
        return ASTSource(own.kernel, signature, constexprs, attrs)
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource(own.kernel, signature, constexprs, attrs)


def report(target: GPUTarget, variant: Variant) -> dict:
    """Compile one variant; for CUDA report registers, spills and the widths of its global accesses too."""
    kernel, num_warps = variant.launch.kernel, variant.launch.num_warps
    # A launch does this: an argument named ``options`` compiled, and every launch raised a SyntaxError.
    create_function_from_signature(kernel.signature, kernel.params, make_backend(target))
    # And this: triton.compile ignores an option that the target's compiler lacks, a launch raises a KeyError.
    options = dict(variant.launch.compiler)
    if target.backend != "cuda":
        options.pop("maxnreg", None)  # as a launch there does
    unknown = options.keys() - vars(make_backend(target).parse_options({})).keys()
    assert not unknown, f"{variant.name}: {target.backend} has no {sorted(unknown)}"
    compiled = triton.compile(source_of(variant), target=target, options=options)
    moved_sums = compiled.asm["ttgir"].count("efficient_layout")
    entry = {"target": f"{target.backend}:{target.arch}", "kernel": variant.name, "moved_sums": moved_sums}
    entry["triton"] = [int(part) for part in triton.__version__.split(".")[:2]]
    if target.backend != "cuda":
        return entry | {"bytes": len(compiled.asm["hsaco"])}
    ptx, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
    return entry | {
        "bytes": len(cubin),
        "overlaps": options.get("launch_pdl", False),
        # Of the first wait for the launch before, and the first access to memory: where they stand.
        "waits": ptx.find("griddepcontrol.wait"),
        "accesses": re.search(r"(ld|st|atom|red)\.global", ptx).start(),  # type: ignore[union-attr]
        "loads": sorted(set(re.findall(r"ld\.global[.\w]*", ptx))),
        "stores": sorted(set(re.findall(r"st\.global[.\w]*", ptx))),
        # Bytes of each kind of copy into shared memory.
        "copies": sorted({f"{kind} {int(n, 0)}" for kind, n in re.findall(ASYNCHRONOUS_COPY, ptx)}),
        "shared_bytes": compiled.metadata.shared,
        "threads": THREADS_PER_WARP * num_warps,
        "ctas_per_sm": variant.ctas_per_sm,
        "of_a_thread": loaded_by_a_thread(compiled.asm["ttgir"]),
        **resource_usage(cubin),
    }


def loaded_by_a_thread(ttgir: str) -> list[tuple[str, str]]:
    """Return the shapes of the tensors of logits that are loaded, with the elements next to each other of a thread."""
    layouts = dict(re.findall(r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[([\d, ]+)\]", ttgir))
    loads = re.findall(r"tt\.load .*tensor<([\dx]+)x!tt\.ptr<bf16>, (#\w+)>", ttgir)
    return sorted({(shape, layouts[layout]) for shape, layout in loads})


def resource_usage(cubin: bytes) -> dict:
    """Registers, bytes of stack and local memory (spills), and perhaps instructions, of the one kernel in ``cubin``."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        commands = [[tools / "cuobjdump", "--dump-resource-usage", file.name]]
        if INSTRUCTIONS in sys.argv:
            commands.append([tools / "nvdisasm", file.name])
        texts = [subprocess.run(each, check=True, capture_output=True, text=True).stdout for each in commands]
    fields = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", texts[0])}
    usage = {"registers": fields["REG"], "stack_bytes": fields["STACK"], "local_bytes": fields["LOCAL"]}
    for code in texts[1:]:
        usage["instructions"] = len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+[@A-Z]", code, flags=re.MULTILINE))
    return usage


def report_of(target: GPUTarget, index: int) -> dict:
    """Report the variant at ``index``: launches do not travel between processes."""
    return report(target, next(islice(variants(target), index, None)))


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter does not compile"
    backend, arch = sys.argv[1].split(":")
    target = GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)
    launch.can_overlap = lambda: backend == "cuda" and int(arch) >= 90  # as on the target
    # A process per core: the compiler holds the interpreter's lock.
    n_variants = len(list(variants(target)))
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        jobs = [(target, index) for index in range(n_variants)]
        print(json.dumps(pool.starmap(report_of, jobs, chunksize=1)))


if __name__ == "__main__":
    main()
