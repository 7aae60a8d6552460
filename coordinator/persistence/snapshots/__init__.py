"""Keys and values of contexts on storage: saving, notes about contexts, and deletion."""
