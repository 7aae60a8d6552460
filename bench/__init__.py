"""Performance and accuracy measurements of the real service, compared with transformers. They are not tests.

Each program is `python -m bench.NAME`: a file, or a package with its own helpers. `harness` holds the shared code.
"""
