"""The kernels of GPUs on a GPU: `make test-gpu PYTHON=python3`, with nothing but torch and Triton, and with
transformers whole steps, too.

Each check is a function that is given a place and raises AssertionError. They are no tests of pytest's, which need not
be there; `tests/triton` runs those that can in Triton's interpreter, so that they are known to run before the day.
"""
