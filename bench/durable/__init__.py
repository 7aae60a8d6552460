"""What it takes that contexts last: restarts, losses with snapshots, parked contexts, saving beside work."""
