"""The cost of durable contexts: restarts, losses with snapshots, evicted contexts, and saving during other work."""
