"""An Authenticator that uses a file of credentials."""

from collections.abc import Iterable, Mapping
from collections.abc import Set as AnySet
from hmac import compare_digest

from coordinator.auth.caller import Caller
from longleaf.credentials import CredentialEntry, digest_of, parse_credentials
from longleaf.errors import Unauthenticated
from longleaf.formatting import human_count, human_list
from longleaf.reloading_files import ReloadingFiles
from longleaf.tenants import DEFAULT_TENANT, name_of, tenant_of

MAX_NAMED = 5
"""Maximum number of tenants without credentials, and of contexts of each, that start-up notes list by name."""
HEADER = "authorization"
SCHEME = "bearer"


class Credentials:
    """Authenticates callers by a credential in the file, or by a name in their certificate. Removing an entry does not
    end running calls."""

    is_open = False

    def __init__(self, file: ReloadingFiles[tuple[CredentialEntry, ...]]) -> None:
        self._file = file
        self.num_refused = 0

    @classmethod
    def from_file(cls, path: str) -> "Credentials":
        """Raises InvalidArgument."""
        return cls(ReloadingFiles({"credentials": path}, parse_credentials))

    @property
    def num_failed_reloads(self) -> int:
        return self._file.num_failed_reloads

    @property
    def is_unusable(self) -> bool:
        """Whether the current content of the file is invalid."""
        return self._file.is_unusable

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants that can authenticate."""
        return frozenset(entry.tenant for entry in self._file.value)

    def authenticate(self, metadata: Mapping[str, str | bytes], names: Iterable[str]) -> Caller:
        """Identifies the caller; a credential takes precedence over a certificate. Raises Unauthenticated."""
        given = metadata.get(HEADER)
        if given is None:
            found = self._named(frozenset(names))
            message = (
                "this service requires a credential: give --credential-file FILE, set LONGLEAF_CREDENTIAL, or pass "
                "`credential`"
            )
        else:
            found = self._bearer(str(given))
            message = "unknown credential"
        if found is None:
            self.num_refused += 1
            raise Unauthenticated(message)
        is_alone = len(self._file.value) == 1
        return Caller(tenant=found.tenant, role=found.role, quotas=found.quotas, is_alone=is_alone)

    def _bearer(self, header: str) -> CredentialEntry | None:
        """The entry of a bearer credential. Runs in constant time: every digest is compared in full."""
        scheme, _, credential = header.partition(" ")
        if scheme.lower() != SCHEME:
            return None
        given, found = digest_of(credential.strip()), None
        for entry in self._file.value:
            for digest in entry.digests:
                if compare_digest(digest, given):
                    found = entry
        return found

    def _named(self, names: frozenset[str]) -> CredentialEntry | None:
        return next((entry for entry in self._file.value if names.intersection(entry.names)), None)


def unreachable(contexts: Iterable[str], tenants: AnySet[str]) -> tuple[str, ...]:
    """Start-up notes on contexts whose tenant has no credential, for instance after credentials were enabled for the
    first time."""
    lost = dict[str, list[str]]()
    for each in sorted(contexts):
        if (tenant := tenant_of(each)) not in tenants:
            lost.setdefault(tenant, []).append(name_of(each))
    names = sorted(lost)
    messages = [_describe_unreachable(name, lost[name]) for name in names[:MAX_NAMED]]
    if rest := names[MAX_NAMED:]:
        num_contexts = sum(len(lost[name]) for name in rest)
        messages.append(f"and {human_count(num_contexts, 'context')} of {len(rest):,} other tenants")
    return tuple(messages)


def _describe_unreachable(tenant: str, contexts: list[str]) -> str:
    listed = human_list(contexts, MAX_NAMED)
    origin = ", the owner of contexts that were created without credentials," if tenant == DEFAULT_TENANT else ""
    return (
        f"{human_count(len(contexts), 'context')} ({listed}) cannot be accessed: the tenant {tenant}{origin} has no "
        f"credential. `longleaf credentials new {tenant}` prints one, and a line for the file of --credentials"
    )
