"""Measurements of the real service against transformers. Nothing here is a test, and no test is timed."""
