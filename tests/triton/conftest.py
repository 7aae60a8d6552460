"""Kernels of GPUs, run by Triton's interpreter on the CPU: `make test-triton`. It shows what they compute, and nothing
of races, of alignment, or of how fast they are."""

import triton

assert triton.knobs.runtime.interpret, "these tests need TRITON_INTERPRET=1 before triton is imported: make test-triton"
