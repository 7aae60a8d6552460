"""An object store of a test, which speaks S3 on the loopback."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import boto3
from moto.server import ThreadedMotoServer

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "longleaf", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_DEFAULT_REGION": "eu-test-1"}


class ObjectStore:
    """A server with one bucket, which can be stopped."""

    def __init__(self) -> None:
        self._server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.endpoint = f"http://{host}:{port}"
        self.bucket = f"bucket-{secrets.token_hex(4)}"
        """Buckets of all servers of one process lie beside each other."""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}/snapshots"

    @property
    def environment(self) -> Mapping[str, str]:
        """What a process must have to find it at `url`."""
        return {**CREDENTIALS, "AWS_ENDPOINT_URL_S3": self.endpoint}

    def stop(self) -> None:
        self._server.stop()


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """A server, which this process finds at its `url` meanwhile."""
    server = ObjectStore()
    before = dict(os.environ)
    os.environ.update(server.environment)
    try:
        boto3.client("s3").create_bucket(
            Bucket=server.bucket, CreateBucketConfiguration={"LocationConstraint": CREDENTIALS["AWS_DEFAULT_REGION"]}
        )
        yield server
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.stop()
