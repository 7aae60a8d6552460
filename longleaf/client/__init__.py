"""The client library: `AsyncClient`, and `Client` for code without an event loop."""

from longleaf.client.aio import AsyncClient
from longleaf.client.retries import Retries, Retry
from longleaf.client.sync import Client

__all__ = ["AsyncClient", "Client", "Retries", "Retry"]
