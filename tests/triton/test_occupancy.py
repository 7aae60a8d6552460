"""The compiler's figures for the kernels, ahead of time and without a GPU, compared with the golden table and with
limits.
"""

import os
import re
import subprocess
import sys

import pytest

from bench.occupancy import golden, sass
from bench.occupancy.__main__ import all_names, by_name
from bench.occupancy.bounds import LATENCY_NS, bound_of, evenness
from bench.occupancy.compiling import Resources
from bench.occupancy.targets import TARGETS
from longleaf.kernels.gpu.work_items import Shape

TABLE = golden.read()
AIM = 0.85
USUAL = (
    r"attend ((bf16|fp16) (64|80|96|112|128|192|256|576/512) rows 16( cap)?"
    r"|int8 (bf16|fp16) (64|80|96|112|128|256) rows 16|fp32 (64|112|128|256) rows 16)"
)
"""Decode of a few rows: at the bandwidth of the memory, or nearly."""
QUICK = {
    "sm_90": r"(attend (bf16 128|int8 bf16 64|fp32 64) rows 16|attend bf16 (64 rows 64|576/512 rows 16)"
    r"|fold 128|(pack|fold packed) bf16 128|store (fp16|int8 bf16) 128)",
    **dict.fromkeys(("sm_80", "sm_89", "sm_100", "gfx942"), r"(attend bf16 128 rows 16|attend int8 fp16 64 rows 16)"),
}
PAIRS = [(name, target) for name, row in TABLE.items() for target in row]


