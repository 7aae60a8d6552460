# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownMemberType=false
"""A variant of a kernel compiled ahead of time, for a GPU that need not be there."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.compiler import ASTSource

from bench.occupancy.sass import busy_cycles, inner_loop, instructions
from bench.occupancy.targets import Target
from bench.occupancy.variants import KernelVariant


class Resources(NamedTuple):
    """Resources of one program of a compiled kernel."""

    registers: int
    """Of a thread."""
    spilled: int
    """Bytes of memory that a thread needs besides its registers."""
    shared: int
    """Bytes of shared memory."""
    cycles: int = 0
    """Cycles of a scheduler for one warp's turn of the loop over tiles; 0: no such loop, or unknown."""

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @staticmethod
    def parse(text: str) -> "Resources":
        return Resources(*map(int, text.split("/")))


def compile_variant(variant: KernelVariant, target: Target) -> Resources:
    """Compiles a variant. Any error of the compiler propagates."""
    names = list(variant.signature)
    source = ASTSource(
        fn=variant.kernel,
        signature=variant.signature,
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in variant.aligned},
    )
    options = {"num_warps": target.warps(variant.num_warps), "num_stages": variant.num_stages}
    compiled: Any = triton.compile(source, target=target.triton, options=options)
    if not target.is_nvidia:
        return _of_amd(compiled.asm["amdgcn"], compiled.metadata.shared)
    return _of_nvidia(compiled.asm["cubin"], compiled.metadata.shared)


def _of_amd(assembly: str, shared: int) -> Resources:
    def metadata_value(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])  # pyright: ignore[reportOptionalSubscript]

    return Resources(metadata_value("vgpr_count"), metadata_value("private_segment_fixed_size"), shared)


def _of_nvidia(cubin: bytes, shared: int) -> Resources:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        used, code = (_cuobjdump(option, file) for option in ("-res-usage", "-sass"))
    numbers: Mapping[str, int] = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", used)}
    return Resources(numbers["REG"], numbers["STACK"], shared, busy_cycles(inner_loop(instructions(code))))


def _cuobjdump(option: str, file: Path) -> str:
    command = [knobs.nvidia.cuobjdump.path, option, str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
