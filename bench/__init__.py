"""Measurements of the real service against transformers. Nothing here is a test, and no test is timed.

Each program is `python -m bench.NAME`: a file, or a folder with what it alone needs. `harness` is what they share.
"""
