"""Latency and bandwidth: what each merge and each ring does, counted, and what that costs on a machine."""
