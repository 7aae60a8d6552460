"""GPU kernels on a GPU: `make test-gpu PYTHON=python3`, with only torch and Triton, and with transformers also whole
steps.

Each check is a function that takes a place and raises AssertionError. The checks do not use pytest, which may be
missing; `tests/triton` runs the possible ones in Triton's interpreter, so that they are known to run before a GPU is
available.
"""
