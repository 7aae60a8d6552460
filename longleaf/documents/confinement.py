"""Confinement of this process before it parses a file: limits of resources, namespaces without a network, and a filter
that permits only system calls on memory and on open files.

The filter (seccomp) needs no privileges and also works in containers. It refuses all other calls with EPERM: a
compromised parser can open no file, connect nowhere and start no process. Modules must be imported before.
"""

import ctypes
import os
import platform
import resource
import struct
import sys
from contextlib import suppress

from longleaf.documents.limits import ExtractionLimits
from longleaf.documents.messages import Mechanism

PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38
SECCOMP_MODE_FILTER = 2
CLONE_NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x10000000 | 0x40000000
"""Mounts, IPC, host names, users, network."""
ALLOW, DENY, KILL = 0x7FFF0000, 0x00050000 | 1, 0x80000000
"""Allow; fail with EPERM; kill the process."""
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_OFFSET, ARCHITECTURE_OFFSET = 0, 4
X32 = 0x40000000
"""Numbers from here on are those of x32, another interface of the same architecture."""
NUM_FILES = 16
"""Open files; nothing is opened."""
NICENESS = 5

# read write close fstat lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn pread64 readv writev
# poll sched_yield mremap madvise nanosleep getpid exit uname getrusage sysinfo times gettid futex sched_getaffinity
# clock_gettime clock_getres clock_nanosleep exit_group newfstatat set_robust_list getrandom membarrier rseq
# restart_syscall sigaltstack gettimeofday. None of them reaches another process, as prlimit64 and tgkill would.
_X86_64 = (
    *(0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 7, 24, 25, 28, 35, 39, 60, 63, 98, 99, 100, 186, 202, 204),
    *(228, 229, 230, 231, 262, 273, 318, 324, 334, 219, 131, 96),
)
_AARCH64 = (
    *(63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135, 139, 67, 65, 66, 73, 124, 216, 233, 101, 172, 93, 160, 165),
    *(179, 153, 178, 98, 123, 113, 114, 115, 94, 79, 99, 278, 283, 293, 128, 132, 169),
)
_ARCHITECTURES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}


def confine(limits: ExtractionLimits, file_bytes: int) -> tuple[Mechanism, ...]:
    """Confines this process, as far as the system allows, and returns the mechanisms in force. `file_bytes` is the size
    of the file, which the process has in memory."""
    found: list[Mechanism] = ["limits"]
    _be_killed_first()
    _yield_processor()
    if sys.platform == "linux" and _leave_namespaces():
        found.append("namespaces")
    _limit_resources(limits, file_bytes)
    if sys.platform == "linux" and _filter_system_calls():
        found.append("filter")
    return tuple(found)


def _be_killed_first() -> None:
    """Where memory runs out, the kernel ends this process before others."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return


def _yield_processor() -> None:
    """Other processes, such as the ranks of the same machine, run first."""
    with suppress(OSError):
        os.nice(NICENESS)


def _limit_resources(limits: ExtractionLimits, file_bytes: int) -> None:
    memory = limits.memory_bytes + 2 * file_bytes
    wanted = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CPU: limits.cpu_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: NUM_FILES,
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        wanted[resource.RLIMIT_NPROC] = 0
    for name, value in wanted.items():
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        # a second more, because the kernel sends SIGKILL at the hard limit, as for a lack of memory
        last = value + 1 if name == resource.RLIMIT_CPU and value != hard else value
        try:
            resource.setrlimit(name, (value, last))
        except (OSError, ValueError):  # macOS has no limit of the address space
            continue


def _leave_namespaces() -> bool:
    """Whether the process now has separate namespaces, without a network."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.unshare(CLONE_NAMESPACES) == 0


def _filter_system_calls() -> bool:
    """Whether a filter is in force."""
    found = _ARCHITECTURES.get(platform.machine())
    if found is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return False
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    program = _program(*found)
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    return libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0) == 0


def _program(architecture: int, allowed: tuple[int, ...]) -> bytes:
    """The filter, in BPF: code, jump if true, jump if false, operand."""
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_OFFSET),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_OFFSET),
        (JUMP_AT_LEAST, len(allowed), 0, X32),
        *((JUMP_EQUAL, len(allowed) - i, 0, number) for i, number in enumerate(allowed)),
        (RETURN, 0, 0, DENY),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
