"""What is durable of a service's contexts: their names, paths and token ids, in one SQLite database per model."""
