"""Keys and values of contexts on storage: what is saved when, what is told of contexts there, and what is deleted."""
