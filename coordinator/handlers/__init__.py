"""Use cases: one call of a client, text in and text out. Independent of the engine and the wire protocol."""
