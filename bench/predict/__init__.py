"""Latency and bandwidth: counts of the operations of each merge and ring, and their predicted cost on a machine."""
