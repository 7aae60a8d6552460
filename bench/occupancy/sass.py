"""How long a loop of machine code keeps a multiprocessor busy, read from the disassembly of a cubin."""

import re
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);", re.MULTILINE)
TENSOR_CORES = frozenset({"HMMA", "HGMMA", "UTCHMMA"})
FLOAT, INTEGER, SPECIAL, SHARED = "float integer special shared".split()
PIPES = {
    **dict.fromkeys(("FFMA", "FMUL", "FADD"), FLOAT),
    **dict.fromkeys(
        "ISETP IADD3 VIADD SEL FSEL FSETP FMNMX LOP3 PRMT LEA SHF F2FP I2FP IMNMX VIMNMX IABS PLOP3".split(),
        INTEGER,
    ),
    **dict.fromkeys(("MUFU", "I2F", "F2I", "F2F"), SPECIAL),
    **dict.fromkeys(("LDS", "LDSM", "STS", "SHFL", "LDGSTS"), SHARED),
}
"""The unit that executes an instruction, besides the scheduler that issues it."""
CYCLES = {FLOAT: 1, INTEGER: 2, SPECIAL: 8, SHARED: 4}
"""Cycles that an instruction of a warp occupies a scheduler's share of its unit. A scheduler has a quarter of the
results per cycle that the CUDA C++ Programming Guide names for a multiprocessor (128, 64, 16; shared memory: 128
bytes).
"""


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str

    @property
    def stem(self) -> str:
        """HMMA, not HMMA.16816.F32.BF16."""
        return self.name.partition(".")[0]

    @property
    def cycles(self) -> int:
        """Cycles of the unit in PIPES."""
        pipe = PIPES[self.stem]
        is_wide = self.name.endswith(".4") if self.stem == "LDSM" else ".128" in self.name and self.stem != "LDS"
        return CYCLES[pipe] * (4 if is_wide else 1)


def instructions(text: str) -> list[Instruction]:
    """All of a disassembly with one function."""
    return [Instruction(int(address, 16), *rest) for address, *rest in INSTRUCTION.findall(text)]


def inner_loop(code: list[Instruction]) -> list[Instruction]:
    """The loop that multiplies matrices: the shortest that holds most products of any loop. Empty where there is none.
    Without tensor cores products are those of float32."""
    has_tensor_cores = any(each.stem in TENSOR_CORES for each in code)
    names = TENSOR_CORES if has_tensor_cores else {"FFMA"}

    def num_products(loop: list[Instruction]) -> int:
        return sum(each.stem in names for each in loop)

    loops = [
        [each for each in code if start <= each.address <= branch.address]
        for branch in code
        if (start := target_of(branch)) is not None and start < branch.address
    ]
    most = max(map(num_products, loops), default=0)
    return min((loop for loop in loops if num_products(loop) > most / 2), key=len, default=[])


def target_of(instruction: Instruction) -> int | None:
    """Where a branch goes; None of other instructions."""
    found = re.search(r"0x([0-9a-f]+)[)\s]*$", instruction.operands) if instruction.stem == "BRA" else None
    return int(found[1], 16) if found else None


def busy_cycles(loop: list[Instruction]) -> int:
    """Cycles of a scheduler that one warp's turn of a loop takes at least: one to issue each instruction, or those of
    the unit that is busiest. Waits are not among them."""
    busy = dict.fromkeys(CYCLES, 0)
    for each in loop:
        if each.stem in PIPES:
            busy[PIPES[each.stem]] += each.cycles
    return max(len(loop), *busy.values())
