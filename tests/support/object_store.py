"""An object store of a test, which speaks S3 on the loopback."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Thread
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

REGION = "eu-west-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "longleaf", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_DEFAULT_REGION": REGION}


class ObjectStore:
    """A server with one bucket. Buckets of all servers of one process lie beside each other."""

    def __init__(self) -> None:
        self._server = make_server("127.0.0.1", 0, answer, True, request_handler=MotoRequestHandler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self.bucket = f"bucket-{secrets.token_hex(4)}"

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/snapshots"

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables with which a process finds it at `url`."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": self.endpoint}

    def make_bucket(self) -> None:
        client = boto3.client("s3", endpoint_url=self.endpoint)
        client.create_bucket(Bucket=self.bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
        client.close()

    def stop(self) -> None:
        """From now on connections are refused."""
        self._server.shutdown()
        self._thread.join()


_APPLICATION = DomainDispatcherApplication(create_backend_app)


def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """The response of moto without its `Server` header, because werkzeug adds one: clients refuse duplicate headers."""

    def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
        return start_response(status, [header for header in headers if header[0].lower() != "server"], *more)

    return _APPLICATION(environ, start)


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server, which this process finds at its `url` meanwhile."""
    server, before = ObjectStore(), dict(os.environ)
    os.environ.update(server.environment)
    try:
        server.make_bucket()
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()
