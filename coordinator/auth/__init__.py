"""Authentication of callers, their tenants, and the quotas of tenants."""
