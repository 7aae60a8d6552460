"""Credentials: how they are made, and the file that says who may come in.

One line for each tenant, in any order, `#` begins a comment:

    acme  user   sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  contexts=20 tokens=2000000
    ops   admin  sha256:...  sha256:...  uri:spiffe://cluster.local/ns/ops/sa/longleaf

After tenant and role come the digests of its credentials, of which any opens the door (so that one may be replaced by
another), names of client certificates (`uri:` or `dns:`), and quotas. Credentials themselves are in no file here.
"""

import hashlib
import re
import secrets
from typing import Literal, get_args

import msgspec

from longleaf.errors import InvalidArgument
from longleaf.tenants import TENANT

Role = Literal["user", "admin"]
PREFIX = "longleaf-"
"""How credentials begin, so that scanners of repositories can know them."""
NUM_RANDOM_BYTES = 32
RESERVED = frozenset({"contexts", "generations", "quotas", "uploads"})
"""Words that name resources, and would be read so in messages."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"(?:uri|dns):(\S+)")
_QUOTA = re.compile(r"([a-z_]+)=([0-9][0-9_]*)")
BOM = "\ufeff"


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may take at most; None: no limit of its own."""

    contexts: int | None = None
    """Contexts at once."""
    tokens: int | None = None
    """Tokens of all its contexts together."""
    storage_bytes: int | None = None
    """Bytes that its contexts take on storage."""
    generations: int | None = None
    """Generations that run at once."""
    waiting: int | None = None
    """Generations that may wait beside those; more are refused. Only with `generations`."""
    uploads: int | None = None
    """Ingests and imports at once."""
    tokens_in_per_minute: int | None = None
    """Tokens of prompts and documents."""
    tokens_out_per_minute: int | None = None
    """Generated tokens."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant of the file."""

    tenant: str
    role: Role
    digests: tuple[bytes, ...] = ()
    """SHA-256 of its credentials."""
    names: tuple[str, ...] = ()
    """URI and DNS names of client certificates."""
    quotas: Quotas = Quotas()


def digest_of(credential: str) -> bytes:
    """What the file keeps of a credential: 32 bytes."""
    return hashlib.sha256(credential.encode()).digest()


def new_credential() -> str:
    """A credential that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def line_of(entry: Entry) -> str:
    """The line for the file."""
    quotas = {name: getattr(entry.quotas, name) for name in Quotas.__struct_fields__}
    parts = [entry.tenant, entry.role, *(f"sha256:{digest.hex()}" for digest in entry.digests)]
    parts += [f"{'uri' if '://' in name else 'dns'}:{name}" for name in entry.names]
    return "  ".join([*parts, *(f"{name}={value}" for name, value in quotas.items() if value is not None)])


def parse_credentials(data: bytes) -> tuple[Entry, ...]:
    """The entries of a file. Raises InvalidArgument naming the line, and never quoting what might be a secret."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument("credentials", f"byte {error.start} is not UTF-8") from None
    if text.startswith(BOM):
        raise InvalidArgument("credentials", "begins with a byte-order mark: save it as UTF-8 without one")
    entries = list[Entry]()
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            entries.append(_entry(words, number))
            _check_new(entries, number)
    if not entries:
        raise InvalidArgument("credentials", "has no entries: nobody could come in")
    return tuple(entries)


def check_tenant(tenant: str, field: str = "tenant") -> str:
    """`tenant`. Raises InvalidArgument naming `field` where nobody may be called so."""
    if TENANT.fullmatch(tenant) is None or tenant in RESERVED:
        told = "must be 1 to 63 of a-z 0-9 -, a letter or digit first and last"
        raise InvalidArgument(field, f"{told}, and none of {', '.join(sorted(RESERVED))}")
    return tenant


def _entry(words: list[str], number: int) -> Entry:
    if len(words) < 2 or words[1] not in get_args(Role):
        raise _bad(number, f"is not TENANT ROLE ...; a role is one of {', '.join(get_args(Role))}")
    try:
        tenant = check_tenant(words[0])
    except InvalidArgument as error:
        raise _bad(number, str(error)) from None
    digests, names, quotas = list[bytes](), list[str](), dict[str, int]()
    for place, word in enumerate(words[2:], 3):
        if found := _DIGEST.fullmatch(word):
            digests.append(bytes.fromhex(found[1]))
        elif found := _NAME.fullmatch(word):
            names.append(found[1])
        elif (found := _QUOTA.fullmatch(word)) and found[1] in Quotas.__struct_fields__ and found[1] not in quotas:
            quotas[found[1]] = int(found[2])
        else:
            raise _bad(
                number, f"its word {place} is no sha256:HEX of 64 digits, uri:NAME, dns:NAME or known QUOTA=NUMBER"
            )
    if "waiting" in quotas and "generations" not in quotas:
        raise _bad(number, "waiting=NUMBER is for those beside generations=NUMBER, which is missing")
    if not digests and not names:
        raise _bad(number, f"{tenant} has no sha256:..., uri:... or dns:...: nobody could come in as it")
    return Entry(
        tenant=tenant,
        role="admin" if words[1] == "admin" else "user",
        digests=tuple(digests),
        names=tuple(names),
        quotas=Quotas(**quotas),
    )


def _check_new(entries: list[Entry], number: int) -> None:
    """Raises InvalidArgument where the last of them has what is another's."""
    last = entries[-1]
    for other in entries[:-1]:
        if other.tenant == last.tenant:
            raise _bad(number, f"the tenant {last.tenant} has a line already; all its credentials are on one line")
        if {*other.digests} & {*last.digests} or {*other.names} & {*last.names}:
            raise _bad(number, f"{last.tenant} has a credential or a name that is {other.tenant}'s")


def _bad(number: int, told: str) -> InvalidArgument:
    return InvalidArgument("credentials", f"line {number}: {told}")
