"""Durable state of a service's contexts: names, paths and token ids, in one SQLite database per model."""
