"""C extensions: compiled on the machine at first use, cached, and loaded with ctypes.

An installation may contain precompiled libraries for several kinds of processors, as an image without a compiler does;
those are preferred.

A library runs with this user's permissions, so the cache folder must not be writable for others. A checksum protects
against truncated files after a crash, because using a truncated library kills the process.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from longleaf.config import cache_folder
from longleaf.durable_files import replace_file

COMPILE_SECONDS = 300
"""Time limit of the compiler, which takes 5 s of an idle processor."""
LINK = ("-shared", "-fPIC")
DIGEST_BYTES = hashlib.sha256().digest_size
"""Length of the digest at the end of a cached library; loaders ignore data after the ELF contents."""

INSTALLED = Path(__file__).resolve().parent / "installed"
"""Libraries of this installation; a user who can write there can also change the package."""
NATIVE = "-march=native"
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
"""A line that includes a header of this package."""
_X86_64_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"}
KINDS: dict[str, dict[str, set[str]]] = {
    "x86_64": {
        "x86-64-v4": _X86_64_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
        "x86-64-v3": _X86_64_V3,
        "x86-64": set(),
    },
    "aarch64": {"armv8.2-a+fp16": {"asimdhp", "fphp", "atomics"}, "armv8-a": set()},
}
"""Per architecture, the best first: the compiler's target, and the processor features that it requires."""

log = logging.getLogger(__name__)


def load(source: Path, flags: Sequence[str]) -> ctypes.CDLL:
    """Loads the library built from one C file and the headers that it includes. Its functions run without the GIL.

    `flags` must be compiler flags only, because linker flags may affect the whole process. Raises OSError, with the
    reason, if there is no compiler, the compiler fails, or the result cannot be loaded.
    """
    if (installed := find_installed(source, flags)) is not None:
        return ctypes.CDLL(str(installed))
    flags = ("-c", "-fPIC", *flags)
    try:
        folder = own_folder(cache_folder())
    except (OSError, RuntimeError) as error:  # a user without a home directory has no cache folder
        log.warning("cannot cache compiled code; it will be compiled again at every start: %s", error)
        with tempfile.TemporaryDirectory() as passing:
            return ctypes.CDLL(str(build(source, flags, Path(passing))))
    return ctypes.CDLL(str(build(source, flags, folder)))


def find_openmp() -> int | None:
    """The address of `GOMP_parallel` in the OpenMP library that torch has loaded, which starts a function on several
    threads; None if torch uses none. The libraries of gcc, LLVM and Intel have it, and any compiler can call it."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for path in dict.fromkeys(re.findall(r"(/\S*/lib[gi]?omp\S*\.so\S*)$", maps, re.MULTILINE)):
        with suppress(OSError, AttributeError):
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
    return None


def own_folder(folder: Path) -> Path:
    """`folder` with its links resolved, created if missing. Raises OSError, with the reason, if another user could
    change its contents."""
    folder = folder.resolve()
    for place in reversed((folder, *folder.parents)):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to user {found.st_uid}")
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    exposed = [] if _is_private(found) else [folder]
    exposed += [parent for parent in folder.parents if _is_open_to_all(parent.stat())]
    if exposed:
        raise PermissionError(f"{exposed[0]}: other users can write to it (chmod go-w {exposed[0]})")
    return folder


def build(source: Path, flags: Sequence[str], folder: Path) -> Path:
    """Compiles `source` into `folder` unless it is cached, and returns the library. Raises OSError.

    The file name is derived from source, headers, flags, processor, compiler and C library, so machines can share a
    home directory.
    """
    library = folder / f"{source.stem}-{_key(source, flags)}.so"
    if not _is_whole(library):
        with tempfile.TemporaryDirectory(dir=folder) as workplace:
            compiled, linked = f"{workplace}/code.o", f"{workplace}/code.so"
            _run("cc", *flags, str(source), "-o", compiled)
            _run("cc", *LINK, compiled, "-lm", "-o", linked)
            code = Path(linked).read_bytes()
            replace_file(library, code + hashlib.sha256(code).digest(), 0o700)
    return library


def install(source: Path, flags: Sequence[str]) -> None:
    """Compiles `source` into this installation, for each kind of processor of this architecture. Raises OSError."""
    INSTALLED.mkdir(exist_ok=True)
    for kind in KINDS[platform.machine()]:
        compiled = [f"-march={kind}" if flag == NATIVE else flag for flag in flags]
        with tempfile.TemporaryDirectory() as workplace:
            _run("cc", "-c", "-fPIC", *compiled, str(source), "-o", f"{workplace}/code.o")
            _run("cc", *LINK, f"{workplace}/code.o", "-lm", "-o", str(_installed_path(source, flags, kind)))


def find_installed(source: Path, flags: Sequence[str]) -> Path | None:
    """The best library of this installation for this processor; None if this code was not installed."""
    features = set(_processor_features())
    kinds = (kind for kind, needed in KINDS.get(platform.machine(), {}).items() if needed <= features)
    return next((path for kind in kinds if (path := _installed_path(source, flags, kind)).exists()), None)


def _installed_path(source: Path, flags: Sequence[str], kind: str) -> Path:
    """The path for this code and target."""
    key = hashlib.sha256("\0".join((*_read_code(source), *flags, kind)).encode()).hexdigest()[:16]
    return INSTALLED / f"{source.stem}-{kind}-{key}.so"


def _key(source: Path, flags: Sequence[str]) -> str:
    machine = (platform.machine(), *sorted(set(_processor_features())))
    libc = (*platform.libc_ver(), str(sysconfig.get_config_var("SOABI")))
    parts = (*_read_code(source), *flags, *LINK, *machine, _run("cc", "--version"), *libc)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _read_code(source: Path) -> list[str]:
    """The text of a C file, and those of the headers beside it that it includes, directly or through others."""
    paths = [source]
    for path in paths:
        included = (path.parent / name for name in INCLUDE.findall(path.read_text()))
        paths += [header for header in included if header not in paths]
    return [path.read_text() for path in paths]


def _is_whole(library: Path) -> bool:
    """Whether the file exists and its digest matches."""
    try:
        found, data = library.lstat(), library.read_bytes()
    except OSError:
        return False
    is_own = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and _is_private(found)
    return is_own and hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _is_private(found: os.stat_result) -> bool:
    """Whether only the owner may write."""
    return not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_open_to_all(found: os.stat_result) -> bool:
    """Whether any user may replace a folder in it. In sticky folders such as /tmp only the owner may."""
    return bool(found.st_mode & stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX


def _run(*command: str) -> str:
    """The output of the command. Raises OSError, with the output, if it fails."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=True, text=True, timeout=COMPILE_SECONDS
        )
        return done.stdout
    except subprocess.CalledProcessError as error:
        raise OSError(f"{command[0]} failed: {error.stderr.strip()}") from error
    except subprocess.SubprocessError as error:
        raise OSError(f"{command[0]} failed: {error}") from error


def _processor_features() -> list[str]:
    """Names of the processor's instruction sets, if the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        if line.startswith(("flags", "Features")):
            return line.split(":", 1)[1].split()
    return []
