"""A service as users meet it that knows three tenants, over encrypted connections, and commands as any of them."""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, Self

from longleaf.client import Client
from longleaf.credentials import digest_of
from tests.support.authority import Authority
from tests.support.command_line import CLI, Served
from tests.support.tenants import ROLES, credential_of, write_credentials


class Tenanted(AbstractContextManager["Tenanted"]):
    """A running `longleaf serve` for acme, bolt and ops, to be entered; its keys lie in `folder`. `options` are further
    ones of the service, `others` come in as well."""

    def __init__(self, folder: Path, *options: str, others: Sequence[str] = ()) -> None:
        self.authority = Authority(folder / "ca")
        cert, key = self.authority.write("server")
        self.credentials = write_credentials(folder, *others)
        self._folder, self._stack = folder, ExitStack()
        ways = ("--tls-cert", str(cert), "--tls-key", str(key), "--credentials", str(self.credentials))
        self.served = Served(*ways, *options)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.served)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def address(self) -> str:
        return self.served.address

    def client(self, tenant: str) -> Client:
        return Client(self.address, **self.authority.access(credential=credential_of(tenant)))

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a client command with these variables and no other credentials."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("LONGLEAF_")}
        command = [*CLI, *arguments, "--server", self.address]
        options: Any = {"capture_output": True, "text": True, "timeout": 120, "check": False}
        return subprocess.run(command, env=own | environment, **options)

    def run_as(self, tenant: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """As a tenant, whose credential is in a file."""
        file = self._folder / f"{tenant}.credential"
        file.write_text(f"{credential_of(tenant)}\n")
        access = ("--tls-ca", str(self.authority.file), "--credential-file", str(file))
        return self.run(*arguments, *access)

    def json_as(self, tenant: str, *arguments: str) -> Any:
        """The --json output of a tenant's successful command; a list if it has several lines."""
        found = self.run_as(tenant, *arguments, "--json")
        assert found.returncode == 0, found.stderr
        output = [json.loads(line) for line in found.stdout.splitlines()]
        return output[0] if len(output) == 1 else output

    def ingest(self, tenant: str, name: str, text: str) -> None:
        file = self._folder / f"{tenant}-{name}.txt"
        file.write_text(text, encoding="utf-8")
        self.json_as(tenant, "ingest", str(file), "--name", name)

    def ask(self, tenant: str, name: str, question: str, num_tokens: int = 16) -> list[int]:
        """The ids of the greedy answer."""
        lines = self.json_as(tenant, "ask", name, question, "--max-tokens", str(num_tokens), "--ignore-end-token")
        return [token_id for line in lines for token_id in line.get("token_ids", ())]

    def names(self, tenant: str) -> list[str]:
        """The names of all contexts that are visible to the tenant."""
        return [context["id"] for context in self.json_as(tenant, "contexts", "list")["contexts"]]

    def secrets(self) -> list[str]:
        """The secrets that must not appear in any output or file."""
        shown = [credential_of(tenant) for tenant in ROLES]
        return [*shown, *(digest_of(each).hex() for each in shown)]
