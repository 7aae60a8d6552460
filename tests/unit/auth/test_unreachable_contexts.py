"""Contexts that no credential opens."""

from coordinator.auth.credentials import unreachable


def test_tenants_with_contexts_but_without_credentials_are_named() -> None:
    ids = ("book", "moby", "acme/book", "bolt/a", "bolt/b")
    assert unreachable(ids, {"default", "acme", "bolt"}) == ()
    message = "2 contexts of tenant {0} cannot be accessed: the tenant has no credential (longleaf credentials new {0})"
    assert unreachable(ids, {"acme"}) == (message.format("bolt"), message.format("default"))
    assert unreachable(("acme/book",), {"bolt"})[0].startswith("1 context of tenant acme")
    assert unreachable([f"t{i}/book" for i in range(9)], {"bolt"})[-1] == "and 4 contexts of 4 other tenants"
