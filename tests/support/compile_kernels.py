"""Compile every kernel for a GPU that need not be there, and report its machine code as JSON.

    python -m tests.support.compile_kernels cuda:90 bf16 fp16 fp32

Runs in a process of its own, without the interpreter: ``TRITON_INTERPRET`` replaces the compiler.
Prints one JSON list with an entry for each kernel variant.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vocab_parallel_ce.kernels.blocks import READ, READ_AND_WRITE, choose_block
from vocab_parallel_ce.kernels.cross_entropy import cross_entropy_kernel
from vocab_parallel_ce.kernels.element_mul import element_mul_kernel
from vocab_parallel_ce.kernels.loss import LOSS_ROWS, loss_kernel
from vocab_parallel_ce.kernels.online_softmax import LABELS_AT_ONCE, online_softmax_kernel

ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
N_COLUMNS = 32064

# Types as a launch passes them; a tuple is the row layout of [N, C] rows, its 1s and 0s constants.
ARGUMENT_TYPES = {
    "labels": "*i64",
    "stats": "*fp32",
    "valid_rows": "*i32",
    "upstream": "*fp32",
    "loss": "*fp32",
    "layout": ("i32", "constexpr", "constexpr", "i32", "i32", "i32"),
    "label_smoothing": "fp32",
}


def variants(dtypes: Iterable[str]) -> Iterator[tuple[str, object, dict[str, object], int]]:
    """(name, kernel, constants, num_warps) of every combination of features, for ``dtypes``."""
    for dtype, edges in product(dtypes, (False, True)):
        size = ELEMENT_SIZE[dtype]
        read = choose_block(READ, N_COLUMNS, size)
        write = choose_block(READ_AND_WRITE, N_COLUMNS, size)
        reads = {"dtype": dtype, "HAS_EDGES": edges, "LANES": read.lanes, "VECTOR": read.vector}
        writes = {**reads, "LANES": write.lanes}
        shape = f"{dtype}-edges" if edges else dtype
        yield f"element_mul-{shape}", element_mul_kernel, writes, write.num_warps
        for has_sum in (False, True):
            suffix = f"{shape}-smoothing" if has_sum else shape
            reads["HAS_SUM"] = writes["HAS_SUM"] = has_sum
            for absent in ((), ("valid_rows",)):
                name = "-".join(("online_softmax", suffix, *(f"no_{each}" for each in absent)))
                constants = reads | dict.fromkeys(absent) | {"COUNTED": LABELS_AT_ONCE}
                yield name, online_softmax_kernel, constants, read.num_warps
            for ranks, absent in product((1, 4), (("upstream",), ("loss",), ("loss", "valid_rows"))):
                name = "-".join(("cross_entropy", suffix, *(f"no_{each}" for each in absent), f"R{ranks}"))
                constants = writes | dict.fromkeys(absent) | {"RANKS": ranks}
                yield name, cross_entropy_kernel, constants, write.num_warps
    for has_sum, ranks in product((False, True), (1, 4)):
        constants = {"dtype": "fp32", "HAS_SUM": has_sum, "RANKS": ranks, "ROWS": LOSS_ROWS}
        yield f"loss{'-smoothing' if has_sum else ''}-R{ranks}", loss_kernel, constants, 4


def source_of(kernel: object, constants: dict[str, object]) -> ASTSource:
    """The kernel as one launch would specialise it: every pointer at a 16-byte boundary."""
    values = {name: value for name, value in constants.items() if name != "dtype"}
    pointer = f"*{constants['dtype']}"
    signature: dict[str, object] = {}
    constexprs: dict[tuple[int, ...], object] = {}
    attrs = {}
    for index, name in enumerate(kernel.arg_names):
        if name in values:
            signature[name] = "constexpr"
            constexprs[(index,)] = values[name]
            continue
        kind = ARGUMENT_TYPES.get(name, pointer if "logits" in name else "i32")
        signature[name] = kind
        if name == "layout":
            constexprs |= {(index, 1): 1, (index, 2): 1}
        elif kind.startswith("*"):
            attrs[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attrs)


def report(target: GPUTarget, name: str, kernel: object, constants: dict, num_warps: int) -> dict:
    """Compile one variant; for CUDA with registers, spills and the widths of its global accesses."""
    compiled = triton.compile(source_of(kernel, constants), target=target, options={"num_warps": num_warps})
    entry = {"target": f"{target.backend}:{target.arch}", "kernel": name, "bytes": None}
    if target.backend != "cuda":
        return entry | {"bytes": len(compiled.asm["hsaco"])}
    ptx = compiled.asm["ptx"]
    entry |= {
        "bytes": len(compiled.asm["cubin"]),
        "loads": sorted(set(re.findall(r"ld\.global[.\w]*", ptx))),
        "stores": sorted(set(re.findall(r"st\.global[.\w]*", ptx))),
    }
    return entry | resource_usage(compiled.asm["cubin"])


def resource_usage(cubin: bytes) -> dict:
    """Registers, and bytes of stack and of local memory (spills), of the one kernel in ``cubin``."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    fields = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", printed))
    return {
        "registers": int(fields["REG"]),
        "stack_bytes": int(fields["STACK"]),
        "local_bytes": int(fields["LOCAL"]),
    }


def parse_target(text: str) -> GPUTarget:
    backend, arch = text.split(":")
    return GPUTarget("cuda", int(arch), 32) if backend == "cuda" else GPUTarget(backend, arch, 64)


def main() -> None:
    assert os.environ.get("TRITON_INTERPRET") != "1", "the interpreter does not compile"
    target = parse_target(sys.argv[1])
    reports = [report(target, *variant) for variant in variants(sys.argv[2:])]
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
