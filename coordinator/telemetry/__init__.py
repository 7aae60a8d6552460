"""Observability of a service: metrics, traces and logs."""
