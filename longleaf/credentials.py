"""Credentials, and the file that lists the tenants.

The file has one line per tenant, in any order; `#` starts a comment:

    acme  user   sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  contexts=20 tokens=2000000
    ops   admin  sha256:...  sha256:...  uri:spiffe://cluster.local/ns/ops/sa/longleaf

Tenant and role are followed by the digests of the tenant's credentials (several are valid at once, to allow rotation),
names of client certificates (`uri:` or `dns:`), and quotas. The file does not contain the credentials themselves.
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
"""Prefix of credentials, which secret scanners can detect."""
NUM_RANDOM_BYTES = 32
RESERVED = frozenset({"contexts", "generations", "quotas", "uploads"})
"""Names of resources, which would be ambiguous as tenant names in messages."""
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"(?:uri|dns):\S+")
_NUMBER = re.compile(r"[0-9]{1,15}")
MIN_SECRET = len(PREFIX) + NUM_RANDOM_BYTES
"""Minimum length of text with the prefix that is treated as a credential; shorter text may be a tenant name."""
BOM = "\ufeff"


class Quotas(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a tenant; None: no limit per tenant."""

    contexts: int | None = None
    """Number of contexts."""
    tokens: int | None = None
    """Total tokens of all its contexts."""
    storage_bytes: int | None = None
    """Storage bytes of its contexts."""
    generations: int | None = None
    """Running generations."""
    waiting: int | None = None
    """Waiting generations, in addition to the running ones; more are refused. Requires `generations`."""
    uploads: int | None = None
    """Concurrent ingests and imports."""
    tokens_in_per_minute: int | None = None
    """Tokens of prompts and documents."""
    tokens_out_per_minute: int | None = None
    """Generated tokens."""


class CredentialEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant in the file."""

    tenant: str
    role: Role
    digests: tuple[bytes, ...] = ()
    """SHA-256 of its credentials."""
    names: tuple[str, ...] = ()
    """Names of client certificates, prefixed with their type: `uri:` or `dns:`."""
    quotas: Quotas = Quotas()


def digest_of(credential: str) -> bytes:
    """SHA-256 of a credential, as stored in the file."""
    return hashlib.sha256(credential.encode()).digest()


def new_credential() -> str:
    """A new random credential."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def line_of(entry: CredentialEntry) -> str:
    """The line of the file."""
    quotas = {name: getattr(entry.quotas, name) for name in Quotas.__struct_fields__}
    parts = [entry.tenant, entry.role, *(f"sha256:{digest.hex()}" for digest in entry.digests), *entry.names]
    return "  ".join([*parts, *(f"{name}={value}" for name, value in quotas.items() if value is not None)])


def parse_credentials(data: bytes) -> tuple[CredentialEntry, ...]:
    """The entries of a file. Raises InvalidArgument, which names the line and never quotes a possible secret."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument("credentials", f"byte {error.start} is not UTF-8") from None
    if text.startswith(BOM):
        raise InvalidArgument("credentials", "begins with a byte-order mark: save it as UTF-8 without one")
    entries, owners = list[CredentialEntry](), dict[bytes | str, str]()
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].split():
            entries.append(_entry(words, number))
            _check_new(entries[-1], owners, number)
    if not entries:
        raise InvalidArgument("credentials", "has no entries, so no client could authenticate")
    return tuple(entries)


def check_tenant(tenant: str, field: str = "tenant") -> str:
    """Returns `tenant`. Raises InvalidArgument naming `field` for an invalid or reserved name."""
    if TENANT.fullmatch(tenant) is None or tenant in RESERVED:
        message = "must be 1 to 63 characters of a-z, 0-9, '-', the first and last a letter or digit"
        raise InvalidArgument(field, f"{message}, and not one of {', '.join(sorted(RESERVED))}")
    return tenant


def looks_secret(text: str) -> bool:
    """Whether the text may be a credential, which must not appear in messages."""
    return text.startswith(PREFIX) and len(text) >= MIN_SECRET


def _entry(words: list[str], number: int) -> CredentialEntry:
    for place, word in enumerate(words, 1):
        if looks_secret(word):
            message = "put the line of `longleaf credentials new` here"
            raise _bad(number, f"word {place} looks like a credential: {message}")
    if len(words) < 2 or words[1] not in get_args(Role):
        raise _bad(number, f"must be TENANT ROLE ...; a role is one of {', '.join(get_args(Role))}")
    try:
        tenant = check_tenant(words[0])
    except InvalidArgument as error:
        raise _bad(number, str(error)) from None
    digests, names, quotas = list[bytes](), list[str](), dict[str, int]()
    for place, word in enumerate(words[2:], 3):
        if found := _DIGEST.fullmatch(word):
            digests.append(bytes.fromhex(found[1]))
        elif _NAME.fullmatch(word):
            names.append(word)
        else:
            name, amount = _quota(word, f"word {place}", number)
            if name in quotas:
                raise _bad(number, f"word {place} repeats the quota {name}")
            quotas[name] = amount
    if "waiting" in quotas and "generations" not in quotas:
        raise _bad(number, "waiting=NUMBER requires generations=NUMBER")
    if not digests and not names:
        raise _bad(number, f"{tenant} needs a sha256:..., uri:... or dns:...")
    return CredentialEntry(
        tenant=tenant,
        role="admin" if words[1] == "admin" else "user",
        digests=tuple(digests),
        names=tuple(names),
        quotas=Quotas(**quotas),
    )


def _quota(word: str, which: str, number: int) -> tuple[str, int]:
    """A quota and its number. Raises InvalidArgument, which must not quote the word."""
    name, equals, amount = word.partition("=")
    if not equals:
        raise _bad(number, f"{which} is not sha256:HEX with 64 digits, uri:NAME, dns:NAME or QUOTA=NUMBER")
    if name not in Quotas.__struct_fields__:
        raise _bad(number, f"{which} is not one of the quotas {', '.join(Quotas.__struct_fields__)}")
    if _NUMBER.fullmatch(amount) is None:
        raise _bad(number, f"{which} must be {name}=NUMBER with 1 to 15 digits")
    return name, int(amount)


def _check_new(entry: CredentialEntry, owners: dict[bytes | str, str], number: int) -> None:
    """Adds the digests and names of an entry to `owners`. Raises InvalidArgument for a duplicate."""
    if entry.tenant in owners:
        raise _bad(number, f"tenant {entry.tenant} already has a line; put all its credentials on one line")
    for own in (entry.tenant, *entry.digests, *entry.names):
        if (owner := owners.setdefault(own, entry.tenant)) != entry.tenant:
            raise _bad(number, f"{entry.tenant} has a credential or a name that belongs to {owner}")


def _bad(number: int, message: str) -> InvalidArgument:
    return InvalidArgument("credentials", f"line {number}: {message}")
