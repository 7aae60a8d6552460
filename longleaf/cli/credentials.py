"""`longleaf credentials`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from longleaf.cli.console import output_console
from longleaf.cli.help import CommandGroup
from longleaf.cli.options import AsJson, print_json
from longleaf.credentials import (
    CredentialEntry,
    Quotas,
    Role,
    check_tenant,
    digest_of,
    line_of,
    new_credential,
    parse_credentials,
)
from longleaf.errors import InvalidArgument
from longleaf.read_limited import read_small

app = CommandGroup(help="Create credentials for a service, and check the file of credentials.")


@app.command("new")
def new(
    tenant: Annotated[str, typer.Argument(help="The tenant: 1 to 63 characters of a-z, 0-9 and -.")],
    role: Annotated[
        Role, typer.Option("--role", help="Permissions; an admin may also drain, verify and reset slots.")
    ] = "user",
    as_json: AsJson = False,
) -> None:
    """Create a credential, and the line for the service's file of credentials.

    The credential is printed once and not stored: give it to clients in a file (--credential-file) or in
    LONGLEAF_CREDENTIAL. The line contains no secret. Add it to the file of `longleaf serve --credentials`, with quotas
    if you like, such as contexts=20 tokens=2000000 generations=8. The service reloads the file within a second.

    Example: longleaf credentials new acme
    """
    credential = new_credential()
    entry = CredentialEntry(tenant=check_tenant(tenant), role=role, digests=(digest_of(credential),))
    if as_json:
        print_json({"credential": credential, "line": line_of(entry)})
        return
    print(f"credential, shown once: {credential}\nline for the file:      {line_of(entry)}")


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="The file of a service's --credentials.")], as_json: AsJson = False
) -> None:
    """Check a file of credentials, and list its tenants.

    Example: longleaf credentials check credentials.txt
    """
    data = read_small("FILE", file)
    try:
        entries = parse_credentials(data)
    except InvalidArgument as error:
        raise InvalidArgument(str(file), error.description) from None
    if as_json:
        print_json([_entry_json(entry) for entry in entries])
        return
    table = Table("tenant", "role", "credentials", "certificates", "quotas")
    for entry in entries:
        quotas = ", ".join(f"{name} {value:,}" for name, value in _quotas(entry).items())
        table.add_row(entry.tenant, entry.role, f"{len(entry.digests)}", "\n".join(entry.names), quotas or "none")
    output_console().print(table)


def _quotas(entry: CredentialEntry) -> dict[str, int]:
    given = {name: getattr(entry.quotas, name) for name in Quotas.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}


def _entry_json(entry: CredentialEntry) -> dict[str, object]:
    fields: dict[str, object] = {"tenant": entry.tenant, "role": entry.role, "credentials": len(entry.digests)}
    return fields | {"certificates": entry.names, "quotas": _quotas(entry)}
