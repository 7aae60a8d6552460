"""Storage of context snapshots: named objects in a folder or an object store."""
