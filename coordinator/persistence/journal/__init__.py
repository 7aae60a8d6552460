"""Stored state of generations, so that a restarted service can continue them."""
