"""Compile every kernel ahead of time for every GPU that we support, on a machine that has none.

`python -m kvfabric.kernels.aot` prints what each variant takes on each target. Triton brings the
assemblers (ptxas for NVIDIA, LLVM for AMD), so a variant that the target cannot run fails here.

Must run without TRITON_INTERPRET, which replaces kernels by their interpretation.
"""
# The table of this script is its result.
# ruff: noqa: T201

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from ..fabric.errors import Unsupported
from .jit import Variant
from .pack.triton import aot_variants as pack_variants

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

ALIGNED = [["tt.divisibility", 16]]
"""What the launcher tells the compiler of every pointer that torch allocates."""

CUOBJDUMP_S = 60
"""It answers within a second; more means a hung tool."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one compiled variant takes. Counts are per thread, bytes of LDS or shared per block."""

    variant: str
    target: str
    registers: int
    shared_bytes: int
    spilled_bytes: int
    """Local memory that stands in for registers: CUDA's LOCAL, AMD's spilled registers times 4."""
    binary_bytes: int
    load_bits: int
    """The widest global load (block ids have 64) and store: whether the alignment was seen."""
    store_bits: int


def variants() -> tuple[Variant, ...]:
    """Return every kernel of this room with the constants of its uses."""
    return pack_variants()


def compile_variant(variant: Variant, target: str) -> Usage:
    """Compile one variant for one of `TARGETS` and read its usage from the binary.

    Raises `Unsupported` under TRITON_INTERPRET, and Triton's own errors for what does not compile.
    """
    function = cast("Any", variant.kernel)
    if not isinstance(function, triton.JITFunction):
        raise Unsupported(
            "TRITON_INTERPRET", "1", "Unset it to compile: kernels are interpreted now."
        )
    names = cast("list[str]", function.arg_names)
    signature = dict.fromkeys(names, "constexpr") | variant.pointers | variant.scalars
    source = ASTSource(
        fn=function,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): ALIGNED for name in variant.pointers},
    )
    compiled = triton.compile(source, target=TARGETS[target], options=dict(variant.options))
    if TARGETS[target].backend == "cuda":
        return _cuda_usage(variant.name, target, compiled)
    return _amd_usage(variant.name, target, compiled)


def compile_all(targets: Iterable[str] = TARGETS) -> list[Usage]:
    """Compile every variant for every target."""
    return [compile_variant(variant, target) for target in targets for variant in variants()]


def _cuda_usage(name: str, target: str, compiled: CompiledKernel) -> Usage:
    cubin = cast("bytes", compiled.asm["cubin"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        report = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)],
            check=True,
            capture_output=True,
            text=True,
            timeout=CUOBJDUMP_S,
        ).stdout
    ptx = cast("str", compiled.asm["ptx"])
    accesses = re.findall(r"(ld|st)\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    widths = [(kind, int(count or 1) * int(bits)) for kind, count, bits in accesses]
    return Usage(
        name,
        target,
        registers=_number(r"REG:(\d+)", report),
        shared_bytes=_number(r"SHARED:(\d+)", report),
        spilled_bytes=_number(r"LOCAL:(\d+)", report),
        binary_bytes=len(cubin),
        load_bits=max(bits for kind, bits in widths if kind == "ld"),
        store_bits=max(bits for kind, bits in widths if kind == "st"),
    )


AMD_BITS = {
    "ubyte": 8,
    "sbyte": 8,
    "byte": 8,
    "short": 16,
    "ushort": 16,
    "sshort": 16,
    "dword": 32,
    "dwordx2": 64,
    "dwordx3": 96,
    "dwordx4": 128,
}
"""Width of a global or buffer access by the ending of its mnemonic."""


def _amd_usage(name: str, target: str, compiled: CompiledKernel) -> Usage:
    assembly = cast("str", compiled.asm["amdgcn"])
    accesses = re.findall(
        r"(?:global|flat|buffer)_(load|store)_([us]?(?:byte|short|dword)(?:x\d)?)", assembly
    )
    return Usage(
        name,
        target,
        registers=_number(r"\.vgpr_count:\s+(\d+)", assembly),
        shared_bytes=_number(r"\.group_segment_fixed_size:\s+(\d+)", assembly),
        spilled_bytes=4 * _number(r"\.vgpr_spill_count:\s+(\d+)", assembly),
        binary_bytes=len(cast("bytes", compiled.asm["hsaco"])),
        load_bits=max(AMD_BITS[width] for kind, width in accesses if kind == "load"),
        store_bits=max(AMD_BITS[width] for kind, width in accesses if kind == "store"),
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise Unsupported("compiler output", pattern, "This version of Triton reports otherwise.")
    return int(found[1])


def main() -> None:
    """Print the table."""
    head = ("variant", "target", "registers", "shared", "spilled", "binary", "load", "store bits")
    print("{:<28}{:<8}{:>10}{:>8}{:>9}{:>8}{:>6}{:>12}".format(*head))
    for usage in compile_all():
        print(
            f"{usage.variant:<28}{usage.target:<8}{usage.registers:>10}{usage.shared_bytes:>8}"
            f"{usage.spilled_bytes:>9}{usage.binary_bytes:>8}{usage.load_bits:>6}"
            f"{usage.store_bits:>12}"
        )


if __name__ == "__main__":
    main()
