"""Methods that require the admin role."""

from coordinator.auth.caller import Caller
from longleaf.errors import PermissionDenied

ADMIN_METHODS = frozenset(f"/longleaf.v1.ClusterService/{name}" for name in ("VerifyCluster", "Drain", "RefillSlots"))
"""Methods that take ranks from other callers or end the service."""


def check_role(method: str, caller: Caller) -> None:
    """Raises PermissionDenied for a method that requires the admin role."""
    if method in ADMIN_METHODS and not caller.is_admin:
        name = method.rpartition("/")[2]
        raise PermissionDenied(f"{name} requires the role admin; this credential has the role {caller.role}")