def compiled(pattern, target):
    """The table of the current kernels, compiled in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench.occupancy", "--fresh", "--only", pattern, "--target", target]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return golden.parsed(run.stdout)


def compared_with_table(pattern, target):
    found = compiled(pattern, target)
    names = [name for name in TABLE if re.fullmatch(pattern, name) and target in TABLE[name]]
    assert names and found == {name: {target: TABLE[name][target]} for name in names}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", QUICK)
def test_what_is_compiled_now_is_in_the_table(target):
    compared_with_table(QUICK[target], target)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["attend bf16", "attend fp16", "attend fp32", "attend int8", "fold|pack", "store"])
@pytest.mark.parametrize("target", TARGETS)
def test_all_that_is_compiled_now_is_in_the_table(target, kind):
    compared_with_table(f"({kind}).*", target)


def test_the_table_has_each_variant_for_each_target():
    assert list(TABLE) == all_names()
    for target in TARGETS:
        assert [name for name, row in TABLE.items() if target in row] == list(by_name(target))


def test_the_table_is_written_as_it_is_read():
    text = golden.PATH.read_text()
    assert golden.written(golden.parsed(text), re.search(r"Triton ([\d.]+)", text)[1]) == text


@pytest.mark.parametrize("target", TARGETS)
def test_each_variant_fits_into_a_multiprocessor(target):
    limits = TARGETS[target]
    for name, variant in by_name(target).items():
        used, warps = TABLE[name][target], limits.warps(variant.num_warps)
        assert used.shared <= limits.max_shared, name
        assert limits.occupancy(warps, used.registers, used.shared) >= 1, name


FEW_SPILLED = 48
"""Bytes of a thread that some variants may spill: a turn of their loops takes no more cycles than it did when they
spilled nothing, and tiles began anywhere."""
SPILLING = {("64", "sm_100"), ("576/512", "sm_89"), ("576/512", "sm_90"), ("576/512", "sm_100")}
"""Dims and targets of these."""


def test_few_variants_of_a_16_bit_type_spill_and_little():
    spilling = [(name, target) for name, target in PAIRS if "fp32" not in name and TABLE[name][target].spilled]
    assert {(name.split()[2], target) for name, target in spilling} == SPILLING
    assert all(TABLE[name][target].spilled <= FEW_SPILLED for name, target in spilling)


def test_decode_is_bound_by_memory_on_an_h200():
    target, known = TARGETS["sm_90"], by_name("sm_90")
    names = [name for name in TABLE if re.fullmatch(USUAL, name)]
    assert len(names) == 2 * (7 * 2 + 1) + 2 * 6 + 4
    shares = {name: bound_of(known[name], target, TABLE[name]["sm_90"]).share for name in names}
    assert {name: share for name, share in shares.items() if share < AIM} == {}


@pytest.mark.parametrize("group", [1, 4, 5, 6, 8])
def test_programs_share_128k_keys_evenly(group):
    shape = Shape(num_tokens=1, group=group, num_kv_heads=8, max_tile_rows=64, tile_keys=64)
    assert evenness(131072, shape, TARGETS["sm_90"]) > 0.95


def test_occupancy_is_what_registers_memory_and_warps_leave():
    target = TARGETS["sm_90"]
    assert target.occupancy(4, 128, 0) == 4  # 65536 registers / (128 x 128 threads)
    assert target.occupancy(4, 129, 0) == 3  # dealt in eights
    assert target.occupancy(8, 32, 0) == 8  # 64 warps
    assert target.occupancy(1, 16, 0) == 32
    assert target.occupancy(4, 32, 100 * 1024) == 2 and target.occupancy(4, 32, 114 * 1024) == 1  # and 1 KiB each
    assert target.occupancy(4, 32, target.max_shared + 1) == 0
    assert TARGETS["gfx942"].occupancy(4, 256, 0) == 2 and TARGETS["gfx942"].occupancy(4, 264, 0) == 1


def test_a_bound_is_the_smallest_of_three_shares():
    variant, target = by_name("sm_90")["attend bf16 128 rows 16"], TARGETS["sm_90"]
    keys = variant.constants["TILE_KEYS"]
    found = bound_of(variant, target, Resources(128, 0, 40000, 1000))
    assert (found.num_programs, found.bytes_in_flight) == (2, 2 * keys * 512)
    assert found.memory == pytest.approx(found.bytes_in_flight / LATENCY_NS / (4800 / 132))
    assert found.arithmetic == pytest.approx(keys * 512 / (1000 / 1.755) / (4800 / 132))  # a warp for each scheduler
    assert found.matrix == pytest.approx(keys * 512 / (16 * keys * 256 / 1024 / 1.755) / (4800 / 132))
    assert found.share == 1.0
    assert bound_of(variant, target, Resources(128, 0, 40000, 4000)).share == pytest.approx(found.arithmetic / 4)


DISASSEMBLY = """
        /*0000*/                   FADD R4, R4, R4 ;                         /* 0x0 */
        /*0010*/                   LDSM.16.M88.4 R4, [R8] ;                  /* 0x0 */
        /*0020*/              @!P0 HMMA.16816.F32.BF16 R4, R4, R8, RZ ;      /* 0x0 */
        /*0030*/                   MUFU.EX2 R4, R4 ;                         /* 0x0 */
        /*0040*/                   ISETP.GT.AND P0, PT, R4, R5, PT ;         /* 0x0 */
        /*0050*/               @P0 BRA 0x10 ;                                /* 0x0 */
        /*0060*/                   FADD R4, R4, R4 ;                         /* 0x0 */
        /*0070*/               @P0 BRA `(.L_x_0) ;                           /* 0x0 */
        /*0080*/               @P1 BRA 0x0 ;                                 /* 0x0 */
        /*0090*/                   BRA 0x90;                                 /* 0x0 */
"""


def test_the_inner_loop_is_found_and_its_busiest_unit():
    loop = sass.inner_loop(sass.instructions(DISASSEMBLY))
    assert [each.stem for each in loop] == ["LDSM", "HMMA", "MUFU", "ISETP", "BRA"]
    assert sass.busy_cycles(loop) == 16  # four rows of eight from shared memory, for each of four schedulers
    assert sass.busy_cycles([each for each in loop if each.stem != "LDSM"]) == 8
    assert sass.busy_cycles(loop[-1:] * 30) == 30
    assert sass.inner_loop([]) == []
