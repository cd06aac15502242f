"""Compile every kernel for a GPU that need not be there, and report its machine code as JSON.

    python -m tests.support.compile_kernels cuda:90 bf16 fp16 [each-option]

Runs in a process of its own, without the interpreter: ``TRITON_INTERPRET`` replaces the compiler.
Prints one JSON list with an entry for each kernel variant: with all options off and with all on, and on
request with each alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vocab_parallel_ce.blocks import ONE_PASS, READ, READ_AND_WRITE, THREADS_PER_WARP, choose_block
from vocab_parallel_ce.kernels.cross_entropy import cross_entropy_kernel
from vocab_parallel_ce.kernels.element_mul import element_mul_kernel
from vocab_parallel_ce.kernels.launch import option_arguments
from vocab_parallel_ce.kernels.loss import LOSS_ROWS, loss_kernel
from vocab_parallel_ce.kernels.online_softmax import LABELS_AT_ONCE, online_softmax_kernel
from vocab_parallel_ce.spec import LossOptions

ELEMENT_SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
N_COLUMNS = 32064

OPTIONS = {
    "plain": LossOptions(),
    "smoothing": LossOptions(smoothing=0.1),
    "z_loss": LossOptions(z_loss=1e-4),
    "logit_scale": LossOptions(logit_scale=0.5),
    "softcap": LossOptions(softcap=30.0),
    "entropy": LossOptions(entropy=True),
    "predictions": LossOptions(predictions=True),
    "all": LossOptions(-100, 0.1, 1e-4, 0.5, 30.0, True, True),
}
NONE_OR_ALL = ("plain", "all")
ASYNCHRONOUS_COPY = r"(cp\.async\.c[ag]\S*) \[[^\]]*\], \[[^\]]*\], (\w+)"

# Types as a launch passes them. A layout is that of [N, C] rows, its 1s constants.
ARGUMENT_TYPES = {
    "labels": "*i64",
    "stats": "*fp32",
    "valid_rows": "*i32",
    "divisor": "*i32",
    "grad_output": "*fp32",
    "grad_entropy": "*fp32",
    "loss": "*fp32",
    "entropy": "*fp32",
    "lse": "*fp32",
    "predictions": "*i64",
    "layout": ("i32", "constexpr", "constexpr", "i32", "i32", "i32"),
}

# Arguments that a gradient launch leaves out; the gradient of an entropy comes with one of the loss.
OF_ENTROPY = ("grad_entropy", "grad_entropy_stride")
LEFT_OUT = {
    "in_forward": ("grad_output", "grad_output_stride", *OF_ENTROPY, "n_valid"),
    "in_backward": ("loss", *OF_ENTROPY, "n_valid", "divisor"),
    "padded": ("loss", *OF_ENTROPY),
}
OUTPUTS = ("loss", "entropy", "lse", "predictions")


class Variant(NamedTuple):
    """A kernel as one kind of call launches it."""

    name: str
    kernel: object
    pointer: str  # type of the logits
    options: LossOptions
    constants: dict[str, object]  # constexprs, and None for what is left out
    num_warps: int
    programs: int | None = None  # that must be on a multiprocessor at once


def variants(target: GPUTarget, dtypes: list[str], option_names: Sequence[str]) -> Iterator[Variant]:
    """What calls on ``dtypes`` launch."""
    for dtype, edges in product(dtypes, (False, True)):
        yield from row_walks(dtype, edges, option_names)
    for option, ranks in (("plain", 1), *((option, 4) for option in option_names)):
        constants = {"RANKS": ranks, "ROWS": LOSS_ROWS} | dict.fromkeys(not_asked_for(OPTIONS[option]))
        yield Variant(f"loss-{option}-R{ranks}", loss_kernel, "*fp32", OPTIONS[option], constants, 4)
    # Others have no asynchronous copies, or too little shared memory.
    if target.backend == "cuda" and target.arch >= 90:
        for dtype in dtypes:
            yield from one_passes(dtype)


def one_passes(dtype: str) -> Iterator[Variant]:
    """Launches of the one-pass kernel on the widest rows of every ring."""
    from vocab_parallel_ce.kernels.one_pass import one_pass_kernel

    for _, most, ring in ONE_PASS:
        lanes = THREADS_PER_WARP * ring.num_warps
        chunks = -(-most // (16 * lanes))
        constants = {
            "CHUNKS": chunks,
            "KEEP": min(ring.keep, chunks),
            "SLOTS": ring.slots,
            "GROUP": ring.group,
            "LANES": lanes,
            "VECTOR": 16 // ELEMENT_SIZE[dtype],
        }
        for call, option in product(("mean", "sum", "num_items"), ("plain", "z_loss")):
            if call != "mean" and (option != "plain" or dtype != "bf16"):
                continue
            of_call = {"COUNTED": call == "mean"} | ({} if call == "num_items" else {"divisor": None})
            yield Variant(
                f"one_pass-{dtype}-{option}-{call}-{most}",
                one_pass_kernel,
                f"*{dtype}",
                OPTIONS[option],
                constants | of_call,
                ring.num_warps,
                ring.programs,
            )


def row_walks(dtype: str, edges: bool, option_names: Sequence[str]) -> Iterator[Variant]:
    """Launches of the kernels that walk rows of ``dtype``."""
    read, write = (choose_block(table, N_COLUMNS, ELEMENT_SIZE[dtype]) for table in (READ, READ_AND_WRITE))
    reads, writes = ({"HAS_EDGES": edges, "LANES": b.lanes, "VECTOR": b.vector} for b in (read, write))
    shape = f"{dtype}-edges" if edges else dtype

    def stats(option: str, suffix: str, without: Sequence[str] = ()) -> Variant:
        constants = reads | {"COUNTED": LABELS_AT_ONCE} | dict.fromkeys(without)
        name = f"online_softmax-{shape}-{option}{suffix}"
        return Variant(name, online_softmax_kernel, f"*{dtype}", OPTIONS[option], constants, read.num_warps)

    def gradient(option: str, call: str, ranks: int) -> Variant:
        without = set(LEFT_OUT[call])
        if OPTIONS[option].entropy and "grad_output" not in without:
            without.difference_update(OF_ENTROPY)
        constants = writes | {"RANKS": ranks} | dict.fromkeys(without)
        name = f"cross_entropy-{shape}-{option}-{call}-R{ranks}"
        return Variant(name, cross_entropy_kernel, f"*{dtype}", OPTIONS[option], constants, write.num_warps)

    plain = OPTIONS["plain"]
    yield Variant(f"element_mul-{shape}", element_mul_kernel, f"*{dtype}", plain, writes, write.num_warps)
    yield stats("plain", "-mean", (*OUTPUTS, "divisor"))
    for option in option_names:
        yield stats(option, "", ("valid_rows", *OUTPUTS, "divisor"))
        yield stats(option, "-outputs", ("valid_rows", "divisor", *not_asked_for(OPTIONS[option])))
        yield gradient(option, "in_backward", 4)
    yield stats("all", "-outputs-num_items", ("valid_rows",))
    yield gradient("plain", "in_forward", 1)
    yield gradient("all", "in_forward", 4)
    yield gradient("all", "padded", 4)


def source_of(variant: Variant) -> ASTSource:
    """The kernel as one launch would specialise it: every pointer at a 16-byte boundary."""
    signature: dict[str, object] = {}
    constexprs: dict[tuple[int, ...], object] = {}
    attrs = {}
    types = ARGUMENT_TYPES | {"row_options": option_types(variant.options)}
    for index, name in enumerate(variant.kernel.arg_names):  # type: ignore[attr-defined]
        if name in variant.constants:
            signature[name] = "constexpr"
            constexprs[(index,)] = variant.constants[name]
            continue
        kind = types.get(name, variant.pointer if "logits" in name else "i32")
        signature[name] = kind
        parts = {(index,): kind} if isinstance(kind, str) else {(index, i): k for i, k in enumerate(kind)}
        for path, part in parts.items():
            if part == "constexpr":
                constexprs[path] = option_arguments(variant.options)[path[1]] if name == "row_options" else 1
            elif part.startswith("*"):
                attrs[path] = [["tt.divisibility", 16]]
    if variant.name.startswith("one_pass"):
        from triton.experimental.gluon._runtime import GluonASTSource

        return GluonASTSource(variant.kernel, signature, constexprs, attrs)
    return ASTSource(variant.kernel, signature, constexprs, attrs)


def not_asked_for(options: LossOptions) -> list[str]:
    """Names of the outputs that a call with ``options`` leaves out."""
    return ["entropy"] * (not options.entropy) + ["lse", "predictions"] * (not options.predictions)


def option_types(options: LossOptions) -> tuple[str, ...]:
    """Types of ``option_arguments``: None and the integer 1 are constants of a launch."""
    kinds = {type(None): "constexpr", float: "fp32", int: "i32"}
    values = option_arguments(options)
    return tuple("constexpr" if (type(value), value) == (int, 1) else kinds[type(value)] for value in values)


def report(target: GPUTarget, variant: Variant) -> dict:
    """Compile one variant; for CUDA with registers, spills and the widths of its global accesses."""
    compiled = triton.compile(source_of(variant), target=target, options={"num_warps": variant.num_warps})
    entry = {"target": f"{target.backend}:{target.arch}", "kernel": variant.name, "bytes": None}
    if target.backend != "cuda":
        return entry | {"bytes": len(compiled.asm["hsaco"])}
    ptx = compiled.asm["ptx"]
    entry |= {
        "bytes": len(compiled.asm["cubin"]),
        "loads": sorted(set(re.findall(r"ld\.global[.\w]*", ptx))),
        "stores": sorted(set(re.findall(r"st\.global[.\w]*", ptx))),
        # Bytes of each kind of copy into shared memory.
        "copies": sorted({f"{kind} {int(n, 0)}" for kind, n in re.findall(ASYNCHRONOUS_COPY, ptx)}),
        "shared_bytes": compiled.metadata.shared,
        "threads": THREADS_PER_WARP * variant.num_warps,
        "programs": variant.programs,
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
    target, *words = sys.argv[1:]
    option_names = tuple(OPTIONS) if "each-option" in words else NONE_OR_ALL
    dtypes = [word for word in words if word != "each-option"]
    gpu = parse_target(target)
    print(json.dumps([report(gpu, variant) for variant in variants(gpu, dtypes, option_names)]))


if __name__ == "__main__":
    main()
