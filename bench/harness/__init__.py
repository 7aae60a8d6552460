"""Shared parts of the measurements: models, machines, hosts, ranks, services, and the conversion of seconds to rows."""
