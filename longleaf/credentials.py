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
_NAME = re.compile(r"(?:uri|dns):\S+")
_NUMBER = re.compile(r"[0-9]{1,15}")
MIN_SECRET = len(PREFIX) + NUM_RANDOM_BYTES
"""Characters of what begins like a credential and is taken for one; tenants may be called alike."""
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


class CredentialEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant of the file."""

    tenant: str
    role: Role
    digests: tuple[bytes, ...] = ()
    """SHA-256 of its credentials."""
    names: tuple[str, ...] = ()
    """Names of client certificates, with what they are in front: `uri:` or `dns:`."""
    quotas: Quotas = Quotas()


def digest_of(credential: str) -> bytes:
    """What the file keeps of a credential: 32 bytes."""
    return hashlib.sha256(credential.encode()).digest()


def new_credential() -> str:
    """A credential that nobody can guess."""
    return PREFIX + secrets.token_urlsafe(NUM_RANDOM_BYTES)


def line_of(entry: CredentialEntry) -> str:
    """The line for the file."""
    quotas = {name: getattr(entry.quotas, name) for name in Quotas.__struct_fields__}
    parts = [entry.tenant, entry.role, *(f"sha256:{digest.hex()}" for digest in entry.digests), *entry.names]
    return "  ".join([*parts, *(f"{name}={value}" for name, value in quotas.items() if value is not None)])


def parse_credentials(data: bytes) -> tuple[CredentialEntry, ...]:
    """The entries of a file. Raises InvalidArgument naming the line, and never quoting what might be a secret."""
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
        raise InvalidArgument("credentials", "has no entries: nobody could come in")
    return tuple(entries)


def check_tenant(tenant: str, field: str = "tenant") -> str:
    """`tenant`. Raises InvalidArgument naming `field` where nobody may be called so."""
    if TENANT.fullmatch(tenant) is None or tenant in RESERVED:
        message = "must be 1 to 63 of a-z 0-9 -, a letter or digit first and last"
        raise InvalidArgument(field, f"{message}, and none of {', '.join(sorted(RESERVED))}")
    return tenant


def looks_secret(text: str) -> bool:
    """Whether that may be a credential itself, which belongs into no message."""
    return text.startswith(PREFIX) and len(text) >= MIN_SECRET


def _entry(words: list[str], number: int) -> CredentialEntry:
    for place, word in enumerate(words, 1):
        if looks_secret(word):
            message = "put the line of `longleaf credentials new` here"
            raise _bad(number, f"its word {place} looks like a credential itself: {message}")
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
        elif _NAME.fullmatch(word):
            names.append(word)
        else:
            name, amount = _quota(word, f"its word {place}", number)
            if name in quotas:
                raise _bad(number, f"its word {place} gives the quota {name} again")
            quotas[name] = amount
    if "waiting" in quotas and "generations" not in quotas:
        raise _bad(number, "waiting=NUMBER is for those beside generations=NUMBER, which is missing")
    if not digests and not names:
        raise _bad(number, f"{tenant} has no sha256:..., uri:... or dns:...: nobody could come in as it")
    return CredentialEntry(
        tenant=tenant,
        role="admin" if words[1] == "admin" else "user",
        digests=tuple(digests),
        names=tuple(names),
        quotas=Quotas(**quotas),
    )


def _quota(word: str, which: str, number: int) -> tuple[str, int]:
    """A quota and its number. Raises InvalidArgument, which may not quote the word."""
    name, equals, amount = word.partition("=")
    if not equals:
        raise _bad(number, f"{which} is no sha256:HEX of 64 digits, uri:NAME, dns:NAME or QUOTA=NUMBER")
    if name not in Quotas.__struct_fields__:
        raise _bad(number, f"{which} is none of the quotas {', '.join(Quotas.__struct_fields__)}")
    if _NUMBER.fullmatch(amount) is None:
        raise _bad(number, f"{which} must be {name}=NUMBER, of 1 to 15 digits alone")
    return name, int(amount)


def _check_new(entry: CredentialEntry, owners: dict[bytes | str, str], number: int) -> None:
    """Adds an entry to the owners of what tenants have. Raises InvalidArgument where it has what is another's."""
    if entry.tenant in owners:
        raise _bad(number, f"the tenant {entry.tenant} has a line already; all its credentials are on one line")
    for own in (entry.tenant, *entry.digests, *entry.names):
        if (owner := owners.setdefault(own, entry.tenant)) != entry.tenant:
            raise _bad(number, f"{entry.tenant} has a credential or a name that is {owner}'s")


def _bad(number: int, told: str) -> InvalidArgument:
    return InvalidArgument("credentials", f"line {number}: {told}")
