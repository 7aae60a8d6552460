"""Scripts that do not close their client exit normally, print no warning, and leave no call open."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.service import Served, ids

HEAD = """
import asyncio, gc, os, signal, sys, threading
from contextlib import suppress
from longleaf.client import AsyncClient, Client
from longleaf.errors import Cancelled, LongleafError
from longleaf.types import Delta

def begin(client, **options):
    stream = client.generate("x", **options)
    while not isinstance(next(stream), Delta):
        pass
    return stream
"""
PLAIN = HEAD + "client = Client(sys.argv[1])\n"
CARELESS = {
    "a stream half read": "stream = begin(client)",
    "a resumable stream half read": "stream = begin(client, resumable=True)",
    "several clients": "streams = [begin(client), begin(Client(sys.argv[1])), begin(Client(sys.argv[1]))]",
    "no stream": "client.cluster()",
    "a stream that a thread left": """
        def read():
            global stream
            stream = begin(client)
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    """,
    "a thread that still reads": """
        def read():
            with suppress(LongleafError):
                stream = begin(client)
                begun.set()
                list(stream)
        begun = threading.Event()
        threading.Thread(target=read, daemon=True).start()
        begun.wait()
    """,
    "a stream in a cycle": """
        gc.disable()
        cycle = [begin(client)]
        cycle.append(cycle)
        del cycle
    """,
    "a stream in a cycle of modules": "sys.stream, sys.client = begin(client), client",
    "an ingest whose document never ends": """
        import pathlib
        os.mkfifo(sys.argv[2])
        steps = client.ingest_steps("book", pathlib.Path(sys.argv[2]))
        next(steps)
    """,
}
CARELESS_ASYNC = {
    "a stream half read": "stream = await begin_async(AsyncClient(sys.argv[1]))",
    "a resumable stream half read": "stream = await begin_async(AsyncClient(sys.argv[1]), resumable=True)",
    "a stream half read, its client closed": """
        async with AsyncClient(sys.argv[1]) as client:
            stream = await begin_async(client, resumable=True)
    """,
    "a task that still reads": """
        async def read():
            stream = await begin_async(AsyncClient(sys.argv[1]))
            begun.set()
            async for _ in stream:
                pass
        begun = asyncio.Event()
        task = asyncio.create_task(read())
        await begun.wait()
    """,
}
ASYNC = HEAD + dedent("""
    async def begin_async(client, **options):
        stream = client.generate("x", **options)
        while not isinstance(await anext(stream), Delta):
            pass
        return stream

    async def main():
        global stream, client
    """)


@pytest.fixture
def endless(service: Served) -> Served:
    """A service whose answers start and never end."""
    service.engine.answer = tuple((token_id,) for token_id in ids("two words"))
    service.engine.is_endless = True
    return service


class Script:
    """A user's program in a separate process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, code: str, *arguments: object) -> "Script":
        command = [sys.executable, "-Wdefault::RuntimeWarning", "-c", code, *map(str, arguments)]
        pipe = asyncio.subprocess.PIPE
        # With its support for forks gRPC touches threads and sockets in the child, and crashes there now and then.
        options = {"env": os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "0"}, "start_new_session": True}
        return cls(await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, **options))

    async def end(self, seconds: float = 8.0) -> tuple[int | None, str, str]:
        """The exit code and the output."""
        try:
            output = await asyncio.wait_for(self._process.communicate(), seconds)
        except TimeoutError:
            os.killpg(self._process.pid, signal.SIGKILL)
            output = await self._process.communicate()
            pytest.fail(f"the script does not end: {output}")
        return self._process.returncode, output[0].decode(), output[1].decode()

    async def interrupt(self) -> None:
        """Sends Ctrl-C after the first output."""
        assert self._process.stdout is not None
        assert await self._process.stdout.readline()
        self._process.send_signal(signal.SIGINT)


async def check_left_nothing(service: Served, num_streams: int) -> None:
    assert len(service.engine.streams) == num_streams
    async with asyncio.timeout(10):
        await asyncio.gather(*(stream.closed.wait() for stream in service.engine.streams))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("careless", CARELESS)
async def test_script_with_an_open_client_exits(endless: Served, careless: str, tmp_path: Path) -> None:
    script = await Script.start(PLAIN + dedent(CARELESS[careless]), endless.address, tmp_path / "fifo")
    assert await script.end() == (0, "", "")
    await check_left_nothing(endless, CARELESS[careless].count("begin("))


@pytest.mark.parametrize("careless", CARELESS_ASYNC)
async def test_asynchronous_script_with_an_open_client_exits(endless: Served, careless: str) -> None:
    body = "".join(f"    {line}\n" for line in dedent(CARELESS_ASYNC[careless]).splitlines())
    script = await Script.start(f"{ASYNC}{body}\nasyncio.run(main())", endless.address)
    assert await script.end() == (0, "", "")
    await check_left_nothing(endless, 1)


async def test_event_loop_closed_during_a_stream_exits(endless: Served) -> None:
    """Nothing of the asynchronous client runs after its loop."""
    body = "    stream = await begin_async(AsyncClient(sys.argv[1]))\n"
    closing = "loop = asyncio.new_event_loop()\nloop.run_until_complete(main())\nloop.close()\n"
    script = await Script.start(f"{ASYNC}{body}{closing}", endless.address)
    code, out, _ = await script.end()
    assert (code, out) == (0, "")
    await check_left_nothing(endless, 1)


async def test_error_during_a_stream_is_the_last_output(endless: Served) -> None:
    script = await Script.start(f"{PLAIN}for event in client.generate('x'):\n    sys.exit(3)", endless.address)
    assert await script.end() == (3, "", "")
    script = await Script.start(f"{PLAIN}stream = begin(client)\nraise ValueError('mine')", endless.address)
    code, out, output = await script.end()
    assert (code, out, output.splitlines()[-1], output.count("Traceback")) == (1, "", "ValueError: mine", 1)
    await check_left_nothing(endless, 2)


@pytest.mark.parametrize("resident", ["stream", "list(begin(client))"])
async def test_interrupt_during_a_stream_exits(endless: Served, resident: str) -> None:
    code = f"stream = begin(client)\nprint('reading', flush=True)\nfor _ in {resident}:\n    pass"
    script = await Script.start(PLAIN + code, endless.address)
    await script.interrupt()
    code, _, output = await script.end()
    assert (code, output.splitlines()[-1], output.count("Traceback")) == (-signal.SIGINT, "KeyboardInterrupt", 1)
    await check_left_nothing(endless, len(endless.engine.streams))


async def test_forked_child_does_not_touch_the_client_of_its_parent(endless: Served) -> None:
    """The child has no thread that could answer it, shares sockets with its parent, and must not touch them."""
    code = """
        stream = begin(client)
        child = os.fork()
        if not child:
            for use in (client.cluster, lambda: next(client.generate("x")), lambda: next(stream)):
                try:
                    use()
                except Cancelled as error:
                    print(error, flush=True)
            client.close()
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        print(client.count_tokens("two"), len(client.list_contexts()), flush=True)
        other = begin(client)
    """
    script = await Script.start(PLAIN + dedent(code), endless.address)
    code, out, output = await script.end()
    assert (code, output) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["the", "the", "the", "3"]
    await check_left_nothing(endless, 2)
