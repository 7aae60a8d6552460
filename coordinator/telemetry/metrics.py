"""Metrics for Prometheus: counters updated during calls, values read at each scrape, and the HTTP port.

Only a service with metrics imports this module, and prometheus_client with it.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from coordinator.telemetry.collector import Gauges
from coordinator.telemetry.metric_sources import MetricSources
from coordinator.telemetry.request_metrics import RequestMetrics
from longleaf import __version__
from longleaf.config import join_address
from longleaf.metrics_server import PATH, MetricsServer


class Metrics:
    """Lifecycle: start, stop. `model` is the name that clients see; `launcher` is the launcher of the ranks."""

    def __init__(self, model: str, launcher: str) -> None:
        disable_created_metrics()  # otherwise each metric has a second series, `_created`
        self._registry = CollectorRegistry(auto_describe=False)
        self._model = model
        self._build = {"version": __version__, "torch": _torch_version(), "launcher": launcher}
        self.observer = RequestMetrics(self._registry, model)
        """The observer of calls and generations."""
        self._gauges: Gauges | None = None
        self._port = MetricsServer(self.render, CONTENT_TYPE_PLAIN_0_0_4)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._turn = asyncio.Lock()

    async def start(self, sources: MetricSources, host: str, port: int) -> str:
        """Opens the port and returns the URL of the metrics. Raises StartError."""
        self._gauges = Gauges(sources, self._model, self._build)
        self._registry.register(self._gauges)
        bound = await self._port.start(host, port)
        return f"http://{join_address(host, bound)}{PATH}"

    async def render(self) -> bytes:
        """The current metrics in Prometheus' text format. Formatting runs in a thread: with many tenants there are
        thousands of lines."""
        async with self._turn:
            self.refresh()
            return await asyncio.get_running_loop().run_in_executor(self._thread, generate_latest, self._registry)

    def refresh(self) -> None:
        """Collects the values that are not counted; this blocks the event loop."""
        if self._gauges is not None:
            self._gauges.refresh()

    async def stop(self) -> None:
        """Closes the port. Idempotent."""
        await self._port.stop()
        self._thread.shutdown(wait=False)


def _torch_version() -> str:
    """Version of torch in this installation, which is not imported here; empty without torch."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
