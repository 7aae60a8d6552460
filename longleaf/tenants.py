"""Tenants: whose a context, a generation or an upload is.

Inside a service every id carries its tenant: `acme/book` is what the tenant acme calls `book`. Ids of the tenant
`default` stand alone, as those of a service without tenants do. Clients never see the tenant's part.
"""

import re

DEFAULT_TENANT = "default"
"""Whose everything is that was made without credentials."""
TENANT = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_SEPARATOR = "/"


def scoped(tenant: str, name: str) -> str:
    """The id inside the service of what `tenant` calls `name`, which has no slash."""
    return name if tenant == DEFAULT_TENANT else f"{tenant}{_SEPARATOR}{name}"


def tenant_of(scoped_id: str) -> str:
    """Whose an id is."""
    return scoped_id.rpartition(_SEPARATOR)[0] or DEFAULT_TENANT


def name_of(scoped_id: str) -> str:
    """What its tenant calls it."""
    return scoped_id.rpartition(_SEPARATOR)[2]


def unscoped(text: str, tenant: str) -> str:
    """A text for people of `tenant`, in which ids stand as they call them."""
    if tenant == DEFAULT_TENANT:
        return text
    return re.sub(rf"(?<![a-z0-9-]){re.escape(tenant)}{_SEPARATOR}(?=[A-Za-z0-9])", "", text)
