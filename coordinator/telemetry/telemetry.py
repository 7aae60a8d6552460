"""Everybody who watches a service, from its start to its end, and its log."""

from typing import TYPE_CHECKING, Protocol

from coordinator.telemetry import logs
from coordinator.telemetry.access_log import AccessLog
from coordinator.telemetry.metric_sources import MetricSources
from coordinator.telemetry.observers import Observer, Observers
from longleaf.errors import InvalidArgument
from longleaf.logs import Logs
from longleaf.service_settings import TelemetryConfig

if TYPE_CHECKING:
    from coordinator.telemetry.metrics import Metrics


class ManagedObserver(Observer, Protocol):
    """An observer with a life of its own."""

    async def start(self) -> None:
        """Begins, before there is anything to see. Raises InvalidArgument for settings that cannot work."""
        ...

    async def stop(self) -> None:
        """Ends, after all that there was to see. Called only after `start`, which may have raised."""
        ...


class Telemetry:
    """Who watches a service of the model that clients see as `model`, whose ranks `launcher` starts. `is_open`: it asks
    nobody who they are."""

    def __init__(self, config: TelemetryConfig, model: str, launcher: str, is_open: bool) -> None:
        self._config, self._model, self._launcher, self._is_open = config, model, launcher, is_open
        self._logs: Logs | None = None
        self._watchers: list[ManagedObserver] = []
        self._metrics: Metrics | None = None

    async def start(self) -> Observers:
        """Logs as the settings say from now on; gives those who are to be told of calls and generations. Raises
        InvalidArgument."""
        self._logs = logs.set_up(self._config)
        for watcher in self._wanted():
            self._watchers.append(watcher)
            await watcher.start()
        self._metrics = self._make_metrics()
        return Observers([*self._watchers, *([self._metrics.observer] if self._metrics else [])])

    def _make_metrics(self) -> "Metrics | None":
        """What nobody wants is not even imported."""
        if self._config.metrics_port is None:
            return None
        from coordinator.telemetry.metrics import Metrics

        return Metrics(self._model, self._launcher)

    async def tell(self, sources: MetricSources) -> tuple[str, ...]:
        """Opens the port of metrics, if anybody wants them; gives where they are, for people. Raises StartError."""
        if self._metrics is None or (port := self._config.metrics_port) is None:
            return ()
        return (f"metrics are at {await self._metrics.start(sources, self._config.metrics_host, port)}",)

    def _wanted(self) -> list[ManagedObserver]:
        """Those that the settings ask for, the first one told last of an end."""
        wanted: list[ManagedObserver] = []
        if self._is_logging_calls:
            wanted.append(AccessLog())
        if self._config.traces:
            wanted.append(_traces(self._model))
        return wanted

    @property
    def _is_logging_calls(self) -> bool:
        """On a service for everybody on this machine nobody who was not asked wants to read of each deletion."""
        return not (self._is_open and self._config.has_plain_log)

    async def stop(self) -> None:
        """Ends what `start` began; again, it does nothing."""
        if self._metrics is not None:
            await self._metrics.stop()
        while self._watchers:
            await self._watchers.pop().stop()
        if self._logs is not None:
            self._logs.take_down()
            self._logs = None


def _traces(model: str) -> ManagedObserver:
    """Raises InvalidArgument when what they are made with is not installed."""
    try:
        from coordinator.telemetry.otlp_tracing import OtlpTraces
    except ImportError:
        raise InvalidArgument(
            "traces", "requires packages that are not installed: pip install 'longleaf[otel]'"
        ) from None
    return OtlpTraces(model)
