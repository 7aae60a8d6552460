# pyright: reportMissingTypeStubs=false
"""Compiles each grammar in a separate process with limits on time and memory.

`python -m coordinator.grammars.process FOLDER` reads the vocabulary of a model folder, reports that in a first line,
and then forks one process for each request on standard input. A fork shares the vocabulary and costs milliseconds, and
a constraint that takes too much time or memory ends only its own process. compiler.py starts it.
"""

import os
import re
import resource
import selectors
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec

from coordinator.grammars.messages import CompileRequest, CompileResult
from coordinator.grammars.source import grammar_of
from longleaf.errors import InvalidArgument, ModelRefused
from longleaf.grammars.matcher import GrammarMatcher
from longleaf.grammars.vocabulary import GrammarVocabulary, read_vocabulary
from longleaf.types import Constraint

CPU_SECONDS = 2
"""Processor time of one compilation."""
MAX_MEMORY = 512 << 20
"""Memory that one compilation may allocate, in bytes."""
PATIENCE = 30.0
"""Seconds after which a compilation that has not answered is killed."""
MAX_COMPILE_SECONDS = 0.05
"""Processor time in which a grammar must compile and give its first mask. The rank that samples repeats this work
within a step, so that longer times would delay other answers."""
NICENESS = 10
READ_BYTES = 1 << 16
_PLACE = re.compile(r"^at \d+\(\d+\): ")
TOO_LONG = f"takes more than {CPU_SECONDS} s of processor time to compile"
TOO_LARGE = "needs too much memory to compile, or is nested too deeply"


def compile_constraint(vocabulary: GrammarVocabulary, constraint: Constraint) -> str:
    """The grammar of a constraint that ranks can match within their limits. Raises InvalidArgument."""
    grammar = grammar_of(constraint)
    began = time.process_time()
    matcher = GrammarMatcher(vocabulary, grammar, ())
    if not matcher.error:
        matcher.allowed(vocabulary.size + 1)
    if matcher.error:
        is_numbered = constraint.kind == "lark"  # lines of other grammars are not those of the request
        raise InvalidArgument(constraint.field, matcher.error if is_numbered else _PLACE.sub("", matcher.error))
    if (seconds := time.process_time() - began) > MAX_COMPILE_SECONDS:
        needed, limit = (f"{1000 * each:,.0f} ms" for each in (seconds, MAX_COMPILE_SECONDS))
        raise InvalidArgument(constraint.field, f"takes {needed} of processor time to compile; the limit is {limit}")
    return grammar


class Compilation(NamedTuple):
    """A forked process that compiles one constraint."""

    number: int
    process: int
    ends: float
    """Time at which the process is killed."""
    output: bytearray


class CompilationServer:
    """Forks a process for each request and forwards the results."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._selector = selectors.DefaultSelector()
        self._compilations: dict[int, Compilation] = {}
        """By the descriptor from which the result is read."""

    def run(self) -> None:
        """Returns when standard input ends."""
        requests, pending = sys.stdin.fileno(), bytearray()
        self._selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(1.0 if self._compilations else None):
                if key.fd != requests:
                    self._read(key.fd)
                    continue
                piece = os.read(requests, READ_BYTES)
                if not piece:
                    return
                pending += piece
                *lines, rest = pending.split(b"\n")
                pending = bytearray(rest)
                for line in lines:
                    self._begin(msgspec.json.decode(line, type=CompileRequest))
            for compilation in self._compilations.values():
                if time.monotonic() > compilation.ends:
                    os.kill(compilation.process, signal.SIGKILL)

    def _begin(self, request: CompileRequest) -> None:
        results, output = os.pipe()
        process = os.fork()
        if not process:
            os.close(results)
            self._compile(request, output)
        os.close(output)
        self._selector.register(results, selectors.EVENT_READ)
        ends = time.monotonic() + PATIENCE
        self._compilations[results] = Compilation(request.number, process, ends, bytearray())

    def _compile(self, request: CompileRequest, output: int) -> NoReturn:
        """The work of the forked process."""
        _confine()
        try:
            result = CompileResult(request.number, compile_constraint(self._vocabulary, request.constraint))
        except InvalidArgument as error:
            result = CompileResult(request.number, refusal=error.description)
        except MemoryError:
            result = CompileResult(request.number, refusal=TOO_LARGE)
        content = memoryview(msgspec.json.encode(result))
        while content:
            content = content[os.write(output, content) :]
        os._exit(0)

    def _read(self, results: int) -> None:
        compilation = self._compilations[results]
        if piece := os.read(results, READ_BYTES):
            compilation.output.extend(piece)
            return
        self._selector.unregister(results)
        os.close(results)
        del self._compilations[results]
        _, status = os.waitpid(compilation.process, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            report(bytes(compilation.output))
            return
        code = os.waitstatus_to_exitcode(status)
        refusal = TOO_LONG if code in (-signal.SIGXCPU, -signal.SIGKILL) else TOO_LARGE
        report(msgspec.json.encode(CompileResult(compilation.number, refusal=refusal)))


def report(line: bytes) -> None:
    """Writes a result to standard output."""
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def _confine() -> None:
    """Limits the resources of this process, which compiles one constraint."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    with suppress(OSError):
        os.nice(NICENESS)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_MEMORY, used + MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))


def main(folder: str) -> None:
    try:
        vocabulary = read_vocabulary(Path(folder))
    except ModelRefused as error:
        report(msgspec.json.encode(CompileResult(0, refusal=str(error))))
        return
    report(msgspec.json.encode(CompileResult(0)))
    CompilationServer(vocabulary).run()


if __name__ == "__main__":
    main(sys.argv[1])
