"""The coordinator as an actor. The composition root gives this class to Ray; nothing here knows Ray."""

import asyncio
from collections.abc import Callable

import msgspec

from coordinator.ranks.ports import Fleet
from coordinator.service import Service, ServiceConfig
from longleaf.errors import LongleafError, WorkerLost
from longleaf.launch import BAD_INPUT

NAME = "longleaf-coordinator"
NAMESPACE = "longleaf"

FAILED = 1


class Reply(msgspec.Struct, frozen=True):
    """How a call went: the port when the service listens, else what to tell the user and the process's exit code."""

    port: int = 0
    notes: tuple[str, ...] = ()
    """What ranks say of their start: which merge was chosen and why, and what is slower than it could be."""
    error: str = ""
    exit_code: int = 0


def describe(error: Exception) -> Reply:
    """Settings that cannot work are the user's to change (exit code 2); everything else is a failure (1)."""
    if not isinstance(error, LongleafError):
        return Reply(error=repr(error), exit_code=FAILED)
    return Reply(error=str(error), exit_code=FAILED if isinstance(error, WorkerLost) else BAD_INPUT)


class CoordinatorActor:
    """Holds one service. Errors come back as values: exceptions would have to survive two serializers."""

    def __init__(self, config: ServiceConfig, make_fleet: Callable[[], Fleet]) -> None:
        self._service = Service(config, make_fleet())
        self._is_stopping = False

    async def start(self) -> Reply:
        """Brings the service up."""
        try:
            return Reply(port=await self._service.start(), notes=self._service.notes)
        except Exception as error:
            await self._service.stop()
            return describe(error)

    async def wait(self) -> Reply:
        """Waits for the end of the service; when a rank is lost, reaps the others first."""
        try:
            await self._service.wait()
        except asyncio.CancelledError:
            return Reply()
        except Exception as error:
            if self._is_stopping:
                return Reply()
            await self._service.stop()
            return msgspec.structs.replace(describe(error), exit_code=FAILED)
        return Reply()

    async def stop(self) -> None:
        """Takes the service down."""
        self._is_stopping = True
        await self._service.stop()
