"""A service under an open loop of requests."""
