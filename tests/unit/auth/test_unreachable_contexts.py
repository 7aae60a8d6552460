"""Contexts that no credential opens."""

from coordinator.auth.credentials import unreachable


def test_tenants_with_contexts_but_without_credentials_are_named() -> None:
    ids = ("book", "moby", "acme/book", "bolt/a", "bolt/b")
    assert unreachable(ids, {"default", "acme", "bolt"}) == ()
    [bolt, default] = unreachable(ids, {"acme"})
    assert bolt == (
        "2 contexts (a, b) cannot be accessed: the tenant bolt has no credential. "
        "`longleaf credentials new bolt` prints one, and a line for the file of --credentials"
    )
    assert default == (
        "2 contexts (book, moby) cannot be accessed: the tenant default, the owner of contexts that were "
        "created without credentials, has no credential. "
        "`longleaf credentials new default` prints one, and a line for the file of --credentials"
    )
    assert unreachable(("acme/book",), {"bolt"})[0].startswith("1 context (book) cannot")
    assert unreachable([f"{i}" for i in range(7)], {"bolt"})[0].startswith("7 contexts (0, 1, 2, 3, 4 and 2 more)")
    assert unreachable([f"t{i}/book" for i in range(9)], {"bolt"})[-1] == "and 4 contexts of 4 other tenants"
