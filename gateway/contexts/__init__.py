"""Contexts over HTTP."""
