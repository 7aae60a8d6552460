"""Templates that never end or use all memory end with their process; other templates are rendered."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from coordinator.service import Service
from coordinator.text.compat_check import check
from coordinator.text.renderer import Renderer
from coordinator.text.template import DirectRenderer, Messages, Rendering
from coordinator.text.tokenizer import Tokenizer
from longleaf.config import EngineConfig
from longleaf.errors import ModelRefused, StartError
from longleaf.service_settings import ServiceConfig
from tests.support.service import TEMPLATE, write_model

ENDLESS = (
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"
)
"""A template that ends after days. Each loop is as long as the sandbox allows."""


class NoFleet:
    """A fleet that fails at a launch: the tokenizer is loaded first."""

    num_missing = 0

    async def launch(self, *arguments: object) -> None:
        raise AssertionError("launched")

    async def shutdown(self) -> None:
        pass


def service_of(folder: Path, **settings: float) -> Service:
    write_model(folder, template=ENDLESS)
    engine = EngineConfig(model=str(folder), **settings)  # type: ignore[arg-type]
    return Service(ServiceConfig(engine=engine, port=0, launcher="local"), NoFleet())


def renderings() -> list[psutil.Process]:
    """The running renderer processes."""
    return [child for child in psutil.Process().children() if "coordinator.text.template" in _command(child)]


def _command(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def conversation(*roles: str) -> Messages:
    return [{"role": role, "content": f"{i}\n\u2028é"} for i, role in enumerate(roles)]


@pytest.fixture(name="renderer")
def make_renderer() -> Iterator[Renderer]:
    renderer = Renderer(seconds=1)
    yield renderer
    renderer.stop()


QUESTION, TURNS = conversation("user"), conversation("user", "assistant", "user")


def test_process_renders_like_the_direct_renderer(renderer: Renderer) -> None:
    tokens = {"bos_token": "<|begin|>"}
    (rendering,) = renderer.render(TEMPLATE, tokens, [QUESTION])
    assert rendering == Rendering("<|begin|><|user|>0\n\u2028é<|model|>")
    for source in (TEMPLATE, "{{ raise_exception('no users') }}", "{% if %}", "{{ '\\ud800' }}", "{{ bos_token }}"):
        direct = DirectRenderer()
        assert renderer.render(source, tokens, [QUESTION, TURNS]) == direct.render(source, tokens, [QUESTION, TURNS])
        assert renderer.literals(source) == direct.literals(source)
    assert len(renderings()) == 1, "one process renders all"


def test_literals_are_found_in_a_template() -> None:
    source = "<a>{# <b> #}{{ '<c>' if x['<d>'] else y }}{% if '<e>' in z %}\n{% endif %}"
    assert sorted(DirectRenderer().literals(source)) == ["<a>", "<c>", "<d>", "<e>"]
    assert DirectRenderer().literals("{% if %}") == []


@pytest.mark.parametrize(
    "source", [ENDLESS, pytest.param("{{ 9 ** (9 ** 9) }}", marks=pytest.mark.extended)], ids=["loops", "power"]
)
def test_endless_template_is_refused_and_the_next_is_rendered(source: str, renderer: Renderer) -> None:
    for _ in range(2):
        found = renderer.render(source, {}, [QUESTION, TURNS])
        assert found == [Rendering(reason="did not finish within 1 s of processor time")] * 2
    assert renderer.render("x", {}, [QUESTION]) == [Rendering("x")]


def test_killed_process_is_replaced(renderer: Renderer) -> None:
    assert renderer.render("x", {}, [QUESTION]) == [Rendering("x")]
    (process,) = renderings()
    process.kill()
    process.wait(20)
    assert renderer.render("x", {}, [QUESTION]) == [Rendering("x")]


@pytest.mark.parametrize("size", [1, 1 << 20], ids=["small", "more than a pipe takes"])
def test_suspended_process_is_killed(size: int) -> None:
    """A process stopped by SIGSTOP uses no processor time and never answers."""
    renderer = Renderer(patience=1)
    while renderer.render("x", {}, [QUESTION]) != [Rendering("x")]:
        pass  # it did not start in time
    (process,) = renderings()
    process.suspend()
    found = renderer.render("x", {}, [[{"role": "user", "content": "x" * size}]])
    assert found == [Rendering(reason="did not finish within 1 s")]
    assert renderings() == [], "the next rendering starts another process"
    renderer.stop()


def test_renderings_run_concurrently(renderer: Renderer) -> None:
    found: list[Rendering] = []
    slow = threading.Thread(target=lambda: found.extend(renderer.render(ENDLESS, {}, [QUESTION])))
    slow.start()
    asyncio.run(until_rendering())
    assert renderer.render("x", {}, [QUESTION]) == [Rendering("x")]
    assert not found
    slow.join()


def test_all_renderings_use_the_time_of_the_start() -> None:
    renderer = Renderer(now=datetime(2024, 12, 31, 23, 59, 59))
    for _ in range(2):
        (rendering,) = renderer.render("{{ strftime_now('%d %b %Y %H:%M:%S') }}", {}, [QUESTION])
        assert rendering.text == "31 Dec 2024 23:59:59"
    renderer.stop()


@pytest.mark.parametrize(
    ("source", "message"), [("'x' * 10 ** 10", "MemoryError"), ("'x' * 10 ** 7", "10,000,000 characters")]
)
def test_template_with_too_much_output_is_refused(
    tmp_path: Path, source: str, message: str, renderer: Renderer
) -> None:
    folder = write_model(tmp_path / "model", template=f"{{{{ {source} }}}}")
    assert message in check(folder).reason
    with pytest.raises(ModelRefused, match=message):
        Tokenizer.load(folder, renderer)


async def until_rendering() -> psutil.Process:
    while True:
        if found := renderings():
            return found[0]
        await asyncio.sleep(0.001)


@pytest.mark.timeout(60)
async def test_service_can_be_stopped_while_it_loads_an_endless_template(tmp_path: Path) -> None:
    service = service_of(tmp_path / "model")
    starting = asyncio.create_task(service.start())
    process = await until_rendering()
    await service.stop()
    with pytest.raises(StartError, match="was stopped"):
        await starting
    assert await asyncio.to_thread(psutil.wait_procs, [process], 20) == ([process], [])


@pytest.mark.timeout(60)
async def test_tokenizer_load_counts_towards_the_start_timeout(tmp_path: Path) -> None:
    service = service_of(tmp_path / "model", start_timeout=1.5)
    starting = asyncio.create_task(service.start())
    process = await until_rendering()
    with pytest.raises(StartError, match=r"did not load within 1\.5 s"):
        await starting
    await service.stop()
    assert await asyncio.to_thread(psutil.wait_procs, [process], 20) == ([process], [])


def test_stopped_renderer_starts_nothing() -> None:
    renderer = Renderer()
    renderer.stop()
    with pytest.raises(StartError, match="was stopped"):
        renderer.render(TEMPLATE, {}, [QUESTION])


def test_rendering_can_be_cancelled_from_another_thread() -> None:
    renderer, failures = Renderer(), []

    def render() -> None:
        try:
            renderer.render(ENDLESS, {}, [QUESTION])
        except StartError as error:
            failures.append(str(error))

    thread = threading.Thread(target=render)
    thread.start()
    asyncio.run(until_rendering())
    renderer.stop()
    thread.join()
    assert failures == ["the service was stopped while the chat template was rendered"]
