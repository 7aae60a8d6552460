"""Starts and stops the observers of a service and its log."""

from typing import TYPE_CHECKING

from coordinator.telemetry import logs
from coordinator.telemetry.access_log import AccessLog
from coordinator.telemetry.metric_sources import MetricSources
from coordinator.telemetry.observers import Observers
from longleaf.errors import InvalidArgument
from longleaf.logs import Logs
from longleaf.service_settings import TelemetryConfig

if TYPE_CHECKING:
    from coordinator.telemetry.metrics import Metrics
    from coordinator.telemetry.otlp_tracing import OtlpTraces


class Telemetry:
    """The observers of a service. `model` is the model name that clients see, and `launcher` starts the ranks. With
    `is_open`, clients are not authenticated."""

    def __init__(self, config: TelemetryConfig, model: str, launcher: str, is_open: bool) -> None:
        self._config, self._model, self._launcher, self._is_open = config, model, launcher, is_open
        self._logs: Logs | None = None
        self._watchers: list[AccessLog | OtlpTraces] = []
        self._metrics: Metrics | None = None

    async def start(self) -> Observers:
        """Configures logging, and returns the observers of calls and generations. Raises InvalidArgument."""
        self._logs = logs.set_up(self._config)
        for watcher in self._wanted():
            self._watchers.append(watcher)
            await watcher.start()
        self._metrics = self._make_metrics()
        return Observers([*self._watchers, *([self._metrics.observer] if self._metrics else [])])

    def _make_metrics(self) -> "Metrics | None":
        """Imports the metrics if they are enabled."""
        if self._config.metrics_port is None:
            return None
        from coordinator.telemetry.metrics import Metrics

        return Metrics(self._model, self._launcher)

    async def log_start(self, sources: MetricSources) -> tuple[str, ...]:
        """Opens the metrics port, if configured, and returns a note with its address. Raises StartError."""
        if self._metrics is None or (port := self._config.metrics_port) is None:
            return ()
        return (f"metrics are at {await self._metrics.start(sources, self._config.metrics_host, port)}",)

    def _wanted(self) -> list["AccessLog | OtlpTraces"]:
        """The configured observers. The first one is the last to be notified of an end."""
        wanted: list[AccessLog | OtlpTraces] = []
        if self._is_logging_calls:
            wanted.append(AccessLog())
        if self._config.traces:
            wanted.append(_traces(self._model))
        return wanted

    @property
    def _is_logging_calls(self) -> bool:
        """Whether calls are logged. Not for an unauthenticated service with a plain log, which has a single local
        user."""
        return not (self._is_open and self._config.has_plain_log)

    async def stop(self) -> None:
        """Stops everything that `start` started. Idempotent."""
        if self._metrics is not None:
            await self._metrics.stop()
        while self._watchers:
            await self._watchers.pop().stop()
        if self._logs is not None:
            self._logs.take_down()
            self._logs = None


def _traces(model: str) -> "OtlpTraces":
    """Raises InvalidArgument when a required package is not installed."""
    try:
        from coordinator.telemetry.otlp_tracing import OtlpTraces
    except ImportError:
        raise InvalidArgument(
            "traces", "requires packages that are not installed: pip install 'longleaf[otel]'"
        ) from None
    return OtlpTraces(model)
