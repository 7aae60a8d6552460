"""Tenants: owners of contexts, generations and uploads.

Inside a service every id is scoped to its tenant: `acme/book` is the id of tenant acme's `book`. Ids of the tenant
`default` have no prefix, as in a service without tenants. Clients never see the prefix.
"""

import re

DEFAULT_TENANT = "default"
"""Owner of everything that was created without credentials."""
TENANT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SEPARATOR = "/"


def scoped(tenant: str, name: str) -> str:
    """The internal id of `name`, which has no slash, for `tenant`."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}{_SEPARATOR}{name}"


def tenant_of(scoped_id: str) -> str:
    """The owner of an id."""
    return scoped_id.rpartition(_SEPARATOR)[0] or DEFAULT_TENANT


def name_of(scoped_id: str) -> str:
    """The name without the tenant."""
    return scoped_id.rpartition(_SEPARATOR)[2]


def unscoped(text: str, tenant: str) -> str:
    """A message for `tenant`, in which the prefix of ids is removed."""
    if tenant == DEFAULT_TENANT:
        return text
    return re.sub(rf"(?<![a-z0-9-]){re.escape(tenant)}{_SEPARATOR}(?=[A-Za-z0-9])", "", text)
