"""The cost of durable contexts: restarts, losses with snapshots, parked contexts, and saving during other work."""
