"""Durable state: the catalog, the journal and the snapshots of a data folder."""
