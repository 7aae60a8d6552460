"""Grammars of constraints, compiled in a separate process and cached for each tenant."""

import asyncio
import sys
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from coordinator.grammars.messages import CompileRequest, CompileResult
from longleaf.errors import InvalidArgument, Unavailable
from longleaf.types import Constraint

MAX_CONCURRENT = 8
"""Compilations at a time. Each tenant has at most one."""
MAX_CACHED_BYTES = 4 << 20
"""Grammars that are cached for a tenant, in bytes."""
MAX_TENANTS = 64
"""Tenants with cached grammars."""
MAX_LINE = 16 << 20
"""Limit on the size of one result in bytes."""
ENTRY_BYTES = 256
"""Assumed size of a cache entry besides its grammar."""
DIED = "the process that compiles grammars has died; retry the request"


class GrammarCache:
    """The results of compilations, by tenant, so that no tenant observes the grammars of others."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES, max_tenants: int = MAX_TENANTS) -> None:
        self._max_bytes = max_bytes
        self._max_tenants = max_tenants
        self._by_tenant: OrderedDict[str, OrderedDict[bytes, CompileResult]] = OrderedDict()

    def get(self, tenant: str, key: bytes) -> CompileResult | None:
        entries = self._by_tenant.get(tenant)
        if entries is None or key not in entries:
            return None
        self._by_tenant.move_to_end(tenant)
        entries.move_to_end(key)
        return entries[key]

    def put(self, tenant: str, key: bytes, result: CompileResult) -> None:
        """Adds a result, and drops the least recently used ones that exceed the limits."""
        entries = self._by_tenant.setdefault(tenant, OrderedDict())
        entries[key] = result
        self._by_tenant.move_to_end(tenant)
        while len(entries) > 1 and sum(ENTRY_BYTES + len(each.grammar) for each in entries.values()) > self._max_bytes:
            entries.popitem(last=False)
        while len(self._by_tenant) > self._max_tenants:
            self._by_tenant.popitem(last=False)


class GrammarCompiler:
    """Compiles constraints for the vocabulary of one model folder. Must be used in one event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache = GrammarCache()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._refusal = ""
        """The reason why the vocabulary has no grammars, once it is known."""
        self._starting = asyncio.Lock()
        self._turns = asyncio.Semaphore(MAX_CONCURRENT)
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        """For each tenant with compilations, its turn and the number of compilations."""
        self._pending: dict[int, asyncio.Future[CompileResult]] = {}
        self._number = 0
        self._is_closed = False
        self.num_compiled = 0
        """Number of compilations, including refused ones."""

    async def compile(self, tenant: str, constraint: Constraint) -> str:
        """The grammar of a constraint. The first call takes as long as the vocabulary is read.

        Raises InvalidArgument naming the field, and Unavailable if the process has died or the service is stopping.
        """
        constraint.check()
        key = blake3(constraint.kind.encode() + b"\0" + constraint.text.encode(errors="surrogatepass")).digest()
        result = self._cache.get(tenant, key)
        if result is None:
            lock, num_waiting = self._locks.get(tenant, (asyncio.Lock(), 0))
            self._locks[tenant] = lock, num_waiting + 1
            try:
                async with lock:
                    result = self._cache.get(tenant, key)
                    if result is None:
                        async with self._turns:
                            result = await self._call(constraint)
                        self._cache.put(tenant, key, result)
            finally:
                lock, num_waiting = self._locks.pop(tenant)
                if num_waiting > 1:
                    self._locks[tenant] = lock, num_waiting - 1
        if result.refusal:
            raise InvalidArgument(constraint.field, result.refusal)
        return result.grammar

    async def _call(self, constraint: Constraint) -> CompileResult:
        process = await self._running()
        assert process.stdin is not None
        self._number += 1
        number, future = self._number, asyncio.get_running_loop().create_future()
        self._pending[number] = future
        try:
            process.stdin.write(msgspec.json.encode(CompileRequest(number, constraint)) + b"\n")
            with suppress(ConnectionError):  # the reading task reports it
                await process.stdin.drain()
            self.num_compiled += 1
            return await future
        finally:
            del self._pending[number]

    async def _running(self) -> asyncio.subprocess.Process:
        """The process, started if there is none. Raises InvalidArgument for a vocabulary without grammars."""
        async with self._starting:
            if self._is_closed:
                raise Unavailable("the service is stopping")
            if self._refusal:
                raise InvalidArgument("constraint", self._refusal)
            if self._process is not None and self._process.returncode is None and self._reading is not None:
                return self._process
            # -P: a folder named `llguidance` in the working directory must not shadow the library
            command = [sys.executable, "-P", "-m", "coordinator.grammars.process", str(self._folder)]
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, limit=MAX_LINE, start_new_session=True
            )
            self._process = process
            assert process.stdout is not None
            line = await process.stdout.readline()
            if not line:
                raise Unavailable(DIED)
            if refusal := msgspec.json.decode(line, type=CompileResult).refusal:
                await process.wait()
                self._refusal = f"is not supported: {refusal}"
                raise InvalidArgument("constraint", self._refusal)
            self._reading = asyncio.create_task(self._read(process))
            return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Completes the pending calls of one process, and fails them when it ends."""
        assert process.stdout is not None
        while line := await process.stdout.readline():
            result = msgspec.json.decode(line, type=CompileResult)
            future = self._pending.get(result.number)
            if future is not None and not future.done():
                future.set_result(result)
        await process.wait()
        self._reading = None
        for future in self._pending.values():
            if not future.done():
                future.set_exception(Unavailable(DIED))

    async def close(self) -> None:
        """Ends the process. Idempotent."""
        self._is_closed = True
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # it ends when its input ends
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if self._reading is not None:
            await self._reading
