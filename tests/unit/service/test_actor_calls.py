"""Calls of Ray actors, which no type checker sees: Ray checks their arguments when they run."""

import ast
import inspect
from pathlib import Path

import pytest

import coordinator.__main__
import coordinator.cluster.ray_fleet
from coordinator.actor import CoordinatorActor
from workers.actor import WorkerActor

ROLES = [(coordinator.__main__, CoordinatorActor), (coordinator.cluster.ray_fleet, WorkerActor)]


def remote_calls(source: str) -> list[tuple[str, ast.Call]]:
    """Calls `actor.METHOD.remote(...)`, with the name of the method."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(
                func=ast.Attribute(attr="remote", value=ast.Attribute(attr=method, value=ast.Name(id="actor")))
            ):
                found.append((method, node))
    return found


@pytest.mark.parametrize(("module", "actor"), ROLES)
def test_remote_calls_match_the_methods_of_the_actor(module, actor):
    calls = remote_calls(Path(module.__file__).read_text())
    assert calls, "the module calls its actor"
    for method, call in calls:
        arguments = inspect.signature(getattr(actor, method))
        arguments.bind(None, *call.args, **{str(keyword.arg): keyword.value for keyword in call.keywords})
